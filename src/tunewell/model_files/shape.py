"""The shape of a model, read without torch: its linear layers, widths and number of weights."""

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import read_data
from tunewell.model_files.files import WEIGHT_SUFFIXES, ModelFiles, locate
from tunewell.model_files.gguf import read_header
from tunewell.model_files.presets import find_preset, is_preset, llama_settings
from tunewell.model_files.weights import find_key_map, tensor_shapes, weight_files

HIDDEN = ("hidden_size", "n_embd", "d_model")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_LAYER = re.compile(r"\.(\d+)\.")
_BUFFERS = re.compile(r"(?:^|\.)(?:inv_freq|masked_bias|(?:attn|attention)\.bias)$")
"""Tensors in old files that are no parameters: masks and frequencies."""
_OTHER_MODALITIES = re.compile(r"(?:^|\.)(?:vision|visual|audio|image|multi_modal|mm_)")
_FAMILIES = {name: frozenset(kinds.split()) for name, kinds in read_data(__file__, "families.toml").items()}
_TIED, _UNGATED, _UNSIZED = _FAMILIES["tied"], _FAMILIES["ungated"], _FAMILIES["unsized"]


@dataclass(frozen=True)
class Linear:
    """A linear layer inside a decoder layer."""

    name: str
    """The last part of its path: `q_proj`."""
    layer: int
    inputs: int
    outputs: int

    @property
    def num_weights(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True)
class ModelShape:
    """The widths and weights of a model."""

    hidden_size: int
    inner_size: int
    """Width of the feed-forward block that one token passes; with experts, of all experts that it is routed to."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    is_tied: bool
    linears: tuple[Linear, ...]
    num_expert_weights: int = 0
    """Weights of routed experts, which an adapter leaves frozen."""
    active_expert_share: float = 1.0
    """Share of the experts that one token is routed to."""
    num_other_weights: int = 0
    """Norms and biases."""
    file_bytes: int | None = None
    """Size of the weight files; None if they are not on this machine."""
    is_exact: bool = False
    """Whether the weights were counted in the files. Otherwise they follow from the config."""

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_size

    @cached_property
    def num_linear_weights(self) -> int:
        """Weights of the linear layers, experts included, without embedding and head."""
        return sum(linear.num_weights for linear in self.linears) + self.num_expert_weights

    @property
    def num_table_weights(self) -> int:
        """Weights of the embedding, and of the head unless it is tied."""
        return self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)

    @property
    def num_weights(self) -> int:
        return self.num_linear_weights + self.num_table_weights + self.num_other_weights

    @property
    def num_active_weights(self) -> int:
        """Weights of the linear layers that one token is multiplied with."""
        return self.num_linear_weights - int(self.num_expert_weights * (1 - self.active_expert_share))


def read_shape(model: str, *, vocab_size: int) -> ModelShape:
    """Read the shape of a model. `vocab_size` is that of the tokenizer; the embedding has at least as many rows.

    Raises UserError if the files do not describe a model.
    """
    config, files = read_config(model, vocab_size)
    if not config:
        raise UserError(
            f"`{model}` has no `config.json`, so its size is unknown",
            fix="use a folder of a model in transformers format, a `.gguf` file, a hub id or `preset:NAME`",
        )
    shape = shape_of_config(config, vocab_size)
    if "config.json" not in files.small:
        return replace(shape, file_bytes=files.gguf.stat().st_size, is_exact=True) if files.gguf else shape
    found = _weight_files(model)
    if not found:
        return shape
    size = sum(file.stat().st_size for file in found)
    tensors = {} if config.get("quantization_config") else _safetensors_shapes(found)
    return _with_tensors(shape, tensors, size) if tensors else replace(shape, file_bytes=size)


def num_parameters(model: str, config: dict[str, Any]) -> int | None:
    """Return the number of parameters of a language model: counted in its safetensors files, or from its config.

    Return None if it follows from neither.
    """
    text = text_part(config)
    if (number := config.get("num_in_file")) is not None or not first_count(text, "vocab_size"):
        return number
    tensors = {} if config.get("quantization_config") else _safetensors_shapes(_weight_files(model))
    is_tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings")))
    counted = [
        math.prod(shape)
        for name, shape in tensors.items()
        if not _BUFFERS.search(name) and not (is_tied and name == "lm_head.weight")
    ]
    kind = str(text.get("model_type"))
    if counted or kind in _UNSIZED:
        return sum(counted) or None
    try:
        shape = shape_of_config(config)
    except UserError:
        return None
    # qwen2 has three additional biases per layer, and qwen3 two additional norms.
    extra = {"qwen2": shape.query_size + 2 * shape.kv_size, "qwen3": 2 * shape.head_size}.get(kind, 0)
    return shape.num_weights + shape.num_layers * extra


def _weight_files(model: str) -> list[Path]:
    try:
        return [file for file in weight_files(model) if file.is_file()]
    except (UserError, OSError, ValueError, KeyError):
        return []


def read_config(model: str | Path, vocab_size: int = 0) -> tuple[dict[str, Any], ModelFiles]:
    """Return the config of a model, and its files. For a GGUF file or a preset, the config has the same keys.

    It is empty for a tokenizer without a model. `vocab_size` is that of a preset.
    """
    if is_preset(str(model)):
        return llama_settings(find_preset(str(model)), vocab_size, {}), ModelFiles(str(model), "preset")
    files, path = locate(model), Path(model).expanduser()
    if files.origin == "file" and path.suffix in WEIGHT_SUFFIXES and (preset := find_key_map(path).model):
        return llama_settings(find_preset(preset), vocab_size, {}), ModelFiles(files.source, "file")
    config = files.read_object("config.json")
    return (config if config or files.gguf is None else _config_of_gguf(files.gguf)), files


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with the sizes of the language model, which a multimodal model has in `text_config`."""
    nested = config.get("text_config")
    return config | nested if isinstance(nested, dict) else config


