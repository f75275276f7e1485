"""Search an index by words and vectors: one score per passage, and whether the passages answer the question."""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunewell.core.errors import UserError
from tunewell.retrieval.embedders.base import Embedder, open_embedder
from tunewell.retrieval.passages import Passage
from tunewell.retrieval.stores.base import Hits, Store, open_store
from tunewell.retrieval.words import words

CANDIDATES = 100
"""Number of passages that each of the two searches proposes."""
_NAME = re.compile(r"(?<!^)(?<![.?!] )\b(?:[^\W\d_a-zß-ÿ][\w'-]*\w|\d[\w.,/-]*)")
"""A capitalised word inside a sentence, or a number."""


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


class Retriever:
    """An open index with its embedder."""

    def __init__(self, store: Store, embedder: Embedder) -> None:
        self.store = store
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
    ) -> list[Found]:
        """Return the best passages for a question, except those of the documents in `without`."""
        if vector_weight is None:
            vector_weight = self.store.manifest.settings.vector_weight.value
        asked = vector if vector is not None else self.embedder.embed([question], is_query=True)[0]
        hidden = sum(self._documents[name].num_passages for name in without)
        by_words = self.store.search_words(words(question, self._language), CANDIDATES + hidden)
        by_vectors = self.store.search_vectors(asked, CANDIDATES + hidden)
        cosines, bm25 = dict(by_vectors), dict(by_words)
        found: list[Found] = []
        fused = fuse(by_words, by_vectors, vector_weight)
        for start in range(0, len(fused), limit + hidden):
            part = fused[start : start + limit + hidden]
            for (number, score), passage in zip(part, self.store.passages([n for n, _ in part]), strict=True):
                if passage.file not in without:
                    found.append(Found(number, passage, score, cosines.get(number, 0.0), bm25.get(number, 0.0)))
            if len(found) >= limit:
                break
        return found[:limit]

    def find(self, question: str, limit: int, **options: Any) -> tuple[list[Found], bool]:
        """Return the best passages for a question, and whether they seem to answer it."""
        found = self.search(question, limit, **options)
        if not found:
            return [], False
        coefficients = self.store.manifest.settings.refusal.value
        if not coefficients:
            return found, True
        signals = self.signals(question, found, without=options.get("without", ()))
        return found, sum(c * s for c, s in zip(coefficients, (*signals, 1.0), strict=True)) >= 0

    def signals(self, question: str, found: Sequence[Found], *, without: Collection[str] = ()) -> tuple[float, ...]:
        """Return three numbers that show whether passages answer a question: similarity of meaning, words and names.

        1. the highest cosine, 2. the share of the question's words in the best passage, rare words counting more,
        3. the share of its names and numbers there. "The deadline of Larkfell College" is near every page about
        deadlines; the name tells them apart.
        """
        best = found[0].passage
        present = set(words(best.searched, self._language))
        asked = sorted(set(words(question, self._language)))
        names = {word for name in _NAME.findall(question) for word in words(name, self._language)}
        total = self.store.manifest.counts.passages
        numbers = self._num_passages_with(asked, without)
        weights = [math.log(1 + (total - number + 0.5) / (number + 0.5)) for number in numbers]
        covered = sum(weight for weight, word in zip(weights, asked, strict=True) if word in present)
        return (
            max(one.cosine for one in found),
            covered / (sum(weights) or 1.0),
            sum(name in present for name in names) / len(names) if names else 1.0,
        )

    def _num_passages_with(self, asked: list[str], without: Collection[str]) -> list[int]:
        numbers = self.store.num_passages_with(asked)
        for name in without:
            for passage in self.passages_of(name):
                present = set(words(passage.searched, self._language))
                numbers = [number - (word in present) for number, word in zip(numbers, asked, strict=True)]
        return numbers

    def passages_of(self, document: str) -> list[Passage]:
        """Return the passages of a document."""
        entry = self._documents[document]
        return self.store.passages(range(entry.first, entry.first + entry.num_passages))


def open_retriever(address: str) -> Retriever:
    """Open an index with the embedder it was made with; raise UserError if either is missing or has changed."""
    store = open_store(address)
    record = store.manifest.embedder
    embedder = open_embedder(record.name)
    if embedder.sha256 != record.sha256:
        raise UserError(
            f"the embedder `{record.name}` is not the one that the index was made with",
            where=f"SHA-256 {embedder.sha256[:12]}, in the index {record.sha256[:12]}",
            fix=f"create the index again with `tunewell index`, or install the old version of `{record.name}`",
        )
    return Retriever(store, embedder)
