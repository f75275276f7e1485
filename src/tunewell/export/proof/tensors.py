"""Compare every tensor of an artefact with the trained one by random-sign sketches, within its rounding error.

A sketch is a few numbers for each row of a tensor. They measure how far any other tensor is from it.

The product of a difference d with a vector of random signs has mean 0 and variance |d|^2. So a few products per row
measure |d| without a second copy of the weights:

    tensor [R, C] @ signs [C, 4]  ->  rows [R, 4]        (row - other row) . sign  ~  |row - other row|
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tunewell.core.units import count
from tunewell.export.proof.checks import bounds
from tunewell.methods.base import AdapterLayer, adapter_layers
from tunewell.records.parity import Check

Rows = npt.NDArray[np.float64]
Rounding = Callable[[Tensor], Tensor]
"""Stores rows in a file's format and reads them back."""
NUM_SIGNS = 4
_SEED = 20_261_115
_NUMBERS_AT_ONCE = 1 << 22
_ROWS, _LENGTHS, _CHANGE, _DIRECTION = "rows/", "lengths/", "change/", "direction/"


@dataclass(frozen=True)
class Sketch:
    """The sketch of one tensor. In a tensor of one dimension every number is a row."""

    shape: tuple[int, ...]
    rows: Rows
    """[R, signs], plus one column if there is a direction. [R, 1] with the values themselves for one dimension."""
    lengths: Rows
    """Euclidean norm of each row: [R]."""
    direction: Rows | None = None
    """The direction in which training changed the rows most, with the norm of a sign vector: [C]."""
    change: Rows | None = None
    """What training added to the last column of `rows`: [R, 1]."""

    def map_rows(self, change: Callable[[Rows], Rows]) -> "Sketch":
        """Return the sketch after a permutation of the rows, or an operation on the values of one dimension."""
        rows = change(self.rows)
        lengths = np.abs(rows[:, 0]) if len(self.shape) < 2 else change(self.lengths[:, None])[:, 0]
        added = None if self.change is None else change(self.change)
        return Sketch(self.shape, rows, lengths, self.direction, added)


