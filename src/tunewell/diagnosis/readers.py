"""Read the numbers out of a training log, ours or another trainer's: state files, printed dicts, Megatron lines.

    {"log_history": [...], "context": {...}}            trainer_state.json of Hugging Face's trainers
    {'loss': 1.47, 'grad_norm': 10.5, 'epoch': 0.01}    what they print
    lm loss: 2.117E+00 | grad norm: 0.150               Megatron
    steps 488/2000 avr_loss=nan                         and whatever else names its numbers

A line that names no number is passed over. Nothing is executed, and the time taken grows with the size alone.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewell.records.events import as_number, read_events, with_numbers
from tunewell.training.readings import About, Reading

_NUMBER = r"[-+]?(?:nan|inf(?:inity)?|\d[\d,]*(?:\.\d*)?(?:e[-+]?\d+)?|\.\d+)"
_PAIR = re.compile(
    rf"(?<![A-Za-z_.])(eval_loss|val(?:idation)?[_ ]loss|held_out_loss|lm loss|avr_loss|train[_ ]loss|loss train|loss"
    rf"|val|grad[_ ]norm|learning[_ ]rate|lr|loss[_ ]scale|global_step|steps?|iter(?:ation)?|epoch)"
    rf"['\"]?\s*[:=]?\s*['\"]?({_NUMBER})(?![A-Za-z_])",
    re.IGNORECASE,
)
_NAMES = {
    "eval_loss": "held_out_loss",
    "val_loss": "held_out_loss",
    "validation_loss": "held_out_loss",
    "held_out_loss": "held_out_loss",
    "val": "held_out_loss",
    "lm_loss": "loss",
    "avr_loss": "loss",
    "train_loss": "loss",
    "loss_train": "loss",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "lr": "learning_rate",
    "loss_scale": "scale",
    "global_step": "step",
    "step": "step",
    "steps": "step",
    "iter": "step",
    "iteration": "step",
    "epoch": "epoch",
}
_OVERFLOW = re.compile(
    r"non-?finite grad|found (?:nan|inf)|overflow!? *(?:rank|skipping)|skipping (?:the )?(?:optimizer )?step", re.I
)
_SUMMARY = re.compile(r"train_runtime|train_samples_per_second")
_APPLE = re.compile(r"\bmps\b|\bM[1-9](?: (?:Pro|Max|Ultra))?\b.*(?:Mac|MPS|Apple)|Apple (?:silicon|GPU|M[1-9])", re.I)
_PRECISIONS = (
    ("fp16", re.compile(r"\b(?:fp16|float16|half)\b['\"]?(?!['\"]?\s*[:=]\s*['\"]?(?:false|no\b|0))", re.I)),
    ("bf16", re.compile(r"\b(?:bf16|bfloat16)\b['\"]?(?!['\"]?\s*[:=]\s*['\"]?(?:false|no\b|0))", re.I)),
    ("fp32", re.compile(r"\b(?:fp32|float32)\b", re.I)),
)
_FROM_SCRATCH = re.compile(r"from scratch|\blm loss\b|consumed samples", re.I)
_LONGEST_LINE = 20_000


@dataclass(frozen=True)
class TrainingLog:
    """The numbers of a log, and what it says of the run."""

    readings: list[Reading]
    about: About


def read_log(text: str) -> TrainingLog:
    """Read any trainer's log; one without numbers gives no readings."""
    states = list(_states(text))
    rest = text
    entries: list[dict[str, Any]] = []
    for begin, end, state in states:
        rest = rest.replace(text[begin:end], "\n", 1)
        entries += [entry for entry in state["log_history"] if isinstance(entry, dict)]
    entries += list(_lines(rest))
    return TrainingLog(list(_readings(entries)), _about(text))


def read_run(folder: Path) -> TrainingLog:
    """Read the steps and looks of one of our own runs, or of another trainer's that `HealthCallback` watched."""
    path = folder / "plan.json"
    plan = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    readings = []
    for event in read_events(folder / "events.jsonl"):
        if event["kind"] == "step":
            known: dict[str, Any] = {key: event[key] for key in Reading.__dataclass_fields__ if key in event}
            readings.append(Reading(**with_numbers(known)))
        elif event["kind"] == "held_out":
            readings.append(Reading(event["step"], held_out_loss=as_number(event["loss"])))
    device, precision = (plan.get(key, {}).get("value") for key in ("device", "precision"))
    return TrainingLog(readings, About(device=device and device.partition(":")[0], precision=precision))


def _states(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Find JSON objects that hold a `log_history`; the rest of a file may be anything."""
    decoder, at = json.JSONDecoder(), 0
    while (found := text.find('"log_history"', at)) >= 0:
        at = found + 1
        begin = text.rfind("{", 0, found)
        try:
            state, end = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            continue
        if isinstance(state, dict) and isinstance(state.get("log_history"), list):
            yield begin, end, state
            at = end


def _lines(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        if len(line) > _LONGEST_LINE or _SUMMARY.search(line):
            continue
        found: dict[str, Any] = {}
        for name, value in _PAIR.findall(line):
            key = _NAMES[name.lower().replace(" ", "_")]
            found.setdefault(key, value)
        if _OVERFLOW.search(line) and "grad_norm" not in found:
            found["grad_norm"] = "nan"
        if found.keys() & {"loss", "grad_norm", "held_out_loss"}:
            yield found


def _readings(entries: Iterable[dict[str, Any]]) -> Iterator[Reading]:
    """Turn entries into readings; where no step is told, they are counted."""
    step = 0
    for entry in entries:
        entry = {_NAMES.get(str(key).lower().replace(" ", "_"), str(key)): value for key, value in entry.items()}
        numbers: dict[str, Any] = {
            key: _number(entry.get(key)) for key in ("loss", "grad_norm", "learning_rate", "scale")
        }
        held_out, told = _number(entry.get("held_out_loss")), _number(entry.get("step"))
        step = int(told) if told is not None and math.isfinite(told) else step + 1
        if numbers["loss"] is not None or numbers["grad_norm"] is not None:
            yield Reading(step, **numbers)
        if held_out is not None:
            yield Reading(step, held_out_loss=held_out)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value.replace(",", "").strip() if isinstance(value, str) else value)
    except ValueError:
        return None


def _about(text: str) -> About:
    head = text[:200_000]
    return About(
        device="mps" if _APPLE.search(head) else None,
        precision=next((name for name, pattern in _PRECISIONS if pattern.search(head)), None),
        is_from_scratch=bool(_FROM_SCRATCH.search(head)),
        is_raw=False,
    )
