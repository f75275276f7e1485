"""Quantise a GGUF file with llama.cpp's own arithmetic: its library, its program, or its function for one tensor."""

import json
import math
import mmap
import os
import re
import shutil
import struct
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from tunewell.core.errors import UserError
from tunewell.core.files import disk_full_as_user_error, require_disk_space, sync_folder
from tunewell.core.gguf import TensorEntry, read_metadata, read_tensor_table
from tunewell.core.optional import import_optional
from tunewell.hardware.facts import num_cores
from tunewell.inference.llama_cpp.bindings import Bindings
from tunewell.inference.llama_cpp.library import LlamaLibrary, find_llama

# Choose how each tensor of a quantised file is stored, as llama.cpp chooses it: more bits where fewer hurt most.

QuantizedKind = Literal["f16", "q8_0", "q4_k_m", "q5_k_m", "q6_k"]

_IN_LAYER = re.compile(r"blk\.(\d+)\.")
# The families whose 80-layer model is the one of 70 billion parameters.
_FAMILIES_OF_70B = frozenset({"llama", "qwen2", "olmo", "deci"})


@dataclass(frozen=True)
class Mixture:
    """How every tensor of a file will be stored."""

    types: dict[str, str]
    """By tensor, in the order of the source."""
    num_bytes: int
    """Of the tensors, without the header."""
    num_odd: int
    """Tensors whose rows fill no block of the type meant for them, and have another one."""


def file_type(kind: str) -> int:
    """Give llama.cpp's number of a kind; raise UserError for one that is not known here."""
    if kind not in get_args(QuantizedKind):
        known = ", ".join(f"`{name}`" for name in get_args(QuantizedKind))
        raise UserError(f"`{kind}` is not a supported quantisation type", fix=f"use one of {known}")
    return _facts()["kinds"][kind]["file_type"]


def plan_mixture(source: Path, kind: str) -> Mixture:
    """Plan how each tensor of a GGUF file is stored as `kind`, and count the bytes; nothing is written."""
    gguf = import_optional("gguf", extra="export", purpose="quantising a GGUF file")
    file_type(kind)
    table, meta = read_tensor_table(source), read_metadata(source)
    wanted = _wanted(table, meta, _facts()["kinds"][kind])
    blocks = {member.name: gguf.GGML_QUANT_SIZES[member] for member in gguf.GGML_QUANT_SIZES}
    types, num_bytes, num_odd = {}, 0, 0
    for entry in table:
        if (meant := wanted.get(entry.name)) is None:
            types[entry.name] = gguf.GGMLQuantizationType(entry.type_number).name
        else:
            types[entry.name] = _fitting(entry.shape[-1], meant, blocks)
            num_odd += types[entry.name] != meant.type
        block, size = blocks[types[entry.name]]
        num_bytes += math.prod(entry.shape) // block * size
    return Mixture(types, num_bytes, num_odd)


def num_experts(source: Path) -> int:
    """Count the experts of a model; 0 for most."""
    meta = read_metadata(source)
    return int(meta.get(f"{meta.get('general.architecture')}.expert_count", 0))


@cache
def _facts() -> dict[str, Any]:
    return json.loads(files("tunewell.export.gguf").joinpath("mixtures.json").read_text(encoding="utf-8"))


class _Meant(NamedTuple):
    """The type meant for a tensor, and the ones that stand in where its rows do not divide into blocks."""

    type: str
    stand_in: str
    measure: str
    """The type whose blocks the rows have to fill, or the stand-in is taken."""


def _wanted(table: list[TensorEntry], meta: dict[str, Any], kind: dict[str, Any]) -> dict[str, _Meant]:
    """Give what is meant for each tensor that is quantised; the others stay as they are."""
    facts = _facts()
    quantised = [entry.name for entry in sorted(table, key=_place) if _is_quantised(entry)]
    values = [name for name in quantised if _is_value(name)]
    downs = [name for name in quantised if "ffn_down" in name]
    num_layers = int(meta.get(f"{meta.get('general.architecture')}.block_count", 0))
    more = {name for at, name in enumerate(values) if _suffers(at, len(values))}
    more |= {name for at, name in enumerate(downs) if _suffers(at, num_layers)}
    richer = facts["values_of_70b"] if _is_70b(meta, num_layers) else {}
    heads = {"output.weight"} if any(entry.name == "output.weight" for entry in table) else set(facts["embeddings"])
    found = {}
    for name in quantised:
        if name in heads:
            found[name] = _Meant(kind["output"], facts["output_of_odd_width"], measure=kind["type"])
            continue
        chosen = kind["more"] if name in more else kind["type"]
        chosen = richer.get(chosen, chosen) if _is_value(name) else chosen
        found[name] = _Meant(chosen, facts["odd_width"].get(chosen, facts["odder_width"]), measure=chosen)
    return found


