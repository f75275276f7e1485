"""Parse training logs of any trainer into step metrics: `trainer_state.json`, printed lines, tables.

    {"log_history": [...], "context": {...}}            trainer_state.json of Hugging Face's trainers
    {'loss': 1.47, 'grad_norm': 10.5, 'epoch': 0.01}    lines printed by Hugging Face's trainers
    Step | Training Loss | Validation Loss              tables in notebooks: a header, then rows of numbers
    lm loss: 2.117E+00 | grad norm: 0.150               Megatron
    steps 488/2000 avr_loss=nan                         other lines with named numbers

Lines without a named number are ignored. No code in a log is executed, and parsing takes linear time.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, cast

from tunewell.core.files import read_text
from tunewell.records.events import as_number, read_events, with_numbers
from tunewell.training.health import RunContext, StepMetrics

# Facts about the run other than its metrics: device, precision, vocabulary size.

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
# Speech models always have a new head, and models trained from scratch have only new weights.
_FROM_SCRATCH = re.compile(r"from scratch|\blm loss\b|consumed samples|\bctc\b|\bwer\b|wav2vec", re.I)


def find_context(text: str) -> RunContext:
    """Return the facts found in the first 200,000 characters of a log."""
    head = text[:200_000]
    sizes = [int(size.replace(",", "")) for size in _VOCABULARY.findall(head)]
    return RunContext(
        vocab_size=max((size for size in sizes if size > 1), default=None),
        device="mps" if _APPLE.search(head) or (_MAC.search(head) and not _NVIDIA.search(head)) else None,
        precision=next((name for name, pattern in _PRECISIONS if pattern.search(head)), None),
        is_from_scratch=bool(_FROM_SCRATCH.search(head)),
        is_raw=False,
    )


# The names that trainers use for the same metric, and the formats of numbers.

# Each `_` also matches a space, a slash or nothing.
_SYNONYMS = {
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
_NAMES = {word.replace("_", ""): key for key, words in _SYNONYMS.items() for word in words.split()}
NAME = "|".join(
    word.replace("_", "[ _/]?") for word in sorted(" ".join(_SYNONYMS.values()).split(), key=len, reverse=True)
)
# The group is atomic, so that 12ab does not match as 1. The comma in 0,52 is a decimal comma.
NUMBER = r"(?>[-+]?(?:nan|inf(?:inity)?|(?!0,\d)\d+(?:,\d{3})*(?:\.\d*)?(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?))"


@lru_cache(maxsize=4096)
def field_of(name: str) -> str:
    """Return tunewell's name of a metric; an unknown name is returned in lower case."""
    name = name.strip().lower().removeprefix("train/")
    return _NAMES.get(re.sub("[ _/]", "", name), name)


