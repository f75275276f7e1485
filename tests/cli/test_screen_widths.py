"""Screens fit a narrow terminal, with and without colour."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tunewell.cli.main import COMMANDS, main
from tunewell.cli.render import cell_width, emit_error, hanging
from tunewell.core.errors import UserError

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def _lines(text: str) -> list[str]:
    return _COLOUR.sub("", text).splitlines()


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
    wide = [line for line in _lines(capsys.readouterr().out) if cell_width(line) > columns]
    assert not wide, wide


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
    wide = [line for line in _lines(out) if cell_width(line) > columns]
    assert not wide, wide
    assert ("\x1b[" in out) is has_colour
    assert ("on green" in out, "in [brackets]" in out) == (has_colour, not has_colour)


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
