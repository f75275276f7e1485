"""Train one case with TRL, in the setting that is fastest for it; `gpu.py` starts this in a fresh process.

    python benchmarks/gpu_peers.py 1.1b trl-liger

Best-fit packing without padding, flash kernel, fused AdamW, nothing recomputed, workers for the data, no checkpoints.
"""

import argparse
import os
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
warnings.filterwarnings("ignore")

from clock import Clock  # noqa: E402
from loads import (  # noqa: E402
    ALPHA,
    CASES,
    LINEARS,
    LONGEST,
    RANK,
    VARIANTS,
    Case,
    Shape,
    Variant,
    draw_documents,
)

CONTENDERS = ("trl", "trl-liger")
LOG_STEPS = 5
WEIGHTS = "TUNEWELL_BENCH_WEIGHTS"
"""Names a folder for drawn weights that several processes load. Without it, each process writes and removes its own."""


def word_tokenizer(vocabulary: int) -> Any:
    """Make a tokenizer that has so many words; TRL asks for one, and nothing is tokenised."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(vocabulary)}, unk_token="t3"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="t1", eos_token="t2", pad_token="t0", unk_token="t3"
    )


def random_model(shape: Shape, attention: str, *, is_fp32: bool = False) -> Any:
    """Draw a model's weights on the device: bf16 on a GPU, fp32 elsewhere or if wanted."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    has_gpu = torch.cuda.is_available()
    with torch.device("cuda" if has_gpu else "cpu"):
        return AutoModelForCausalLM.from_config(
            shape.config(),
            dtype=torch.bfloat16 if has_gpu and not is_fp32 else torch.float32,
            attn_implementation=attention,
        )


def weights_folder(shape: Shape) -> Path:
    """Return the folder for the weights of a shape: one that later processes find too if they were told of it."""
    if WEIGHTS not in os.environ:
        return Path(tempfile.mkdtemp())
    return Path(os.environ[WEIGHTS]) / f"{shape.hidden}x{shape.layers}"


class CountedSvd:
    """Replaces galore-torch's SVD of most matrices by a random basis, and adds up what the SVDs would take.

    One SVD of each shape is computed and timed; the basis does not change the time of a step. All SVDs of a model of
    1.1 B parameters would take minutes.
    """

    def __init__(self) -> None:
        self.seconds: dict[tuple[int, ...], float] = {}
        self.total = 0.0

    def install(self) -> None:
        """Patch galore-torch in this process."""
        import torch
        from galore_torch.galore_projector import GaLoreProjector

        exact = GaLoreProjector.get_orthogonal_matrix

        def find(own: Any, weights: Any, rank: int, type: str) -> Any:
            shape = tuple(weights.shape)
            if shape not in self.seconds:
                for _ in range(2):  # the first one also loads the solver
                    wait()
                    begun = time.perf_counter()
                    basis = exact(own, weights, rank, type)
                    wait()
                    self.seconds[shape] = time.perf_counter() - begun
            else:
                drawn = torch.randn(min(shape), rank, device=weights.device)
                basis = torch.linalg.qr(drawn).Q.to(weights.dtype)
                basis = basis.T.contiguous() if type == "right" else basis
            self.total += self.seconds[shape]
            return basis

        def wait() -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()

        GaLoreProjector.get_orthogonal_matrix = find


def optimizer_settings(case: Case, variant: Variant, *, has_gpu: bool) -> dict[str, Any]:
    """Return the settings of TRL for the optimizer of a variant."""
    if variant.optimizer == "galore":
        rank = min(128, case.shape.hidden // 4)
        return {
            "optim": "galore_adamw",
            "optim_target_modules": [r".*self_attn.*", r".*mlp.*"],
            "optim_args": f"rank={rank}, update_proj_gap=200, scale=0.25",
        }
    plain = "adamw_torch_fused" if has_gpu else "adamw_torch"
    return {"optim": "adamw_8bit" if variant.optimizer == "adamw8bit" else plain}


def quantized_model(shape: Shape, attention: str, kind: str) -> Any:
    """Write a drawn model to disk and load it quantised by bitsandbytes, as people do."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    folder = weights_folder(shape)
    if not (folder / "config.json").is_file():
        random_model(shape, "sdpa").save_pretrained(folder)
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.empty_cache()
    dtype = torch.bfloat16 if has_gpu else torch.float32
    how = BitsAndBytesConfig(load_in_8bit=True)
    if kind == "nf4":
        how = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation=attention,
        quantization_config=how,
        device_map={"": 0 if has_gpu else "cpu"},
    )
    if WEIGHTS not in os.environ:
        shutil.rmtree(folder)
    if has_gpu:
        torch.cuda.reset_peak_memory_stats()
    return model


def train(case_name: str, contender: str, started_at: float, variant: Variant) -> None:
    """Train the case and report; the clock is read in TRL's own callback."""
    import torch
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    case = variant.case(case_name)
    has_gpu = torch.cuda.is_available()
    clock = Clock(case.marks, started_at)
    kernel = "flash_attention_2" if has_gpu else "sdpa"
    if variant.quantize == "none":
        model = random_model(case.shape, kernel, is_fp32=variant.kind == "full")
    else:
        model = quantized_model(case.shape, kernel, variant.quantize)
    dataset = draw_documents(case).as_dataset()
    adapter = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        target_modules=list(LINEARS),
        use_dora=variant.kind == "dora",
    )
    config = SFTConfig(
        tempfile.mkdtemp(),
        max_steps=case.num_steps,
        per_device_train_batch_size=case.step_tokens // LONGEST,
        packing=True,
        max_length=LONGEST,
        learning_rate=variant.learning_rate,
        lr_scheduler_type="constant",
        **optimizer_settings(case, variant, has_gpu=has_gpu),
        max_grad_norm=1.0,
        bf16=has_gpu,
        use_cpu=not has_gpu,
        use_liger_kernel=contender == "trl-liger",
        gradient_checkpointing=variant.recompute != "off",
        dataloader_num_workers=4 if has_gpu else 0,
        logging_steps=LOG_STEPS,
        logging_first_step=True,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
    )

    class Marks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            clock.step(state.global_step, trainer._total_train_tokens)

    svd = CountedSvd()
    if variant.optimizer == "galore":
        svd.install()
    clock.call()
    trainer = SFTTrainer(
        model,
        args=config,
        train_dataset=dataset,
        processing_class=word_tokenizer(case.shape.vocabulary),
        peft_config=None if variant.kind == "full" else adapter,
        callbacks=[Marks()],
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    clock.report(
        losses=[[entry["step"], entry["loss"]] for entry in logs],
        grad_norms=[float(entry["grad_norm"]) for entry in logs],
        state_bytes=state_bytes(trainer.optimizer),
        svd_seconds=svd.total,
        one_svd_seconds={str(shape): seconds for shape, seconds in svd.seconds.items()},
    )


def state_bytes(optimizer: Any) -> int:
    """Count the bytes of an optimizer's states, GaLore's bases included."""
    import torch

    inner = getattr(optimizer, "optimizer", optimizer)
    parts = [value for state in inner.state.values() for value in state.values()]
    parts += [value.ortho_matrix for value in parts if hasattr(value, "ortho_matrix")]
    return sum(value.nbytes for value in parts if torch.is_tensor(value))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one case with TRL and print what was measured.")
    parser.add_argument("case", choices=CASES)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--variant", choices=VARIANTS, default="lora")
    parser.add_argument("--started-at", type=float, default=time.time())
    wanted = parser.parse_args()
    train(wanted.case, wanted.contender, wanted.started_at, VARIANTS[wanted.variant])


if __name__ == "__main__":
    main()
