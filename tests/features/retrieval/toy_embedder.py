"""An embedder for tests: hashed words, no model. It records which texts it computed."""

import re
import zlib

import numpy as np

from tunewell.features.retrieval.embedders.base import OnBatch


class ToyEmbedder:
    """A vector with one direction per hashed word. A token is a run of up to four letters, or a sign."""

    def __init__(self, name: str = "toy", *, dimension: int = 32, max_tokens: int = 64, batch: int = 4) -> None:
        self.name = name
        self.sha256 = f"{zlib.crc32(name.encode()):064x}"
        self.dimension = dimension
        self.max_tokens = max_tokens
        self._batch = batch
        self.unrelated_cosine = None
        self.computed: list[str] = []

    def count_tokens(self, texts: list[str]) -> list[int]:
        return [len(re.findall(r"\w{1,4}|[^\w\s]", text)) for text in texts]

    def embed(self, texts: list[str], *, is_query: bool = False, on_batch: OnBatch | None = None) -> np.ndarray:
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        for start in range(0, len(texts), self._batch):
            batch = list(range(start, min(start + self._batch, len(texts))))
            for index in batch:
                if not is_query:
                    self.computed.append(texts[index])
                for word in re.findall(r"\w+", texts[index].lower()):
                    vectors[index, zlib.crc32(word.encode()) % self.dimension] += 1
            vectors[batch] /= np.maximum(np.linalg.norm(vectors[batch], axis=1, keepdims=True), 1e-12)
            if on_batch is not None:
                on_batch(batch, vectors[batch])
        return vectors
