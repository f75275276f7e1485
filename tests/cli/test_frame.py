"""The frame of the command line: help, errors, exit codes, and what it may import."""

import json
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest
import typer

from tunewell import __version__
from tunewell.cli import main as frame
from tunewell.cli import render
from tunewell.cli.main import COMMANDS, main
from tunewell.core.errors import UserError

ENTRY = "from tunewell.cli.main import run; run()"
HEAVY = {"torch", "transformers", "datasets", "numpy", "pyarrow", "pydantic", "rich", "tokenizers", "jinja2", "yaml"}


@pytest.fixture
def plug(monkeypatch):
    """Add a command whose body is given, and run the frame with it."""

    def add(body):
        module = types.ModuleType("a_command_for_a_test")
        module.command = body  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(frame, "COMMANDS", (*COMMANDS, ("test", module.__name__)))

    return add


def run(code: str, *arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": str(Path(frame.__file__).parents[2])} | variables
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd, env=env)


@pytest.mark.parametrize("arguments", [["--help", "--all"], ["-h", "--all"]])
def test_help_describes_all_commands_in_their_order(capsys, arguments):
    assert main(arguments) == 0
    shown = capsys.readouterr()
    listed = re.findall(r"^  (\w+)", shown.out, re.MULTILINE)
    assert listed == [name for name, _ in COMMANDS]
    assert shown.err == ""


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_describes_seven_commands_and_names_all(capsys, tmp_path, monkeypatch, arguments):
    """Whoever types `tunewell` alone wants to know where to begin: 25 commands in a row say nothing."""
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 0
    lines = capsys.readouterr().out.partition("usage")[2].partition("`tunewell` alone")[0].splitlines()[2:]
    first, others = lines[: lines.index("")], " ".join(lines[lines.index("") :]).strip()
    assert len(first) == 7 and first[0].startswith("  train ")
    named = [re.match(r"  (\w+)", line)[1] for line in first] + re.findall(r"(\w+)(?=,|  |$)", others)
    assert {name for name, _ in COMMANDS} <= set(named)


@pytest.mark.parametrize("arguments", [[], ["--help"], *([name, "--help"] for name, _ in COMMANDS)])
def test_every_help_fits_a_screen(capsys, tmp_path, monkeypatch, arguments):
    """80 columns and 40 lines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80


def test_rare_options_are_folded_and_still_work(capsys):
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--no-supervisor" not in shown and "6 more options: `tunewell train --help --all`" in shown
    assert main(["train", "--help", "--all"]) == 0
    assert "--no-supervisor" in capsys.readouterr().out


def test_every_command_has_a_summary_and_speaks_json(capsys):
    """A command without words in the help does not exist for a person, one without `--json` not for a program."""
    for name, _ in COMMANDS:
        assert frame._function(name).__doc__
        assert main([name, "--help"]) == 0
        assert "--json" in capsys.readouterr().out, name


def test_help_imports_nothing_heavy():
    """`tunewell --help` must answer before a person looks away; what takes time is importing."""
    check = (
        "import sys; from tunewell.cli.main import main; assert main(['--help']) == 0;"
        f"heavy = {HEAVY!r} & set(sys.modules); assert not heavy, heavy"
    )
    done = run(check)
    assert done.returncode == 0, done.stderr


def test_command_modules_import_nothing_heavy():
    """One heavy import at the top of a command slows the help of all."""
    modules = [module for _, module in COMMANDS]
    check = (
        f"import importlib, sys; [importlib.import_module(name) for name in {modules!r}];"
        f"heavy = {HEAVY!r} & set(sys.modules); assert not heavy, heavy"
    )
    done = run(check)
    assert done.returncode == 0, done.stderr


def test_the_version_is_told(capsys):
    """The first question in every bug report."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tunewell {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said", "fix"),
    [
        (["glosary"], "there is no command `glosary`", "did you mean `tunewell glossary`?"),
        (["--versoin"], "there is no option `--versoin`", "did you mean `tunewell --version`?"),
        (["qqqq"], "there is no command `qqqq`", "`tunewell --help` lists the commands"),
        (["explain", "--colour"], "no such option: --colour", "see `tunewell explain --help`"),
        (["explain", "a", "b"], "got unexpected extra argument", "see `tunewell explain --help`"),
        (["plan", "a.csv"], "extra argument", "name the rows with `--data PATH`; see `tunewell plan --help`"),
        (["explain", "--config"], "requires an argument", "see `tunewell explain --help`"),
    ],
)
def test_a_mistake_in_the_arguments_is_told_in_our_form(capsys, arguments, said, fix):
    """One form for every error a person can mend, exit code 2."""
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    first, *_, last = shown.err.splitlines()
    assert first.startswith("error: ") and said in first
    assert last == f"  fix:   {fix}"


def test_a_user_error_shows_what_where_and_fix_without_a_traceback(capsys, plug):
    """The three lines of the house."""

    def body() -> None:
        raise UserError("document 214 has 5,120 tokens", where="chats.jsonl line 214", fix="split it")

    plug(body)
    assert main(["test"]) == 2
    shown = capsys.readouterr()
    assert shown.err == "error: document 214 has 5,120 tokens\n  where: chats.jsonl line 214\n  fix:   split it\n"
    assert shown.out == ""