def first_count(values: dict[str, Any], *keys: str) -> int | None:
    """Return the first value of these keys that is a positive integer, or None."""
    return next((value for key in keys if type(value := values.get(key)) is int and value > 0), None)


def shape_of_config(config: dict[str, Any], vocab_size: int = 0) -> ModelShape:
    """Return the shape that the values of a `config.json` describe."""
    text = text_part(config)

    def number(*keys: str, default: int = 0) -> int:
        return first_count(text, *keys) or default

    hidden, layers = number(*HIDDEN), number(*LAYERS)
    heads = number("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
    if not (hidden and layers and heads):
        raise UserError(
            "the model's `config.json` does not state its size",
            where="`hidden_size`, `num_hidden_layers` or `num_attention_heads` is missing",
        )
    kind = str(text.get("model_type"))
    kv_heads = number("num_key_value_heads", default=1 if text.get("multi_query") else heads)
    head_size = number("head_dim", default=128 if kind == "qwen3" else hidden // heads)
    inner = number("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", default=4 * hidden)
    experts = number("num_local_experts", "num_experts", "n_routed_experts")
    active = number("num_experts_per_tok", "moe_topk", default=1)
    expert_inner = number("moe_intermediate_size", default=inner)
    queries, keys, gates = heads * head_size, kv_heads * head_size, 1 if kind in _UNGATED else 2
    attention = [("q_proj", hidden, queries), ("k_proj", hidden, keys), ("v_proj", hidden, keys)]
    attention.append(("o_proj", queries, hidden))
    mlp = [("gate_proj", hidden, inner), ("up_proj", hidden, inner), ("down_proj", inner, hidden)][2 - gates :]
    parts = attention if experts else attention + mlp
    vocab = max(number("vocab_size"), vocab_size)
    return ModelShape(
        hidden_size=hidden,
        inner_size=expert_inner * active if experts else inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        vocab_size=vocab,
        is_tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", kind in _TIED))),
        linears=tuple(Linear(name, layer, a, b) for layer in range(layers) for name, a, b in parts),
        num_expert_weights=layers * experts * (gates + 1) * hidden * expert_inner,
        active_expert_share=active / experts if experts else 1.0,
        num_other_weights=layers * 2 * hidden + hidden,
    )


def _config_of_gguf(path: Path) -> dict[str, Any]:
    metadata, table = read_header(path)
    own = {key.partition(".")[2]: value for key, value in metadata.items()}
    kind = metadata.get("general.architecture")
    # The RoPE frequency table is not a parameter.
    sizes = [math.prod(entry.shape) for entry in table if "rope_freqs" not in entry.name]
    return {
        "model_type": kind,
        "hidden_size": own.get("embedding_length"),
        "intermediate_size": own.get("feed_forward_length"),
        "num_hidden_layers": own.get("block_count"),
        "num_attention_heads": own.get("attention.head_count"),
        "num_key_value_heads": own.get("attention.head_count_kv"),
        "head_dim": own.get("attention.key_length"),
        "vocab_size": first_count(own, "vocab_size") or len(metadata.get("tokenizer.ggml.tokens") or []),
        "num_experts": own.get("expert_count"),
        "num_experts_per_tok": own.get("expert_used_count"),
        "moe_intermediate_size": own.get("expert_feed_forward_length"),
        "max_position_embeddings": own.get("context_length"),
        "tie_word_embeddings": not any(entry.name == "output.weight" for entry in table),
        "num_in_file": first_count(own, "parameter_count") or sum(sizes) or None,
    }


def _safetensors_shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in safetensors files, or nothing if a file has another format or is damaged."""
    if any(file.suffix != ".safetensors" for file in files):
        return {}
    try:
        shapes = {name: shape for file in files for name, shape in tensor_shapes(file).items()}
    except (OSError, ValueError):
        return {}
    return {name: shape for name, shape in shapes.items() if not _OTHER_MODALITIES.search(name)}


def _with_tensors(shape: ModelShape, tensors: dict[str, tuple[int, ...]], size: int) -> ModelShape:
    """Return the shape with the weights counted in the files."""
    linears: list[Linear] = []
    num_experts = num_tables = num_tensors = 0
    for name, sizes in tensors.items():
        found, number = _LAYER.search(name), math.prod(sizes)
        num_tensors += number
        if found is None and len(sizes) == 2:
            num_tables += number
        elif found is not None and (".experts." in name or len(sizes) == 3):
            num_experts += number
        elif found is not None and len(sizes) == 2 and name.endswith(".weight"):
            last = name.removesuffix(".weight").rpartition(".")[2]
            linears.append(Linear(last, int(found[1]), sizes[1], sizes[0]))
    if not linears or not num_tables:
        return replace(shape, file_bytes=size)
    return replace(
        shape,
        linears=tuple(linears),
        is_tied=num_tables < 1.5 * shape.vocab_size * shape.hidden_size,
        num_expert_weights=num_experts,
        num_other_weights=num_tensors - num_tables - num_experts - sum(linear.num_weights for linear in linears),
        file_bytes=size,
        is_exact=True,
    )
