"""Training rows that teach a model to read: questions with passages, as `ask` shows them.

Each row has the passage that answers, between the search's own near misses, in random order. In a share of the rows
the answering passage is missing, and the reply is the refusal. Whole documents are held out, so that the test measures
reading and not memory: the model has seen neither their questions nor their passages as answers.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import sha256_text
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.core.units import count
from tunewell.data.reading_prompt import NOT_FOUND, reading_prompt
from tunewell.retrieval.questions import Question
from tunewell.retrieval.search import Found, Retriever

UNANSWERABLE_SHARE = 0.25
"""The share of rows without the answering passage, of which the reply is the refusal."""
_HELD_OUT_SHARE = 0.25
_MIN_DOCUMENTS = 4
_CANDIDATES = 40

HasAnswer = Callable[[int, str], bool]


@dataclass
class OpenBookRows:
    """Rows with passages, for training and for the test."""

    train: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    held_out: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    held_out_documents: list[str] = field(default_factory=list[str])
    num_without_answer: int = 0
    """Questions whose answer is in no passage. They are left out."""


def open_book_rows(
    retriever: Retriever,
    questions: Sequence[Question],
    has_answer: HasAnswer,
    *,
    seed: int = 0,
    progress: ProgressListener = silent,
) -> OpenBookRows:
    """Return rows with passages; raise UserError if the documents answer too few questions to hold some out."""
    located: list[tuple[Question, list[Found], set[int]]] = []
    for number, question in enumerate(questions):
        progress(Progress("finding passages", number, len(questions), "questions"))
        found = retriever.search(question.text, _CANDIDATES)
        right = [one for one in found if has_answer(number, one.passage.text)]
        if right:
            same = {one.number for one in right if one.passage.file == right[0].passage.file}
            located.append((question, found, same))
    documents = sorted({_document(found, right) for _, found, right in located})
    if len(documents) < _MIN_DOCUMENTS:
        raise UserError(
            f"the answers are in only {count(len(documents), 'document')}, so none can be held out",
            fix=f"index at least {_MIN_DOCUMENTS} documents that answer the questions",
        )
    ranked = sorted(documents, key=lambda name: sha256_text(str(seed), name))
    held_out = set(ranked[: max(1, round(len(documents) * _HELD_OUT_SHARE))])
    rows = OpenBookRows(held_out_documents=sorted(held_out), num_without_answer=len(questions) - len(located))
    num_passages = retriever.store.manifest.settings.num_passages.value
    for place, (question, found, right) in enumerate(located):
        chance = random.Random(f"{seed} {place} {question.text}")
        is_answerable = chance.random() >= UNANSWERABLE_SHARE
        row = _row(question, found, right, num_passages, chance, is_answerable=is_answerable)
        (rows.held_out if _document(found, right) in held_out else rows.train).append(row)
    return rows


def _document(found: list[Found], right: set[int]) -> str:
    return next(one.passage.file for one in found if one.number in right)


def _row(
    question: Question,
    found: list[Found],
    right: set[int],
    num_passages: int,
    chance: random.Random,
    *,
    is_answerable: bool,
) -> dict[str, Any]:
    misses = [one.passage for one in found if one.number not in right]
    if not is_answerable:
        shown, reply = misses[:num_passages], NOT_FOUND
        chance.shuffle(shown)
    else:
        answer = next(one.passage for one in found if one.number in right)
        shown = [answer, *misses[: num_passages - 1]]
        chance.shuffle(shown)
        reply = f"{question.reference.strip()} [{shown.index(answer) + 1}]"
    prompt = reading_prompt(question.text, shown)
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]}
