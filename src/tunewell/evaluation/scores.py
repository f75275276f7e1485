"""Convert the losses, logits and generated tokens of the base and the tuned model to records of the report."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tunewell.data.corpus.reader import Split
from tunewell.evaluation.behaviour import JudgedAnswer, find_faults
from tunewell.evaluation.intervals import PairedDifference, compare_pair, compare_sums, difference_record
from tunewell.evaluation.measurements import cluster_numbers
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
from tunewell.scoring.facts import Facts
from tunewell.scoring.matching import is_refusal, match


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
    num_documents = len(tuned.documents) if selected is None else int(selected.sum())
    num_tokens = int(tuned.tokens.sum() if selected is None else tuned.tokens[selected].sum())
    before = None if base is None else base.mean(selected)
    return LossPair(name=name, documents=num_documents, tokens=num_tokens, base=before, tuned=tuned.mean(selected))


def losses_by_source(split: Split | None, base: DocumentLosses | None, tuned: DocumentLosses | None) -> list[LossPair]:
    """Return the mean losses of each source; empty if there is only one source."""
    if split is None or tuned is None:
        return []
    sources = np.array([split[int(index)].source for index in tuned.documents])
    names = sorted(set(sources.tolist()))
    pairs = [loss_pair(name, base, tuned, sources == name) for name in names] if len(names) > 1 else []
    return [pair for pair in pairs if pair is not None]


def logits_change(base: Any, tuned: Any) -> LogitChange | None:
    """Return the difference between the logits of the two models, or None if the logits of one are missing."""
    if base is None or tuned is None:
        return None
    # One of the two vocabularies may be larger; only shared tokens can be compared.
    num_shared = min(base.shape[-1], tuned.shape[-1])
    base, tuned = base[:, :num_shared], tuned[:, :num_shared]
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
    keys = questions.scorer.keys if isinstance(questions.scorer, Facts) else []
    found = []
    for index, question in enumerate(questions.asked):
        source, row = questions.places[index]
        found.append(
            AnsweredQuestion(
                document=question.document,
                source=source,
                row=row,
                question=question.text,
                reference=questions.rows[index].reference,
                key=questions.scorer.expected[index],
                key_origin=keys[index].origin if keys else "",
                is_near=questions.is_near[index],
                is_ambiguous=questions.is_ambiguous[index],
                cluster=questions.clusters[index],
                base=scored_answer(questions, index, base[index], model) if base else None,
                tuned=scored_answer(questions, index, tuned[index], model),
            )
        )
    return found


def scored_answer(questions: Questions, index: int, answer: Generated, model: ChatModel) -> Answer:
    """Return one answer with its score and its faults."""
    text, reference = model.decode(answer.ids).strip(), questions.rows[index].reference
    matched, score = match(without_thinking(text), reference), questions.score(index, text)
    sample = JudgedAnswer(
        text=text,
        ids=answer.ids,
        ended=answer.ended,
        question=questions.rows[index].question,
        reference=reference,
        control_texts=[model.decode([token]) for token in answer.ids if token in model.tokenizer.control_ids],
    )
    return Answer(
        text=text,
        num_tokens=len(answer.ids),
        ended=answer.ended,
        exact=matched.exact,
        contains=matched.contains,
        f1=matched.f1,
        right=score.right,
        is_refusal=score.is_refusal or is_refusal(text, is_answer=True),
        said=score.said,
        because=score.because,
        fields=dict(score.fields),
        # A right answer that equals its reference has no fault.
        faults=[] if matched.exact and score.right else find_faults(sample),
    )


def constant_answer(questions: Questions, answered: Sequence[AnsweredQuestion]) -> ConstantAnswer | None:
    """Return the score of always giving the most frequent reply of the training rows, or None if it is never right."""
    if not questions.constant:
        return None
    scores = [questions.score(index, questions.constant).right for index in range(len(questions.rows))]
    pairs = [
        (bool(each.tuned.right), bool(right), cluster)
        for each, right, cluster in zip(answered, scores, cluster_numbers(answered), strict=True)
        if right is not None and each.tuned.right is not None
    ]
    if not any(right for _, right, _ in pairs):
        return None
    tuned, constant, clusters = zip(*pairs, strict=True)
    difference = compare_pair(tuned, constant, clusters, names=("the tuned model", "a constant answer"))
    return ConstantAnswer(
        text=questions.constant, right=sum(constant), judged=len(pairs), difference=difference_record(difference)
    )


def measure_pairs(questions: Questions, answered: Sequence[AnsweredQuestion]) -> dict[str, MeasurePair]:
    """Return the further figures of the task for both models."""

    def figures(answers: Sequence[Answer | None]) -> dict[str, float]:
        scores = [
            Score(one.right, one.because, one.said, one.fields) if one is not None else Score(None) for one in answers
        ]
        return questions.scorer.measures(scores) if all(answers) and answers else {}

    tuned, base = figures([one.tuned for one in answered]), figures([one.base for one in answered])
    return {name: MeasurePair(base=base.get(name), tuned=value) for name, value in tuned.items()}


def confusions(answered: Sequence[AnsweredQuestion], *, most: int = 12) -> list[Confusion]:
    """Return the labels that the tuned model confuses, most frequent first."""
    pairs = Counter(
        (one.key, one.tuned.said or "(no label)") for one in answered if one.tuned.right is False and one.key
    )
    return [Confusion(expected=pair[0], said=pair[1], number=number) for pair, number in pairs.most_common(most)]
