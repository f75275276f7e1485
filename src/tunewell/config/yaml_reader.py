"""Read YAML strictly: what looks like a number is one, nothing is overwritten, nothing is executed, nothing explodes.

Plain words are read as YAML 1.2 does: `true` and `false` are the only booleans (`yes`, `no`, `on` and `off` stay
text), `1e-4` is a number, `2025-01-01` is text, `0o17` is octal and `017` is 17. Refused: tags (`!x`, `!!python/...`),
duplicate keys, merge keys (`<<`), a second document, aliases beyond the limits below. Each problem carries its line.
"""

import copy
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from tunewell.core.errors import UserError
from tunewell.core.units import count

# Several things wrong with one config, told together.

_SHOWN = 5


@dataclass(frozen=True)
class Problem:
    """One thing wrong: what, where (`tunewell.yaml line 3`), and how to mend it."""

    what: str
    where: str
    fix: str | None = None


def refuse(problems: Sequence[Problem]) -> None:
    """Raise one UserError for all problems: the first 5 and a count; return when there are none."""
    if not problems:
        return
    if len(problems) == 1:
        raise UserError(problems[0].what, where=problems[0].where, fix=problems[0].fix)
    lines = [f"{count(len(problems))} problems in the config"]
    for problem in problems[:_SHOWN]:
        lines.append(f"  {problem.where}: {problem.what}" + (f" ({problem.fix})" if problem.fix else ""))
    if len(problems) > _SHOWN:
        lines.append(f"  and {count(len(problems) - _SHOWN)} more")
    raise UserError("\n".join(lines), fix="`tunewell explain KEY` says what a key takes")


Steps = tuple[str | int, ...]
"""The way to a value: `("data", "sources", 0, "share")`."""

MAX_BYTES = 1_000_000
MAX_ALIASES = 100
MAX_EXPANDED = 1_000_000
"""Characters and nodes that all aliases together may stand for."""
MAX_DEPTH = 32

_INT = re.compile(r"[-+]?\d+|0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?", re.ASCII)
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
_STAR_FIX = 'put quotes around text that starts with `*`, like `"*.jsonl"`'