def sketch(tensor: Tensor, direction: Rows | None = None, *, rounding: Rounding | None = None) -> Sketch:
    """Sketch a tensor in fp64, some rows at a time; with `rounding`, sketch the rounded tensor."""
    shape = tuple(tensor.shape)
    rows = tensor.detach().reshape(-1, shape[-1] if len(shape) > 1 else 1)
    if len(shape) < 2:
        values = rows.double().numpy(force=True)
        return Sketch(shape, values, np.abs(values[:, 0]))
    vectors = torch.from_numpy(_sign_vectors(shape[-1]))
    if direction is not None and len(direction) == shape[-1]:
        vectors = torch.cat([vectors, torch.from_numpy(direction)[:, None]], dim=1)
    step = max(1, _NUMBERS_AT_ONCE // max(1, rows.shape[1]))
    products, lengths = [], []
    for start in range(0, len(rows), step):
        part = rows[start : start + step].cpu()
        part = (part if rounding is None else rounding(part)).double()
        products.append((part @ vectors).numpy())
        lengths.append(part.norm(dim=1).numpy())
    return Sketch(shape, np.concatenate(products), np.concatenate(lengths))


@torch.no_grad()
def sketch_model(model: PreTrainedModel) -> tuple[dict[str, Sketch], dict[str, str]]:
    """Sketch every weight as it will be after the merge; also return the other names of tied weights.

    The sketch of an adapter is added to the sketch of its layer. The weights are not merged, so that a bug in merging
    cannot hide here.
    """
    adapted = {f"{name}.weight": layer for name, layer in adapter_layers(model).items()}
    sketches: dict[str, Sketch] = {}
    first_names: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, weight in _named_weights(model):
        if id(weight) in first_names:
            tied[name] = first_names[id(weight)]
            continue
        first_names[id(weight)] = name
        sketches[name] = _sketch_merged(weight, adapted[name]) if name in adapted else sketch(weight)
    return sketches, tied


def as_arrays(sketches: Mapping[str, Sketch]) -> dict[str, npt.NDArray[np.float32]]:
    """Return the numbers of sketches under the names they have in a safetensors file."""
    arrays = {}
    for name, own in sketches.items():
        arrays[_ROWS + name] = own.rows.astype(np.float32)
        if len(own.shape) > 1:
            arrays[_LENGTHS + name] = own.lengths.astype(np.float32)
        if own.change is not None and own.direction is not None:
            arrays[_CHANGE + name] = own.change.astype(np.float32)
            arrays[_DIRECTION + name] = own.direction.astype(np.float32)
    return arrays


def from_arrays(arrays: Mapping[str, npt.NDArray[np.float32]], shapes: Mapping[str, list[int]]) -> dict[str, Sketch]:
    """Return the sketches in the arrays of a file; raise KeyError if one is missing."""
    sketches = {}
    for name, shape in shapes.items():
        rows = arrays[_ROWS + name].astype(np.float64)
        lengths = arrays[_LENGTHS + name].astype(np.float64) if len(shape) > 1 else np.abs(rows[:, 0])
        direction, change = (
            arrays[part + name].astype(np.float64) if part + name in arrays else None for part in (_DIRECTION, _CHANGE)
        )
        sketches[name] = Sketch(tuple(shape), rows, lengths, direction, change)
    return sketches


def _sketch_merged(weight: Tensor, layer: AdapterLayer) -> Sketch:
    """Sketch the merged weight: the products of the frozen weight plus those of its change; norms of the sums."""
    direction = _largest_direction(layer)
    base = sketch(weight, direction)
    signs = _sign_vectors(base.shape[-1])
    vectors = torch.from_numpy(signs if direction is None else np.c_[signs, direction])
    step = max(1, _NUMBERS_AT_ONCE // base.shape[-1])
    products, lengths = [], []
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        change = layer.weight_change(rows)
        products.append(change @ vectors)
        lengths.append((weight[rows].cpu().double() + change).norm(dim=1))
    added = torch.cat(products).numpy()
    along_direction = None if direction is None else added[:, -1:]
    return Sketch(base.shape, base.rows + added, torch.cat(lengths).numpy(), direction, along_direction)


def _largest_direction(layer: AdapterLayer) -> Rows | None:
    """Return the input that merging changes most, with the norm of a sign vector; None if nothing changes.

    It is rounded to fp32, as the file stores it, so that later products are the same.
    """
    direction = layer.change_direction()
    return None if direction is None else (direction * len(direction) ** 0.5).float().double().numpy()


def _named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight under its name after the merge; tied weights come under each of their names."""
    for name, weight in model.named_parameters(remove_duplicate=False):
        if name.endswith((".lora_A", ".lora_B")):
            continue
        yield name.replace(".base_layer.", "."), weight


@cache
def _sign_vectors(width: int) -> Rows:
    """Draw the sign vectors. They never change: PCG64 guarantees its stream of raw bits."""
    words = np.random.PCG64([_SEED, width]).random_raw(-(-width * NUM_SIGNS // 64))
    bits = np.unpackbits(np.asarray(words, "<u8").view(np.uint8))[: width * NUM_SIGNS]
    return (bits.reshape(width, NUM_SIGNS) * 2.0 - 1.0).astype(np.float64)


# Comparison.

# How the constants work together. Let r be a type's bound on |error| / |tensor| (`bounds.json`, about twice what
# weights usually have) and N the number of products in the sketch, R rows by NUM_SIGNS.
#
# 1. whole tensor  |error| <= r |tensor|. The sketch measures |error| with a relative deviation of 1/sqrt(2N), so four
#                  of these are added.
# 2. each row      a product is normal with deviation |row error| <= r |row|. Up to _MAX_DEVIATIONS = 6 are allowed:
#                  of 10 million rows one is expected beyond 5.4 by chance. _FLOOR adds 1% of the mean row norm, because
#                  blocks that span a nearly empty row and others have the step of the others.
# 3. format        what a type rounds is known exactly (`Compared.rounded`), up to the version of the arithmetic:
#                  _OTHER_VERSION = 30% of bound 1 is allowed, far below the error of other weights.
# 4. scale         a regression of the found rows on the expected ones. Its doubt is 6 deviations of the residual, plus
#                  _BIAS = 10% of r: rounding to the nearest is unbiased except for the smallest numbers.
# 5. change        a regression of the found change on the trained change (see _Changes): _STRENGTH = 3% plus 6
#                  deviations of the residual. It is reported only where the doubt is below _REPORTED = 25%.
_MAX_DEVIATIONS = 6
_FLOOR = 0.01
_OTHER_VERSION = 0.3
_BIAS = 0.1
_STRENGTH = 0.03
_REPORTED = 0.25
_MAX_SHOWN = 3
UNBLOCKED_TYPES = frozenset({"F32", "F16", "BF16"})
"""Types that round number by number, and not in blocks."""
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Compared:
    """One tensor of an artefact beside the trained one."""

    name: str
    kind: str
    """The number format: `F32`, `BF16`, `Q4_K`, ..."""
    trained: Sketch
    found: Sketch
    rounded: Rows | None = None
    """Rows of the sketch of the trained tensor after rounding to this format, if that was computed."""

    @property
    def expected_rows(self) -> Rows | None:
        """The rows that a correct file has up to unbiased rounding; None if they are unknown."""
        return self.trained.rows if self.kind in UNBLOCKED_TYPES else self.rounded


def compare_weights(
    weights: Mapping[str, torch.Tensor], trained: Mapping[str, Sketch], kind: str
) -> Iterator[Compared]:
    """Pair the weights of a loaded model with the trained ones of the same name."""
    for name, own in trained.items():
        if name in weights:
            yield Compared(name, kind, own, sketch(weights[name], own.direction))


def check_tensors(pairs: Iterable[Compared], *, missing: Iterable[str], unknown: Iterable[str]) -> Check:
    """Check that every tensor is present, is the trained one, and contains the full change of training."""
    problems = [f"`{name}` is missing" for name in missing]
    problems += [f"`{name}` is not a tensor of the model" for name in unknown]
    changes = _Changes()
    errors: dict[str, float] = {}
    num_tensors = 0
    for pair in pairs:
        num_tensors += 1
        if (problem := _find_problem(pair)) is not None:
            problems.append(problem)
        else:
            changes.add(pair)
            errors[pair.kind] = max(errors.get(pair.kind, 0.0), _relative_error(pair))
    problems += changes.problems()
    strength = changes.strength
    figures: dict[str, Any] = {
        "tensors": num_tensors,
        "wrong": len(problems),
        "errors": errors,
        "strength": strength,
    }
    ranges = ", ".join(f"{kind} within {error:.1e}" for kind, error in errors.items())
    message = f"{count(num_tensors, 'tensor')}: {ranges} of the trained weights"
    if strength is not None:
        message += f"; {strength:.1%} of the change of training is present"
    if problems:
        more = f"; {len(problems)} in all" if len(problems) > _MAX_SHOWN else ""
        message = "; ".join(problems[:_MAX_SHOWN]) + more
    allowed = {kind: bounds()["tensors"][kind] for kind in errors}
    bound = "; ".join(f"{kind} {own['relative']:g}: {own['because']}" for kind, own in allowed.items())
    is_ok = not problems and num_tensors > 0
    return Check(name="tensors", is_ok=is_ok, words=message, figures=figures, bound=bound)


def _find_problem(pair: Compared) -> str | None:
    """Return what is wrong with a tensor; None if it is the trained one. The steps are numbered as above."""
    trained, found, name = pair.trained, pair.found, pair.name
    bound = bounds()["tensors"].get(pair.kind)
    if bound is None:
        return f"`{name}` is stored as {pair.kind}, a format without a known bound"
    if trained.rows.shape != found.rows.shape:
        return f"`{name}` has the shape {found.shape} instead of {trained.shape}"
    if not np.isfinite(found.rows).all():
        return f"`{name}` contains NaN or infinity"
    error = (found.rows - trained.rows)[:, :NUM_SIGNS]
    num_rows, num_products = len(trained.rows), error.size
    width = math.prod(trained.shape) / max(1, num_rows)
    norm = float(np.sqrt((trained.lengths**2).sum()))
    smallest = bound["smallest"] * math.sqrt(width)
    relative = bound["relative"]
    # 1. whole tensor
    allowed = relative * (1 + 4 / math.sqrt(2 * num_products)) * norm + smallest * math.sqrt(num_rows)
    if _norm(error) > allowed:
        off = _norm(error) / norm if norm else math.inf
        return f"`{name}` differs by {off:.2%} of its norm; {pair.kind} rounds by at most {relative:.2%}"
    # 2. each row; in one dimension a row is a number, and its error itself is bounded
    deviations = _MAX_DEVIATIONS if width > 1 else 1
    per_row = deviations * (relative * (trained.lengths + _FLOOR * norm / math.sqrt(num_rows)) + smallest)
    beyond = np.abs(error).max(axis=1) > per_row
    if beyond.any():
        more = f" and {int(beyond.sum()) - 1:,} more" if beyond.sum() > 1 else ""
        return f"`{name}` differs in row {int(beyond.argmax()):,}{more}"
    if pair.expected_rows is None or width == 1 or not norm:
        return None
    # 3. format
    expected = pair.expected_rows[:, :NUM_SIGNS]
    residual = found.rows[:, :NUM_SIGNS] - expected
    if pair.kind not in UNBLOCKED_TYPES and _norm(residual) > _OTHER_VERSION * allowed:
        return f"`{name}` is not the trained tensor rounded to {pair.kind}"
    # 4. scale
    scale = 1 + float((residual * expected).sum() / max(1e-30, (expected**2).sum()))
    doubt = _MAX_DEVIATIONS * _norm(residual) / norm / math.sqrt(num_products)
    if abs(scale - 1) > doubt + _BIAS * relative + smallest * math.sqrt(num_rows) / norm:
        return f"`{name}` is {scale:.4f} times the trained tensor"
    return None


class _Changes:
    """Measures which share of the adapter is in the file: in all, in each layer, in each kind of tensor.

    An adapter changes a tensor by less than rounding does. Along the direction of its largest change, over all rows of
    many tensors, the share is still known to a percent.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Rows] = {}
        self._reported: Rows = np.zeros(5)

    def add(self, pair: Compared) -> None:
        """Add a tensor, if training changed it."""
        change = pair.trained.change
        if change is None or not change.any():
            return
        self._reported = self._reported + _sums(change, pair.found.rows - pair.trained.rows)
        # Rounding in blocks can undo a change if the base was quantised to the same grid. So the trained tensor rounded
        # the same way is expected, and not the trained tensor.
        if pair.expected_rows is not None:
            for group in self._groups(pair.name):
                self._sums[group] = self._sums.get(group, 0) + _sums(change, pair.found.rows - pair.expected_rows)

    @property
    def strength(self) -> float | None:
        """The share of the change in the file; None if rounding hides it, or if training added nothing."""
        if not self._reported[1]:
            return None
        off, doubt = _regress(self._reported)
        return 1 + off if doubt < _REPORTED else None

    def problems(self) -> list[str]:
        """Return a message for each group with another share than a correctly rounded file."""
        found = []
        for group, sums in self._sums.items():
            off, doubt = _regress(sums)
            if abs(off) > _STRENGTH + doubt:
                found.append(f"{1 + off:.0%} of the change of training is present{f' in {group}' if group else ''}")
        return found

    @staticmethod
    def _groups(name: str) -> list[str]:
        match = _LAYER.search(name)
        layer = [f"layer {match[1]}", f"every `{_LAYER.sub('.*.', name)}`"] if match else []
        return ["", *layer, f"`{name}`"]


def _sums(change: Rows, error: Rows) -> Rows:
    """Return the sums that `_regress` needs; those of several tensors can be added."""
    error = error[:, -1:]
    terms = (change * error, change**2, change**2 * error**2, change**3 * error, change**4)
    return np.array([term.sum() for term in terms])


def _regress(sums: Rows) -> tuple[float, float]:
    """Regress the error on the change: return the slope, and how far rounding alone could move it from 0."""
    product, square, mixed, skew, fourth = sums
    slope = product / square
    # The residual's variance: the error without the part that the change explains.
    residual = max(0.0, mixed - 2 * slope * skew + slope**2 * fourth)
    return float(slope), float(_MAX_DEVIATIONS * math.sqrt(residual) / square)


def _relative_error(pair: Compared) -> float:
    norm = float(np.sqrt((pair.trained.lengths**2).sum()))
    return _norm((pair.found.rows - pair.trained.rows)[:, :NUM_SIGNS]) / norm if norm else 0.0


def _norm(products: Rows) -> float:
    """Estimate the Euclidean norm of a tensor from its products with sign vectors."""
    return float(np.sqrt((products**2).sum() / products.shape[1]))
