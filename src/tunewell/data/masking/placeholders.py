"""Copies of a conversation with other words in it: what the template makes of them shows where the words go.

words      Zq0wXv    one for each message's content and thinking, in the order of the messages
in spaces  Ky0pRg    the same between white space of every kind, to see what is trimmed
disguise   letters of a private range, one for each letter of a tool call, to see whose text stands where
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import orjson

from tunewell.data.rows.conversation import Conversation, Message, Rejected

REASONING = frozenset(("reasoning_content", "thinking", "reasoning"))
_SLOT_FIELDS = REASONING | {"content"}
PLAIN, SPACED = ("Zq", "wXv"), ("Ky", "pRg")
# Each white space that templates trim apart from the others, the ones trimmed most often farthest out.
_LEAD, _TRAIL = "\n\n \t\r\x0b", "\x0c\r\t \n\n"
_FIRST_REDACTION, _STRUCK = 0xF0000, "\U0010fffd"
REDACTED = re.compile("([\U000f0000-\U000ffffd])\\1*")
_HIDDEN = re.compile("[\U000f0000-\U0010fffd]+")
ANCHOR = re.compile(f"{PLAIN[0]}[0-9]+{PLAIN[1]}|[\U000f0000-\U000ffffd]+")
_ANY_PLACEHOLDER = re.compile(f"{PLAIN[0]}[0-9]+{PLAIN[1]}|{SPACED[0]}[0-9]+{SPACED[1]}")
_UNREDACTED = frozenset('"\\')


@dataclass(frozen=True, slots=True)
class Trim:
    """What the template takes off the ends of a message's words."""

    lead: str | None = ""
    trail: str | None = ""
    """The characters taken off; None: all white space."""

    def __call__(self, text: str) -> str:
        if self.lead != "":
            text = text.lstrip(self.lead)
        return text if self.trail == "" else text.rstrip(self.trail)


NO_TRIM = Trim()


def extract_texts(conversation: Conversation) -> tuple[list[str], Any]:
    """Take the words out of a conversation; what is left, its shape, decides how it is rendered."""
    words, shape = [], []
    for message in conversation.messages:
        content = message["content"]
        is_blank = not content or content.isspace()
        if not is_blank:
            words.append(content)
        if len(message) == 2:
            shape.append((message["role"], content if is_blank else None))
            continue
        rest: dict[str, Any] = {}
        for key, value in message.items():
            if key in REASONING and isinstance(value, str) and value.strip():
                words.append(value)
                rest[key] = None
            elif key not in ("role", "content"):
                rest[key] = value
        shape.append((message["role"], content if is_blank else None, _frozen(rest)))
    tools = _frozen(conversation.tools) if conversation.tools else None
    learn = tuple(conversation.learn) if conversation.learn else None
    return words, (tuple(shape), tools, learn)


def texts_of(message: Message) -> list[str]:
    """List the words of one message, in the order of their stand-ins."""
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
    """Copy messages with stand-ins for the words of all, or of some; also say what each stands for: message, field."""
    lead, trail = (_LEAD, _TRAIL) if kind is SPACED else ("", "")
    copies, slots = [], []
    for index, message in enumerate(messages):
        copy: Message = {}
        for key in ["role", "content", *(key for key in message if key not in ("role", "content"))]:
            value = message[key]
            is_wanted = key in _SLOT_FIELDS and (only is None or index in only)
            if is_wanted and isinstance(value, str) and value.strip():
                value = lead + placeholder(len(slots), kind) + trail
                slots.append((index, key))
            copy[key] = value
        copies.append(copy)
    return copies, slots


def placeholder(number: int, kind: tuple[str, str] = PLAIN) -> str:
    """Spell a stand-in."""
    return f"{kind[0]}{number}{kind[1]}"


def contains_placeholder(conversation: Conversation) -> bool:
    """Whether anything in a row besides its words looks like a stand-in."""
    others = [
        [value for key, value in message.items() if key not in _SLOT_FIELDS]
        for message in conversation.messages
        if len(message) > 2
    ]
    return (
        bool(others or conversation.tools)
        and _ANY_PLACEHOLDER.search(str(_frozen([others, conversation.tools]))) is not None
    )


def split_at_placeholders(text: str, kind: tuple[str, str], num_slots: int) -> tuple[list[str], list[int]]:
    """Cut a rendered text at its stand-ins: the template's texts, and between them the slots."""
    parts = re.split(f"{kind[0]}([0-9]{{1,9}}){kind[1]}", text)
    order = [int(number) for number in parts[1::2]]
    if any(number >= num_slots for number in order):
        raise Rejected("mask_uncertain", "its words cannot be told from what is put in their place")
    return parts[0::2], order


def compare_trims(
    plain: tuple[list[str], list[int]], spaced: tuple[list[str], list[int]], num_slots: int
) -> list[Trim]:
    """Compare the two renderings, cut at stand-ins, to see what the template trims."""
    order = plain[1]
    if order != spaced[1]:
        raise Rejected("mask_uncertain", "the template treats words differently by what they are")
    found: dict[tuple[int, str], str | None] = {}
    for index, (literal, padded) in enumerate(zip(plain[0], spaced[0], strict=True)):
        lead, trail = _find_trim(literal, padded, index > 0, index < len(order))
        sides = {(order[index - 1], "trail"): trail} if index > 0 else {}
        sides |= {(order[index], "lead"): lead} if index < len(order) else {}
        for side, taken in sides.items():
            if found.setdefault(side, taken) != taken:
                raise Rejected("mask_uncertain", "the template trims the same words here so and there so")
    return [Trim(found.get((slot, "lead"), ""), found.get((slot, "trail"), "")) for slot in range(num_slots)]


