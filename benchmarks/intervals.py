"""Measure the statistics of comparisons: false alarms of the tests, and coverage of the intervals, by simulation.

    python benchmarks/intervals.py                  1,000 comparisons without a difference, and 1,000 with one
    python benchmarks/intervals.py --comparisons 200

A comparison has 10 to 100 clusters (facts), each asked in 1 to 8 wordings. In each comparison, the share of right
answers (50% to 99%), the correlation within clusters (0.2 to 0.8) and the share of facts that are equally hard for both
systems (0.1 to 0.9) are drawn at random. `six pairs` compares four systems.

Bars: at most 7% false alarms at a level of 5%; the intervals cover the true value in at least 92%.
"""

import argparse
import time
from itertools import combinations

import numpy as np
from setting import setting, table

from tunewell.evaluation.intervals import LEVEL, compare_pair, holm, share_interval, sign_flip_p

GROUPS = ((10, 14), (15, 29), (30, 59), (60, 100))
MAX_FALSE_ALARMS, MIN_COVERAGE = 0.07, 0.92


class Simulation:
    """Draw the answers of systems to the wordings of facts."""

    def __init__(self, rng: np.random.Generator, *, num_clusters: int, gap: float) -> None:
        self.rng, self.gap = rng, gap
        self.sizes = rng.integers(1, 9, num_clusters)
        self.clusters = np.repeat(np.arange(num_clusters), self.sizes).tolist()
        self.share = rng.choice([0.5, 0.7, 0.85, 0.95, 0.99])
        self.correlation, self.in_common = rng.uniform(0.2, 0.8), rng.uniform(0.1, 0.9)
        self._common = self._chances(self.share)

    def answers(self, *, is_second: bool = False) -> np.ndarray:
        """Return which answers of a system are right; the second one is right less often by `gap`."""
        share = self.share - self.gap * is_second
        is_common = self.rng.random(len(self.sizes)) < self.in_common
        chances = np.where(is_common, self._common * share / self.share, self._chances(share))
        return self.rng.random(len(self.clusters)) < np.repeat(chances, self.sizes)

    def _chances(self, share: float) -> np.ndarray:
        factor = (1 - self.correlation) / self.correlation
        return self.rng.beta(factor * share, factor * (1 - share), len(self.sizes))


def simulate(
    num_comparisons: int, *, gap: float, seed: int, groups: tuple[tuple[int, int], ...] = GROUPS
) -> list[dict]:
    """Return the outcome of each comparison; the numbers of clusters go through the groups in turn."""
    rng, found = np.random.default_rng(seed), []
    for index in range(num_comparisons):
        low, high = groups[index % len(groups)]
        case = Simulation(rng, num_clusters=int(rng.integers(low, high + 1)), gap=gap)
        first, second = case.answers(), case.answers(is_second=True)
        pair = compare_pair(first, second, case.clusters)
        share, difference = share_interval(first, case.clusters), first.astype(float) - second
        pairs = combinations([second, first, case.answers(), case.answers()], 2)
        found.append(
            {
                "group": f"{low} to {high}",
                "sign-flip": pair.is_shown,
                "sign test": sign_flip_p(difference, range(len(first))) <= LEVEL,
                "six pairs, Holm": min(holm([compare_pair(*pair, case.clusters).p for pair in pairs])) <= LEVEL,
                "difference covered": pair.low - 1e-9 <= gap <= pair.high + 1e-9,
                "share covered": share.low <= case.share <= share.high,
                "width": pair.high - pair.low,
            }
        )
    return found


def shares(found: list[dict], columns: list[str]) -> str:
    """Return the shares by number of clusters as Markdown."""
    rows = []
    for group in [*dict.fromkeys(one["group"] for one in found), "all"]:
        chosen = [one for one in found if group in (one["group"], "all")]
        rows.append([group, f"{len(chosen):,}", *(f"{np.mean([one[name] for one in chosen]):.1%}" for name in columns)])
    return table(["clusters", "comparisons", *columns], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.perf_counter()
    without = simulate(given.comparisons, gap=0.0, seed=given.seed)
    gap = simulate(given.comparisons, gap=0.08, seed=given.seed + 1)
    covered = ["difference covered", "share covered"]
    print(setting("numpy"))
    print("\nNo difference: false alarms, and coverage of the intervals\n")
    print(shares(without, ["sign test", "sign-flip", "six pairs, Holm", *covered]))
    print("\nA difference of 8 points: shown, and covered\n")
    print(shares(gap, ["sign-flip", *covered]))
    alarms = np.mean([one["sign-flip"] for one in without])
    coverage = min(np.mean([one[name] for one in [*without, *gap]]) for name in covered)
    holds = alarms <= MAX_FALSE_ALARMS and coverage >= MIN_COVERAGE
    print(f"\n{'The bars hold' if holds else 'A bar does not hold'} ({time.perf_counter() - began:.0f} s)")
    raise SystemExit(not holds)


if __name__ == "__main__":
    main()
