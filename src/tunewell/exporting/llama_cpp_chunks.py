"""Rewrite a GGUF file tensor by tensor, rounding rows with llama.cpp's own functions."""

import math
import mmap
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tunewell.core.errors import UserError
from tunewell.core.gguf import TensorEntry, read_tensor_table
from tunewell.core.need import need
from tunewell.exporting.llama_cpp_calls import Calls
from tunewell.exporting.llama_cpp_mixtures import Mixture

# Numbers rounded in one call: large enough that Python's share is nothing, small enough to feed several threads.
_NUMBERS_AT_ONCE = 1 << 18
_ALIGNMENT = 32
_START = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of fields
_QUANTISATION_VERSION = 2
_NEW_FIELDS = ("general.file_type", "general.quantization_version")
# Fields that describe the file and not the model: how it is aligned, and which part of several it was.
_LEFT_OUT = frozenset({*_NEW_FIELDS, "general.alignment", "split.no", "split.count", "split.tensors.count"})
_UINT32, _STRING, _ARRAY = 4, 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def write_quantized(source: Path, target: Path, plan: Mixture, *, calls: Calls, file_type: int, threads: int) -> None:
    """Write `source` with every tensor as the plan says, one tensor in memory at a time.

    Raises UserError for a file that is cut short and for a number that is not finite.
    """
    gguf = need("gguf", extra="export", purpose="quantising a GGUF file")
    kinds = {name: gguf.GGMLQuantizationType[kind] for name, kind in plan.types.items()}
    table = read_tensor_table(source)
    with target.open("wb") as file, ThreadPoolExecutor(threads) as pool:
        file.write(_header(source, table, kinds, file_type))
        for entry in table:
            rows = _rows(source, entry)
            if entry.type_number == kinds[entry.name]:
                file.write(rows.data)
            else:
                for part in _rounded(entry, rows, kinds[entry.name], calls, pool):
                    file.write(part)
            file.write(b"\0" * (_aligned(file.tell()) - file.tell()))


def _header(source: Path, table: list[TensorEntry], kinds: dict[str, Any], file_type: int) -> bytes:
    """Make everything in front of the numbers: the fields as they stood, but for a few, and the new table."""
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        fields = [raw for name, raw in _fields(data) if name not in _LEFT_OUT]
        magic, version, *_ = _START.unpack_from(data)
    for name, value in zip(_NEW_FIELDS, (file_type, _QUANTISATION_VERSION), strict=True):
        fields.append(_text(name) + struct.pack("<II", _UINT32, value))
    places, offset = [], 0
    for entry in table:
        kind, shape = kinds[entry.name], entry.shape[::-1]
        place = struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        places.append(_text(entry.name) + place)
        offset += _aligned(_num_bytes(entry.shape, kind))
    header = _START.pack(magic, version, len(table), len(fields)) + b"".join((*fields, *places))
    return header.ljust(_aligned(len(header)), b"\0")


def _fields(data: mmap.mmap) -> Iterator[tuple[str, bytes]]:
    """Cut the fields of a file that was read before into their names and all their bytes."""
    at = _START.size
    for _ in range(_START.unpack_from(data)[3]):
        after = _end(data, at, _STRING)
        (kind,) = struct.unpack_from("<I", data, after)
        end = _end(data, after + 4, kind)
        yield data[at + 8 : after].decode("utf-8", "surrogateescape"), data[at:end]
        at = end


def _end(data: mmap.mmap, at: int, kind: int) -> int:
    """Find where a value ends."""
    if kind == _STRING:
        return at + 8 + struct.unpack_from("<Q", data, at)[0]
    if kind != _ARRAY:
        return at + _SIZES[kind]
    inner, length = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner in _SIZES:
        return at + length * _SIZES[inner]
    for _ in range(length):
        at = _end(data, at, inner)
    return at


def _rows(source: Path, entry: TensorEntry) -> np.ndarray:
    """Map the bytes of a tensor, a row for a row."""
    num_bytes = _num_bytes(entry.shape, entry.type_number)
    if entry.offset + num_bytes > source.stat().st_size:
        raise UserError(f"`{source.name}` is cut short: `{entry.name}` ends behind its end", where=str(source))
    num_rows = math.prod(entry.shape[:-1])
    return np.memmap(source, np.uint8, "r", offset=entry.offset, shape=(num_rows, num_bytes // max(1, num_rows)))


def _rounded(
    entry: TensorEntry, rows: np.ndarray, kind: Any, calls: Calls, pool: ThreadPoolExecutor
) -> Iterator[bytes]:
    """Round a tensor some rows at a time, in as many threads as the pool has; ctypes lets go of Python meanwhile."""
    from gguf import GGMLQuantizationType, dequantize

    width = entry.shape[-1]
    step = max(1, _NUMBERS_AT_ONCE // width)
    before = GGMLQuantizationType(entry.type_number)

    def round_rows(start: int) -> bytes:
        numbers = np.ascontiguousarray(dequantize(rows[start : start + step], before), np.float32)
        if not np.isfinite(numbers).all():
            raise UserError(
                f"the tensor `{entry.name}` holds a number that is not finite",
                fix="the model is broken: export an earlier checkpoint",
            )
        made = np.empty(_num_bytes(numbers.shape, kind), np.uint8)
        order = (numbers.ctypes.data, made.ctypes.data, 0, len(numbers), width, None)
        if (num := calls.do.ggml_quantize_chunk(int(kind), *order)) != made.nbytes:
            raise AssertionError(f"{entry.name}: llama.cpp wrote {num} bytes and not {made.nbytes}")
        return made.tobytes()

    return pool.map(round_rows, range(0, len(rows), step))


def _num_bytes(shape: tuple[int, ...], kind: int) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    return math.prod(shape) // block * size


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
