"""Train with one method after the other and print the held-out losses; `methods.py quality` starts several of these.

    python benchmarks/quality_worker.py --prepare MODEL ROWS FOLDER        writes the model, the tokens and what to keep
    python benchmarks/quality_worker.py FOLDER                             reads jobs from stdin, one JSON line each

All methods train on the same packed tokens with the same step, loss, clipping and schedule of tunewell's engine, in
bf16 on a GPU. The peers are PEFT's layers on bitsandbytes' `Linear4bit`, and galore-torch's optimizer.
"""

import argparse
import json
import math
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from clock import RESULT
from loads import ALPHA, LINEARS, RANK
from torch import Tensor

from tunewell.config.schema import MethodSettings, Train
from tunewell.data.batches import DataOrder, make_batch, micro_batches
from tunewell.data.corpus.reader import Corpus, open_corpus
from tunewell.inference.runtime import measure_losses
from tunewell.methods.base import trainable_parameters
from tunewell.methods.full import Full
from tunewell.methods.lora import Lora
from tunewell.models import attention
from tunewell.models.load import LoadOptions, load_model
from tunewell.models.packed_forward import PackedModel
from tunewell.models.support import head_shape
from tunewell.records.plan import QuantizedBase
from tunewell.training.distributed import World
from tunewell.training.optimizers.base import Optimizer, Scaler, Update, guard_gradients, rate_at
from tunewell.training.quantization import BaseQuantizer
from tunewell.training.step import TrainableModel

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
PRECISION, DTYPE = ("bf16", torch.bfloat16) if HAS_GPU else ("fp32", torch.float32)
GALORE_EVERY = 80
"""Steps between two refreshes; galore-torch refreshes all bases in step 0 too."""


def prepare_folder(model: str, rows: Path, folder: Path, held_out: float) -> None:
    """Write the model as transformers reads it and the corpus, and choose the layers that `method.keep: auto` keeps."""
    from tunewell.workflows.prepare import prepare

    prepare(model=model, data=str(rows), out=folder / "corpus", sets=[f"data.held_out={held_out}"])
    corpus = open_corpus(folder / "corpus")
    plain = load_model(LoadOptions(model, corpus.path / "tokenizer", torch.device("cpu"), torch.float32)).model
    plain.save_pretrained(folder / "model")
    attention.register()
    losses: dict[str, Any] = {"base": held_out_loss(_frozen(_load(folder, corpus), corpus), corpus)}
    for kind, is_automatic in (("int8", False), ("nf4", False), ("nf4", True)):
        model_on_cpu = _load(folder, corpus, device=torch.device("cpu"))
        measured = lambda own=model_on_cpu: measure_losses(_frozen(own, corpus), corpus.held_out, most=256).mean()  # noqa: E731
        quantizer = BaseQuantizer(model_on_cpu, kind, DEVICE, measured)
        base = quantizer.quantize(
            QuantizedBase(kind=kind),
            is_automatic=is_automatic,
            world=World(),  # type: ignore[arg-type]
        )
        losses[f"{kind} keep auto" if is_automatic else kind] = {"cost": base.cost, "keep": base.keep}
        if is_automatic:
            (folder / "keep.json").write_text(json.dumps(base.keep))
    lengths = corpus.index["length"]
    about = {"rows": len(corpus), "held_out_rows": len(corpus.held_out), "mean_length": float(lengths.mean())}
    print(RESULT + json.dumps(losses | about), flush=True)


def _load(
    folder: Path, corpus: Corpus, *, quantized: QuantizedBase | None = None, is_fp32: bool = False, device: Any = DEVICE
) -> Any:
    dtype = torch.float32 if is_fp32 else DTYPE
    kernel = attention.FLASH if HAS_GPU else attention.SDPA
    options = LoadOptions(
        str(folder / "model"),
        corpus.path / "tokenizer",
        device,
        dtype,
        attention=kernel,
        longest_document=_longest(corpus),
        quantized=quantized,
    )
    return load_model(options).model


def _frozen(model: Any, corpus: Corpus) -> PackedModel:
    return PackedModel(model, PRECISION, _longest(corpus), head=head_shape(model))


def _packed(model: Any, corpus: Corpus, settings: Train | None = None) -> TrainableModel:
    return TrainableModel(model, PRECISION, _longest(corpus), settings=settings or Train(), head=head_shape(model))


def _longest(corpus: Corpus) -> int:
    return max(int(split.index["length"].max()) for split in (corpus, corpus.held_out))


def held_out_loss(learner: PackedModel, corpus: Corpus) -> float:
    """Return the mean loss of a supervised token of all held-out rows."""
    return measure_losses(learner, corpus.held_out, most=None).mean()


def _peft_layers(folder: Path, corpus: Corpus, seed: int) -> Any:
    """Return the model with bitsandbytes' 4-bit layers and PEFT's adapter, which starts from our numbers."""
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPE,
    )
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder / "model",
        dtype=DTYPE,
        quantization_config=how,
        attn_implementation=attention.FLASH if HAS_GPU else attention.SDPA,
        device_map={"": 0 if HAS_GPU else "cpu"},
    )
    model.requires_grad_(False)
    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=list(LINEARS))
    inject_adapter_in_model(settings, model)
    ours = _load(folder, corpus, device=torch.device("cpu"))
    Lora.apply(ours, MethodSettings(rank=RANK, alpha=ALPHA), seed=seed)
    start = {name: own.detach() for name, own in trainable_parameters(ours).items()}
    with torch.no_grad():
        for name, own in model.named_parameters():
            if own.requires_grad:
                own.data = start[name.replace(".default.weight", "")].to(own.device, torch.float32)
    return model


