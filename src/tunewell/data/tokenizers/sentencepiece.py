"""Turn a SentencePiece model into a `tokenizers.Tokenizer` that gives the same ids."""

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tunewell.core.errors import UserError
from tunewell.data.tokenizers.parts import looks_like_marker
from tunewell.data.tokenizers.sentencepiece_model import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    SentencePieceModel,
)

_SPACE = "▁"

AfterMarkers = Literal["nothing", "space"]
"""Whether text that follows a marker gets the dummy space again: transformers says no, llama.cpp says yes."""
# A comment inside the pattern is how a tokenizer made here is known again.
_DUMMY_SPACE_MARKS = {"nothing": "(?#dummy space)", "space": "(?#dummy space, also behind markers)"}


def build_tokenizer(model: SentencePieceModel, *, after_markers: AfterMarkers = "nothing") -> Tokenizer:
    """Build the tokenizer: the ids of `sentencepiece` for plain text, markers as single tokens.

    Text is normalised whole and markers are found afterwards, so that spaces next to a marker stay what they were.
    """
    vocabulary = {piece: index for index, piece in enumerate(model.pieces)}
    if len(vocabulary) != len(model.pieces):
        raise UserError("the vocabulary lists a piece twice", fix="give a `tokenizer.json` instead")
    unknown = next((piece for piece, kind in zip(model.pieces, model.types, strict=True) if kind == UNKNOWN), None)
    if model.is_bpe:
        backend = Tokenizer(
            models.BPE(vocabulary, _merges(model), unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback)
        )
    else:
        backend = Tokenizer(
            models.Unigram(
                list(zip(model.pieces, model.scores, strict=True)),
                unk_id=None if unknown is None else vocabulary[unknown],
                byte_fallback=model.byte_fallback,
            )
        )
    backend.normalizer = _normalizer(model, after_markers)
    if splits := _splits(model):
        backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    strip = [decoders.Strip(" ", 1, 0)] if model.add_dummy_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    add_markers(
        backend,
        [
            AddedToken(piece, special=kind != USER_DEFINED or looks_like_marker(piece), normalized=True)
            for piece, kind in zip(model.pieces, model.types, strict=True)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ],
    )
    return backend


def add_markers(backend: Tokenizer, tokens: Sequence[AddedToken]) -> None:
    """Add tokens to a tokenizer made here and keep the dummy space away from them."""
    backend.add_tokens(list(tokens))
    contents = [token.content for token in backend.get_added_tokens_decoder().values()]
    steps = _steps(backend)
    for index, step in enumerate(steps):
        if mark := _dummy_space_mark(step):
            sequence = backend.normalizer
            assert isinstance(sequence, normalizers.Sequence)
            kept = [sequence[i] for i in range(len(steps))]
            kept[index] = _dummy_space(contents, mark)
            backend.normalizer = normalizers.Sequence(kept)
            # Only now does the library know the markers as the new normaliser writes them.
            backend.add_tokens(list(backend.get_added_tokens_decoder().values()))


def is_rebuilt(backend: Tokenizer) -> bool:
    """Recognise a tokenizer made here, also after it was saved and loaded again."""
    return any(_dummy_space_mark(step) for step in _steps(backend))


def _steps(backend: Tokenizer) -> list[dict[str, Any]]:
    if not isinstance(backend.normalizer, normalizers.Sequence):
        return []
    return json.loads(backend.normalizer.__getstate__())["normalizers"]


def _dummy_space_mark(step: dict[str, Any]) -> str | None:
    pattern = step.get("pattern", {}).get("Regex", "") if step.get("type") == "Replace" else ""
    return next((mark for mark in _DUMMY_SPACE_MARKS.values() if pattern.startswith(mark)), None)


def _dummy_space(contents: Sequence[str], mark: str) -> normalizers.Normalizer:
    """Put the space in front of text, not in front of a marker, and where asked for behind every marker too."""
    # The longest first: an alternation takes the first that fits.
    markers = [re.escape(text) for text in sorted(contents, key=len, reverse=True)]
    where = r"\A"
    if mark == _DUMMY_SPACE_MARKS["space"] and markers:
        # Looking at the last character first keeps a thousand markers from being tried at every place.
        last = "".join(sorted({re.escape(text[-1]) for text in contents}))
        where = rf"(?:\A|(?<=[{last}])(?<={'|'.join(markers)}))"
    return normalizers.Replace(Regex(f"{mark}{where}(?!{'|'.join([chr(92) + 'z', *markers])})"), _SPACE)


def _normalizer(model: SentencePieceModel, after_markers: AfterMarkers) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(r"\A "), "")]
    if model.add_dummy_prefix:
        steps.append(_dummy_space((), _DUMMY_SPACE_MARKS[after_markers]))
    steps.append(normalizers.Replace(" ", _SPACE))
    if model.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(f"{_SPACE}+\\z"), ""))
    return normalizers.Sequence(steps)


def _splits(model: SentencePieceModel) -> list[pre_tokenizers.PreTokenizer]:
    """Cut where no piece can reach across: it changes no id and lets the library remember words."""
    splits: list[pre_tokenizers.PreTokenizer] = []
    kinds = list(zip(model.pieces, model.types, strict=True))
    if not any(re.search(f"[^{_SPACE}]{_SPACE}", piece) for piece, kind in kinds if kind in (NORMAL, USER_DEFINED)):
        splits.append(pre_tokenizers.Split(Regex(f"{_SPACE}*[^{_SPACE}]+|{_SPACE}+"), "isolated"))
    if not model.is_bpe:
        # The library's Unigram would find `<s>` or `<0x41>` in text that merely spells them; SentencePiece does not.
        spelled = [piece for piece, kind in kinds if len(piece) > 1 and _is_reserved(piece, kind)]
        if spelled:
            cuts = "|".join(f"(?<={re.escape(piece[0])})(?={re.escape(piece[1:])})" for piece in spelled)
            splits.append(pre_tokenizers.Split(Regex(cuts), "isolated"))
    return splits


def _is_reserved(piece: str, kind: int) -> bool:
    return kind in (UNKNOWN, CONTROL, BYTE) or (kind == USER_DEFINED and looks_like_marker(piece))


def _merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    """List the pairs that make each piece, best piece first, as SentencePiece would join them."""
    parts = {piece for piece, kind in zip(model.pieces, model.types, strict=True) if kind == NORMAL}
    index = {piece: number for number, piece in enumerate(model.pieces)}
    merges: list[tuple[str, str]] = []
    for number in sorted(range(len(model.pieces)), key=lambda number: (-model.scores[number], number)):
        piece = model.pieces[number]
        if piece not in parts:
            continue
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [pair for pair in pairs if pair[0] in parts and pair[1] in parts]
        merges += sorted(known, key=lambda pair: (index[pair[0]], index[pair[1]]))
    return merges
