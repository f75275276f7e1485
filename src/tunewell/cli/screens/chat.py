"""The interactive chat of `tunewell chat`: slash commands, streamed answers on stdout, everything else on stderr."""

import re
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunewell.cli.render import (
    cell_width,
    console,
    emit_error,
    escape_controls,
    folded_table,
    hanging,
    is_interactive,
    one_line,
    width,
)
from tunewell.cli.screens.numbers import format_speed
from tunewell.core.errors import UserError, close_names, did_you_mean
from tunewell.core.files import read_data
from tunewell.core.units import count

if TYPE_CHECKING:
    from rich.table import Table

    from tunewell.inference.chat import Chat, ChatAnswer
    from tunewell.inference.passages import DocumentChat, IndexAnswer
    from tunewell.records.report import Report

COMMANDS: dict[str, list[str]] = read_data(__file__, "texts.toml")["chat"]
"""Each command, its argument and its meaning."""
_QUIT = frozenset({"/quit", "/exit", "/bye", "/q"})
Reply = Generator[str, None, None]
"""It must be closed when reading stops, because the adapter stays disabled while the base model answers."""

_COMMAND = re.compile(r"(/[A-Za-z]+)(?:\s+(.*))?", re.DOTALL)


def split_command(line: str) -> tuple[str, str] | None:
    """Return a command's name and argument, or None for a message such as `/etc/hosts` or `//`."""
    found = _COMMAND.fullmatch(line.strip())
    return (found[1].lower(), (found[2] or "").strip()) if found else None


def run_command(chat: "Chat", name: str, rest: str) -> str:
    """Run a command, and return its message. Raise UserError if it is unknown or invalid."""
    match name:
        case "/reset":
            chat.reset()
            return "new conversation"
        case "/undo":
            if not chat.undo():
                raise UserError("there is no answer to undo")
            left = f"{count(len(chat.messages) // 2, 'answer')} left" if chat.messages else "the conversation is empty"
            return f"removed the last answer; {left}"
        case "/save":
            path = Path(rest or "chat.jsonl").expanduser()
            return f"saved {count(chat.save(path), 'answer')} to `{path}`"
        case "/system":
            chat.set_system(rest)
            return "system prompt set" if rest else "system prompt removed"
        case "/temperature" | "/length" | "/seed":
            chat.set_options(**{name[1:]: _number(name, rest, float if name == "/temperature" else int)})
            return options_text(chat)
        case "/help":
            rows = [(f"{command} {takes}".rstrip(), meaning) for command, (takes, meaning) in COMMANDS.items()]
            return folded_table([*rows, ("a line that ends with \\", "continues on the next line")])
    close = close_names(name, COMMANDS)
    raise UserError(f"there is no command `{name}`", fix=did_you_mean(close, "`/help` lists the commands"))


def options_text(chat: "Chat") -> str:
    """Return the sampling settings as text."""
    options = chat.options
    sampling = f"temperature {options.temperature:g}, seed {options.seed}" if options.temperature else "greedy"
    return f"{sampling}, at most {count(options.length, 'token')} per answer"


def _number(name: str, text: str, kind: type[int] | type[float]) -> Any:
    try:
        return kind(text)
    except ValueError:
        expected = "a number" if kind is float else "a whole number"
        raise UserError(f"`{name}` takes {expected}, such as `{name} {'0.7' if kind is float else '256'}`") from None


_SIDE_BY_SIDE_WIDTH = 100
_PROMPT, _CONTINUED = "> ", ". "


def print_aside(text: str) -> None:
    """Print dim lines on stderr, outside the conversation. Lines that do not fit are wrapped."""
    sys.stdout.flush()
    lines = (line if cell_width(line) <= width() else hanging("", line) for line in text.splitlines())
    console(stderr=True).print("\n".join(lines), style="dim")


