"""Read the numbers out of a training log, ours or another trainer's: state files, printed lines, tables.

    {"log_history": [...], "context": {...}}            trainer_state.json of Hugging Face's trainers
    {'loss': 1.47, 'grad_norm': 10.5, 'epoch': 0.01}    what they print
    Step | Training Loss | Validation Loss              what a notebook shows: a header, then rows of numbers
    lm loss: 2.117E+00 | grad norm: 0.150               Megatron
    steps 488/2000 avr_loss=nan                         and whatever else names its numbers

A line that names no number is passed over. Nothing is executed, and the time taken grows with the size alone.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from tunewell.diagnosis.log_about import about_run
from tunewell.diagnosis.log_tables import BETWEEN_ROWS, Table, laid_out
from tunewell.diagnosis.log_words import NAME, NUMBER, field_of, number_of
from tunewell.records.events import as_number, read_events, with_numbers
from tunewell.training.readings import About, Reading

_PAIR = re.compile(
    rf"(?<![A-Za-z_./])(?:train/)?({NAME})['\"]?\s{{0,24}}[:=|\uff1a]?\s{{0,24}}"
    rf"['\"\[]?(?:[A-Za-z][\w.]{{0,24}}\(\[?)?({NUMBER})"
    r"(?![A-Za-z_%])",
    re.IGNORECASE,
)
_BEGINS_AT_ZERO = re.compile(r"\s*[\w.]+\s*=\s*0(?:\.0*)?\s*(?:#.*)?")
"""A line of a program that was pasted with its log."""
_OVERFLOW = re.compile(
    r"non-?finite grad|found (?:nan|inf)|overflow!? *(?:rank|skipping)|skipping (?:the )?(?:optimizer )?step", re.I
)
_SUMMARY = re.compile(r"train_runtime|train_samples_per_second")
_REWARDED = re.compile(r"(?:^|[\s'\"{,|/])(?:rewards?(?:[/_][\w/]*)?|kl)['\"]?\s*(?:[:=|]|$)", re.I)
_BAR = re.compile(r"\d/\d+ \[|\dit/s|\ds/it")
_NOTHING_TRAINABLE = re.compile(
    r"trainable param(?:eter)?s\s*[:=]\s*0(?![\d,.])(?!.{0,20}all params:\s*0(?![\d,.]))", re.I
)
_ALONE = re.compile(rf"^[ \t]*tensor\(({NUMBER})(?:,[^\n]*)?\)[ \t]*$", re.I | re.M)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_LONGEST_LINE = 20_000


@dataclass(frozen=True)
class TrainingLog:
    """The numbers of a log, and what it says of the run."""

    readings: list[Reading]
    about: About


def read_log(text: str) -> TrainingLog:
    """Read any trainer's log; one without numbers gives no readings."""
    text = _COLOUR.sub("", text)
    rest = text
    entries: list[dict[str, Any]] = []
    for begin, end, state in _states(text):
        rest = rest.replace(text[begin:end], "\n", 1)
        entries += [entry for entry in state["log_history"] if isinstance(entry, dict)]
    entries += _lines(laid_out(rest))
    steps = [entry for entry in entries if "train_runtime" not in entry]
    readings = list(_readings(steps)) or list(_readings(_bare(text)))
    if not readings:
        # Only the mean of a whole run is told. It is 0 where a finished run was resumed, and then says nothing.
        readings = [reading for reading in _readings(entries) if reading.loss != 0.0]
    return TrainingLog(_as_measured(readings, is_frozen=bool(_NOTHING_TRAINABLE.search(text))), about_run(text))


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
    table, drawn = None, None
    for line in text.splitlines():
        if len(line) > _LONGEST_LINE or _BEGINS_AT_ZERO.fullmatch(line):
            continue
        if (header := Table.headed_by(line)) is not None:
            table = header
            continue
        if table is not None and (row := table.row(line)) is not None:
            yield row
            continue
        if not BETWEEN_ROWS.fullmatch(line):
            table = None
        found: dict[str, Any] = {}
        for name, value in _PAIR.findall(line):
            found.setdefault(field_of(name), value)
        if _OVERFLOW.search(line) and "grad_norm" not in found:
            found["grad_norm"] = "nan"
        if not found.keys() & {"loss", "grad_norm", "held_out_loss"}:
            continue
        if _BAR.search(line):
            if found == drawn:
                continue  # the bar was drawn again: it shows the last loss until there is a new one
            drawn = dict(found)
        if _REWARDED.search(line):
            found["reward"] = True
        if _SUMMARY.search(line):
            found["train_runtime"] = True
        yield found


def _bare(text: str) -> list[dict[str, Any]]:
    """Read losses that a loop prints and does not name."""
    found = _ALONE.findall(text)
    return [{"loss": value} for value in found] if len(found) > 1 else []


def _readings(entries: Iterable[dict[str, Any]]) -> Iterator[Reading]:
    """Turn entries into readings; where no step is told, they are counted."""
    step = 0
    for told in entries:
        entry: dict[str, Any] = {}
        for key, value in told.items():
            entry.setdefault(field_of(str(key)), value)
        numbers: dict[str, Any] = {
            key: number_of(entry.get(key)) for key in ("loss", "grad_norm", "learning_rate", "scale")
        }
        # Learning by reward, the loss is 0 by its making, and rewards that are all alike have no gradient.
        if numbers["loss"] == 0.0 and any(_REWARDED.search(key) for key in entry):
            numbers |= {"loss": None, "grad_norm": numbers["grad_norm"] or None}
        held_out, at = number_of(entry.get("held_out_loss")), number_of(entry.get("step"))
        step = int(at) if at is not None and math.isfinite(at) else step + 1
        if numbers["loss"] is not None or numbers["grad_norm"] is not None:
            yield Reading(step, **numbers)
        if held_out is not None:
            yield Reading(step, held_out_loss=held_out)


def _as_measured(readings: Sequence[Reading], *, is_frozen: bool) -> list[Reading]:
    """Add the norm that follows from having nothing to train, and take away zeros that only mean it is not computed."""
    losses = [reading.loss for reading in readings if reading.loss is not None and math.isfinite(reading.loss)]
    third = len(losses) // 3
    is_falling = third > 0 and len(losses) > 3 and median(losses[-third:]) < 0.8 * median(losses[:third])
    if not is_falling:
        return [
            replace(reading, grad_norm=0.0) if is_frozen and reading.loss and reading.grad_norm is None else reading
            for reading in readings
        ]
    if any(reading.grad_norm for reading in readings):  # NaN is one too
        return list(readings)
    return [replace(reading, grad_norm=None) for reading in readings]
