"""The held-out questions of an evaluation: task, scorer, clusters, and near copies in the training rows."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tunewell.config.extensions import SCORERS, TaskEntry
from tunewell.config.rules import VerdictRules
from tunewell.core.text import fold, split_words
from tunewell.core.units import count, percent
from tunewell.data.batches import spread_evenly
from tunewell.data.corpus.reader import Corpus, Split
from tunewell.evaluation.clusters import find_clusters
from tunewell.inference.chat_model import ChatModel
from tunewell.records.manifest import AnswerRow
from tunewell.records.plan import Chosen
from tunewell.records.report import JudgeRecord, KeyExample
from tunewell.scoring.answer_keys import AnswerKey
from tunewell.scoring.base import ReferenceRow, Score, Scorer, most_frequent, score_answer
from tunewell.scoring.choice import Choice
from tunewell.scoring.facts import Facts
from tunewell.scoring.tasks import find_task, is_chat_export, make_scorer
from tunewell.training.evaluate import Question, prompt_and_reply

_MAX_TRAINING = 20_000
"""Maximum number of training rows that are read for the task and the labels, evenly spread."""
_MIN_JUDGED = 0.5
"""Share of the questions that a scorer must be able to judge; otherwise the rows are scored as text."""


@dataclass
class Questions:
    """The questions with their references, and the scorer that decides which answers are right."""

    asked: list[Question]
    rows: list[ReferenceRow]
    places: list[tuple[str, int]]
    """The source and the row of each question."""
    task: Chosen[str]
    scorer: Scorer
    clusters: list[int]
    constant: str = ""
    """The most frequent reply of the training rows."""
    is_near: list[bool] = field(default_factory=list[bool])
    is_ambiguous: list[bool] = field(default_factory=list[bool])
    notes: list[str] = field(default_factory=list[str])

    @property
    def entry(self) -> TaskEntry:
        """The entry of the task; a function of the user has one of its own."""
        if ":" in self.task.value:
            because = "your function decides what is right"
            return TaskEntry(self.task.value, because, "", "answers", 0.5, because)
        return SCORERS.entry(self.task.value)

    @property
    def keys(self) -> list[AnswerKey]:
        """The answer key of each question; an empty key if the task has no keys."""
        if isinstance(self.scorer, Facts):
            return self.scorer.keys
        because = f"scored as {self.task.value}"
        return [AnswerKey((), "whole reference", because, row.question, row.reference) for row in self.rows]

    def score(self, index: int, answer: str) -> Score:
        """Score an answer to one question."""
        return score_answer(self.scorer, index, answer, self.rows[index])

    def judge_record(self) -> JudgeRecord:
        """Return how answers are judged, with the keys of some questions."""
        judged = [index for index, text in enumerate(self.scorer.expected) if text]
        shown = [judged[place] for place in sorted({0, len(judged) // 2, len(judged) - 1})] if judged else []
        keys = self.scorer.keys if isinstance(self.scorer, Facts) else []
        return JudgeRecord(
            name=self.task.value,
            origins=dict(Counter(key.origin for key in keys if key.is_judged).most_common()),
            clusters=len({self.clusters[index] for index in judged}),
            examples=[
                KeyExample(
                    question=self.rows[index].question,
                    key=self.scorer.expected[index],
                    because=keys[index].because if keys else "",
                )
                for index in shown
            ],
        )


def find_questions(
    asked: Sequence[Question],
    split: Split,
    *,
    corpus: Corpus | None,
    training: Split | None,
    model: ChatModel,
    rules: VerdictRules,
    base: Path | None = None,
) -> Questions:
    """Return the questions with the task of the training rows, or the one that `verdict.task` names.

    `corpus` has the accepted answers of the rows; `training` are the rows that the model was trained on, if known.
    """
    documents = [split[question.document] for question in asked]
    places = [(document.source, document.row) for document in documents]
    rows = _with_answers([_row(question.text, question.reference_ids, model) for question in asked], places, corpus)
    known, without = _training_rows(training, model) if training is not None else ([], 0)
    sources = training.manifest.sources if isinstance(training, Corpus) else []
    formats = {name for source in sources for name in source.formats}
    found = judge_by_task(
        rows,
        known,
        rules,
        base=base,
        num_documents=without,
        num_training=len(training) if training is not None else 0,
        is_chat=is_chat_export(formats),
    )
    found.asked, found.places = [*asked], places
    pairs = corpus.near_pairs() if corpus is not None else []
    near = {(pair.similar_source, pair.similar_row) for pair in pairs if pair.kind == "near_held_out"}
    found.is_near = [is_near or place in near for is_near, place in zip(found.is_near, places, strict=True)]
    return found


def judge_by_task(
    rows: list[ReferenceRow],
    training: list[ReferenceRow],
    rules: VerdictRules,
    *,
    base: Path | None = None,
    num_documents: int = 0,
    num_training: int = 0,
    is_chat: bool = False,
) -> Questions:
    """Return questions with their task and scorer. `num_documents` of the training rows have no question."""
    if rules.task != "auto":
        task = Chosen(value=rules.task, because="set by `verdict.task`")
    elif (given := sum(bool(row.answers) for row in rows)) and given >= len(rows) / 2:
        task = Chosen(value="facts", because=f"{count(given, 'row')} with accepted answers")
    elif training or num_documents:
        share = len(training) / (len(training) + num_documents)
        num_rows = round((num_training or len(training)) * share)
        task = find_task(training, num_documents=num_documents, num_rows=num_rows, is_chat=is_chat)
    else:
        task = find_task(rows, is_chat=is_chat)
    found = Questions([], rows, [], task, make_scorer(task.value, rows, training, base=base), [])
    entry, judged = found.entry, sum(map(bool, found.scorer.expected))
    if entry.min_right is not None and judged < _MIN_JUDGED * len(rows):
        because = f"only {count(judged)} of {count(len(rows), 'reference')} can be scored as {entry.name}"
        found.task, found.scorer = Chosen(value="text", because=because), make_scorer("text", rows, training)
    elif entry.min_right is not None and judged < len(rows):
        found.notes.append(
            f"{count(len(rows) - judged)} of {count(len(rows), 'reference')} ({percent(1 - judged / len(rows), 0)}) "
            f"are not in the form of the task `{entry.name}`; answers to them are not judged"
        )
    facts = find_clusters(found.scorer.keys) if isinstance(found.scorer, Facts) else list(range(len(rows)))
    found.clusters = _joined(facts, _same_questions(rows))
    found.constant = found.scorer.options[0] if isinstance(found.scorer, Choice) else most_frequent(training or rows)
    _mark_near_and_ambiguous(found, training)
    return found


def _training_rows(split: Split, model: ChatModel) -> tuple[list[ReferenceRow], int]:
    """Return training rows with a question, evenly spread, and the number of rows without one among them."""
    template = model.masker.template if model.masker is not None else None
    found, without = list[ReferenceRow](), 0
    for document in spread_evenly(len(split), _MAX_TRAINING).tolist():
        parts = prompt_and_reply(split, document)
        if parts is None or template is None:
            without += 1
            continue
        labels = split.arrays(document)[1]
        is_reply = np.asarray(labels) != -100
        num_replies = int(np.count_nonzero(is_reply[1:] & ~is_reply[:-1])) + int(is_reply[0])
        question = template.question_in(model.decode(parts[0]))
        found.append(_row(question, parts[1], model, num_replies=num_replies))
    return found, without


def _row(question: str, reference_ids: list[int], model: ChatModel, **more: Any) -> ReferenceRow:
    """Return a row; its reference has no stop token."""
    end = next((index for index, token in enumerate(reference_ids) if token in model.stop_ids), len(reference_ids))
    return ReferenceRow(question, model.decode(reference_ids[:end]).strip(), **more)


def _with_answers(rows: list[ReferenceRow], places: list[tuple[str, int]], corpus: Corpus | None) -> list[ReferenceRow]:
    """Return the rows with the accepted answers that the corpus has for them."""
    wanted, accepted = set(places), dict[tuple[str, int], AnswerRow]()
    for row in corpus.answer_rows() if corpus is not None else ():
        if (row.source, row.row) in wanted:
            accepted[row.source, row.row] = row
    found = []
    for row, place in zip(rows, places, strict=True):
        given = accepted.get(place)
        origin = "value" if given is not None and given.column == "value" else "answers"
        answers = tuple(given.answers) if given is not None else ()
        found.append(ReferenceRow(row.question, row.reference, answers, origin))
    return found


def _same_questions(rows: Sequence[ReferenceRow]) -> list[int]:
    """Return the cluster of each row: rows whose question and reference differ in numbers only are one observation."""
    numbers: dict[tuple[str, ...], int] = {}

    def words(text: str) -> tuple[str, ...]:
        return tuple(word for word in split_words(text) if not word.isdigit())

    return [numbers.setdefault((*words(row.question), "", *split_words(row.reference)), len(numbers)) for row in rows]


def _joined(first: list[int], second: list[int]) -> list[int]:
    """Return clusters that connect what either of two clusterings connects."""
    names: dict[int, int] = {}
    for one, other in zip(first, second, strict=True):
        names.setdefault(other, one)
    return [names[other] for other in second]


def _mark_near_and_ambiguous(found: Questions, training: Sequence[ReferenceRow]) -> None:
    """Mark the questions that also occur in training rows, and those with several references."""
    references: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    asked_in_training = set[tuple[str, ...]]()
    for row in training:
        asked_in_training.add(words := tuple(split_words(row.question)))
        references[words].add(fold(row.reference).strip(" .!"))
    for row in found.rows:
        references[tuple(split_words(row.question))].add(fold(row.reference).strip(" .!"))
    for row in found.rows:
        words = tuple(split_words(row.question))
        found.is_near.append(bool(words) and words in asked_in_training)
        found.is_ambiguous.append(bool(words) and len(references[words]) > 1)
