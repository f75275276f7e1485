"""Check that a model can be trained, how its documents are computed, and read the settings of its head."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from tunewell.model_files import families
from tunewell.model_files.families import PackingLevel, not_supported
from tunewell.models.attention import FLASH, stock_attention
from tunewell.models.loss import HeadShape

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
TEXT_PREFIX = "model.language_model."
"""Path of the text part in a multimodal model loaded by transformers."""
_PROBE_TOKENS = 8
_REPORT = "report this model: its name in `deep_heads` of `model_files/families.json` may be enough"
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


def fit_packing(config: PreTrainedConfig, *, longest: int, attention: str = "") -> PackingLevel:
    """Return how documents of up to `longest` tokens are computed. Raise UserError if the model cannot be trained."""
    _require_known_quantization(config)
    packing = families.packing_of(config.to_dict(), longest=longest)
    part = text_part(config)
    text = part.config if part is not None else config
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    if model_class is None:
        raise not_supported(config.model_type, "transformers has no causal language model of this type")
    _require_positions(text, longest)
    if packing.level == families.DOCUMENTS:
        return packing
    has_states = packing.level == families.STATES
    if not (has_states or families.is_verified(text.model_type) or model_class._supports_attention_backend):
        return PackingLevel(families.DOCUMENTS, "the attention cannot be replaced")
    if attention == FLASH and packing.no_flash:
        raise not_supported(text.model_type, packing.no_flash, "set `train.attention: sdpa`")
    return packing


def is_verified(config: PreTrainedConfig) -> bool:
    """Return whether the tests compare this architecture with transformers."""
    return families.is_verified(config.model_type)


def text_part(config: PreTrainedConfig) -> TextPart | None:
    """Return the text part of a multimodal model, or None for a text model."""
    mapping = families.table()["text_parts"].get(config.model_type)
    if mapping is None:
        return None
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    is_multimodal = model_class is None or model_class.config_class is type(config)
    text = config.get_text_config()
    if is_multimodal:  # the head is tied as the whole model says
        text.tie_word_embeddings = config.tie_word_embeddings
    if (plain := families.table()["same_as"].get(text.model_type)) is not None:
        settings = {key: value for key, value in text.to_dict().items() if key != "model_type"}
        rope = {key: settings["rope_parameters"][key] for key in ("rope_type", "rope_theta")}
        text = AutoConfig.for_model(plain, **settings | {"rope_parameters": rope})
    return TextPart(text, mapping, TEXT_PREFIX if is_multimodal else "")


def text_weights(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the weights of a model, or of its text part if it is multimodal. Tied weights have all their names."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    if not any(name.startswith(TEXT_PREFIX) for name in weights):
        return weights
    text = [name for name in weights if name.startswith(TEXT_PREFIX)]
    part = {f"model.{name.removeprefix(TEXT_PREFIX)}": weights[name] for name in text}
    return part | {name: weight for name, weight in weights.items() if not name.startswith("model.")}


class _AtHead(Exception):
    """Carries the hidden states that the head receives."""


class UntilHead:
    """Computes a model up to its head, for a head that is more than a matrix: its first layers belong to the body."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __call__(self, **inputs: Any) -> Any:
        """Return the hidden states that the matrix of the head receives, as `last_hidden_state`."""

        def stop(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            raise _AtHead(args[0])

        head: Any = self._model.get_output_embeddings()
        handle = head.register_forward_pre_hook(stop)
        try:
            self._model(**inputs)
        except _AtHead as reached:
            return BaseModelOutput(last_hidden_state=reached.args[0])
        finally:
            handle.remove()
        raise RuntimeError("the model does not call its head")


def body_of(model: PreTrainedModel) -> Callable[..., Any]:
    """Return the part of a model that computes its hidden states."""
    if model.config.model_type in families.table()["deep_heads"]:
        return UntilHead(model)
    # Llama 4's class names the multimodal model as its base, which the text model does not have.
    return model.base_model if model.base_model is not model else model.get_submodule("model")


def head_shape(model: PreTrainedModel) -> HeadShape:
    """Return the scale and softcap of a model's head. Raise UserError if they do not reproduce its logits."""
    module = model.get_output_embeddings()
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Module) or not isinstance(weight, Tensor) or weight.dim() != 2:
        raise not_supported(model.config.model_type, "the head is not a single matrix", _REPORT)
    config = model.config.get_text_config()
    cap = next((value for name in _SOFTCAPS if (value := getattr(config, name, None)) is not None), None)
    shape = HeadShape(None if cap is None else float(cap), _scale(config))
    ids = torch.linspace(0, len(weight) - 1, _PROBE_TOKENS, device=weight.device).long()[None]
    with torch.no_grad(), stock_mode(model):
        expected = model(input_ids=ids, use_cache=False).logits.float()
        hidden = body_of(model)(input_ids=ids, use_cache=False).last_hidden_state
        computed = shape.apply(module(hidden)).float() if hidden.shape[-1] == weight.shape[1] else expected[:0]
    tolerance = _TOLERANCE.get(hidden.dtype, _TOLERANCE[torch.float16]) * expected.abs().max()
    if computed.shape != expected.shape or not bool(((computed - expected).abs() <= tolerance).all()):
        why = "the head computes more than a matrix product, a scale and a softcap"
        raise not_supported(model.config.model_type, why, _REPORT)
    return shape


