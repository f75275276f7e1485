"""Compare systems on the same questions: intervals and tests that treat questions on one fact as one observation.

Five wordings of one fact are five answers, but little more than one observation. The statistics here use the sums of
the clusters, as found by `clusters.py`. `benchmarks/intervals.py` measures their false alarms and their coverage.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tunewell.records.report import DifferenceRecord

LEVEL = 0.05
"""Significance level of tests; intervals have a confidence of 1 - LEVEL."""
POWER = 0.8
"""Probability with which the estimated number of questions shows a difference of the observed size."""
_MAX_EXACT = 13
"""Maximum number of clusters for which all 2^n sign flips are computed."""
_NUM_FLIPS = 9999
_MAX_SIGN_TEST = 1000
"""Maximum number of clusters for which the sign test is computed from binomial coefficients, which fit a float."""
_FEW_DIFFERENT = 15
"""With fewer clusters that differ, the sign-flip interval can be too narrow: it covered 68% to 92% in simulations."""
_ROUNDING = 1e-9

Values = npt.NDArray[np.float64]


class Interval(NamedTuple):
    """A 95% interval."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference between two systems on the same questions, with its interval and test."""

    first: str
    second: str
    difference: float
    low: float
    high: float
    """95% interval of the difference, not adjusted for the number of pairs."""
    p: float
    """P-value of the sign-flip test, adjusted by Holm's method if several pairs are compared."""
    num_questions: int
    num_clusters: int
    more_questions: int | None
    """Estimated number of additional questions that would show a difference of this size; None if it is shown
    already, or if the systems do not differ at all."""

    @property
    def is_shown(self) -> bool:
        """Whether the systems differ by more than chance explains."""
        return self.p <= LEVEL


class PairedDifference(Difference):
    """The mean of the first system minus the mean of the second."""

    def describe(self) -> str:
        """Return the result in one sentence without its end."""
        if self.is_shown and self.difference:
            better, worse = (self.first, self.second) if self.difference > 0 else (self.second, self.first)
            bounds = (self.low, self.high)
            low, high = sorted(abs(bound) if bound * self.difference > 0 else 0.0 for bound in bounds)
            return f"{better} is better than {worse} by {100 * low:.0f} to {100 * high:.0f} percentage points"
        if self.more_questions is None:
            return "no difference shown"
        return f"no difference shown; about {self.more_questions:,} more questions would show a difference of this size"


def compare_pair(
    first: Sequence[float | bool],
    second: Sequence[float | bool],
    clusters: Sequence[int],
    *,
    names: tuple[str, str] = ("first", "second"),
) -> PairedDifference:
    """Compare two systems on the same questions. Values are True and False, or scores such as F1."""
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    return _paired(*_cluster_sums(differences, clusters), difference_interval(first, second, clusters), names)


def compare_sums(sums: npt.ArrayLike, sizes: npt.ArrayLike, *, names: tuple[str, str]) -> PairedDifference:
    """Compare two systems by the differences of their sums, such as losses by document, and the sizes of these."""
    sums, sizes = np.asarray(sums, dtype=np.float64), np.asarray(sizes, dtype=np.float64)
    interval = _invert_sign_flips(sums, sizes) or Interval(-math.inf, math.inf)
    found = _paired(sums, sizes, interval, names)
    return replace(found, num_questions=len(sums), more_questions=_questions_to_tell(sums, np.ones(len(sums))))


def _paired(sums: Values, sizes: Values, interval: Interval, names: tuple[str, str]) -> PairedDifference:
    num_questions, p = int(sizes.sum()), sign_flip_p(sums, range(len(sums)))
    if p > LEVEL:  # the test decides, and the interval must not contradict it
        interval = Interval(min(interval.low, 0.0), max(interval.high, 0.0))
    return PairedDifference(
        first=names[0],
        second=names[1],
        difference=float(sums.sum() / num_questions) if num_questions else 0.0,
        low=interval.low,
        high=interval.high,
        p=p,
        num_questions=num_questions,
        num_clusters=len(sums),
        more_questions=_questions_to_tell(sums, sizes),
    )


