"""What a person sees of `tunewell chat`: answers on stdout as they come, everything else on stderr."""

import difflib
import os
import re
import signal
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunewell.cli.render import console, emit_error, err_console, folded_table, one_line, width
from tunewell.cli.screens.numbers import format_speed
from tunewell.core.errors import UserError
from tunewell.core.units import count

# What can be said to `tunewell chat` itself: lines that begin with a slash.

if TYPE_CHECKING:
    from tunewell.inference.chat import Chat

COMMANDS = {
    "/reset": ("", "begin anew; the system prompt stays"),
    "/undo": ("", "take back the last question and its answer"),
    "/save": ("[FILE]", "append the conversation to a file that `tunewell prepare` reads; `chat.jsonl` if not named"),
    "/system": ("[TEXT]", "set the system prompt; without a text, take it away"),
    "/temperature": ("X", "0 takes the likeliest word, 1 draws as learned"),
    "/length": ("N", "tokens of an answer at most"),
    "/seed": ("N", "start of the random choices, where the temperature is above 0"),
    "/help": ("", "show this"),
    "/quit": ("", "leave; so do Ctrl-D, and Ctrl-C where nothing is being said"),
}
"""Every command, what it takes, and what it does."""

_COMMAND = re.compile(r"(/[A-Za-z]+)(?:\s+(.*))?", re.DOTALL)


def split_command(line: str) -> tuple[str, str] | None:
    """Tell a command from a message, and its name from the rest; `/etc/hosts` and `//` are no commands."""
    found = _COMMAND.fullmatch(line.strip())
    return (found[1].lower(), (found[2] or "").strip()) if found else None


def obey(chat: "Chat", name: str, rest: str) -> str:
    """Do what a command says, and say what was done; raise UserError where that cannot be."""
    match name:
        case "/reset":
            chat.reset()
            return "a new conversation"
        case "/undo":
            if not chat.undo():
                raise UserError("nothing was said yet")
            return f"took the last answer back; {_said(chat)}"
        case "/save":
            path = Path(rest or "chat.jsonl").expanduser()
            return f"saved {count(chat.save(path), 'answer')} to `{path}`"
        case "/system":
            chat.set_system(rest)
            return "the system prompt is set from the next answer on" if rest else "no system prompt"
        case "/temperature":
            chat.set_options(temperature=_number(name, rest, float))
            return options_text(chat)
        case "/length":
            chat.set_options(length=_number(name, rest, int))
            return options_text(chat)
        case "/seed":
            chat.set_options(seed=_number(name, rest, int))
            return options_text(chat)
        case "/help":
            rows = [(f"{command} {takes}".rstrip(), meaning) for command, (takes, meaning) in COMMANDS.items()]
            return folded_table([*rows, ("a line that ends with \\", "goes on in the next")])
    close = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    raise UserError(
        f"there is no command `{name}`", fix=f"did you mean `{close[0]}`?" if close else "`/help` lists them"
    )


def options_text(chat: "Chat") -> str:
    """Say how answers are given."""
    options = chat.options
    drawn = f"temperature {options.temperature:g}, seed {options.seed}" if options.temperature else "greedy"
    return f"{drawn}, at most {count(options.length, 'token')} an answer"


def _said(chat: "Chat") -> str:
    return f"{count(len(chat.messages) // 2, 'answer')} left" if chat.messages else "nothing is left"


def _number(name: str, text: str, kind: type[int] | type[float]) -> Any:
    try:
        return kind(text)
    except ValueError:
        takes = "a number" if kind is float else "a whole number"
        raise UserError(f"`{name}` takes {takes}, like `{name} {'0.7' if kind is float else '256'}`") from None


if TYPE_CHECKING:
    from rich.table import Table

    from tunewell.inference.chat import Answer, Chat

_SIDE_BY_SIDE_WIDTH = 100
_PROMPT, _CONTINUED = "> ", ". "
_KEPT = frozenset("\n\t")
# Marks that turn the direction of text; with them a line can be made to read as what it is not.
_TURNING = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def harmless(text: str) -> str:
    """Spell out what would drive a terminal: `\\x1b` for an escape; line ends and tabs stay."""
    return "".join(
        repr(letter)[1:-1]
        if letter in _TURNING or (unicodedata.category(letter) == "Cc" and letter not in _KEPT)
        else letter
        for letter in text
    )


def tell(text: str) -> None:
    """Write a line beside the conversation: dim, on stderr."""
    sys.stdout.flush()
    err_console().print(text, style="dim")


def introduce(chat: "Chat", *, with_base: bool) -> None:
    """Say who is spoken to, and how."""
    voice = chat.model
    subject = voice.ref
    because = f", {subject.because}" if subject.because else ""
    template = f"template: {voice.masker.template.name}" if voice.masker else "no chat template: text is continued"
    by = f", computed by {one_line(voice.computed_by)}" if voice.computed_by else ""
    lines = [f"{one_line(subject.name)}{because}"]
    if subject.base is not None:
        lines.append(f"made from {one_line(subject.base)}" + (", which answers beside it" if with_base else ""))
    lines.append(f"{template}; {options_text(chat)}; {voice.precision} on {voice.device.name}{by}")
    lines += [f"note: {one_line(note)}" for note in voice.notes]
    tell("\n".join([*lines, "/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves"]))


def converse(chat: "Chat", *, with_base: bool) -> None:
    """Talk with a person at a terminal until they leave."""
    introduce(chat, with_base=with_base)
    _edit_lines()
    # Whoever started this may have had Ctrl-C ignored, as shells do for what runs in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while (text := _read_message()) is not None:
        command = split_command(text)
        if command is not None and command[0] == "/quit":
            return
        try:
            if command is not None:
                tell(obey(chat, *command))
            elif text.strip():
                answer_on_screen(chat, text.removeprefix("/") if text.startswith("//") else text, with_base=with_base)
        except UserError as error:
            sys.stdout.flush()
            emit_error(error)


