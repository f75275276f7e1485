"""The open models that `tunewell models` compares, from `catalogue.toml`, and the names close to a wrong one."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tunewell.core.files import read_data

_SIMILAR = 0.7
"""Least similarity of two names, from 0 to 1."""


@dataclass(frozen=True)
class CatalogueModel:
    """A model of the catalogue; the fields are explained in `catalogue.toml`."""

    name: str
    license: str
    kind: str
    good_for: str
    languages: Sequence[str]
    num_languages: int
    context: int
    config: dict[str, Any]
    source: str
    read: str
    unverified: Sequence[str] = ()
    millions: int = 0
    ollama: str = ""
    is_gated: bool = False
    purpose: str = "general"

    @property
    def num_parameters(self) -> int:
        """The parameters that the card states, or the weights of embedding, head and linear layers."""
        if self.millions:
            return self.millions * 1_000_000
        own = self.config
        hidden, heads = own["hidden_size"], own["num_attention_heads"] + own["num_key_value_heads"]
        layer = 2 * hidden * own["head_dim"] * heads + 3 * hidden * own["intermediate_size"]
        tables = own["vocab_size"] * hidden * (1 if own["tie_word_embeddings"] else 2)
        return own["num_hidden_layers"] * layer + tables

    @property
    def download_bytes(self) -> int:
        """Size of the weight files in 16 bits, which is how all of them are published."""
        return 2 * self.num_parameters


@cache
def catalogue() -> tuple[CatalogueModel, ...]:
    """Return the models in the order in which they are recommended."""
    entries = read_data(__file__, "catalogue.toml")["model"]
    return tuple(CatalogueModel(**entry | {"languages": entry["languages"].split()}) for entry in entries)


def find_in_catalogue(name: str) -> CatalogueModel | None:
    """Return the model with this hub id, or None."""
    return next((model for model in catalogue() if model.name.lower() == name.lower()), None)


def find_entry_of(name: str) -> CatalogueModel | None:
    """Return the model of the catalogue from which a file or folder has its name, or None.

    find_entry_of("SmolLM2-135M-Instruct.Q4_1.gguf").name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    """
    wanted = _plain(name)
    ends = [(_plain(model.name.rpartition("/")[2]), model) for model in catalogue()]
    ends += [(_plain(model.ollama), model) for model in catalogue() if model.ollama]
    found = [(end, model) for end, model in ends if end in wanted]
    return max(found, key=lambda pair: len(pair[0]))[1] if found else None


def close_models(name: str, also: tuple[str, ...] = ()) -> list[str]:
    """Return at most three models with a similar name: of the catalogue, and of `also`.

    close_models("llama3.2") = ["meta-llama/Llama-3.2-3B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"]
    """
    wanted = _plain(name)
    if len(wanted) < 3:
        return []
    known = [(other, (other,)) for other in also]
    known += [(model.name, (model.name, *([model.ollama] if model.ollama else []))) for model in catalogue()]
    scored = [(max(_similarity(wanted, name, spelling) for spelling in spellings), own) for own, spellings in known]
    best = max((score for score, _ in scored), default=0.0)
    close = [(score, own) for score, own in scored if score >= max(_SIMILAR, best - 0.1)]
    return [own for _, own in sorted(close, key=lambda pair: -pair[0])[:3]]


def _similarity(wanted: str, name: str, spelling: str) -> float:
    own, ends = _plain(spelling), _plain(spelling.rpartition("/")[2])
    if ends.startswith(wanted) or wanted == own:
        return 1.0
    without_owner = _plain(name.rpartition("/")[2])
    scores = [difflib.SequenceMatcher(None, *pair).ratio() for pair in ((wanted, own), (without_owner, ends))]
    return max(scores)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("ollama:"))