def _require_known_quantization(config: PreTrainedConfig) -> None:
    if getattr(config, "quantization_config", None) is None:
        return
    settings: Any = config.quantization_config
    method = (settings if isinstance(settings, dict) else settings.to_dict()).get("quant_method", "unknown method")
    if method != "bitsandbytes":
        raise not_supported(
            config.model_type,
            f"the weights are quantised ({method}); only bitsandbytes is supported",
            "use the unquantised model; `method.quantize: nf4` makes it as small",
        )


def _require_positions(config: PreTrainedConfig, longest: int) -> None:
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None or longest <= limit:
        return
    fix = f"set `packing.context_length` to {limit} and run `tunewell prepare` again"
    if config.model_type in families.table()["learned_positions"]:
        why = f"the model has {limit:,} positions, but the longest document has {longest:,} tokens"
        raise not_supported(config.model_type, why, fix)
    # With `dynamic`, the positions also depend on the longest document that was computed before.
    if any(rope.get("rope_type") == "dynamic" for rope in families.rope_parameters(config.to_dict())):
        why = f"above {limit:,} tokens, the positions (`dynamic`) depend on other documents"
        raise not_supported(config.model_type, f"{why}, and the longest document has {longest:,}", fix)


def has_experts(config: PreTrainedConfig) -> bool:
    """Return whether a model routes each token to some of several experts."""
    config = config.get_text_config()
    return any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS)


def notes_on(config: PreTrainedConfig, packing: PackingLevel) -> list[str]:
    """Return what is worth knowing about training a model."""
    notes = []
    if has_experts(config):
        notes.append("this is a mixture-of-experts model; it is trained without the load-balancing loss")
    if packing.level == families.ATTENTION and not is_verified(config):
        notes.append(
            f"tunewell is not tested with `{config.model_type}`; it is checked against transformers before step 1"
        )
    return notes


def _scale(config: PreTrainedConfig) -> float:
    """Return the factor of the logits. Granite and MiniCPM divide by their setting; HyperCLOVA X multiplies."""
    scaling = getattr(config, "logits_scaling", None)
    if scaling is not None:
        return float(scaling) if config.model_type == "hyperclovax" else 1 / float(scaling)
    if (divisor := getattr(config, "logits_mup_width_multiplier", None)) is not None:
        return 1 / float(divisor)
    scale = getattr(config, "logit_scale", None)
    return 1.0 if scale is None else float(scale)
