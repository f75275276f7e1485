"""The embedder protocol, and how an embedder is found by its name.

An index records the hash of the weights and refuses another embedder.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from tunewell.core.errors import UserError
from tunewell.core.files import is_url
from tunewell.core.registry import Entry, Registry
from tunewell.model_files.files import HUB_ID

OnBatch = Callable[[list[int], np.ndarray], None]
"""Receives the indices of some texts and their vectors, as soon as they are computed."""


class UnknownEmbedder(UserError):
    """Raised for a name that is no embedder on this machine."""


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
_EMBEDDERS = Registry(
    "embedder",
    [
        Entry("minilm", "all-MiniLM-L6-v2, 384 dimensions.", f"{_HERE}.sentence_transformer:open_minilm"),
        Entry("folder", "A sentence-transformers folder.", f"{_HERE}.sentence_transformer:open_folder"),
        Entry("hub", "A sentence-transformers model of the hub.", f"{_HERE}.sentence_transformer:open_hub"),
        Entry("server", "A server with OpenAI's API.", f"{_HERE}.server:EmbeddingServer"),
    ],
)


def open_embedder(name: str) -> Embedder:
    """Open an embedder: `minilm`, a sentence-transformers folder, a hub name, or `http://HOST/v1#MODEL`."""
    if name == "minilm":
        kind = name
    elif is_url(name):
        kind = "server"
    elif Path(name).expanduser().is_dir():
        kind = "folder"
    elif HUB_ID.fullmatch(name) and not name.startswith("."):
        kind = "hub"
    else:
        raise UnknownEmbedder(
            f"unknown embedder `{name}`",
            fix="use `minilm`, a sentence-transformers folder, a hub name like `BAAI/bge-small-en-v1.5`, or an "
            "address like `http://localhost:8080/v1#MODEL`",
        )
    return _EMBEDDERS.load(kind)(name)