def _is_quantised(entry: TensorEntry) -> bool:
    """Tell whether a tensor is a matrix that may lose precision."""
    # A dimension of 1 at the end does not count, as ggml has it.
    is_matrix = len(entry.shape) >= 2 and math.prod(entry.shape[:-1]) > 1
    return is_matrix and entry.name.endswith("weight") and not any(part in entry.name for part in _facts()["kept"])


def _is_value(name: str) -> bool:
    return any(part in name for part in _facts()["value_tensors"])


def _suffers(layer: int, num_layers: int) -> bool:
    """Tell whether a layer is in the first or last eighth, or every third between."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _is_70b(meta: dict[str, Any], num_layers: int) -> bool:
    family = meta.get("general.architecture")
    heads = [meta.get(f"{family}.attention.head_count{part}") for part in ("", "_kv")]
    is_grouped = family != "llama" or heads[0] != heads[1]
    return num_layers == _facts()["layers_of_70b"] and family in _FAMILIES_OF_70B and is_grouped


def _place(entry: TensorEntry) -> tuple[int, str]:
    """Order tensors by layer, then by name; what belongs to no layer comes first."""
    found = _IN_LAYER.match(entry.name)
    return (int(found[1]) if found else -1, entry.name)


def _fitting(width: int, meant: _Meant, blocks: dict[str, tuple[int, int]]) -> str:
    if width % blocks[meant.measure][0] == 0:
        return meant.type
    return meant.stand_in if width % blocks[meant.stand_in][0] == 0 else _facts()["odder_width"]


# Rewrite a GGUF file tensor by tensor, rounding rows with llama.cpp's own functions.

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


def write_quantized(
    source: Path, target: Path, plan: Mixture, *, bindings: Bindings, file_type: int, threads: int
) -> None:
    """Write `source` with every tensor as the plan says, one tensor in memory at a time.

    Raises UserError for a file that is cut short and for a number that is not finite.
    """
    gguf = import_optional("gguf", extra="export", purpose="quantising a GGUF file")
    kinds = {name: gguf.GGMLQuantizationType[kind] for name, kind in plan.types.items()}
    table = read_tensor_table(source)
    with target.open("wb") as file, ThreadPoolExecutor(threads) as pool:
        file.write(_header(source, table, kinds, file_type))
        for entry in table:
            rows = _rows(source, entry)
            if entry.type_number == kinds[entry.name]:
                file.write(rows.data)
            else:
                for part in _rounded(entry, rows, kinds[entry.name], bindings, pool):
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
        raise UserError(
            f"`{source.name}` is truncated: `{entry.name}` ends after the end of the file",
            where=str(source),
            fix="export it again",
        )
    num_rows = math.prod(entry.shape[:-1])
    return np.memmap(source, np.uint8, "r", offset=entry.offset, shape=(num_rows, num_bytes // max(1, num_rows)))


def _rounded(
    entry: TensorEntry, rows: np.ndarray, kind: Any, bindings: Bindings, pool: ThreadPoolExecutor
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
                f"the tensor `{entry.name}` is not finite: it contains NaN or infinity",
                fix="the model is broken: export an earlier checkpoint",
            )
        made = np.empty(_num_bytes(numbers.shape, kind), np.uint8)
        order = (numbers.ctypes.data, made.ctypes.data, 0, len(numbers), width, None)
        if (num := bindings.api.ggml_quantize_chunk(int(kind), *order)) != made.nbytes:
            raise AssertionError(f"{entry.name}: llama.cpp wrote {num} bytes instead of {made.nbytes}")
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


PROGRAM = "llama-quantize"
# Between tensors, and two fields that the source may not have.
_PADDING_BYTES = 1 << 20

Way = Callable[[Path, Path, str, int], None]


@dataclass(frozen=True)
class Quantized:
    """What was made, and by whom."""

    path: Path
    kind: str
    made_by: str
    num_bytes: int
    num_tensors: dict[str, int]
    """Counted by the type they are stored as."""
    num_odd: int
    """Tensors whose rows fill no block of the type meant for them, and are stored in more bits."""


def quantize(
    source: Path, target: Path, kind: str, *, library: LlamaLibrary | None = None, threads: int | None = None
) -> Quantized:
    """Store `source` (f32, f16 or bf16) as `f16`, `q8_0`, `q4_k_m`, `q5_k_m` or `q6_k`, whole or not at all.

    In order: `llama_model_quantize` of the library, the program `llama-quantize` on the PATH, the library's
    `ggml_quantize_chunk` with llama.cpp's own choice of types. The numbers are the same. Raises UserError for a source
    that is damaged or already quantised, and for a disk without room.
    """
    file_type(kind)
    plan = plan_mixture(source, kind)
    _refuse_quantized(source, plan)
    needed = plan.num_bytes + min(entry.offset for entry in read_tensor_table(source)) + _PADDING_BYTES
    require_disk_space(target.parent, needed)
    made_by, way = _choose_way(source, library, plan)
    staged = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with disk_full_as_user_error(target.parent, lambda: needed):
            way(source, staged, kind, threads or num_cores())
            with staged.open("rb+") as file:
                os.fsync(file.fileno())
        types = _types_in(staged)
        staged.replace(target)
    finally:
        staged.unlink(missing_ok=True)
    sync_folder(target.parent)
    return Quantized(target, kind, made_by, target.stat().st_size, dict(Counter(types.values())), plan.num_odd)


def _choose_way(source: Path, library: LlamaLibrary | None, plan: Mixture) -> tuple[str, Way]:
    library = library or find_llama()
    bindings = library.bindings
    if library.has_quantizer:
        return f"llama_model_quantize, {library.origin}", lambda *order: _by_library(bindings, *order)
    if program := shutil.which(PROGRAM):
        return PROGRAM, lambda *order: _by_program(program, *order)
    if bindings.has_all("ggml_quantize_chunk") and num_experts(source) <= 1:
        return (
            f"ggml_quantize_chunk, {library.origin}",
            lambda source, target, kind, threads: write_quantized(
                source, target, plan, bindings=bindings, file_type=file_type(kind), threads=threads
            ),
        )
    raise UserError(
        "no quantiser for this model was found",
        where=str(library.path),
        fix=f"add llama.cpp's `{PROGRAM}` to the PATH; mixture-of-experts models and old libraries need it",
    )


def _by_library(bindings: Bindings, source: Path, target: Path, kind: str, threads: int) -> None:
    wanted = bindings.quantize_parameters(file_type=file_type(kind), threads=threads)
    since = bindings.log.num_lines
    if bindings.api.llama_model_quantize(os.fsencode(source), os.fsencode(target), wanted) != 0:
        raise _failed(source, kind, bindings.log.last(since=since))


def _by_program(program: str, source: Path, target: Path, kind: str, threads: int) -> None:
    command = [program, str(source), str(target), kind.upper(), str(threads)]
    ran = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if ran.returncode != 0:
        raise _failed(source, kind, (ran.stderr + ran.stdout).strip().splitlines()[-4:])


def _failed(source: Path, kind: str, log: list[str]) -> UserError:
    return UserError(
        f"llama.cpp could not quantise `{source.name}` to {kind}" + (f": {'; '.join(log)}" if log else ""),
        where=str(source),
        fix="export the model as f16 first, and check that file with llama.cpp",
    )


def _refuse_quantized(source: Path, plan: Mixture) -> None:
    """Refuse to round what was rounded already, unless it stays as it is."""
    before = _types_in(source)
    for name, kind in before.items():
        if kind not in ("F32", "F16", "BF16") and plan.types[name] != kind:
            raise UserError(
                f"`{source.name}` is already quantised: `{name}` is stored as {kind}",
                where=str(source),
                fix="quantise the f16, bf16 or f32 file instead; quantising twice loses precision",
            )


def _types_in(path: Path) -> dict[str, str]:
    gguf = import_optional("gguf", extra="export", purpose="quantising a GGUF file")
    return {entry.name: gguf.GGMLQuantizationType(entry.type_number).name for entry in read_tensor_table(path)}