@dataclass
class Reading:
    """What a text said, the line of each value, and what is wrong with it."""

    value: Any = None
    lines: dict[Steps, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    is_complete: bool = False
    """Whether it was read to its end."""


def read_yaml(text: str, name: str) -> Reading:
    """Read one YAML document; problems are collected, and reading stops at one that makes the rest meaningless."""
    reading = Reading()
    if len(text) > MAX_BYTES:
        reading.problems.append(
            Problem(f"the file has over {count(MAX_BYTES)} characters; a config has a few hundred", name)
        )
        return reading
    builder = _Builder(reading, name)
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            builder.take(event)
        reading.is_complete = True
    except _Hopeless as stop:
        reading.problems.append(stop.problem)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = f"this is not YAML: {error.problem or error.context}"
        reading.problems.append(Problem(what, f"{name} line {mark.line + 1 if mark else 1}", _syntax_fix(error)))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        reading.problems.append(
            Problem(f"the character U+{int(error.character):04X} cannot stand in YAML", f"{name} line {line}")
        )
    return reading


def read_value(text: str, name: str) -> Any:
    """Read one value from a command line: lists, groups and quoted text as YAML, all else as one plain word.

    Unlike in a file, `*.jsonl`, `a #b` and `C: x` need no quotes here.
    """
    text = text.strip()
    if not text.startswith(("[", "{", '"', "'")):
        return plain_value(text)
    reading = read_yaml(text, name)
    refuse([Problem(problem.what, name, problem.fix) for problem in reading.problems])
    return reading.value


def plain_value(word: str) -> Any:
    """Give an unquoted word its value: null, a boolean, a number or text."""
    if word in _WORDS:
        return _WORDS[word]
    if _INT.fullmatch(word) and len(word) <= 100:
        return int(word, 0) if word[:2] in ("0o", "0x") else int(word)
    return float(word) if _FLOAT.fullmatch(word) else word


class _Hopeless(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.what)
        self.problem = problem


@dataclass
class _Open:
    """A list or group being read."""

    value: dict[str, Any] | list[Any]
    steps: Steps
    anchor: str | None
    weight: int = 1
    key: str | None = None
    """The key whose value comes next, in a group."""
    lines: dict[str, int] = field(default_factory=dict)


class _Builder:
    """Build values from parser events without recursion, counting what aliases stand for."""

    def __init__(self, reading: Reading, name: str) -> None:
        self._reading = reading
        self._name = name
        self._open: list[_Open] = []
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._num_documents = 0
        self._num_aliases = 0
        self._expanded = 0

    def take(self, event: yaml.Event) -> None:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.DocumentStartEvent):
            self._num_documents += 1
            if self._num_documents > 1:
                raise self._hopeless("a second document (`---`) begins here", line, "keep one config in a file")
        elif isinstance(event, yaml.AliasEvent):
            self._take_alias(str(event.anchor), line)
        elif isinstance(event, yaml.ScalarEvent):
            self._refuse_tag(event, line)
            self._take_scalar(event, line)
        elif isinstance(event, yaml.CollectionStartEvent):
            self._refuse_tag(event, line)
            self._begin({} if isinstance(event, yaml.MappingStartEvent) else [], event.anchor, line)
        elif isinstance(event, yaml.CollectionEndEvent):
            done = self._open.pop()
            self._remember(done.anchor, done.value, done.weight)
            if self._open:
                self._open[-1].weight += done.weight

    def _begin(self, value: dict[str, Any] | list[Any], anchor: str | None, line: int) -> None:
        if len(self._open) >= MAX_DEPTH:
            raise self._hopeless(f"lists and groups are nested over {MAX_DEPTH} deep", line)
        if self._awaits_key():
            raise self._hopeless("a list or group stands where a key is expected", line)
        # An anchor counts only when it is closed, so that a value can never contain itself.
        self._open.append(_Open(value, self._put(value, line), anchor))

    def _take_scalar(self, event: yaml.ScalarEvent, line: int) -> None:
        text = self._whole_characters(str(event.value), line)
        weight = len(text) + 1
        if self._awaits_key():
            self._take_key(text, line, is_merge=text == "<<" and event.implicit[0])
        else:
            value = plain_value(text) if event.implicit[0] else text
            self._put(value, line)
            self._remember(event.anchor, value, weight)
        if self._open:
            self._open[-1].weight += weight

    def _take_key(self, key: str, line: int, *, is_merge: bool) -> None:
        group = self._open[-1]
        where = f"{self._name} line {line}"
        if is_merge:
            self._reading.problems.append(Problem("merge keys (`<<`) are not read", where, "write the keys out"))
        elif key in group.lines:
            what = f"`{key}` is given twice, in lines {group.lines[key]} and {line}"
            self._reading.problems.append(Problem(what, where, "keep one of them"))
        group.lines.setdefault(key, line)
        group.key = key

    def _take_alias(self, anchor: str, line: int) -> None:
        if self._awaits_key():
            raise self._hopeless("an alias stands where a key is expected", line)
        if anchor not in self._anchors:
            raise self._hopeless(f"`*{anchor}` refers to nothing", line, _STAR_FIX)
        value, weight = self._anchors[anchor]
        self._num_aliases += 1
        self._expanded += weight
        if self._num_aliases > MAX_ALIASES or self._expanded > MAX_EXPANDED:
            limits = f"{count(MAX_ALIASES)} aliases, {count(MAX_EXPANDED)} characters when written out"
            raise self._hopeless(f"aliases go beyond the limit ({limits})", line, "write the values out")
        self._put(copy.deepcopy(value), line)
        if self._open:
            self._open[-1].weight += weight

    def _put(self, value: Any, line: int) -> Steps:
        steps: Steps = ()
        if not self._open:
            self._reading.value = value
        elif isinstance(into := self._open[-1].value, list):
            steps = (*self._open[-1].steps, len(into))
            into.append(value)
        else:
            key, self._open[-1].key = str(self._open[-1].key), None
            steps = (*self._open[-1].steps, key)
            line = self._open[-1].lines[key]
            into[key] = value
        self._reading.lines[steps] = line
        return steps

    def _awaits_key(self) -> bool:
        return bool(self._open) and isinstance(self._open[-1].value, dict) and self._open[-1].key is None

    def _remember(self, anchor: Hashable | None, value: Any, weight: int) -> None:
        if anchor is not None:
            self._anchors[str(anchor)] = (value, weight)

    def _refuse_tag(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent, line: int) -> None:
        if event.tag is not None:
            shown = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._reading.problems.append(
                Problem(f"the tag `{shown}` is not read", f"{self._name} line {line}", "write the plain value")
            )

    def _whole_characters(self, text: str, line: int) -> str:
        # PyYAML reads the two escapes of one JSON character, "\ud83d\ude00", as two halves.
        joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if not _is_whole(text) else text
        if joined.count("\ufffd") > text.count("\ufffd"):
            self._reading.problems.append(Problem("the text holds half a character", f"{self._name} line {line}"))
        return joined

    def _hopeless(self, what: str, line: int, fix: str | None = None) -> _Hopeless:
        return _Hopeless(Problem(what, f"{self._name} line {line}", fix))


def _is_whole(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _syntax_fix(error: yaml.MarkedYAMLError) -> str | None:
    said = f"{error.context} {error.problem}"
    if "alias" in said:
        return _STAR_FIX
    if "\\t" in said or "'\\t'" in said:
        return "indent with spaces, not with tabs"
    if "mapping values are not allowed" in said:
        return "put quotes around text that contains `: `, and check the indentation"
    if "escape" in said:
        return "in double quotes a backslash starts an escape; use single quotes around Windows paths"
    return None
