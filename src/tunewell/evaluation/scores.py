"""Convert the losses, logits and generated tokens of the base and the tuned model to records of the report."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tunewell.data.corpus.reader import Split
from tunewell.evaluation.behaviour import JudgedAnswer, find_faults
from tunewell.evaluation.intervals import PairedDifference, compare_pair, compare_sums, difference_record
from tunewell.evaluation.measurements import bases_of, cluster_numbers
from tunewell.evaluation.questions import Questions
from tunewell.inference.chat_model import ChatModel
from tunewell.inference.decoder import Generated
from tunewell.inference.runtime import DocumentLosses
from tunewell.records.report import (
    Answer,
    AnsweredQuestion,
    Confusion,
    ConstantAnswer,
    LogitChange,
    LossPair,
    MeasurePair,
)
from tunewell.scoring.base import Score, without_thinking
from tunewell.scoring.matching import is_refusal, match
from tunewell.scoring.style import WORDS


@dataclass
class ModelOutputs:
    """The losses, answers and logits of one model in an evaluation."""

    held_out: DocumentLosses | None = None
    everyday: DocumentLosses | None = None
    answers: list[Generated] = field(default_factory=list[Generated])
    hinted: list[Generated] = field(default_factory=list[Generated])
    """Answers to the same questions with a list of the labels, fields or tools in the prompt; only of a base model."""
    ordinary: list[Generated] = field(default_factory=list[Generated])
    """Answers to the everyday instructions."""
    logits: Any = None


def loss_pair(
    name: str, base: DocumentLosses | None, tuned: DocumentLosses | None, selected: Any = None
) -> LossPair | None:
    """Return the mean losses of both models on all or the selected documents, or None if none were measured."""
    if tuned is None or not len(tuned.documents):
        return None
    tokens = tuned.tokens if selected is None else tuned.tokens[selected]
    before = None if base is None else base.mean(selected)
    return LossPair(name=name, documents=len(tokens), tokens=int(tokens.sum()), base=before, tuned=tuned.mean(selected))


def losses_by_source(split: Split | None, base: DocumentLosses | None, tuned: DocumentLosses | None) -> list[LossPair]:
    """Return the mean losses of each source; empty if there is only one source."""
    if split is None or tuned is None:
        return []
    sources = np.array([split[int(index)].source for index in tuned.documents])
    names = sorted(set(sources.tolist()))
    pairs = (loss_pair(name, base, tuned, sources == name) for name in names)
    return [pair for pair in pairs if pair is not None] if len(names) > 1 else []


def logits_change(base: Any, tuned: Any) -> LogitChange | None:
    """Return the difference between the logits of the two models, or None if the logits of one are missing."""
    if base is None or tuned is None:
        return None
    # One of the two vocabularies may be larger; only shared tokens can be compared.
    base, tuned = base[:, : tuned.shape[-1]], tuned[:, : base.shape[-1]]
    same = int((base.argmax(-1) == tuned.argmax(-1)).sum())
    # Some models give unused tokens a logit of minus infinity. NaN in the base model does not count against the tuned
    # model.
    is_known = np.isfinite(base) & np.isfinite(tuned)
    is_broken = bool(np.isnan(tuned).any()) or not is_known.any()
    largest = math.nan if is_broken else float(np.abs(base[is_known] - tuned[is_known]).max())
    return LogitChange(largest=largest, prompts=len(base), same_first_token=same)


def losses_difference(base: DocumentLosses | None, tuned: DocumentLosses | None) -> PairedDifference | None:
    """Return the held-out loss of the base model minus that of the tuned model, with an interval over documents."""
    if base is None or tuned is None or not len(tuned.documents) or not np.isfinite([*base.sums, *tuned.sums]).all():
        return None
    return compare_sums(base.sums - tuned.sums, tuned.tokens, names=("the tuned model", "the base model"))


def answered_questions(
    questions: Questions, *, model: ChatModel, base: Sequence[Generated], tuned: Sequence[Generated]
) -> list[AnsweredQuestion]:
    """Return each question with the scored answers of both models; `base` may be empty."""
    origins = {index: key.origin for index, key in enumerate(questions.facts)}
    return [
        AnsweredQuestion(
            document=question.document,
            source=questions.places[index][0],
            row=questions.places[index][1],
            question=question.text,
            reference=questions.rows[index].reference,
            key=questions.scorer.expected[index],
            key_origin=origins.get(index, ""),
            is_near=questions.is_near[index],
            is_ambiguous=questions.is_ambiguous[index],
            cluster=questions.clusters[index],
            base=_scored_answer(questions, index, base[index], model) if base else None,
            tuned=_scored_answer(questions, index, tuned[index], model),
        )
        for index, question in enumerate(questions.asked)
    ]


def _scored_answer(questions: Questions, index: int, answer: Generated, model: ChatModel) -> Answer:
    """Return one answer with its score and its faults."""
    text, row = model.decode(answer.ids).strip(), questions.rows[index]
    matched, score = match(without_thinking(text), row.reference), questions.score(index, text)
    control_texts = [model.decode([token]) for token in answer.ids if token in model.tokenizer.control_ids]
    sample = JudgedAnswer(text, answer.ids, answer.ended, row.question, row.reference, control_texts)
    is_refusal_too = score.is_refusal or is_refusal(text, is_answer=True)
    return Answer(
        text=text,
        num_tokens=len(answer.ids),
        ended=answer.ended,
        # An answer equal to its reference is right, and so has no fault.
        faults=[] if matched.exact and score.right else find_faults(sample),
        **vars(matched),
        **vars(replace(score, is_refusal=is_refusal_too)),
    )


def constant_answer(questions: Questions, answered: Sequence[AnsweredQuestion]) -> ConstantAnswer | None:
    """Return the score of always giving the best of the most frequent replies, or None if it is never right."""
    judged = [index for index, one in enumerate(answered) if one.tuned.right is not None]
    scored = [
        (text, [bool(questions.score(index, text).right) for index in judged])
        for text in dict.fromkeys(questions.constants)
    ]
    text, constant = max(scored, key=lambda one: sum(one[1]), default=("", []))
    if not any(constant):
        return None
    numbers = cluster_numbers(answered)
    tuned, clusters = [bool(answered[index].tuned.right) for index in judged], [numbers[index] for index in judged]
    difference = compare_pair(tuned, constant, clusters, names=("the tuned model", "a constant answer"))
    return ConstantAnswer(text=text, right=sum(constant), judged=len(judged), difference=difference_record(difference))


def measure_pairs(questions: Questions, answered: Sequence[AnsweredQuestion]) -> dict[str, MeasurePair]:
    """Return the further figures of the task for both models."""

    tuned, base = (
        questions.scorer.measures([Score(one.right, one.because, one.said, one.fields) for one in answers])
        if answers
        else {}
        for answers in ([one.tuned for one in answered], bases_of(answered))
    )
    found = {name: MeasurePair(base=base.get(name), tuned=value) for name, value in tuned.items()}
    texts = ([one.tuned.text for one in answered], [one.text for one in bases_of(answered)])
    figures = questions.scorer.figures
    tuned, base = (figures([without_thinking(text) for text in part]) for part in texts)
    expected = figures([row.reference for row in questions.rows])
    return found | {
        name: MeasurePair(base=base.get(name), tuned=tuned[name], expected=value, is_share=name != WORDS)
        for name, value in expected.items()
        if name in tuned
    }


def confusions(answered: Sequence[AnsweredQuestion], *, most: int = 12) -> list[Confusion]:
    """Return the labels that the tuned model confuses, most frequent first."""
    wrong = [one for one in answered if one.tuned.right is False and one.key]
    pairs = Counter((one.key, one.tuned.said or "(no label)") for one in wrong)
    return [Confusion(expected=key, said=said, number=number) for (key, said), number in pairs.most_common(most)]
