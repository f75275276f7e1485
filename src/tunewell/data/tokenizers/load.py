"""Load the tokenizer of a model without torch or transformers, with the ids of transformers or llama.cpp."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken

from tunewell.core.errors import UserError
from tunewell.data.tokenizers import sentencepiece
from tunewell.data.tokenizers.gguf import load_gguf
from tunewell.data.tokenizers.hub import load_tokenizer_json, read_special_tokens, read_template
from tunewell.data.tokenizers.loaded import AddedTokenInfo, LoadedTokenizer
from tunewell.data.tokenizers.parts import byte_alphabet, prepend_bos
from tunewell.data.tokenizers.sentencepiece import read_model
from tunewell.model_files.files import ModelFiles, locate
from tunewell.records.manifest import Manifest

__all__ = ["AddedTokenInfo", "LoadedTokenizer", "joined_texts", "load_tokenizer", "token_texts"]

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_MAX_JOINED = 16
"""Tokens that are decoded together: each may end in the middle of a character."""


def load_tokenizer(model: str | Path) -> LoadedTokenizer:
    """Load the tokenizer of a model (see `core.model_files.locate`); raise UserError if missing or unsupported."""
    files = locate(model)
    if "tokenizer.json" in files.small:
        return replace(load_tokenizer_json(files), source=files.source)
    if files.sentencepiece is not None:
        return replace(_load_sentencepiece(files, files.sentencepiece), source=files.source, kind="sentencepiece")
    if files.gguf is not None:
        return replace(load_gguf(files.gguf), source=files.source, kind="gguf")
    raise UserError(
        f"`{files.source}` has no tokenizer",
        where="searched for tokenizer.json, tokenizer.model and one .gguf file",
        fix="use a folder with one of these files, or a `.gguf` file",
    )


def _load_sentencepiece(files: ModelFiles, path: Path) -> LoadedTokenizer:
    model = read_model(path)
    backend = sentencepiece.build_tokenizer(model)
    table = read_special_tokens(files, {})
    special = model.special_tokens() | table.special_tokens
    contents = {token.content for token in backend.get_added_tokens_decoder().values()}
    more = [token for token in table.additions(backend) if token.content not in contents]
    # Like the markers of the file, they must match in normalised text, or the text after each would get a dummy space.
    states = [cast(Any, token).__getstate__() for token in more]
    sentencepiece.add_markers(backend, [AddedToken(**(state | {"normalized": True})) for state in states])
    adds_bos = bool(table.config.get("add_bos_token", True)) and "bos_token" in special
    if adds_bos:
        prepend_bos(backend, special["bos_token"])
    return LoadedTokenizer(backend, special, read_template(files, table.config), adds_bos, table.max_length)


def token_texts(tokenizer: LoadedTokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each token. An incomplete character is shown as its bytes, like `<E2 82>`."""
    return [_read_token(tokenizer, token)[0] for token in ids]


def joined_texts(tokenizer: LoadedTokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each token. If tokens share a character, the first gets it and the others an empty text."""
    read = [_read_token(tokenizer, token) for token in ids]
    texts, at = [text for text, _ in read], 0
    while at < len(ids):
        data = b""
        for end in range(at, min(at + _MAX_JOINED, len(ids))):
            piece = read[end][1]
            if piece is None:
                break
            data += piece
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError:
                continue
            texts[at : end + 1] = [text, *[""] * (end - at)]
            at = end
            break
        at += 1
    return texts


def _read_token(tokenizer: LoadedTokenizer, token: int) -> tuple[str, bytes | None]:
    """Return the text of a token, and its bytes if it can be a part of a character."""
    name = tokenizer.backend.id_to_token(token) or ""
    if tokenizer.byte_lengths is None:
        found = _BYTE_TOKEN.fullmatch(name)
        return name.replace("\u2581", " "), bytes.fromhex(found[1]) if found else None
    if name in tokenizer.added:
        return name, None
    data = bytes(_BYTE_OF[character] for character in name if character in _BYTE_OF)
    try:
        return data.decode("utf-8"), data
    except UnicodeDecodeError:
        return f"<{data.hex(' ').upper()}>", data


_BYTE_OF = {character: byte for byte, character in byte_alphabet().items()}


def corpus_stop_ids(tokenizer: LoadedTokenizer, manifest: Manifest) -> list[int]:
    """Return the stop tokens of a corpus: the end-of-turn token of each chat template, and the EOS token."""
    return stop_token_ids(tokenizer, (template.end_of_turn for template in manifest.templates))


def stop_token_ids(tokenizer: LoadedTokenizer, ends: Iterable[str]) -> list[int]:
    """Return the ids of the EOS token and of those end-of-turn markers that are single tokens."""
    texts = {*ends, tokenizer.special_tokens.get("eos_token", "")} - {""}
    return sorted({number for text in texts if (number := tokenizer.backend.token_to_id(text)) is not None})
