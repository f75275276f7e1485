"""Turn a row of any known shape into a conversation.

The shape is told from the row's own keys, row by row, so a file that changes shape half-way is read right throughout.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tunewell.core.errors import UserError
from tunewell.data.rows.conversation import Conversation, Message, Rejected
from tunewell.data.rows.json_rows import parse_row

# Read the turns of a row: whose they are, what they say, what is called and what is learned of them.

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Every role name we read, and the one that templates know."""

_TEXTS_KEPT = ("name", "tool_call_id", "reasoning_content", "thinking", "reasoning")
_MAX_NESTING_INSIDE = 64


def read_turns(turns: list[Any]) -> tuple[list[Message], list[bool | None]]:
    """Make messages of turns; also say for each what its `weight` asks for. Raises Rejected for what is no turn."""
    read = [_message(turn) for turn in turns]
    return [message for message, _ in read], [wanted for _, wanted in read]


def _message(turn: Any) -> tuple[Message, bool | None]:
    if not isinstance(turn, dict):
        raise Rejected("not_a_conversation", f"a turn is {kind_of(turn)}, not an object")
    name = turn.get("role")
    name = turn.get("from") if name is None else name
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise Rejected("not_a_conversation", f"unknown role {name!r}" if name is not None else "a turn has no role")
    content = turn.get("content")
    message: Message = {"role": role, "content": read_text(turn.get("value") if content is None else content, "a turn")}
    if len(turn) == 2 and ("content" in turn or "value" in turn):
        return message, None
    for key in _TEXTS_KEPT:
        if turn.get(key) is not None:
            message[key] = read_text(turn[key], key)
    if calls := read_objects(turn.get("tool_calls"), "tool_calls"):
        message["tool_calls"] = calls
    return message, _weight(turn, role)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and (part.get("type") or "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else kind_of(part)
    raise Rejected("not_a_conversation", f"a part of type {kind!r}; only text can be learned")


def _weight(turn: dict[str, Any], role: str) -> bool | None:
    weight = turn.get("weight")
    if weight is None:
        return None
    if not isinstance(weight, (int, float)) or weight not in (0, 1):
        raise Rejected("not_a_conversation", f"weight {weight!r}; it must be 0 or 1")
    if weight and role != "assistant":
        raise Rejected("not_a_conversation", f"weight 1 on a {role} turn; only replies are learned")
    return bool(weight) if role == "assistant" else None


def read_objects(value: Any, name: str) -> list[Any] | None:
    """Read a list of objects, or the JSON text of one as tables hold it; None where there is none."""
    value = from_json(value)
    if value is None or value == [] or value == "":
        return None
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise Rejected("not_a_conversation", f"{name} must be a list of objects")
    return value


def from_json(value: Any) -> Any:
    """Open a list that stands as JSON text, as in a cell of a table; anything else stays as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found = parse_row(value.encode("utf-8", "surrogatepass"), max_nesting=_MAX_NESTING_INSIDE)
    except Rejected:
        return value
    return found if isinstance(found, list) else value


def holds_turns(value: Any) -> bool:
    """Tell a list of turns from a list of anything else."""
    return isinstance(value, list) and all(isinstance(turn, dict) and {"role", "from"} & turn.keys() for turn in value)


def read_text(value: Any, name: str) -> str:
    """Read text, typed parts of text, or nothing; raise Rejected for anything else."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, list):
        return "".join(_part(part) for part in value)
    raise Rejected("not_a_conversation", f"{name} is {kind_of(value)}, not text")


def kind_of(value: Any) -> str:
    """Say in a person's words what a JSON value is."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


_QUESTIONS = ("question", "query", "problem", "prompt", "instruction", "input", "user")
_ANSWERS = ("answer", "solution", "response", "completion", "output", "reply", "assistant")
_EXTRAS = ("input", "context")
_LISTS = {"messages": "messages", "conversations": "sharegpt", "conversation": "sharegpt"}
_PAIRS = {
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "dolly": ("instruction", "response"),
}
_SYSTEMS = ("system", "system_prompt")
_KNOWN = dict.fromkeys([*_QUESTIONS, *_ANSWERS, *_EXTRAS, *_LISTS, *_SYSTEMS, "text", "tools"])
_MAX_SHAPES = 4096
_Candidate = tuple[str, tuple[str, ...]]

FORMAT_NAMES = ("alpaca", "dolly", "question_answer", "prompt_completion", "messages", "sharegpt", "text")


def detect(row: Mapping[str, Any]) -> str:
    """Name the format of a row by its keys; raise Rejected when none fits."""
    return _choose(_candidates(row), row)


def _candidates(row: Mapping[str, Any]) -> list[_Candidate]:
    """List the formats that a row has the keys of, best first, each with those keys."""
    found: list[_Candidate] = [(name, (key,)) for key, name in _LISTS.items() if key in row]
    found += [(name, keys) for name, keys in _PAIRS.items() if all(key in row for key in keys)]
    questions, answers = ([key for key in keys if key in row] for keys in (_QUESTIONS, _ANSWERS))
    if questions and answers:
        found.append(("question_answer", (*questions, *answers)))
    if "text" in row and "role" not in row:  # with a role, it is one message of a tree
        found.append(("text", ("text",)))
    return found


def _choose(candidates: list[_Candidate], row: Mapping[str, Any]) -> str:
    """Take the first format of which the row has something; tables leave the columns of other formats empty."""
    for name, keys in candidates:
        for key in keys:
            if row[key]:
                return name
    if candidates:
        return candidates[0][0]
    keys = ", ".join(sorted(map(str, row))[:8]) or "none"
    raise Rejected("not_a_conversation", f"no known column names; its columns: {keys}")


class Converter:
    """Converts the rows of one source and remembers which formats it met."""

    def __init__(
        self, *, format_name: str = "auto", columns: Mapping[str, str] | None = None, system: str | None = None
    ):
        self._format = format_name
        self._columns = dict(columns or {})
        self._system = system
        self._by_keys: dict[tuple[str, ...], list[_Candidate]] = {}
        unknown = next((name for name in self._columns if name not in _KNOWN), None)
        if unknown is not None:
            raise UserError(
                f"`columns` maps to `{unknown}`, which is no field of ours",
                fix=f"our name stands first, yours second, like `question: Frage`; ours are {', '.join(_KNOWN)}",
            )

    def convert(self, row: Any) -> tuple[Conversation, str]:
        """Make a conversation of a row and name its format; raise Rejected with the reason when it is none."""
        if isinstance(row, str) and self._format == "text":
            row = {"text": row}
        if isinstance(row, list) and self._format in ("auto", "messages", "sharegpt"):
            row = {"messages": row}
        if not isinstance(row, dict):
            raise Rejected("not_a_conversation", f"the row is {kind_of(row)}, not an object")
        if self._columns:
            row = self._renamed(row)
        name = self._format if self._format != "auto" else self._detected(row)
        conversation = _CONVERTERS[name](row)
        if self._system is not None and conversation.messages and conversation.messages[0]["role"] != "system":
            conversation.messages.insert(0, {"role": "system", "content": self._system})
            if conversation.learn:
                conversation.learn.insert(0, None)
        return conversation, name

    def _detected(self, row: dict[str, Any]) -> str:
        # What the user mapped decides, whatever other columns there are.
        if self._columns and (mapped := _candidates(self._columns)):
            return _choose(mapped, row)
        keys = tuple(row)
        if keys not in self._by_keys:
            if len(self._by_keys) >= _MAX_SHAPES:
                self._by_keys.clear()
            self._by_keys[keys] = _candidates(row)
        return _choose(self._by_keys[keys], row)

    def _renamed(self, row: dict[str, Any]) -> dict[str, Any]:
        taken = set(self._columns.values())
        renamed = {key: value for key, value in row.items() if key not in taken and key not in self._columns}
        for ours, theirs in self._columns.items():
            if theirs not in row:
                raise Rejected("not_a_conversation", f"there is no column {theirs!r}")
            renamed[ours] = row[theirs]
        return renamed


def _alpaca(row: dict[str, Any]) -> Conversation:
    return _asked_and_answered(row, "instruction", "output")


def _dolly(row: dict[str, Any]) -> Conversation:
    return _asked_and_answered(row, "instruction", "response")


def _question_answer(row: dict[str, Any]) -> Conversation:
    question, answer = _first(_QUESTIONS, row), _first(_ANSWERS, row)
    if question is None or answer is None:
        raise Rejected("not_a_conversation", "no question and answer among its keys")
    return _asked_and_answered(row, question, answer)


def _asked_and_answered(row: dict[str, Any], question: str, answer: str) -> Conversation:
    """Make one question and one reply; what the row gives to work on (`input`, `context`) stands below the question."""
    _require(row, question, answer)
    asked = read_text(row[question], question)
    for key in _EXTRAS:
        if key in row and key != question and (extra := read_text(row[key], key)).strip():
            asked = f"{asked}\n\n{extra}" if asked.strip() else extra
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": read_text(row[answer], answer)}]
    return _conversation(row, turns)


def _prompt_completion(row: dict[str, Any]) -> Conversation:
    """Read prompt and completion, as texts or as lists of messages; only the completion is learned."""
    _require(row, "prompt", "completion")
    prompt, completion = (_turns_or_text(row[key], key) for key in ("prompt", "completion"))
    asked, _ = read_turns(prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}])
    replied, learn = read_turns(
        completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
    )
    if isinstance(prompt, list) or isinstance(completion, list):
        given: list[bool | None] = [False] * len(asked)
        return _conversation(row, [*asked, *replied], [*given, *learn], read_objects(row.get("tools"), "tools"))
    return _conversation(row, [*asked, *replied])


def _turns_or_text(value: Any, name: str) -> list[Any] | str:
    opened = from_json(value)
    return opened if opened and holds_turns(opened) else read_text(value, name)


def _messages(row: dict[str, Any]) -> Conversation:
    key = _first(_LISTS, row)
    turns = from_json(row[key]) if key else None
    if not isinstance(turns, list):
        raise Rejected("not_a_conversation", f"the messages are {kind_of(turns)}, not a list of turns")
    if not turns:
        raise Rejected("not_a_conversation", "the list of messages is empty")
    messages, learn = read_turns(turns)
    return _conversation(row, messages, learn, read_objects(row.get("tools"), "tools"))


def _conversation(
    row: dict[str, Any],
    turns: list[Message],
    learn: list[bool | None] | None = None,
    tools: list[Any] | None = None,
) -> Conversation:
    """Put the row's system message before its turns, unless they have one."""
    if learn is not None and learn.count(None) == len(learn):
        learn = None
    key = _first(_SYSTEMS, row)
    system = read_text(row[key], key) if key else ""
    if system.strip() and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": system}, *turns]
        learn = [None, *learn] if learn else None
    return Conversation(turns, tools, None, learn)


def _plain_text(row: dict[str, Any]) -> Conversation:
    _require(row, "text")
    return Conversation(text=read_text(row["text"], "text"))


def _require(row: dict[str, Any], *keys: str) -> None:
    for key in keys:
        if key not in row:
            raise Rejected("not_a_conversation", f"there is no {key!r}")


def _first(names: Iterable[str], row: Mapping[str, Any]) -> str | None:
    """Find the first of several names that the row has; one without a value only if no other is there."""
    empty = None
    for name in names:
        if name in row:
            if row[name]:
                return name
            empty = empty or name
    return empty


_CONVERTERS: dict[str, Callable[[dict[str, Any]], Conversation]] = {
    "alpaca": _alpaca,
    "dolly": _dolly,
    "question_answer": _question_answer,
    "prompt_completion": _prompt_completion,
    "messages": _messages,
    "sharegpt": _messages,
    "text": _plain_text,
}
