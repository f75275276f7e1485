"""The types of the data package: a message, a conversation, and the reason why a row is rejected."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names of the thinking of a reply, by preference."""
Message = dict[str, Any]
"""One turn for the template: `role`, `content` (text) and other keys of the row (`tool_calls`, `name`, ...)."""


@dataclass(slots=True)
class Conversation:
    """One row after conversion: messages for the template, or plain text that needs no template."""

    messages: list[Message] = field(default_factory=list[Message])
    tools: list[Any] | None = None
    text: str | None = None
    """Plain text that is supervised as a whole. If it is set, `messages` is empty."""
    learn: list[bool | None] | None = None
    """For each message, whether its `weight` requests supervision, or None if it has no `weight`."""
    answers: tuple[str, ...] = field(default=(), compare=False)
    """Accepted answers of the row, by which `validate` judges; empty if it has none."""
    answers_column: str = field(default="", compare=False)
    unused: tuple[str, ...] = field(default=(), compare=False)
    """Columns of the row that have a value and are not used."""
    notes: Mapping[str, int] | None = field(default=None, compare=False)
    """Counts for the report, e.g. messages that were left out."""

    def note(self, name: str, number: int = 1) -> None:
        """Set a count for the report."""
        self.notes = {**(self.notes or {}), name: number}


class ConversationRow(dict[str, Any]):
    """A row that a reader of exported chats made: `{"messages": [...]}`, with its format and counts for the report."""

    def __init__(self, messages: list[Message], format_name: str, notes: Mapping[str, int] | None = None) -> None:
        super().__init__(messages=messages)
        self.format_name = format_name
        self.notes = notes or {}


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Return True for a JSON object."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Return True for a JSON list."""
    return isinstance(value, list)


def objects_in(value: object) -> list[dict[str, Any]]:
    """Return the objects of a list; return an empty list for any other value."""
    return [entry for entry in value if is_object(entry)] if is_list(value) else []


def map_leaves(value: Any, change: Callable[[Any], Any], *, with_keys: bool = False) -> Any:
    """Return a copy of nested lists and dicts in which `change` is applied to all leaves, and optionally to keys."""
    if is_object(value):
        keys = map(change, value) if with_keys else value
        return {key: map_leaves(value[old], change, with_keys=with_keys) for key, old in zip(keys, value, strict=True)}
    if is_list(value):
        return [map_leaves(inner, change, with_keys=with_keys) for inner in value]
    return change(value)


class Rejected(Exception):
    """Raised for a row that cannot become a document, with a reason from the glossary and details."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


def attempt(make: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a call, or the `Rejected` that it raises."""
    try:
        return make(*args)
    except Rejected as rejected:
        return rejected
