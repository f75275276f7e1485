"""An embedder without a model, and an index of the college pages: what tests of retrieval share."""

import json
import re
import zlib
from pathlib import Path

import numpy as np

from tunewell.features.retrieval.embedders.base import OnBatch
from tunewell.features.retrieval.indexing import build_index
from tunewell.features.retrieval.search import Retriever
from tunewell.features.retrieval.stores.base import open_store

COLLEGE = Path(__file__).parents[3] / "examples" / "college"


class HashedWords:
    """Vectors of hashed words: texts with the same words are near each other."""

    name = "hashed words"
    sha256 = "0" * 64
    dimension = 128
    max_tokens = 120
    unrelated_cosine = None

    def __init__(self) -> None:
        self.num_embedded = 0

    def count_tokens(self, texts: list[str]) -> list[int]:
        return [len(re.findall(r"\w+|[^\w\s]", text)) for text in texts]

    def embed(self, texts: list[str], *, is_query: bool = False, on_batch: OnBatch | None = None) -> np.ndarray:
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        for row, text in enumerate(texts):
            for word in re.findall(r"\w+", text.lower()):
                vectors[row, zlib.crc32(word[:5].encode()) % self.dimension] += 1
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
        if on_batch is not None:
            self.num_embedded += len(texts)
            on_batch(list(range(len(texts))), vectors)
        return vectors


def college_index(folder: Path) -> Retriever:
    """Index the pages of the colleges."""
    build_index([str(COLLEGE / "pages")], str(folder), HashedWords())
    return Retriever(open_store(folder), HashedWords())


def college_facts(name: str) -> list[tuple[str, str, str]]:
    """Return the question, the reference and the true value of each row of `train` or `held_out`."""
    facts = [json.loads(line) for line in (COLLEGE / "facts.jsonl").read_text().splitlines()]
    values = {fact["answer"]: fact["value"] for fact in facts}
    rows = [json.loads(line) for line in (COLLEGE / f"{name}.jsonl").read_text().splitlines()]
    return [(row["instruction"], row["output"], values[row["output"]]) for row in rows]
