"""Hold every tensor of an artefact against what was trained, within what its way of storing numbers rounds away."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tunewell.core.units import count
from tunewell.methods.base import AdapterLayer, adapter_layers
from tunewell.records.parity import Check

# Remember a tensor by a few numbers of each row, enough to measure how far any other tensor is from it.

Rows = npt.NDArray[np.float64]
Rounding = Callable[[Tensor], Tensor]
"""Stores rows as a file does, and reads them again."""
NUM_SIGNS = 4
_SEED = 20_261_115
_NUMBERS_AT_ONCE = 1 << 22
_ROWS, _LENGTHS, _CHANGE, _DIRECTION = "rows/", "lengths/", "change/", "direction/"


@dataclass(frozen=True)
class Sketch:
    """One tensor, row by row; of a tensor of one dimension every number is a row."""

    shape: tuple[int, ...]
    rows: Rows
    """[R, signs], with one column more where there is a direction; [R, 1] with the numbers themselves where the tensor
    has one dimension."""
    lengths: Rows
    """Of each row: [R]."""
    direction: Rows | None = None
    """In which training changed the rows most, as long as a vector of signs: [C]."""
    change: Rows | None = None
    """What training put into the last column of `rows`: [R, 1]."""


def sketch(whole: Tensor, direction: Rows | None = None, *, rounding: Rounding | None = None) -> Sketch:
    """Make the sketch of a tensor, in fp64, some rows at a time; with `rounding`, of what that makes of it."""
    shape = tuple(whole.shape)
    rows = whole.detach().reshape(-1, shape[-1] if len(shape) > 1 else 1)
    if len(shape) < 2:
        values = rows.double().numpy(force=True)
        return Sketch(shape, values, np.abs(values[:, 0]))
    signs = torch.from_numpy(_signs(shape[-1]))
    if direction is not None and len(direction) == shape[-1]:
        signs = torch.cat([signs, torch.from_numpy(direction)[:, None]], dim=1)
    step = max(1, _NUMBERS_AT_ONCE // max(1, rows.shape[1]))
    products, lengths = [], []
    for start in range(0, len(rows), step):
        part = rows[start : start + step].cpu()
        part = (part if rounding is None else rounding(part)).double()
        products.append((part @ signs).numpy())
        lengths.append(part.norm(dim=1).numpy())
    return Sketch(shape, np.concatenate(products), np.concatenate(lengths))


@torch.no_grad()
def sketches_of(model: PreTrainedModel) -> tuple[dict[str, Sketch], dict[str, str]]:
    """Sketch every weight of a model as it will be once merged; also give second names of tensors, by their first.

    What lies beside a layer is added to its sketch and not to its weights, so a fault in merging cannot hide here.
    """
    beside = {f"{name}.weight": layer for name, layer in adapter_layers(model).items()}
    found: dict[str, Sketch] = {}
    names: dict[int, str] = {}
    twins: dict[str, str] = {}
    for name, weight in _weights(model):
        if id(weight) in names:
            twins[name] = names[id(weight)]
            continue
        names[id(weight)] = name
        found[name] = _with_change(weight, beside[name]) if name in beside else sketch(weight)
    return found, twins


def as_arrays(sketches: Mapping[str, Sketch]) -> dict[str, npt.NDArray[np.float32]]:
    """Name the numbers of sketches for a file."""
    found = {}
    for name, own in sketches.items():
        found[_ROWS + name] = own.rows.astype(np.float32)
        if len(own.shape) > 1:
            found[_LENGTHS + name] = own.lengths.astype(np.float32)
        if own.change is not None and own.direction is not None:
            found[_CHANGE + name] = own.change.astype(np.float32)
            found[_DIRECTION + name] = own.direction.astype(np.float32)
    return found


def from_arrays(arrays: Mapping[str, npt.NDArray[np.float32]], shapes: Mapping[str, list[int]]) -> dict[str, Sketch]:
    """Take sketches out of the arrays of a file; raises KeyError where one is missing."""
    found = {}
    for name, shape in shapes.items():
        rows = arrays[_ROWS + name].astype(np.float64)
        lengths = arrays[_LENGTHS + name].astype(np.float64) if len(shape) > 1 else np.abs(rows[:, 0])
        direction, change = (
            arrays[part + name].astype(np.float64) if part + name in arrays else None for part in (_DIRECTION, _CHANGE)
        )
        found[name] = Sketch(tuple(shape), rows, lengths, direction, change)
    return found


def changed(own: Sketch, change: Callable[[Rows], Rows]) -> Sketch:
    """Put the rows of a sketch in another order, or change numbers that are kept whole."""
    rows = change(own.rows)
    lengths = np.abs(rows[:, 0]) if len(own.shape) < 2 else change(own.lengths[:, None])[:, 0]
    return Sketch(own.shape, rows, lengths, own.direction, None if own.change is None else change(own.change))


def _with_change(weight: Tensor, layer: AdapterLayer) -> Sketch:
    """Sketch the merged weight: the products of the frozen weight and of its change, and the lengths of the sums."""
    direction = _most_changed(layer)
    base = sketch(weight, direction)
    vectors = _signs(base.shape[-1]) if direction is None else np.c_[_signs(base.shape[-1]), direction]
    step = max(1, _NUMBERS_AT_ONCE // base.shape[-1])
    changes, lengths = [], []
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        change = layer.weight_change(rows)
        changes.append(change @ torch.from_numpy(vectors))
        lengths.append((weight[rows].cpu().double() + change).norm(dim=1))
    products = torch.cat(changes).numpy()
    return Sketch(
        base.shape,
        base.rows + products,
        torch.cat(lengths).numpy(),
        direction,
        None if direction is None else products[:, -1:],
    )


def _most_changed(layer: AdapterLayer) -> Rows | None:
    """Return the input that merging changes most, as long as a vector of signs; None if nothing changes.

    Rounded to float32, the precision of the file, so that the products are the same when they are computed again.
    """
    direction = layer.change_direction()
    return None if direction is None else (direction * len(direction) ** 0.5).float().double().numpy()


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Name every weight as it will be called once nothing lies beside it; tied ones come under each of their names."""
    for name, weight in model.named_parameters(remove_duplicate=False):
        if name.endswith((".lora_A", ".lora_B")):
            continue
        yield name.replace(".base_layer.", "."), weight


@cache
def _signs(width: int) -> Rows:
    """Draw vectors of signs, the same for ever: the bits of PCG64, whose stream is part of its name."""
    words = np.random.PCG64([_SEED, width]).random_raw(-(-width * NUM_SIGNS // 64))
    bits = np.unpackbits(np.asarray(words, "<u8").view(np.uint8))[: width * NUM_SIGNS]
    return (bits.reshape(width, NUM_SIGNS) * 2.0 - 1.0).astype(np.float64)


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
    return json.loads(files("tunewell.export.proof").joinpath("tensor_bounds.json").read_text(encoding="utf-8"))


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
