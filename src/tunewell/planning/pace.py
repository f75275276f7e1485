"""Expected times of commands that load a finished model: `export`, `validate` and `verify`. No torch is imported.

The constants are rough fits on two cores of an AMD EPYC with SmolLM2-135M. They only have to be roughly right: the
screen corrects the time left as stages end (`core.progress.Timetable`).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from tunewell.core.errors import UserError
from tunewell.machine.facts import cpu_flops, usable_cores
from tunewell.model_files.facts import read_facts
from tunewell.planning.workload import EVERYDAY_TOKENS

IMPORT_SECONDS = 5.0
"""Importing torch and transformers."""
_FORWARD_SHARE = 0.5
"""The share of the rate of large matrix products that a forward pass over short texts reaches."""
_BYTES_PER_SECOND = 8e9
_PROBE_TOKENS, _MERGE_TOKENS, _ANSWERS, _ANSWER_TOKENS = 1_500, 200, 8, 24
# Seconds per weight on one core.
_LOAD, _SKETCH, _ENCODE, _ROUND, _COMPARE, _HASH = 17e-9, 9e-9, 6e-9, 13e-9, 11e-9, 2e-9


@dataclass(frozen=True)
class Pace:
    """The speed of this machine with one model on its CPU."""

    num_weights: int
    flops: float
    """The rate of matrix products that other processes leave."""
    cores: int
    busy: float = 1.0
    """How many processes share a core."""

    @classmethod
    def of(cls, model: str) -> "Pace | None":
        """Return the pace of a model, or None if its size is unknown."""
        try:
            number = read_facts(model).num_parameters
        except (UserError, OSError, ValueError):
            return None
        cores = usable_cores()
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        return cls(number, cpu_flops(), cores, max(1.0, load / cores)) if number else None

    def start(self) -> float:
        """Return the seconds to import torch and transformers."""
        return IMPORT_SECONDS * self.busy

    def load(self) -> float:
        """Return the seconds to load the weights."""
        return self.busy + self.on_one_core(_LOAD)

    def forward(self, tokens: float) -> float:
        """Return the seconds of forward passes over texts."""
        return 2.0 * self.num_weights * tokens / (_FORWARD_SHARE * self.flops)

    def answers(self, number: int, *, prompt: float, tokens: float) -> float:
        """Return the seconds to answer prompts together, with `tokens` new tokens each."""
        step = 4.0 * self.num_weights * self.busy / _BYTES_PER_SECOND + self.forward(number)
        return self.forward(number * prompt) + tokens * step

    def on_all_cores(self, seconds_per_weight: float) -> float:
        """Return the seconds of work on every weight that is divided among the cores."""
        return self.on_one_core(seconds_per_weight) / self.cores

    def on_one_core(self, seconds_per_weight: float) -> float:
        """Return the seconds of work on every weight on one core."""
        return self.num_weights * seconds_per_weight * self.busy


def export_seconds(model: str, targets: Sequence[str], formats: Sequence[str]) -> dict[str, float]:
    """Return the expected seconds of the stages of an export, by the first words of their text."""
    pace = Pace.of(model)
    if pace is None:
        return {}
    logits = pace.forward(_PROBE_TOKENS)
    answers = pace.answers(_ANSWERS, prompt=45, tokens=_ANSWER_TOKENS)
    stages = {
        "importing": pace.start(),
        "loading": pace.load(),
        "computing": logits,
        "answering": answers,
        "sketching": pace.on_all_cores(_SKETCH),
    }
    if "adapter" in targets:
        stages["writing the adapter"] = 0.2
    stages |= {"checking": pace.forward(_MERGE_TOKENS) + pace.on_all_cores(_SKETCH)}
    if "merged" in targets:
        stages["writing the merged"] = pace.on_one_core(_LOAD) / 2
    files = formats if {"gguf", "ollama"} & set(targets) else ()
    if files:
        stages |= {"writing": len(files) * pace.on_all_cores(_ENCODE + _HASH)}
        stages |= {"rounding": len(files) * pace.on_all_cores(_ROUND), "deriving": 0.5}
    for name in ("adapter", "merged"):
        if name in targets:
            stages[f"verifying {name}"] = pace.load() + logits + _ANSWERS * answers / 2 + pace.on_all_cores(_SKETCH)
    for name in files:
        stages[f"verifying gguf {name}"] = 1.0 + pace.on_all_cores(_COMPARE) + logits * 0.8 + answers * 0.4
    return stages | {"verifying": 0.5}


def validate_seconds(model: str, *, held_out: Sequence[int], questions: int, has_base: bool) -> dict[str, float]:
    """Return the expected seconds of the stages of an evaluation; `held_out` are the lengths of its documents."""
    pace = Pace.of(model)
    if pace is None:
        return {}
    stages = {"importing": pace.start(), "loading": pace.load()}
    mean = sum(held_out) / max(1, len(held_out))
    for name in ("tuned", "base") if has_base else ("tuned",):
        stage = f"testing the {name} model"
        stages[f"{stage}: everyday"] = pace.forward(EVERYDAY_TOKENS)
        stages[f"{stage}: held-out"] = pace.forward(sum(held_out))
        stages[stage] = pace.answers(min(questions, len(held_out)), prompt=0.7 * mean, tokens=0.5 * mean + 8)
    return stages
