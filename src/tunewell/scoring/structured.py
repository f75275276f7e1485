"""JSON and tool calls: an answer is right if all fields agree; each field is scored too."""

import ast
import json
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from tunewell.core.text import fold
from tunewell.scoring.base import ReferenceRow, Score, Scorer, without_fence

_MAX_FIELDS = 60
_TOOL_TAG = re.compile(r"<(tool_call|function_call|functioncall)>\s*(.*?)\s*(?:</\1>|\Z)", re.DOTALL)
_TOOL_MARK = re.compile(r"\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool_call\|>")
_NAMED_CALL = re.compile(
    r"<function=([\w.-]+)>\s*(.*?)\s*</function>|\[TOOL_CALLS\]\s*([\w.-]+)\s*\[ARGS\]\s*(\{.*\})", re.DOTALL
)
_XML_ARGUMENT = re.compile(r"<parameter=([\w.-]+)>\s*(.*?)\s*</parameter>", re.DOTALL)
_QUOTED = re.compile(r"(?<=:)\s*'(\{.*\})'")
"""Arguments as a text in single quotes, which is not JSON."""
_PLAIN_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:e[+-]?\d{1,3})?")
_NULL = "\0null"
"""No text: `null` is not the word "null"."""
_NO_CALL = {"no call": ""}
_NO_FORM = "not in the form of the task"
_ARGUMENTS = ("arguments", "parameters", "args", "input")


def parse_json(text: str) -> Any:
    """Return the object or list of a text that is JSON, possibly in a fenced block; None if it is neither."""
    try:
        found = json.loads(without_fence(text))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict | list) else None


def parse_calls(text: str) -> list[dict[str, Any]]:
    """Return the tool calls of a text, each with `name` and `arguments`; empty if it has none.

    {"name": "search", "arguments": {"q": "tea"}}, a list of these, `<tool_call>` blocks, and search(q="tea")
    """
    if named := _NAMED_CALL.findall(text):
        pairs = [(one or other, body or arguments) for one, body, other, arguments in named]
        return [{"name": name, "arguments": _named_arguments(body)} for name, body in pairs]
    tagged = [found[2] for found in _TOOL_TAG.finditer(text)]
    parts = tagged or [_TOOL_MARK.split(text)[-1]]
    parsed = [_calls_in(parse_json(_QUOTED.sub(r"\1", part))) for part in parts]
    if tagged:
        return [call for calls in parsed for call in calls] if all(parsed) else []  # one broken call breaks all
    return parsed[0] or _python_calls(without_fence(text))


def _named_arguments(body: str) -> dict[str, Any]:
    found = parse_json(body)
    return found if isinstance(found, dict) else dict(_XML_ARGUMENT.findall(body))