def answer_on_screen(chat: "Chat", text: str, *, with_base: bool) -> None:
    """Show one answer, or two beside each other, and in a dim line how it went; Ctrl-C stops it."""
    parts = chat.reply(text)
    report_dropped(chat)
    with _stopping():
        write_answers(chat, parts, with_base=with_base)
    tell(how_it_went(chat.answer, chat.base_answer))


def report_dropped(chat: "Chat") -> None:
    """Say what of the conversation the model no longer sees, if there is such."""
    if number := chat.answer.num_dropped:
        tell(
            f"the conversation has outgrown the model's context of {count(chat.context, 'token')}: "
            f"it no longer sees the first {count(number)} messages"
        )


def write_answers(chat: "Chat", parts: Iterator[str], *, with_base: bool) -> None:
    """Write an answer, alone or beside the base's: in two columns where they fit, else one after the other."""
    if with_base and width() >= _SIDE_BY_SIDE_WIDTH and sys.stdout.isatty():
        _side_by_side(chat, parts)
    elif with_base:
        for label, said in _both(chat, parts):
            sys.stdout.write(f"{label}:\n")
            write_answer(said)
    else:
        write_answer(parts)


def write_answer(parts: Iterator[str]) -> None:
    """Write an answer to stdout as it comes, on lines of its own; into a file or a pipe exactly as it is."""
    is_screen = sys.stdout.isatty()
    last = ""
    try:
        for part in parts:
            sys.stdout.write(harmless(part) if is_screen else part)
            sys.stdout.flush()
            last = part
    finally:
        _close(parts)
        if not last.endswith("\n"):
            sys.stdout.write("\n")
        sys.stdout.flush()


def how_it_went(answer: "Answer", base: "Answer | None" = None) -> str:
    """Say how many tokens an answer has, how fast they came, and why it ended where that was not by itself."""
    reasons = {
        "length": "; it was cut at the length asked for, `/length` sets another",
        "context": "; it was cut where the model's context ends, `/reset` begins anew",
        "stopped": "; stopped",
        "end": "" if answer.text.strip() else "; the model said nothing",
    }
    cut = ", cut" if base and base.ended in ("length", "context") else ""
    beside = f"; base {count(base.num_tokens, 'token')}{cut}" if base else ""
    speed = format_speed(answer.tokens_per_second) if answer.num_tokens else "no speed"
    return f"{count(answer.num_tokens, 'token')}, {speed}{beside}{reasons[answer.ended]}"


def _side_by_side(chat: "Chat", parts: Iterator[str]) -> None:
    """Let both columns grow, as much of them as the screen holds; then write them whole."""
    from rich.console import Console
    from rich.live import Live

    out: Console = console()
    answers = {_label(chat): "", "base": ""}
    try:
        with Live(console=out, transient=True, auto_refresh=False, vertical_overflow="crop") as live:
            for label, said in _both(chat, parts):
                try:
                    for part in said:
                        answers[label] += part
                        live.update(_Tail(_columns(answers)), refresh=True)
                finally:
                    _close(said)
    finally:
        out.print(_columns(answers), soft_wrap=False)


def _both(chat: "Chat", parts: Iterator[str]) -> Iterator[tuple[str, Iterator[str]]]:
    yield _label(chat), parts
    yield "base", chat.base_reply()


def _close(parts: Any) -> None:
    """End an answer now, not when somebody tidies up: a base answers with the adapter switched off until then."""
    parts.close()


def _columns(answers: dict[str, str]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, padding=(0, 3, 0, 0), expand=True, show_edge=False, header_style="dim")
    for label in answers:
        grid.add_column(label, ratio=1)
    grid.add_row(*(Text(harmless(text)) for text in answers.values()))
    return grid


class _Tail:
    """The last lines of a table, as many as the screen has room for."""

    def __init__(self, table: "Table") -> None:
        self._table = table

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        for line in console.render_lines(self._table, options, pad=False)[-(console.height - 1) :]:
            yield from line
            yield Segment.line()


def _label(chat: "Chat") -> str:
    return one_line(chat.model.ref.name)


@contextmanager
def _stopping() -> Iterator[None]:
    """Let Ctrl-C end what is under way and no more, whatever it did before; what came of an answer is kept."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        sys.stdout.flush()
    finally:
        signal.signal(signal.SIGINT, before)


def _edit_lines() -> None:
    """Use the arrow keys, a history and Tab for commands where the system's line editor is there."""
    try:
        import readline
    except ImportError:
        return
    # A paste of several lines is one message, sent with Enter.
    readline.parse_and_bind("set enable-bracketed-paste on")
    readline.parse_and_bind("tab: complete")
    readline.set_completer_delims(" ")
    readline.set_completer(lambda text, at: [*(c for c in COMMANDS if text and c.startswith(text)), None][at])


def _read_message() -> str | None:
    """Read one message, over several lines where they end with a backslash; None where the person leaves."""
    lines: list[str] = []
    while True:
        try:
            line = _read_line(_CONTINUED if lines else _PROMPT)
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return None
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines)


def _read_line(prompt: str) -> str:
    sys.stderr.flush()
    if sys.stdout.isatty():
        return input(prompt)
    # The answers go to a file: what is shown to the person must not.
    sys.stderr.write(prompt)
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Say on a terminal that something is being loaded, for as long as it is."""
    if not sys.stderr.isatty() or os.environ.get("CI") or os.environ.get("TERM") == "dumb":
        yield
        return
    with err_console().status(what, spinner="line"):
        yield
