"""Read YAML strictly: YAML 1.2 numbers, no duplicate keys, no tags, and the line of every value.

Scalars follow YAML 1.2: `true` and `false` are the only booleans (`yes`, `no`, `on` and `off` are text), `1e-4` is a
number, `2025-01-01` is text, `0o17` is octal and `017` is 17. The reader reports these errors with their line: tags
(`!x`, `!!python/...`), duplicate keys, merge keys (`<<`), a second document, aliases that expand to too many values.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import yaml

from tunewell.core.errors import UserError
from tunewell.core.units import count

KeyPath = tuple[str | int, ...]
"""The path to a value: `("data", "sources", 0, "share")`."""

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_VALUES = 100_000
"""Maximum number of values in one file after aliases are expanded: a few nested aliases can expand to billions."""
_NUM_SHOWN = 200

_INT = re.compile(r"[-+]?\d+|0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?", re.ASCII)
_CONSTANTS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
_SYNTAX_FIXES = {
    "alias": 'put quotes around text that starts with `*`, like `"*.jsonl"`',
    "\\t": "indent with spaces, not with tabs",
    "mapping values are not allowed": "put quotes around text that contains `: `, and check the indentation",
    "escape": "in double quotes a backslash starts an escape; use single quotes around Windows paths",
    "expected ',' or '}'": "put commas between the entries; a comment begins with `#`, not with `//`",
    "another document": "write one config per file",
    "values once": "write the values out",
}
"""Part of PyYAML's message -> the fix."""


@dataclass(frozen=True)
class Problem:
    """One error in a config: what is wrong, where (`tunewell.yaml line 3`), and how to fix it."""

    what: str
    where: str
    fix: str | None = None


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise one UserError with the problems, up to 200 of them; return if `problems` is empty."""
    if not problems:
        return
    listed = [{"what": problem.what, "where": problem.where, "fix": problem.fix} for problem in problems]
    if len(problems) == 1:
        raise UserError(problems[0].what, where=problems[0].where, fix=problems[0].fix, problems=listed)
    lines = [f"{count(len(problems))} problems in the config"]
    for problem in problems[:_NUM_SHOWN]:
        lines.append(f"  {problem.where}: {problem.what}" + (f" ({problem.fix})" if problem.fix else ""))
    if len(problems) > _NUM_SHOWN:
        lines.append(f"  and {count(len(problems) - _NUM_SHOWN)} more")
    raise UserError("\n".join(lines), fix="`tunewell explain KEY` describes a key", problems=listed)


@dataclass
class YamlDocument:
    """The value of a YAML text, the line of each value inside it, and its problems."""

    value: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict[KeyPath, int])
    problems: list[Problem] = field(default_factory=list[Problem])
    is_complete: bool = False
    """Whether the whole text was read: False after a syntax error."""

    def add_problem(self, what: str, where: str, fix: str | None = None) -> None:
        """Add a problem to the list."""
        self.problems.append(Problem(what, where, fix))


def read_yaml(text: str, name: str) -> YamlDocument:
    """Read one YAML document and collect its problems; `name` is the file name for messages."""
    document = YamlDocument()
    if len(text) > MAX_BYTES:
        document.add_problem(f"the file has over {count(MAX_BYTES)} characters; a config has a few hundred", name)
        return document
    try:
        loader = _Loader(text, name, document)
        root = loader.get_single_node()
        document.value = loader.build(root, ()) if root else None
        document.is_complete = True
    except RecursionError:
        document.add_problem(_TOO_DEEP, name)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = f"{error.context} {error.problem}"
        fix = next((fix for part, fix in _SYNTAX_FIXES.items() if part in message), None)
        what = f"invalid YAML: {error.problem or error.context}"
        document.add_problem(what, f"{name} line {mark.line + 1 if mark else 1}", fix)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        what = f"the character U+{int(error.character):04X} is not allowed in YAML"
        document.add_problem(what, f"{name} line {line}")
    return document


def read_value(text: str, name: str) -> Any:
    """Read one value from the command line: lists, mappings and quoted text as YAML, anything else as a plain scalar.

    Unlike in a file, `*.jsonl`, `a #b` and `C: x` need no quotes here.
    """
    text = text.strip()
    if not text.startswith(("[", "{", '"', "'")):
        return parse_scalar(text)
    document = read_yaml(text, name)
    raise_problems([Problem(problem.what, name, problem.fix) for problem in document.problems])
    return document.value


def parse_scalar(text: str) -> Any:
    """Return the value of an unquoted scalar: null, a boolean, a number or text."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.fullmatch(text) and len(text) <= 100:
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


_TOO_DEEP = f"lists and mappings are nested more than {MAX_DEPTH} deep"
_PLAIN, _QUOTED = "plain", "quoted"


class _Loader(yaml.SafeLoader):
    """A YAML loader that composes nodes with the tag `plain` or `quoted` and builds values from them."""

    def __init__(self, text: str, name: str, document: YamlDocument) -> None:
        super().__init__(text)
        self._name = name
        self._document = document
        self._num_values = 0
        self._open: list[yaml.Node | None] = []

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = cast(Any, self).peek_event()
        if (tag := getattr(event, "tag", None)) is not None:
            shown = tag.replace("tag:yaml.org,2002:", "!!")
            self._add_problem(f"the tag `{shown}` is not supported", event.start_mark, "write the plain value")
        if len(self._open) > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=_TOO_DEEP, problem_mark=event.start_mark)
        self._open.append(parent)
        node = super().compose_node(parent, index)
        self._open.pop()
        return node

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        return _PLAIN if kind is yaml.ScalarNode and implicit[0] else _QUOTED

    def build(self, node: yaml.Node, path: KeyPath, line: int | None = None) -> Any:
        """Return the value of a node; every alias becomes a separate copy."""
        self._document.lines[path] = line or node.start_mark.line + 1
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            what = f"over {count(MAX_VALUES)} values once its aliases are expanded"
            raise yaml.MarkedYAMLError(problem=what, problem_mark=node.start_mark)
        if isinstance(node, yaml.ScalarNode):
            text = self._text(node)
            return parse_scalar(text) if node.tag == _PLAIN else text
        if node in self._open:
            raise yaml.MarkedYAMLError(problem="a value contains an alias of itself", problem_mark=node.start_mark)
        self._open.append(node)
        if isinstance(node, yaml.SequenceNode):
            value: Any = [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        else:
            value = self._mapping(node, path)
        self._open.pop()
        return value

    def _mapping(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        value: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            mark = key_node.start_mark
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a list or a mapping is used as a key", problem_mark=mark)
            key = self._text(key_node)
            if key == "<<" and key_node.tag == _PLAIN:
                self._add_problem("merge keys (`<<`) are not supported", mark, "write the keys out")
            elif key in lines:
                what = f"`{key}` is set twice, in lines {lines[key]} and {mark.line + 1}"
                self._add_problem(what, mark, "remove one of them")
            line = lines.setdefault(key, mark.line + 1)
            value[key] = self.build(value_node, (*path, key), line)
        return value

    def _text(self, node: yaml.ScalarNode) -> str:
        # PyYAML reads a JSON surrogate pair, "\ud83d\ude00", as two separate surrogates.
        text = str(node.value)
        joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if joined.count("\ufffd") > text.count("\ufffd"):
            self._add_problem("the text contains half a character (a lone surrogate)", node.start_mark)
        return joined

    def _add_problem(self, what: str, mark: yaml.Mark, fix: str | None = None) -> None:
        self._document.add_problem(what, f"{self._name} line {mark.line + 1}", fix)
