"""Read the weights of a GGUF file, dequantised, under the names transformers uses, and account for every one."""

import math
import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedConfig

from tunewell.core.errors import UserError
from tunewell.core.gguf import TensorEntry, read_tensor_table
from tunewell.core.need import need
from tunewell.models.foreign import turn_rotary_pairs
from tunewell.models.quiet import silent

ROPE_TABLE = "rope_freqs.weight"
LLAMA_NAMED = frozenset({"llama", "qwen2", "qwen3"})
"""Architectures whose names are all in the two tables below."""
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Numbers dequantised at once: the package goes through 16 rows at a time, too few of a small matrix.
_NUMBERS_AT_ONCE = 1 << 20
_GROUP_ROWS = 16


def read_gguf_weights(path: Path, config: PreTrainedConfig) -> dict[str, Tensor]:
    """Dequantise the weights of a GGUF file in fp32; raise UserError where one of them would be left out."""
    need("gguf", extra="train", purpose="reading the weights of a GGUF file")
    entries = [entry for entry in read_tensor_table(path) if entry.name != ROPE_TABLE]
    if config.model_type not in LLAMA_NAMED:
        return _by_transformers(path, config, entries)
    names = {entry.name: _name_of(entry.name) for entry in entries}
    if strange := [name for name, known in names.items() if known is None]:
        listed = ", ".join(f"`{name}`" for name in strange[:5])
        raise refusal(path, f"{len(strange):,} of its tensors are not known here: {listed}")
    weights = {str(names[entry.name]): _dequantised(path, entry) for entry in entries}
    # Only files of this architecture have the pairs of rotary positions side by side.
    weights = turn_rotary_pairs(weights, config) if config.model_type == "llama" else weights
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return weights


def read_tensor(path: Path, name: str) -> Tensor:
    """Dequantise one tensor of a GGUF file."""
    return _dequantised(path, next(entry for entry in read_tensor_table(path) if entry.name == name))


def refusal(path: Path, why: str) -> UserError:
    """Say why the weights of a file are not used."""
    fix = "use the model's own folder or its hub id instead of this file"
    return UserError(f"the weights of `{path.name}` cannot be used: {why}", where=str(path), fix=fix)


def _name_of(name: str) -> str | None:
    if found := _IN_LAYER.fullmatch(name):
        number, part, kind = found.groups()
        known = _LAYER_NAMES.get(part)
        return None if known is None else f"model.layers.{number}.{known}.{kind}"
    part, _, kind = name.rpartition(".")
    known = _NAMES.get(part)
    return None if known is None else f"{known}.{kind}"


def _dequantised(path: Path, entry: TensorEntry) -> Tensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    try:
        kind = GGMLQuantizationType(entry.type_number)
        block_numbers, block_bytes = GGML_QUANT_SIZES[kind]
    except (KeyError, ValueError):
        raise refusal(path, f"`{entry.name}` is stored in the unknown way {entry.type_number}") from None
    num_blocks = math.prod(entry.shape) // block_numbers
    if entry.offset + num_blocks * block_bytes > path.stat().st_size:
        raise UserError(f"`{path.name}` is cut short: `{entry.name}` ends behind its end", where=str(path))
    data = np.memmap(path, np.uint8, "r", offset=entry.offset, shape=(num_blocks, block_bytes))
    try:
        # Blocks stand for themselves, so rows may be of any length that pleases the package.
        at_once = max(1, _NUMBERS_AT_ONCE // block_numbers // _GROUP_ROWS)
        whole = num_blocks // at_once * at_once
        parts = [data[:whole].reshape(-1, at_once * block_bytes), data[whole:].reshape(1, -1)]
        numbers = np.concatenate([dequantize(part, kind).reshape(-1) for part in parts if part.size])
    except NotImplementedError:
        raise refusal(path, f"`{entry.name}` is stored as {kind.name}, which `gguf` cannot read") from None
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32)).reshape(entry.shape)


def _by_transformers(path: Path, config: PreTrainedConfig, entries: list[TensorEntry]) -> dict[str, Tensor]:
    """Leave it to transformers, which skips tensors it does not know, and count whether it did."""
    with silent():
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
        raise refusal(path, f"it holds {in_file:,} numbers, and what transformers makes of it {in_model:,}")
    return model.state_dict()
