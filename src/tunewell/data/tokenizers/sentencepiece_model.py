"""Read a SentencePiece `.model` file: a protobuf message, of which a few fields decide about ids."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tunewell.core.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_UNIGRAM, _BPE = 1, 2


@dataclass
class SentencePieceModel:
    """The parts of the file that decide about ids."""

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    is_bpe: bool = False
    byte_fallback: bool = False
    names: dict[str, str] = field(
        default_factory=lambda: {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    )
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    refusal: str | None = None
    """Why this file cannot be rebuilt, as the end of a sentence."""

    def special_tokens(self) -> dict[str, str]:
        """Name the bos, eos, unk and pad pieces that this vocabulary has as such."""
        kinds = dict(zip(self.pieces, self.types, strict=True))
        return {name: piece for name, piece in self.names.items() if kinds.get(piece) in (CONTROL, UNKNOWN)}


def read_model(path: Path) -> SentencePieceModel:
    """Read a `.model` file; UserError when it is damaged or something else."""
    try:
        model = _parse(path.read_bytes())
    except (ValueError, struct.error, IndexError):
        raise UserError(
            f"`{path.name}` is not a SentencePiece model, or it is cut short",
            where=str(path),
            fix="give the model's `tokenizer.json`, or download the file again",
        ) from None
    if model.refusal:
        raise UserError(f"`{path.name}` {model.refusal}", where=str(path), fix="give a `tokenizer.json` instead")
    return model


def _parse(data: bytes) -> SentencePieceModel:
    model = SentencePieceModel()
    trainer, normalizer = b"", b""
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            piece = dict(_fields(value))
            model.pieces.append(_bytes(piece.get(1, b"")).decode("utf-8"))
            model.scores.append(struct.unpack("<f", _bytes(piece.get(2, b"\0\0\0\0")))[0])
            model.types.append(int(piece.get(3, NORMAL)))
        elif number == 2:
            trainer = _bytes(value)
        elif number == 3:
            normalizer = _bytes(value)
    # Both follow the pieces in the file: without them it was cut, and the vocabulary with it.
    if not model.pieces or not trainer or not normalizer:
        raise ValueError("cut short")
    _read_specs(model, dict(_fields(trainer)), dict(_fields(normalizer)))
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
        model.refusal = "is a word or character model; tunewell reads Unigram and BPE models"
    elif trainer.get(24, 0):
        model.refusal = "marks spaces behind words, which tunewell does not rebuild"
    elif not normalizer.get(5, 1):
        model.refusal = "keeps spaces unescaped, which tunewell does not rebuild"
    elif UNUSED in model.types:
        model.refusal = "has pieces that are switched off, which tunewell does not rebuild"


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return value
    raise ValueError("a number where text belongs")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Walk over one protobuf message: field number and value, numbers as int and all else as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError("unknown wire type")
        if size > len(data) - at:
            raise ValueError("cut short")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("number too long")
