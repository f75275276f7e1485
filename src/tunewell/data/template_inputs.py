"""What a template gets to see: plain data only, and a message's reasoning under the names that templates read."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tunewell.data.jinja_limits import TemplateFailed
from tunewell.data.types import Message

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class _NotPlain(Exception):
    """Something other than text, numbers, lists and dicts."""


def as_template_sees(messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[Any, Any, int]:
    """Give messages and tools as plain data, reasoning under every name templates use, and their size in characters."""
    try:
        size = _plain_size(messages) + (_plain_size(tools) if tools is not None else 0)
    except _NotPlain:
        messages, tools = plain_data(messages), plain_data(tools)
        size = _plain_size(messages) + _plain_size(tools)
    for message in messages:
        if type(message) is not dict:
            raise TemplateFailed(f"a message is not an object with a role and content: {shortened(repr(message))}")
    for tool in tools or ():
        if type(tool) is not dict:
            raise TemplateFailed("a tool is not a JSON schema (an object)")
    for message in messages:
        if "reasoning_content" in message or "thinking" in message or "reasoning" in message:
            return [_with_reasoning(each) for each in messages], tools, size
    return messages, tools, size


def _with_reasoning(message: Message) -> Message:
    reasoning = next((message[key] for key in _REASONING_FIELDS if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain_size(value: Any) -> int:
    """Count the characters of plain data, or raise `_NotPlain`: the usual case, which needs no copy."""
    kind = type(value)
    if kind is str:
        return len(value)
    if kind is dict:
        size = 0
        for key, item in value.items():
            size += len(key) if type(key) is str else _plain_size(key)
            size += len(item) if type(item) is str else _plain_size(item)
        return size
    if kind is list or kind is tuple:
        return sum(map(_plain_size, value))
    if value is None or kind is int or kind is float or kind is bool:
        return 8
    raise _NotPlain


def plain_data(value: Any) -> Any:
    """Rebuild a value from text, numbers, lists and dicts only; what has no such form becomes `<its type>`.

    Methods of richer objects (arrays, images, enums) are nothing a template may reach.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {plain_data(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_data(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain_data(item) for item in value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return plain_data(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return plain_data(dump())
    return f"<{type(value).__name__}>"


def shortened(text: str) -> str:
    """Cut a text that goes into an error message."""
    return text if len(text) <= 500 else text[:500] + "..."
