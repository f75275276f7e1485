"""Quantise a GGUF file with llama.cpp: by its library, its program, or tensor by tensor with its rounding function."""

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
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from tunewell.core.errors import UserError
from tunewell.core.files import disk_full_as_user_error, require_disk_space, sync_folder
from tunewell.core.gguf import TensorEntry, read_metadata, read_tensor_table
from tunewell.core.optional import import_optional
from tunewell.export.gguf.architecture import llama_cpp_facts
from tunewell.export.gguf.weights import num_bytes
from tunewell.hardware.facts import num_cores
from tunewell.inference.llama_cpp.bindings import Bindings
from tunewell.inference.llama_cpp.library import LlamaLibrary, find_llama

QuantizedKind = Literal["f16", "q8_0", "q4_k_m", "q5_k_m", "q6_k"]
PROGRAM = "llama-quantize"
# The padding between tensors, and two metadata fields that the source may not have.
_PADDING_BYTES = 1 << 20

Quantizer = Callable[[Path, Path, str, int], None]
"""Takes source, target, kind and number of threads."""


@dataclass(frozen=True)
class Quantized:
    """A quantised file."""

    path: Path
    kind: str
    made_by: str
    num_bytes: int
    num_tensors: dict[str, int]
    """By storage type."""
    num_fallbacks: int
    """Tensors stored in more bits, because their rows are not a multiple of the type's block size."""


def quantize(
    source: Path, target: Path, kind: str, *, library: LlamaLibrary | None = None, threads: int | None = None
) -> Quantized:
    """Quantise `source` (f32, f16 or bf16) to `f16`, `q8_0`, `q4_k_m`, `q5_k_m` or `q6_k`; write all or nothing.

    Uses the first of these that exists: `llama_model_quantize` of the library, the program `llama-quantize` on the
    PATH, the library's `ggml_quantize_chunk` with llama.cpp's choice of types. All write the same numbers. Raises
    UserError for a source that is damaged or already quantised, and for a full disk.
    """
    plan = plan_quantization(source, kind)
    _require_unquantized(source, plan)
    needed = plan.num_bytes + min(entry.offset for entry in read_tensor_table(source)) + _PADDING_BYTES
    require_disk_space(target.parent, needed)
    made_by, run_quantizer = _choose_quantizer(source, library, plan)
    staged = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with disk_full_as_user_error(target.parent, lambda: needed):
            run_quantizer(source, staged, kind, threads or num_cores())
            with staged.open("rb+") as file:
                os.fsync(file.fileno())
        types = _read_types(staged)
        staged.replace(target)
    finally:
        staged.unlink(missing_ok=True)
    sync_folder(target.parent)
    return Quantized(target, kind, made_by, target.stat().st_size, dict(Counter(types.values())), plan.num_fallbacks)


def _choose_quantizer(source: Path, library: LlamaLibrary | None, plan: "QuantizationPlan") -> tuple[str, Quantizer]:
    library = library or find_llama()
    bindings = library.bindings
    if library.has_quantizer:
        return f"llama_model_quantize, {library.origin}", lambda *job: _run_library(bindings, *job)
    if program := shutil.which(PROGRAM):
        return PROGRAM, lambda *job: _run_program(program, *job)
    meta = read_metadata(source)
    has_experts = int(meta.get(f"{meta.get('general.architecture')}.expert_count", 0)) > 1
    if bindings.has_all("ggml_quantize_chunk") and not has_experts:
        return f"ggml_quantize_chunk, {library.origin}", lambda *job: _write_tensors(plan, bindings, *job)
    raise UserError(
        "no quantiser for this model was found",
        where=str(library.path),
        fix=f"add llama.cpp's `{PROGRAM}` to the PATH; mixture-of-experts models and old libraries need it",
    )


def _run_library(bindings: Bindings, source: Path, target: Path, kind: str, threads: int) -> None:
    parameters = bindings.quantize_parameters(file_type=_file_type(kind), threads=threads)
    since = bindings.log.num_lines
    if bindings.api.llama_model_quantize(os.fsencode(source), os.fsencode(target), parameters) != 0:
        raise _failure(source, kind, bindings.log.last(since=since))


