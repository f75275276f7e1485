"""Read a Modelfile by the rules of Ollama's parser; `test_modelfile` checks this against what that parser read."""

from typing import NamedTuple

COMMANDS = ("from", "license", "template", "system", "adapter", "draft", "renderer", "parser")
COMMANDS += ("parameter", "message", "requires")


class Command(NamedTuple):
    """One line of a Modelfile: `from`, `template`, or the name of a parameter, and its value."""

    name: str
    value: str


def read_modelfile(text: str) -> list[Command]:
    """Read the commands of a Modelfile; raise ValueError where Ollama does.

    A value goes on over line ends until its quotes are closed: three at the end of a line if it began with three, one
    if it began with one. White space around it is dropped, and so is what cannot be printed, but for line ends and
    tabs. There are no escapes.
    """
    commands = []
    at = 0
    while at < len(text):
        if text[at] in " \t\r\n":
            at += 1
        elif text[at] == "#":
            at = _line_end(text, at)
        else:
            name, at = _name(text, at)
            if name.lower() not in COMMANDS:
                raise ValueError(f"{name!r} is no command")
            parameter, at = _name(text, at) if name.lower() == "parameter" else (name.lower(), at)
            value, at = _value(text, at)
            commands.append(Command(parameter, value))
    if not any(command.name == "from" for command in commands):
        raise ValueError("no FROM line")
    return commands


def _line_end(text: str, at: int) -> int:
    ends = [found for end in "\r\n" if (found := text.find(end, at)) >= 0]
    return min(ends, default=len(text))


def _name(text: str, at: int) -> tuple[str, int]:
    end = at
    while end < len(text) and (text[end].isalnum() or text[end] == "_"):
        end += 1
    if end == at or end == len(text) or text[end] not in " \t":
        raise ValueError(f"a command is broken off: {text[at : end + 1]!r}")
    return text[at:end], end + 1


def _value(text: str, at: int) -> tuple[str, int]:
    end = at
    while True:
        end = _line_end(text, end)
        raw = "".join(character for character in text[at:end] if character.isprintable() or character in "\r\n\t")
        value = raw.strip()
        for quotes in ('"""', '"'):
            if value.startswith(quotes):
                if value.endswith(quotes) and len(value) >= 2 * len(quotes):
                    return value[len(quotes) : len(value) - len(quotes)], end
                break
        else:
            return value, end
        if end == len(text):
            raise ValueError("a value's quotes are not closed")
        end += 1
