"""Compare every tensor of an artefact with the trained one, within the rounding error of its number format."""

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
from tunewell.export.proof.sketch import NUM_SIGNS, Rows, Sketch, sketch
from tunewell.records.parity import Check

# How the constants work together. Let r be a type's bound on |error| / |tensor| (`tensor_bounds.json`, about twice what
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


@cache
def tensor_bounds() -> dict[str, dict[str, Any]]:
    """Return the largest relative rounding error of each number format, with its reason."""
    return json.loads(files("tunewell.export.proof").joinpath("tensor_bounds.json").read_text(encoding="utf-8"))


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
    bound = "; ".join(
        f"{kind} {tensor_bounds()[kind]['relative']:g}: {tensor_bounds()[kind]['because']}" for kind in errors
    )
    is_ok = not problems and num_tensors > 0
    return Check(name="tensors", is_ok=is_ok, words=message, figures=figures, bound=bound)


def _find_problem(pair: Compared) -> str | None:
    """Return what is wrong with a tensor; None if it is the trained one. The steps are numbered as above."""
    trained, found, name = pair.trained, pair.found, pair.name
    bound = tensor_bounds().get(pair.kind)
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
