"""Ask a model the questions of a test, with or without passages, and judge the answers, for a column of `compare`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.progress import ProgressListener, silent, with_stage
from tunewell.core.units import count, listed
from tunewell.data.reading_prompt import CITATION, NOT_FOUND, fit, is_refusal, question_in, reading_prompt
from tunewell.evaluation.comparison import Column, ColumnAnswer
from tunewell.evaluation.passages import SearchedQuestions, Shown
from tunewell.evaluation.questions import Questions, find_questions
from tunewell.evaluation.rows import EvaluationSet
from tunewell.inference.batch import Answerer, Message, Replies
from tunewell.inference.chat_model import ChatModel
from tunewell.inference.model_ref import ModelRef
from tunewell.scoring.answer_keys import AnswerKey
from tunewell.scoring.base import Score
from tunewell.scoring.matching import match
from tunewell.scoring.questions import answer_length, questions_of

_MIN_ANSWER_TOKENS = 64


@dataclass(frozen=True)
class Exam:
    """The questions of a test with their answer keys."""

    questions: Questions
    prompts: list[list[int]] = field(default_factory=list[list[int]])
    """The prompts of the questions in the tokens of one model, with its system prompt; empty if there are none."""
    longest_reference: int = 0
    """Tokens of the longest reference."""
    ref: ModelRef | None = None
    """The model in whose tokens the prompts are."""
    rows: str = ""
    """The rows from which the questions are."""

    @property
    def keys(self) -> list[AnswerKey]:
        """The question, the reference and, for facts, the key of each question."""
        return self.questions.keys

    @property
    def answer_tokens(self) -> int:
        """Maximum number of tokens of an answer: enough for the references, and for an answer that says more."""
        return answer_length(self.longest_reference, least=_MIN_ANSWER_TOKENS)


def read_exam(model: ChatModel, rows: EvaluationSet, *, number: int, needs_keys: bool = True) -> Exam:
    """Return at most `number` questions of an evaluation set; raise UserError if no answer could be judged by a key."""
    masker = model.masker
    if masker is None or rows.split is None:
        raise UserError("there are no questions with answers to compare on", fix="add `--data rows.jsonl`")
    found = questions_of(rows.split, number=number, spell=model.decode, question_in=masker.template.question_in)
    # Rows of open-book training have passages, and some have a refusal as reply because the passage was left out.
    if is_open_book := any(question_in(one.text) != one.text for one in found):
        found = [replace(one, text=question_in(one.text)) for one in found if not is_refusal(one.reference)]
    questions = find_questions(found, rows, model)
    if needs_keys and not any(questions.scorer.expected):
        raise UserError(
            f"none of the {count(len(found), 'answer')} in the rows can be compared: they are empty or too long",
            where=rows.name,
            fix="add a column `answers` with what a right answer must contain, or compare runs without `--index`",
        )
    longest = max(len(question.reference_ids) for question in found)
    prompts = [] if is_open_book else [question.ids for question in found]
    files = [source.name for source in rows.corpus.manifest.sources] if rows.corpus is not None else []
    name = rows.test_file or f"held-out rows of {listed(files, 2, noun='file') or rows.name}"
    return Exam(questions, prompts, longest, model.ref, name)


def measure_alone(
    name: str, model: Answerer, exam: Exam, *, is_own: bool, progress: ProgressListener = silent, **more: Any
) -> Column:
    """Return a column of answers without passages. `is_own`: the exam's prompts are in the tokens of this model."""
    messages: list[Message] = [*exam.prompts] if is_own and exam.prompts else [key.question for key in exam.keys]
    replies = model.answer(messages, with_stage(progress, f"{name}: answering"))
    scores = [exam.questions.score(index, text) for index, text in enumerate(replies.texts)]
    return _column(name, exam, replies, zip(replies.texts, scores, strict=True), **more)


def measure_with_passages(
    name: str,
    model: Answerer,
    exam: Exam,
    searched: SearchedQuestions,
    *,
    progress: ProgressListener = silent,
    **more: Any,
) -> Column:
    """Return a column of answers with the passages found. Ask again without those that contain the answers."""
    texts, num_shown, replies = _ask(model, exam.keys, searched.found, with_stage(progress, f"{name}: answering"))
    scores = [_judged(text, exam, index) for index, text in enumerate(texts)]
    has_passage = [
        None if shown.right is None else any(shown.right[:number])
        for shown, number in zip(searched.found, num_shown, strict=True)
    ]
    invented = None
    if removed := {index: shown for index, shown in enumerate(searched.removed) if shown is not None}:
        keys, listener = [exam.keys[index] for index in removed], f"{name}: answering, passages removed"
        again, _, _ = _ask(model, keys, list(removed.values()), with_stage(progress, listener))
        others = [_judged(text, exam, index) for text, index in zip(again, removed, strict=True)]
        invented = (sum(not found.is_refusal and not found.right for found in others), len(removed))
    scored = zip(texts, scores, has_passage, strict=True)
    return _column(name, exam, replies, scored, seconds=searched.seconds, invented=invented, **more)


def _ask(
    model: Answerer, keys: Sequence[AnswerKey], shown: Sequence[Shown], progress: ProgressListener
) -> tuple[list[str], list[int], Replies]:
    """Return the answers and how many passages the model read. A question that the search refuses is not asked."""
    fitting = [
        [] if one.is_refused or not one.passages else fit(key.question, one.passages, model.fits)
        for key, one in zip(keys, shown, strict=True)
    ]
    messages = [reading_prompt(key.question, part) for key, part in zip(keys, fitting, strict=True) if part]
    replies = model.answer(messages, progress) if messages else Replies([], [], [], 0.0)
    texts = iter(replies.texts)
    return [next(texts) if part else NOT_FOUND for part in fitting], [len(part) for part in fitting], replies


def _judged(text: str, exam: Exam, index: int) -> Score:
    found = exam.questions.score(index, CITATION.sub("", text))
    if is_refusal(text) and not exam.keys[index].is_refusal:
        return Score(None if found.right is None else False, "refuses", is_refusal=True)
    return found


def _column(
    name: str, exam: Exam, replies: Replies, scored: Iterable[tuple[Any, ...]], *, seconds: float = 0.0, **more: Any
) -> Column:
    """Return a column. `scored` are texts, their scores and, with an index, whether the model read the answer."""
    asked = [(key.question, key.reference) for key in exam.keys]
    answers = [
        ColumnAnswer(text, score.right, match(text, reference).f1, score.is_refusal, *has_passage)
        for (_, reference), (text, score, *has_passage) in zip(asked, scored, strict=True)
    ]
    resources = {
        "seconds per answer": (seconds + replies.seconds) / max(1, len(asked)),
        "tokens per answer": _mean(replies.num_tokens),
        "tokens per prompt": _mean(replies.num_prompt_tokens),
        **more.pop("resources", {}),
    }
    return Column(
        name,
        answers=dict(zip(asked, answers, strict=True)),
        questions={key: key for key in asked},
        clusters=dict(zip(asked, exam.questions.clusters, strict=True)),
        resources=resources,
        **more,
    )


def _mean(numbers: Sequence[int]) -> float | None:
    return fmean(numbers) if numbers else None
