"""Should it be trained at all? Count and inspect the rows: too few, facts to look up, or a manner to learn.

A fact is a name, number or other word of an answer that neither its question nor any other answer contains. Measured on
up to 2,000 rows of each set (2026-11-17):

                      rows with a fact   share of words   rows per answer
    GSM8K                  52%               3.4%              1.0          train
    Banking77              fixed set of answers              117.6          train
    WikiSQL                 1%               0.1%              1.0          train
    PubMedQA               90%               9.2%              1.0          retrieve
    the college example   100%              17.2%              5.0          train or retrieve: `compare` decides
"""

import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from tunewell.core.units import count, percent
from tunewell.data.batches import spread_evenly
from tunewell.data.corpus.reader import Corpus
from tunewell.data.tokenizers.load import load_tokenizer

Choice = Literal["train", "retrieve", "compare", "more rows"]
_MAX_ROWS = 2_000
_FEW_ROWS = 300
"""Fewer rows rarely change how a model answers: 175 rows of self-instruct are this kind."""
_FIXED_ROWS = 10
"""Rows per answer from which answers are a fixed set, like labels."""
_REWORDED_ROWS = 3
"""Rows per answer from which questions count as paraphrases of one fact."""
_FACT_ROWS, _FACT_WORDS = 0.75, 0.06
_WORD = re.compile(r"[^\W_]+(?:[.,'\-][^\W_]+)*")


@dataclass(frozen=True)
class Advice:
    """A recommendation with the numbers behind it. It is never a refusal."""

    choice: Choice
    because: str
    options: list[str]
    """What can be done, the recommended first."""
    num_rows: int
    rows_per_answer: float
    fact_rows: float
    """Share of the rows whose answer has a fact."""
    fact_words: float
    """Mean share of such words in an answer."""

    def as_json(self) -> dict[str, Any]:
        """Return the object in `plan --json`."""
        return asdict(self)


def advise(corpus: Corpus) -> Advice:
    """Inspect the rows of a corpus, and recommend to train, to retrieve, to compare both or to collect more rows."""
    pairs = _pairs(corpus)
    answers = [words for _, words in pairs]
    distinct = {tuple(words) for words in answers}
    frequency = Counter(word for words in distinct for word in set(words))
    shares = [
        sum(frequency[word] <= 1 and word not in question for word in set(words)) / max(1, len(set(words)))
        for question, words in pairs
    ]
    rows_per_answer = len(pairs) / max(1, len(distinct))
    fact_rows, fact_words = float(np.mean([share > 0 for share in shares])), float(np.mean(shares))
    choice, because = _decide(len(corpus), rows_per_answer, fact_rows, fact_words)
    return Advice(
        choice,
        because,
        _OPTIONS[choice],
        len(corpus),
        round(rows_per_answer, 2),
        round(fact_rows, 3),
        round(fact_words, 4),
    )


def look_up_hint(corpus: Corpus) -> str | None:
    """Return a sentence for rows whose answers are better looked up than learned, or None."""
    if all(source.formats.keys() == {"text"} for source in corpus.manifest.sources):
        return (
            "texts without questions teach a style, and hardly any facts: `tunewell index FOLDER` makes documents "
            "searchable, and `tunewell ask QUESTION` answers from them"
        )
    advice = advise(corpus)
    if advice.choice not in ("retrieve", "compare"):
        return None
    return f"train or look up? {advice.because}; `tunewell index FOLDER`, then `tunewell compare` measures both"


def _decide(num_rows: int, rows_per_answer: float, fact_rows: float, fact_words: float) -> tuple[Choice, str]:
    facts = f"{percent(fact_rows, 0)} of the answers contain words that no question and no other answer has"
    if rows_per_answer >= _FIXED_ROWS:
        return "train", f"the answers are a fixed set, with {rows_per_answer:,.0f} rows for each on average"
    is_factual = fact_rows >= _FACT_ROWS and fact_words >= _FACT_WORDS
    if is_factual and rows_per_answer >= _REWORDED_ROWS:
        return "compare", f"the rows are facts in {rows_per_answer:.1f} wordings each: {facts}"
    if num_rows < _FEW_ROWS:
        return "more rows", f"{count(num_rows, 'row')} are few, and hardly any answer is given twice"
    if is_factual:
        return "retrieve", f"the rows are facts to look up: {facts}, so nothing repeats them"
    return "train", f"the rows share a manner: only {facts}"


_OPTIONS: dict[Choice, list[str]] = {
    "train": ["train here: `tunewell train`", "train on Colab: `tunewell notebook`"],
    "compare": [
        "train, then test on reworded questions: `tunewell train`",
        "retrieve instead: `tunewell index DOCUMENTS`, then `tunewell ask QUESTION`",
        "do both, and measure which is better: `tunewell compare`",
    ],
    "more rows": [
        "collect more rows, or write several wordings of each",
        "train anyway: the verdict on the held-out rows shows whether it helped",
        "put a few rows into the prompt as examples instead",
    ],
    "retrieve": [
        "retrieve instead: `tunewell index DOCUMENTS`, then `tunewell ask QUESTION`; `tunewell compare` measures it",
        "train on several wordings of each fact: one is rarely remembered",
        "train anyway: the verdict on the held-out rows shows whether it helped",
    ],
}


def _pairs(corpus: Corpus) -> list[tuple[set[str], list[str]]]:
    """Return the words of question and answer of some rows. Rows without a question end with their answer's line."""
    backend = load_tokenizer(corpus.path / "tokenizer").backend
    found: list[tuple[set[str], list[str]]] = []
    for document in spread_evenly(len(corpus), _MAX_ROWS).tolist():
        ids, labels = corpus.arrays(document)
        is_supervised = labels != -100
        answer = backend.decode(ids[is_supervised].tolist(), skip_special_tokens=True)
        question = backend.decode(ids[~is_supervised].tolist(), skip_special_tokens=True)
        if not _words(question):
            question, _, answer = answer.strip().rpartition("\n")
        found.append((set(_words(question)), _words(answer)))
    return found


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]
