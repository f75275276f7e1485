"""Search an index by words and vectors: one score per passage, and whether the passages answer the question."""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunewell.core.errors import UserError
from tunewell.data.reading_prompt import Passage
from tunewell.features.retrieval.embedders.base import Embedder, UnknownEmbedder, open_embedder
from tunewell.features.retrieval.records import rebuild_command
from tunewell.features.retrieval.stores.base import Hits, Store, open_store, shown_address
from tunewell.features.retrieval.words import words

CANDIDATES = 100
"""Number of passages that each of the two searches proposes."""
_NAME = re.compile(r"(?<!^)(?<![.?!] )\b(?:[^\W\d_a-zß-ÿ][\w'-]*\w|\d[\w.,/-]*)")
"""A capitalised word inside a sentence, or a number."""
_RARE = 0.25
"""Share of the passages up to which a word can be a name. Chosen among four rules on the training questions of the
college example without capitals. Of the 40 held-out ones, 33 are answered (40 without this rule), and with the name of
an unknown college none (22 without it)."""


@dataclass(frozen=True)
class Found:
    """A passage that a search found."""

    number: int
    passage: Passage
    score: float
    """0 to 1: the weighted mean of both searches."""
    cosine: float
    bm25: float


def fuse(by_words: Hits, by_vectors: Hits, vector_weight: float) -> list[tuple[int, float]]:
    """Return passages with their weighted score, best first: each search's score is divided by its highest.

    A passage that only one search proposes gets 0 from the other one.
    """
    scores: dict[int, float] = {}
    for hits, weight in ((by_words, 1 - vector_weight), (by_vectors, vector_weight)):
        for number, score in hits:
            scores[number] = scores.get(number, 0.0) + weight * score / (hits[0][1] or 1.0)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))


def find_names(text: str) -> list[str]:
    """Return the capitalised words inside the sentences of a text, and its numbers."""
    return _NAME.findall(text)


def _without(hits: Hits, gone: Collection[int]) -> Hits:
    return [hit for hit in hits if hit[0] not in gone] if gone else hits


class Retriever:
    """An open index with its embedder."""

    def __init__(self, store: Store, embedder: Embedder, notes: Sequence[str] = ()) -> None:
        self.store = store
        self.notes = notes
        self.embedder = embedder
        self._language = store.manifest.language.value
        self._documents = {entry.name: entry for entry in store.documents()}

    def search(
        self,
        question: str,
        limit: int,
        *,
        vector_weight: float | None = None,
        vector: np.ndarray | None = None,
        without: Collection[str] = (),
        hidden: Collection[int] = (),
    ) -> list[Found]:
        """Return the best passages, except those of the documents in `without` and those in `hidden`."""
        if vector_weight is None:
            vector_weight = self.store.manifest.settings.vector_weight.value
        asked = vector if vector is not None else self.embedder.embed([question], is_query=True)[0]
        gone = self._gone(without, hidden)
        depth = CANDIDATES + len(gone)
        by_words = _without(self.store.search_words(words(question, self._language), depth), gone)
        by_vectors = _without(self.store.search_vectors(asked, depth), gone)
        cosines, bm25 = dict(by_vectors), dict(by_words)
        best = fuse(by_words, by_vectors, vector_weight)[:limit]
        return [
            Found(number, passage, score, cosines.get(number, 0.0), bm25.get(number, 0.0))
            for (number, score), passage in zip(best, self.store.passages([n for n, _ in best]), strict=True)
        ]

    def find(self, question: str, limit: int, **options: Any) -> tuple[list[Found], bool]:
        """Return the best passages for a question, and whether they seem to answer it."""
        found = self.search(question, limit, **options)
        if not found:
            return [], False
        coefficients = self.store.manifest.settings.refusal.value
        if not coefficients:
            return found, True
        gone = {name: options[name] for name in ("without", "hidden") if name in options}
        signals = self.signals(question, found, **gone)
        return found, sum(c * s for c, s in zip(coefficients, (*signals, 1.0), strict=True)) >= 0

    def signals(
        self, question: str, found: Sequence[Found], *, without: Collection[str] = (), hidden: Collection[int] = ()
    ) -> tuple[float, ...]:
        """Return three numbers that show whether passages answer a question: similarity of meaning, words and names.

        1. the highest cosine, 2. the share of the question's words in the best passage, rare words counting more,
        3. the share of its names and numbers there. "The deadline of Larkfell College" is near every page about
        deadlines; the name tells them apart. In a question without capital letters, rare words stand for names.
        """
        best = found[0].passage
        present = set(words(best.searched, self._language))
        asked = sorted(set(words(question, self._language)))
        total = self.store.manifest.counts.passages
        numbers = self._num_passages_with(asked, self._gone(without, hidden))
        names = {word for name in find_names(question) for word in words(name, self._language)} or {
            word for word, number in zip(asked, numbers, strict=True) if number <= _RARE * total
        }
        weights = [math.log(1 + (total - number + 0.5) / (number + 0.5)) for number in numbers]
        covered = sum(weight for weight, word in zip(weights, asked, strict=True) if word in present)
        return (
            max(one.cosine for one in found),
            covered / (sum(weights) or 1.0),
            sum(name in present for name in names) / len(names) if names else 1.0,
        )

    def _num_passages_with(self, asked: list[str], gone: Collection[int]) -> list[int]:
        numbers = self.store.num_passages_with(asked)
        for passage in self.store.passages(sorted(gone)):
            present = set(words(passage.searched, self._language))
            numbers = [number - (word in present) for number, word in zip(numbers, asked, strict=True)]
        return numbers

    def _gone(self, without: Collection[str], hidden: Collection[int]) -> set[int]:
        entries = [self._documents[name] for name in without]
        return {*hidden, *(entry.first + place for entry in entries for place in range(entry.num_passages))}


def open_retriever(address: str) -> Retriever:
    """Open an index with the embedder it was made with; raise UserError if either is missing or has changed."""
    store = open_store(address)
    record = store.manifest.embedder
    try:
        embedder = open_embedder(record.name)
    except UnknownEmbedder as error:
        arguments = ["minilm" if own == record.name else own for own in store.manifest.arguments]
        raise UserError(
            f"the index was made with the embedder `{record.name}`, which is not there",
            where=shown_address(address),
            fix=f"create another index with `{rebuild_command('index-minilm', arguments)}`",
        ) from error
    if embedder.sha256 != record.sha256:
        raise UserError(
            f"the embedder `{record.name}` is not the one that the index was made with",
            where=f"SHA-256 {embedder.sha256[:12]}, in the index {record.sha256[:12]}",
            fix=f"create the index again with `tunewell index`, or install the old version of `{record.name}`",
        )
    notes = []
    if not store.manifest.has_hashes:
        command = rebuild_command(shown_address(address), store.manifest.arguments)
        notes = [f"this index has no checksums, so changes in its files are not detected; add them with `{command}`"]
    return Retriever(store, embedder, notes)
