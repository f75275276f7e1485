"""Compare every tensor of an artefact with the trained tensor by random-sign sketches, within the rounding error.

A sketch is a few values for each row of a tensor, from which the distance to any other tensor can be estimated.

The product of a difference d with a vector of random signs has mean 0 and variance |d|^2. So a few products per row
estimate |d| without a second copy of the weights:

    tensor [R, C] @ signs [C, 4]  ->  rows [R, 4]        (row - other row) . sign  ~  |row - other row|
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.core.units import count
from tunewell.export.proof.checks import bounds
from tunewell.machine.device import torch_threads, useful_threads
from tunewell.methods.base import AdapterLayer, adapter_layers
from tunewell.records.parity import Check

Rows = npt.NDArray[np.float64]
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
Rounding = Callable[[Tensor], Tensor]
"""Function that converts rows to a file's number format and back."""
NUM_SIGNS = 4
_SEED = 20_261_115
_NUMBERS_AT_ONCE = 1 << 18
"""Numbers converted to fp64 at once: 2 MiB, which stay in the processor's cache."""


@dataclass(frozen=True)
class Sketch:
    """The sketch of one tensor. In a one-dimensional tensor, every value is a row."""

    shape: tuple[int, ...]
    rows: Rows
    """[R, NUM_SIGNS], plus one column if there is a direction. For a one-dimensional tensor, its values: [R, 1]."""
    lengths: Rows
    """Euclidean norm of each row: [R]."""
    direction: Rows | None = None
    """The direction in which training changed the rows most, scaled to the norm of a sign vector: [C]."""
    change: Rows | None = None
    """The change of the last column of `rows` by training: [R, 1]."""

    @classmethod
    def of_values(cls, values: Rows) -> "Sketch":
        """Return the sketch of a one-dimensional tensor with these values [R, 1]."""
        return cls((len(values),), values, np.abs(values[:, 0]))

    def map_rows(self, change: Callable[[Rows], Rows]) -> "Sketch":
        """Return the sketch after a permutation of rows, or after an operation on the values of a 1-D tensor."""
        if len(self.shape) < 2:
            return Sketch.of_values(change(self.rows))
        lengths = change(self.lengths[:, None])[:, 0]
        added = None if self.change is None else change(self.change)
        return Sketch(self.shape, change(self.rows), lengths, self.direction, added)


