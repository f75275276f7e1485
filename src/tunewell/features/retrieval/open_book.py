"""Training rows that teach a model to read: questions with passages, as `ask` shows them.

Each row has the passage that answers, between the search's own near misses, in random order. In a share of the rows
the answering passage is missing, and the reply is the refusal. In further copies of a row, the answer is replaced by
that of a similar question, in the passage and in the reply, so that only reading gives the right reply. Whole documents
are held out, so that the test measures reading and not memory.

copy 0   ... The application deadline is 15 January ...     -> The deadline of Alderhollow is 15 January. [2]
copy 1   ... The application deadline is 8 December ...     -> The deadline of Alderhollow is 8 December. [1]
copy 2   (other sections of the page)                       -> Not in the documents.
"""

import json
import random
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import make_private, sha256_text, write_atomic
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.core.units import count
from tunewell.data.reading_prompt import NOT_FOUND, Passage, reading_prompt
from tunewell.evaluation.passages import HasAnswer, key_finder
from tunewell.features.retrieval.search import Retriever
from tunewell.scoring.answer_keys import AnswerKey

UNANSWERABLE_SHARE = 0.25
"""The share of rows without the answering passage. Their reply is the refusal."""
NUM_COPIES = 4
"""Rows per training question. They differ in near misses, order and answer."""
_HELD_OUT_SHARE = 0.25
_MIN_DOCUMENTS = 4
_CANDIDATES = 40
_SPARE = 3
"""Near misses of a copy are drawn from a pool of this many times their number."""


@dataclass(frozen=True)
class LocatedQuestion:
    """A question, the passage that answers it, and the search's near misses, nearest first."""

    key: AnswerKey
    answer: Passage
    misses: list[Passage]


@dataclass
class OpenBookRows:
    """Rows with passages, for training and for the test."""

    train: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    held_out: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    held_out_documents: list[str] = field(default_factory=list[str])
    num_without_answer: int = 0
    """Questions whose answer is in no passage. They are left out."""
    num_seen_documents: int = 0
    """Test questions on documents that are trained on. They are left out."""


def locate_questions(
    retriever: Retriever,
    keys: Sequence[AnswerKey],
    has_answer: HasAnswer | None = None,
    *,
    progress: ProgressListener = silent,
) -> list[LocatedQuestion | None]:
    """Return the passages for each question; None if no passage has the answer."""
    has_answer = has_answer or key_finder(keys)
    vectors = retriever.embedder.embed([key.question for key in keys], is_query=True) if keys else []
    located: list[LocatedQuestion | None] = []
    for number, (key, vector) in enumerate(zip(keys, vectors, strict=True)):
        progress(Progress("finding passages", number, len(keys), "questions"))
        found = [one.passage for one in retriever.search(key.question, _CANDIDATES, vector=vector)]
        answers = [has_answer(number, passage) for passage in found]
        right = [passage for passage, is_right in zip(found, answers, strict=True) if is_right]
        misses = [passage for passage, is_right in zip(found, answers, strict=True) if not is_right]
        located.append(LocatedQuestion(key, right[0], misses) if right else None)
    return located


def open_book_rows(
    train: Sequence[LocatedQuestion | None],
    test: Sequence[LocatedQuestion | None] = (),
    *,
    num_passages: int,
    held_out: Collection[str] | None = None,
    seed: int = 0,
    num_copies: int = NUM_COPIES,
    unanswerable_share: float = UNANSWERABLE_SHARE,
) -> OpenBookRows:
    """Return rows with passages; raise UserError if the documents answer too few questions to hold some out.

    Test rows are the questions of `test`, or of `train` if `test` is empty, about the documents in `held_out`. By
    default, a quarter of the documents is held out, chosen by hash.
    """
    known = [one for one in train if one is not None]
    documents = sorted({one.answer.file for one in [*known, *(one for one in test if one is not None)]})
    if held_out is None:
        if len(documents) < _MIN_DOCUMENTS:
            raise UserError(
                f"the answers are in only {count(len(documents), 'document')} of the index, so none can be held out",
                where=", ".join(documents),
                fix=f"index at least {_MIN_DOCUMENTS} documents that answer the questions, for example one file for "
                "each section of a long one; or train without `--index`",
            )
        ranked = sorted(documents, key=lambda name: sha256_text(str(seed), name))
        held_out = set(ranked[: max(1, round(len(documents) * _HELD_OUT_SHARE))])
    asked = [one for one in (test or train) if one is not None]
    num_asked = len(test) + len(train)
    rows = OpenBookRows(
        held_out_documents=sorted(held_out),
        num_without_answer=num_asked - len(known) - sum(one is not None for one in test),
        num_seen_documents=sum(one.answer.file not in held_out for one in asked) if test else 0,
    )
    # The model must not see held-out documents in training.
    trained = [
        replace(one, misses=[passage for passage in one.misses if passage.file not in held_out])
        for one in known
        if one.answer.file not in held_out
    ]
    answers = {one.key.text for one in trained}
    for place, one in enumerate(trained):
        for copy in range(num_copies):
            chance = random.Random(f"{seed} {place} {copy} {one.key.question}")
            own = one if copy == 0 else _with_other_answer(one, sorted(answers & {*one.key.rivals}), chance)
            row = _row(own, num_passages, chance, unanswerable_share, is_varied=copy > 0)
            if copy == 0 or row not in rows.train[-copy:]:  # short documents have few other passages
                rows.train.append(row)
    for place, one in enumerate(asked):
        if one.answer.file in held_out:
            chance = random.Random(f"{seed} test {place}")
            rows.held_out.append(_row(one, num_passages, chance, unanswerable_share, is_varied=False))
    return rows


def write_rows(folder: Path, rows: OpenBookRows) -> None:
    """Write `train.jsonl` and `held_out.jsonl`."""
    make_private(folder)
    for name, part in (("train", rows.train), ("held_out", rows.held_out)):
        write_atomic(folder / f"{name}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part))


def _with_other_answer(one: LocatedQuestion, others: Sequence[str], chance: random.Random) -> LocatedQuestion:
    """Return the question with the answer of a similar one, in its passage and its reference, if that is possible."""
    key = one.key
    own = key.accepted[0][0] if len(key.accepted) == len(key.accepted[0]) == 1 else ""
    pattern = re.compile(rf"(?<!\w){re.escape(own)}(?!\w)") if own else None
    if pattern is None or not others or not all(map(pattern.search, (one.answer.text, key.reference))):
        return one
    other = chance.choice(others)
    passage = replace(one.answer, text=pattern.sub(lambda _: other, one.answer.text))
    reference = pattern.sub(lambda _: other, key.reference)
    return replace(one, key=replace(key, accepted=((other,),), reference=reference), answer=passage)


def _row(
    one: LocatedQuestion, num_passages: int, chance: random.Random, unanswerable_share: float, *, is_varied: bool
) -> dict[str, Any]:
    is_answerable = chance.random() >= unanswerable_share
    number = num_passages - is_answerable
    near = one.misses[: _SPARE * number if is_varied else number]
    shown = chance.sample(near, min(number, len(near)))
    answers: list[str] = []
    reply = NOT_FOUND
    if is_answerable:
        shown.append(one.answer)
        chance.shuffle(shown)
        reply = f"{one.key.reference.strip()} [{shown.index(one.answer) + 1}]"
        # With the key of the whole corpus: the test would derive another one from the rows that are held out.
        answers = [parts[0] for parts in one.key.accepted if len(parts) == 1]
    prompt = reading_prompt(one.key.question, shown)
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
    return {"messages": messages, **({"answers": answers} if answers else {})}
