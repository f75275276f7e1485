"""Hold every tensor of an artefact against what was trained, within what its way of storing numbers rounds away."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import torch

from tunewell.core.units import count
from tunewell.exporting.sketch import NUM_SIGNS, Rows, Sketch, sketch
from tunewell.records.parity import Check

# Of 10 million rows one is expected beyond 5.4 deviations, and bounds are well above the usual deviation.
_MOST_DEVIATIONS = 6
# A row that is almost 0 is judged by the others: its own length says nothing of the steps it is stored in.
_FLOOR = 0.01
# Rounding to the nearest pulls numbers neither towards 0 nor away from it, but for the smallest.
_BIAS = 0.1
_STRENGTH = 0.03
_TOLD = 0.25
_SHOWN = 3
_PLAIN = frozenset({"F32", "F16", "BF16"})
# What another version of the same arithmetic may do otherwise, in parts of what the type rounds away.
_OTHER_VERSION = 0.3
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Compared:
    """One tensor of an artefact beside its own as it was trained."""

    name: str
    kind: str
    """How its numbers are stored: `F32`, `BF16`, `Q4_K`, ..."""
    wanted: Sketch
    found: Sketch
    rounded: Rows | None = None
    """The rows that rounding gives to what was trained, where that was tried."""

    @property
    def is_plain(self) -> bool:
        """Whether numbers are rounded one by one, and not in blocks."""
        return self.kind in _PLAIN


@cache
def tensor_bounds() -> dict[str, dict[str, Any]]:
    """Give what each way of storing numbers may move a tensor by, and why."""
    return json.loads(files("tunewell.exporting").joinpath("tensor_bounds.json").read_text(encoding="utf-8"))


def compare_weights(weights: Mapping[str, torch.Tensor], wanted: Mapping[str, Sketch], kind: str) -> Iterator[Compared]:
    """Pair the weights of a loaded model with what was trained, by name; what has no partner is found by names."""
    for name, own in wanted.items():
        if name in weights:
            yield Compared(name, kind, own, sketch(weights[name], own.direction))


def check_tensors(pairs: Iterable[Compared], *, missing: Iterable[str], unknown: Iterable[str]) -> Check:
    """Say whether every tensor is there, is what was trained, and has all of what training put in."""
    wrong = [f"`{name}` is missing" for name in missing] + [f"`{name}` is no tensor of the model" for name in unknown]
    changes = _Changes()
    errors: dict[str, float] = {}
    num = 0
    for pair in pairs:
        num += 1
        if (words := _wrong(pair)) is not None:
            wrong.append(words)
        else:
            changes.add(pair)
            errors[pair.kind] = max(errors.get(pair.kind, 0.0), _relative(pair))
    wrong += changes.wrong()
    strength = changes.strength
    figures: dict[str, Any] = {"tensors": num, "wrong": len(wrong), "errors": errors, "strength": strength}
    spelled = ", ".join(f"{kind} within {error:.1e}" for kind, error in errors.items())
    words = f"{count(num, 'tensor')}: {spelled} of what was trained"
    if strength is not None:
        words += f"; what training added is there at {strength:.1%}"
    if wrong:
        words = "; ".join(wrong[:_SHOWN]) + (f"; {len(wrong)} in all" if len(wrong) > _SHOWN else "")
    bound = "; ".join(
        f"{kind} {tensor_bounds()[kind]['relative']:g}: {tensor_bounds()[kind]['because']}" for kind in errors
    )
    return Check(name="tensors", is_ok=not wrong and num > 0, words=words, figures=figures, bound=bound)


def _wrong(pair: Compared) -> str | None:
    """Say what is wrong with a tensor, if anything."""
    wanted, found, name = pair.wanted, pair.found, pair.name
    bound = tensor_bounds().get(pair.kind)
    if bound is None:
        return f"`{name}` is stored as {pair.kind}, of which nothing is known"
    if wanted.rows.shape != found.rows.shape:
        return f"`{name}` has the shape {found.shape} and not {wanted.shape}"
    if not np.isfinite(found.rows).all():
        return f"`{name}` holds a NaN or an infinity"
    error = (found.rows - wanted.rows)[:, :NUM_SIGNS]
    number = error.size
    width = math.prod(wanted.shape) / max(1, len(wanted.rows))
    whole = float(np.sqrt((wanted.lengths**2).sum()))
    floor = bound["smallest"] * math.sqrt(width)
    allowed = bound["relative"] * (1 + 4 / math.sqrt(2 * number)) * whole + floor * math.sqrt(len(wanted.rows))
    if _length(error) > allowed:
        off = _length(error) / whole if whole else math.inf
        return f"`{name}` is off by {off:.2%} of its size, and {pair.kind} rounds by {bound['relative']:.2%} at most"
    # Numbers that are kept one by one have a limit of their own; of a row only the spread of its error is known.
    times = _MOST_DEVIATIONS if width > 1 else 1
    per_row = times * (bound["relative"] * (wanted.lengths + _FLOOR * whole / math.sqrt(len(wanted.rows))) + floor)
    beyond = np.abs(error).max(axis=1) > per_row
    if beyond.any():
        rows = f"row {int(beyond.argmax()):,}" + (f" and {int(beyond.sum()) - 1:,} more" if beyond.sum() > 1 else "")
        return f"`{name}` is another in {rows}"
    expected = wanted.rows if pair.is_plain else pair.rounded
    if expected is None or width == 1 or not whole:
        return None
    expected = expected[:, :NUM_SIGNS]
    other = found.rows[:, :NUM_SIGNS] - expected
    if not pair.is_plain and _length(other) > _OTHER_VERSION * allowed:
        return f"`{name}` is not what {pair.kind} makes of what was trained"
    scale = 1 + float((other * expected).sum() / max(1e-30, (expected**2).sum()))
    doubt = _MOST_DEVIATIONS * _length(other) / whole / math.sqrt(number)
    if abs(scale - 1) > doubt + _BIAS * bound["relative"] + floor * math.sqrt(len(wanted.rows)) / whole:
        return f"`{name}` is {scale:.4f} times what it was"
    return None


class _Changes:
    """How much of what training put in beside the weights is there: in all, in each layer, in each kind of tensor."""

    def __init__(self) -> None:
        self._sums: dict[str, Rows] = {}
        self._told: Rows = np.zeros(5)

    def add(self, pair: Compared) -> None:
        change = pair.wanted.change
        if change is None or not change.any():
            return
        self._told = self._told + _sums(change, pair.found.rows - pair.wanted.rows)
        # Rounding in blocks may take a change back where the base lay on a grid: only what that does is expected.
        wanted = pair.wanted.rows if pair.is_plain else pair.rounded
        if wanted is not None:
            for group in self._groups(pair.name):
                self._sums[group] = self._sums.get(group, 0) + _sums(change, pair.found.rows - wanted)

    @property
    def strength(self) -> float | None:
        """The share that is there in all; None where it cannot be told from rounding, or nothing was put in."""
        if not self._told[1]:
            return None
        off, doubt = _off(self._told)
        return 1 + off if doubt < _TOLD else None

    def wrong(self) -> list[str]:
        found = []
        for group, sums in self._sums.items():
            off, doubt = _off(sums)
            if abs(off) > _STRENGTH + doubt:
                found.append(f"what training added is there at {1 + off:.0%}{f' in {group}' if group else ''}")
        return found

    @staticmethod
    def _groups(name: str) -> list[str]:
        match = _LAYER.search(name)
        layer = [f"layer {match[1]}", f"every `{_LAYER.sub('.*.', name)}`"] if match else []
        return ["", *layer, f"`{name}`"]


def _sums(change: Rows, error: Rows) -> Rows:
    error = error[:, -1:]
    terms = (change * error, change**2, change**2 * error**2, change**3 * error, change**4)
    return np.array([term.sum() for term in terms])


def _off(sums: Rows) -> tuple[float, float]:
    """Give by how much the share is off 1, and by how much rounding could make it so."""
    product, square, mixed, skew, fourth = sums
    off = product / square
    # What is left of the error without the part that the change explains.
    left = max(0.0, mixed - 2 * off * skew + off**2 * fourth)
    return float(off), float(_MOST_DEVIATIONS * math.sqrt(left) / square)


def _relative(pair: Compared) -> float:
    whole = float(np.sqrt((pair.wanted.lengths**2).sum()))
    return _length((pair.found.rows - pair.wanted.rows)[:, :NUM_SIGNS]) / whole if whole else 0.0


def _length(error: Rows) -> float:
    """Give the length of a difference by its products with signs."""
    return float(np.sqrt((error**2).sum() / error.shape[1]))
