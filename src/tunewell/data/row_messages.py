"""Read the turns of a row: whose they are, what they say, what is called and what is learned of them."""

from typing import Any

from tunewell.data.json_rows import parse_row
from tunewell.data.types import Message, Rejected

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
