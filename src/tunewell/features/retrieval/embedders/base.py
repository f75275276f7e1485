"""The embedder protocol, and how an embedder is found by its name.

`auto` is all-MiniLM-L6-v2 in a pinned revision, from the hub cache, the hub or an installed package with the same
weights. An index records the hash of the weights and refuses another embedder.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from tunewell.core.errors import UserError
from tunewell.core.files import is_url
from tunewell.core.registry import Entry, Registry

OnBatch = Callable[[list[int], np.ndarray], None]
"""Receives the indices of some texts and their vectors, as soon as they are computed."""


class Embedder(Protocol):
    """A model that turns a text into a vector."""

    name: str
    """The name under which it can be opened again."""
    sha256: str
    """The hash of the weights; for a server, of its address and model."""
    dimension: int
    max_tokens: int
    """Maximum number of tokens of a text, without special tokens. The rest of a longer text would be ignored."""

    unrelated_cosine: float | None
    """The cosine below which a passage has nothing to do with a question; None if it was not measured."""

    def count_tokens(self, texts: list[str]) -> list[int]:
        """Return the number of tokens of each text, without special tokens."""
        ...

    def embed(self, texts: list[str], *, is_query: bool = False, on_batch: OnBatch | None = None) -> np.ndarray:
        """Return one float32 vector of length one per text."""
        ...


_HERE = "tunewell.features.retrieval.embedders"
EMBEDDERS = Registry(
    "embedder",
    [
        Entry(
            "minilm",
            "all-MiniLM-L6-v2, 384 dimensions. The default.",
            f"{_HERE}.sentence_transformer:open_minilm",
        ),
        Entry(
            "wordllama",
            "Averaged word vectors: weaker, fast, without torch.",
            f"{_HERE}.wordllama:WordLlama",
        ),
    ],
)


_BY_ADDRESS = Registry(
    "embedder",
    [
        Entry("folder", "A sentence-transformers folder.", f"{_HERE}.sentence_transformer:open_folder"),
        Entry("server", "A server with OpenAI's API.", f"{_HERE}.server:EmbeddingServer"),
    ],
)


def open_embedder(name: str) -> Embedder:
    """Open an embedder by name: `minilm`, `wordllama`, a sentence-transformers folder, or `http://HOST/v1#MODEL`."""
    if name in EMBEDDERS.names():
        return EMBEDDERS.load(name)()
    if is_url(name):
        return _BY_ADDRESS.load("server")(name)
    if Path(name).expanduser().is_dir():
        return _BY_ADDRESS.load("folder")(name)
    known = ", ".join(f"`{known}`" for known in EMBEDDERS.names())
    raise UserError(
        f"unknown embedder `{name}`",
        fix=f"use {known}, a sentence-transformers folder, or an address like `http://localhost:8080/v1#MODEL`",
    )
