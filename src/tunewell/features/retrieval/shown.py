"""Search the passages for many questions, once with and once without those that contain the answer.

question 1   found: [A] [b] [c]    removed: [b] [c] [d]      A contains the answer
question 2   found: [b] [c]        removed: none             no passage contains the answer: a search miss
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.evaluation.answer_keys import AnswerKey
from tunewell.evaluation.judge import contains_key
from tunewell.features.retrieval.passages import Passage
from tunewell.features.retrieval.search import Retriever

_CANDIDATES = 100

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


def search_all(
    retriever: Retriever,
    questions: Sequence[str],
    has_answer: HasAnswer,
    *,
    num_passages: int | None = None,
    progress: ProgressListener = silent,
) -> SearchedQuestions:
    """Return the passages for all questions, with and without those that contain the answer."""
    limit = num_passages or retriever.store.manifest.settings.num_passages.value
    began = time.perf_counter()
    vectors = retriever.embedder.embed(list(questions), is_query=True)
    result = SearchedQuestions([], [], time.perf_counter() - began)
    seconds = result.seconds
    for number, (question, vector) in enumerate(zip(questions, vectors, strict=True)):
        progress(Progress("searching", number, len(questions), "questions"))
        began = time.perf_counter()
        found, is_answerable = retriever.find(question, limit, vector=vector)
        seconds += time.perf_counter() - began
        passages = [one.passage for one in found]
        matches = [has_answer(number, passage) for passage in passages]
        right = None if None in matches else [bool(one) for one in matches]
        result.found.append(Shown(passages, right, not is_answerable))
        if right is None:
            result.removed.append(None)
            continue
        near = retriever.search(question, _CANDIDATES, vector=vector)
        gone = [one.number for one in near if has_answer(number, one.passage)]
        if not gone:
            result.removed.append(None)
            continue
        left, is_answerable = retriever.find(question, limit, vector=vector, hidden=gone)
        result.removed.append(Shown([one.passage for one in left], [False] * len(left), not is_answerable))
    return replace(result, seconds=seconds)
