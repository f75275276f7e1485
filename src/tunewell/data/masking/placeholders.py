"""Copies of a conversation with placeholders or redacted tool calls, to find out how a template handles texts.

placeholders  Zq0wXv    one for the content and the thinking of each message, in the order of the messages
in spaces     Ky0pRg    the same, surrounded by all kinds of white space, to find out what is trimmed
redacted      a private-use character for each character of a tool call, to find out which text is where
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from tunewell.data.rows.conversation import Conversation, Message, Rejected, is_object, map_leaves

REASONING = frozenset(("reasoning_content", "thinking", "reasoning"))
_SLOT_FIELDS = REASONING | {"content"}
PLAIN, SPACED = ("Zq", "wXv"), ("Ky", "pRg")
# Each kind of white space that templates trim separately; the most commonly trimmed kinds are outermost.
_LEAD, _TRAIL = "\n\n \t\r\x0b", "\x0c\r\t \n\n"
_TRIMMED = ("", "\n", "\n ", "\n \t", "\n \t\r", None)
"""The characters that a template can trim; None is all white space."""
FIRST_REDACTION, _STRUCK = 0xF0000, "\U0010fffd"
REDACTED = re.compile("([\U000f0000-\U000ffffd])\\1*")
_HIDDEN = re.compile("[\U000f0000-\U0010fffd]+")
ANCHOR = re.compile(f"{PLAIN[0]}[0-9]+{PLAIN[1]}|[\U000f0000-\U000ffffd]+")
_ANY_PLACEHOLDER = re.compile(f"{PLAIN[0]}[0-9]+{PLAIN[1]}|{SPACED[0]}[0-9]+{SPACED[1]}")
_REDACTABLE = re.compile(f'[^"\\\\\\s\\x00-\\x1f{_STRUCK}]')


@dataclass(frozen=True, slots=True)
class Trim:
    """The characters that the template trims from the ends of a message text."""

    lead: str | None = ""
    trail: str | None = ""
    """The characters to trim, or None for all white space."""

    def __call__(self, text: str) -> str:
        if self.lead != "":
            text = text.lstrip(self.lead)
        return text if self.trail == "" else text.rstrip(self.trail)


NO_TRIM = Trim()


def extract_texts(conversation: Conversation) -> tuple[list[str], Any]:
    """Return the texts of a conversation, and its shape: everything except the texts, used as the key of its plan."""
    texts: list[str] = []
    shape: list[tuple[Any, ...]] = []
    for message in conversation.messages:
        content = message["content"]
        is_blank = not content or content.isspace()
        if not is_blank:
            texts.append(content)
        if len(message) == 2:
            shape.append((message["role"], content if is_blank else None))
            continue
        rest: dict[str, Any] = {}
        for key, value in message.items():
            if key in REASONING and isinstance(value, str) and value.strip():
                texts.append(value)
                rest[key] = None
            elif key not in ("role", "content"):
                rest[key] = value
        shape.append((message["role"], content if is_blank else None, _frozen(rest)))
    tools = _frozen(conversation.tools) if conversation.tools else None
    learn = tuple(conversation.learn) if conversation.learn else None
    return texts, (tuple(shape), tools, learn)


def texts_of(message: Message) -> list[str]:
    """Return the texts of one message, in the order of their placeholders."""
    fields = ("content", *(key for key in message if key in REASONING))
    return [message[key] for key in fields if isinstance(message[key], str) and message[key].strip()]


def _frozen(value: Any) -> bytes | str:
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # an integer of more than 64 bits, or nesting beyond 254
        return repr(value)


def with_placeholders(
    messages: list[Message], kind: tuple[str, str], only: frozenset[int] | None = None
) -> tuple[list[Message], list[tuple[int, str]]]:
    """Return copies with placeholders in all messages or in `only`, and the (message, field) of each placeholder."""
    lead, trail = (_LEAD, _TRAIL) if kind is SPACED else ("", "")
    copies: list[Message] = []
    slots: list[tuple[int, str]] = []
    for index, message in enumerate(messages):
        copy: Message = {}
        for key in ["role", "content", *(key for key in message if key not in ("role", "content"))]:
            value = message[key]
            is_replaced = key in _SLOT_FIELDS and (only is None or index in only)
            if is_replaced and isinstance(value, str) and value.strip():
                value = lead + placeholder(len(slots), kind) + trail
                slots.append((index, key))
            copy[key] = value
        copies.append(copy)
    return copies, slots


def placeholder(number: int, kind: tuple[str, str] = PLAIN) -> str:
    """Return the placeholder of a slot."""
    return f"{kind[0]}{number}{kind[1]}"


def contains_placeholder(conversation: Conversation) -> bool:
    """Return True if the tool data or other fields of a row contain the text of a placeholder."""
    others = [
        [value for key, value in message.items() if key not in _SLOT_FIELDS]
        for message in conversation.messages
        if len(message) > 2
    ]
    return _ANY_PLACEHOLDER.search(str(_frozen([others, conversation.tools]))) is not None


def split_at_placeholders(text: str, kind: tuple[str, str], num_slots: int) -> tuple[list[str], list[int]]:
    """Split a rendered text at its placeholders; return the texts of the template and the slots between them."""
    parts = re.split(f"{kind[0]}([0-9]{{1,9}}){kind[1]}", text)
    order = [int(number) for number in parts[1::2]]
    if any(number >= num_slots for number in order):
        raise Rejected("mask_uncertain", "the template creates text that looks like a placeholder")
    return parts[0::2], order


def compare_trims(
    plain: tuple[list[str], list[int]], spaced: tuple[list[str], list[int]], num_slots: int
) -> list[Trim]:
    """Find what the template trims by comparing renderings without and with white space around the placeholders."""
    order = plain[1]
    if order != spaced[1]:
        raise Rejected("mask_uncertain", "the template renders texts differently depending on their content")
    found: dict[tuple[int, str], str | None] = {}
    for literal, padded, before, after in zip(plain[0], spaced[0], [-1, *order], [*order, -1], strict=True):
        lead, trail = _find_trim(literal, padded, before >= 0, after >= 0)
        for side, taken in (((before, "trail"), trail), ((after, "lead"), lead)):
            if found.setdefault(side, taken) != taken:
                raise Rejected("mask_uncertain", "the template trims the same text in two different ways")
    return [Trim(found.get((slot, "lead"), ""), found.get((slot, "trail"), "")) for slot in range(num_slots)]


def _find_trim(literal: str, padded: str, has_before: bool, has_after: bool) -> tuple[str | None, str | None]:
    for trail in _TRIMMED if has_before else ("",):
        for lead in _TRIMMED if has_after else ("",):
            behind = _TRAIL.rstrip(trail) if has_before else ""
            if padded == behind + literal + (_LEAD.lstrip(lead) if has_after else ""):
                return lead, trail
    raise Rejected("mask_uncertain", "the template rewrites the white space around texts")


def redact(
    messages: list[Message], tools: Any, marker: re.Pattern[str], only: frozenset[int] | None = None
) -> tuple[list[Message], Any]:
    """Return copies of messages and tools in which tool calls, and texts without a placeholder, are redacted.

    Markers in other data of the row are also replaced. Lengths do not change, so that positions are the same in both
    renderings.
    """

    def strike(text: Any) -> Any:
        return marker.sub(lambda match: _STRUCK * len(match[0]), text) if isinstance(text, str) else text

    copies: list[Message] = []
    first_of: dict[Any, int] = {}
    for index, message in enumerate(messages):
        # Equal messages must stay equal, because some templates compare messages to find the last one.
        letter = chr(FIRST_REDACTION + first_of.setdefault(_frozen(message), index))
        copy = {
            key: value if key == "role" or key in _SLOT_FIELDS else map_leaves(value, strike, with_keys=True)
            for key, value in message.items()
        }
        if isinstance(copy.get("tool_calls"), list):
            copy["tool_calls"] = [_redact_call(call, letter) for call in copy["tool_calls"]]
        if only is not None and index not in only:
            copy |= {key: _redact_text(copy[key], letter) for key in _SLOT_FIELDS if isinstance(copy.get(key), str)}
        copies.append(copy)
    return copies, map_leaves(tools, strike, with_keys=True)


def _redact_call(call: Any, letter: str) -> Any:
    if not is_object(call):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _redact_call(call["function"], letter)}
    return {key: _redact_text(value, letter) if key in ("name", "arguments") else value for key, value in call.items()}


def _redact_text(value: Any, letter: str) -> Any:
    # Quotes, backslashes and line ends are not redacted, because they may be escaped to two characters.
    def redacted(text: Any) -> Any:
        return _REDACTABLE.sub(letter, text) if isinstance(text, str) else text

    return map_leaves(value, redacted)


def is_equal_outside_redactions(text: str, redacted: str) -> bool:
    """Return True if the redacted rendering equals the real one except in the redacted parts."""
    if len(text) != len(redacted) or _HIDDEN.search(text):
        return False
    at = 0
    for hidden in _HIDDEN.finditer(redacted):
        if text[at : hidden.start()] != redacted[at : hidden.start()]:
            return False
        at = hidden.end()
    return text[at:] == redacted[at:]


def versions(conversation: Conversation) -> Iterator[tuple[Conversation, frozenset[int]]]:
    """Yield a conversation, and versions with `<think>...</think>` moved to its own field, stripped or not.

    Each comes with the indices of the messages that were changed.
    """
    yield conversation, frozenset()
    found = {
        index: message["content"].rpartition("</think>")
        for index, message in enumerate(conversation.messages)
        if message["role"] == "assistant" and "</think>" in message["content"] and REASONING.isdisjoint(message)
    }
    for characters in ("\n", "") if found else ():
        messages = list(conversation.messages)
        for index, (before, _, rest) in found.items():
            thinking = before.rpartition("<think>")[2].strip(characters)
            messages[index] = {**messages[index], "content": rest.lstrip(characters), "reasoning_content": thinking}
        yield Conversation(messages, conversation.tools, None, conversation.learn), frozenset(found)
