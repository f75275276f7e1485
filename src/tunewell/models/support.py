"""Supported architectures: check that a model can be trained on packed documents, and read its head's settings."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from tunewell.core.errors import UserError
from tunewell.models.attention import FLASH, stock_attention
from tunewell.models.loss import HeadShape

_SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention"})
# Rope types with frequencies that depend on the longest document in a batch above some length.
_LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
# Prefixes of the sub-configs of multimodal models.
_MODALITIES = ("vision", "audio", "image", "speech", "video", "vq", "text")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_FIX = "use another model"
TEXT_PREFIX = "model.language_model."
"""Path of the text part in a multimodal model loaded by transformers."""
_PROBE_TOKENS = 8
# Relative to the largest logit. Both sides compute the same values, so only rounding differs.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class TextPart:
    """The language model inside a multimodal model."""

    config: PreTrainedConfig
    key_mapping: dict[str, str]
    """Regular expressions that map names in the multimodal model's files to names in the text part."""
    text_prefix: str
    """Path of the text part in the model that `AutoModelForCausalLM` loads; empty if it loads the text part."""


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' warnings and progress bars inside a `with` block."""
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


@contextmanager
def eval_mode(model: PreTrainedModel) -> Iterator[None]:
    """Use eval mode inside a `with` block, without transformers' warnings."""
    was_training = model.training
    model.eval()
    try:
        with quiet():
            yield
    finally:
        model.train(was_training)


@contextmanager
def stock_mode(model: PreTrainedModel) -> Iterator[None]:
    """Use eval mode and transformers' own attention inside a `with` block, without its warnings."""
    with eval_mode(model), stock_attention(model):
        yield


def require_supported(config: PreTrainedConfig, *, longest_document: int, attention: str = "") -> list[str]:
    """Return notes about a model. Raise UserError with the reason if it cannot be trained on packed documents."""
    if getattr(config, "quantization_config", None) is not None:
        settings: Any = config.quantization_config
        method = (settings if isinstance(settings, dict) else settings.to_dict()).get("quant_method", "unknown method")
        if method != "bitsandbytes":
            raise _not_supported(
                config,
                f"the weights are quantised ({method}); only bitsandbytes is supported",
                "use the unquantised model; `method.quantize: nf4` makes it as small",
            )
    for reason, kinds in _table()["refused"].items():
        if config.model_type in kinds:
            raise _not_supported(config, reason)
    part = text_part(config)
    text = part.config if part is not None else config
    _require_packable(text)
    _require_positions(text, longest_document)
    for setting, name in (("attn_logit_softcapping", "softcap"), ("attention_dropout", "dropout")):
        if attention == FLASH and getattr(text, setting, None):
            why = f"the flash kernel does not support attention {name}"
            raise _not_supported(text, why, "set `train.attention: sdpa`")
    return _notes(text)


def is_verified(config: PreTrainedConfig) -> bool:
    """Return whether the tests compare this architecture with transformers."""
    return config.model_type in _table()["verified"]


def text_part(config: PreTrainedConfig) -> TextPart | None:
    """Return the text part of a multimodal model, or None for a text model. Raise UserError if it is unsupported."""
    modalities = [name.removesuffix("_config") for name in config.sub_configs if name.startswith(_MODALITIES)]
    if config.model_type in _table()["text_parts"]:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        prefix = TEXT_PREFIX if getattr(model_class, "config_class", None) is type(config) else ""
        return TextPart(config.get_text_config(), _table()["text_parts"][config.model_type], prefix)
    if modalities:
        known = ", ".join(f"`{name}`" for name in _table()["text_parts"])
        kinds = ", ".join(modalities)
        raise _not_supported(config, f"the model is multimodal ({kinds}); only the text part of {known} is supported")
    return None


