"""The command-line entry point: find the command, run it, and convert errors to messages and exit codes.

Exit codes: 0 success, 1 a bug or a machine fault, 2 an error that the user can fix, 130 interrupted. Only the module of
the requested command is imported, so that commands start quickly.
"""

import gc
import importlib
import io
import os
import platform
import shlex
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from typing import Any, TextIO, cast

from tunewell.cli.options import num_rare, typer_function
from tunewell.cli.render import RedactedStream, emit, emit_error, folded_table, hanging, json_text
from tunewell.core.errors import SharedError, UserError, close_names, did_you_mean
from tunewell.core.features import find_hook, modules, plugin_commands
from tunewell.core.files import explain_os_error
from tunewell.core.redact import redact
from tunewell.core.units import count

_ORDER = (
    "models init migrate inspect prepare plan train watch sweep runs compare track profile validate export verify "
    "eject push notebook chat serve index ask diagnose doctor explain glossary schema"
)
_SPINE = "models init inspect prepare plan train runs validate export verify chat explain glossary schema"
_MODULES = {name: f"tunewell.cli.commands.{name}" for name in _SPINE.split()} | modules("commands")
COMMANDS = tuple(sorted(_MODULES.items(), key=lambda one: [*_ORDER.split(), one[0]].index(one[0])))
"""Each command, in the order of a typical project, and the module with its `command` function."""
PLUGINS = {name: plugin for name, plugin in plugin_commands().items() if name not in _MODULES}
"""The commands of features of other packages."""

_FIRST = ("train", "chat", "export", "index", "ask", "compare", "doctor")
_OTHERS = {
    "your rows": "demo models init migrate inspect prepare",
    "runs": "watch plan validate runs sweep profile track launch",
    "share": "verify eject push serve notebook",
    "look up": "diagnose explain glossary schema cache",
}
_ABOUT = "Fine-tune a language model on your own data, and prove that it worked."
_HELP_NAMES = ("--help", "-h", "help")

EXIT_BUG, EXIT_USER, EXIT_INTERRUPTED, EXIT_PIPE = 1, 2, 130, 141


