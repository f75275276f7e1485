"""Convert `config.json` to GGUF metadata; reject settings that llama.cpp would compute differently."""

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tunewell.core.errors import UserError

# llama.cpp: every fourth layer of SmolLM3 turns nothing, the sixth layer of Gemma 3 sees everything.
_STILL_LAYER_STEP = 4
WHOLE_LAYER_STEP = 6
# llama.cpp takes another scale for Gemma 3's attention where a model has so many layers (the one of 27 B).
_LAYERS_OF_27B = 62


@dataclass(frozen=True)
class Settings:
    """A config with its defaults, and what is known of its architecture."""

    model_type: str
    values: dict[str, Any]
    rope: dict[str, Any]
    """RoPE of the layers with full attention."""
    spec: dict[str, Any]
    part: dict[str, Any]
    """Names of the language model in the files of a multimodal model; empty for a text model."""
    config: PreTrainedConfig
    notes: tuple[str, ...]
    """What llama.cpp computes differently, as notes for the user."""

    @property
    def gguf_name(self) -> str:
        """The architecture's name in llama.cpp."""
        return self.spec["gguf"]


def require_convertible(config: dict[str, Any]) -> None:
    """Raise UserError if a model with this `config.json` cannot be converted to GGUF."""
    read_settings(config)


@cache
def architectures() -> dict[str, Any]:
    """Return the table of supported architectures."""
    text = files("tunewell.export.gguf").joinpath("architectures.json").read_text(encoding="utf-8")
    return json.loads(text)


def read_settings(config: dict[str, Any]) -> Settings:
    """Fill in a config's defaults; raise UserError for an architecture or setting that llama.cpp does not support."""
    table = architectures()
    kind = str(config.get("model_type"))
    part = table["text_parts"].get(kind)
    own = config if part is None else config.get("text_config", {})
    model_type = kind if part is None else part["model_type"]
    spec = table["architectures"].get(model_type)
    if spec is None:
        known = ", ".join(sorted({*table["architectures"], *table["text_parts"]}))
        raise UserError(
            f"a model of type `{kind}` cannot be written as GGUF",
            where="model_type in config.json",
            fix=f"export it as `adapter` or `merged`; the types that can be written are {known}",
        )
    if config.get("quantization_config"):
        raise UserError(
            "the weights are already quantised",
            where="quantization_config in config.json",
            fix="use the unquantised model",
        )
    filled = _filled(model_type, own)
    values = _with_derived(filled.to_dict())
    rope = _rope_of_whole_layers(values)
    if problems := [*_wrong_settings(values, spec), *_wrong_layers(model_type, values), *_wrong_rope(values, spec)]:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(
            f"llama.cpp would compute this model differently: {problems[0]}{more}",
            where=f"config.json of a `{kind}` model",
            fix="export it as `adapter` or `merged`",
        )
    notes = [*_notes(values, spec), *(["only the language model is written, not the vision part"] if part else [])]
    return Settings(model_type, values, rope, spec, part or {}, filled, tuple(notes))


def _filled(model_type: str, config: dict[str, Any]) -> PreTrainedConfig:
    try:
        return CONFIG_MAPPING[model_type].from_dict({k: v for k, v in config.items() if k != "model_type"})
    except (KeyError, TypeError, ValueError, StrictDataclassError) as error:
        raise UserError(f"the settings cannot be read: {error}", where="config.json") from error


def _with_derived(values: dict[str, Any]) -> dict[str, Any]:
    """Add derived settings: head size, rotary dimensions and RoPE base."""
    heads = values["num_attention_heads"]
    values["num_key_value_heads"] = values.get("num_key_value_heads") or heads
    values["head_dim"] = values.get("head_dim") or values["hidden_size"] // heads
    rope = values.get("rope_parameters") or {}
    whole = rope.get("full_attention", rope)
    values["rope_theta"] = whole["rope_theta"]
    values["local_rope_theta"] = rope.get("sliding_attention", {}).get("rope_theta")
    values["partial_rotary_factor"] = whole.get("partial_rotary_factor", 1.0)
    values["rotary_dim"] = int(values["partial_rotary_factor"] * values["head_dim"])
    return values


def _rope_of_whole_layers(values: dict[str, Any]) -> dict[str, Any]:
    rope = values.get("rope_parameters") or {}
    return rope.get("full_attention", rope)


def _wrong_settings(values: dict[str, Any], spec: dict[str, Any]) -> list[str]:
    found = [
        f"`{name}` is {values.get(name)!r}; llama.cpp assumes {allowed[0]!r}"
        for name, allowed in spec["must_be"].items()
        if values.get(name) not in allowed
    ]
    width = values["hidden_size"] / values["num_attention_heads"]
    if spec.get("square_heads") and values["head_dim"] != width:
        found.append(f"`head_dim` is {values['head_dim']}; llama.cpp assumes {width:g}")
    return found


def _wrong_layers(model_type: str, values: dict[str, Any]) -> list[str]:
    """Check the settings that llama.cpp derives from the number of layers."""
    num_layers = values["num_hidden_layers"]
    if model_type == "smollm3":
        turning = [int((index + 1) % _STILL_LAYER_STEP != 0) for index in range(num_layers)]
        return [] if values["no_rope_layers"] == turning else ["`no_rope_layers` is not every fourth layer"]
    if model_type == "gemma3_text":
        is_large = num_layers == _LAYERS_OF_27B
        expected = values["hidden_size"] // values["num_attention_heads"] if is_large else values["head_dim"]
        given = values["query_pre_attn_scalar"]
        return [] if given == expected else [f"`query_pre_attn_scalar` is {given}; llama.cpp assumes {expected}"]
    return []


