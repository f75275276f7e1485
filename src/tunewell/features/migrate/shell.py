"""Read the command lines of a shell script: launcher, program, and flags. Nothing is run and nothing is expanded."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

from tunewell.config.yaml_reader import parse_scalar
from tunewell.features.migrate.ledger import Setting

_PROGRAM = re.compile(r"\.py$|^(sft|train|preprocess)$")
_LAUNCHER = re.compile(r"(^|/)(python[\d.]*|accelerate|torchrun|deepspeed|uv|axolotl|llamafactory-cli|trl|srun|env)$")
_NAME = re.compile(r"--?([A-Za-z][\w-]*)(?:=(.*))?", re.S)
_CONTINUED = re.compile(r"\\[ \t]*(?:#[^\n]*)?\n")
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_ASSIGNED = re.compile(r"^\s*(?:export\s+)?(\w+)=(\S*)\s*$", re.M)
_MAX_CHARS = 400_000


def commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the words of each command with flags. Variables that the script sets are replaced."""
    text = text[:_MAX_CHARS]
    known = {name: value.strip("\"'") for name, value in _ASSIGNED.findall(text)}
    joined = _CONTINUED.sub(lambda found: " \0", text)
    line = 1
    for raw in joined.split("\n"):
        start, line = line, line + 1 + raw.count("\0")
        if raw.lstrip().startswith("#"):
            continue
        plain = _VARIABLE.sub(lambda found: known.get(found[1], found[0]), raw.replace("\0", " "))
        try:
            words = shlex.split(plain.strip("`"), comments=True)
        except ValueError:
            continue
        if (any(_NAME.fullmatch(word) for word in words) and any(map(_LAUNCHER.search, words))) or (
            words and words[0].startswith("--")
        ):
            yield start, words


def read_flags(words: list[str], file: str, line: int) -> list[Setting]:
    """Return the flags of a command. A flag with several values is a list, one without a value is true."""
    found: list[Setting] = []
    at = next((number for number, word in enumerate(words) if _PROGRAM.search(word)), -1)
    position = 0
    while position < len(words):
        flag = _NAME.fullmatch(words[position])
        position += 1
        if flag is None:
            continue
        values: list[Any] = [flag[2]] if flag[2] is not None else []
        if flag[2] is None:
            while position < len(words) and not _NAME.fullmatch(words[position]) and position != at:
                values.append(words[position])
                position += 1
        scalars = [parse_scalar(str(value)) for value in values]
        value = True if not scalars else scalars[0] if len(scalars) == 1 else scalars
        name = flag[1].replace("-", "_")
        found.append(Setting(name, value, file, line, "launcher" if position <= at else ""))
    return found
