"""Read the command lines of a shell script: launcher, program, and flags. Nothing is run and nothing is expanded."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

from tunewell.features.migrate.ledger import Computed, Setting, scalar

_PROGRAM = re.compile(r"\.py$|^(sft|train)$")
_LAUNCHER = re.compile(r"(^|/)(python[\d.]*|accelerate|torchrun|deepspeed|uv|axolotl|llamafactory-cli|trl|srun|env)$")
_NAME = re.compile(r"--?([A-Za-z][\w-]*)(?:=(.*))?", re.S)
_CONTINUED = re.compile(r"\\[ \t]*(?:#[^\n]*)?\n")
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_ASSIGNED = re.compile(r"^\s*(?:export\s+)?(\w+)=(\S*)\s*$", re.M)
_END = re.compile(r"[\d&]?>{1,2}&?.*|[|&;]+")
_MAX_CHARS = 400_000


def commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the words of each command with flags. Variables that the script sets are replaced."""
    text = text[:_MAX_CHARS]
    known = {name: value.strip("\"'") for name, value in _ASSIGNED.findall(text)}
    line = 1
    for raw in _CONTINUED.sub(" \0", text).split("\n"):
        start, line = line, line + 1 + raw.count("\0")
        plain = _VARIABLE.sub(lambda found: known.get(found[1], found[0]), raw.replace("\0", " "))
        try:
            words = shlex.split(plain.strip("`"), comments=True)
        except ValueError:
            continue
        words = words[: next((at for at, word in enumerate(words) if _END.fullmatch(word)), None)]
        program = next((at for at, word in enumerate(words) if _LAUNCHER.search(word)), None)
        is_flag = any(map(_NAME.fullmatch, words))
        if words and is_flag and (program is not None or words[0].startswith("--")):
            yield start, words[program or 0 :]


def read_flags(words: list[str], file: str, line: int) -> list[Setting]:
    """Return the flags of a command. A flag with several values is a list, one without a value is true."""
    found: list[Setting] = []
    program = next((at for at, word in enumerate(words) if _PROGRAM.search(word)), -1)
    for at, word in enumerate(words):
        if flag := _NAME.fullmatch(word):
            end = next((n for n in range(at + 1, len(words)) if _NAME.fullmatch(words[n]) or n == program), len(words))
            texts = [flag[2]] if flag[2] is not None else words[at + 1 : end]
            values = [Computed(text) if "$" in text else scalar(text) for text in texts]
            value: Any = True if not values else values[0] if len(values) == 1 else values
            found.append(Setting(flag[1].replace("-", "_"), value, file, line, "launcher" if at < program else ""))
    return found