def test_with_json_an_error_is_an_object_on_stdout_too(capsys, plug):
    """A program reads stdout; an empty one tells it nothing."""

    def body(json: bool = typer.Option(False, "--json")) -> None:
        raise UserError("wrong", where="here")

    plug(body)
    assert main(["test", "--json"]) == 2
    shown = capsys.readouterr()
    error = {"what": "wrong", "where": "here", "fix": None}
    assert json.loads(shown.out) == {"format_version": 1, "error": error}
    assert shown.err.startswith("error: wrong\n")


def test_a_bug_keeps_its_traceback_in_a_file_and_says_where(capsys, plug, tmp_path, monkeypatch):
    """A screen full of frames helps nobody; the file is what a bug report needs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def body(json: bool = typer.Option(False, "--json")) -> None:
        raise ZeroDivisionError("in the\nengine \ud800")

    plug(body)
    assert main(["test", "--json"]) == 1
    shown = capsys.readouterr()
    (log,) = tmp_path.glob("tunewell-crash-*.log")
    assert shown.err.count("\n") == 1 and str(log) in shown.err and "Traceback" not in shown.err
    assert json.loads(shown.out)["error"]["where"] == str(log)
    story = log.read_text(encoding="utf-8")
    assert "Traceback" in story and "ZeroDivisionError" in story and f"tunewell {__version__}" in story


def test_a_bug_on_a_full_disk_still_shows_its_traceback(capsys, plug, tmp_path, monkeypatch):
    """The traceback must be somewhere."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))

    def body() -> None:
        raise ZeroDivisionError

    plug(body)
    assert main(["test"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_is_one_line_and_130(capsys, plug):
    """Ctrl-C is an answer, not an accident."""

    def body() -> None:
        raise KeyboardInterrupt

    plug(body)
    assert main(["test"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_a_command_chooses_its_exit_code(plug):
    """Verdicts have codes of their own (3, 4)."""

    def body(code: int) -> None:
        raise typer.Exit(code)

    plug(body)
    assert [main(["test", code]) for code in ("0", "3", "4")] == [0, 3, 4]


def test_a_reader_that_leaves_is_no_error():
    """`tunewell explain | head -1` must be quiet."""
    process = subprocess.Popen([sys.executable, "-c", ENTRY, "explain"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout and process.stderr
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 141


def test_text_the_terminal_cannot_show_does_not_end_a_command():
    """A C locale or cp1252 pipe must not turn a row's text into a crash, nor JSON into something else."""
    show = "from tunewell.cli import main, render; main.main = lambda arguments: {}; main.run()"
    for call, wanted in [
        ("render.emit('caf\\xe9 \\U0001f600') or 0", "caf\\xe9 \\U0001f600\n"),
        ("render.emit(render.json_text({'a': 'caf\\xe9 \\ud800'})) or 0", {"format_version": 1, "a": "caf\xe9 \ud800"}),
    ]:
        done = run(show.format(call), PYTHONIOENCODING="ascii")
        assert done.returncode == 0, done.stderr
        assert (json.loads(done.stdout) if isinstance(wanted, dict) else done.stdout) == wanted


def test_explain_shows_a_key_and_its_place(tmp_path):
    """The value now, and the line that set it."""
    (tmp_path / "tunewell.yaml").write_text("seed: 1\nmax_length: 1024\n")
    done = run(ENTRY, "explain", "max_length", cwd=tmp_path)
    assert done.stdout.splitlines()[0] == "packing.context_length"
    assert "now       1,024 (tunewell.yaml line 2)" in done.stdout
    assert json.loads(run(ENTRY, "explain", "seed", "--json", cwd=tmp_path).stdout)["value"] == 1


def test_explain_works_beside_a_broken_config(tmp_path, monkeypatch, capsys):
    """A config with a mistake in it is when an explanation is needed most."""
    monkeypatch.chdir(tmp_path)
    Path("tunewell.yaml").write_text("packing: {contxt: 1}\n")
    assert main(["explain", "packing"]) == 0
    assert "packing.long_documents" in capsys.readouterr().out
    assert main(["explain", "packing", "--config", "tunewell.yaml"]) == 2


def test_glossary_prints_a_word_or_all(capsys):
    """Words on screen and in the docs are the same words."""
    assert main(["glossary", "held", "out"]) == 0
    assert capsys.readouterr().out.startswith("held out   Rows that are reserved for testing")
    assert main(["glossary", "--json"]) == 0
    assert "answer_in_held_out" in json.loads(capsys.readouterr().out)


def test_schema_prints_json(capsys):
    """What an editor is pointed at."""
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "tunewell.yaml"


def test_tables_are_aligned_without_lines():
    """Readable without colour, in a log, in a bug report; wide characters take two columns."""
    rows = [("model", "SmolLM2", "135 M"), ("corpus", "1,024", "模型"), ("x",)]
    assert render.table(rows) == "model    SmolLM2   135 M\ncorpus   1,024     模型\nx"
    assert render.table([("a", "5", "b"), ("cc", "1,000", "d")], right={1}) == "a        5   b\ncc   1,000   d"
    assert render.table([("模型", "a"), ("b", "c")]) == "模型   a\nb      c"
    assert render.table([]) == ""


def test_colour_is_off_in_a_pipe_and_on_request(monkeypatch):
    """`NO_COLOR` is the agreed way to say no."""
    monkeypatch.setenv("NO_COLOR", "1")
    assert render.console().no_color and render.console(stderr=True).stderr
    assert not render.console().is_terminal


def test_a_line_break_in_a_cell_does_not_break_a_table():
    """A folder may have one in its name."""
    assert render.folded_table([("  a\nb", "one"), ("c\u2028d", "two")]) == "  a b   one\nc d     two"
