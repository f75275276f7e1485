"""Passages that an index finds for the questions of a test, and the protocol of such an index."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tunewell.core.progress import ProgressListener, silent
from tunewell.data.reading_prompt import Passage
from tunewell.scoring.answer_keys import AnswerKey
from tunewell.scoring.judge import contains_key

HasAnswer = Callable[[int, Passage], bool | None]
"""Return whether a passage answers a question, by the question's number; None if that is unknown."""


@dataclass(frozen=True)
class Shown:
    """The passages for one question."""

    passages: list[Passage]
    right: list[bool] | None
    """Whether each of the passages answers the question; None if that is unknown."""
    is_refused: bool = False
    """Whether the search refuses the question, so that no model is asked."""


@dataclass(frozen=True)
class SearchedQuestions:
    """The passages for all questions of a test."""

    found: list[Shown]
    removed: list[Shown | None]
    """The passages found without those that have the answer; None if no passage has it, or if that is unknown."""
    seconds: float = 0.0
    """Time of all searches, without those for `removed`."""


def key_finder(keys: Sequence[AnswerKey]) -> HasAnswer:
    """Return a function that looks for the answer key in a passage. A key like `yes` or a refusal cannot be found."""

    def has_answer(number: int, passage: Passage) -> bool | None:
        key = keys[number]
        is_known = bool(key.accepted) and not (key.is_polar or key.is_refusal or key.is_final)
        return contains_key(passage.text, key) if is_known else None

    return has_answer


class PassageIndex(Protocol):
    """An index of documents; the feature `retrieval` opens one."""

    address: str

    @property
    def notes(self) -> list[str]:
        """What the user must know about the index."""
        ...

    @property
    def seconds(self) -> float | None:
        """Time to read and embed the documents; None if unknown."""
        ...

    @property
    def tuned_on(self) -> str | None:
        """The file with the questions on which the search settings were chosen, or None."""
        ...

    def search_all(
        self,
        questions: Sequence[str],
        has_answer: HasAnswer,
        *,
        num_passages: int | None = None,
        progress: ProgressListener = silent,
    ) -> SearchedQuestions:
        """Return the passages for all questions, with and without those that contain the answer."""
        ...
