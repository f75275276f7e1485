"""Presets: new Llama models with random weights in a few sizes, for the vocabulary of any tokenizer."""

from typing import Any

from tunewell.core.errors import UserError, close_names
from tunewell.core.files import read_data

PREFIX = "preset:"


PRESETS: dict[str, dict[str, Any]] = read_data(__file__, "presets.toml")
"""The sizes of each preset, as in `config.json`; its vocabulary comes from the tokenizer."""


def is_preset(model: str) -> bool:
    """Return True if a model name is a preset."""
    return model.startswith(PREFIX)


def find_preset(model: str) -> dict[str, Any]:
    """Return the sizes of `preset:NAME`; raise UserError with the known names if it does not exist."""
    name = model.removeprefix(PREFIX)
    if name in PRESETS:
        return PRESETS[name]
    closest = close_names(name, PRESETS)
    known = ", ".join(f"`{PREFIX}{known}`" for known in PRESETS)
    hint = f"did you mean `{PREFIX}{closest[0]}`? There are {known}" if closest else f"choose one of {known}"
    raise UserError(f"there is no preset `{name}`", fix=hint)


def llama_settings(preset: dict[str, Any], vocab_size: int, special_ids: dict[str, int]) -> dict[str, Any]:
    """Return the `config.json` values of a preset; `special_ids` contains the token ids of bos, eos and pad."""
    return preset | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        **{f"{name}_id": special_ids.get(name) for name in ("bos_token", "eos_token", "pad_token")},
    }