def number_of(value: Any) -> float | None:
    """Convert a value to a number; return None if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value.replace(",", "").strip() if isinstance(value, str) else value)
    except ValueError:
        return None


# Tables: a header with a step and a loss, then rows. They may also be pasted as HTML or with one cell per line.

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


def join_lines(text: str) -> str:
    """Join objects, and table rows that were pasted with one cell per line, into single lines."""
    text = _OBJECT.sub(lambda found: " ".join(found[0].split()), text)
    if "<td" in text.lower():
        for pattern, replacement in _HTML:
            text = pattern.sub(replacement, text)

    def join_cells(found: re.Match[str]) -> str:
        names, cells = ([line.strip() for line in part.splitlines() if line.strip()] for part in found.groups())
        rows = [names, *(cells[at : at + len(names)] for at in range(0, len(cells), len(names)))]
        return "\n".join("\t".join(row) for row in rows)

    return _UPRIGHT.sub(join_cells, text)


@dataclass
class Table:
    """The columns of a table and their separator, as found in its header."""

    columns: list[str]
    separator: str
    last_loss: str | None = None

    @classmethod
    def from_header(cls, line: str) -> "Table | None":
        """Parse a header. Return None unless it has cells for a loss and for a step or an epoch."""
        if "loss" not in line.lower():
            return None
        separator = next((mark for mark in "|\t," if mark in line), " ")
        columns = [field_of(cell) for cell in _cells(line, separator)]
        if any(number_of(cell) is not None for cell in columns):
            return None
        is_header = {"step", "epoch"} & {*columns} and {"loss", "held_out_loss"} & {*columns}
        return cls(columns, separator) if is_header else None

    def row(self, line: str) -> dict[str, Any] | None:
        """Parse a row; return None if the line is not a row of this table."""
        cells = _cells(line, self.separator)
        if self.separator == " ":
            cells = cells[len(cells) - len(self.columns) :] if len(cells) == len(self.columns) + 1 else cells
            if len(cells) != len(self.columns):
                return None
        if not 1 < len(cells) <= len(self.columns):
            return None
        found: dict[str, Any] = {}
        for name, cell in zip(self.columns, cells, strict=False):
            if cell.lower() not in _NO_VALUE:
                found.setdefault(name, cell)
        losses = [found[name] for name in ("loss", "held_out_loss") if name in found]
        if any(number_of(cell) is None for cell in losses) or not any(
            number_of(cell) is not None for cell in found.values()
        ):
            return None
        # A row with a held-out loss repeats the last training loss until a new one is logged.
        if "held_out_loss" in found and found.get("loss") == self.last_loss:
            found.pop("loss", None)
        self.last_loss = found.get("loss", self.last_loss)
        return found


def _cells(line: str, separator: str) -> list[str]:
    if separator == " ":
        return _SPACED.findall(line)
    return [cell.strip() for cell in (line.strip().strip("|") if separator == "|" else line.strip()).split(separator)]


_PAIR = re.compile(
    rf"(?<![A-Za-z_./])(?:train/)?({NAME})['\"]?\s{{0,24}}[:=|\uff1a]?\s{{0,24}}"
    rf"['\"\[]?(?:[A-Za-z][\w.]{{0,24}}\(\[?)?({NUMBER})"
    r"(?![A-Za-z_%])",
    re.IGNORECASE,
)
_ASSIGNS_ZERO = re.compile(r"\s*[\w.]+\s*=\s*0(?:\.0*)?\s*(?:#.*)?")
"""Matches a line of source code that was pasted with the log."""
_OVERFLOW = re.compile(
    r"non-?finite grad|found (?:nan|inf)|overflow!? *(?:rank|skipping)|skipping (?:the )?(?:optimizer )?step", re.I
)
_SUMMARY = re.compile(r"train_runtime|train_samples_per_second")
_REWARDED = re.compile(r"(?:^|[\s'\"{,|/])(?:rewards?(?:[/_][\w/]*)?|kl)['\"]?\s*(?:[:=|]|$)", re.I)
_BAR = re.compile(r"\d/\d+ \[|\dit/s|\ds/it")
_NOTHING_TRAINABLE = re.compile(
    r"trainable param(?:eter)?s\s*[:=]\s*0(?![\d,.])(?!.{0,20}all params:\s*0(?![\d,.]))", re.I
)
# A loss that a training loop prints without a name: `tensor(2.31)`.
_ALONE = re.compile(rf"^[ \t]*tensor\(({NUMBER})(?:,[^\n]*)?\)[ \t]*$", re.I | re.M)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_LONGEST_LINE = 20_000


@dataclass(frozen=True)
class TrainingLog:
    """The metrics of a log, and the facts it contains about the run."""

    steps: list[StepMetrics]
    about: RunContext


def read_log(text: str, *, every: int = 1) -> TrainingLog:
    """Parse the log of any trainer. A log without numbers gives no steps.

    `every` is n if the text has only each n-th line of a log; lines without a step are numbered accordingly.
    """
    text = _COLOUR.sub("", text)
    rest = text
    entries: list[dict[str, Any]] = []
    for begin, end, state in _states(text):
        rest = rest.replace(text[begin:end], "\n", 1)
        entries += [entry for entry in state["log_history"] if isinstance(entry, dict)]
    entries += _lines(join_lines(rest))
    per_step = [entry for entry in entries if "train_runtime" not in entry]
    steps = list(_to_metrics(per_step, every))
    if not steps and len(unnamed := _ALONE.findall(text)) > 1:
        steps = list(_to_metrics(({"loss": value} for value in unnamed), every))
    if not steps:
        # The log has only the mean loss of the whole run. It is 0 and meaningless if a finished run was resumed.
        steps = [step for step in _to_metrics(entries) if step.loss != 0.0]
    return TrainingLog(_correct_norms(steps, is_frozen=bool(_NOTHING_TRAINABLE.search(text))), find_context(text))


def read_run(folder: Path) -> TrainingLog:
    """Read the steps and evaluations of a run folder of tunewell or of `HealthCallback`."""
    path = folder / "plan.json"
    plan: dict[str, Any] = json.loads(read_text(path)) if path.is_file() else {}
    steps: list[StepMetrics] = []
    for event in read_events(folder / "events.jsonl"):
        if event["kind"] == "step":
            known: dict[str, Any] = {key: event[key] for key in StepMetrics.__dataclass_fields__ if key in event}
            steps.append(StepMetrics(**with_numbers(known)))
        elif event["kind"] == "held_out":
            steps.append(StepMetrics(event["step"], held_out_loss=as_number(event["loss"])))
    device, precision = (plan.get(key, {}).get("value") for key in ("device", "precision"))
    return TrainingLog(steps, RunContext(device=device and device.partition(":")[0], precision=precision))


def _states(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield the JSON objects in a text that contain a `log_history`."""
    decoder, at = json.JSONDecoder(), 0
    while (key := text.find('"log_history"', at)) >= 0:
        at = key + 1
        begin = text.rfind("{", 0, key)
        try:
            found, end = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            continue
        state = cast(dict[str, Any], found) if isinstance(found, dict) else {}
        if isinstance(state.get("log_history"), list):
            yield begin, end, state
            at = end