def run() -> None:
    """Run the command in `sys.argv`, and exit with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        # A row may contain text that the terminal cannot encode, which must not end a command.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # OpenMP's threads wait by spinning; beside other work on the same cores, training was three to six times slower.
    # Sleeping after a few microseconds costs nothing measurable on an idle machine. libgomp reads this when it loads.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Steps have different shapes. With segments that grow, torch reserved 31 GiB instead of 51 for rows of any length.
    if sys.platform == "linux" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    code = main(sys.argv[1:])
    if code == EXIT_PIPE:
        # The reader has closed the pipe, so buffered output would raise again while Python shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    # Python looks for cycles among all objects before it exits, which takes a second with torch and transformers.
    gc.freeze()
    if any(thread.name.startswith("tracker ") for thread in threading.enumerate()):
        # It hangs. The clean-up of its package may hang as well.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main(arguments: Sequence[str]) -> int:
    """Run one command, and return its exit code. No Exception is raised."""
    with redirect_stderr(cast(TextIO, RedactedStream(sys.stderr))):
        try:
            code = _dispatch(arguments)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            return EXIT_PIPE
        except KeyboardInterrupt:
            sys.stderr.write("\ninterrupted\n")
            return EXIT_INTERRUPTED
        except Exception as error:  # noqa: BLE001  the outermost boundary: every bug ends here, with its traceback saved
            known = explain_os_error(error) if isinstance(error, OSError) else error
            if isinstance(known, UserError):
                return _report(known, wants_json="--json" in arguments)
            return _crash(error, arguments)


def _dispatch(arguments: Sequence[str]) -> int:
    if not arguments or list(arguments) == ["--json"]:
        emit(_overview(is_json=bool(arguments)))
        return 0
    name = arguments[0]
    if name in dict(COMMANDS) or name in PLUGINS:
        try:
            return _run_command(name, arguments[1:])
        except ImportError as error:
            fallback = find_hook("doctor", "fallback") if name == "doctor" else None
            if fallback is None:
                raise
            return fallback(arguments[1:], error)
    if name in _HELP_NAMES:
        emit(_help(shows_all="--all" in arguments))
    elif name == "--version":
        emit(f"tunewell {_version()}")
    else:
        kind = "option" if name.startswith("-") else "command"
        close = close_names(name, [*dict(COMMANDS), *PLUGINS, "--help", "--version"])
        fix = did_you_mean([f"tunewell {name}" for name in close], "`tunewell --help` lists the commands")
        raise UserError(f"there is no {kind} `{name}`", fix=fix)
    return 0


def _version() -> str:
    # Reading the version imports `importlib.metadata`, which takes 25 ms; most commands do not need it.
    from tunewell import __version__

    return __version__


def _overview(*, is_json: bool) -> str:
    """Return the state of the project in this folder; without a project, the commands and the first step."""
    from tunewell.runs.overview import read_overview

    found = read_overview()
    if is_json:
        return json_text(found.as_json())
    if found.entries:
        return f"{folded_table(found.entries)}\n{hanging('next: ', found.next_step)}"
    return f"{_help()}\n\n{hanging('start: ', found.next_step)}"


def _help(*, shows_all: bool = False) -> str:
    """Return the first commands with a summary and the others by subject, or all with a summary."""
    left = dict.fromkeys(name for name, _ in COMMANDS if shows_all or name not in _FIRST)
    first = left if shows_all else [name for name, _ in COMMANDS if name in _FIRST]
    table = folded_table([(f"  {name}", _summary(name)) for name in (*first, *PLUGINS)])
    subjects = {subject: [name for name in left if name in names.split()] for subject, names in _OTHERS.items()}
    subjects["more"] = [name for name in left if not any(name in names for names in subjects.values())]
    others = [[f"  {subject}", ", ".join(names)] for subject, names in subjects.items() if names]
    lines = ["usage: tunewell COMMAND [OPTIONS]", "", table, "", *([] if shows_all else [folded_table(others), ""])]
    ways = [
        "`tunewell` alone shows where the project in this folder stands.",
        "`tunewell COMMAND --help` shows the options of a command.",
        "`tunewell --help --all` describes every command; `tunewell --version` shows the version.",
    ]
    return "\n".join([hanging("", _ABOUT), "", *lines, *(hanging("", way) for way in ways)])


def _summary(name: str) -> str:
    try:
        return (_function(name).__doc__ or "").strip().partition("\n")[0]
    except UserError as error:  # a plugin
        return error.what


def _function(name: str) -> Callable[..., Any]:
    if name not in PLUGINS:
        return importlib.import_module(dict(COMMANDS)[name]).command
    plugin = PLUGINS[name]
    plugin.mark_used()
    return (plugin if ":" in plugin.path else replace(plugin, path=f"{plugin.path}.command:command")).load()


def _run_command(name: str, arguments: Sequence[str]) -> int:
    import typer
    from typer.main import get_command

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    command, is_folded = _function(name), "--help" in arguments and "--all" not in arguments
    if "--help" in arguments:
        arguments = [word for word in arguments if word != "--all"]
    rare = f"{count(num_rare(command), 'more option')}: `tunewell {name} --help --all`"
    app.command(name, epilog=rare if is_folded and num_rare(command) else None)(
        typer_function(command, hides_rare=is_folded)
    )
    parser = get_command(app)
    # UsageError, which typer exports only as the parent of this class.
    usage_error = typer.BadParameter.__mro__[1]
    try:
        # Not `parser.main`, which turns an interrupt and a closed pipe into plain exits.
        # `obj` contains the original arguments, which `train` passes to the process that it supervises.
        with parser.make_context(f"tunewell {name}", list(arguments), obj=tuple(arguments)) as context:
            return parser.invoke(context) or 0
    except typer.Exit as leave:
        return leave.exit_code
    except typer.Abort:
        return EXIT_INTERRUPTED
    except Exception as error:
        if not isinstance(error, usage_error):
            raise
        message = str(getattr(error, "format_message", error.__str__)()).replace("(Possible options:", "(did you mean:")
        takes_rows = "extra argument" in message and any("--data" in own.opts for own in parser.params)
        fix = f"{'name the rows with `--data PATH`; ' if takes_rows else ''}see `tunewell {name} --help`"
        raise UserError(message[:1].lower() + message[1:].rstrip("."), fix=fix) from None


def _report(error: UserError, *, wants_json: bool) -> int:
    is_shared = isinstance(error, SharedError)
    if wants_json and not (is_shared and os.environ.get("RANK", "0") != "0"):
        problems = {"problems": list(error.problems)} if error.problems else {}
        emit(json_text({"error": {"what": error.what, "where": error.where, "fix": error.fix, **problems}}))
    if not (is_shared and os.environ.get("LOCAL_RANK", "0") != "0"):
        emit_error(error)
    return EXIT_USER


def _crash(error: Exception, arguments: Sequence[str]) -> int:
    """Save the traceback to a file, and print one line about the error."""
    trace = "".join(traceback.format_exception(error))
    summary = f"{type(error).__name__}: {error}".partition("\n")[0]
    try:
        handle, where = tempfile.mkstemp(prefix="tunewell-crash-", suffix=".log")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"tunewell {_version()}, Python {platform.python_version()}, {platform.platform()}\n")
            file.write(redact(f"arguments: {shlex.join(arguments)}\n\n{trace}"))
    except OSError:
        sys.stderr.write(trace)
        where = "above"
    finding = _known_failure(trace)
    what = "this is a bug in tunewell or a fault of the machine" if finding is None else finding["title"]
    if "--json" in arguments:
        fix = None if finding is None else finding["fix"]
        emit(json_text({"error": {"what": f"{what}: {summary}", "where": where, "fix": fix, "finding": finding}}))
    advice = "; `tunewell doctor` finds broken packages" if isinstance(error, ImportError) else ""
    sys.stderr.write(f"error: {what} ({summary}); traceback: {where}{advice}\n")
    if finding is not None:
        rows = [["  found", f"{finding['id']}, {finding['certainty']} ({finding['confidence']:.2f})"]]
        rows += [["  why", finding["cause"]], ["  fix", finding["fix"]]]
        sys.stderr.write(folded_table(rows) + "\n")
    return EXIT_BUG


def _known_failure(trace: str) -> dict[str, Any] | None:
    """Return the failure that the exception of another library shows, as `tunewell diagnose` names it, or None."""
    try:
        known_failure = find_hook("diagnose", "known_failure")
        return known_failure(trace) if known_failure else None
    except Exception:  # noqa: BLE001  the error itself must be reported, whatever fails here
        return None
