"""Every command that the code advises, filled in and parsed by the command line: it exists, and so do its options."""

import ast
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.main import get_command

import tunewell
from tunewell.cli import main as frame
from tunewell.cli.options import typer_function

SOURCE = Path(tunewell.__file__).parent
VALUE = "\x00"
"""What an f-string fills in."""
ADVISED = re.compile(r"`tunewell ([^`]+)`")
MENTIONED = {"init", "index", "verify"}
"""Commands that texts name alone, as in "made by `tunewell index`": nobody is told to paste them."""
FILLED = {"N": "5", "STEP": "5", "KEY=VALUE": "seed=1", "TARGETS": "gguf", "CODE": "300"}


def texts() -> Iterator[tuple[str, str]]:
    """Yield each text of the code and of its data files, with its place; values in f-strings are `VALUE`."""
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
        inside = {id(part) for node in joined for part in node.values}
        inside |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings only mention
        for node in joined:
            parts = [part.value if isinstance(part, ast.Constant) else VALUE for part in node.values]
            yield f"{path.name}:{node.lineno}", "".join(map(str, parts))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                yield f"{path.name}:{node.lineno}", node.value
    for path in sorted(own for suffix in ("toml", "json", "jsonl", "md", "txt") for own in SOURCE.rglob(f"*.{suffix}")):
        yield path.name, path.read_text(encoding="utf-8").replace("\\n", "\n")


def advised() -> dict[str, str]:
    """Each advised command, with the first place that names it."""
    found: dict[str, str] = {}
    for place, text in texts():
        for command in ADVISED.findall(text):
            found.setdefault(" ".join(command.split()), place)
    return found


COMMANDS = advised()


def parses(words: list[str]) -> str:
    """Return an empty text if the command line parses these words, otherwise its error."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(words[0])(typer_function(frame._function(words[0])))
    try:
        get_command(app).make_context(words[0], list(words[1:]), obj=())
    except typer.Exit:
        return ""
    except Exception as error:  # noqa: BLE001  what the parser rejects
        return f"{type(error).__name__}: {getattr(error, 'message', error)}"
    return ""


def fillings(command: str) -> Iterator[list[str]]:
    """Yield the words of a command with its placeholders filled in. A value of an f-string may be empty, or options."""
    number = command.count(VALUE)
    for choice in itertools.product(("5", "x", ""), repeat=min(number, 6)):
        text = command
        for value in choice:
            text = text.replace(VALUE, value, 1)
        text = text.partition(" > ")[0]
        words = [FILLED.get(word, word) for word in shlex.split(text.replace(VALUE, "").replace("...", "x"))]
        yield [word if "=" in word or not word.isupper() else "x" for word in words]


def test_many_commands_are_advised():
    """Guards the search itself: an empty list would pass."""
    assert len(COMMANDS) > 90
    assert any(VALUE in command for command in COMMANDS)
    assert parses(["train", "--no-such-option"]) and not parses(["train", "--out", "run2"])


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_an_advised_command_parses(command):
    """Guards an error or a screen that names a command or an option that does not exist."""
    name = command.split()[0]
    if command in MENTIONED or VALUE in name or name in ("COMMAND", "--help", "--version", "--json"):
        return
    assert name in dict(frame.COMMANDS), COMMANDS[command]
    errors = [parses(words) for words in fillings(command)]
    assert "" in errors, (COMMANDS[command], errors[0])