class GaloreTorch(Optimizer):
    """galore-torch's `GaLoreAdamW` behind the interface of our engine, with the same matrices projected as ours."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter], settings: Train, projected: set[str]) -> None:
        super().__init__(parameters, settings)
        from galore_torch import GaLoreAdamW

        low = {"rank": settings.galore_rank, "update_proj_gap": settings.galore_every, "scale": settings.galore_scale}
        groups = [
            {"params": [own for name, own in parameters.items() if name in projected], **low, "proj_type": "std"},
            {"params": [own for name, own in parameters.items() if name not in projected]},
        ]
        betas = (settings.adam_beta1, settings.adam_beta2)
        self._inner = GaLoreAdamW(groups, lr=1.0, betas=betas, eps=settings.adam_epsilon, no_deprecation_warning=True)

    def update(
        self, *, rate: float, max_norm: float | None, loss: Tensor, scaler: Scaler, norm_limit: float = math.inf
    ) -> Update:
        """Clip the gradients and take a step."""
        grads = self.gradients()
        guard = guard_gradients(grads.values(), loss=loss, scaler=scaler, max_norm=max_norm, norm_limit=norm_limit)
        for grad in grads.values():
            grad.mul_(guard.shrink)
        for group in self._inner.param_groups:
            group["lr"] = rate
        self._inner.step()
        self.zero_grad()
        return Update(guard.norm, guard.was_skipped)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return nothing: no checkpoint is written."""
        return {}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Do nothing."""

    def move(self, device: str) -> None:
        """Do nothing."""


def build(method: str, folder: Path, corpus: Corpus, *, rate: float, seed: int) -> TrainableModel:
    """Return the model that a method trains, with its optimizer."""
    optimizer = {"adamw8bit": "adamw8bit", "galore": "galore", "galore-torch": "galore"}.get(method, "adamw")
    width = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))["hidden_size"]
    settings = Train.model_validate(
        {
            "learning_rate": rate,
            "optimizer": optimizer,
            "masters": "bf16" if method == "adamw-bf16" else "fp32",
            "galore_every": GALORE_EVERY,
            "galore_rank": min(128, width // 4),
        }
    )
    if method in ("adamw", "adamw-bf16", "adamw8bit", "galore", "galore-torch"):
        model = _load(folder, corpus, is_fp32=method != "adamw-bf16")
        Full.apply(model, MethodSettings(kind="full"))
        learner = _packed(model, corpus, settings)
        if method == "galore-torch":
            ours: Any = learner.optimizer
            projected = set(ours.projected)
            for name in projected:  # without our hooks, which take the gradients away
                learner.parameters[name]._post_accumulate_grad_hooks.clear()
            learner.optimizer = GaloreTorch(learner.parameters, settings, projected)
        return learner
    if method == "nf4-peft":
        # Without `head_shape`: on some CPUs, a pass in evaluation mode repacks the weights of `Linear4bit`, and later
        # gradients are wrong.
        model = _peft_layers(folder, corpus, seed).train()
        return TrainableModel(model, PRECISION, _longest(corpus), settings=settings)
    kind = {"int8": "int8", "nf4": "nf4", "nf4-keep": "nf4"}.get(method)
    keep = json.loads((folder / "keep.json").read_text()) if method == "nf4-keep" else []
    quantized = None if kind is None else QuantizedBase.model_validate({"kind": kind, "keep": keep})
    model = _load(folder, corpus, quantized=quantized)
    Lora.apply(model, MethodSettings(rank=RANK, alpha=ALPHA), seed=seed)
    return _packed(model, corpus, settings)


def train_job(folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Train with one method, rate and seed, and return the held-out loss."""
    corpus, begun = _corpus(folder), time.perf_counter()
    learner = build(job["method"], folder, corpus, rate=job["rate"], seed=job["seed"])
    order = DataOrder(corpus.index["length"].astype("int64"), job["seed"], "quality", job["step_tokens"])
    steps, result = job["steps"], None
    for number in range(steps):
        groups = micro_batches(order.step(number).documents, order.lengths, job["step_tokens"])
        rate = rate_at(number, num_steps=steps, warmup_steps=max(1, steps // 20), peak=job["rate"], schedule="cosine")
        result = learner.take_step([make_batch(corpus, group) for group in groups], number=number, rate=rate)
        if number % 16 == 0:
            result.read()  # so that this process is never far ahead of the GPU
    assert result is not None
    last, norm, was_skipped, _ = result.read()
    trained = time.perf_counter() - begun
    return {
        "held_out_loss": held_out_loss(learner, corpus),
        "last_loss": last,
        "last_norm": norm,
        "was_skipped": was_skipped,
        "seconds": trained,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if HAS_GPU else 0.0,
    }


@cache
def _corpus(folder: Path) -> Corpus:
    return open_corpus(folder / "corpus")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with methods that are read from stdin.")
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--prepare", nargs=3, metavar=("MODEL", "ROWS", "FOLDER"))
    parser.add_argument("--held-out", type=float, default=0.07)
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    if wanted.prepare:
        model, rows, folder = wanted.prepare
        prepare_folder(model, Path(rows), Path(folder), wanted.held_out)
        return
    attention.register()
    for line in sys.stdin:
        try:
            result = train_job(wanted.folder, json.loads(line))
        except Exception as error:  # noqa: BLE001  the next job may work
            result = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        if HAS_GPU:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        print(RESULT + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
