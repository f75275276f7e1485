"""Which column is recommended, and why."""

from test_columns import column

from tunewell.evaluation.comparison import compare_columns
from tunewell.features.compare.recommendation import recommend


def shares(name, right, of=40, needs=(), **more):
    return column(name, *[True] * right, *[False] * (of - right), needs=frozenset(needs), **more)


def advice(*columns):
    return recommend(compare_columns(list(columns), has_all_pairs=True))


def test_the_best_is_recommended_if_all_others_are_shown_to_be_worse():
    found = advice(shares("base", 2), shares("base + retrieval", 12, needs=["index"]), shares("run", 38))
    assert found.column == "run" and "every other column is shown to be worse" in found.because


def test_a_simpler_column_wins_if_the_best_is_not_shown_to_be_better():
    """One answer more of 40 is chance; an index and a training for it are work for nothing."""
    found = advice(
        shares("base", 2),
        shares("run", 38, needs=["training"]),
        shares("run + retrieval", 39, needs=["training", "index"]),
    )
    assert found.column == "run"
    assert "not shown to be better" in found.because and "would show a difference" in found.because


def test_equal_effort_is_decided_by_right_answers_and_named():
    found = advice(shares("base", 2), shares("a", 30, needs=["index"]), shares("b", 31, needs=["training"]))
    assert found.column == "b" and "a (30 right) is not shown to be worse" in found.because


def test_there_is_no_recommendation_without_evidence_or_without_a_good_column():
    few = advice(shares("a", 1, of=10), shares("b", 9, of=10))
    assert few.column is None and "only 10 questions" in few.because
    bad = advice(shares("a", 3), shares("b", 9))
    assert bad.column is None and "only 9 of 40" in bad.because
    unjudged = advice(column("a", None), column("b", None))
    assert unjudged.column is None and "no answer can be judged" in unjudged.because


def test_an_inventing_column_is_named():
    found = advice(shares("a", 2), shares("b", 39, needs=["index"], invented=(30, 40)))
    assert found.column == "b" and "invents 30 of 40 answers" in found.because


def test_holm_adjusts_over_all_pairs_and_counts_add_up():
    comparison = compare_columns([shares("a", 10), shares("b", 20), shares("c", 30)], has_all_pairs=True)
    assert [(one.first, one.second) for one in comparison.differences] == [("a", "b"), ("a", "c"), ("b", "c")]
    two = compare_columns([shares("a", 10), shares("b", 20)]).differences[0]
    assert comparison.differences[0].p >= two.p
    for own in comparison.counts:
        assert own.right + own.wrong + own.refused == own.judged == 40 and own.low < own.share < own.high
