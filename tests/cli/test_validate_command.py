"""The words of a verdict on the screen: in order, within the width, and something to act on."""

import os
import pty
import subprocess
import sys
import types
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "evaluation"))
from sample_reports import college_report, report_of_everything

from tunewell.cli.commands.validate import as_json, closing
from tunewell.cli.progress import shown_stages
from tunewell.cli.render import cell_width, hanging
from tunewell.cli.screens.verdict import lined, verdict_lines, verdict_screen
from tunewell.core.progress import Progress
from tunewell.records.report import Reason, Report


def long_report() -> Report:
    """A report in which everything is longer than a screen."""
    report = college_report()
    first = report.exchanges[0]
    said = first.tuned.model_copy(update={"text": "いいえ" * 40, "right": False, "faults": ["loops"]})
    long = first.model_copy(update={"question": "東京の天気は晴れですか" * 12, "reference": "はい" * 50, "tuned": said})
    reason = Reason(
        code="loops", level="FAIL", what="3 of 4 answers go round. " * 9, example="x" * 300, next="set `a.b: 1`, " * 12
    )
    sources = [pair.model_copy(update={"name": f"source {n} " * 9}) for n, pair in enumerate(report.by_source * 11)]
    return report.model_copy(
        update={
            "verdict": "FAIL",
            "reasons": [reason],
            "next": reason.next,
            "exchanges": [long, *report.exchanges[1:]],
            "notes": ["n" * 200, "some words " * 30],
            "by_source": sources,
            "subject": report.subject.model_copy(update={"base": "/far/away" * 15, "name": "a long name " * 9}),
        }
    )


@pytest.mark.parametrize("columns", [64, 80, 120])
def test_nothing_leaves_the_screen(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide characters take two columns, and long paths have no space to break at."""
    monkeypatch.setenv("COLUMNS", str(columns))
    report = long_report()
    folder = Path("/a/folder" * 12)
    found = types.SimpleNamespace(report=report, folder=folder, page=folder / "report.html")
    text = "\n".join([verdict_screen(report), verdict_screen(report_of_everything()), closing(found)])  # pyright: ignore[reportArgumentType]
    assert [line for line in text.split("\n") if cell_width(line) > columns] == []
    assert [line for line in text.split("\n") if line != line.rstrip()] == []
    assert "/far/away" * 15 in text.replace("\n", "").replace(" ", ""), "names are broken, never cut"


def test_the_verdict_comes_after_the_figures_and_before_what_to_do() -> None:
    lines = verdict_screen(long_report()).split("\n")
    starts = ["tested", "against", "on", "loss, held out", "answers right", "FAIL", "  FAIL", "        do: ", "note: "]
    places = [next(n for n, line in enumerate(lines) if line.startswith(start)) for start in starts]
    assert places == sorted(places)
    assert "3 more sources" in "\n".join(lines) and sum("loss, source" in line for line in lines) == 8


def test_wrong_answers_are_shown_first_and_right_ones_too() -> None:
    text = verdict_screen(college_report())
    assert text.count("expected") == 3 and text.index("  tuned      wrong") < text.index("  tuned      right")


def test_without_a_base_there_is_one_column() -> None:
    report = college_report()
    assert report.held_out is not None
    alone = report.model_copy(
        update={
            "subject": report.subject.model_copy(update={"base": None}),
            "base_tally": None,
            "held_out": report.held_out.model_copy(update={"base": None}),
            "exchanges": [exchange.model_copy(update={"base": None}) for exchange in report.exchanges],
        }
    )
    text = verdict_screen(alone)
    assert "model" in text and "tuned   " not in text.split("\n\n")[1] and "against" not in text


def test_a_long_path_and_its_remark_are_two_words() -> None:
    """`run/report.htmlthe report on one page` cannot be opened with a click."""
    line = lined([["wrote", "`run/a/long/folder/report.html`", "the report"], ["wrote", "`run/b`", "data"]])
    assert line.splitlines()[0] == "wrote   `run/a/long/folder/report.html`   the report"
    long = lined([["wrote", f"`{'x' * 40}`", "the report"], ["wrote", "`run/b`", "data"]])
    assert long.splitlines()[0] == f"wrote   `{'x' * 40}`   the report"


def test_control_characters_of_an_answer_do_not_reach_the_terminal() -> None:
    report = college_report()
    said = report.exchanges[7].tuned.model_copy(update={"text": "\x1b[2J\x07gone\u202e", "right": False})
    exchanges = [report.exchanges[7].model_copy(update={"tuned": said})]
    reason = Reason(code="few_right", level="WEAK", what="a\x1bb", example="\x1b]0;title\x07", next="do")
    text = verdict_screen(report.model_copy(update={"exchanges": exchanges, "reasons": [reason], "notes": ["\x9b"]}))
    assert all(letter.isprintable() or letter == "\n" for letter in text) and "\\x1b[2J" in text


def test_a_text_is_folded_under_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    assert hanging("  do: ", "one two three four five six") == "  do: one two three four five\n      six"
    assert hanging("x ", "") == "x"
    assert verdict_lines(college_report()).startswith("PASS  38 of 40")


def test_the_json_holds_the_report_and_where_it_lies() -> None:
    found = types.SimpleNamespace(report=college_report(), page=Path("run/report.html"), exit_code=0)
    told = as_json(found)  # pyright: ignore[reportArgumentType]
    assert (told["verdict"], told["page"], told["exit_code"]) == ("PASS", "run/report.html", 0)


def test_stages_are_told_on_stderr_only_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_stages() as show:
        for done in range(50):
            show(Progress("tuned: held-out loss", done, 50))
        show(Progress("base: everyday text"))
    told = capsys.readouterr()
    assert told.out == "" and told.err == "tuned: held-out loss, 0 of 50\nbase: everyday text\n"


def test_in_a_terminal_stages_leave_nothing_on_stdout() -> None:
    """A status line that is drawn over stays on the terminal's side; a pipe gets the result alone."""
    code = (
        "from tunewell.cli.progress import shown_stages\nfrom tunewell.core.progress import Progress\n"
        "with shown_stages() as show: show(Progress('reading', 1, 2))\nprint('end')"
    )
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | {"TERM": "xterm"}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, env=environment)
    os.close(theirs)
    shown = os.read(ours, 4096).decode()
    os.close(ours)
    assert done.stdout == b"end\n" and "reading, 1 of 2" in shown
