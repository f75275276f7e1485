"""Read the scalars of a TensorBoard event file without tensorboard.

    record := length (8 bytes), checksum (4), Event (length bytes), checksum (4)
    Event  := step (field 2, varint), summary (field 5) := value (1) := tag (1, text), simple_value (2, float)
              or tensor (8) := float_val (5), tensor_content (4)

A file that ends in the middle of a record, as after a crash, gives the records before.
"""

import struct
from collections import defaultdict
from collections.abc import Iterator
from typing import BinaryIO

_MAX_RECORD = 16 << 20
_MAX_SCALARS = 200_000
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5
_NAMES = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate", "eval_loss": "eval_loss"}


def event_lines(file: BinaryIO) -> list[str]:
    """Return one line per step with its scalars, in the form of printed training logs."""
    steps: dict[int, dict[str, float]] = defaultdict(dict)
    for number, (step, tag, value) in enumerate(scalars(file)):
        if number >= _MAX_SCALARS:
            break
        steps[step][_name(tag)] = value
    return [
        f"{{'step': {step}, {', '.join(f'{name!r}: {value!r}' for name, value in sorted(found.items()))}}}"
        for step, found in sorted(steps.items())
    ]


def _name(tag: str) -> str:
    tail = tag.rpartition("/")[2]
    if tag.startswith(("eval", "val")) and tail == "loss":
        return "eval_loss"
    return _NAMES.get(tail, tag)


def scalars(file: BinaryIO) -> Iterator[tuple[int, str, float]]:
    """Yield the step, tag and value of every scalar."""
    while len(header := file.read(12)) == 12:
        (length,) = struct.unpack("<Q", header[:8])
        if length > _MAX_RECORD:
            return
        record = file.read(length + 4)
        if len(record) < length + 4:
            return
        yield from _event(record[:length])


def _event(data: bytes) -> Iterator[tuple[int, str, float]]:
    fields = dict(_fields(data))
    step = fields.get(2, 0)
    summary = fields.get(5)
    if not isinstance(step, int) or not isinstance(summary, bytes):
        return
    for number, value in _fields(summary):
        if number == 1 and isinstance(value, bytes):
            parts = dict(_fields(value))
            tag, scalar = parts.get(1), parts.get(2)
            if scalar is None and isinstance(tensor := parts.get(8), bytes):
                scalar = _tensor_value(tensor)
            if isinstance(tag, bytes) and isinstance(scalar, float):
                yield step, tag.decode("utf-8", "replace"), scalar


def _tensor_value(data: bytes) -> float | None:
    parts = dict(_fields(data))
    raw = parts.get(5) if isinstance(parts.get(5), bytes) else parts.get(4)
    if isinstance(parts.get(5), float):
        return float(parts[5])
    return struct.unpack("<f", raw)[0] if isinstance(raw, bytes) and len(raw) == 4 else None


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yield the number and the value of each field of a protobuf message; stop at anything malformed."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
        elif kind == _BYTES:
            length, at = _varint(data, at)
            if length > len(data) - at:
                return
            yield number, data[at : at + length]
            at += length
        elif kind in (_DOUBLE, _FLOAT):
            size, form = (8, "<d") if kind == _DOUBLE else (4, "<f")
            if len(data) - at < size:
                return
            yield number, struct.unpack_from(form, data, at)[0]
            at += size
        else:
            return


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            break
        shift += 7
    return value, at
