"""Write a model folder in transformers format as one GGUF file: metadata, tokenizer and tensors."""

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tunewell.core.errors import UserError
from tunewell.core.files import disk_full_as_user_error, require_disk_space, sync_folder
from tunewell.core.model_files import locate
from tunewell.core.optional import import_optional
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.export.gguf.architecture import FieldValue, Settings, metadata_fields, read_settings, rope_tables
from tunewell.export.gguf.tokenizer import GgufVocabulary, read_vocabulary
from tunewell.export.gguf.weights import (
    GgufKind,
    LazyTensor,
    WeightFiles,
    load_tensor,
    name_tensors,
    num_bytes,
    open_weights,
    storage_type,
)

_FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
# Upper bounds for the header: 1 MiB of names, fields and padding, and for each token its length, type, score and merge.
_HEADER_BYTES, _TOKEN_BYTES = 1 << 20, 64


@dataclass(frozen=True)
class GgufFacts:
    """A written file."""

    path: Path
    kind: GgufKind
    architecture: str
    """Name in llama.cpp."""
    num_tensors: int
    num_parameters: int
    num_bytes: int
    pre_tokenizer: str
    notes: tuple[str, ...]
    """What llama.cpp computes differently from transformers, for the user."""


@dataclass(frozen=True)
class GgufPlan:
    """What a file will contain."""

    settings: Settings
    vocabulary: GgufVocabulary
    tensors: dict[str, LazyTensor]
    num_bytes: int
    """Upper bound for the whole file."""


def write_gguf(
    model_folder: Path,
    target: Path,
    *,
    kind: GgufKind,
    card: dict[str, Any] | None = None,
    space_prefix: bool | None = None,
    progress: ProgressListener = silent,
) -> GgufFacts:
    """Convert a Hugging Face model folder to a GGUF file; a file at `target` is replaced once the new one is complete.

    `card` may have `name`, `description`, `license`, `base_model`, `tags` and the like. `space_prefix` overrides
    whether llama.cpp puts a space before text, for SentencePiece tokenizers. Raises UserError for a model or tokenizer
    that llama.cpp would read differently, for numbers that are not finite, and for a full disk.
    """
    import_optional("gguf", extra="export", purpose="writing a GGUF file")
    plan = plan_file(model_folder, kind)
    require_disk_space(target.parent, plan.num_bytes)
    num_parameters = sum(math.prod(tensor.shape) for tensor in plan.tensors.values())
    writer = _make_writer(plan, kind)
    _add_card(
        writer,
        {"name": model_folder.name} | (card or {}),
        num_parameters=num_parameters,
        strips_spaces=plan.vocabulary.strips_spaces,
    )
    _add_fields(writer, metadata_fields(plan.settings))
    default_prefix = plan.vocabulary.tokens.space_prefix
    has_default = default_prefix is None or space_prefix is None
    _add_vocabulary(writer, plan.vocabulary, space_prefix=default_prefix if has_default else space_prefix)
    staged = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with disk_full_as_user_error(target.parent, lambda: plan.num_bytes):
            _write(writer, staged, list(plan.tensors.values()), progress)
            staged.replace(target)
    finally:
        writer.close()
        staged.unlink(missing_ok=True)
    sync_folder(target.parent)
    return GgufFacts(
        path=target,
        kind=kind,
        architecture=plan.settings.gguf_name,
        num_tensors=len(plan.tensors),
        num_parameters=num_parameters,
        num_bytes=target.stat().st_size,
        pre_tokenizer=plan.vocabulary.tokens.pre_tokenizer,
        notes=(*plan.settings.notes, *plan.vocabulary.notes),
    )


def plan_file(folder: Path, kind: GgufKind) -> GgufPlan:
    """Plan a file without writing it; raise UserError for a model that cannot be converted."""
    config = locate(folder).read_object("config.json")
    if not config:
        raise UserError("config.json is missing", where=str(folder), fix="pass the folder of a complete model")
    settings = read_settings(config)
    num_rows = settings.values["vocab_size"]
    vocabulary = read_vocabulary(folder, num_rows=num_rows, config=config.get("text_config", {}) | config)
    tensors = _plan_tensors(open_weights(folder, settings), settings, kind)
    texts, merges = vocabulary.tokens.texts, vocabulary.tokens.merges or []
    header_bytes = sum(len(text) + _TOKEN_BYTES for text in texts) + sum(map(len, merges)) + _HEADER_BYTES
    return GgufPlan(settings, vocabulary, tensors, sum(tensor.nbytes for tensor in tensors.values()) + header_bytes)