def print_header(
    chat: "Chat", *, with_base: bool, retrieval: "DocumentChat | None" = None, report: "Report | None" = None
) -> None:
    """Print the model, its base model, verdict, chat template and settings, and the index."""
    model, ref = chat.model, chat.model.ref
    reason = f", {ref.because}" if ref.because else ""
    template = f"template: {model.masker.template.name}" if model.masker else "no chat template: continues your text"
    runtime = f", runs with {one_line(model.computed_by)}" if model.computed_by else ""
    lines = [f"{one_line(ref.name)}{reason}"]
    if ref.started_from is not None:
        lines.append(f"trained from {one_line(ref.started_from)}" + (", which also answers" if with_base else ""))
    lines += [f"{report.verdict}: {report.summary}"] if report is not None else []
    lines.append(f"{template}; {options_text(chat)}; {model.precision} on {model.device.name}{runtime}")
    lines += [f"answers from {retrieval.summary}"] if retrieval is not None else []
    lines += [f"note: {one_line(note)}" for note in model.notes]
    print_aside("\n".join([*lines, "/help lists the commands, Ctrl-C stops an answer, Ctrl-D quits"]))


def converse(
    chat: "Chat", *, with_base: bool, retrieval: "DocumentChat | None" = None, report: "Report | None" = None
) -> None:
    """Run a conversation in a terminal until the user quits. `report` is that of the model's run."""
    print_header(chat, with_base=with_base, retrieval=retrieval, report=report)
    _enable_line_editing()
    # A parent process may have set Ctrl-C to be ignored, as shells do for background jobs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while (text := _read_message()) is not None:
        command = split_command(text)
        if command is not None and command[0] in _QUIT:
            return
        try:
            if command is not None:
                print_aside(run_command(chat, *command))
            elif text.strip():
                message = text.removeprefix("/") if text.startswith("//") else text
                show_answer(chat, message, with_base=with_base, retrieval=retrieval, can_stop=True)
                if retrieval is None or retrieval.answer.prompt:
                    print_aside(answer_statistics(chat.answer, chat.base_answer))
        except UserError as error:
            sys.stdout.flush()
            emit_error(error)


def show_answer(
    chat: "Chat", text: str, *, with_base: bool, retrieval: "DocumentChat | None", can_stop: bool = False
) -> None:
    """Show an answer and its sources, with the base model's answer if requested. Ctrl-C may stop only the answer."""
    parts = start_answer(chat, text, retrieval)
    report_dropped(chat)
    with _stopping() if can_stop else nullcontext():
        write_answers(chat, parts, with_base=with_base)
    if retrieval is not None:
        print_aside(sources_text(retrieval.answer).lstrip("\n"))
        report_dropped(chat)


def start_answer(chat: "Chat", text: str, retrieval: "DocumentChat | None") -> Reply:
    """Return the stream of an answer, from the index if there is one."""
    if retrieval is None:
        return chat.reply(text)
    chat.clear_answer()  # the index may refuse the question without asking the model
    return retrieval.ask(text)


def sources_text(answer: "IndexAnswer") -> str:
    """Return the list of sources: those that the answer names, or the first that the model could read."""
    cited = [source for source in answer.sources if source.is_cited]
    if answer.refused:
        lines = ["", f"refused: {answer.because}", "nearest passages:"]
    else:
        lines = ["", "sources:" if cited else "the answer names no source; the model read:"]
    for source in cited or answer.sources[:3]:
        place = ", ".join(part for part in (source.file, source.lines) if part)
        lines.append(hanging(f"[{source.number}] ", f"{source.heading} ({place})"))
        lines.append(hanging("    ", f"“{source.quote}”"))
    if answer.num_left_out:
        lines.append(f"{count(answer.num_left_out, 'passage')} did not fit in the model's context")
    lines += [hanging("warning: ", warning) for warning in answer.warnings]
    return "\n".join(lines)


def report_dropped(chat: "Chat") -> None:
    """Print how many old messages no longer fit in the context, if any."""
    if number := chat.answer.num_dropped:
        print_aside(
            f"the conversation is longer than the model's context of {count(chat.context, 'token')}: "
            f"the first {count(number)} messages are left out"
        )


