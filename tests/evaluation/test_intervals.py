"""Comparisons of systems on the same questions: tests, intervals and clusters."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from tunewell.evaluation.clusters import find_clusters
from tunewell.evaluation.comparison import Column, ColumnAnswer, compare_columns
from tunewell.evaluation.intervals import (
    LEVEL,
    compare_pair,
    difference_interval,
    holm,
    share_interval,
    sign_flip_p,
)
from tunewell.scoring.answer_keys import ReferenceRow, answer_keys

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_without_clusters_the_sign_flip_test_is_the_sign_test():
    """Guards the exact test against the binomial formula."""
    differences = [1] * 7 + [-1] * 2 + [0] * 5
    ways = sum(math.comb(9, number) for number in range(7, 10))
    assert sign_flip_p(differences, range(14)) == pytest.approx(2 * ways / 2**9)


def test_wordings_of_one_fact_are_one_observation():
    """Guards against eight wordings of one fact that count as eight pieces of evidence."""
    first, second = [True] * 8 + [False] * 4, [False] * 12
    alone, together = range(12), [0] * 8 + [1, 2, 3, 4]
    assert sign_flip_p(np.subtract(first, second, dtype=float), alone) < 0.05
    assert sign_flip_p(np.subtract(first, second, dtype=float), together) == 1.0
    wide, narrow = (difference_interval(first, second, clusters) for clusters in (together, alone))
    assert wide.high - wide.low > narrow.high - narrow.low
    wide, narrow = (share_interval(first, clusters) for clusters in (together, alone))
    assert wide.high - wide.low > narrow.high - narrow.low


def test_many_clusters_are_flipped_at_random_but_always_alike():
    """Guards against results that change when a comparison is repeated."""
    rng = np.random.default_rng(5)
    differences, clusters = rng.integers(-1, 2, 300), np.repeat(np.arange(100), 3)
    values = {sign_flip_p(differences, clusters.tolist()) for _ in range(3)}
    assert len(values) == 1 and 0 < values.pop() <= 1


def test_intervals_contain_what_was_observed_and_stay_within_their_range():
    """Guards ends: all right, all wrong, one question, no question."""
    for right, clusters in (([True] * 6, range(6)), ([False] * 6, [0, 0, 1, 1, 2, 2]), ([True], [0])):
        low, high = share_interval(right, list(clusters))
        assert 0 <= low <= np.mean(right) <= high <= 1 and high - low > 0.2
    assert share_interval([], []) == (0.0, 1.0)
    assert difference_interval([], [], []) == (-1.0, 1.0)
    low, high = difference_interval([True] * 20, [True] * 20, range(20))
    assert -0.3 < low < 0 < high < 0.3, "twenty questions without a difference do not exclude a small one"


def test_a_comparison_says_what_it_shows_and_how_many_questions_would_tell():
    """Guards the sentence that users read."""
    better = compare_pair([True] * 30, [False] * 25 + [True] * 5, range(30), names=("tuned", "base"))
    assert better.is_shown and better.more_questions is not None
    assert better.describe().startswith("tuned is better than base by ")
    close = compare_pair([True, False] * 10 + [True], [True, False] * 10 + [False], range(21))
    assert (
        not close.is_shown
        and close.describe()
        == f"no difference shown; about {close.more_questions} more questions would show a difference of this size"
    )
    same = compare_pair([True] * 5, [True] * 5, range(5))
    assert (same.p, same.more_questions, same.describe()) == (1.0, None, "no difference shown")
    assert "second is better than first" in compare_pair([False] * 20, [True] * 20, range(20)).describe()


def test_the_estimate_of_questions_is_of_the_right_size():
    """Guards the power: with the estimated number, about 80% of comparisons show the difference."""
    rng = np.random.default_rng(3)
    first, second = rng.random(60) < 0.75, rng.random(60) < 0.6
    first[:45], second[:36], first[45:], second[36:] = True, True, False, False
    rng.shuffle(second)
    found = compare_pair(first, second, range(60))
    number = 60 + found.more_questions
    shown = 0
    for _ in range(100):
        chosen = rng.integers(0, 60, number)
        shown += compare_pair(first[chosen], second[chosen], range(number)).is_shown
    assert 60 <= shown <= 95


def test_holm_keeps_the_order_and_never_lowers_a_p_value():
    """Guards the adjustment of several pairs against its textbook example."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    systems = {name: [True, False] * 10 for name in "abc"}
    columns = [
        Column(name, {index: ColumnAnswer("", right) for index, right in enumerate(answers)})
        for name, answers in systems.items()
    ]
    pairs = compare_columns(columns, has_all_pairs=True).differences
    assert [(pair.second, pair.first) for pair in pairs] == [("b", "a"), ("c", "a"), ("c", "b")]
    assert {pair.p for pair in pairs} == {1.0}


def test_simulated_comparisons_keep_their_level_and_their_coverage(monkeypatch):
    """Guards the bar of `benchmarks/intervals.py` with fewer comparisons: a plain sign test would fail here."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "intervals", raising=False)
    import intervals

    without = intervals.simulate(120, gap=0.0, seed=1, groups=((10, 14), (20, 40)))
    assert np.mean([one["sign-flip"] for one in without]) <= 0.07
    assert np.mean([one["sign test"] for one in without]) > 0.07
    for name in ("difference covered", "share covered"):
        assert np.mean([one[name] for one in without]) >= 0.92, name


def test_clusters_are_facts_and_pages():
    """Guards which questions count as one observation."""
    deadline = "The deadline of Alder College is 15 January."
    rows = [
        ReferenceRow("When is the deadline of Alder College?", deadline),
        ReferenceRow("By when must I apply to Alder College?", deadline),
        ReferenceRow("What does Alder College cost?", "Alder College costs $31,400 a year."),
        ReferenceRow("Does aspirin help against migraine?", "yes"),
        ReferenceRow("Does exercise lower blood pressure?", "yes"),
        ReferenceRow("Can exercise lower high blood pressure?", "yes"),
    ]
    keys = answer_keys(rows)
    assert find_clusters(keys) == [0, 0, 1, 2, 3, 3]
    assert find_clusters([]) == []
    texts = ["I loved this film", "A dull evening", "Great food and music", "Never again", "My best day this year"]
    moods = [ReferenceRow(f"What is the sentiment of: {text}?", "The sentiment is positive.") for text in texts]
    moods += [ReferenceRow(f"What is the sentiment of: {text}!", "The sentiment is negative.") for text in texts]
    assert find_clusters(answer_keys(moods)) == list(range(10)), "texts with the same label are not one fact"


@pytest.mark.parametrize("number", [5, 10, 20, 40, 100])
@pytest.mark.parametrize("share", [0.01, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0])
def test_a_difference_that_does_not_exist_is_shown_in_2_5_percent_of_the_cases_at_most(number, share):
    """Enumerates all outcomes of two equal models whose answers differ in this share of the questions."""

    def is_shown(different, better):
        values = [1.0] * better + [-1.0] * (different - better) + [0.0] * (number - different)
        return different > 0 and 2 * better > different and sign_flip_p(values, range(number)) <= LEVEL

    total = 0.0
    for different in range(1, number + 1):
        shown = list(range(different // 2, different + 1))
        # The more are better, the clearer: find the smallest number that is shown.
        low, high = 0, len(shown)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if is_shown(different, shown[middle]) else (middle + 1, high)
        chance = math.comb(number, different) * share**different * (1 - share) ** (number - different)
        total += chance * sum(math.comb(different, better) for better in shown[low:]) / 2**different
    assert total <= 0.025
