"""The comparison of several runs: what differs, which answers changed, and the page."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hostile_texts import PAYLOADS
from parsed_page import Page
from recorded_runs import a_plan
from sample_reports import SAMPLES, college_report, with_text

from tunewell.cli.main import main
from tunewell.core.errors import UserError
from tunewell.evaluation.comparison import Column, ColumnAnswer, ColumnComparison, column_of, compare_columns
from tunewell.features.compare.page import comparison_page, right_chart
from tunewell.features.compare.recommendation import recommend
from tunewell.features.compare.workflow import compare_runs
from tunewell.records.plan import write_plan
from tunewell.records.report import Report, write_report
from tunewell.runs.loss_curve import Line


def answers(*right: bool | None) -> dict[int, ColumnAnswer]:
    return {index: ColumnAnswer(f"{index} {is_right}", is_right) for index, is_right in enumerate(right)}


def column(name: str, *right: bool | None, **more: object) -> Column:
    questions = {index: (f"question {index}", "reference") for index in range(len(right))}
    return Column(name, answers(*right), questions, **more)  # pyright: ignore[reportArgumentType]


def test_only_what_differs_is_listed() -> None:
    """A setting that all runs share would hide the one that matters; a missing value is a difference."""
    found = compare_columns(
        [
            column("a", settings={"seed": 0, "rank": 8}, data={"rows": 5}),
            column("b", settings={"seed": 0, "rank": 16}, data={"rows": 5}),
            column("c", settings={"seed": 0}, data={"rows": 5}),
        ]
    )
    assert [(row.name, row.values) for row in found.settings] == [("rank", [8, 16, None])]
    assert found.data == []


def test_right_answers_are_compared_on_common_questions() -> None:
    """Questions that one run was not asked, and answers that cannot be judged, do not count."""
    first, second = column("a", True, False, False, None), column("b", True, True, False, True, True)
    found = compare_columns([first, second])
    (one,) = found.differences
    assert (found.num_common, one.num_questions, one.became_right, one.became_wrong) == (4, 3, 1, 0)
    assert one.difference == pytest.approx(1 / 3) and one.low < 0 < one.high and not one.is_shown
    assert found.changed[0].right == [False, True]
    many = compare_columns([column("a", *[False] * 60), column("b", *[True] * 40, *[False] * 20)])
    assert many.differences[0].is_shown and 0.4 < many.differences[0].low < many.differences[0].high < 0.8
    nothing = compare_columns([column("a"), column("b", True)])
    assert nothing.differences == [] and nothing.num_common == 0


def hostile(report: Report, name: str) -> Column:
    line = Line(name, [(0, 2.0), (5, float("nan")), (9, 1.0)])
    settings = {"train": {name: name}, "model": name}
    return column_of(report, name, settings=settings, line=line, resources={"seconds": 3.5, name: None})


def test_the_page_shows_texts_as_texts() -> None:
    """Names, settings, questions and answers come from others."""
    text = " ".join(PAYLOADS)
    report = with_text(college_report(), text)
    page = comparison_page(compare_columns([hostile(report, text), hostile(college_report(), "b")], [text]))
    parsed = Page(page)
    tags = {tag for tag, _ in parsed.elements}
    assert not {"script", "iframe", "object", "embed", "form", "base", "img"} & tags
    names = {name for _, attributes in parsed.elements for name, _ in attributes}
    assert not {name for name in names if name.startswith("on")} and "style" not in names
    assert "{{ 7 * 7 }}" in parsed.text, "the texts are shown"


def a_run(folder: Path, report: Report | None, **config: object) -> Path:
    folder.mkdir(parents=True)
    write_plan(folder, a_plan().model_copy(update={"config": {"method": {"rank": 16}, **config}}))
    events = [{"kind": "held_out", "step": step, "loss": 2.0 - step / 10} for step in (0, 5, 10)]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "outcome.json").write_text(json.dumps({"status": "finished", "steps": 10, "held_out": {"best": 1.0}}))
    if report is not None:
        write_report(folder, report.model_copy(update={"data": "the held-out rows of the run"}))
    return folder


def test_the_command_compares_the_reports_of_three_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers are those of the reports, without loading a model, and fit sixty columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    reports = [college_report(), SAMPLES["weak"](), college_report()]
    for number, report in enumerate(reports):
        a_run(tmp_path / f"run-{number}", report, seed=number)
    runs = ["run-0", "run-1", "run-2"]
    assert main(["compare", *runs, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    losses = next(row["values"] for row in shown["metrics"] if row["name"] == "held-out loss")
    assert losses == [report.held_out and report.held_out.tuned for report in reports]
    assert [(row["name"], row["values"]) for row in shown["settings"]] == [("seed", [0, 1, 2])]
    assert shown["verdicts"] == [report.verdict for report in reports]
    assert [line["held_out"] for line in shown["lines"]] == [[[0, 2.0], [5, 1.5], [10, 1.0]]] * 3
    assert main(["compare", *runs]) == 0
    screen = capsys.readouterr().out
    assert max(map(len, screen.splitlines())) <= 60, screen
    assert Path("comparison/compare.html").is_file()
    for words in (["run-0"], ["run-0", "nothing"], ["run-0", "run-0"]):
        assert main(["compare", *words]) == 2


def test_a_refusal_is_not_marked_as_wrong() -> None:
    """The table counts refusals apart, but the examples below it and the page called them wrong."""
    key = ("When?", "In 1874.")
    given = [ColumnAnswer("1874", True), ColumnAnswer("1921", False), ColumnAnswer("I don't know", False, refused=True)]
    columns = [Column(text, {key: answer}, {key: key}) for text, answer in zip("abc", given, strict=True)]
    found = compare_columns(columns)
    assert found.changed[0].marks == ["right", "wrong", "refused"]
    assert re.findall(r'class="mark \w+">.*?</svg>(\w+)</span>', comparison_page(found), re.DOTALL) == [
        "right",
        "wrong",
        "refused",
    ]


def a_comparison() -> ColumnComparison:
    """Return a comparison of two models on 40 questions, of which `run` is recommended and answers 36 right."""
    found = compare_columns(
        [
            column("base", *[number < 4 for number in range(40)]),
            column("run", *[number >= 4 for number in range(40)], needs=frozenset({"training"})),
        ],
        ["the base model is quantised"],
        has_all_pairs=True,
    )
    texts = {"rows": "held-out rows of shop.jsonl", "made_at": "2026-11-19T20:50:00+00:00"}
    return replace(found, recommendation=recommend(found), **texts)


def test_the_page_names_rows_models_and_the_right_answers_first() -> None:
    """Two names of models, and a note on quantisation above the result, left the reader without an answer."""
    page = Page(comparison_page(a_comparison()))
    text = " ".join(page.text.split())
    assert "base and run on held-out rows of shop.jsonl (tunewell comparison)" in text
    words = ["36 of 40 right", "run, recommended", "19 November 2026, 20:50 UTC", "4 of 40", "Answers that differ"]
    places = [text.index(word) for word in [*words, "the base model is quantised"]]
    assert places == sorted(places)
    several = replace(a_comparison(), names=["base", "base + retrieval"])
    assert "base, with and without retrieval, on held-out rows" in Page(comparison_page(several)).text


def test_answers_that_the_best_column_gets_wrong_come_first() -> None:
    """Page and screen have room for a few; those that it gets right show least."""
    found = a_comparison()
    right = [change.right[found.best] for change in found.wrong_first]
    assert found.names[found.best] == "run" and right == [False] * 4 + [True] * 36


def test_the_picture_has_the_numbers_of_the_table_and_marks_the_recommended_column() -> None:
    """Without colour and without the picture, the same must be known."""
    found = a_comparison()
    chart = right_chart(found, found.names)
    assert [(row.texts[0], row.is_marked) for row in chart.rows] == [("4 of 40", False), ("36 of 40", True)]
    for row, own in zip(chart.rows, found.counts, strict=True):
        assert row.interval == (own.low, own.right / 40, own.high)
        assert row.texts[1] == f"{100 * own.low:.0f}-{100 * own.high:.0f}%"
    page = comparison_page(found)
    dots = re.findall(r'<circle class="dot" cx="([\d.]+)%" cy="50%" r="(\d)"', page)
    assert dots == [("10.00", "5"), ("90.00", "8")] and "recommended</span>" in page
    equal = compare_columns([column("a", True, False), column("b", False, True)])
    assert "1 of 2 right a, b" in " ".join(Page(comparison_page(equal)).text.split())


def test_two_evaluations_are_no_curve() -> None:
    """A straight line between them would look like measurements in between."""
    ends, more = Line("a", [(0, 2.0), (9, 1.0)]), Line("b", [(0, 2.0), (5, 1.2), (9, 1.0)])
    for line, is_drawn in ((ends, False), (more, True)):
        found = compare_columns([column("a", True, line=line), column("b", True)])
        assert ("Held-out loss over the steps" in comparison_page(found)) == is_drawn


def test_runs_of_other_rows_are_not_compared_by_their_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses on other rows look comparable and are not; without a corpus, that is an error."""
    monkeypatch.chdir(tmp_path)
    one, other = a_run(tmp_path / "one", college_report()), a_run(tmp_path / "other", college_report())
    write_plan(other, a_plan().model_copy(update={"corpus_sha256": "1" * 64}))
    with pytest.raises(UserError):
        compare_runs([one, other])
