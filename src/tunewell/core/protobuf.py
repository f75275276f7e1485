"""Read the fields of a protobuf message without a schema."""

from collections.abc import Iterator

_FIXED_BYTES = {1: 8, 5: 4}


def read_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a protobuf message as (field number, value); a value is an int or bytes.

    Raise ValueError or IndexError where the message is malformed.
    """
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
        elif (size := _FIXED_BYTES.get(wire, 0)) == 0:
            raise ValueError("unknown wire type")
        if size > len(data) - at:
            raise ValueError("truncated")
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
