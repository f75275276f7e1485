"""Store a GGUF file in fewer bits with llama.cpp's own arithmetic, by whichever of three ways this machine has."""

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tunewell.core.cores import num_cores
from tunewell.core.errors import UserError
from tunewell.core.files import refuse_full_disk, sync_folder, told_when_full
from tunewell.core.gguf import read_tensor_table
from tunewell.core.need import need
from tunewell.exporting.llama_cpp import LlamaLibrary, find_llama
from tunewell.exporting.llama_cpp_calls import Calls
from tunewell.exporting.llama_cpp_chunks import write_quantized
from tunewell.exporting.llama_cpp_mixtures import Mixture, file_type, num_experts, plan_mixture

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
    refuse_full_disk(target.parent, needed)
    made_by, way = _choose_way(source, library, plan)
    staged = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with told_when_full(target.parent, lambda: needed):
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
    calls = library.calls
    if library.has_quantizer:
        return f"llama_model_quantize, {library.origin}", lambda *order: _by_library(calls, *order)
    if program := shutil.which(PROGRAM):
        return PROGRAM, lambda *order: _by_program(program, *order)
    if calls.has_all("ggml_quantize_chunk") and num_experts(source) <= 1:
        return (
            f"ggml_quantize_chunk, {library.origin}",
            lambda source, target, kind, threads: write_quantized(
                source, target, plan, calls=calls, file_type=file_type(kind), threads=threads
            ),
        )
    raise UserError(
        "nothing that quantises this model was found",
        where=str(library.path),
        fix=f"put llama.cpp's `{PROGRAM}` on the PATH: a model of experts, or an old library, needs it",
    )


def _by_library(calls: Calls, source: Path, target: Path, kind: str, threads: int) -> None:
    wanted = calls.quantize_parameters(file_type=file_type(kind), threads=threads)
    since = calls.log.num_lines
    if calls.do.llama_model_quantize(os.fsencode(source), os.fsencode(target), wanted) != 0:
        raise _failed(source, kind, calls.log.last(since=since))


def _by_program(program: str, source: Path, target: Path, kind: str, threads: int) -> None:
    command = [program, str(source), str(target), kind.upper(), str(threads)]
    ran = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if ran.returncode != 0:
        raise _failed(source, kind, (ran.stderr + ran.stdout).strip().splitlines()[-4:])


def _failed(source: Path, kind: str, said: list[str]) -> UserError:
    return UserError(
        f"llama.cpp could not store `{source.name}` as {kind}" + (f": {'; '.join(said)}" if said else ""),
        where=str(source),
        fix="export the model as f16 first, and check that file with llama.cpp",
    )


def _refuse_quantized(source: Path, plan: Mixture) -> None:
    """Refuse to round what was rounded already, unless it stays as it is."""
    before = _types_in(source)
    for name, kind in before.items():
        if kind not in ("F32", "F16", "BF16") and plan.types[name] != kind:
            raise UserError(
                f"`{source.name}` is quantised already: `{name}` is stored as {kind}",
                where=str(source),
                fix="quantise the f16, bf16 or f32 file: rounding twice loses more",
            )


def _types_in(path: Path) -> dict[str, str]:
    gguf = need("gguf", extra="export", purpose="quantising a GGUF file")
    return {entry.name: gguf.GGMLQuantizationType(entry.type_number).name for entry in read_tensor_table(path)}
