"""Questions of a corpus with their references as texts, and the measure by which checkpoints are compared.

A checkpoint is better if more of its answers to the questions of the selection slice are right. The loss is no good
witness where the answer is a label: a model whose loss doubles may answer more questions right.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from tunewell.config.extensions import SCORERS
from tunewell.data.batches import TokenizedDocuments, spread_evenly
from tunewell.data.corpus.reader import Corpus
from tunewell.data.templates.chat_template import ChatTemplate
from tunewell.data.tokenizers.load import corpus_stop_ids, load_tokenizer
from tunewell.records.manifest import ANSWERS
from tunewell.scoring.base import ReferenceRow, Scorer, score_answer, without_thinking
from tunewell.scoring.tasks import find_task, is_chat_export, make_scorer

_MIN_READ = 8
"""Number of documents that are searched for questions, even if fewer are needed."""
_MAX_TRAINING = 2_000
"""Maximum number of training rows that are read for the task and the labels, evenly spread."""
_MIN_ANSWER_TOKENS, _MAX_ANSWER_TOKENS = 16, 512
_MIN_JUDGED = 0.5
"""Share of the references that the scorer must be able to judge."""


def answer_length(longest: int, *, least: int) -> int:
    """Return the length limit of an answer: 1.5 times the longest reference, both in tokens."""
    return min(max(math.ceil(1.5 * longest / 8) * 8, least), _MAX_ANSWER_TOKENS)


@dataclass(frozen=True)
class Question:
    """A question of a document with its reference answer."""

    document: int
    ids: list[int]
    """Token ids of the prompt: all tokens before the first supervised one."""
    reference_ids: list[int]
    prompt: str
    text: str
    """The last message of the user before the reply."""
    reference: str


@dataclass(frozen=True)
class TokenReader:
    """Reads the tokens of a corpus as text."""

    decode: Callable[[list[int]], str]
    question_in: Callable[[str], str]
    """Returns the user's text in a decoded prompt: `ChatTemplate.question_in`."""
    stop_ids: Sequence[int]

    def row(self, question: str, reference_ids: list[int], **more: Any) -> ReferenceRow:
        """Return a row; its reference has no stop token."""
        ends = (index for index, token in enumerate(reference_ids) if token in self.stop_ids)
        end = next(ends, len(reference_ids))
        return ReferenceRow(question, without_thinking(self.decode(reference_ids[:end])), **more)

    def rows(self, split: TokenizedDocuments, most: int) -> tuple[list[ReferenceRow], int]:
        """Return at most `most` rows with a question, evenly spread, and the number of rows without one among them."""
        found, documents = list[ReferenceRow](), spread_evenly(len(split), most).tolist()
        for document in documents:
            if (parts := prompt_and_reply(split, document)) is not None:
                is_reply = np.asarray(split.arrays(document)[1]) != -100
                num_replies = int(np.count_nonzero(np.diff(is_reply, prepend=False) & is_reply))
                question = self.question_in(self.decode(parts[0]))
                found.append(self.row(question, parts[1], num_replies=num_replies))
        return found, len(documents) - len(found)


def prompt_and_reply(split: TokenizedDocuments, document: int) -> tuple[list[int], list[int]] | None:
    """Return the token ids of the prompt and of the first reply, or None if a document has no prompt."""
    ids, labels = split.arrays(document)
    supervised = np.flatnonzero(labels != -100)
    if not len(supervised) or supervised[0] <= 1:
        return None
    begin = int(supervised[0])
    # With several turns, the reference is the first reply, up to the first unsupervised token.
    gap = np.flatnonzero(labels[begin:] == -100)
    end = begin + int(gap[0]) if len(gap) else len(ids)
    return ids[:begin].tolist(), ids[begin:end].tolist()


def questions_of(
    split: TokenizedDocuments,
    *,
    number: int,
    spell: Callable[[list[int]], str],
    question_in: Callable[[str], str] = str.strip,
) -> list[Question]:
    """Return up to `number` questions, evenly spread. Documents supervised from the first token have no question.

    `question_in` returns the user's text in a decoded prompt: `ChatTemplate.question_in`.
    """
    documents = spread_evenly(len(split), max(number, _MIN_READ)).tolist()
    found = [(document, *parts) for document in documents if (parts := prompt_and_reply(split, document)) is not None]
    chosen = [found[index] for index in spread_evenly(len(found), number).tolist()]
    return [
        Question(document, ids, reference, prompt := spell(ids), question_in(prompt), spell(reference).strip())
        for document, ids, reference in chosen
    ]


def corpus_reader(corpus: Corpus) -> TokenReader:
    """Return a reader of the tokens of a corpus."""
    tokenizer, question_in = load_tokenizer(corpus.path / "tokenizer"), str.strip
    if tokenizer.chat_template:
        question_in = ChatTemplate(tokenizer.chat_template, special_tokens=tokenizer.special_tokens).question_in
    decode = partial(tokenizer.backend.decode, skip_special_tokens=False)
    return TokenReader(decode, question_in, corpus_stop_ids(tokenizer, corpus.manifest))


@dataclass(frozen=True)
class Measure:
    """The questions of a selection slice, and the scorer of their task."""

    task: str
    questions: list[Question]
    rows: list[ReferenceRow]
    scorer: Scorer
    reader: TokenReader

    @property
    def longest(self) -> int:
        """Tokens of the longest reference."""
        return max(len(question.reference_ids) for question in self.questions)

    @property
    def limit(self) -> int:
        """Maximum tokens of an answer: half as many again as the longest reference."""
        return min(max(self.longest * 3 // 2, _MIN_ANSWER_TOKENS), _MAX_ANSWER_TOKENS)

    def judge(self, asked: Iterable[int], answers: Sequence[list[int]]) -> list[bool | None]:
        """Return whether each answer, as token ids, to a question is right; None if it cannot be judged."""
        texts = [self.reader.row("", answer).reference for answer in answers]
        pairs = zip(asked, texts, strict=True)
        return [score_answer(self.scorer, index, text, self.rows[index]).right for index, text in pairs]


@lru_cache(maxsize=2)
def find_measure(corpus: Corpus, task: str, base: Path) -> Measure | None:
    """Return the measure by which checkpoints are compared; None without a selection slice, or for the loss.

    Facts are not measured: an answer can be right in any words, and few questions do not tell checkpoints apart.
    """
    if not len(corpus.selection) or ANSWERS in corpus.manifest.files:  # accepted answers are facts
        return None
    read = corpus_reader(corpus)
    training, without = read.rows(corpus, _MAX_TRAINING)
    if task == "auto":
        is_chat = is_chat_export({name for source in corpus.manifest.sources for name in source.formats})
        num_rows = len(corpus) * len(training) // max(1, len(training) + without)
        task = find_task(training, num_documents=without, num_rows=num_rows, is_chat=is_chat).value
    if task == "facts" or (":" not in task and SCORERS.entry(task).min_right is None):
        return None
    number = len(corpus.selection)
    asked = questions_of(corpus.selection, number=number, spell=read.decode, question_in=read.question_in)
    rows = [read.row(question.text, question.reference_ids) for question in asked]
    scorer = make_scorer(task, rows, training, base=base)
    num_judged = sum(map(bool, scorer.expected))
    return Measure(task, asked, rows, scorer, read) if num_judged > _MIN_JUDGED * len(rows) else None