def _run_program(program: str, source: Path, target: Path, kind: str, threads: int) -> None:
    command = [program, str(source), str(target), kind.upper(), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        raise _failure(source, kind, (done.stderr + done.stdout).strip().splitlines()[-4:])


def _failure(source: Path, kind: str, log: list[str]) -> UserError:
    return UserError(
        f"llama.cpp could not quantise `{source.name}` to {kind}" + (f": {'; '.join(log)}" if log else ""),
        where=str(source),
        fix="export the model as f16 first, and check that file with llama.cpp",
    )


def _require_unquantized(source: Path, plan: "QuantizationPlan") -> None:
    """Raise UserError if a tensor is quantised already and would be quantised to another type."""
    for name, kind in _read_types(source).items():
        if kind not in ("F32", "F16", "BF16") and plan.types[name] != kind:
            raise UserError(
                f"`{source.name}` is already quantised: `{name}` is stored as {kind}",
                where=str(source),
                fix="quantise the f16, bf16 or f32 file instead; quantising twice loses precision",
            )


def _read_types(path: Path) -> dict[str, str]:
    gguf = import_optional("gguf", extra="export", purpose="quantising a GGUF file")
    return {entry.name: gguf.GGMLQuantizationType(entry.type_number).name for entry in read_tensor_table(path)}


def _file_type(kind: str) -> int:
    """Return llama.cpp's number of a kind; raise UserError for an unknown one."""
    if kind not in get_args(QuantizedKind):
        known = ", ".join(f"`{name}`" for name in get_args(QuantizedKind))
        raise UserError(f"`{kind}` is not a supported quantisation type", fix=f"use one of {known}")
    return _facts()["kinds"][kind]["file_type"]


def _facts() -> dict[str, Any]:
    return llama_cpp_facts()["quantization"]


# The type of each tensor, as llama.cpp chooses it: more bits for the tensors that lose most.

_LAYER = re.compile(r"blk\.(\d+)\.")
# Families in which a model of 80 layers has 70 billion parameters.
_FAMILIES_OF_70B = frozenset({"llama", "qwen2", "olmo", "deci"})


@dataclass(frozen=True)
class QuantizationPlan:
    """The storage type of every tensor of a quantised file."""

    types: dict[str, str]
    """By tensor name, in the order of the source."""
    num_bytes: int
    """Of all tensors, without the header."""
    num_fallbacks: int
    """Tensors whose rows are not a multiple of the block size of the preferred type."""


class _Preference(NamedTuple):
    type: str
    fallback: str
    block_type: str
    """The fallback is used if the rows are not a multiple of this type's block size."""


def plan_quantization(source: Path, kind: str) -> QuantizationPlan:
    """Choose the type of each tensor of a GGUF file that is stored as `kind`, and count the bytes."""
    gguf = import_optional("gguf", extra="export", purpose="quantising a GGUF file")
    _file_type(kind)
    table = read_tensor_table(source)
    preferences = _prefer_types(table, read_metadata(source), _facts()["kinds"][kind])
    types: dict[str, str] = {}
    total = num_fallbacks = 0
    for entry in table:
        if (preference := preferences.get(entry.name)) is None:
            types[entry.name] = gguf.GGMLQuantizationType(entry.type_number).name
        else:
            types[entry.name] = _fitting_type(entry.shape[-1], preference)
            num_fallbacks += types[entry.name] != preference.type
        total += num_bytes(entry.shape, gguf.GGMLQuantizationType[types[entry.name]])
    return QuantizationPlan(types, total, num_fallbacks)


def _prefer_types(table: list[TensorEntry], meta: dict[str, Any], kind: dict[str, Any]) -> dict[str, _Preference]:
    """Return the preferred type of each tensor that is quantised; the others keep their type."""
    facts = _facts()
    names = [entry.name for entry in sorted(table, key=_layer_order) if _is_quantized(entry)]
    values = [name for name in names if _is_value(name)]
    downs = [name for name in names if "ffn_down" in name]
    num_layers = int(meta.get(f"{meta.get('general.architecture')}.block_count", 0))
    sensitive = {name for index, name in enumerate(values) if _is_sensitive(index, len(values))}
    sensitive |= {name for index, name in enumerate(downs) if _is_sensitive(index, num_layers)}
    value_upgrades = facts["values_of_70b"] if _is_70b(meta, num_layers) else {}
    has_head = any(entry.name == "output.weight" for entry in table)
    outputs = {"output.weight"} if has_head else set(facts["embeddings"])
    preferences = {}
    for name in names:
        if name in outputs:
            preferences[name] = _Preference(kind["output"], facts["output_fallback"], block_type=kind["type"])
            continue
        chosen = kind["sensitive"] if name in sensitive else kind["type"]
        chosen = value_upgrades.get(chosen, chosen) if _is_value(name) else chosen
        fallback = facts["fallbacks"].get(chosen, facts["last_fallback"])
        preferences[name] = _Preference(chosen, fallback, block_type=chosen)
    return preferences


def _layer_order(entry: TensorEntry) -> tuple[int, str]:
    """Return the key that sorts tensors by layer, then by name; tensors outside of layers come first."""
    found = _LAYER.match(entry.name)
    return (int(found[1]) if found else -1, entry.name)


def _is_quantized(entry: TensorEntry) -> bool:
    """Return True for a matrix that may lose precision."""
    # As in ggml, a trailing dimension of 1 does not count.
    is_matrix = len(entry.shape) >= 2 and math.prod(entry.shape[:-1]) > 1
    is_excluded = any(part in entry.name for part in _facts()["not_quantized"])
    return is_matrix and entry.name.endswith("weight") and not is_excluded


def _is_value(name: str) -> bool:
    return any(part in name for part in _facts()["value_tensors"])


def _is_sensitive(layer: int, num_layers: int) -> bool:
    """Return True for the first and last eighth of the layers, and every third between."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _is_70b(meta: dict[str, Any], num_layers: int) -> bool:
    family = meta.get("general.architecture")
    heads = [meta.get(f"{family}.attention.head_count{suffix}") for suffix in ("", "_kv")]
    has_grouped_heads = family != "llama" or heads[0] != heads[1]
    return num_layers == _facts()["layers_of_70b"] and family in _FAMILIES_OF_70B and has_grouped_heads


def _fitting_type(width: int, preference: _Preference) -> str:
    """Return the first type whose block size divides the width of a row."""
    import gguf

    def fits(name: str) -> bool:
        return width % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][0] == 0

    if fits(preference.block_type):
        return preference.type
    return preference.fallback if fits(preference.fallback) else _facts()["last_fallback"]


# Quantisation tensor by tensor, with llama.cpp's function for rows.

# Numbers for each call: enough to make Python's overhead negligible, and few enough to feed several threads.
_NUMBERS_AT_ONCE = 1 << 18
_ALIGNMENT = 32
_START = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of fields
_QUANTIZATION_VERSION = 2
_NEW_FIELDS = ("general.file_type", "general.quantization_version")
# Fields that describe the source file and not the model.
_DROPPED_FIELDS = frozenset({*_NEW_FIELDS, "general.alignment", "split.no", "split.count", "split.tensors.count"})
_UINT32, _STRING, _ARRAY = 4, 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def _write_tensors(
    plan: QuantizationPlan, bindings: Bindings, source: Path, target: Path, kind: str, threads: int
) -> None:
    """Write `source` with the types of the plan, one tensor in memory at a time."""
    from gguf import GGMLQuantizationType

    types = {name: GGMLQuantizationType[type_name] for name, type_name in plan.types.items()}
    table = read_tensor_table(source)
    with target.open("wb") as file, ThreadPoolExecutor(threads) as pool:
        file.write(_header(source, table, types, _file_type(kind)))
        for entry in table:
            rows = _map_rows(source, entry)
            if entry.type_number == types[entry.name]:
                file.write(rows.data)
            else:
                for part in _quantize_rows(entry, rows, types[entry.name], bindings, pool):
                    file.write(part)
            file.write(b"\0" * (_aligned(file.tell()) - file.tell()))


def _header(source: Path, table: list[TensorEntry], types: dict[str, Any], file_type: int) -> bytes:
    """Return everything before the tensors: the metadata of the source and the new tensor table."""
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        fields = [raw for name, raw in _iterate_fields(data) if name not in _DROPPED_FIELDS]
        magic, version, *_ = _START.unpack_from(data)
    for name, value in zip(_NEW_FIELDS, (file_type, _QUANTIZATION_VERSION), strict=True):
        fields.append(_pack_string(name) + struct.pack("<II", _UINT32, value))
    entries, offset = [], 0
    for entry in table:
        shape = entry.shape[::-1]
        packed = struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, types[entry.name], offset)
        entries.append(_pack_string(entry.name) + packed)
        offset += _aligned(num_bytes(entry.shape, types[entry.name]))
    header = _START.pack(magic, version, len(table), len(fields)) + b"".join((*fields, *entries))
    return header.ljust(_aligned(len(header)), b"\0")


def _iterate_fields(data: mmap.mmap) -> Iterator[tuple[str, bytes]]:
    """Yield the name and all bytes of each metadata field. The file was validated when it was read."""
    start = _START.size
    for _ in range(_START.unpack_from(data)[3]):
        name_end = _value_end(data, start, _STRING)
        (value_type,) = struct.unpack_from("<I", data, name_end)
        end = _value_end(data, name_end + 4, value_type)
        yield data[start + 8 : name_end].decode("utf-8", "surrogateescape"), data[start:end]
        start = end


def _value_end(data: mmap.mmap, start: int, value_type: int) -> int:
    if value_type == _STRING:
        return start + 8 + struct.unpack_from("<Q", data, start)[0]
    if value_type != _ARRAY:
        return start + _SCALAR_BYTES[value_type]
    item_type, length = struct.unpack_from("<IQ", data, start)
    start += 12
    if item_type in _SCALAR_BYTES:
        return start + length * _SCALAR_BYTES[item_type]
    for _ in range(length):
        start = _value_end(data, start, item_type)
    return start


def _map_rows(source: Path, entry: TensorEntry) -> np.ndarray:
    """Map the bytes of a tensor: [rows, bytes of a row]."""
    from gguf import GGMLQuantizationType

    size = num_bytes(entry.shape, GGMLQuantizationType(entry.type_number))
    if entry.offset + size > source.stat().st_size:
        raise UserError(
            f"`{source.name}` is truncated: `{entry.name}` ends after the end of the file",
            where=str(source),
            fix="export it again",
        )
    num_rows = math.prod(entry.shape[:-1])
    return np.memmap(source, np.uint8, "r", offset=entry.offset, shape=(num_rows, size // max(1, num_rows)))


def _quantize_rows(
    entry: TensorEntry, rows: np.ndarray, new_type: Any, bindings: Bindings, pool: ThreadPoolExecutor
) -> Iterator[bytes]:
    """Quantise a tensor some rows at a time, in the threads of the pool; ctypes releases the GIL."""
    from gguf import GGMLQuantizationType, dequantize

    width = entry.shape[-1]
    step = max(1, _NUMBERS_AT_ONCE // width)
    old_type = GGMLQuantizationType(entry.type_number)

    def quantize_part(start: int) -> bytes:
        numbers = np.ascontiguousarray(dequantize(rows[start : start + step], old_type), np.float32)
        if not np.isfinite(numbers).all():
            raise UserError(
                f"the tensor `{entry.name}` is not finite: it contains NaN or infinity",
                fix="the model is broken: export an earlier checkpoint",
            )
        stored = np.empty(num_bytes(numbers.shape, new_type), np.uint8)
        arguments = (numbers.ctypes.data, stored.ctypes.data, 0, len(numbers), width, None)
        written = bindings.api.ggml_quantize_chunk(int(new_type), *arguments)
        assert written == stored.nbytes, f"{entry.name}: llama.cpp wrote {written} bytes instead of {stored.nbytes}"
        return stored.tobytes()

    return pool.map(quantize_part, range(0, len(rows), step))


def _pack_string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
