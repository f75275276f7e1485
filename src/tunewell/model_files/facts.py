"""Facts about a model, read without torch: sizes, context limit, number of parameters, weight fingerprint."""

import hashlib
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import open_file, parse_json, read_text
from tunewell.model_files.files import WEIGHT_SUFFIXES, ModelFiles, locate
from tunewell.model_files.gguf import TensorEntry, read_header
from tunewell.model_files.presets import PREFIX, find_preset, is_preset

# A key map is a small JSON file next to a checkpoint of other training code. It renames the weights.

_KEYS = ("model", "weights", "rename", "drop", "interleaved_rotary")


@dataclass(frozen=True)
class KeyMap:
    """A mapping from the names in a checkpoint to transformers' names."""

    model: str | None = None
    weights: str | None = None
    rename: tuple[tuple[str, str], ...] = ()
    drop: tuple[str, ...] = ()
    interleaved_rotary: bool = False

    def name_of(self, key: str) -> str | None:
        """Return the new name of an entry, or None if the entry is dropped."""
        if any(re.search(pattern, key) for pattern in self.drop):
            return None
        for pattern, replacement in self.rename:
            key = re.sub(pattern, replacement, key)
        return key


def key_map_path(checkpoint: Path) -> Path:
    """Return the path of a checkpoint's key map: `model.keys.json` for `model.pt`."""
    return checkpoint.with_name(f"{checkpoint.stem}.keys.json")


def find_key_map(checkpoint: Path) -> KeyMap:
    """Read the key map of a checkpoint. Return an empty key map if the file does not exist."""
    path = key_map_path(checkpoint)
    if not path.is_file():
        return KeyMap()
    try:
        return _key_map(parse_json(read_text(path)))
    except OSError as error:
        raise UserError(f"the key map cannot be read: {error.strerror}", where=str(path)) from None
    except (ValueError, RecursionError, re.error) as error:
        raise UserError(f"the key map is not valid: {error}", where=str(path), fix=_FIX) from None


_FIX = f"a key map is a JSON object with some of {', '.join(f'`{key}`' for key in _KEYS)}"


def _key_map(raw: Any) -> KeyMap:
    if not isinstance(raw, dict):
        raise ValueError("the file is not a JSON object")
    if unknown := sorted(raw.keys() - set(_KEYS)):
        raise ValueError(f"unknown key `{unknown[0]}`")
    rename, drop = raw.get("rename", {}), raw.get("drop", [])
    texts = [raw.get("model") or "", raw.get("weights") or "", *drop]
    if not isinstance(rename, dict) or not isinstance(drop, list):
        raise ValueError("`rename` must be an object and `drop` a list")
    texts += [*rename, *rename.values()]
    if not all(isinstance(text, str) for text in texts) or type(raw.get("interleaved_rotary", False)) is not bool:
        raise ValueError("names and patterns must be strings, and `interleaved_rotary` true or false")
    for pattern in [*rename, *drop]:
        re.compile(pattern)
    if raw.get("model") and not is_preset(raw["model"]):
        raise ValueError(
            "`model` must be a preset, like `preset:tiny-23m`; for another shape, put a config.json in this folder"
        )
    return KeyMap(
        raw.get("model"), raw.get("weights"), tuple(rename.items()), tuple(drop), raw.get("interleaved_rotary", False)
    )


# Attention with separate q, k, v and o, a gated feed-forward block, and two norms per layer.
_LLAMA_SHAPED = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers")
_MAX_LAYERS = 10_000
"""Maximum number of layers. transformers makes a list of them before anything else; real models have up to 130."""
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length")


@dataclass(frozen=True)
class ModelFacts:
    """The name and sizes of a model. Unknown values are None."""

    name: str
    architecture: str | None
    context_limit: int | None
    """The longest supported sequence, after rope scaling."""
    vocab_size: int | None
    """Number of rows of the embedding, which may exceed the tokenizer's vocabulary."""
    hidden_size: int | None
    num_parameters: int | None
    """None for a preset, because the size of its embedding depends on the tokenizer."""
    quantization: dict[str, Any] | None = None
    """`quantization_config` of a model that was saved quantised."""


def read_facts(model: str | Path) -> ModelFacts:
    """Read a model's facts from its `config.json` or GGUF file. For a tokenizer without a model, all are None."""
    if is_preset(str(model)):
        return _from_preset(str(model), str(model).removeprefix(PREFIX))
    files = locate(model)
    path = Path(model).expanduser()
    if files.origin == "file" and path.suffix in WEIGHT_SUFFIXES and (shape := find_key_map(path).model):
        return _from_preset(shape, _name(files))
    config = files.read_object("config.json")
    if config:
        return _from_config(files, config)
    if files.gguf is not None:
        facts = _from_gguf(files.gguf)
        return replace(facts, name=_name(files)) if files.origin == "ollama" else facts
    return ModelFacts(_name(files), None, None, None, None, None)


def _from_preset(shape: str, name: str) -> ModelFacts:
    preset = find_preset(shape)
    return ModelFacts(name, "LlamaForCausalLM", preset.context_length, None, preset.hidden_size, None)


