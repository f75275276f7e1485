"""Workloads of known runs, made without a model or a corpus."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tunewell.config.load import LoadedConfig, with_changes
from tunewell.config.schema import Config
from tunewell.machine.cards import find_card
from tunewell.machine.facts import DeviceFacts
from tunewell.model_files.shape import Linear, ModelShape
from tunewell.planning.recommendation import recommend_settings
from tunewell.planning.workload import Workload
from tunewell.records.manifest import RowsRecord
from tunewell.records.plan import Plan

SIZES = {
    "23m": (384, 1024, 8, 6, 6, 32_768, True),
    "135m": (576, 1536, 30, 9, 3, 49_152, True),
    "1.1b": (2048, 5632, 22, 32, 4, 32_000, False),
    "8b": (4096, 14_336, 32, 32, 8, 128_256, False),
}


def shape_of(name: str) -> ModelShape:
    """Return the shape of a Llama-like model."""
    hidden, inner, layers, heads, kv_heads, vocab, is_tied = SIZES[name]
    keys = hidden // heads * kv_heads
    own = [("q_proj", hidden, hidden), ("k_proj", hidden, keys), ("v_proj", hidden, keys), ("o_proj", hidden, hidden)]
    own += [("gate_proj", hidden, inner), ("up_proj", hidden, inner), ("down_proj", inner, hidden)]
    linears = tuple(Linear(part, layer, a, b) for layer in range(layers) for part, a, b in own)
    return ModelShape(hidden, inner, layers, heads, kv_heads, hidden // heads, vocab, is_tied, linears)


ROWS = RowsRecord(num_rows=150, mean_tokens=60, mean_supervised=15, task="facts", because="a test")


def recommended(given: Config | LoadedConfig, num_parameters: int | None = 134_515_008) -> LoadedConfig:
    """Return a config in which the values for `ROWS` replace `auto`."""
    loaded = given if isinstance(given, LoadedConfig) else LoadedConfig(given, Path(), None, {})
    found = recommend_settings(ROWS, num_parameters, loaded.config)
    changed = with_changes(loaded.config, {key: own.value for key, own in found.items()})
    return replace(loaded, config=changed, reasons={key: own.because for key, own in found.items()})


def workload(
    name: str,
    *,
    tokens: int = 16_384,
    device: DeviceFacts | None = None,
    compiling: str = "on",
    precision: str = "bf16",
    num_steps: int = 100,
    **settings: Any,
) -> Workload:
    """Return the workload of a benchmark: documents of 16 to 1,024 tokens, 60% of them supervised."""
    config = recommended(Config.model_validate(settings)).config
    random = np.random.default_rng(0)
    steps = [np.clip(random.lognormal(np.log(150), 0.66, 300).astype(np.int64), 16, 1024) for _ in range(8)]
    steps = [step[np.cumsum(step) <= tokens] for step in steps]
    device = device or find_card("h200").facts()
    quantize = config.method.quantize
    chosen: dict[str, Any] = {
        "device": device.name,
        "precision": precision,
        "attention": "flash" if device.kind == "cuda" else "sdpa",
        "threads": 2,
        "method": config.method.kind,
        "learning_rate": 1e-4,
        "schedule": "constant",
        "warmup_steps": 0,
        "num_steps": num_steps,
        "epochs": 1.0,
        "batch_tokens": tokens,
        "batch_documents": None,
        "micro_batch_tokens": tokens,
        "compile": compiling,
        "evaluate_every": num_steps,
        "save_every": num_steps,
    }
    known = {"made_by": "a test", "model": name, "corpus": "", "corpus_sha256": "", "tokenizer_sha256": ""}
    plan = Plan.model_validate(
        known
        | {"template_sha256s": [], "seed": 0, "config": {}}
        | {key: {"value": value, "because": "a test"} for key, value in chosen.items()}
        | {"quantized": None if quantize == "none" else {"kind": quantize}}
    )
    return Workload(
        shape=shape_of(name),
        config=config,
        plan=plan,
        device=device,
        lengths=np.concatenate(steps),
        step_lengths=tuple(steps),
        supervised_share=0.6,
        held_out_lengths=np.zeros(0, np.int64),
        micro_tokens=tokens,
    )
