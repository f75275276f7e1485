"""JSON and tool calls: an answer is right if all fields agree; each field is scored too."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from tunewell.core.text import fold
from tunewell.scoring.base import ReferenceRow, Score, Scorer, without_fence

_MAX_FIELDS = 60
_TOOL_TAG = re.compile(r"<(tool_call|function_call|functioncall)>\s*(.*?)\s*(?:</\1>|\Z)", re.DOTALL)
_TOOL_MARK = re.compile(r"\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool_call\|>")
_CALL = re.compile(r"\[?\s*([A-Za-z_][\w.]*)\((.*?)\)\s*[,;\]]?", re.DOTALL)
_ARGUMENT = re.compile(r"([A-Za-z_]\w*)\s*=\s*(\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[^,()]+)")
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
    tagged = [found[2] for found in _TOOL_TAG.finditer(text)]
    parts = tagged or [_TOOL_MARK.split(text)[-1]]
    found = [call for part in parts for call in _calls_in(parse_json(part))]
    if found or tagged:
        return found
    bare = without_fence(text)
    if _CALL.sub("", bare).strip(" \n\t[],;"):
        return []
    return [
        {"name": name, "arguments": {key: _value(value.strip()) for key, value in _ARGUMENT.findall(arguments)}}
        for name, arguments in _CALL.findall(bare)
    ]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.strip("'\"")


def _calls_in(tree: Any) -> list[dict[str, Any]]:
    """Return the calls of a parsed object: a call, a list of calls, or an object with `tool_calls`."""
    if isinstance(tree, list):
        return [call for one in tree for call in _calls_in(one)]
    if not isinstance(tree, dict):
        return []
    for wrapper in ("tool_calls", "function"):
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
    text = tree if isinstance(tree, str) else json.dumps(tree, ensure_ascii=False)
    return {front.rstrip(".") or ".": " ".join(fold(text).split())}


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
    ask = 'Answer with a tool call only, as {"name": ..., "arguments": {...}}. These are the tools with their arguments'

    def _fields(self, text: str) -> dict[str, str] | None:
        calls = parse_calls(text)
        if not calls:
            # A row without a call: any text without a call is right.
            return {"no call": ""} if text.strip() and parse_json(text) is None else None
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
