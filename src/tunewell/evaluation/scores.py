"""Convert the losses, logits and generated tokens of the base and the tuned model to records of the report."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tunewell.data.corpus.reader import Split
from tunewell.evaluation.behaviour import Sample, find_faults
from tunewell.evaluation.matching import is_short_reference, match
from tunewell.inference.chat_model import ChatModel
from tunewell.inference.decoder import Generated
from tunewell.inference.runtime import DocumentLosses
from tunewell.records.report import Answer, AnsweredQuestion, LogitChange, LossPair
from tunewell.training.evaluate import Question


@dataclass
class ModelOutputs:
    """The losses, answers and logits of one model in an evaluation."""

    held_out: DocumentLosses | None = None
    everyday: DocumentLosses | None = None
    answers: list[Generated] = field(default_factory=list)
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


def answered_questions(
    questions: Sequence[Question], split: Split | None, *, model: ChatModel, base: ModelOutputs, tuned: ModelOutputs
) -> list[AnsweredQuestion]:
    """Return each question with the scored answers of both models."""
    found = []
    for index, question in enumerate(questions):
        assert split is not None
        document = split[question.document]
        reference = _decode_reply(model, question.reference_ids)
        found.append(
            AnsweredQuestion(
                document=question.document,
                source=document.source,
                row=document.row,
                question=question.text,
                reference=reference,
                base=_score(model, base.answers[index], question, reference) if base.answers else None,
                tuned=_score(model, tuned.answers[index], question, reference),
            )
        )
    return found


def _decode_reply(model: ChatModel, ids: list[int]) -> str:
    """Decode a reply without its stop token."""
    end = next((index for index, token in enumerate(ids) if token in model.stop_ids), len(ids))
    return model.decode(ids[:end]).strip()


def _score(model: ChatModel, answer: Generated, question: Question, reference: str) -> Answer:
    text = model.decode(answer.ids).strip()
    matched = match(text, reference)
    control_texts = [model.decode([token]) for token in answer.ids if token in model.tokenizer.control_ids]
    sample = Sample(
        text=text,
        ids=answer.ids,
        ended=answer.ended,
        question=question.text,
        reference=reference,
        control_texts=control_texts,
    )
    return Answer(
        text=text,
        num_tokens=len(answer.ids),
        ended=answer.ended,
        exact=matched.exact,
        contains=matched.contains,
        f1=matched.f1,
        right=matched.contains if is_short_reference(reference) else None,
        faults=find_faults(sample),
    )
