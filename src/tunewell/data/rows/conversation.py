"""The nouns of the data room: a row, a conversation, why a row was dropped."""

from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, Any]
"""One turn as templates see it: `role`, `content` (text) and what else the row carried (`tool_calls`, `name`, ...)."""

LearnFrom = Literal["responses", "last_response", "everything"]


@dataclass(frozen=True, slots=True)
class Row:
    """One record as it was read: parsed, or the reason why it could not be."""

    number: int
    """1-based: the line in a text file, the record elsewhere."""
    value: Any = None
    problem: tuple[str, str] | None = None
    """(reason id, what exactly), when the record could not be read."""


@dataclass(slots=True)
class Conversation:
    """One row, converted: turns for a template, or plain text that needs none."""

    messages: list[Message] = field(default_factory=list)
    tools: list[Any] | None = None
    text: str | None = None
    """Plain text to learn whole; `messages` is empty then."""
    learn: list[bool | None] | None = None
    """Per message, what the row itself asked for by `weight`; None where it said nothing."""


class Rejected(Exception):
    """A row that cannot become a document: a reason id from the glossary, and the particulars."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
