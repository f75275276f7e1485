"""List a tokenizer's words as llama.cpp keeps them: a spelling and a type for each id, and how they are joined."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from tunewell.core.errors import UserError
from tunewell.data.tokenizer import LoadedTokenizer
from tunewell.data.tokenizer_files.sentencepiece_model import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePieceModel,
)
from tunewell.exporting.gguf_pieces import scores_of, space_prefix
from tunewell.exporting.gguf_pretokenizers import name_byte_level

_SPACE = "▁"
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
# Some tokenizers do not call these special, and llama.cpp would let a text spell them.
_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)
# llama.cpp's own converter writes these; nothing is ever joined to such a token.
_ADDED_SCORE, _UNUSED_SCORE = -1000.0, -10000.0


@dataclass(frozen=True)
class Words:
    """The words of a vocabulary, by id, with what it takes to join them."""

    model: Literal["gpt2", "llama"]
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] | None = None
    scores: list[float] | None = None
    space_prefix: bool | None = None
    notes: tuple[str, ...] = ()


def byte_level_words(tokenizer: LoadedTokenizer, pipeline: dict[str, Any], num_rows: int) -> Words:
    """List the words of a byte-level tokenizer: it joins by merges."""
    name, notes = name_byte_level(pipeline, tokenizer.backend)
    tokens, types = _tokens(tokenizer, num_rows)
    merges = [" ".join(pair) for pair in _merges(pipeline)]
    if any(merge.count(" ") != 1 for merge in merges):
        raise UserError("a merge holds a space of its own, which GGUF cannot say", where="tokenizer.json")
    return Words("gpt2", name, tokens, types, merges=merges, notes=tuple(notes))


def piece_words(
    tokenizer: LoadedTokenizer, pipeline: dict[str, Any], num_rows: int, beside: SentencePieceModel | None
) -> Words:
    """List the words of a tokenizer of SentencePiece's kind: it joins by scores.

    They are those of the `.model` file beside it, where that has the same pieces, else made from the merges.
    """
    prefix, notes = space_prefix(pipeline)
    tokens, types = _tokens(tokenizer, num_rows)
    has_bytes = bool(pipeline["model"].get("byte_fallback"))
    unknown = pipeline["model"].get("unk_token") or tokenizer.special_tokens.get("unk_token")
    types = [_piece_type(token, kind, has_bytes, unknown) for token, kind in zip(tokens, types, strict=True)]
    vocabulary = pipeline["model"]["vocab"]
    if beside is not None and all(vocabulary.get(piece) == number for number, piece in enumerate(beside.pieces)):
        known = dict(zip(beside.pieces, beside.scores, strict=True))
    else:
        known = scores_of(vocabulary, _merges(pipeline), types)
    scores = [
        _UNUSED_SCORE if kind == UNUSED else known.get(token, _ADDED_SCORE)
        for token, kind in zip(tokens, types, strict=True)
    ]
    return Words("llama", "default", tokens, types, scores=scores, space_prefix=prefix, notes=tuple(notes))


def _tokens(tokenizer: LoadedTokenizer, num_rows: int) -> tuple[list[str], list[int]]:
    """Spell every id; rows of the model's table that no token has are filled up with unused ones."""
    by_id = {number: token for token, number in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
    tokens, types = [], []
    for number in range(num_rows):
        token = by_id.get(number)
        facts = tokenizer.added.get(token) if token is not None else None
        if token is None:
            token, kind = f"[PAD{number}]", UNUSED
        elif facts is None:
            kind = NORMAL
        elif facts.special or _LOOKS_SPECIAL.fullmatch(token):
            kind = CONTROL
        else:
            # llama.cpp looks for these in text in which spaces still are spaces.
            token, kind = token.replace(_SPACE, " "), USER_DEFINED
        tokens.append(token)
        types.append(kind)
    return tokens, types


def _piece_type(token: str, kind: int, has_bytes: bool, unknown: str | None) -> int:
    if token == unknown:
        return UNKNOWN
    return BYTE if has_bytes and kind == NORMAL and _BYTE_PIECE.fullmatch(token) else kind


def _merges(pipeline: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in pipeline["model"]["merges"])
    return [(pair[0], pair[1]) for pair in pairs]
