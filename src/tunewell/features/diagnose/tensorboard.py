"""Read the scalars of a TensorBoard event file without tensorboard.

    record := length (8 bytes), checksum (4), Event (length bytes), checksum (4)
    Event  := step (field 2, varint), summary (field 5) := value (1) := tag (1, text), simple_value (2, float)
              or tensor (8) := float_val (5), tensor_content (4)

A file that ends in the middle of a record, as after a crash, gives the records before.
"""

import struct
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, BinaryIO

from tunewell.core.protobuf import read_fields

_MAX_RECORD = 16 << 20
_MAX_SCALARS = 200_000
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
        event = _fields(record[:length])
        step = event.get(2, 0)
        for _, value in _all_fields(event.get(5)):
            parts = _fields(value)
            tag, scalar = parts.get(1), parts.get(2)
            if scalar is None:
                tensor = _fields(parts.get(8))
                scalar = tensor.get(5, tensor.get(4))
            if isinstance(step, int) and isinstance(tag, bytes) and isinstance(scalar, bytes) and len(scalar) == 4:
                yield step, tag.decode("utf-8", "replace"), struct.unpack("<f", scalar)[0]


def _fields(data: Any) -> dict[int, Any]:
    """Return the fields of a protobuf message up to anything malformed; of several with one number, the last."""
    return dict(_all_fields(data))


def _all_fields(data: Any) -> Iterator[tuple[int, int | bytes]]:
    with suppress(ValueError, IndexError):
        yield from read_fields(data if isinstance(data, bytes) else b"")