def write_answers(chat: "Chat", parts: Reply, *, with_base: bool) -> None:
    """Write an answer. The base model's answer, if requested, is in a second column if it fits, otherwise below."""
    if with_base and width() >= _SIDE_BY_SIDE_WIDTH and sys.stdout.isatty():
        _side_by_side(chat, parts)
    elif with_base:
        for label, text in _both(chat, parts):
            sys.stdout.write(f"{label}:\n")
            write_answer(text)
    else:
        write_answer(parts)


def write_answer(parts: Reply) -> None:
    """Write an answer to stdout as it is generated. Control characters are escaped only in a terminal."""
    is_screen = sys.stdout.isatty()
    last = ""
    try:
        for part in parts:
            sys.stdout.write(escape_controls(part) if is_screen else part)
            sys.stdout.flush()
            last = part
    finally:
        parts.close()
        if not last.endswith("\n"):
            sys.stdout.write("\n")
        sys.stdout.flush()


def answer_statistics(answer: "ChatAnswer", base: "ChatAnswer | None" = None) -> str:
    """Return the tokens and the speed of an answer, and why it ended early."""
    reasons = {
        "length": "; cut at the maximum length, change it with `/length`",
        "context": "; cut at the end of the model's context, `/reset` starts a new conversation",
        "stopped": "; stopped",
        "end": "" if answer.text.strip() else "; the answer is empty",
    }
    cut = ", cut" if base and base.ended in ("length", "context") else ""
    beside = f"; base {count(base.num_tokens, 'token')}{cut}" if base else ""
    speed = format_speed(answer.tokens_per_second) if answer.num_tokens else "no speed"
    return f"{count(answer.num_tokens, 'token')}, {speed}{beside}{reasons[answer.ended]}"


def _side_by_side(chat: "Chat", parts: Reply) -> None:
    """Show both columns while they grow, cropped to the screen, and then print them in full."""
    from rich.live import Live

    out = console()
    answers = {one_line(chat.model.ref.name): "", "base": ""}
    try:
        with Live(console=out, transient=True, auto_refresh=False, vertical_overflow="crop") as live:
            for label, text in _both(chat, parts):
                try:
                    for part in text:
                        answers[label] += part
                        live.update(_Tail(_columns(answers)), refresh=True)
                finally:
                    text.close()
    finally:
        out.print(_columns(answers), soft_wrap=False)


def _both(chat: "Chat", parts: Reply) -> Iterator[tuple[str, Reply]]:
    yield one_line(chat.model.ref.name), parts
    if chat.answer.num_prompt_tokens:  # the index may have refused the question
        yield "base", chat.base_reply()


def _columns(answers: dict[str, str]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, padding=(0, 3, 0, 0), expand=True, show_edge=False, header_style="dim")
    for label in answers:
        grid.add_column(label, ratio=1)
    grid.add_row(*(Text(escape_controls(text)) for text in answers.values()))
    return grid


class _Tail:
    """A renderable that shows as many of the last lines of a table as fit on the screen."""

    def __init__(self, table: "Table") -> None:
        self._table = table

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        for line in console.render_lines(self._table, options, pad=False)[-(console.height - 1) :]:
            yield from line
            yield Segment.line()


@contextmanager
def _stopping() -> Iterator[None]:
    """Make Ctrl-C stop only the current answer. The text so far is kept."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        sys.stdout.flush()
    finally:
        signal.signal(signal.SIGINT, before)


def _enable_line_editing() -> None:
    """Enable arrow keys, history and Tab completion of commands if readline is available."""
    try:
        import readline
    except ImportError:
        return
    # Several pasted lines become one message, which is sent with Enter.
    readline.parse_and_bind("set enable-bracketed-paste on")
    readline.parse_and_bind("tab: complete")
    readline.set_completer_delims(" ")
    readline.set_completer(lambda text, at: [*(c for c in COMMANDS if text and c.startswith(text)), None][at])


def _read_message() -> str | None:
    """Read one message. A line that ends with a backslash continues. Return None if the user quits."""
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
    # stdout is a file, so the prompt must not go there.
    sys.stderr.write(prompt)
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Show a status line in a terminal while something is loading."""
    if not is_interactive():
        yield
        return
    with console(stderr=True).status(what, spinner="line"):
        yield