def _from_config(files: ModelFiles, config: dict[str, Any]) -> ModelFacts:
    nested = config.get("text_config")
    # In a multimodal model, the sizes of the language model are in `text_config`.
    text = config | nested if isinstance(nested, dict) else config
    for key in _LAYER_KEYS:
        if (_count(text, key) or 0) > _MAX_LAYERS:
            raise UserError(
                f"the config of `{_name(files)}` is damaged: it has too many layers",
                where=f"`{key}` in config.json is {text[key]:,}",
                fix="download the model again, or use another one",
            )
    architectures = config.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else config.get("model_type")
    return ModelFacts(
        name=_name(files),
        architecture=named if isinstance(named, str) else None,
        context_limit=_count(text, *_CONTEXT_KEYS),
        vocab_size=_count(text, "vocab_size"),
        hidden_size=_count(text, "hidden_size", "n_embd"),
        num_parameters=None if isinstance(nested, dict) else _config_parameters(text),
        quantization=saved if isinstance(saved := config.get("quantization_config"), dict) else None,
    )


def _from_gguf(path: Path) -> ModelFacts:
    metadata, table = read_header(path)
    architecture = metadata.get("general.architecture")
    own = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    vocab_size = _count(own, "vocab_size") or len(tokens) or None
    return ModelFacts(
        # Not `general.name` from the file, because converters store the name of a training folder there.
        name=path.stem,
        architecture=architecture if isinstance(architecture, str) else None,
        context_limit=_count(own, "context_length"),
        vocab_size=vocab_size,
        hidden_size=_count(own, "embedding_length"),
        num_parameters=_count(metadata, "general.parameter_count")
        or (_tensor_parameters(table) if architecture in _LLAMA_SHAPED else None),
    )


def _tensor_parameters(table: list[TensorEntry]) -> int | None:
    """Return the number of parameters in a GGUF file, without the rope frequency table."""
    return sum(math.prod(entry.shape) for entry in table if "rope_freqs" not in entry.name) or None


def _config_parameters(config: dict[str, Any]) -> int | None:
    kind = config.get("model_type")
    heads, hidden = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    vocab, layers = _count(config, "vocab_size"), _count(config, "num_hidden_layers")
    feed_forward = _count(config, "intermediate_size")
    has_odd_biases = kind != "qwen2" and (config.get("attention_bias") or config.get("mlp_bias"))
    if kind not in _LLAMA_SHAPED or has_odd_biases or not (heads and hidden and vocab and layers and feed_forward):
        return None
    kv_heads = _count(config, "num_key_value_heads") or heads
    # In transformers, the default head size of Qwen3 is 128 for any hidden size.
    head_size = _count(config, "head_dim") or (128 if kind == "qwen3" else hidden // heads)
    # qwen2 has three additional biases per layer, and qwen3 two additional norms.
    extra = {"qwen2": (heads + 2 * kv_heads) * head_size, "qwen3": 2 * head_size}.get(kind, 0)
    layer = 2 * hidden * head_size * (heads + kv_heads) + 3 * hidden * feed_forward + 2 * hidden + extra
    tables = vocab * hidden * (1 if config.get("tie_word_embeddings", False) else 2)
    return tables + hidden + layers * layer


def _count(values: dict[str, Any], *keys: str) -> int | None:
    """Return the first value of these keys that is a positive integer, or None."""
    found = (values.get(key) for key in keys)
    return next((value for value in found if type(value) is int and value > 0), None)


def _name(files: ModelFiles) -> str:
    if files.origin == "hub":
        return files.source
    if files.origin in ("package", "ollama"):
        return files.source.partition(":")[2]
    path = Path(files.source).expanduser()
    return path.resolve().name if path.is_dir() else path.stem


_WHOLE_BYTES = 16 << 20
"""Files up to this size are hashed completely."""
_NUM_BLOCKS = 1024
_BLOCK_BYTES = 4096
"""A 5 GB file has one block every 5 MB, so every matrix of the model contains a block."""


def fingerprint_weights(model: str) -> str | None:
    """Return a hash of a model's weight files, or None for a preset, which has no weight files.

    It covers file sizes and evenly spread blocks, not names, folders or times, so a copy has the same fingerprint. It
    reads the same files as `load_model`, which must be on this machine.
    """
    files = [] if is_preset(model) else weight_files(model)
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        _hash_file(digest, file)
    return digest.hexdigest()


def weight_files(model: str, files: ModelFiles | None = None) -> list[Path]:
    """Return the weight files of a model, which may not be on this machine."""
    files, path = files or locate(model), Path(model).expanduser()
    if files.origin == "file" and path.suffix in WEIGHT_SUFFIXES:
        return [path, *(other for other in [key_map_path(path)] if other.is_file())]
    if files.gguf is not None:
        return [files.gguf]
    folder = next((file.parent for file in files.small.values()), path)
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            parts = parse_json(read_text(index))["weight_map"].values()
            return [folder / part for part in sorted(set(parts))]
    kinds = ("*.safetensors", "*.bin", "*.gguf")
    return next((found for kind in kinds if (found := sorted(folder.glob(kind)))), [])


def _hash_file(digest: "hashlib._Hash", file: Path) -> None:
    size = file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with open_file(file) as opened:
        if size <= _WHOLE_BYTES:
            digest.update(opened.read())
            return
        for number in range(_NUM_BLOCKS):
            opened.seek((size - _BLOCK_BYTES) * number // (_NUM_BLOCKS - 1))
            digest.update(opened.read(_BLOCK_BYTES))