def _lines(text: str) -> Iterator[dict[str, Any]]:
    table, drawn = None, None
    for line in text.splitlines():
        if len(line) > _LONGEST_LINE or _ASSIGNS_ZERO.fullmatch(line):
            continue
        if (header := Table.from_header(line)) is not None:
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
                continue  # a progress bar repeats the last loss until a new one is logged
            drawn = dict(found)
        if _REWARDED.search(line):
            found["reward"] = True
        if _SUMMARY.search(line):
            found["train_runtime"] = True
        yield found


def _to_metrics(entries: Iterable[dict[str, Any]], every: int = 1) -> Iterator[StepMetrics]:
    """Convert entries to metrics; entries without a step are numbered in intervals of `every`."""
    step = 0
    for raw in entries:
        entry: dict[str, Any] = {}
        for key, value in raw.items():
            entry.setdefault(field_of(str(key)), value)
        numbers: dict[str, Any] = {
            key: number_of(entry.get(key)) for key in ("loss", "grad_norm", "learning_rate", "scale")
        }
        # In GRPO and other reward-based training, the loss is 0 by construction, and equal rewards give no gradient.
        if numbers["loss"] == 0.0 and any(_REWARDED.search(key) for key in entry):
            numbers |= {"loss": None, "grad_norm": numbers["grad_norm"] or None}
        held_out, at = number_of(entry.get("held_out_loss")), number_of(entry.get("step"))
        step = int(at) if at is not None and math.isfinite(at) else step + every
        if numbers["loss"] is not None or numbers["grad_norm"] is not None:
            yield StepMetrics(step, **numbers)
        if held_out is not None:
            yield StepMetrics(step, held_out_loss=held_out)


def _correct_norms(steps: Sequence[StepMetrics], *, is_frozen: bool) -> list[StepMetrics]:
    """Set the gradient norm to 0 if nothing is trainable; remove zeros that mean "not computed"."""
    losses = [step.loss for step in steps if step.loss is not None and math.isfinite(step.loss)]
    third = len(losses) // 3
    is_falling = third > 0 and len(losses) > 3 and median(losses[-third:]) < 0.8 * median(losses[:third])
    if not is_falling:
        return [
            replace(step, grad_norm=0.0) if is_frozen and step.loss and step.grad_norm is None else step
            for step in steps
        ]
    if any(step.grad_norm for step in steps):  # NaN is truthy too
        return list(steps)
    return [replace(step, grad_norm=None) for step in steps]
