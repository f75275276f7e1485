"""Convert `config.json` to GGUF metadata; reject settings that llama.cpp would compute differently."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tunewell.core.errors import UserError
from tunewell.core.files import read_data

# Constants of llama.cpp: every fourth layer of SmolLM3 has no RoPE, every sixth layer of Gemma 3 has full attention.
_NO_ROPE_STEP = 4
_FULL_ATTENTION_STEP = 6
# llama.cpp scales the attention of Gemma 3 differently in the 27B model, which it recognises by its number of layers.
_LAYERS_OF_27B = 62

FieldValue = int | float | str | bool | list[bool]


@dataclass(frozen=True)
class Settings:
    """A config with its defaults, and the entry of its architecture in `llama_cpp.json`."""

    model_type: str
    values: dict[str, Any]
    rope: dict[str, Any]
    """RoPE parameters of the layers with full attention."""
    spec: dict[str, Any]
    config: PreTrainedConfig

    @property
    def gguf_name(self) -> str:
        """The architecture's name in llama.cpp."""
        return self.spec["gguf"]

    @property
    def ignored_window(self) -> int | None:
        """The sliding window that llama.cpp ignores, if any."""
        window, layer_types = self.values.get("sliding_window"), self.values.get("layer_types")
        is_used = window and (layer_types is None or "sliding_attention" in layer_types)
        return window if is_used and not self.spec.get("sliding_windows") else None

    @property
    def notes(self) -> list[str]:
        """Notes for the user on what llama.cpp computes differently."""
        window = self.ignored_window
        if window is None or window >= self.values["max_position_embeddings"]:
            return []
        return [
            f"llama.cpp ignores the sliding window and attends to more than the last {window:,} tokens, so answers to "
            "longer texts differ"
        ]


@cache
def llama_cpp_facts() -> dict[str, Any]:
    """Return the table of architectures and settings that llama.cpp supports and assumes."""
    return read_data(__file__, "llama_cpp.json")


