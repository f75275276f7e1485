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

from tunewell.records.events import as_number, read_events, with_numbers
from tunewell.training.health import RunContext, StepMetrics

# What a log says of the run beside its numbers: the device, the precision, the vocabulary.

_APPLE = re.compile(
    r"\bmps\b(?!['\"]?(?: is)?(?: available)?['\"]?\s*[:=]\s*(?:false|no\b))|Apple (?:silicon|GPU|M[1-9])"
    r"|\bM[1-9] (?:Pro|Max|Ultra)\b|\bM[1-9]\b.{0,80}(?:Mac|MPS|Apple)",
    re.I,
)
_MAC = re.compile(r"Mac ?Book|\biMac\b|\bMac (?:Studio|mini|Pro)\b", re.I)
_NVIDIA = re.compile(r"cuda|nvidia|\b[RG]TX\b|\b[AHTLV]\d{1,3}\b", re.I)
_IS_ON = r"\b['\"]?(?!['\"]?(?:\s*[:=]\s*|\s+)['\"]?(?:false|no\b|none|null|0))"
_PRECISIONS = (
    (
        "fp16",
        re.compile(rf"\b(?:fp16|float16){_IS_ON}|torch\.half\b|\.half\(\)|dtype['\"]?\s*[:=]\s*['\"]?half\b", re.I),
    ),
    ("bf16", re.compile(rf"\b(?:bf16|bfloat16){_IS_ON}", re.I)),
    ("fp32", re.compile(r"\b(?:fp32|float32)\b", re.I)),
)
_VOCABULARY = re.compile(r"vocab(?:ulary)?[_ ]?size['\"]?\s{0,24}[:=]?\s{0,24}(\d[\d,]*)", re.I)
# A head for speech is always new, as are all weights of a model from scratch.
_FROM_SCRATCH = re.compile(r"from scratch|\blm loss\b|consumed samples|\bctc\b|\bwer\b|wav2vec", re.I)


def about_run(text: str) -> RunContext:
    """Gather what can be told from the first pages of a log."""
    head = text[:200_000]
    sizes = [int(size.replace(",", "")) for size in _VOCABULARY.findall(head)]
    return RunContext(
        vocab_size=max((size for size in sizes if size > 1), default=None),
        device="mps" if _APPLE.search(head) or (_MAC.search(head) and not _NVIDIA.search(head)) else None,
        precision=next((name for name, pattern in _PRECISIONS if pattern.search(head)), None),
        is_from_scratch=bool(_FROM_SCRATCH.search(head)),
        is_raw=False,
    )


# The many names that trainers have for a few numbers, and how numbers are written.

# Each word with `_` is also found with a space, a slash or nothing in its place.
_WORDS = {
    "held_out_loss": "eval_loss val_loss valid_loss validation_loss dev_loss test_loss held_out_loss val_loss_step"
    " val_loss_epoch val",
    "loss": "loss lm_loss train_loss training_loss train_loss_step train_loss_epoch loss_train loss_step step_loss"
    " batch_loss avr_loss avg_loss average_loss mean_loss running_loss total_loss avg_train_loss",
    "grad_norm": "grad_norm gradient_norm gnorm global_grad_norm total_grad_norm",
    "learning_rate": "learning_rate lr",
    "scale": "loss_scale",
    "step": "step steps global_step current_steps iter iteration",
    "epoch": "epoch",
}
_NAMES = {word.replace("_", ""): key for key, words in _WORDS.items() for word in words.split()}
NAME = "|".join(
    word.replace("_", "[ _/]?") for word in sorted(" ".join(_WORDS.values()).split(), key=len, reverse=True)
)
# Atomic: a number that runs on as something else, such as 12ab, is not the 1 it begins with. 0,52 is a decimal comma.
NUMBER = r"(?>[-+]?(?:nan|inf(?:inity)?|(?!0,\d)\d+(?:,\d{3})*(?:\.\d*)?(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?))"


def field_of(name: str) -> str:
    """Give the one name we have for what trainers call by many; what is not known keeps its own."""
    name = name.strip().lower().removeprefix("train/")
    return _NAMES.get(re.sub("[ _/]", "", name), name)


