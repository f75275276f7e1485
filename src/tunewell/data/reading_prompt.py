"""The message with passages for a model: `ask`, `chat`, `serve`, open-book training and exports use the same form.

Passages are data: they go into the text of the user's message, where a marker of the chat template stays text.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

from tunewell.core.errors import UserError

NOT_FOUND = "Not in the documents."
"""The refusal: the reply if the passages do not answer the question."""
_TASK = (
    "Answer the question with the passages below. Use only what they say, and keep it short. "
    "Put the number of the passage after the answer, like [1]. "
    f'If the passages do not answer the question, reply: "{NOT_FOUND}"'
)
CITATION = re.compile(r"\[\d{1,3}(?:\s*[,;]\s*\d{1,3})*\]")
"""`[2]`, or `[1, 3]`."""
PATH_SEPARATOR = " > "
_QUESTION = "Question: "
_FORGED = re.compile(r"^[ \t]*\[(\d{1,3})\]", re.MULTILINE)


@dataclass(frozen=True)
class Passage:
    """A part of a document that is searched and shown as a whole."""

    file: str
    title: str
    headings: tuple[str, ...]
    """The headings above the text, without the title."""
    text: str
    lines: tuple[int, int] | None = None
    page: int | None = None

    @property
    def path(self) -> str:
        """The title and the headings, as shown to the user and the model: `Hazelquay College > Your application`."""
        return PATH_SEPARATOR.join((self.title, *self.headings))

    @property
    def searched(self) -> str:
        """The text that is embedded and whose words are indexed."""
        return f"{self.path}\n{self.text}"

    @property
    def key(self) -> str:
        """The hash of the searched text. Equal passages are embedded and stored once."""
        return sha256(self.searched.encode("utf-8", "replace")).hexdigest()

    @property
    def where(self) -> str:
        """The lines or the page, for the list of sources; empty if unknown."""
        if self.page is not None:
            return f"page {self.page}"
        if self.lines is None:
            return ""
        first, last = self.lines
        return f"line {first}" if first == last else f"lines {first}-{last}"


class ShownPassage(Protocol):
    """A passage as a model reads it."""

    @property
    def path(self) -> str:
        """The title of the document and the headings above the passage."""
        ...

    @property
    def text(self) -> str: ...


def reading_prompt(question: str, passages: Sequence[ShownPassage]) -> str:
    """Return the message for a model: the task, numbered passages with their headings, and the question."""
    shown = "\n\n".join(
        f"[{number}] {' '.join(passage.path.split())}\n{_text(passage)}" for number, passage in enumerate(passages, 1)
    )
    return f"{_TASK}\n\n{shown}\n\n{_QUESTION}{question.strip()}"


def _text(passage: ShownPassage) -> str:
    """Return the text of a passage. `[2]` at the start of a line, which looks like a new passage, becomes `(2)`."""
    return _FORGED.sub(r"(\1)", passage.text.strip())


def question_in(message: str) -> str:
    """Return the question in a message with passages. Other messages are returned unchanged."""
    return message.rpartition(f"\n\n{_QUESTION}")[2] if message.startswith(_TASK) else message


def fit(question: str, passages: Sequence[Passage], fits: Callable[[str], bool]) -> Sequence[Passage]:
    """Return as many of the best passages as fit in the context together with an answer; raise UserError if none."""
    for number in range(len(passages), 0, -1):
        if fits(reading_prompt(question, passages[:number])):
            return passages[:number]
    best = passages[0]
    raise UserError(
        "no passage fits in the model's context, not even the best one",
        where=f"{best.file}, {best.where or best.path}",
        fix="use a model with a longer context, or ask a shorter question",
    )


def is_refusal(answer: str) -> bool:
    """Return True if the model says that the passages do not answer the question."""
    return " ".join(answer.lower().split()).strip(" .!\"'").startswith(NOT_FOUND.lower().rstrip("."))


def prompt_form() -> dict[str, Any]:
    """Return the form of the message for an export, so that other programs can write it."""
    return {
        "message": f"{_TASK}\n\n{{passages}}\n\n{_QUESTION}{{question}}",
        "passage": "[{number}] {headings}\n{text}",
        "between_passages": "\n\n",
        "refusal": NOT_FOUND,
    }
