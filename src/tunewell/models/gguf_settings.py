"""Read a model's settings from a GGUF file, and refuse a file of which a setting would be ignored."""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tunewell.core.errors import UserError
from tunewell.core.gguf import read_metadata, read_tensor_table
from tunewell.models.gguf_weights import LLAMA_NAMED, ROPE_TABLE, read_tensor, refusal
from tunewell.models.quiet import silent

_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
# Keys of an architecture that change no number, or that only speak about another key.
_HARMLESS = frozenset(
    {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length"}
)
# Keys that transformers leaves to its defaults -> the setting that must then say the same.
_MUST_MATCH = {
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


def read_gguf_config(path: Path) -> PreTrainedConfig:
    """Read a model's settings from a GGUF file; raise UserError for a file that would not be honoured as a whole."""
    if _PART.search(path.name):
        raise refusal(path, "it is one of several parts")
    metadata, names = read_metadata(path), {entry.name for entry in read_tensor_table(path)}
    if not names:
        raise UserError(f"`{path.name}` holds a vocabulary and no weights", where=str(path))
    kind = str(metadata.get("general.architecture"))
    config = _config_of(metadata, names) if kind in LLAMA_NAMED else _config_by_transformers(path)
    _check(path, kind, metadata, config)
    if ROPE_TABLE in names:
        _apply_rope_table(path, config)
    return config


def _config_of(metadata: dict[str, Any], names: set[str]) -> PreTrainedConfig:
    """Name the settings as transformers does, without its reader, which takes seconds for a vocabulary."""
    kind = metadata["general.architecture"]
    keys = {f"{kind}.{key}": name for key, name in GGUF_CONFIG_MAPPING[kind].items()}
    keys |= {f"tokenizer.{key}": name for key, name in GGUF_CONFIG_MAPPING["tokenizer"].items()}
    settings = {name: metadata[key] for key, name in keys.items() if name is not None and key in metadata}
    settings.setdefault("vocab_size", len(metadata.get("tokenizer.ggml.tokens") or ()))
    settings.pop("unk_token_id", None)
    if kind == "qwen3" and f"{kind}.attention.key_length" in metadata:
        # transformers takes 128 for granted.
        settings["head_dim"] = metadata[f"{kind}.attention.key_length"]
    return AutoConfig.for_model(kind, tie_word_embeddings="output.weight" not in names, **settings)


def _config_by_transformers(path: Path) -> PreTrainedConfig:
    try:
        with silent():
            config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except (ImportError, KeyError, NotImplementedError, ValueError) as error:
        raise refusal(path, f"transformers does not read it: {error}") from error
    config.__dict__.pop("quantization_config", None)
    return config


def _check(path: Path, kind: str, metadata: dict[str, Any], config: PreTrainedConfig) -> None:
    """Refuse settings that transformers would leave out without a word."""
    known = GGUF_CONFIG_MAPPING.get(kind) or GGUF_CONFIG_MAPPING.get(config.model_type) or {}
    own = {key.removeprefix(f"{kind}."): value for key, value in metadata.items() if key.startswith(f"{kind}.")}
    scaling = own.pop("rope.scaling.type", "none")
    if scaling != "none":
        raise refusal(path, f"it stretches positions by `{scaling}`, which is not read from such files")
    own.pop("rope.scaling.factor", None)
    for key, value in own.items():
        name = _MUST_MATCH.get(key)
        if known.get(key) is not None or key in _HARMLESS or (key == "attention.causal" and value is True):
            continue
        if name is None:
            raise refusal(path, f"its setting `{kind}.{key}` ({value!r:.60}) is not known here")
        if not _says(config, name, value):
            used = getattr(config, name, None)
            raise refusal(path, f"it sets `{kind}.{key}` to {value!r:.60}, and transformers would use {used}")


def _says(config: PreTrainedConfig, name: str, value: Any) -> bool:
    found = getattr(config, name, None)
    if name == "head_dim":
        rope = getattr(config, "rope_parameters", None) or {}
        whole = found or config.hidden_size // config.num_attention_heads
        return value in (whole, int(whole * rope.get("partial_rotary_factor", 1.0)))
    if name == "sliding_window" and found is None:
        # A window as long as the context cuts nothing off.
        return value >= config.max_position_embeddings or value == 0
    return found is not None and float(found) == float(value)


def _apply_rope_table(path: Path, config: PreTrainedConfig) -> None:
    """Read Llama 3's stretching of positions, which such files hold as a table that transformers does not look at.

    The table is what each frequency is divided by; its largest value is the factor, and the rest of the rule is the
    same in every Llama 3. A table that this rule does not give is refused.
    """
    table = read_tensor(path, ROPE_TABLE)
    base = config.rope_parameters["rope_theta"]
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    config.rope_parameters = {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": float(table.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    expected = base ** (-torch.arange(0, size, 2, dtype=torch.float32) / size) / table
    if stretched.shape != expected.shape or not torch.allclose(stretched, expected, rtol=1e-4, atol=0):
        raise refusal(path, f"its table `{ROPE_TABLE}` stretches positions in a way not known here")