def number_of(value: Any) -> float | None:
    """Read a number that may be written out; None where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value.replace(",", "").strip() if isinstance(value, str) else value)
    except ValueError:
        return None


# Tables of numbers in a log: a header that names a step and a loss, then rows; also pasted as HTML or cell by cell.

_NO_VALUE = {"", "-", "no log", "none", "n/a"}
_SPACED = re.compile(r"(?:train(?:ing)?|val(?:id(?:ation)?)?|eval|test) loss|learning rate|grad norm|no log|\S+", re.I)
BETWEEN_ROWS = re.compile(r"[\s|:+=.-]*")
_CELL = rf"[ \t]*(?:{NUMBER}|no log|-)[ \t]*"
_UPRIGHT = re.compile(rf"^((?:[ \t]*(?:{NAME})[ \t]*\n+){{2,12}})({_CELL}(?:\n+{_CELL})+)$", re.I | re.M)
_HTML = (
    (re.compile(r"\s{0,99}<t[dh][^>]{0,999}>\s{0,99}", re.I), "\t"),
    (re.compile(r"</?(?:tr|table)[^>]{0,999}>", re.I), "\n"),
    (re.compile(r"</?(?:t[dh]|thead|tbody)[^>]{0,999}>", re.I), ""),
)
_OBJECT = re.compile(r"\{[^{}]{1,2000}\}")


def laid_out(text: str) -> str:
    """Put on one line what belongs together: an object, or a row of a table that was pasted cell by cell."""
    text = _OBJECT.sub(lambda found: " ".join(found[0].split()), text)
    if "<td" in text.lower():
        for pattern, instead in _HTML:
            text = pattern.sub(instead, text)

    def lay_down(found: re.Match[str]) -> str:
        names, cells = ([line.strip() for line in part.splitlines() if line.strip()] for part in found.groups())
        rows = [names, *(cells[at : at + len(names)] for at in range(0, len(cells), len(names)))]
        return "\n".join("\t".join(row) for row in rows)

    return _UPRIGHT.sub(lay_down, text)


@dataclass
class Table:
    """A table whose header was read: what its columns are, and what parts them."""

    columns: list[str]
    mark: str
    shown: str | None = None

    @classmethod
    def headed_by(cls, line: str) -> "Table | None":
        """Take a line for a header where it names a step or an epoch and a loss, each as a whole cell."""
        if "loss" not in line.lower():
            return None
        mark = next((mark for mark in "|\t," if mark in line), " ")
        columns = [field_of(cell) for cell in _cells(line, mark)]
        if any(number_of(cell) is not None for cell in columns):
            return None
        is_header = {"step", "epoch"} & {*columns} and {"loss", "held_out_loss"} & {*columns}
        return cls(columns, mark) if is_header else None

    def row(self, line: str) -> dict[str, Any] | None:
        """Read a row; None where the line is none."""
        cells = _cells(line, self.mark)
        if self.mark == " ":
            cells = cells[len(cells) - len(self.columns) :] if len(cells) == len(self.columns) + 1 else cells
            if len(cells) != len(self.columns):
                return None
        if not 1 < len(cells) <= len(self.columns):
            return None
        found: dict[str, Any] = {}
        for name, cell in zip(self.columns, cells, strict=False):
            if cell.lower() not in _NO_VALUE:
                found.setdefault(name, cell)
        told = [found[name] for name in ("loss", "held_out_loss") if name in found]
        if any(number_of(cell) is None for cell in told) or not any(
            number_of(cell) is not None for cell in found.values()
        ):
            return None
        # Beside a held-out loss stands the last training loss that was logged, for as many rows as it takes.
        if "held_out_loss" in found and found.get("loss") == self.shown:
            found.pop("loss", None)
        self.shown = found.get("loss", self.shown)
        return found


def _cells(line: str, mark: str) -> list[str]:
    if mark == " ":
        return _SPACED.findall(line)
    return [cell.strip() for cell in (line.strip().strip("|") if mark == "|" else line.strip()).split(mark)]


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

    readings: list[StepMetrics]
    about: RunContext


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
            known: dict[str, Any] = {key: event[key] for key in StepMetrics.__dataclass_fields__ if key in event}
            readings.append(StepMetrics(**with_numbers(known)))
        elif event["kind"] == "held_out":
            readings.append(StepMetrics(event["step"], held_out_loss=as_number(event["loss"])))
    device, precision = (plan.get(key, {}).get("value") for key in ("device", "precision"))
    return TrainingLog(readings, RunContext(device=device and device.partition(":")[0], precision=precision))


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


def _readings(entries: Iterable[dict[str, Any]]) -> Iterator[StepMetrics]:
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
            yield StepMetrics(step, **numbers)
        if held_out is not None:
            yield StepMetrics(step, held_out_loss=held_out)


def _as_measured(readings: Sequence[StepMetrics], *, is_frozen: bool) -> list[StepMetrics]:
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