def _trims_by_remainder() -> tuple[dict[str, str | None], dict[str, str | None]]:
    leads: dict[str, str | None] = {_LEAD: ""}
    trails: dict[str, str | None] = {_TRAIL: ""}
    characters = ""
    for own, following in pairwise(dict.fromkeys(_LEAD)):
        characters += own
        leads[_LEAD[_LEAD.index(following) :]] = characters
        trails[_TRAIL.rstrip(characters)] = characters
    return leads | {"": None}, trails | {"": None}


_LEADS, _TRAILS = _trims_by_remainder()
_NONE: dict[str, str | None] = {"": ""}


def _find_trim(literal: str, padded: str, has_before: bool, has_after: bool) -> tuple[str | None, str | None]:
    for kept_behind, trail in (_TRAILS if has_before else _NONE).items():
        for kept_in_front, lead in (_LEADS if has_after else _NONE).items():
            if padded == kept_behind + literal + kept_in_front:
                return lead, trail
    raise Rejected("mask_uncertain", "the template rewrites the white space around words")


def redact(
    messages: list[Message], tools: Any, marker: re.Pattern[str], only: frozenset[int] | None = None
) -> tuple[list[Message], Any]:
    """Copy messages with the letters of tool calls, and of words that have no stand-in, in disguise.

    Every marker that other data of the row spell is blotted out. All this letter for letter, so that a place in the one
    rendering is the same place in the other.
    """

    def blot(value: Any) -> Any:
        if isinstance(value, str):
            return marker.sub(lambda match: _STRUCK * len(match.group()), value)
        if isinstance(value, list):
            return [blot(inner) for inner in value]
        if isinstance(value, dict):
            return {blot(key): blot(inner) for key, inner in value.items()}
        return value

    copies = []
    first_of: dict[Any, int] = {}
    for index, message in enumerate(messages):
        # Equal messages stay equal: some templates look for the last one by comparing.
        letter = chr(_FIRST_REDACTION + first_of.setdefault(_frozen(message), index))
        copy = {key: value if key == "role" or key in _SLOT_FIELDS else blot(value) for key, value in message.items()}
        if isinstance(copy.get("tool_calls"), list):
            copy["tool_calls"] = [_redact_call(call, letter) for call in copy["tool_calls"]]
        if only is not None and index not in only:
            copy |= {key: _redact_text(copy[key], letter) for key in _SLOT_FIELDS if isinstance(copy.get(key), str)}
        copies.append(copy)
    return copies, blot(tools)


def _redact_call(call: Any, letter: str) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _redact_call(call["function"], letter)}
    return {key: _redact_text(value, letter) if key in ("name", "arguments") else value for key, value in call.items()}


def _redact_text(value: Any, letter: str) -> Any:
    if isinstance(value, str):
        # Quotes, backslashes and line ends may be written as two characters; they keep what they are.
        return "".join(
            own if own in _UNREDACTED or own < " " or own.isspace() or own == _STRUCK else letter for own in value
        )
    if isinstance(value, list):
        return [_redact_text(inner, letter) for inner in value]
    if isinstance(value, dict):
        return {key: _redact_text(inner, letter) for key, inner in value.items()}
    return value


def redacted_message(letter: str) -> int:
    """Tell from a letter in disguise which message it is of."""
    return ord(letter) - _FIRST_REDACTION


def is_equal_outside_redactions(text: str, safe: str) -> bool:
    """Whether the rendering with disguises is the real one, letter for letter, wherever nothing is hidden."""
    if len(text) != len(safe) or _HIDDEN.search(text):
        return False
    at = 0
    for hidden in _HIDDEN.finditer(safe):
        if text[at : hidden.start()] != safe[at : hidden.start()]:
            return False
        at = hidden.end()
    return text[at:] == safe[at:]


def with_separate_thinking(conversation: Conversation) -> list[tuple[Conversation, frozenset[int]]]:
    """Move thinking that is written into replies (`<think>...</think>`) to its own field, as templates do.

    Gives the ways to do it, with line ends around it taken off and as they are, each with the messages that had it.
    """
    found = {
        index: message["content"].rpartition("</think>")
        for index, message in enumerate(conversation.messages)
        if message["role"] == "assistant" and "</think>" in message["content"] and REASONING.isdisjoint(message)
    }
    versions = []
    for characters in ("\n", "") if found else ():
        messages = list(conversation.messages)
        for index, (before, _, rest) in found.items():
            thinking = before.rpartition("<think>")[2].strip(characters)
            messages[index] = {**messages[index], "content": rest.lstrip(characters), "reasoning_content": thinking}
        versions.append((Conversation(messages, conversation.tools, None, conversation.learn), frozenset(found)))
    return versions
