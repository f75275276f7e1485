"""Reports side by side: answers that became right or wrong, and settings and rows that differ."""

import math

from sample_reports import college_report

from tunewell.evaluation.comparison import column_of, compare_columns
from tunewell.records.report import Report


def report_with(answers: list[bool | None], *, name: str, said: str = "") -> Report:
    """The college's report, its first answers marked as told."""
    whole = college_report()
    marked = [
        exchange.model_copy(
            update={"tuned": exchange.tuned.model_copy(update={"right": right, "text": f"{said}{right}", "faults": []})}
        )
        for exchange, right in zip(whole.exchanges, answers, strict=False)
    ]
    return whole.model_copy(update={"exchanges": marked, "subject": whole.subject.model_copy(update={"name": name})})


def compare(this: Report, other: Report, *, configs=({}, {})):
    pairs = ((other, configs[1]), (this, configs[0]))
    return compare_columns([column_of(one, one.subject.name, settings=config) for one, config in pairs])


def test_questions_that_both_were_asked_are_matched_by_their_words() -> None:
    this = report_with([True, True, False, None, True], name="this")
    other = report_with([True, False, True, None], name="other")
    found = compare(this, other)
    [difference] = found.differences
    assert (found.num_common, difference.became_right, difference.became_wrong) == (4, 1, 1)
    assert sorted(one.right for one in found.changed) == [[False, True], [True, False]]
    assert (found.names, found.verdicts) == (["other", "this"], [other.verdict, this.verdict])


def test_answers_in_other_words_come_last_and_equal_ones_not_at_all() -> None:
    this = report_with([True, True, False], name="this", said="now ")
    other = report_with([True, False, False], name="other", said="now ")
    assert len(compare(this, other).changed) == 1
    reworded = report_with([True, False, False], name="other", said="then ")
    assert [one.right[1] for one in compare(this, reworded).changed] == [True, True, False]


def test_a_difference_is_shown_only_by_enough_facts() -> None:
    """Guards against many wordings of few facts that look like evidence."""
    this, other = report_with([True] * 16, name="this"), report_with([False] * 16, name="other")
    [alone] = compare(this, other).differences
    assert alone.is_shown and alone.p < 0.01
    in_facts = [each.model_copy(update={"cluster": index // 4}) for index, each in enumerate(this.exchanges)]
    [together] = compare(this.model_copy(update={"exchanges": in_facts}), other).differences
    assert together.p > 0.05 and together.num_clusters == 4


def test_settings_differ_by_their_whole_name() -> None:
    this = {"train": {"epochs": 3.0, "warmup": 0.1}, "seed": 1}
    other = {"train": {"epochs": 8.0, "warmup": 0.1}, "method": {"rank": 4}}
    found = compare(report_with([], name="a"), report_with([], name="b"), configs=(this, other)).settings
    assert [(one.name, one.values) for one in found] == [
        ("method.rank", [4, None]),
        ("seed", [None, 1]),
        ("train.epochs", [8.0, 3.0]),
    ]


def test_other_rows_are_told_and_other_weights_are_not() -> None:
    """The weights of two runs always differ."""
    this = report_with([], name="this")
    hashes = {**this.hashes, "adapter_model.safetensors": "a"}
    other = this.model_copy(update={"hashes": {**hashes, "corpus": "0" * 64}})
    assert [one.name for one in compare(this, other).data] == ["corpus"]


def test_figures_stand_beside_each_other_where_one_of_them_is_there() -> None:
    this = report_with([True], name="this")
    other = this.model_copy(update={"held_out": None, "everyday": None, "tuned_tally": None, "exchanges": []})
    figures = {one.name: one.values for one in compare(this, other).metrics}
    assert figures["held-out loss"] == [None, 0.0272] and figures["F1"][0] is None
    none = compare(other, other)
    assert none.metrics == [] and none.num_common == 0


def test_numbers_that_are_none_are_words_in_json() -> None:
    this = report_with([True], name="this")
    assert this.held_out is not None
    broken = this.model_copy(update={"held_out": this.held_out.model_copy(update={"tuned": math.nan})})
    assert compare(broken, this).as_json()["metrics"][0]["values"] == [0.0272, "nan"]