def read_settings(config: dict[str, Any]) -> Settings:
    """Read a config with its defaults; raise UserError for settings that llama.cpp does not support."""
    table = llama_cpp_facts()
    kind = str(config.get("model_type"))
    spec = table["architectures"].get(kind)
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
    filled = _fill_defaults(kind, config)
    values = filled.to_dict()
    rope, sliding_rope = _rope_parameters(values)
    _add_derived(values, rope, sliding_rope)
    problems = [
        *_setting_problems(values, spec),
        *_layer_problems(kind, values),
        *_rope_problems(rope, sliding_rope, spec["rope"]),
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(
            f"llama.cpp would compute this model differently: {problems[0]}{more}",
            where=f"config.json of a `{kind}` model",
            fix="export it as `adapter` or `merged`",
        )
    return Settings(kind, values, rope, spec, filled)


def _fill_defaults(model_type: str, config: dict[str, Any]) -> PreTrainedConfig:
    try:
        return CONFIG_MAPPING[model_type].from_dict({k: v for k, v in config.items() if k != "model_type"})
    except (KeyError, TypeError, ValueError, StrictDataclassError) as error:
        raise UserError(f"config.json cannot be read: {error}", where="config.json") from error


def _rope_parameters(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the RoPE parameters of full-attention layers and of sliding-window layers."""
    rope = values.get("rope_parameters") or {}
    return rope.get("full_attention", rope), rope.get("sliding_attention", {})


def _add_derived(values: dict[str, Any], rope: dict[str, Any], sliding_rope: dict[str, Any]) -> None:
    """Add derived settings: head size, rotary dimensions and RoPE base."""
    heads = values["num_attention_heads"]
    values["num_key_value_heads"] = values.get("num_key_value_heads") or heads
    values["head_dim"] = values.get("head_dim") or values["hidden_size"] // heads
    values["rope_theta"] = rope["rope_theta"]
    values["local_rope_theta"] = sliding_rope.get("rope_theta")
    values["partial_rotary_factor"] = rope.get("partial_rotary_factor", 1.0)
    values["rotary_dim"] = int(values["partial_rotary_factor"] * values["head_dim"])


def _setting_problems(values: dict[str, Any], spec: dict[str, Any]) -> list[str]:
    problems = [
        f"`{name}` is {values.get(name)!r}; llama.cpp assumes {accepted[0]!r}"
        for name, accepted in spec["must_be"].items()
        if values.get(name) not in accepted
    ]
    head_dim = values["hidden_size"] / values["num_attention_heads"]
    if spec.get("square_heads") and values["head_dim"] != head_dim:
        problems.append(f"`head_dim` is {values['head_dim']}; llama.cpp assumes {head_dim:g}")
    return problems


def _layer_problems(model_type: str, values: dict[str, Any]) -> list[str]:
    """Return the problems with settings that llama.cpp derives from the number of layers."""
    num_layers = values["num_hidden_layers"]
    if model_type == "smollm3":
        assumed = [int((index + 1) % _NO_ROPE_STEP != 0) for index in range(num_layers)]
        return [] if values["no_rope_layers"] == assumed else ["`no_rope_layers` must be every fourth layer"]
    if model_type == "gemma3_text":
        is_large = num_layers == _LAYERS_OF_27B
        assumed = values["hidden_size"] // values["num_attention_heads"] if is_large else values["head_dim"]
        scalar = values["query_pre_attn_scalar"]
        return [] if scalar == assumed else [f"`query_pre_attn_scalar` is {scalar}; llama.cpp assumes {assumed}"]
    return []


def _rope_problems(rope: dict[str, Any], sliding_rope: dict[str, Any], supported: list[str]) -> list[str]:
    kind, sliding_kind = (one.get("rope_type", "default") for one in (rope, sliding_rope))
    problems = [f"the RoPE scaling `{kind}` is not supported"] if kind not in supported else []
    if sliding_kind != "default":
        problems.append(f"the RoPE scaling `{sliding_kind}` of sliding-window layers is not supported")
    if kind == "yarn":
        names = [name for name in ("mscale", "mscale_all_dim") if rope.get(name)]
        scale = rope.get("attention_factor")
        if scale is not None and not math.isclose(scale, 0.1 * math.log(rope["factor"]) + 1, rel_tol=1e-4):
            names = names or ["attention_factor"]
        if names:
            problems.append(f"`yarn` sets {', '.join(f'`{name}`' for name in names)}")
        if rope.get("truncate") is False:
            problems.append("llama.cpp rounds the bounds of `yarn`, but `truncate` is false")
    return problems


# GGUF metadata and RoPE tables.


def metadata_fields(settings: Settings) -> dict[str, FieldValue]:
    """Return the architecture's metadata fields by full key; integers are written as uint32."""
    table = llama_cpp_facts()
    fields: dict[str, FieldValue] = {}
    for group in settings.spec["fields"]:
        for key, name in table["fields"][group].items():
            value = settings.values.get(name)
            if value is not None:
                fields[key] = float(value) if key in table["floats"] else value
    fields |= _rope_scaling_fields(settings) | _sliding_window_fields(settings)
    return {f"{settings.gguf_name}.{key}": value for key, value in fields.items()}


def rope_tables(settings: Settings) -> dict[str, torch.Tensor]:
    """Return the RoPE scaling tensors, for RoPE types that metadata fields cannot express."""
    rope, size = settings.rope, settings.values["rotary_dim"]
    if rope.get("rope_type") == "llama3":
        unscaled = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](settings.config, torch.device("cpu"))
        return {"rope_freqs.weight": unscaled / scaled}
    if rope.get("rope_type") == "longrope":
        tables = {name: torch.tensor(rope[f"{name}_factor"], dtype=torch.float32) for name in ("long", "short")}
        for name, table in tables.items():
            if table.shape != (size // 2,):
                raise UserError(
                    f"`{name}_factor` has {len(table)} values; expected {size // 2}",
                    where="rope_parameters in config.json",
                )
        return {f"rope_factors_{name}.weight": table for name, table in tables.items()}
    return {}


def _rope_scaling_fields(settings: Settings) -> dict[str, FieldValue]:
    rope = settings.rope
    kind, fields = rope.get("rope_type", "default"), {}
    if kind in ("linear", "yarn"):
        fields = {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        fields["rope.scaling.original_context_length"] = _original_context_length(settings)
        for name in ("beta_fast", "beta_slow"):
            if rope.get(name) is not None:
                fields[f"rope.scaling.yarn_{name}"] = float(rope[name])
    if settings.model_type == "phi3":
        # Phi 3 has these fields with or without RoPE scaling. llama.cpp recognises Phi 4 by a window of 0.
        fields["rope.scaling.original_context_length"] = _original_context_length(settings)
        fields["attention.sliding_window"] = settings.values.get("sliding_window") or 0
    if kind == "longrope":
        # llama.cpp reads the other parameters from the tensors of `rope_tables`.
        fields["rope.scaling.attn_factor"] = _longrope_attention_factor(settings)
    return fields


def _original_context_length(settings: Settings) -> int:
    key = "original_max_position_embeddings"
    values = settings.values
    return int(settings.rope.get(key) or values.get(key) or values["max_position_embeddings"])


def _longrope_attention_factor(settings: Settings) -> float:
    if (factor := settings.rope.get("attention_factor")) is not None:
        return float(factor)
    original = _original_context_length(settings)
    factor = settings.values["max_position_embeddings"] / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _sliding_window_fields(settings: Settings) -> dict[str, FieldValue]:
    """Return the layers that use the sliding window, or {} if they follow the pattern that llama.cpp assumes."""
    layer_types = settings.values.get("layer_types")
    if not settings.spec.get("sliding_windows") or not layer_types:
        return {}
    pattern = [layer_type == "sliding_attention" for layer_type in layer_types]
    if pattern == [(index + 1) % _FULL_ATTENTION_STEP != 0 for index in range(len(layer_types))]:
        return {}
    return {"attention.sliding_window_pattern": pattern}
