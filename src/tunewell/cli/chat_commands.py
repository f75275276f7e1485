"""What can be said to `tunewell chat` itself: lines that begin with a slash."""

import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunewell.cli.render import definitions
from tunewell.core.errors import UserError
from tunewell.core.units import count

if TYPE_CHECKING:
    from tunewell.workflows.chat import Chat

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
            chat.set_manner(temperature=_number(name, rest, float))
            return manner_words(chat)
        case "/length":
            chat.set_manner(length=_number(name, rest, int))
            return manner_words(chat)
        case "/seed":
            chat.set_manner(seed=_number(name, rest, int))
            return manner_words(chat)
        case "/help":
            rows = [(f"{command} {takes}".rstrip(), meaning) for command, (takes, meaning) in COMMANDS.items()]
            return definitions([*rows, ("a line that ends with \\", "goes on in the next")])
    close = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    raise UserError(
        f"there is no command `{name}`", fix=f"did you mean `{close[0]}`?" if close else "`/help` lists them"
    )


def manner_words(chat: "Chat") -> str:
    """Say how answers are given."""
    manner = chat.manner
    drawn = f"temperature {manner.temperature:g}, seed {manner.seed}" if manner.temperature else "greedy"
    return f"{drawn}, at most {count(manner.length, 'token')} an answer"


def _said(chat: "Chat") -> str:
    return f"{count(len(chat.messages) // 2, 'answer')} left" if chat.messages else "nothing is left"


def _number(name: str, text: str, kind: type[int] | type[float]) -> Any:
    try:
        return kind(text)
    except ValueError:
        takes = "a number" if kind is float else "a whole number"
        raise UserError(f"`{name}` takes {takes}, like `{name} {'0.7' if kind is float else '256'}`") from None
