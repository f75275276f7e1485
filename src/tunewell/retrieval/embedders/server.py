"""Embed texts with a server that has OpenAI's `/embeddings` API. It is used only if its address is named."""

import json
import os
import urllib.error
import urllib.request
from typing import Any

import numpy as np

from tunewell.core.errors import UserError
from tunewell.core.files import sha256_text
from tunewell.retrieval.embedders.base import OnBatch

_BATCH = 64
_KEY = "TUNEWELL_EMBEDDER_KEY"
_CHECK_MODEL = "check that the model after `#` is an embedding model, and that the server has `/embeddings`"


class EmbeddingServer:
    """A model behind an address: `http://HOST/v1#MODEL`."""

    max_tokens = 254
    unrelated_cosine = None

    def __init__(self, address: str) -> None:
        """Ask the server for one vector, which shows that it works and how many dimensions it has."""
        self.name = address
        self._url, _, self._model = address.partition("#")
        if not self._model:
            raise UserError(f"`{address}` does not name a model", fix=f"add it to the address: `{address}#MODEL`")
        self.sha256 = sha256_text(self._url, self._model)
        self.dimension = len(self._request(["test"])[0])

    def count_tokens(self, texts: list[str]) -> list[int]:
        """Return an upper estimate: the server's tokenizer is unknown."""
        return [len(text.encode()) // 3 + 1 for text in texts]

    def embed(self, texts: list[str], *, is_query: bool = False, on_batch: OnBatch | None = None) -> np.ndarray:
        """Return one vector of length one per text."""
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        for start in range(0, len(texts), _BATCH):
            batch = list(range(start, min(start + _BATCH, len(texts))))
            computed = np.asarray(self._request([texts[index] for index in batch]), np.float32)
            vectors[batch] = computed / np.maximum(np.linalg.norm(computed, axis=1, keepdims=True), 1e-12)
            if on_batch is not None:
                on_batch(batch, vectors[batch])
        return vectors

    def _request(self, texts: list[str]) -> list[list[float]]:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(_KEY):
            headers["Authorization"] = f"Bearer {key}"
        body = json.dumps({"model": self._model, "input": texts, "encoding_format": "float"}).encode()
        request = urllib.request.Request(f"{self._url.rstrip('/')}/embeddings", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                answer: Any = json.load(response)
            rows = sorted(answer["data"], key=lambda row: row["index"])
            vectors = [[float(number) for number in row["embedding"]] for row in rows]
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            fix = f"check the address; a key is read from {_KEY}"
            raise UserError(f"the embedding server does not answer: {reason}", where=self._url, fix=fix) from None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                "the embedding server's answer has no vectors", where=self._url, fix=_CHECK_MODEL
            ) from error
        if len(vectors) != len(texts):
            raise UserError(
                f"the embedding server returned {len(vectors)} vectors for {len(texts)} texts",
                where=self._url,
                fix=_CHECK_MODEL,
            )
        return vectors