def sketch(
    tensor: Tensor,
    direction: Rows | None = None,
    *,
    rounding: Rounding | None = None,
    change: Callable[[slice], Tensor] | None = None,
) -> Sketch:
    """Return the sketch of a tensor in fp64, after `rounding`, or after the `change` of these rows is added to it."""
    shape = tuple(tensor.shape)
    rows = tensor.detach().reshape(-1, shape[-1] if len(shape) > 1 else 1)
    if len(shape) < 2:
        return Sketch.of_values(rows.double().numpy(force=True))
    vectors = torch.from_numpy(_sign_vectors(shape[-1]))
    if direction is not None and len(direction) == shape[-1]:
        vectors = torch.cat([vectors, torch.from_numpy(direction)[:, None]], dim=1)
    step = max(1, _NUMBERS_AT_ONCE // max(1, rows.shape[1]))
    products, lengths, changes = [], [], []
    for start in range(0, len(rows), step):
        part = rows[start : start + step].cpu()
        part = (part if rounding is None else rounding(part)).double()
        if change is not None:
            added = change(slice(start, start + step))
            changes.append((added @ vectors[:, -1:]).numpy())
            part = part + added
        products.append((part @ vectors).numpy())
        lengths.append(part.norm(dim=1).numpy())
    trained = (direction, np.concatenate(changes)) if changes else ()
    return Sketch(shape, np.concatenate(products), np.concatenate(lengths), *trained)


def map_tensors(
    compute: Callable[[_Item], _Result],
    items: Collection[_Item],
    *,
    stage: str = "tensors",
    progress: ProgressListener = silent,
) -> Iterator[_Result]:
    """Yield the result of each item in order, computed on all cores with one torch thread each."""
    with torch_threads(1), ThreadPoolExecutor(max(useful_threads())) as pool:
        for index, result in enumerate(pool.map(torch.no_grad()(compute), items), start=1):
            progress(Progress(stage, index, len(items), "tensors"))
            yield result


def sketch_model(
    model: PreTrainedModel, *, progress: ProgressListener = silent
) -> tuple[dict[str, Sketch], dict[str, str]]:
    """Return the sketch of every weight after the merge, and the other names of tied weights.

    The sketch of an adapter is added to the sketch of its layer. The weights themselves are not merged, so a bug in
    merging does not affect the sketches.
    """
    adapted = {f"{name}.weight": layer for name, layer in adapter_layers(model).items()}
    weights = {
        name.replace(".base_layer.", "."): weight
        for name, weight in model.named_parameters(remove_duplicate=False)
        if not name.endswith((".lora_A", ".lora_B", ".lora_magnitude_vector"))
    }
    first_names: dict[int, str] = {}
    for name, weight in weights.items():
        first_names.setdefault(id(weight), name)
    tied = {name: first for name, weight in weights.items() if (first := first_names[id(weight)]) != name}

    def sketch_one(name: str) -> Sketch:
        return _sketch_merged(weights[name], adapted[name]) if name in adapted else sketch(weights[name])

    names = list(first_names.values())
    sketches = map_tensors(sketch_one, names, stage="sketching", progress=progress)
    return dict(zip(names, sketches, strict=True)), tied


def as_arrays(sketches: Mapping[str, Sketch]) -> dict[str, npt.NDArray[np.float32]]:
    """Return the arrays of sketches by their names in a safetensors file."""
    arrays = {f"{part}/{name}": getattr(own, part) for name, own in sketches.items() for part in _parts(own.shape)}
    return {name: array.astype(np.float32) for name, array in arrays.items() if array is not None}


def from_arrays(arrays: Mapping[str, npt.NDArray[np.float32]], shapes: Mapping[str, list[int]]) -> dict[str, Sketch]:
    """Return the sketches from the arrays of a file; raise KeyError if one is missing."""
    sketches = {}
    for name, shape in shapes.items():
        found = {part: arrays[f"{part}/{name}"] for part in _parts(shape) if f"{part}/{name}" in arrays}
        parts = {part: array.astype(np.float64) for part, array in found.items()}
        rows = parts.pop("rows")
        lengths = parts.pop("lengths") if len(shape) > 1 else np.abs(rows[:, 0])
        sketches[name] = Sketch(tuple(shape), rows, lengths, **parts)
    return sketches


def _parts(shape: Sequence[int]) -> tuple[str, ...]:
    """Return the attributes of a sketch that are stored; the norms of single values are the values themselves."""
    return ("rows", "lengths", "direction", "change") if len(shape) > 1 else ("rows",)


def _sketch_merged(weight: Tensor, layer: AdapterLayer) -> Sketch:
    """Return the sketch of a weight with its change, along the direction in which the adapter changes it most."""
    unit = layer.change_direction()
    if unit is None:
        return sketch(weight)
    # With the norm of a sign vector, rounded to fp32 as in the file, so that later products are the same.
    direction = (unit * len(unit) ** 0.5).float().double().numpy()
    return sketch(weight, direction, change=layer.weight_change)


@cache
def _sign_vectors(width: int) -> Rows:
    """Return the sign vectors. They never change, because PCG64 guarantees its stream of raw bits."""
    words = np.random.PCG64([_SEED, width]).random_raw(-(-width * NUM_SIGNS // 64))
    bits = np.unpackbits(np.asarray(words, "<u8").view(np.uint8))[: width * NUM_SIGNS]
    return (bits.reshape(width, NUM_SIGNS) * 2.0 - 1.0).astype(np.float64)


# Comparison.

# The constants of the comparison. Let r be a type's bound on |error| / |tensor| (`bounds.json`, about twice the usual
# value) and N the number of products in the sketch: R rows times NUM_SIGNS.
#
# 1. whole tensor  |error| <= r |tensor|. The sketch estimates |error| with a relative standard deviation of 1/sqrt(2N),
#                  so four standard deviations are added.
# 2. each row      A product is normally distributed with standard deviation |row error| <= r |row|. Up to
#                  _MAX_DEVIATIONS = 6 are allowed: of 10 million rows, one is expected beyond 5.4 by chance. _FLOOR
#                  adds 1% of the mean row norm, because a nearly empty row may share a block and its step with others.
# 3. format        The rounded tensor is known exactly (`Compared.rounded`), except for differences between versions of
#                  the library: _OTHER_VERSION = 30% of bound 1 is allowed, far below the error of different weights.
# 4. scale         A regression of the found rows on the expected rows. Its uncertainty is 6 standard deviations of the
#                  residual, plus _BIAS = 10% of r: rounding to nearest is unbiased except for the smallest values.
# 5. change        A regression of the found change on the trained change (see _Changes): _STRENGTH = 3% plus 6 standard
#                  deviations of the residual. It is reported only if the uncertainty is below _REPORTED = 25%.
_MAX_DEVIATIONS = 6
_FLOOR = 0.01
_OTHER_VERSION = 0.3
_BIAS = 0.1
_STRENGTH = 0.03
_REPORTED = 0.25
_MAX_SHOWN = 3
UNBLOCKED_TYPES = frozenset({"F32", "F16", "BF16"})
"""Types that round each value separately, not in blocks."""
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Compared:
    """A tensor of an artefact, paired with the trained tensor."""

    name: str
    kind: str
    """The number format: `F32`, `BF16`, `Q4_K`, ..."""
    trained: Sketch
    found: Sketch
    rounded: Rows | None = None
    """Sketch rows of the trained tensor after rounding to this format, if they were computed."""

    @property
    def expected_rows(self) -> Rows | None:
        """The rows of a correct file, apart from unbiased rounding; None if they are unknown."""
        return self.trained.rows if self.kind in UNBLOCKED_TYPES else self.rounded


def compare_weights(
    weights: Mapping[str, torch.Tensor], trained: Mapping[str, Sketch], kind: str
) -> Iterator[Compared]:
    """Yield the weights of a loaded model, paired with the trained weights of the same name."""
    names = [name for name in trained if name in weights]
    sketches = map_tensors(lambda name: sketch(weights[name], trained[name].direction), names)
    for name, found in zip(names, sketches, strict=True):
        yield Compared(name, kind, trained[name], found)


def check_tensors(pairs: Iterable[Compared], *, missing: Iterable[str], unknown: Iterable[str]) -> Check:
    """Check that every tensor is present, matches the trained tensor, and contains the full change by training."""
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
    figures = {"tensors": num_tensors, "wrong": len(problems), "errors": errors, "strength": strength}
    ranges = ", ".join(f"{kind} within {error:.1e}" for kind, error in errors.items())
    message = f"{count(num_tensors, 'tensor')}: {ranges} of the trained weights"
    if strength is not None:
        message += f"; {strength:.1%} of the change by training is present"
    if problems:
        more = f"; {len(problems)} in all" if len(problems) > _MAX_SHOWN else ""
        message = "; ".join(problems[:_MAX_SHOWN]) + more
    allowed = {kind: bounds()["tensors"][kind] for kind in errors}
    bound = "; ".join(f"{kind} {own['relative']:g}: {own['because']}" for kind, own in allowed.items())
    is_ok = not problems and num_tensors > 0
    return Check(name="tensors", is_ok=is_ok, words=message, figures=figures, bound=bound)


def _find_problem(pair: Compared) -> str | None:
    """Return the problem with a tensor, or None if it matches the trained tensor. Steps are numbered as above."""
    trained, found, name = pair.trained, pair.found, pair.name
    bound = bounds()["tensors"].get(pair.kind)
    if bound is None:
        return f"`{name}` is stored as {pair.kind}, which has no known error bound"
    if trained.rows.shape != found.rows.shape:
        return f"`{name}` has the shape {found.shape}; expected {trained.shape}"
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
    # 2. each row; in a one-dimensional tensor a row is a single value, and its error itself is bounded
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
    """The share of the adapter's change that is present in a file: in total, by layer, and by kind of tensor.

    An adapter changes a tensor by less than rounding does. But along the direction of its largest change, over all rows
    of many tensors, the share can be measured to a percent.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Rows] = {}
        self._reported: Rows = np.zeros(6)

    def add(self, pair: Compared) -> None:
        """Add a tensor to the measurement, if training changed it."""
        change = pair.trained.change
        if change is None or not change.any():
            return
        usual = bounds()["tensors"][pair.kind]["relative"] / 2 * pair.trained.lengths[:, None]
        self._reported = self._reported + _sums(change, pair.found.rows - pair.trained.rows, usual)
        # Rounding in blocks can undo a change if the base was quantised to the same grid. So the file is compared with
        # the trained tensor after the same rounding.
        if pair.expected_rows is not None:
            for group in self._groups(pair.name):
                usual = usual if pair.kind in UNBLOCKED_TYPES else np.zeros_like(usual)
                sums = _sums(change, pair.found.rows - pair.expected_rows, usual)
                self._sums[group] = self._sums.get(group, 0) + sums

    @property
    def strength(self) -> float | None:
        """The share of the change that is present; None if rounding hides it, or if training changed nothing."""
        if not self._reported[1]:
            return None
        off, doubt = _regress(self._reported)
        return 1 + off if doubt < _REPORTED else None

    def problems(self) -> list[str]:
        """Return a message for each group whose share differs from that of a correctly rounded file."""
        found = []
        for group, sums in self._sums.items():
            off, doubt = _regress(sums)
            if abs(off) > _STRENGTH + doubt:
                found.append(f"{1 + off:.0%} of the change by training is present{f' in {group}' if group else ''}")
        return found

    @staticmethod
    def _groups(name: str) -> list[str]:
        match = _LAYER.search(name)
        layer = [f"layer {match[1]}", f"every `{_LAYER.sub('.*.', name)}`"] if match else []
        return ["", *layer, f"`{name}`"]


def _sums(change: Rows, error: Rows, usual: Rows) -> Rows:
    """Return sums for `_regress`; those of several tensors can be added. `usual` is the rounding of a row."""
    error = error[:, -1:]
    terms = (change * error, change**2, change**2 * error**2, change**3 * error, change**4, change**2 * usual**2)
    return np.array([term.sum() for term in terms])


def _regress(sums: Rows) -> tuple[float, float]:
    """Regress the error on the change; return the slope and its uncertainty due to rounding."""
    product, square, mixed, skew, fourth, rounding = sums
    slope = product / square
    # The variance of the residual: the error without the part that is explained by the change. Of a change in few rows,
    # the slope explains even the rounding, so the variance is at least the usual one.
    residual = max(rounding, mixed - 2 * slope * skew + slope**2 * fourth)
    return float(slope), float(_MAX_DEVIATIONS * math.sqrt(residual) / square)


def _relative_error(pair: Compared) -> float:
    norm = float(np.sqrt((pair.trained.lengths**2).sum()))
    return _norm((pair.found.rows - pair.trained.rows)[:, :NUM_SIGNS]) / norm if norm else 0.0


def _norm(products: Rows) -> float:
    """Estimate the Euclidean norm of a tensor from its products with sign vectors."""
    return float(np.sqrt((products**2).sum() / products.shape[1]))
