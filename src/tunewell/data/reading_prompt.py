"""The message with passages for a model: `ask`, `chat`, `serve`, open-book training and exports use the same form.

Passages are data: they go into the text of the user's message, where a marker of the chat template stays text.
"""

import re
from collections.abc import Sequence
from typing import Any, Protocol

NOT_FOUND = "Not in the documents."
"""The refusal: the reply if the passages do not answer the question."""
_TASK = (
    "Answer the question with the passages below. Use only what they say, and keep it short. "
    "Put the number of the passage after the answer, like [1]. "
    f'If the passages do not answer the question, reply: "{NOT_FOUND}"'
)
_QUESTION = "Question: "
_FORGED = re.compile(r"^[ \t]*\[(\d{1,3})\]", re.MULTILINE)


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


def prompt_form() -> dict[str, Any]:
    """Return the form of the message for an export, so that other programs can write it."""
    return {
        "message": f"{_TASK}\n\n{{passages}}\n\n{_QUESTION}{{question}}",
        "passage": "[{number}] {headings}\n{text}",
        "between_passages": "\n\n",
        "refusal": NOT_FOUND,
    }
