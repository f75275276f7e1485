"""Embed texts with a server that has OpenAI's `/embeddings` API. It is used only if its address is named."""

import numpy as np

from tunewell.core.errors import UserError
from tunewell.core.files import sha256_text
from tunewell.core.remote_api import RemoteApi
from tunewell.features.retrieval.embedders.base import OnBatch

_BATCH = 64
_MAX_DIMENSION = 16_384
_KEY = "TUNEWELL_EMBEDDER_KEY"
_CHECK_MODEL = "check that the model after `#` is an embedding model, and that the server has `/embeddings`"


class EmbeddingServer:
    """A model behind an address: `http://HOST/v1#MODEL`."""

    max_tokens = 254
    unrelated_cosine = None

    def __init__(self, address: str) -> None:
        """Ask the server for one vector, which shows that it works and how many dimensions it has."""
        self.name = address
        self._api = RemoteApi(address, what="the embedding server", key_variable=_KEY, silence_seconds=120)
        self.sha256 = sha256_text(self._api.url, self._api.model)
        self.dimension = 0
        self.dimension = len(self._request(["test"])[0])

    def count_tokens(self, texts: list[str]) -> list[int]:
        """Return an upper estimate: the server's tokenizer is unknown."""
        return [len(text.encode()) // 3 + 1 for text in texts]

    def embed(self, texts: list[str], *, is_query: bool = False, on_batch: OnBatch | None = None) -> np.ndarray:
        """Return one vector of length one per text."""
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        for start in range(0, len(texts), _BATCH):
            batch = list(range(start, min(start + _BATCH, len(texts))))
            computed = self._request([texts[index] for index in batch])
            vectors[batch] = computed / np.maximum(np.linalg.norm(computed, axis=1, keepdims=True), 1e-12)
            if on_batch is not None:
                on_batch(batch, vectors[batch])
        return vectors

    def _request(self, texts: list[str]) -> np.ndarray:
        answer = self._api.answer("embeddings", {"model": self._api.model, "input": texts, "encoding_format": "float"})
        try:
            rows = sorted(answer["data"], key=lambda row: row["index"])
            vectors = np.asarray([row["embedding"] for row in rows], np.float32)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise self._unusable("the embedding server's answer has no vectors") from error
        if len(vectors) != len(texts):
            raise self._unusable(f"the embedding server returned {len(vectors)} vectors for {len(texts)} texts")
        size = vectors.shape[1] if vectors.ndim == 2 else 0
        if size not in ([self.dimension] if self.dimension else range(1, _MAX_DIMENSION + 1)):
            raise self._unusable(f"the embedding server returned vectors of {size:,} numbers")
        if not np.isfinite(vectors).all():
            raise self._unusable("the embedding server returned NaN or infinity")
        return vectors

    def _unusable(self, what: str) -> UserError:
        return UserError(what, where=self._api.url, fix=_CHECK_MODEL)
