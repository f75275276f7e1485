"""Convert the losses, logits and generated tokens of the base and the tuned model to records of the report."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tunewell.data.batches import spread_evenly
from tunewell.data.corpus.reader import Corpus, Split
from tunewell.evaluation.answer_keys import AnswerKey, ReferenceRow, answer_keys
from tunewell.evaluation.behaviour import JudgedAnswer, find_faults
from tunewell.evaluation.clusters import find_clusters
from tunewell.evaluation.intervals import compare_pair, difference_record
from tunewell.evaluation.judge import JUDGE, judge
from tunewell.evaluation.matching import match
from tunewell.evaluation.measurements import cluster_numbers
from tunewell.inference.chat_model import ChatModel
from tunewell.inference.decoder import Generated
from tunewell.inference.runtime import DocumentLosses
from tunewell.records.manifest import AnswerRow
from tunewell.records.report import (
    Answer,
    AnsweredQuestion,
    DifferenceRecord,
    JudgeRecord,
    KeyExample,
    LogitChange,
    LossPair,
)
from tunewell.training.evaluate import Question, prompt_and_reply

_NUM_OTHERS = 1000
"""Number of references of each split, besides those of the questions, from which answer keys are derived."""
_MAX_SHORT_TOKENS = 200
"""A reference of up to 30 words has fewer tokens than this."""


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


@dataclass(frozen=True)
class JudgedQuestions:
    """The held-out questions with their references, answer keys and clusters."""

    questions: Sequence[Question]
    rows: list[tuple[str, int]]
    """The source and the row of each question."""
    keys: list[AnswerKey]
    clusters: list[int]

    def record(self, answered: Sequence[AnsweredQuestion]) -> JudgeRecord:
        """Return the record of the judge for the report, with the difference between the two models."""
        derived = [key for key in self.keys if key.origin == "derived"] or self.keys
        shown = [derived[index] for index in sorted({0, len(derived) // 2, len(derived) - 1})]
        return JudgeRecord(
            name=JUDGE,
            origins=dict(Counter(key.origin for key in self.keys if key.is_judged).most_common()),
            clusters=len(set(self.clusters)),
            examples=[KeyExample(question=key.question, key=key.text, because=key.because) for key in shown],
            difference=_difference(answered),
        )


def judged_questions(
    questions: Sequence[Question], split: Split, corpus: Corpus | None, model: ChatModel
) -> JudgedQuestions:
    """Return the questions with their answer keys, derived from all references of the corpus."""
    documents = [split[question.document] for question in questions]
    rows = [(document.source, document.row) for document in documents]
    wanted, accepted = set(rows), dict[tuple[str, int], AnswerRow]()
    for row in corpus.answer_rows() if corpus is not None else ():
        if (row.source, row.row) in wanted:
            accepted[row.source, row.row] = row
    references = []
    for question, place in zip(questions, rows, strict=True):
        reference, given = _decode_reply(model, question.reference_ids), accepted.get(place)
        answers, column = (tuple(given.answers), given.column) if given else ((), "answers")
        origin = "value" if column == "value" else "answers"
        references.append(ReferenceRow(question.text, reference, answers, origin))
    parts = [split] if corpus is split or corpus is None else [split, corpus]
    others = [reply for part in parts for reply in _short_replies(part, model)]
    keys = answer_keys(references, others=others)
    return JudgedQuestions(questions, rows, keys, find_clusters(keys))


def _short_replies(split: Split, model: ChatModel) -> list[str]:
    """Return replies of a split that may be short references, evenly spread."""
    found = (prompt_and_reply(split, document) for document in spread_evenly(len(split), _NUM_OTHERS).tolist())
    return [_decode_reply(model, parts[1]) for parts in found if parts and len(parts[1]) <= _MAX_SHORT_TOKENS]


def _difference(answered: Sequence[AnsweredQuestion]) -> DifferenceRecord | None:
    pairs = [(each, each.base) for each in answered if each.base is not None and each.tuned.right is not None]
    if not pairs:
        return None
    tuned, base = [bool(each.tuned.right) for each, _ in pairs], [bool(answer.right) for _, answer in pairs]
    found = compare_pair(
        tuned, base, cluster_numbers([each for each, _ in pairs]), names=("the tuned model", "the base model")
    )
    return difference_record(found)


def answered_questions(
    judged: JudgedQuestions, *, model: ChatModel, base: ModelOutputs, tuned: ModelOutputs
) -> list[AnsweredQuestion]:
    """Return each question with the scored answers of both models."""
    found = []
    for index, (question, key) in enumerate(zip(judged.questions, judged.keys, strict=True)):
        source, row = judged.rows[index]
        found.append(
            AnsweredQuestion(
                document=question.document,
                source=source,
                row=row,
                question=question.text,
                reference=key.reference,
                key=key.text,
                key_origin=key.origin,
                cluster=judged.clusters[index],
                base=_score(model, base.answers[index], question, key) if base.answers else None,
                tuned=_score(model, tuned.answers[index], question, key),
            )
        )
    return found


def _decode_reply(model: ChatModel, ids: list[int]) -> str:
    """Decode a reply without its stop token."""
    end = next((index for index, token in enumerate(ids) if token in model.stop_ids), len(ids))
    return model.decode(ids[:end]).strip()


def _score(model: ChatModel, answer: Generated, question: Question, key: AnswerKey) -> Answer:
    text, reference = model.decode(answer.ids).strip(), key.reference
    matched, judgement = match(text, reference), judge(text, key)
    control_texts = [model.decode([token]) for token in answer.ids if token in model.tokenizer.control_ids]
    sample = JudgedAnswer(
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
        right=judgement.is_right,
        is_refusal=judgement.is_refusal,
        faults=find_faults(sample),
    )
