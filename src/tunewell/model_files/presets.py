"""Presets: new Llama models with random weights in a few sizes, for the vocabulary of any tokenizer."""

from dataclasses import dataclass
from typing import Any

from tunewell.core.errors import UserError, close_names

PREFIX = "preset:"


@dataclass(frozen=True)
class Preset:
    """The dimensions of a model; its vocabulary comes from the tokenizer."""

    hidden_size: int
    feed_forward: int
    num_layers: int
    num_heads: int
    context_length: int
    is_tied: bool


# The number in each name is the number of parameters with a vocabulary of 32,768 tokens.
PRESETS = {
    "tiny-1m": Preset(32, 96, 4, 4, 1024, True),
    "tiny-23m": Preset(256, 1024, 6, 4, 1024, False),
    "small-84m": Preset(512, 2048, 12, 8, 2048, False),
    "base-277m": Preset(768, 3072, 24, 12, 2048, False),
}


def is_preset(model: str) -> bool:
    """Return True if a model name is a preset."""
    return model.startswith(PREFIX)


def find_preset(model: str) -> Preset:
    """Return the preset named by `preset:NAME`; raise UserError with the known names if it does not exist."""
    name = model.removeprefix(PREFIX)
    if name in PRESETS:
        return PRESETS[name]
    closest = close_names(name, PRESETS)
    known = ", ".join(f"`{PREFIX}{known}`" for known in PRESETS)
    hint = f"did you mean `{PREFIX}{closest[0]}`? There are {known}" if closest else f"choose one of {known}"
    raise UserError(f"there is no preset `{name}`", fix=hint)


def llama_settings(preset: Preset, vocab_size: int, special_ids: dict[str, int]) -> dict[str, Any]:
    """Return the `config.json` values of a preset; `special_ids` contains the token ids of bos, eos and pad."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": preset.hidden_size,
        "intermediate_size": preset.feed_forward,
        "num_hidden_layers": preset.num_layers,
        "num_attention_heads": preset.num_heads,
        "num_key_value_heads": preset.num_heads,
        "head_dim": preset.hidden_size // preset.num_heads,
        "max_position_embeddings": preset.context_length,
        "tie_word_embeddings": preset.is_tied,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": special_ids.get("bos_token"),
        "eos_token_id": special_ids.get("eos_token"),
        "pad_token_id": special_ids.get("pad_token"),
    }
