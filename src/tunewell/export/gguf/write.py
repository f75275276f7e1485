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
    StoredTensor,
    WeightFiles,
    load,
    name_tensors,
    num_bytes,
    open_weights,
    storage_type,
)

_TEXTS = {
    "name": "name",
    "author": "author",
    "version": "version",
    "organization": "organization",
    "description": "description",
    "license": "license",
    "license_link": "license.link",
    "url": "url",
}
_PHI_3 = re.compile("phi-?3", re.IGNORECASE)
_LISTS = ("tags", "languages")


def add_card(writer: Any, card: dict[str, Any], *, num_parameters: int, swallows_spaces: bool) -> None:
    """Say what the model is called and where it comes from."""
    writer.add_type("model")
    card = card | {"name": _fitting_name(str(card["name"]), swallows_spaces)}
    for key, field in _TEXTS.items():
        if text := card.get(key):
            writer.add_string(f"general.{field}", str(text))
    writer.add_size_label(_size_label(num_parameters))
    bases = card.get("base_model") or []
    bases = bases if isinstance(bases, list) else [bases]
    if bases:
        writer.add_uint32("general.base_model.count", len(bases))
    for index, base in enumerate(bases):
        writer.add_string(f"general.base_model.{index}.name", str(base))
    for key in _LISTS:
        if values := [str(value) for value in card.get(key) or []]:
            writer.add_array(f"general.{key}", values)


def add_fields(writer: Any, fields: dict[str, FieldValue]) -> None:
    """Write the fields of an architecture, each in the type that llama.cpp expects."""
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


def add_vocabulary(writer: Any, vocabulary: GgufVocabulary, *, space_prefix: bool | None) -> None:
    """Write the tokenizer; whether ends are added to plain text is always said, never left to a default."""
    words = vocabulary.words
    writer.add_tokenizer_model(words.model)
    writer.add_tokenizer_pre(words.pre)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    if words.scores is not None:
        writer.add_token_scores(words.scores)
    if words.merges is not None:
        writer.add_token_merges(words.merges)
    for name, number in vocabulary.special_ids.items():
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    if space_prefix is not None:
        writer.add_add_space_prefix(space_prefix)
    if vocabulary.chat_template:
        writer.add_chat_template(vocabulary.chat_template)


def _fitting_name(name: str, swallows_spaces: bool) -> str:
    """Keep `phi-3` in names of models whose markers swallow spaces, and out of all others.

    By that part of the name alone does llama.cpp know it, and a file without Phi 3's tokens is then not even opened.
    """
    if swallows_spaces:
        return name if _PHI_3.search(name) else f"{name} (phi-3)"
    return _PHI_3.sub("Phi 3", name)


def _size_label(num_parameters: int) -> str:
    """Write a count as model names do: 135M, 1.2B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if num_parameters >= size:
            amount = num_parameters / size
            return f"{amount:.1f}{letter}" if amount < 10 else f"{amount:.0f}{letter}"
    return f"{num_parameters / 1e3:.0f}K"


# Write a model folder as one GGUF file: tensor by tensor, whole or not at all.

_FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
# Of names, fields and padding: 1 MiB is plenty beside a vocabulary, whose words stand in the file with their lengths,
# types, scores and merges.
_HEADER_BYTES, _TOKEN_BYTES = 1 << 20, 64


@dataclass(frozen=True)
class GgufFacts:
    """What was written."""

    path: Path
    kind: GgufKind
    architecture: str
    """The name in llama.cpp."""
    num_tensors: int
    num_parameters: int
    num_bytes: int
    pre_tokenizer: str
    notes: tuple[str, ...]
    """What llama.cpp does differently from transformers, as notes for the user."""


@dataclass(frozen=True)
class _Plan:
    settings: Settings
    vocabulary: GgufVocabulary
    tensors: dict[str, StoredTensor]
    num_bytes: int
    """Of the whole file, at most."""


def write_gguf(
    model_folder: Path,
    target: Path,
    *,
    kind: GgufKind,
    card: dict[str, Any] | None = None,
    space_prefix: bool | None = None,
    progress: ProgressListener = silent,
) -> GgufFacts:
    """Turn a Hugging Face model folder into a GGUF file; what stood at `target` is replaced when the new one is whole.

    `card` may give `name`, `description`, `license`, `base_model`, `tags` and the like. `space_prefix` overrules
    whether llama.cpp puts a space in front of text, for tokenizers of SentencePiece's kind. Raises UserError for a
    model or a tokenizer that llama.cpp would not read as meant, for numbers that are not finite, and for a full disk.
    """
    import_optional("gguf", extra="export", purpose="writing a GGUF file")
    plan = plan_file(model_folder, kind)
    require_disk_space(target.parent, plan.num_bytes)
    num_parameters = sum(math.prod(tensor.shape) for tensor in plan.tensors.values())
    writer = _writer(plan, kind)
    named = {"name": model_folder.name} | (card or {})
    add_card(writer, named, num_parameters=num_parameters, swallows_spaces=plan.vocabulary.swallows_spaces)
    add_fields(writer, metadata_fields(plan.settings))
    own = plan.vocabulary.words.space_prefix
    add_vocabulary(writer, plan.vocabulary, space_prefix=own if own is None or space_prefix is None else space_prefix)
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
        pre_tokenizer=plan.vocabulary.words.pre,
        notes=(*plan.settings.notes, *plan.vocabulary.notes),
    )


def plan_file(folder: Path, kind: GgufKind) -> _Plan:
    """Plan a file without writing it; raise UserError for a model that cannot be converted."""
    config = locate(folder).read_object("config.json")
    if not config:
        raise UserError("there is no config.json", where=str(folder), fix="give the folder of a whole model")
    settings = read_settings(config)
    num_rows = settings.values["vocab_size"]
    vocabulary = read_vocabulary(folder, num_rows=num_rows, config=config.get("text_config", {}) | config)
    tensors = _tensors(open_weights(folder, settings), settings, kind)
    words = vocabulary.words
    text = sum(len(token) + _TOKEN_BYTES for token in words.tokens) + sum(map(len, words.merges or []))
    total = sum(tensor.nbytes for tensor in tensors.values())
    return _Plan(settings, vocabulary, tensors, total + text + _HEADER_BYTES)


def _tensors(weights: WeightFiles, settings: Settings, kind: GgufKind) -> dict[str, StoredTensor]:
    """Plan every tensor of the file: its shape, its type, and how it will be made."""
    made: dict[str, tuple[str, tuple[int, ...], Callable[[], torch.Tensor]]] = {}
    for name, numbers in rope_tables(settings).items():
        made[name] = (name, numbers.shape, partial(torch.from_numpy, numbers))
    for tensor in name_tensors(weights, settings):
        make = partial(load, tensor, weights, settings.values["head_dim"])
        made[tensor.name] = (tensor.sources[0], tensor.shape, make)
    types = {name: storage_type(name, shape, kind) for name, (_, shape, _) in made.items()}
    return {
        name: StoredTensor(source, shape, types[name], num_bytes(shape, types[name]), make)
        for name, (source, shape, make) in made.items()
    }


def _writer(plan: _Plan, kind: GgufKind) -> Any:
    import gguf

    writer = gguf.GGUFWriter(None, plan.settings.gguf_name)  # type: ignore[arg-type]  the path comes with the header
    for name, tensor in plan.tensors.items():
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=tensor.kind)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    return writer


def _write(writer: Any, path: Path, tensors: list[StoredTensor], progress: ProgressListener) -> None:
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
