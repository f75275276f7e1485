"""Read SentencePiece `.model` files and rebuild them as `tokenizers.Tokenizer` with the same ids."""

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tunewell.core.errors import UserError
from tunewell.core.files import read_bytes
from tunewell.core.protobuf import read_fields
from tunewell.data.tokenizers.parts import add_tokens, looks_like_marker, steps_of

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_UNIGRAM, _BPE = 1, 2


@dataclass
class SentencePieceModel:
    """The fields of a SentencePiece file that determine ids."""

    pieces: list[str] = field(default_factory=list[str])
    scores: list[float] = field(default_factory=list[float])
    types: list[int] = field(default_factory=list[int])
    is_bpe: bool = False
    byte_fallback: bool = False
    names: dict[str, str] = field(
        default_factory=lambda: {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    )
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    refusal: str | None = None
    """The reason why this file cannot be rebuilt, as the end of a sentence, or None if it can be rebuilt."""

    def special_tokens(self) -> dict[str, str]:
        """Return the bos, eos, unk and pad pieces that are control or unknown pieces of this vocabulary."""
        kinds = dict(zip(self.pieces, self.types, strict=True))
        return {name: piece for name, piece in self.names.items() if kinds.get(piece) in (CONTROL, UNKNOWN)}


def read_model(path: Path) -> SentencePieceModel:
    """Read a `.model` file; raise UserError if it is damaged or not a SentencePiece model."""
    try:
        model = _parse(read_bytes(path))
    except (ValueError, struct.error, IndexError):
        raise UserError(
            f"`{path.name}` is not a SentencePiece model, or it is truncated",
            where=str(path),
            fix="use the `tokenizer.json` of the model, or download the file again",
        ) from None
    if model.refusal:
        raise UserError(f"`{path.name}` {model.refusal}", where=str(path), fix="use a `tokenizer.json` instead")
    return model


def _parse(data: bytes) -> SentencePieceModel:
    model = SentencePieceModel()
    trainer, normalizer = b"", b""
    for number, value in read_fields(data):
        if number == 1 and isinstance(value, bytes):
            piece = dict(read_fields(value))
            model.pieces.append(_bytes(piece.get(1, b"")).decode("utf-8"))
            model.scores.append(struct.unpack("<f", _bytes(piece.get(2, b"\0\0\0\0")))[0])
            model.types.append(int(piece.get(3, NORMAL)))
        elif number == 2:
            trainer = _bytes(value)
        elif number == 3:
            normalizer = _bytes(value)
    # Both fields follow the pieces in the file. If one is missing, the file is truncated.
    if not model.pieces or not trainer or not normalizer:
        raise ValueError("truncated")
    _read_specs(model, dict(read_fields(trainer)), dict(read_fields(normalizer)))
    return model


def _read_specs(model: SentencePieceModel, trainer: dict[int, int | bytes], normalizer: dict[int, int | bytes]) -> None:
    kind = trainer.get(3, _UNIGRAM)
    model.is_bpe = kind == _BPE
    model.byte_fallback = bool(trainer.get(35, 0)) or BYTE in model.types
    for number, name in ((45, "unk_token"), (46, "bos_token"), (47, "eos_token"), (48, "pad_token")):
        if number in trainer:
            model.names[name] = _bytes(trainer[number]).decode("utf-8")
    model.charsmap = _bytes(normalizer.get(2, b""))
    model.add_dummy_prefix = bool(normalizer.get(3, 1))
    model.remove_extra_whitespaces = bool(normalizer.get(4, 1))
    if kind not in (_UNIGRAM, _BPE):
        model.refusal = "is a word or character model; only Unigram and BPE models are supported"
    elif trainer.get(24, 0):
        model.refusal = "marks spaces after words, which is not supported"
    elif not normalizer.get(5, 1):
        model.refusal = "does not escape spaces, which is not supported"
    elif UNUSED in model.types:
        model.refusal = "has unused pieces, which is not supported"


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return value
    raise ValueError("expected bytes, found a number")


_SPACE = "▁"

AfterMarkers = Literal["nothing", "space"]
"""Whether text after a marker also gets the dummy space: `nothing` as in transformers, `space` as in llama.cpp."""
# A comment in the pattern identifies a tokenizer that was rebuilt here.
_DUMMY_SPACE_MARKS = {"nothing": "(?#dummy space)", "space": "(?#dummy space, also behind markers)"}


def build_tokenizer(model: SentencePieceModel, *, after_markers: AfterMarkers = "nothing") -> Tokenizer:
    """Return a tokenizer with the ids of `sentencepiece` for plain text, and markers as single tokens."""
    vocabulary = {piece: index for index, piece in enumerate(model.pieces)}
    if len(vocabulary) != len(model.pieces):
        raise UserError("the vocabulary contains a piece twice", fix="use a `tokenizer.json` instead")
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
    # Markers are searched in the normalised text, so that spaces next to a marker do not change.
    add_markers(backend, marker_tokens(model.pieces, model.types, is_normalized=True))
    return backend


def marker_tokens(pieces: Sequence[str], types: Sequence[int], *, is_normalized: bool) -> list[AddedToken]:
    """Return the pieces that are matched as a whole, before the other text is split."""
    return [
        AddedToken(piece, special=kind != USER_DEFINED or looks_like_marker(piece), normalized=is_normalized)
        for piece, kind in zip(pieces, types, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


def add_markers(backend: Tokenizer, tokens: Sequence[AddedToken]) -> None:
    """Add tokens to a rebuilt tokenizer so that no dummy space is added before them."""
    add_tokens(backend, tokens)
    contents = [token.content for token in backend.get_added_tokens_decoder().values()]
    steps = steps_of(backend.normalizer)
    for index, step in enumerate(steps):
        if mark := _dummy_space_mark(step):
            sequence = backend.normalizer
            assert isinstance(sequence, normalizers.Sequence)
            parts = [sequence[i] for i in range(len(steps))]
            parts[index] = _dummy_space(contents, mark)
            backend.normalizer = normalizers.Sequence(parts)
            # Adding the markers again makes the library normalise them with the new normaliser.
            add_tokens(backend, list(backend.get_added_tokens_decoder().values()))


def is_rebuilt(backend: Tokenizer) -> bool:
    """Return True if a tokenizer was rebuilt by this module, even if it has been saved and loaded since."""
    return any(_dummy_space_mark(step) for step in steps_of(backend.normalizer))


def _dummy_space_mark(step: dict[str, Any]) -> str | None:
    pattern = step.get("pattern", {}).get("Regex", "") if step.get("type") == "Replace" else ""
    return next((mark for mark in _DUMMY_SPACE_MARKS.values() if pattern.startswith(mark)), None)


def _dummy_space(contents: Sequence[str], mark: str) -> normalizers.Normalizer:
    """Return the step that adds a space before text that is not a marker, and optionally after each marker."""
    # Sort by length, longest first, because an alternation takes the first match.
    markers = [re.escape(text) for text in sorted(contents, key=len, reverse=True)]
    where = r"\A"
    if mark == _DUMMY_SPACE_MARKS["space"] and markers:
        # Checking the last character first avoids trying a thousand markers at every position.
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
    """Return splits that no piece can cross. They do not change ids, but they let the library cache words."""
    splits: list[pre_tokenizers.PreTokenizer] = []
    kinds = list(zip(model.pieces, model.types, strict=True))
    if not any(re.search(f"[^{_SPACE}]{_SPACE}", piece) for piece, kind in kinds if kind in (NORMAL, USER_DEFINED)):
        splits.append(pre_tokenizers.Split(Regex(f"{_SPACE}*[^{_SPACE}]+|{_SPACE}+"), "isolated"))
    if not model.is_bpe:
        # The library's Unigram model would match `<s>` or `<0x41>` in plain text; SentencePiece does not.
        spelled = [piece for piece, kind in kinds if len(piece) > 1 and _is_reserved(piece, kind)]
        if spelled:
            cuts = "|".join(f"(?<={re.escape(piece[0])})(?={re.escape(piece[1:])})" for piece in spelled)
            splits.append(pre_tokenizers.Split(Regex(cuts), "isolated"))
    return splits


def _is_reserved(piece: str, kind: int) -> bool:
    return kind in (UNKNOWN, CONTROL, BYTE) or (kind == USER_DEFINED and looks_like_marker(piece))


def _merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    """Return the pairs that form each piece, best piece first, in the order in which SentencePiece merges them."""
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