def _plan_tensors(weights: WeightFiles, settings: Settings, kind: GgufKind) -> dict[str, LazyTensor]:
    """Return every tensor of the file by its name in llama.cpp."""
    tensors: dict[str, LazyTensor] = {}

    def add(name: str, source: str, shape: tuple[int, ...], load: Callable[[], torch.Tensor]) -> None:
        ggml_type = storage_type(name, shape, kind)
        tensors[name] = LazyTensor(source, shape, ggml_type, num_bytes(shape, ggml_type), load)

    for name, table in rope_tables(settings).items():
        add(name, name, table.shape, partial(torch.from_numpy, table))
    for tensor in name_tensors(weights, settings):
        load = partial(load_tensor, tensor, weights, settings.values["head_dim"])
        add(tensor.name, tensor.sources[0], tensor.shape, load)
    return tensors


def _make_writer(plan: GgufPlan, kind: GgufKind) -> Any:
    import gguf

    writer = gguf.GGUFWriter(None, plan.settings.gguf_name)  # type: ignore[arg-type]  the path comes with the header
    for name, tensor in plan.tensors.items():
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=tensor.ggml_type)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[kind]])
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

_CARD_FIELDS = {
    "name": "name",
    "author": "author",
    "version": "version",
    "organization": "organization",
    "description": "description",
    "license": "license",
    "license_link": "license.link",
    "url": "url",
}
_CARD_LISTS = ("tags", "languages")
_PHI_3 = re.compile("phi-?3", re.IGNORECASE)


def _add_card(writer: Any, card: dict[str, Any], *, num_parameters: int, strips_spaces: bool) -> None:
    """Write the model's name, licence and base model."""
    writer.add_type("model")
    card = card | {"name": _adjust_name(str(card["name"]), strips_spaces=strips_spaces)}
    for key, field in _CARD_FIELDS.items():
        if text := card.get(key):
            writer.add_string(f"general.{field}", str(text))
    writer.add_size_label(_size_label(num_parameters))
    bases = card.get("base_model") or []
    bases = bases if isinstance(bases, list) else [bases]
    if bases:
        writer.add_uint32("general.base_model.count", len(bases))
    for index, base in enumerate(bases):
        writer.add_string(f"general.base_model.{index}.name", str(base))
    for key in _CARD_LISTS:
        if values := [str(value) for value in card.get(key) or []]:
            writer.add_array(f"general.{key}", values)


def _adjust_name(name: str, *, strips_spaces: bool) -> str:
    """Keep `phi-3` in the names of models whose special tokens strip spaces, and out of all others.

    llama.cpp recognises the rule by this part of the name alone, and does not load a file with such a name but without
    the tokens of Phi 3.
    """
    if strips_spaces:
        return name if _PHI_3.search(name) else f"{name} (phi-3)"
    return _PHI_3.sub("Phi 3", name)


def _size_label(num_parameters: int) -> str:
    """Format a parameter count as in model names: 135M, 1.2B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if num_parameters >= size:
            amount = num_parameters / size
            return f"{amount:.1f}{letter}" if amount < 10 else f"{amount:.0f}{letter}"
    return f"{num_parameters / 1e3:.0f}K"


def _add_fields(writer: Any, fields: dict[str, FieldValue]) -> None:
    """Write the fields of an architecture in the types that llama.cpp expects."""
    for key, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def _add_vocabulary(writer: Any, vocabulary: GgufVocabulary, *, space_prefix: bool | None) -> None:
    """Write the tokenizer. Whether BOS and EOS are added is always stated, because defaults differ."""
    tokens = vocabulary.tokens
    writer.add_tokenizer_model(tokens.model)
    writer.add_tokenizer_pre(tokens.pre_tokenizer)
    writer.add_token_list(tokens.texts)
    writer.add_token_types(tokens.types)
    if tokens.scores is not None:
        writer.add_token_scores(tokens.scores)
    if tokens.merges is not None:
        writer.add_token_merges(tokens.merges)
    for name, number in vocabulary.special_ids.items():
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    if space_prefix is not None:
        writer.add_add_space_prefix(space_prefix)
    if vocabulary.chat_template:
        writer.add_chat_template(vocabulary.chat_template)