def difference_record(found: PairedDifference) -> DifferenceRecord:
    """Return a difference as a record of the report."""
    return DifferenceRecord(**vars(found), result=found.describe())


def sign_flip_p(differences: Sequence[float] | Values, clusters: Sequence[int]) -> float:
    """Return the p-value of the hypothesis that the differences are as often positive as negative, by cluster.

    The sign of each cluster's sum is flipped: in all ways for few clusters, otherwise in 9,999 random ways with a fixed
    seed. With sums of one size, as with one question per cluster, this is the exact sign test (McNemar).
    """
    sums, _ = _cluster_sums(np.asarray(differences, dtype=np.float64), clusters)
    sums = sums[np.abs(sums) > _ROUNDING]
    if not len(sums):
        return 1.0
    if len(sums) <= _MAX_SIGN_TEST and np.ptp(np.abs(sums)) <= _ROUNDING:
        number, positive = len(sums), int((sums > 0).sum())
        least = max(positive, number - positive)
        tail = sum(math.comb(number, index) for index in range(least, number + 1)) / 2**number
        return min(1.0, 2 * tail)
    signs, is_exact = _sign_flips(len(sums))
    flipped, observed = np.abs(signs @ sums), abs(sums.sum())
    as_extreme = int((flipped >= observed - _ROUNDING).sum())
    return as_extreme / len(flipped) if is_exact else (as_extreme + 1) / (len(flipped) + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for their number by Holm's method, in the same order."""
    order = np.argsort(p_values, kind="stable")
    adjusted = np.arange(len(p_values), 0, -1) * np.asarray(p_values)[order]
    return np.minimum(1.0, np.maximum.accumulate(adjusted))[np.argsort(order)].tolist()


def share_interval(right: Sequence[float | bool], clusters: Sequence[int]) -> Interval:
    """Return the 95% interval of a share: Wilson's, with the effective number of questions and a t quantile."""
    sums, sizes = _cluster_sums(np.asarray(right, dtype=np.float64), clusters)
    if not len(sizes):
        return Interval(0.0, 1.0)
    share, error = _mean_and_error(sums, sizes)
    variance = share * (1 - share)
    effective = min(sizes.sum(), variance / error**2) if error > 0 else sizes.sum()
    if variance <= _ROUNDING:
        # All answers are right, or all are wrong: the correlation within clusters is unknown, so assume the largest.
        effective = len(sizes)
    # The variance is uncertain if few clusters contain a wrong answer, or a right one.
    num_mixed = int(min((sums > _ROUNDING).sum(), (sums < sizes - _ROUNDING).sum()))
    quantile = _t_quantile(max(4, min(len(sizes) - 1, 2 * num_mixed)))
    weight = quantile**2 / effective
    centre = (share + weight / 2) / (1 + weight)
    half = math.sqrt(variance * weight + weight**2 / 4) / (1 + weight)
    return Interval(float(max(0.0, centre - half)), float(min(1.0, centre + half)))


def difference_interval(
    first: Sequence[float | bool], second: Sequence[float | bool], clusters: Sequence[int]
) -> Interval:
    """Return the 95% interval of a difference: the values that the sign-flip test does not reject.

    With few clusters that differ, the test hardly limits the difference, so the interval is extended to the one that
    follows from the intervals of both shares (Newcombe's hybrid score interval).
    """
    this, other = (np.asarray(values, dtype=np.float64) for values in (first, second))
    sums, sizes = _cluster_sums(this - other, clusters)
    if not len(sizes):
        return Interval(-1.0, 1.0)
    tested = _invert_sign_flips(sums, sizes)
    # If all questions differ alike, the test limits nothing.
    if (
        tested is not None
        and tested.low < tested.high
        and (not tested.low <= 0 <= tested.high or (sums != 0).sum() >= _FEW_DIFFERENT)
    ):
        return tested
    hybrid = _hybrid_interval(this, other, clusters)
    low, high = tested or hybrid
    return Interval(min(low, hybrid.low), max(high, hybrid.high))


def _cluster_sums(values: Values, clusters: Sequence[int]) -> tuple[Values, Values]:
    """Return the sum of the values and the number of questions of each cluster."""
    if len(values) != len(clusters):
        raise ValueError(f"{len(values)} values, but {len(clusters)} cluster numbers")
    _, numbers = np.unique(np.asarray(clusters, dtype=np.int64), return_inverse=True)
    return np.bincount(numbers, weights=values).astype(np.float64), np.bincount(numbers).astype(np.float64)


def _mean_and_error(sums: Values, sizes: Values) -> tuple[float, float]:
    """Return the mean per question and its standard error, which allows for correlation within clusters."""
    mean, number = float(sums.sum() / sizes.sum()), len(sums)
    if number < 2:
        return mean, 0.0
    residuals = sums - mean * sizes
    return mean, math.sqrt(number / (number - 1) * float((residuals**2).sum())) / float(sizes.sum())


@lru_cache(maxsize=4)
def _sign_flips(number: int) -> tuple[npt.NDArray[np.float32], bool]:
    """Return sign flips, one per row, and whether they are all that exist; the first of all flips changes nothing."""
    if number <= _MAX_EXACT:
        bits = (np.arange(2**number)[:, None] >> np.arange(number)) & 1
        return (1 - 2 * bits).astype(np.float32), True
    random = np.random.default_rng(0).integers(0, 2, size=(_NUM_FLIPS, number), dtype=np.int8)
    return (2 * random - 1).astype(np.float32), False


def _invert_sign_flips(sums: Values, sizes: Values) -> Interval | None:
    """Return the differences that the sign-flip test does not reject, or None if there are too few clusters.

    A flip is as extreme as the observed sum for a difference d if d is beyond (S - S') / (N - N'), where S' and N' are
    the flipped sums. The interval lies between quantiles of these values.
    """
    signs, _ = _sign_flips(len(sums))
    kept = sizes.sum() - signs @ sizes
    is_flipped = kept > _ROUNDING
    limits = np.sort((sums.sum() - signs @ sums)[is_flipped] / kept[is_flipped])
    outside = math.floor(LEVEL / 2 * (len(limits) + 1))
    if outside < 1:
        return None
    return Interval(float(limits[outside - 1]), float(limits[-outside]))


def _hybrid_interval(first: Values, second: Values, clusters: Sequence[int]) -> Interval:
    one, two = (share_interval(values.tolist(), clusters) for values in (first, second))
    (mean, error), (other_mean, other_error), (difference, joint) = (
        _mean_and_error(*_cluster_sums(values, clusters)) for values in (first, second, first - second)
    )
    product = error * other_error
    correlation = (error**2 + other_error**2 - joint**2) / (2 * product) if product > 0 else 0.0
    correlation = max(-1.0, min(1.0, correlation))

    def reach(this: float, other: float) -> float:
        return math.sqrt(max(0.0, this**2 + other**2 - 2 * correlation * this * other))

    low = difference - reach(mean - one.low, two.high - other_mean)
    high = difference + reach(one.high - mean, other_mean - two.low)
    return Interval(max(-1.0, low), min(1.0, high))


def _questions_to_tell(sums: Values, sizes: Values) -> int | None:
    """Return how many more questions, in clusters of the same sizes, would show a difference of the observed size."""
    if len(sizes) < 2:
        return None
    difference, error = _mean_and_error(sums, sizes)
    if abs(difference) <= _ROUNDING or error <= 0:
        return None
    normal = NormalDist()
    ratio = (normal.inv_cdf(1 - LEVEL / 2) + normal.inv_cdf(POWER)) * error / difference
    more = float(sizes.sum()) * (ratio**2 - 1)
    if more < 1:
        return 1
    digits = 10 ** max(0, math.floor(math.log10(more)) - 1)
    return math.ceil(more / digits) * digits


def _t_quantile(degrees: int) -> float:
    """Return the 97.5% quantile of Student's t for at least 4 degrees of freedom (Cornish-Fisher; error below 0.1%)."""
    z = NormalDist().inv_cdf(1 - LEVEL / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))
