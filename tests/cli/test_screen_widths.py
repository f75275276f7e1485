"""Screens fit a narrow terminal, with and without colour."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tunewell.cli.commands.inspect import _bracketed
from tunewell.cli.main import COMMANDS, main
from tunewell.cli.options import ConfigOptions
from tunewell.cli.render import cell_width, emit_error, ending, folded_table, hanging
from tunewell.core.errors import UserError

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def _too_wide(text: str, columns: int) -> list[str]:
    """Return the lines that are too wide. A command on a line of its own may be wider, so that it can be pasted."""
    lines = _COLOUR.sub("", text).splitlines()
    return [line for line in lines if cell_width(line) > columns and not re.fullmatch(r"(\w+:)? *`[^`]+`[;,.]?", line)]


def _terminal(monkeypatch: pytest.MonkeyPatch, *, columns: int, has_colour: bool) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("FORCE_COLOR" if has_colour else "NO_COLOR", "1")
    monkeypatch.delenv("NO_COLOR" if has_colour else "FORCE_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.parametrize("columns", [60, 120])
@pytest.mark.parametrize("name", ["", *(name for name, _ in COMMANDS)])
def test_every_help_page_fits(name: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    _terminal(monkeypatch, columns=columns, has_colour=False)
    assert main([*([name] if name else []), "--help"]) == 0
    assert not _too_wide(capsys.readouterr().out, columns)


@pytest.mark.parametrize("columns", [60, 120])
@pytest.mark.parametrize("has_colour", [True, False])
def test_inspect_fits_and_says_how_supervised_tokens_are_marked(
    columns: int, has_colour: bool, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Guards against documents on one long line, and against `on green` without colours."""
    rows = [{"question": f"What is the {index}th word of the sentence?", "answer": "word " * 40} for index in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    _terminal(monkeypatch, columns=columns, has_colour=has_colour)
    assert main(["inspect", "rows.jsonl", "--model", str(tiny_model)]) == 0
    out = capsys.readouterr().out
    assert not _too_wide(out, columns)
    assert ("\x1b[" in out) is has_colour
    assert ("on green" in out, "in [brackets]" in out) == (has_colour, not has_colour)


_COMMANDS = (
    *(
        "prepare --details",
        "inspect corpus",
        "inspect corpus --tokens --show 1",
        "explain",
        "explain train",
        "glossary",
    ),
    *("runs", "models data/customer-questions-of-2026.csv", "diagnose train.log --all", "doctor --known-good trl"),
)


@pytest.mark.parametrize("columns", [60, 120])
@pytest.mark.uses("diagnose", "doctor")
def test_every_screen_of_a_small_project_fits(
    columns: int, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Guards against tables whose last column is squeezed or leaves the screen, as for dropped rows of a source."""
    lines = [f"What is fee {index} of the college in 2026?,It is {index} dollars." for index in range(12)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/customer-questions-of-2026.csv").write_text("\n".join(["question,answer", *lines, "Why?,", ",a"]))
    (tmp_path / "tunewell.yaml").write_text(f"model: {tiny_model}\ndata: data/customer-questions-of-2026.csv\n")
    (tmp_path / "train.log").write_text("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.\n")
    monkeypatch.chdir(tmp_path)
    _terminal(monkeypatch, columns=columns, has_colour=False)
    for command in _COMMANDS:
        assert main(command.split()) in (0, 4), command
        assert not _too_wide(capsys.readouterr().out, columns), command


def test_a_long_error_is_folded_in_a_terminal_and_stays_whole_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    error = UserError("there is no model `x`", where="w" * 20, fix=" ".join(["give a folder"] * 12))
    monkeypatch.setenv("COLUMNS", "60")
    emit_error(error)
    assert capsys.readouterr().err == f"error: {error}\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    emit_error(error)
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 60 and " ".join(" ".join(lines).split()) == " ".join(f"error: {error}".split())


def test_a_command_is_never_broken_inside_its_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line break in a suggested command ended it when it was pasted."""
    monkeypatch.setenv("COLUMNS", "60")
    command = f"`tunewell export run --to ollama --out {'folder/' * 9} --set method.rank=8`"
    lines = hanging("next: ", f"export it with {command} or look at {'words ' * 20}").splitlines()
    assert sum(command in line for line in lines) == 1
    assert all(cell_width(line) <= 60 for line in lines if command not in line)


def test_a_command_that_fits_only_with_a_small_indent_is_indented_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    command = f"`tunewell chat {'m' * 42}`"
    assert hanging("next: ", f"{command} or wait") == f"next:\n  {command}\n      or wait"
    assert hanging("      ", f"{command} or wait") == f"  {command}\n      or wait", "no blank line before it"


def test_a_document_has_no_blank_lines_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line break after a nearly full line was printed twice."""
    monkeypatch.setenv("COLUMNS", "60")
    prompt = "user\nWhat is the capital of France, and of all of Germany?\nassistant\n"
    tokens = [SimpleNamespace(text=prompt, is_supervised=False), SimpleNamespace(text="Paris", is_supervised=True)]
    assert _bracketed(SimpleNamespace(tokens=tokens)) == prompt.replace("\n", "⏎\n") + "[Paris]"


def test_the_end_of_a_name_fits_its_columns() -> None:
    assert ending("a" * 30, 16) == "..." + "a" * 13
    assert cell_width(ending("東京" * 20, 16)) <= 16


@pytest.mark.uses("remote")
def test_the_files_of_a_push_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from tunewell.features.remote.command import _screen as push_screen

    monkeypatch.setenv("COLUMNS", "60")
    files = {f"gguf/{'long-name-' * 6}.q4_k_m.gguf": 123_456_789, "README.md": 1_200}
    pushed = SimpleNamespace(files=files, notes=[], pushed=None, folder="out", to="s3://bucket/name")
    assert not _too_wide(push_screen(pushed), 60)


def test_the_next_command_has_the_options_of_this_one() -> None:
    given = ConfigOptions(Path("a b.yaml"), ["seed=1"], offline=True)
    shown = given.train_command(model="M", data=["r.jsonl"])
    assert shown == "tunewell train --config 'a b.yaml' --model M --data r.jsonl --set seed=1 --offline"


def test_a_number_stays_with_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against `took 1.3` at the end of a line and `s` on the next."""
    monkeypatch.setenv("COLUMNS", "30")
    text = hanging("took  ", "load 777 ms, answers 1.6 s, losses 1,234.5 s; 23.5 GiB of 40 GiB in 16 s to 20 s")
    assert not [line for line in text.splitlines() if re.search(r"\d$", line)]


def test_the_text_of_a_table_moves_below_its_row_if_little_room_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["loss on held-out rows", "4.8541", "2.2581", "perplexity 128.3 -> 9.565"], ["right", "0", "0", ""]]
    monkeypatch.setenv("COLUMNS", "60")
    shown = folded_table(rows, right=(1, 2)).splitlines()
    assert [line.split() for line in shown[1:2]] == [["perplexity", "128.3", "->", "9.565"]] and len(shown) == 3
    monkeypatch.setenv("COLUMNS", "80")
    assert len(folded_table(rows, right=(1, 2)).splitlines()) == 2
