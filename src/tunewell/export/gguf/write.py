"""Write a model as one GGUF file: metadata, tokenizer and tensors."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tunewell.core.files import disk_full_as_user_error, require_disk_space, sync_folder
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.core.units import count
from tunewell.data.tokenizers.load import LoadedTokenizer
from tunewell.export.gguf.architecture import Settings, metadata_fields, read_settings, rope_tables
from tunewell.export.gguf.quantize import choose_types
from tunewell.export.gguf.tokenizer import GgufVocabulary, read_vocabulary
from tunewell.export.gguf.weights import LazyTensor, load_tensor, name_tensors, untied_tensors

# Upper bounds for the header: 1 MiB for names, fields and padding; per token its length, type, score and merge.
_HEADER_BYTES, _TOKEN_BYTES = 1 << 20, 64


@dataclass(frozen=True)
class GgufSource:
    """A model that is written as a GGUF file."""

    tensors: Mapping[str, torch.Tensor]
    config: dict[str, Any]
    """The values of `config.json`."""
    tokenizer: LoadedTokenizer
    name: str
    license: str | None = None


@dataclass(frozen=True)
class GgufPlan:
    """The contents of a GGUF file before it is written."""

    settings: Settings
    vocabulary: GgufVocabulary
    tensors: dict[str, LazyTensor]
    num_bytes: int
    """Upper bound for the file size."""
    notes: tuple[str, ...]
    """Notes for the user on what llama.cpp computes differently, and on tensors that are larger than usual."""


def write_gguf(source: GgufSource, target: Path, *, kind: str, progress: ProgressListener = silent) -> GgufPlan:
    """Write a model to a GGUF file; replace `target` only when the new file is complete.

    Raises UserError for a model or tokenizer that llama.cpp would read differently, for values that are not finite,
    and for a full disk.
    """
    plan = plan_file(source, kind)
    require_disk_space(target.parent, plan.num_bytes)
    writer = _make_writer(plan, kind)
    _add_fields(writer, _card_fields(plan, source.name, source.license))
    _add_fields(writer, metadata_fields(plan.settings) | plan.vocabulary.fields)
    staged = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with disk_full_as_user_error(target.parent, lambda: plan.num_bytes):
            _write(writer, staged, list(plan.tensors.values()), progress)
            staged.replace(target)
    finally:
        writer.close()
        staged.unlink(missing_ok=True)
    sync_folder(target.parent)
    return plan


def plan_file(source: GgufSource, kind: str) -> GgufPlan:
    """Return the plan of a GGUF file without writing it; raise UserError for a model that cannot be converted."""
    settings = read_settings(source.config)
    vocabulary = read_vocabulary(source.tokenizer, num_rows=settings.values["vocab_size"], config=source.config)
    tensors, num_fallbacks = _plan_tensors(untied_tensors(source.tensors, settings), settings, kind)
    texts, merges = (vocabulary.fields.get(f"tokenizer.ggml.{name}", []) for name in ("tokens", "merges"))
    header_bytes = sum(len(text) + _TOKEN_BYTES for text in texts) + sum(map(len, merges)) + _HEADER_BYTES
    notes = [*settings.notes, *vocabulary.notes]
    if num_fallbacks:
        notes.append(
            f"{kind}: {count(num_fallbacks, 'tensor')} could not be stored in this type and use more bits, so the file "
            "is larger than usual"
        )
    total_bytes = sum(tensor.nbytes for tensor in tensors.values()) + header_bytes
    return GgufPlan(settings, vocabulary, tensors, total_bytes, tuple(notes))


def _plan_tensors(
    weights: Mapping[str, torch.Tensor], settings: Settings, kind: str
) -> tuple[dict[str, LazyTensor], int]:
    """Return the tensors of the file by their names in llama.cpp, and the number that are larger than usual."""
    from gguf import GGMLQuantizationType

    named = name_tensors(weights, settings)
    meta = {"general.architecture": settings.gguf_name, **metadata_fields(settings)}
    types, num_fallbacks = choose_types({tensor.name: tensor.shape for tensor in named}, meta, kind)
    sources, head_dim = {**weights, **rope_tables(settings)}, settings.values["head_dim"]
    tensors = {
        own.name: LazyTensor(
            own.sources[0],
            own.shape,
            GGMLQuantizationType[types[own.name]],
            partial(load_tensor, own, sources, head_dim),
        )
        for own in named
    }
    return tensors, num_fallbacks


def _make_writer(plan: GgufPlan, kind: str) -> Any:
    import gguf

    writer = gguf.GGUFWriter(None, plan.settings.gguf_name)  # type: ignore[arg-type]  the path comes with the header
    for name, tensor in plan.tensors.items():
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=tensor.ggml_type)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    return writer


def _write(writer: Any, path: Path, tensors: list[LazyTensor], progress: ProgressListener) -> None:
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    written, total = 0, sum(tensor.nbytes for tensor in tensors)
    for tensor in tensors:
        writer.write_tensor_data(tensor)
        written += tensor.nbytes
        progress(Progress(f"writing {path.name}", written, total, "bytes"))
    writer.flush()
    for file in writer.fout:
        os.fsync(file.fileno())


# Metadata.

_PHI_3 = re.compile("phi-?3", re.IGNORECASE)


def _card_fields(plan: GgufPlan, name: str, license: str | None) -> dict[str, Any]:
    """Return the model's name, licence and size."""
    from gguf.utility import model_weight_count_rounded_notation

    num_parameters = sum(math.prod(tensor.shape) for tensor in plan.tensors.values())
    return {
        "general.type": "model",
        "general.name": _adjust_name(name, strips_spaces=plan.vocabulary.strips_spaces),
        **({"general.license": license} if license else {}),
        "general.size_label": model_weight_count_rounded_notation(num_parameters),
    }


def _adjust_name(name: str, *, strips_spaces: bool) -> str:
    """Add `phi-3` to the name of a model whose special tokens strip spaces; remove it from other names.

    llama.cpp enables space stripping by this part of the name alone. It does not load a file with such a name if the
    tokens of Phi 3 are missing.
    """
    if strips_spaces:
        return name if _PHI_3.search(name) else f"{name} (phi-3)"
    return _PHI_3.sub("Phi 3", name)


def _add_fields(writer: Any, fields: dict[str, Any]) -> None:
    """Write metadata fields; llama.cpp expects unsigned integers."""
    from gguf import GGUFValueType

    for key, value in fields.items():
        kind = GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)