def text_weights(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the weights of a model, or of its text part if it is multimodal. Tied weights have all their names."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    if not any(name.startswith(TEXT_PREFIX) for name in weights):
        return weights
    text = [name for name in weights if name.startswith(TEXT_PREFIX)]
    part = {f"model.{name.removeprefix(TEXT_PREFIX)}": weights[name] for name in text}
    return part | {name: weight for name, weight in weights.items() if not name.startswith("model.")}


def head_shape(model: PreTrainedModel) -> HeadShape:
    """Return the scale and softcap of a model's head. Raise UserError if they do not reproduce its logits."""
    module = model.get_output_embeddings()
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Module) or not isinstance(weight, Tensor) or weight.dim() != 2:
        raise _not_supported(model.config, "the head is not a single matrix")
    config = model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    shape = HeadShape(None if cap is None else float(cap), _scale(config))
    ids = torch.linspace(0, len(weight) - 1, _PROBE_TOKENS, device=weight.device).long()[None]
    with torch.no_grad(), stock_mode(model):
        expected = model(input_ids=ids, use_cache=False).logits.float()
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        computed = shape.apply(module(hidden)).float() if hidden.shape[-1] == weight.shape[1] else expected[:0]
    tolerance = _TOLERANCE.get(hidden.dtype, _TOLERANCE[torch.float16]) * expected.abs().max()
    if computed.shape != expected.shape or not bool(((computed - expected).abs() <= tolerance).all()):
        raise _not_supported(model.config, "the head computes more than a matrix product, a scale and a softcap")
    return shape


def _require_packable(config: PreTrainedConfig) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise _not_supported(config, "encoder-decoder models cannot be trained")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _not_supported(config, "transformers has no causal language model of this type")
    if getattr(config, "alibi", False):
        raise _not_supported(config, "the model uses ALiBi position biases")
    if not getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_supports_attention_backend", False):
        raise _not_supported(config, "the attention cannot be replaced, so packed documents would attend to each other")
    if getattr(config, "use_bidirectional_attention", None):
        raise _not_supported(config, "the attention is bidirectional (`use_bidirectional_attention`)")
    if unknown := sorted(set(getattr(config, "layer_types", None) or ()) - _SUPPORTED_LAYERS):
        listed = ", ".join(f"`{name}`" for name in unknown)
        raise _not_supported(config, f"layers of type {listed} cannot keep packed documents apart")


def _require_positions(config: PreTrainedConfig, longest_document: int) -> None:
    limit = getattr(config, "max_position_embeddings", None)
    if config.model_type in _table()["learned_positions"] and limit is not None and longest_document > limit:
        raise _not_supported(
            config,
            f"the model has {limit:,} positions, but the longest document has {longest_document:,} tokens",
            f"set `packing.context_length` to {limit} and run `tunewell prepare` again",
        )
    for rope in _rope_parameters(config):
        is_long = rope.get("rope_type") == "longrope"
        first = (rope.get("original_max_position_embeddings") if is_long else limit) or 0
        if rope.get("rope_type") in _LENGTH_DEPENDENT and longest_document > first:
            raise _not_supported(
                config,
                f"above {first:,} tokens, the positions (`{rope['rope_type']}`) depend on the longest document in a "
                f"batch, and the longest document has {longest_document:,}",
                f"set `packing.context_length` to {first} and run `tunewell prepare` again",
            )


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the rope parameters: one set, or one set per layer type."""
    rules = getattr(config, "rope_parameters", None) or {}
    return [rules] if "rope_type" in rules else [rule for rule in rules.values() if isinstance(rule, dict)]


def _notes(config: PreTrainedConfig) -> list[str]:
    notes = []
    if any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS):
        notes.append("this is a mixture-of-experts model; it is trained without the load-balancing loss")
    if not is_verified(config):
        notes.append(
            f"tunewell is not tested with `{config.model_type}`; it is checked against transformers before step 1"
        )
    return notes


def _scale(config: PreTrainedConfig) -> float:
    """Return the factor of the logits. Granite and MiniCPM divide by their setting; HyperCLOVA X multiplies."""
    scaling = getattr(config, "logits_scaling", None)
    if scaling is not None:
        return float(scaling) if config.model_type == "hyperclovax" else 1 / float(scaling)
    scale = getattr(config, "logit_scale", None)
    return 1.0 if scale is None else float(scale)


def _not_supported(config: PreTrainedConfig, why: str, fix: str = _FIX) -> UserError:
    return UserError(f"`{config.model_type}` models are not supported: {why}", fix=fix)


@cache
def _table() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("architectures.json").read_text(encoding="utf-8"))
