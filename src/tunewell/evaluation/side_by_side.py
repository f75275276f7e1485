"""What was measured of two models, as the report shows it: side by side, question by question."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tunewell.data.corpus.reader import Split
from tunewell.evaluation.behaviour import Sample, find_faults
from tunewell.evaluation.matching import is_short_reference, match
from tunewell.inference.chat_model import ChatModel
from tunewell.inference.generate import Generated
from tunewell.inference.runtime import DocumentLosses
from tunewell.records.report import Answer, AnsweredQuestion, LogitChange, LossPair
from tunewell.training.held_out import Question


@dataclass
class ModelMeasurements:
    """What was measured of one model."""

    held_out: DocumentLosses | None = None
    everyday: DocumentLosses | None = None
    answers: list[Generated] = field(default_factory=list)
    logits: Any = None


def loss_pair(
    name: str, base: DocumentLosses | None, tuned: DocumentLosses | None, chosen: Any = None
) -> LossPair | None:
    """Give the mean losses of both on the chosen documents; None where nothing was measured."""
    if tuned is None or not len(tuned.documents):
        return None
    number = len(tuned.documents) if chosen is None else int(chosen.sum())
    tokens = int(tuned.tokens.sum() if chosen is None else tuned.tokens[chosen].sum())
    before = None if base is None else base.mean(chosen)
    return LossPair(name=name, documents=number, tokens=tokens, base=before, tuned=tuned.mean(chosen))


def losses_by_source(split: Split | None, base: DocumentLosses | None, tuned: DocumentLosses | None) -> list[LossPair]:
    """Give the mean losses by source, where there is more than one."""
    if split is None or tuned is None:
        return []
    names = np.array([split[int(index)].source for index in tuned.documents])
    if len(set(names.tolist())) < 2:
        return []
    return [
        pair
        for name in sorted(set(names.tolist()))
        if (pair := loss_pair(name, base, tuned, names == name)) is not None
    ]


def logits_change(base: Any, tuned: Any) -> LogitChange | None:
    """Say how far the tuned model's logits are from its base's; None where one of them is not there."""
    if base is None or tuned is None:
        return None
    # Of tokens that only one of the two knows nothing can be compared.
    both = min(base.shape[-1], tuned.shape[-1])
    base, tuned = base[:, :both], tuned[:, :both]
    same = int((base.argmax(-1) == tuned.argmax(-1)).sum())
    # Some models give words they never say a logit of minus infinity; a base that is broken says nothing of the tuned.
    known = np.isfinite(base) & np.isfinite(tuned)
    is_broken = bool(np.isnan(tuned).any()) or not known.any()
    largest = math.nan if is_broken else float(np.abs(base[known] - tuned[known]).max())
    return LogitChange(largest=largest, prompts=len(base), same_first_token=same)


def answered_questions(
    questions: Sequence[Question],
    split: Split | None,
    *,
    voice: ChatModel,
    base: ModelMeasurements,
    tuned: ModelMeasurements,
) -> list[AnsweredQuestion]:
    """Give each question with what both said, judged by the reference."""
    found = []
    for place, question in enumerate(questions):
        assert split is not None
        document = split[question.document]
        reference = _words(voice, question.reference_ids)
        found.append(
            AnsweredQuestion(
                document=question.document,
                source=document.source,
                row=document.row,
                question=question.text,
                reference=reference,
                base=_said(voice, base.answers[place], question, reference) if base.answers else None,
                tuned=_said(voice, tuned.answers[place], question, reference),
            )
        )
    return found


def _words(voice: ChatModel, ids: list[int]) -> str:
    """Spell an answer without what ends it."""
    end = next((at for at, token in enumerate(ids) if token in voice.stop_ids), len(ids))
    return voice.decode(ids[:end]).strip()


def _said(voice: ChatModel, answer: Generated, question: Question, reference: str) -> Answer:
    text = voice.decode(answer.ids).strip()
    found = match(text, reference)
    control = [voice.decode([token]) for token in answer.ids if token in voice.tokenizer.control_ids]
    faults = find_faults(
        Sample(
            text=text,
            ids=answer.ids,
            ended=answer.ended,
            question=question.text,
            reference=reference,
            control_texts=control,
        )
    )
    return Answer(
        text=text,
        num_tokens=len(answer.ids),
        ended=answer.ended,
        exact=found.exact,
        contains=found.contains,
        f1=found.f1,
        right=found.right if is_short_reference(reference) else None,
        faults=faults,
    )
