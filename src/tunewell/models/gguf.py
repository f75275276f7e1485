"""Load a GGUF file: read its config and dequantise its weights. Unknown metadata and tensors are errors."""

import math
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig, PreTrainedConfig
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tunewell.core.errors import UserError
from tunewell.core.optional import import_optional
from tunewell.machine.facts import num_cores
from tunewell.model_files.gguf import TensorEntry, read_header, read_tensor_table
from tunewell.models.attention import head_size
from tunewell.models.external import split_rotary_pairs
from tunewell.models.pretrained import skeleton
from tunewell.models.support import quiet

ROPE_TABLE = "rope_freqs.weight"
LLAMA_NAMED = frozenset({"llama", "qwen2", "qwen3"})
"""Architectures whose tensors are read without transformers."""
# Values dequantised at once. The `gguf` package processes 16 rows at a time, which is slow for short rows.
_NUMBERS_AT_ONCE = 1 << 20
_GROUP_ROWS = 16


def read_gguf_weights(path: Path, config: PreTrainedConfig) -> dict[str, Tensor]:
    """Return the weights of a GGUF file in fp32 by transformers' names. Raise UserError for an unknown tensor."""
    gguf = import_optional("gguf", extra="train", purpose="reading the weights of a GGUF file")
    entries = [entry for entry in read_tensor_table(path) if entry.name != ROPE_TABLE]
    if config.model_type not in LLAMA_NAMED:
        return _by_transformers(path, config, entries)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
    names = {table.get_name(name, (".weight", ".bias")): name for name in skeleton(config).state_dict()}
    if unknown := [entry.name for entry in entries if entry.name not in names]:
        listed = ", ".join(f"`{name}`" for name in unknown[:5])
        raise unusable(path, f"{len(unknown):,} of the tensors are unknown: {listed}")
    # NumPy dequantises on one core and releases the GIL.
    with ThreadPoolExecutor(num_cores()) as pool:
        found = pool.map(partial(read_entry, path), entries)
        weights = {names[entry.name]: tensor for entry, tensor in zip(entries, found, strict=True)}
    # Only files of this architecture have interleaved rotary pairs.
    weights = split_rotary_pairs(weights, config) if config.model_type == "llama" else weights
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return weights


def read_tensor(path: Path, name: str) -> Tensor:
    """Return one dequantised tensor of a GGUF file."""
    return read_entry(path, next(entry for entry in read_tensor_table(path) if entry.name == name))


def unusable(path: Path, why: str) -> UserError:
    """Return a UserError that says why a file cannot be used."""
    fix = "use the original model's folder or hub id instead of this file"
    return UserError(f"the weights of `{path.name}` cannot be used: {why}", where=str(path), fix=fix)


def stored_type(path: Path) -> str:
    """Return the data type of most weights in lower case, such as `q4_1` or `f16`."""
    gguf = import_optional("gguf", extra="export", purpose="reading a GGUF file")
    sizes = Counter[int]()
    for entry in read_tensor_table(path):
        sizes[entry.type_number] += math.prod(entry.shape)
    return gguf.GGMLQuantizationType(sizes.most_common(1)[0][0]).name.lower()


def quantization_of(path: Path) -> str | None:
    """Return the quantisation type of most weights, such as `Q4_1`, or None for 16-bit and 32-bit files."""
    name = stored_type(path)
    return None if name in ("f32", "f16", "bf16") else name.upper()


def read_entry(path: Path, entry: TensorEntry) -> Tensor:
    """Return a tensor of a GGUF file in fp32. Raise UserError if its type is unknown or the file is truncated."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    try:
        kind = GGMLQuantizationType(entry.type_number)
        block_numbers, block_bytes = GGML_QUANT_SIZES[kind]
    except (KeyError, ValueError):
        raise unusable(path, f"`{entry.name}` has the unknown quantisation type {entry.type_number}") from None
    num_blocks = math.prod(entry.shape) // block_numbers
    if entry.offset + num_blocks * block_bytes > path.stat().st_size:
        raise UserError(f"`{path.name}` is truncated: `{entry.name}` ends after the end of the file", where=str(path))
    data = np.memmap(path, np.uint8, "r", offset=entry.offset, shape=(num_blocks, block_bytes))
    try:
        # Blocks are independent, so rows of any length can be passed to the package.
        at_once = max(1, _NUMBERS_AT_ONCE // block_numbers // _GROUP_ROWS)
        whole = num_blocks // at_once * at_once
        parts = [data[:whole].reshape(-1, at_once * block_bytes), data[whole:].reshape(1, -1)]
        numbers = np.concatenate([dequantize(part, kind).reshape(-1) for part in parts if part.size])
    except NotImplementedError:
        raise unusable(path, f"`{entry.name}` is {kind.name}, which the `gguf` package cannot read") from None
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32)).reshape(entry.shape)


def _by_transformers(path: Path, config: PreTrainedConfig, entries: list[TensorEntry]) -> dict[str, Tensor]:
    """Read the weights with transformers. Raise UserError if it skips unknown tensors."""
    # transformers' GGUF reader prints a progress bar to stderr that cannot be turned off.
    with quiet(), redirect_stderr(StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            config=config,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
            attn_implementation="eager",
        )
    in_file = sum(math.prod(entry.shape) for entry in entries)
    in_model = sum(parameter.numel() for parameter in model.parameters())
    if in_file != in_model:
        raise unusable(path, f"the file has {in_file:,} values, but transformers reads {in_model:,}")
    return model.state_dict()


_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
# Metadata keys that do not affect the computation.
_HARMLESS = frozenset(
    {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length"}
)
# Metadata keys that transformers ignores -> the config value that must then be equal.
_MUST_MATCH = {
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def read_gguf_config(path: Path) -> PreTrainedConfig:
    """Read a model's config from a GGUF file. Raise UserError if some metadata would be ignored."""
    if _PART.search(path.name):
        raise unusable(path, "the file is one part of a split file")
    metadata, table = read_header(path)
    names = {entry.name for entry in table}
    if not names:
        raise UserError(f"`{path.name}` contains a vocabulary but no weights", where=str(path))
    kind = str(metadata.get("general.architecture"))
    config = _config_of(metadata, names) if kind in LLAMA_NAMED else _config_by_transformers(path)
    _require_known_metadata(path, kind, metadata, config)
    if ROPE_TABLE in names:
        _apply_rope_table(path, config)
    return config