def _python_calls(text: str) -> list[dict[str, Any]]:
    """Return the calls of a Python expression with literal arguments: search(q="tea"), or a list of such calls."""
    try:
        with warnings.catch_warnings(action="ignore"):  # texts such as `2nd` are no Python
            tree = ast.parse(text, mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        if len(calls) < len(nodes) or not all(isinstance(node.func, ast.Name | ast.Attribute) for node in calls):
            return []
        found = []
        for call in calls:
            arguments = {str(index): ast.literal_eval(node) for index, node in enumerate(call.args)}
            arguments |= {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
            found.append({"name": ast.unparse(call.func), "arguments": arguments})
        return found
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def has_broken_call(text: str) -> bool:
    """Return True if a text has the marks of a tool call that cannot be read."""
    return not parse_calls(text) and (_TOOL_TAG.search(text) or _TOOL_MARK.search(text)) is not None


def _calls_in(tree: Any) -> list[dict[str, Any]]:
    """Return the calls of a parsed object: a call, a list of calls, or an object with `tool_calls`."""
    if isinstance(tree, list):
        return [call for one in tree for call in _calls_in(one)]
    if not isinstance(tree, dict):
        return []
    for wrapper in ("tool_calls", "function", "function_call", "functionCall"):
        if isinstance(tree.get(wrapper), dict | list):
            return _calls_in(tree[wrapper])
    name, arguments = tree.get("name"), next((tree[key] for key in _ARGUMENTS if key in tree), None)
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    return [{"name": name, "arguments": arguments}] if isinstance(name, str) and isinstance(arguments, dict) else []


def flat_fields(tree: Any, front: str = "") -> dict[str, str]:
    """Return the folded values of a tree by their paths: `{"a": {"b": [1, "X"]}}` has `a.b.0` and `a.b.1`."""
    if isinstance(tree, dict | list) and tree:
        entries = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {path: text for key, one in entries for path, text in flat_fields(one, f"{front}{key}.").items()}
    return {front.rstrip(".") or ".": _leaf(tree)}


def _leaf(value: Any) -> str:
    """Return a value as a text. Numbers are compared by value, to the last digit, also if one of two is a text."""
    if value is None:
        return _NULL
    text = " ".join(fold(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).split())
    if isinstance(value, bool) or not _PLAIN_NUMBER.fullmatch(text):
        return text
    return str(Decimal(text).normalize() + 0)


class Json(Scorer):
    """JSON objects or lists, field by field."""

    noun = "fields"
    ask = "Answer with a JSON object only. These are its possible fields"

    def __init__(self, asked: Sequence[ReferenceRow], training: Sequence[ReferenceRow]) -> None:
        self._references = [self._fields(row.reference) for row in asked]
        self.expected = [
            without_fence(row.reference) if found else "" for row, found in zip(asked, self._references, strict=True)
        ]
        seen = (self._fields(row.reference) or {} for row in training)
        names = Counter(name for fields in seen for name in dict.fromkeys(map(self._name, fields)))
        listed = ", ".join(name for name, _ in names.most_common(_MAX_FIELDS))
        self.hint = f"{self.ask}: {listed}." if listed else ""

    def _fields(self, text: str) -> dict[str, str] | None:
        """Return the fields of a text; None if it does not have the form of the task."""
        tree = parse_json(text)
        return None if tree is None else flat_fields(tree)

    @staticmethod
    def _name(path: str) -> str:
        return re.sub(r"\.\d+(?=\.|$)", "", path)

    def score(self, index: int, answer: str) -> Score:
        """Compare the fields of the answer with those of the reference."""
        expected, found = self._references[index], self._fields(answer)
        if expected is None:
            return Score(None, "the reference has not the form of the task")
        said = found or {}
        marks = {
            path: "missing" if path not in said else "right" if said[path] == text else "wrong"
            for path, text in expected.items()
        }
        marks |= {path: "extra" for path in said if path not in expected}
        bad = [f"{path} is {mark}" for path, mark in marks.items() if mark != "right"]
        because = _NO_FORM if found is None else ", ".join(bad[:3]) or "all fields agree"
        return Score(found is not None and not bad, because, fields=marks)

    def measures(self, scores: Sequence[Score]) -> dict[str, float]:
        """Return the share of answers that parse, and the micro F1 over all fields."""
        marks = [mark for score in scores for mark in score.fields.values()]
        num = Counter(marks)
        pairs = num.total() + num["right"] + num["wrong"]
        parsed = [score.because != _NO_FORM for score in scores if score.right is not None]
        return {
            f"F1 over {self.noun}": 2 * num["right"] / max(1, pairs),
            "answers of this form": sum(parsed) / max(1, len(parsed)),
        }


class Tools(Json):
    """Tool calls: the name and the arguments of each call, in any order of the calls."""

    noun = "names and arguments"

    def score(self, index: int, answer: str) -> Score:
        """Compare the calls. Where no call is expected, an answer with a call is wrong, and a text is not judged."""
        if self._references[index] != _NO_CALL:
            return super().score(index, answer)
        calls = parse_calls(answer) or has_broken_call(answer)
        return Score(False, "calls a tool where none is expected") if calls else Score(None, "no call is expected")

    ask = 'Answer with a tool call only, as {"name": ..., "arguments": {...}}. These are the tools with their arguments'

    def _fields(self, text: str) -> dict[str, str] | None:
        calls = parse_calls(text)
        if not calls:
            is_text = text.strip() and parse_json(text) is None and not has_broken_call(text)
            return dict(_NO_CALL) if is_text else None
        found, numbers = dict[str, str](), Counter[str]()
        for call in sorted(calls, key=lambda call: json.dumps(call, sort_keys=True, default=str)):
            numbers[call["name"]] += 1
            front = call["name"] if numbers[call["name"]] == 1 else f"{call['name']} {numbers[call['name']]}"
            found[front] = "called"
            found |= {f"{front}.{path}": value for path, value in flat_fields(call["arguments"]).items() if path != "."}
        return found


def count_fields(scores: Sequence[Mapping[str, str]]) -> dict[str, Counter[str]]:
    """Return how often each field was right, wrong, missing or extra, by name, most frequent first."""
    counts = defaultdict[str, Counter[str]](Counter)
    for fields in scores:
        for path, mark in fields.items():
            counts[Json._name(path)][mark] += 1
    return dict(sorted(counts.items(), key=lambda item: -item[1].total()))
