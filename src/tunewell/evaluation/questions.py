"""The held-out questions of an evaluation: task, scorer, clusters, and near copies in the training rows."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tunewell.config.extensions import SCORERS, TaskEntry
from tunewell.config.rules import VerdictRules
from tunewell.core.errors import UserError
from tunewell.core.text import fold, split_words
from tunewell.core.units import count, percent
from tunewell.data.corpus.reader import Corpus
from tunewell.evaluation.clusters import find_clusters
from tunewell.evaluation.rows import EvaluationSet
from tunewell.inference.chat_model import ChatModel
from tunewell.records.plan import Chosen
from tunewell.records.report import JudgeRecord, KeyExample
from tunewell.scoring.answer_keys import AnswerKey
from tunewell.scoring.base import ReferenceRow, Score, Scorer, most_frequent, score_answer
from tunewell.scoring.choice import Choice
from tunewell.scoring.facts import Facts
from tunewell.scoring.questions import Question, TokenReader
from tunewell.scoring.tasks import find_task, is_chat_export, make_scorer

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
    constants: Sequence[str] = ()
    """The most frequent replies of the training rows and of these rows."""
    is_near: list[bool] = field(default_factory=list[bool])
    is_ambiguous: list[bool] = field(default_factory=list[bool])
    notes: list[str] = field(default_factory=list[str])
    num_copied: int = 0
    """Number of questions that were left out, because they are training rows in another spelling."""

    @property
    def entry(self) -> TaskEntry:
        """The entry of the task; a function of the user has one of its own."""
        if ":" in self.task.value:
            because = "your function decides what is right"
            return TaskEntry(self.task.value, because, "", "answers", 0.5, because)
        return SCORERS.entry(self.task.value)

    @property
    def keys(self) -> list[AnswerKey]:
        """The answer key of each question; without parts if the task has no keys."""
        because = f"scored as {self.task.value}"
        return self.facts or [
            AnswerKey((), "whole reference", because, row.question, row.reference) for row in self.rows
        ]

    @property
    def facts(self) -> list[AnswerKey]:
        """The answer key of each question on a fact; empty in another task."""
        return self.scorer.keys if isinstance(self.scorer, Facts) else []

    def score(self, index: int, answer: str) -> Score:
        """Score an answer to one question."""
        return score_answer(self.scorer, index, answer, self.rows[index])

    def judge_record(self) -> JudgeRecord:
        """Return how answers are judged, with the keys of some questions."""
        judged = [index for index, text in enumerate(self.scorer.expected) if text]
        shown = [judged[place] for place in sorted({0, len(judged) // 2, len(judged) - 1})] if judged else []
        becauses = {index: key.because for index, key in enumerate(self.facts)}
        examples = [
            (self.rows[index].question, self.scorer.expected[index], becauses.get(index, "")) for index in shown
        ]
        return JudgeRecord(
            name=self.task.value,
            origins=dict(Counter(key.origin for key in self.facts if key.is_judged).most_common()),
            clusters=len({self.clusters[index] for index in judged}),
            examples=[KeyExample(question=one, key=key, because=because) for one, key, because in examples],
        )


def find_questions(asked: Sequence[Question], rows: EvaluationSet, model: ChatModel) -> Questions:
    """Return the questions with the task of the training rows, or the one that `verdict.task` names."""
    assert rows.split is not None
    question_in = model.masker.template.question_in if model.masker is not None else str.strip
    read = TokenReader(model.decode, question_in, model.stop_ids)
    known, without = read.rows(rows.training, _MAX_TRAINING) if rows.training is not None else ([], 0)
    num_asked = len(asked)
    asked, notes = _without_copies(asked, rows, known, read)
    documents = [rows.split[question.document] for question in asked]
    places = [(document.source, document.row) for document in documents]
    references = [read.row(question.text, question.reference_ids) for question in asked]
    sources = rows.training.manifest.sources if isinstance(rows.training, Corpus) else []
    formats = {name for source in sources for name in source.formats}
    num_rows = len(rows.training or ()) * len(known) / max(1, len(known) + without)
    found = judge_by_task(
        _with_answers(references, places, rows.corpus),
        known,
        model.ref.loaded.config.verdict,
        base=model.ref.loaded.base,
        num_documents=without,
        num_rows=round(num_rows),
        is_chat=is_chat_export(formats),
    )
    found.asked, found.places, found.notes = [*asked], places, [*notes, *found.notes]
    found.num_copied = num_asked - len(asked)
    pairs = rows.corpus.near_pairs() if rows.corpus is not None else []
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
    num_rows: int | None = None,
    is_chat: bool = False,
) -> Questions:
    """Return questions with their task and scorer.

    `num_documents` of the training rows have no question; `num_rows` have one, if `training` is a sample of them.
    """
    given = sum(bool(row.answers) for row in rows)
    if rules.task != "auto":
        task = Chosen(value=rules.task, because="set by `verdict.task`")
    elif given and given >= len(rows) / 2:
        task = Chosen(value="facts", because=f"{count(given, 'row')} with accepted answers")
    else:
        sample = training if training or num_documents else rows
        task = find_task(sample, num_documents=num_documents, num_rows=num_rows, is_chat=is_chat)
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
    found.clusters = _clusters(rows, find_clusters(found.facts) if found.facts else range(len(rows)))
    options = found.scorer.options if isinstance(found.scorer, Choice) else ()
    found.constants = options or [text for part in (training, rows) if (text := most_frequent(part))]
    _mark_near_and_ambiguous(found, training)
    return found


def _with_answers(rows: list[ReferenceRow], places: list[tuple[str, int]], corpus: Corpus | None) -> list[ReferenceRow]:
    """Return the rows with the accepted answers that the corpus has for them."""
    accepted = {(row.source, row.row): row for row in corpus.answer_rows()} if corpus is not None else {}
    found = []
    for row, place in zip(rows, places, strict=True):
        if (given := accepted.get(place)) is not None:
            origin = "value" if given.column == "value" else "answers"
            row = replace(row, answers=tuple(given.answers), origin=origin)
        found.append(row)
    return found


def _clusters(rows: Sequence[ReferenceRow], facts: Sequence[int]) -> list[int]:
    """Return the cluster of each row: those on one fact, or numbered copies of one question with one reference."""
    forms = [_form(row.question) for row in rows]
    replies = defaultdict[tuple[str, ...], set[str]](set)
    for form, row in zip(forms, rows, strict=True):
        replies[form].add(fold(row.reference).strip(" .!"))
    # If questions of one form have different references, their numbers matter.
    copies = [form if form and len(replies[form]) == 1 else (str(index),) for index, form in enumerate(forms)]
    groups = dict.fromkeys([("fact", fact) for fact in facts])
    numbers = {name: index for index, name in enumerate(groups)}
    found = [numbers["fact", fact] for fact in facts]
    while True:
        least: dict[tuple[str, ...], int] = {}
        for copy, number in zip(copies, found, strict=True):
            least[copy] = min(number, least.get(copy, number))
        merged = {number: least[copy] for copy, number in zip(copies, found, strict=True) if least[copy] < number}
        if not merged:
            return found
        found = [merged.get(number, number) for number in found]


def _form(question: str) -> tuple[str, ...]:
    """Return the words of a question with at most one number, without it; nothing for another question."""
    words = split_words(question)
    plain = tuple(word for word in words if not word.isdigit())
    return plain if len(words) - len(plain) == 1 else ()


def _without_copies(
    asked: Sequence[Question], rows: EvaluationSet, training: Sequence[ReferenceRow], read: TokenReader
) -> tuple[list[Question], list[str]]:
    """Return the questions that are no training rows apart from case, spaces and final punctuation, with a note."""

    def text(row: ReferenceRow) -> str:
        parts = (" ".join(fold(part).split()).strip(" .,:;!?…\"'") for part in (row.question, row.reference))
        return "\n".join(parts)

    known = set(map(text, training))
    kept = [one for one in asked if text(read.row(one.text, one.reference_ids)) not in known]
    if len(kept) == len(asked):
        return kept, []
    what = f"{count(len(asked) - len(kept))} of {count(len(asked), 'question')} are training rows"
    if kept:
        return kept, [f"{what} apart from case and punctuation and were left out: they measure memorisation"]
    if rows.test_file:
        fix = "test on rows that were not used for training, or run `tunewell validate` without `--data`"
        raise UserError(f"{what} of this model, apart from case and punctuation", where=rows.name, fix=fix)
    return [*asked], [f"{what} apart from case and punctuation, so they only measure memorisation"]


def _mark_near_and_ambiguous(found: Questions, training: Sequence[ReferenceRow]) -> None:
    """Mark the questions that training rows ask nearly alike, and those that have several references."""
    known, asked = ([tuple(split_words(row.question)) for row in rows] for rows in (training, found.rows))
    references: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    for words, row in zip([*known, *asked], [*training, *found.rows], strict=True):
        references[words].add(fold(row.reference).strip(" .!"))
    in_training = set(known) - {()}
    found.is_near = [words in in_training for words in asked]
    found.is_ambiguous = [bool(words) and len(references[words]) > 1 for words in asked]
