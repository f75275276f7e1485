"""Choose the search settings of an index on questions with known answers: training questions, not test ones.

The right passage of a question contains its answer. A question is made unanswerable by hiding the document with the
answer: the passages that the search then finds are examples for questions that the documents do not answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tunewell.core.errors import UserError
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.core.units import count
from tunewell.evaluation.passages import HasAnswer
from tunewell.features.retrieval.records import SearchSettings
from tunewell.features.retrieval.search import Retriever
from tunewell.records.plan import Chosen

_WEIGHTS = [round(0.1 * step, 1) for step in range(11)]
_MAX_PASSAGES = 10
_MIN_PASSAGES = 3
_MIN_QUESTIONS = 20
_REFUSED = 0.97
"""The share of unanswerable questions that the threshold refuses."""
_RIDGE = 0.01


@dataclass(frozen=True)
class _Asked:
    question: str
    vector: np.ndarray
    document: str
    """The document with the answer."""
    right: frozenset[int]
    """The passages of that document with the answer."""


def tune(
    retriever: Retriever, questions: Sequence[str], has_answer: HasAnswer, *, progress: ProgressListener = silent
) -> tuple[SearchSettings, list[str]]:
    """Return measured settings and notes. Raise UserError if too few questions are answered by the documents."""
    asked, num_without = _locate_answers(retriever, questions, has_answer, progress)
    if len(asked) < _MIN_QUESTIONS:
        raise UserError(
            f"the answers to only {count(len(asked))} of {count(len(questions), 'question')} are in the documents",
            fix=f"use at least {_MIN_QUESTIONS} questions that the documents answer; the index "
            "itself is complete and can be used",
        )
    weight, num_passages = _tune_search(retriever, asked, progress)
    refusal = _tune_refusal(retriever, asked, weight.value, num_passages.value, progress)
    notes = [f"{count(num_without, 'question')} of {count(len(questions))} have no answer in the documents"]
    settings = SearchSettings(vector_weight=weight, num_passages=num_passages, refusal=refusal)
    return settings, notes if num_without else []


def _locate_answers(
    retriever: Retriever, questions: Sequence[str], has_answer: HasAnswer, progress: ProgressListener
) -> tuple[list[_Asked], int]:
    vectors = retriever.embedder.embed(list(questions), is_query=True)
    asked: list[_Asked] = []
    for number, (question, vector) in enumerate(zip(questions, vectors, strict=True)):
        progress(Progress("finding the answers", number, len(questions), "questions"))
        found = retriever.search(question, 100, vector=vector)
        with_answer = [one for one in found if has_answer(number, one.passage)]
        if with_answer:
            # Others may contain the same number or date by chance; the nearest document is the one that answers.
            document = with_answer[0].passage.file
            right = frozenset(one.number for one in with_answer if one.passage.file == document)
            asked.append(_Asked(question, vector, document, right))
    return asked, len(questions) - len(asked)


def _tune_search(
    retriever: Retriever, asked: list[_Asked], progress: ProgressListener
) -> tuple[Chosen[float], Chosen[int]]:
    ranks = np.full((len(_WEIGHTS), len(asked)), np.inf)
    for column, one in enumerate(asked):
        progress(Progress("choosing the search settings", column, len(asked), "questions"))
        for row, weight in enumerate(_WEIGHTS):
            found = retriever.search(one.question, _MAX_PASSAGES, vector=one.vector, vector_weight=weight)
            places = [place for place, hit in enumerate(found, 1) if hit.number in one.right]
            ranks[row, column] = min(places, default=np.inf)
    quality = (1 / ranks).mean(axis=1)
    best = max(range(len(_WEIGHTS)), key=lambda row: (round(quality[row], 3), -abs(_WEIGHTS[row] - 0.6)))
    within = [float((ranks[best] <= number).mean()) for number in range(1, _MAX_PASSAGES + 1)]
    enough = next(number for number in range(1, _MAX_PASSAGES + 1) if within[number - 1] >= within[-1] - 0.005)
    chosen = max(_MIN_PASSAGES, enough)
    return (
        Chosen[float](
            value=_WEIGHTS[best],
            because=f"the right passage comes first for {within[0]:.0%} of {count(len(asked), 'question')}",
        ),
        Chosen[int](
            value=chosen, because=f"the right passage is among them for {within[chosen - 1]:.0%} of the questions"
        ),
    )


def _tune_refusal(
    retriever: Retriever, asked: list[_Asked], weight: float, num_passages: int, progress: ProgressListener
) -> Chosen[list[float]]:
    documents = sorted({one.document for one in asked})
    if len(documents) < 2:
        return Chosen[list[float]](value=[], because="all answers are in one document, so none can be hidden")
    answered, hidden = [], []
    for number, one in enumerate(asked):
        progress(Progress("choosing when to refuse", number, len(asked), "questions"))
        for signals, without in ((answered, ()), (hidden, (one.document,))):
            found = retriever.search(
                one.question, num_passages, vector=one.vector, vector_weight=weight, without=without
            )
            signals.append(retriever.signals(one.question, found, without=without) if found else (0.0, 0.0, 0.0))
    positive, negative = np.array(answered), np.array(hidden)
    owner = np.array([one.document for one in asked])
    kept, refused = [], []
    for document in documents:  # each document is judged with a threshold that was chosen on the others
        others, own = owner != document, owner == document
        line = _fit(positive[others], negative[others])
        kept += list(_score(positive[own], line) >= 0)
        refused += list(_score(negative[own], line) < 0)
    because = (
        f"measured on documents that the threshold was not chosen on: {np.mean(kept):.0%} of the answerable questions "
        f"are answered, {np.mean(refused):.0%} are refused when their document is missing"
    )
    return Chosen[list[float]](value=[float(value) for value in _fit(positive, negative)], because=because)


def _fit(positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """Return a line by logistic regression, shifted so that it refuses `_REFUSED` of the negatives."""
    signals = np.concatenate([positive, negative])
    target = np.concatenate([np.ones(len(positive)), np.zeros(len(negative))])
    mean, spread = signals.mean(axis=0), signals.std(axis=0) + 1e-9
    scaled = np.c_[(signals - mean) / spread, np.ones(len(signals))]
    penalty = np.r_[np.full(signals.shape[1], _RIDGE * len(signals)), 1e-6]
    weights = np.zeros(scaled.shape[1])
    for _ in range(50):  # Newton's method
        share = 1 / (1 + np.exp(-scaled @ weights))
        gradient = scaled.T @ (share - target) + penalty * weights
        hessian = (scaled * (share * (1 - share))[:, None]).T @ scaled + np.diag(penalty)
        weights -= np.linalg.solve(hessian, gradient)
    line = np.r_[weights[:-1] / spread, 0.0]
    line[-1] = -np.quantile(_score(negative, line), _REFUSED, method="higher") - 1e-9
    return line


def _score(signals: np.ndarray, line: np.ndarray) -> np.ndarray:
    return np.c_[signals, np.ones(len(signals))] @ line
