"""On CUDA, with real memory: what does not fit is taken again smaller, and a weight that goes bad is named.

A cap on what this process may allocate stands for a smaller card; the errors are the allocator's own.
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import Remembering, make_plan
from transformers import LlamaConfig, LlamaForCausalLM

from tunewell.config.schema import Config
from tunewell.data.batches import DataOrder
from tunewell.inference.decoder import Decoding
from tunewell.inference.generate import generate
from tunewell.methods.lora import Lora
from tunewell.models import attention
from tunewell.records.events import EventLog
from tunewell.records.healing import HEALING, read_healing
from tunewell.training.checkpoints import Checkpoints
from tunewell.training.engine import train
from tunewell.training.faults import parse_faults
from tunewell.training.health import RunContext
from tunewell.training.recovery import HealingState
from tunewell.training.run import Run
from tunewell.training.step import TrainableModel

pytestmark = pytest.mark.gpu
VOCABULARY = 32_000
STEPS = 18
GIB = 2**30


class Documents:
    """Documents of few words, so that there is something to learn; some may be long."""

    def __init__(self, lengths: list[int]) -> None:
        draw = np.random.default_rng(0)
        self.rows = []
        for length in lengths:
            ids = draw.integers(0, 300, length).astype(np.int32)
            labels = ids.copy()
            labels[: length // 3] = -100
            self.rows.append((ids, labels))
        self.index: dict[str, Any] = {"length": np.array(lengths), "supervised": np.array(lengths) - 1}

    def __len__(self) -> int:
        return len(self.rows)

    def arrays(self, index: int) -> tuple[Any, Any]:
        return self.rows[index]


def _model() -> Any:
    attention.register()
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=65_536,
    )
    model = LlamaForCausalLM(shape).to("cuda", torch.bfloat16)
    model.set_attn_implementation(attention.FLASH)
    return model


def _run(folder: Path, lengths: list[int], *, compiling: str = "off", faults: str | None = None, **plan: Any) -> Run:
    config = Config.model_validate({"method": {"rank": 8}, "train": {"compile": compiling}})
    decided = make_plan(
        device="cuda:0",
        precision="bf16",
        attention="flash",
        learning_rate=1e-3,
        num_steps=STEPS,
        batch_documents=None,
        batch_tokens=32_768,
        compile=compiling,
        evaluate_every=12,
        save_every=6,
        **plan,
    )
    model = _model()
    method = Lora.apply(model, config.method, seed=0)
    documents = Documents(lengths)
    listener = Remembering()
    folder.mkdir()
    return Run(
        plan=decided,
        config=config,
        learner=TrainableModel(
            model, "bf16", max(lengths), settings=config.train, hooks=parse_faults(faults, is_allowed=True)
        ),
        order=DataOrder(documents.index["length"].astype("int64"), 0, "c", batch_tokens=32_768),
        documents=documents,
        held_out=Documents([200] * 16),
        checkpoints=Checkpoints(folder / "checkpoints", keep=2, on_trouble=listener.notes.append),
        events=EventLog(folder / "events.jsonl"),
        samples=EventLog(folder / "samples.jsonl"),
        healing=HealingState(folder / HEALING),
        listener=listener,
        method=method,
        load_weights=lambda: dict(_model().named_parameters()),
        about=RunContext(vocab_size=VOCABULARY, precision="bf16", device="cuda", max_grad_norm=1.0),
    )


def _compilings(run: Run) -> list[str]:
    assert isinstance(run.listener, Remembering)
    return [words for words in run.listener.notes if words.startswith("compiling")]


def _losses(run: Run) -> list[float]:
    assert isinstance(run.listener, Remembering)
    return [event.loss for event in run.listener.steps]


@pytest.fixture
def small_card() -> Iterator[Any]:
    """Let this process have so many GiB, until the test is over."""
    gc.collect()  # what the last test left must not be in what this one measures
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory

    def cap(gib: float) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(gib * GIB / total)

    yield cap
    torch.cuda.set_per_process_memory_fraction(1.0)


def _peak_gib(run: Run) -> float:
    torch.cuda.reset_peak_memory_stats()
    train(run)
    return torch.cuda.max_memory_allocated() / GIB


@pytest.mark.parametrize(
    ("compiling", "tokens"), [("off", 32_768), ("on", 32_768), ("on", 8192)], ids=["eager", "compiled", "graphs"]
)
def test_a_budget_four_times_too_large(tmp_path: Path, small_card: Any, compiling: str, tokens: int) -> None:
    """What a quarter of the planned tokens needs is all there is; memory may run short while graphs are recorded."""
    lengths = [256] * 1024
    fits = _run(tmp_path / "fits", lengths, micro_batch_tokens=tokens // 4)
    peak = _peak_gib(fits)
    small_card(peak * 1.15)
    run = _run(tmp_path / "run", lengths, micro_batch_tokens=tokens, compiling=compiling)
    assert train(run).status == "finished"
    assert _losses(run) == pytest.approx(_losses(fits), rel=2e-2)
    actions = [entry.action for entry in read_healing(tmp_path / "run")]
    assert set(actions) == {"split"} and tokens // 8 <= (run.healing.limits.micro_batch_tokens or 0) <= tokens // 2
    assert any("CUDA graphs" in words for words in _compilings(run)) is (compiling == "on")


@pytest.mark.parametrize("compiling", ["off", "on"])
def test_one_document_far_longer_than_the_rest(tmp_path: Path, small_card: Any, compiling: str) -> None:
    """It fits with its layers computed twice, and the steps around it are taken as planned.

    Compiled layers of this size are in graphs, and what these keep is given back for it.
    """
    lengths = [256] * 1000 + [24_576]
    whole = _run(tmp_path / "whole", lengths, micro_batch_tokens=8192)
    assert train(whole).status == "finished"
    usual = _peak_gib(_run(tmp_path / "usual", [256] * 1024, micro_batch_tokens=8192))
    small_card(usual * 1.3)
    run = _run(tmp_path / "run", lengths, micro_batch_tokens=8192, compiling=compiling)
    assert train(run).status == "finished"
    if compiling == "on":
        graphs = ["CUDA graphs" in words for words in _compilings(run)]
        assert graphs == [True, False] and not run.learner.may_use_graphs
    assert _losses(run) == pytest.approx(_losses(whole), rel=2e-2)
    assert "recompute" in [entry.action for entry in run.healing.entries]
    assert run.healing.limits.micro_batch_tokens is None and not run.learner.model.is_gradient_checkpointing


def test_answers_that_are_too_many_at_once(tmp_path: Path, small_card: Any) -> None:
    lengths = [256] * 1024
    whole = _run(tmp_path / "whole", lengths, micro_batch_tokens=8192)
    peak = _peak_gib(whole)
    small_card(peak * 1.2)
    run = _run(tmp_path / "run", lengths, micro_batch_tokens=8192)
    asked: list[tuple[int, int]] = []

    def ask(step: int, batch_tokens: int) -> list[Any]:
        number = max(1, batch_tokens // 2)
        asked.append((step, number))
        prompts = [list(range(5, 400))] * number
        generate(
            run.learner.model,
            prompts,
            max_new_tokens=4,
            stop_ids=[],
            decoding=Decoding(batch_tokens=404 * number),
        )
        return []

    run.ask = ask
    assert train(run).status == "finished"
    assert asked[0] == (0, 4096) and asked[1][0] == 0 and len(asked) < 8
    assert _losses(run) == pytest.approx(_losses(whole), rel=2e-2)


@pytest.mark.parametrize(
    ("compiling", "tokens"), [("off", 16_384), ("on", 16_384), ("on", 8192)], ids=["eager", "compiled", "graphs"]
)
def test_a_weight_poisoned_at_a_step_is_named_and_healed(tmp_path: Path, compiling: str, tokens: int) -> None:
    lengths = [256] * 1024
    clean = _run(tmp_path / "clean", lengths, micro_batch_tokens=tokens, compiling=compiling)
    train(clean)
    assert any("CUDA graphs" in words for words in _compilings(clean)) is (tokens == 8192)
    name = "model.layers.2.mlp.down_proj.base_layer.weight"
    run = _run(
        tmp_path / "run",
        lengths,
        micro_batch_tokens=tokens,
        compiling=compiling,
        faults=f"nan@weights:step=14,name={name}",
    )
    assert train(run).status == "finished"
    [entry] = read_healing(tmp_path / "run")
    assert (entry.step, entry.place, entry.action) == (15, f"weight `{name}`", "rewind")
    assert entry.numbers["step_documents"] == [int(document) for document in run.order.step(14).documents][:50]
    assert _losses(run)[-1] == pytest.approx(_losses(clean)[-1], rel=0.01)


def test_fp32_is_the_last_remedy_and_works(tmp_path: Path) -> None:
    """From bf16 with flash and compiled layers to fp32 with SDPA, between two steps."""
    run = _run(tmp_path / "run", [256] * 256, micro_batch_tokens=8192, compiling="on")
    batches = run.documents
    train(run)
    before = _losses(run)[-1]
    run.learner.change(precision="fp32", device=None)
    run.progress.step = 0
    again = _run(tmp_path / "again", [256] * 256, micro_batch_tokens=8192)
    again.learner = run.learner
    train(again)
    assert len(batches) and all(p.dtype == torch.float32 for p in run.learner.model.parameters())
    assert _losses(again)[0] < before * 1.2
