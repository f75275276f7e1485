"""Embed texts by averaging the word vectors of wordllama: no torch, 256 dimensions, weaker than MiniLM."""

from pathlib import Path
from typing import Any

import numpy as np

from tunewell.core.files import sha256_file
from tunewell.core.optional import import_optional
from tunewell.features.retrieval.embedders.base import OnBatch

_BATCH = 512


class WordLlama:
    """Averaged word vectors."""

    name = "wordllama"
    dimension = 256
    max_tokens = 254
    """No limit of the model. The same passages as with MiniLM."""
    unrelated_cosine = None

    def __init__(self) -> None:
        """Open the vectors that the package contains. Nothing is downloaded."""
        package: Any = import_optional("wordllama", extra="wordllama", purpose="the embedder `wordllama`")
        folder = Path(package.__file__).parent
        self._model = package.WordLlama.load(cache_dir=folder, disable_download=True)
        self._tokenizer = self._model.tokenizer
        self.sha256 = sha256_file(next((folder / "weights").glob("*.safetensors")))

    def count_tokens(self, texts: list[str]) -> list[int]:
        """Return the number of tokens of each text."""
        return [sum(one.attention_mask) for one in self._tokenizer.encode_batch(texts, add_special_tokens=False)]

    def embed(self, texts: list[str], *, is_query: bool = False, on_batch: OnBatch | None = None) -> np.ndarray:
        """Return one vector of length one per text."""
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        for start in range(0, len(order), _BATCH):
            batch = order[start : start + _BATCH]
            # A text without any known word has a vector of zeros, which is near nothing.
            computed = np.nan_to_num(self._model.embed([texts[index] or " " for index in batch], norm=True))
            vectors[batch] = computed
            if on_batch is not None:
                on_batch(batch, vectors[batch])
        return vectors