def _config_of(metadata: dict[str, Any], names: set[str]) -> PreTrainedConfig:
    """Build the config without transformers' reader, which takes seconds to read the vocabulary."""
    kind = metadata["general.architecture"]
    keys = {f"{kind}.{key}": name for key, name in GGUF_CONFIG_MAPPING[kind].items()}
    keys |= {f"tokenizer.{key}": name for key, name in GGUF_CONFIG_MAPPING["tokenizer"].items()}
    settings = {name: metadata[key] for key, name in keys.items() if name is not None and key in metadata}
    settings.setdefault("vocab_size", len(metadata.get("tokenizer.ggml.tokens") or ()))
    settings.pop("unk_token_id", None)
    if kind == "qwen3" and f"{kind}.attention.key_length" in metadata:
        # transformers assumes 128.
        settings["head_dim"] = metadata[f"{kind}.attention.key_length"]
    return AutoConfig.for_model(kind, tie_word_embeddings="output.weight" not in names, **settings)


def _config_by_transformers(path: Path) -> PreTrainedConfig:
    try:
        with quiet(), redirect_stderr(StringIO()):
            config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except (ImportError, KeyError, NotImplementedError, ValueError) as error:
        raise unusable(path, f"transformers cannot read the file: {error}") from error
    config.__dict__.pop("quantization_config", None)
    return config


def _require_known_metadata(path: Path, kind: str, metadata: dict[str, Any], config: PreTrainedConfig) -> None:
    """Raise UserError for metadata that transformers would silently ignore."""
    known = GGUF_CONFIG_MAPPING.get(kind) or GGUF_CONFIG_MAPPING.get(config.model_type) or {}
    own = {key.removeprefix(f"{kind}."): value for key, value in metadata.items() if key.startswith(f"{kind}.")}
    scaling = own.pop("rope.scaling.type", "none")
    if scaling != "none":
        raise unusable(path, f"rope scaling `{scaling}` is not supported in GGUF files")
    own.pop("rope.scaling.factor", None)
    for key, value in own.items():
        name = _MUST_MATCH.get(key)
        if known.get(key) is not None or key in _HARMLESS or (key == "attention.causal" and value is True):
            continue
        if name is None:
            raise unusable(path, f"the key `{kind}.{key}` ({value!r:.60}) is unknown")
        if not _matches(config, name, value):
            used = getattr(config, name, None)
            raise unusable(path, f"the file sets `{kind}.{key}` to {value!r:.60}, but transformers would use {used}")


def _matches(config: PreTrainedConfig, name: str, value: Any) -> bool:
    found = getattr(config, name, None)
    if name == "head_dim":
        rope = getattr(config, "rope_parameters", None) or {}
        whole = head_size(config)
        return value in (whole, int(whole * rope.get("partial_rotary_factor", 1.0)))
    if name == "sliding_window" and found is None:
        # A window as long as the context has no effect.
        return value >= config.max_position_embeddings or value == 0
    return found is not None and float(found) == float(value)


def _apply_rope_table(path: Path, config: PreTrainedConfig) -> None:
    """Set Llama 3's rope scaling, which GGUF files store as a table that transformers ignores.

    The table divides each frequency. Its largest value is the factor; the other parameters are the same in all Llama 3
    models. Raises UserError if these parameters do not reproduce the table.
    """
    table = read_tensor(path, ROPE_TABLE)
    base = config.rope_parameters["rope_theta"]
    size = head_size(config)
    config.rope_parameters = {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": float(table.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    expected = base ** (-torch.arange(0, size, 2, dtype=torch.float32) / size) / table
    if scaled.shape != expected.shape or not torch.allclose(scaled, expected, rtol=1e-4, atol=0):
        raise unusable(path, f"the table `{ROPE_TABLE}` does not match Llama 3's rope scaling")
