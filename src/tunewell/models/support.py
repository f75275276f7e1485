"""What of a model is honoured when it is trained on packed documents: it works, or it is refused by name."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tunewell.core.errors import UserError
from tunewell.models.attention import FLASH, stock_attention

_HONOURED_LAYERS = frozenset({"full_attention", "sliding_attention"})
# Rotary frequencies that change with the longest text in a batch, once that exceeds a length.
_LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
# What the settings of parts that see or hear are called, and of the text part beside them.
_SENSES = ("vision", "audio", "image", "speech", "video", "vq", "text")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_FIX = "choose another model"
TEXT_PREFIX = "model.language_model."
"""Where transformers keeps the text part of a model that also sees or hears, once it is loaded."""
_PROBE_TOKENS = 8
# Relative to the largest logit. The same numbers are computed twice, so only the order of roundings differs.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class TextPart:
    """The language model inside one that also sees or hears."""

    config: PreTrainedConfig
    key_mapping: dict[str, str]
    """Regular expressions that turn the names in the whole model's files into those of the part."""
    text_prefix: str
    """Where it lies in what `AutoModelForCausalLM` makes of the files; empty where that is the part alone."""


@dataclass(frozen=True)
class HeadFacts:
    """The head of a model, so that it can be applied to some hidden states only."""

    module: nn.Module
    """Has `weight` (vocabulary x hidden) and perhaps `bias`."""
    bias: Tensor | None
    softcap: float | None
    scale: float

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute what the model computes from its last hidden states."""
        logits = self.module(hidden) * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def require_supported(config: PreTrainedConfig, *, longest_document: int, attention: str = "") -> list[str]:
    """Raise UserError with the reason when a model cannot be trained on packed documents; give notes when it can."""
    if getattr(config, "quantization_config", None) is not None:
        method = dict(_plain(config.quantization_config)).get("quant_method", "a method of its own")
        raise _refusal(config, f"its weights are quantised ({method})", "use the model it was made from")
    _refuse_listed(config)
    part = text_part(config)
    text = part.config if part is not None else config
    _refuse_kind(text)
    _refuse_layers(text)
    _refuse_lengths(text, longest_document)
    if attention == FLASH and getattr(text, "attn_logit_softcapping", None) is not None:
        raise _refusal(text, "the flash kernel knows no softcap on attention", "set `train.attention: sdpa`")
    if attention == FLASH and (getattr(text, "attention_dropout", 0.0) or 0.0) > 0:
        raise _refusal(text, "the flash kernel drops nothing of its attention", "set `train.attention: sdpa`")
    return _notes(text)


def text_part(config: PreTrainedConfig) -> TextPart | None:
    """Find the language model in one that also sees or hears; None for a plain one, UserError where there is no way."""
    senses = [name.removesuffix("_config") for name in config.sub_configs if name.startswith(_SENSES)]
    if config.model_type in _table()["text_parts"]:
        given = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        prefix = TEXT_PREFIX if getattr(given, "config_class", None) is type(config) else ""
        return TextPart(config.get_text_config(), _table()["text_parts"][config.model_type], prefix)
    if senses:
        known = ", ".join(f"`{name}`" for name in _table()["text_parts"])
        raise _refusal(config, f"it has parts for more than text ({', '.join(senses)}); of such only {known} are known")
    return None


def text_weights(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Give a model's weights under every name they have; of one that also sees or hears those of its text part."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    if not any(name.startswith(TEXT_PREFIX) for name in weights):
        return weights
    text = [name for name in weights if name.startswith(TEXT_PREFIX)]
    part = {f"model.{name.removeprefix(TEXT_PREFIX)}": weights[name] for name in text}
    return part | {name: weight for name, weight in weights.items() if not name.startswith("model.")}


def head_facts(model: PreTrainedModel) -> HeadFacts:
    """Find out what a model does with its last hidden states, and prove it on a few tokens.

    Raises UserError when the model's own logits are others: then its head does something that is not known here.
    """
    module = model.get_output_embeddings()
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Module) or not isinstance(weight, Tensor) or weight.dim() != 2:
        raise _refusal(model.config, "it has no head that is one matrix")
    config = model.config.get_text_config()
    facts = HeadFacts(module, getattr(module, "bias", None), _softcap(config), _scale(config))
    _prove(model, facts)
    return facts


def _refuse_listed(config: PreTrainedConfig) -> None:
    for reason, kinds in _table()["refused"].items():
        if config.model_type in kinds:
            raise _refusal(config, reason)


def _refuse_kind(config: PreTrainedConfig) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(config, "it reads with one model and writes with another")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _refusal(config, "transformers has no model of this kind that writes text")
    if getattr(config, "alibi", False):
        raise _refusal(config, "it tells positions by a bias on its attention (ALiBi)")
    if not getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_supports_attention_backend", False):
        raise _refusal(config, "its attention cannot be exchanged, so packed documents would see each other")
    if getattr(config, "use_bidirectional_attention", None):
        raise _refusal(config, "it looks at later tokens too (`use_bidirectional_attention`)")


def _refuse_layers(config: PreTrainedConfig) -> None:
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - _HONOURED_LAYERS)
    if strange:
        listed = ", ".join(f"`{name}`" for name in strange)
        raise _refusal(config, f"it has layers of the kind {listed}, which packed documents cannot honour")


def _refuse_lengths(config: PreTrainedConfig, longest_document: int) -> None:
    limit = getattr(config, "max_position_embeddings", None)
    if config.model_type in _table()["learned_positions"] and limit is not None and longest_document > limit:
        raise _refusal(
            config,
            f"it knows {limit:,} positions and the longest document has {longest_document:,} tokens",
            f"set `packing.context_length` to {limit} and run `tunewell prepare` again",
        )
    for rope in _rope_rules(config):
        is_long = rope.get("rope_type") == "longrope"
        first = (rope.get("original_max_position_embeddings") if is_long else limit) or 0
        if rope.get("rope_type") in _LENGTH_DEPENDENT and longest_document > first:
            raise _refusal(
                config,
                f"from {first:,} tokens on its positions (`{rope['rope_type']}`) depend on the longest document in a "
                f"batch, and the longest here has {longest_document:,}",
                f"set `packing.context_length` to {first} and run `tunewell prepare` again",
            )


def _rope_rules(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """List the rules for rotary positions: one, or one per kind of layer."""
    rules = getattr(config, "rope_parameters", None) or {}
    return [rules] if "rope_type" in rules else [rule for rule in rules.values() if isinstance(rule, dict)]


def _notes(config: PreTrainedConfig) -> list[str]:
    notes = []
    if any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS):
        notes.append("this model has experts; the extra loss that keeps them evenly used is not trained")
    if config.model_type not in _table()["verified"]:
        notes.append(
            f"`{config.model_type}` is not among the architectures tunewell is tested with; it is compared with "
            "transformers' own computation before the first step"
        )
    return notes


def _softcap(config: PreTrainedConfig) -> float | None:
    cap = getattr(config, "final_logit_softcapping", None)
    return None if cap is None else float(cap)


def _scale(config: PreTrainedConfig) -> float:
    """Granite and MiniCPM divide by `logits_scaling`, HyperCLOVA X multiplies by it; Cohere has `logit_scale`."""
    scaling = getattr(config, "logits_scaling", None)
    if scaling is not None:
        return float(scaling) if config.model_type == "hyperclovax" else 1 / float(scaling)
    scale = getattr(config, "logit_scale", None)
    return 1.0 if scale is None else float(scale)


@torch.no_grad()
def _prove(model: PreTrainedModel, facts: HeadFacts) -> None:
    weight = facts.module.weight
    assert isinstance(weight, Tensor)
    ids = torch.linspace(0, len(weight) - 1, _PROBE_TOKENS, device=weight.device).long()[None]
    was_training = model.training
    model.eval()
    try:
        with stock_attention(model):
            theirs = model(input_ids=ids, use_cache=False).logits.float()
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        ours = facts.logits(hidden).float() if hidden.shape[-1] == weight.shape[1] else None
    finally:
        model.train(was_training)
    tolerance = _TOLERANCE.get(hidden.dtype, _TOLERANCE[torch.float16]) * theirs.abs().max()
    if ours is None or ours.shape != theirs.shape or not bool(((ours - theirs).abs() <= tolerance).all()):
        raise _refusal(model.config, "what its head does beside one matrix product is not known here")


def _plain(value: Any) -> Any:
    return value if isinstance(value, dict) else value.to_dict()


def _refusal(config: PreTrainedConfig, why: str, fix: str = _FIX) -> UserError:
    return UserError(f"a `{config.model_type}` model cannot be trained here: {why}", fix=fix)


@cache
def _table() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("architectures.json").read_text(encoding="utf-8"))
