"""Read the scalars of a TensorBoard event file without tensorboard.

    record := length (8 bytes), checksum (4), Event (length bytes), checksum (4)
    Event  := step (field 2, varint), summary (field 5) := value (1) := tag (1, text), simple_value (2, float)
              or tensor (8) := float_val (5), tensor_content (4)

A file that ends in the middle of a record, as after a crash, gives the records before.
"""

import struct
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from typing import Any, BinaryIO

_MAX_RECORD = 16 << 20
_MAX_SCALARS = 200_000
_VARINT, _BYTES = 0, 2
_SIZES = {1: 8, 5: 4}
"""Bytes of a double and of a float."""
_NAMES = ("loss", "grad_norm", "learning_rate", "eval_loss")


def event_lines(file: BinaryIO) -> list[str]:
    """Return one line per step with its scalars, in the form of printed training logs."""
    steps: dict[int, dict[str, float]] = defaultdict(dict)
    for step, tag, value in islice(scalars(file), _MAX_SCALARS):
        steps[step][_name(tag)] = value
    return [str({**dict(sorted(found.items())), "step": step}) for step, found in sorted(steps.items())]


def _name(tag: str) -> str:
    tail = tag.rpartition("/")[2]
    if tag.startswith(("eval", "val")) and tail == "loss":
        return "eval_loss"
    return tail if tail in _NAMES else tag


def scalars(file: BinaryIO) -> Iterator[tuple[int, str, float]]:
    """Yield the step, tag and value of every scalar."""
    while len(header := file.read(12)) == 12:
        (length,) = struct.unpack("<Q", header[:8])
        if length > _MAX_RECORD or len(record := file.read(length + 4)) < length + 4:
            return
        event = dict(_fields(record[:length]))
        step = event.get(2, 0)
        for _, value in _fields(_bytes(event.get(5))):
            parts = dict(_fields(_bytes(value)))
            tag, scalar = parts.get(1), parts.get(2)
            if scalar is None:
                tensor = dict(_fields(_bytes(parts.get(8))))
                scalar = tensor.get(5, tensor.get(4))
            if isinstance(step, int) and isinstance(tag, bytes) and isinstance(scalar, bytes) and len(scalar) == 4:
                yield step, tag.decode("utf-8", "replace"), struct.unpack("<f", scalar)[0]


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else b""


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and the integer or the bytes of each field of a protobuf message; stop at anything malformed."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        size = _SIZES.get(kind, len(data))
        if kind == _BYTES:
            size, at = _varint(data, at)
        if size > len(data) - at:
            return
        yield number, data[at : at + size]
        at += size


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
