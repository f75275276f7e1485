"""The comparison of several runs: what differs, which answers changed, and the page."""

import json
from pathlib import Path

import pytest
from hostile_texts import PAYLOADS
from parsed_page import Page
from recorded_runs import a_plan
from sample_reports import SAMPLES, college_report, with_text

from tunewell.cli.main import main
from tunewell.core.errors import UserError
from tunewell.evaluation.comparison import Column, ColumnAnswer, column_of, compare_columns
from tunewell.features.compare.page import comparison_page
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
    assert "right, wrong, refused" in Page(comparison_page(found)).text


def test_runs_of_other_rows_are_not_compared_by_their_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses on other rows look comparable and are not; without a corpus, that is an error."""
    monkeypatch.chdir(tmp_path)
    one, other = a_run(tmp_path / "one", college_report()), a_run(tmp_path / "other", college_report())
    write_plan(other, a_plan().model_copy(update={"corpus_sha256": "1" * 64}))
    with pytest.raises(UserError):
        compare_runs([one, other])
