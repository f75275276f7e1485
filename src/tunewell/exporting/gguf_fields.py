"""Say in GGUF's words what a model's config says: the fields of its architecture and its tables of positions."""

import math
from typing import Any

import numpy as np
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tunewell.core.errors import UserError
from tunewell.exporting.gguf_settings import WHOLE_LAYER_STEP, Settings, architectures

FieldValue = int | float | str | bool | list[bool]


def fields_of(settings: Settings) -> dict[str, FieldValue]:
    """List the fields of the architecture by their whole keys; an integer is meant as unsigned, 32 bits."""
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
    """Compute the tensors that say how positions are stretched, where the fields cannot."""
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
                    f"`{name}_factor` has {len(table)} numbers and not {settings.values['rotary_dim'] // 2}",
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
    """Name the layers that see everything, where they are not the ones that llama.cpp expects."""
    kinds = settings.values.get("layer_types")
    if not settings.spec.get("windows") or not kinds:
        return {}
    is_near = [kind == "sliding_attention" for kind in kinds]
    if is_near == [(index + 1) % WHOLE_LAYER_STEP != 0 for index in range(len(kinds))]:
        return {}
    return {"attention.sliding_window_pattern": is_near}
