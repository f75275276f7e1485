"""Build a conversation from a stream of messages: join messages of one speaker, and split a chat at long pauses."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from tunewell.core.errors import UserError
from tunewell.core.units import count
from tunewell.data.rows.conversation import ConversationRow, Message, Rejected, attempt, is_object
from tunewell.data.sources.base import ReadOptions

_NUM_NAMED = 6
CHAT_FORMATS = frozenset({"whatsapp", "telegram", "signal", "discord", "slack"})
"""Formats of chats between people."""


class Turns:
    """A conversation that is being built."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.notes: Counter[str] = Counter()
        self._thinking: list[str] = []

    def think(self, text: str) -> None:
        """Add thinking to the next reply."""
        if text.strip():
            self._thinking.append(text)

    def add(self, role: str, text: str, *, separator: str = "\n", is_supervised: bool = True) -> None:
        """Add a message. It is joined to the previous one if the speaker is the same; empty messages are left out."""
        if not text.strip():
            return
        if self.messages and self.messages[-1]["role"] == role:
            self.messages[-1]["content"] += separator + text
        else:
            self.messages.append({"role": role, "content": text})
        message = self.messages[-1]
        if role == "assistant" and self._thinking:
            before = [message["reasoning_content"]] if "reasoning_content" in message else []
            message["reasoning_content"] = "\n\n".join([*before, *self._thinking])
        if role == "assistant" and not is_supervised:
            message["weight"] = 0
        self._thinking = []

    def row(self, format_name: str) -> ConversationRow:
        """Return the conversation from its first question on; raise Rejected if it has no messages."""
        start = next((index for index, turn in enumerate(self.messages) if turn["role"] != "assistant"), None)
        if start is None:
            raise Rejected("not_a_conversation", "no question" if self.messages else "the conversation is empty")
        if start:
            self.notes["openings_left_out"] += start
        return ConversationRow(self.messages[start:], format_name, dict(self.notes))


def walk_up(nodes: Mapping[str, Any], leaf: Any, parent: str) -> list[str]:
    """Return the keys of the nodes from the root of a tree to a leaf; `parent` is the field with the key above."""
    path: dict[str, None] = {}
    while isinstance(leaf, str) and is_object(node := nodes.get(leaf)) and leaf not in path:
        path[leaf] = None
        leaf = node.get(parent)
    return [*path][::-1]


class UnknownSpeaker(UserError):
    """Raised for a chat of which nobody has said whose messages are the replies."""

    def __init__(self, senders: Counter[str], what: str, *, where: str, fix: str) -> None:
        super().__init__(what, where=where, fix=fix)
        self.senders = senders


class ChatMessage(NamedTuple):
    """One message of a chat between people."""

    number: int
    time: datetime
    sender: str
    text: str
    left_out: str = ""
    """The name of the note that counts this message, if it is left out, e.g. `media_left_out`."""


def chat_rows(
    messages: Iterable[ChatMessage], format_name: str, file_name: str, *, options: ReadOptions
) -> Iterator[tuple[int, Any]]:
    """Yield a conversation for each part of a chat without a long pause. The messages of `assistant` are the replies.

    In a chat of more than two people, each message of the others begins with the name of its sender. Messages of one
    speaker before and after a message that is left out are not joined: a new conversation begins.
    """
    chat, assistant = list(messages), options.assistant
    senders = Counter(message.sender for message in chat if message.sender)
    if assistant is None or assistant not in senders:
        named = ", ".join(f"`{name}` ({count(number)})" for name, number in senders.most_common(_NUM_NAMED))
        raise UnknownSpeaker(
            senders,
            f"whose messages in `{file_name}` are the replies?"
            if assistant is None
            else f"`{assistant}` wrote nothing in `{file_name}`",
            where=f"senders: {named or 'none'}",
            fix="set `assistant: NAME` on the source: the person whose messages the model should learn; "
            "if the file is not a chat, set `format: text`",
        )
    turns, first, previous, is_after_gap = Turns(), 0, datetime.min, False
    for message in chat:
        role = "assistant" if message.sender == assistant else "user"
        last_role = turns.messages[-1]["role"] if turns.messages else None
        is_cut = is_after_gap and not message.left_out and last_role == role
        is_pause = message.time - previous > timedelta(hours=options.gap_hours)
        if (is_cut or is_pause) and (turns.messages or turns.notes):
            yield first, attempt(turns.row, format_name)
            turns = Turns()
        first = first if turns.messages or turns.notes else message.number
        previous, is_after_gap = message.time, bool(message.left_out)
        if message.left_out:
            turns.notes[message.left_out] += 1
        else:
            is_named = role == "user" and len(senders) > 2
            turns.add(role, f"{message.sender}: {message.text}" if is_named else message.text)
    if turns.messages or turns.notes:
        yield first, attempt(turns.row, format_name)
