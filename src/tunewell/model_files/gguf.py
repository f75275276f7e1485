"""Read the header of a GGUF file: the metadata and the tensor table, but not the tensors."""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import open_file, read_data

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Type number -> struct code. Type 8 is a string, type 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# Real files stay far below these limits: the largest vocabularies have about 300,000 tokens and 500,000 merges.
_MAX_PAIRS = 100_000
_MAX_ITEMS = 20_000_000
_MAX_KEY_BYTES = 65_535
_MAX_DEPTH = 4
_MAX_DIMENSIONS = 8
_MAX_VALUES = 1 << 42
_MAX_ALIGNMENT = 1 << 20
_BLOCKS = {int(kind): tuple(sizes) for kind, sizes in read_data(__file__, "ggml_types.toml").items()}
"""ggml type number -> values and bytes of a block."""
_ALIGNMENT = 32
"""Default alignment of tensors in bytes."""


@dataclass(frozen=True)
class TensorEntry:
    """One entry of the tensor table."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as in torch."""
    type_number: int
    """The ggml type number."""
    offset: int
    """Position in bytes from the beginning of the file."""


def read_metadata(path: Path) -> dict[str, Any]:
    """Return all metadata of a GGUF file; raise UserError if it is missing, truncated or not GGUF."""
    return _read(path)[0]


def read_header(path: Path) -> tuple[dict[str, Any], list[TensorEntry]]:
    """Return the metadata and the tensor table, read in one pass."""
    metadata, _, table = _read(path, is_table_wanted=True)
    return metadata, table


def read_tensor_table(path: Path) -> list[TensorEntry]:
    """Return the tensor table of a GGUF file, without checking that the tensors are complete."""
    return _read(path, is_table_wanted=True)[2]


def tensor_count(path: Path) -> int:
    """Return the number of tensors according to the header. It is 0 for a file with only a vocabulary."""
    return _read(path)[1]


def _read(path: Path, *, is_table_wanted: bool = False) -> tuple[dict[str, Any], int, list[TensorEntry]]:
    try:
        with open_file(path) as file:
            if path.stat().st_size == 0:
                raise _Damaged("is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                reader = _Reader(data)
                pairs, num_tensors = reader.read()
                return pairs, num_tensors, reader.table(pairs, num_tensors) if is_table_wanted else []
    except _Damaged as damage:
        raise UserError(f"`{path.name}` {damage}", where=str(path), fix="download or convert the model again") from None
    except OSError as error:
        raise UserError(f"`{path.name}` cannot be read: {error.strerror}", where=str(path)) from None


class _Damaged(Exception):
    """Raised for a damaged file. The message continues a sentence that begins with the file name."""


def _require_no_overlap(table: list[tuple[str, tuple[int, ...], int, int]]) -> None:
    """Raise _Damaged if two tensors share bytes. A tensor of an unknown type counts as one byte."""
    end, before = 0, ""
    for name, shape, kind, offset in sorted(table, key=lambda entry: entry[3]):
        if offset < end:
            raise _Damaged(f"is damaged: the tensors `{before[:80]}` and `{name[:80]}` overlap")
        num_values, num_bytes = _BLOCKS.get(kind, (math.prod(shape), 1))
        end, before = offset + math.prod(shape) // num_values * num_bytes, name


class _Reader:
    """Reads the header in one pass. Every length is compared with the rest of the file before it is used."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.size = len(data)
        self.at = 0

    def read(self) -> tuple[dict[str, Any], int]:
        if self.data[:4] != _MAGIC:
            raise _Damaged("is not a GGUF file: the first bytes are not `GGUF`")
        self.at = 4
        version = self.scalar("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big")
            if swapped in _VERSIONS:
                raise _Damaged("is big-endian, which tunewell cannot read")
            raise _Damaged(f"has GGUF version {version}; tunewell reads versions 2 and 3")
        num_tensors, num_pairs = self.scalar("Q"), self.scalar("Q")
        if num_pairs > _MAX_PAIRS or num_tensors > _MAX_ITEMS:
            raise _Damaged(f"is damaged: the header declares {num_pairs:,} metadata keys and {num_tensors:,} tensors")
        pairs: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self.strings(1, _MAX_KEY_BYTES)[0]
            if key in pairs:
                raise _Damaged(f"is damaged: the metadata key `{key[:80]}` occurs twice")
            pairs[key] = self.value(self.scalar("I"))
        return pairs, num_tensors

    def table(self, pairs: dict[str, Any], num_tensors: int) -> list[TensorEntry]:
        """Read the table after the metadata; the tensors begin at the next aligned offset."""
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        names: set[str] = set()
        for _ in range(num_tensors):
            name = self.strings(1, _MAX_KEY_BYTES)[0]
            num_dimensions = self.scalar("I")
            if num_dimensions > _MAX_DIMENSIONS:
                raise _Damaged(f"is damaged: a tensor has {num_dimensions:,} dimensions")
            shape = tuple(self.scalar("Q") for _ in range(num_dimensions))[::-1]
            if name in names:
                raise _Damaged(f"is damaged: two tensors have the name `{name[:80]}`")
            if 0 in shape:
                raise _Damaged(f"is damaged: the tensor `{name[:80]}` has a dimension of 0")
            if math.prod(shape) > _MAX_VALUES:
                raise _Damaged(f"is damaged: the tensor `{name[:80]}` has {math.prod(shape):,} values")
            names.add(name)
            found.append((name, shape, self.scalar("I"), self.scalar("Q")))
        alignment = pairs.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT:
            raise _Damaged(f"is damaged: the alignment of the tensors is {alignment!r} bytes")
        start = -(-self.at // alignment) * alignment
        _require_no_overlap(found)
        return [TensorEntry(name, shape, kind, start + offset) for name, shape, kind, offset in found]

    def take(self, num_bytes: int) -> int:
        start = self.at
        if num_bytes > self.size - start:
            raise _Damaged("is truncated: the header ends in the middle of a value")
        self.at = start + num_bytes
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.take(struct.calcsize(f"<{code}")))[0]

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.strings(1, self.size)[0]
        if kind == _ARRAY and depth < _MAX_DEPTH:
            return self.array(depth)
        raise _Damaged(f"is damaged: a metadata value has the unknown type {kind}")

    def array(self, depth: int) -> list[Any]:
        kind, length = self.scalar("I"), self.scalar("Q")
        if length > _MAX_ITEMS:
            raise _Damaged(f"is damaged: a metadata list has {length:,} values")
        if kind == _STRING:
            return self.strings(length, self.size)
        if code := _SCALARS.get(kind):
            layout = f"<{length}{code}"
            return list(struct.unpack_from(layout, self.data, self.take(struct.calcsize(layout))))
        return [self.value(kind, depth + 1) for _ in range(length)]

    def strings(self, count: int, longest: int) -> list[str]:
        """Read length-prefixed strings in one loop, because a vocabulary has hundreds of thousands of them."""
        data, size, at = self.data, self.size, self.at
        length_at = struct.Struct("<Q").unpack_from
        texts: list[str] = []
        try:
            for _ in range(count):
                (length,) = length_at(data, at)
                end = at + 8 + length
                if end > size or length > longest:
                    raise _Damaged("is truncated or damaged: a text in the header is longer than the file")
                texts.append(data[at + 8 : end].decode("utf-8", "surrogateescape"))
                at = end
        except struct.error:
            raise _Damaged("is truncated: the header ends in the middle of a value") from None
        self.at = at
        return texts
