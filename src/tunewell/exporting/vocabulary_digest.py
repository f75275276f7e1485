"""Tell two vocabularies apart by a hash of their words, whichever kind of file they stand in."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from tunewell.data.tokenizer import LoadedTokenizer
from tunewell.data.tokenizer_files.sentencepiece_model import UNUSED

_SPACE = "▁"


def digest_of(tokenizer: LoadedTokenizer) -> dict[str, str]:
    """Hash the words of a tokenizer with their ids, and its merges where it joins by them."""
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    merges = orjson.loads(tokenizer.backend.to_str())["model"].get("merges")
    found = {"words": _words((number, token) for token, number in vocabulary.items())}
    if merges:
        found["merges"] = _hash(merge if isinstance(merge, str) else " ".join(merge) for merge in merges)
    return found


def digest_of_gguf(fields: Mapping[str, Any]) -> dict[str, str]:
    """Hash the words of a GGUF file likewise, by the fields of its header; rows that no word has are passed over."""
    tokens, types = (fields.get(f"tokenizer.ggml.{name}") or [] for name in ("tokens", "token_type"))
    pairs = zip(tokens, types, strict=False)
    found = {"words": _words((number, token) for number, (token, kind) in enumerate(pairs) if kind != UNUSED)}
    if merges := fields.get("tokenizer.ggml.merges"):
        found["merges"] = _hash(merges)
    return found


def _words(pairs: Iterable[tuple[int, str]]) -> str:
    # Symbols that a tokenizer's author defined have plain spaces in a GGUF file.
    return _hash(f"{number} {token.replace(_SPACE, ' ')}" for number, token in sorted(pairs))


def _hash(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8", "surrogatepass") + b"\x00")
    return digest.hexdigest()