def _wrong_rope(values: dict[str, Any], spec: dict[str, Any]) -> list[str]:
    rope = _rope_of_whole_layers(values)
    kind = rope.get("rope_type", "default")
    near = (values.get("rope_parameters") or {}).get("sliding_attention", {}).get("rope_type", "default")
    found = [f"the RoPE scaling `{kind}` is not supported"] if kind not in spec["rope"] else []
    if near != "default":
        found.append(f"the RoPE scaling `{near}` of sliding-window layers is not supported")
    if kind == "yarn":
        odd = [name for name in ("mscale", "mscale_all_dim") if rope.get(name)]
        scale = rope.get("attention_factor")
        if odd or (scale is not None and not math.isclose(scale, 0.1 * math.log(rope["factor"]) + 1, rel_tol=1e-4)):
            found.append(f"`yarn` sets {', '.join(f'`{name}`' for name in odd) or '`attention_factor`'}")
        if rope.get("truncate") is False:
            found.append("`yarn` does not round its bounds (`truncate`)")
    return found


def _notes(values: dict[str, Any], spec: dict[str, Any]) -> list[str]:
    """Return notes on what differs only in long texts."""
    window, kinds = values.get("sliding_window"), values.get("layer_types")
    is_used = window and (kinds is None or "sliding_attention" in kinds)
    if is_used and window < values["max_position_embeddings"] and not spec.get("windows"):
        return [
            f"llama.cpp ignores the sliding window and attends to more than the last {window:,} tokens: answers to "
            "longer texts differ"
        ]
    return []


# GGUF metadata and RoPE tables.

FieldValue = int | float | str | bool | list[bool]


def metadata_fields(settings: Settings) -> dict[str, FieldValue]:
    """Return the architecture's metadata by full key; integers are written as uint32."""
    table = architectures()
    found: dict[str, FieldValue] = {}
    for group in settings.spec["fields"]:
        for key, name in table["fields"][group].items():
            value = settings.values.get(name)
            if value is not None:
                found[key] = float(value) if key in table["floats"] else value
    found |= _stretching(settings) | _windows(settings)
    return {f"{settings.gguf_name}.{key}": value for key, value in found.items()}


def rope_tables(settings: Settings) -> dict[str, np.ndarray]:
    """Return the tensors of RoPE scaling that metadata cannot express."""
    rope = settings.rope
    if rope.get("rope_type") == "llama3":
        size = settings.values["rotary_dim"]
        plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](settings.config, torch.device("cpu"))
        return {"rope_freqs.weight": (plain / stretched).numpy()}
    if rope.get("rope_type") == "longrope":
        tables = {name: np.array(rope[f"{name}_factor"], np.float32) for name in ("long", "short")}
        for name, table in tables.items():
            if table.shape != (settings.values["rotary_dim"] // 2,):
                raise UserError(
                    f"`{name}_factor` has {len(table)} numbers instead of {settings.values['rotary_dim'] // 2}",
                    where="rope_parameters in config.json",
                )
        return {f"rope_factors_{name}.weight": table for name, table in tables.items()}
    return {}


def _stretching(settings: Settings) -> dict[str, FieldValue]:
    rope = settings.rope
    kind, found = rope.get("rope_type", "default"), {}
    if kind in ("linear", "yarn"):
        found = {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = _original_length(settings)
        for name in ("beta_fast", "beta_slow"):
            if rope.get(name) is not None:
                found[f"rope.scaling.yarn_{name}"] = float(rope[name])
    if settings.model_type == "phi3":
        # Phi 3 has these whether positions are stretched or not; a window of 0 is how llama.cpp knows Phi 4.
        found["rope.scaling.original_context_length"] = _original_length(settings)
        found["attention.sliding_window"] = settings.values.get("sliding_window") or 0
    if kind == "longrope":
        # llama.cpp knows the rest by the tables of `rope_tables`.
        found["rope.scaling.attn_factor"] = _long_attention_factor(settings)
    return found


def _original_length(settings: Settings) -> int:
    own = settings.rope.get("original_max_position_embeddings")
    whole = settings.values["max_position_embeddings"]
    return int(own or settings.values.get("original_max_position_embeddings") or whole)


def _long_attention_factor(settings: Settings) -> float:
    given = settings.rope.get("attention_factor")
    if given is not None:
        return float(given)
    original = _original_length(settings)
    factor = settings.values["max_position_embeddings"] / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _windows(settings: Settings) -> dict[str, Any]:
    """Return which layers use the sliding window, if it is not the pattern that llama.cpp assumes."""
    kinds = settings.values.get("layer_types")
    if not settings.spec.get("windows") or not kinds:
        return {}
    is_near = [kind == "sliding_attention" for kind in kinds]
    if is_near == [(index + 1) % WHOLE_LAYER_STEP != 0 for index in range(len(kinds))]:
        return {}
    return {"attention.sliding_window_pattern": is_near}
