"""Model families: how the documents of each are computed in training, and what cannot be trained. No torch.

    packed attention       several documents in one row; attention stays within each
    packed with states     the same; layers with a recurrent or convolution state start anew at each document
    document by document   one forward pass for the documents of one length, without padding

The losses are the same at all three levels, to rounding. `families.json` lists the families that were tested. The check
before step 1 (`training/leak_probe.py`) may lower the level of any model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tunewell.core.errors import UserError
from tunewell.core.files import parse_json
from tunewell.model_files.shape import first_count, read_config, text_part

Level = Literal["packed attention", "packed with states", "document by document"]
ATTENTION: Level = "packed attention"
STATES: Level = "packed with states"
DOCUMENTS: Level = "document by document"
_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Types of layers in which packed attention keeps documents apart."""
# Prefixes of the sub-configs of multimodal models.
_MODALITIES = ("vision", "audio", "image", "speech", "video", "vq")
_OTHER_MODEL = "use a model that generates text"


@dataclass(frozen=True)
class PackingLevel:
    """How the documents of a model are computed in training."""

    level: Level
    because: str = ""
    """Why they are not packed; empty if they are."""
    no_flash: str = ""
    """Why the flash kernel cannot compute the attention; empty if it can."""

    @property
    def words(self) -> str:
        """The level and the reason, for a screen."""
        return f"{self.level} ({self.because})" if self.because else self.level


def packing_of(config: Mapping[str, Any], *, longest: int = 0) -> PackingLevel:
    """Return how documents of up to `longest` tokens are computed. Raise UserError if the model cannot be trained."""
    _require_generator(config)
    text = text_part(dict(config))
    level, because = _level(text, longest)
    return PackingLevel(level, because, _flash_obstacle(text, level))


def _flash_obstacle(text: Mapping[str, Any], level: Level) -> str:
    if level == DOCUMENTS:
        return "documents that are not packed are computed with transformers' own attention"
    lacking = [
        (text.get("attn_logit_softcapping"), "softcap"),
        (text.get("attention_dropout"), "dropout"),
        (text.get("model_type") in table()["sinks"], "sinks"),
    ]
    return next((f"the flash kernel does not support attention {name}" for value, name in lacking if value), "")


def _level(text: Mapping[str, Any], longest: int) -> tuple[Level, str]:
    kind = text.get("model_type", "")
    for reason, kinds in table()["documents"].items():
        if kind in kinds:
            return DOCUMENTS, reason
    if text.get("alibi"):
        return DOCUMENTS, "the attention adds a bias for each position"
    for rope in rope_parameters(text):
        first = first_count(rope, "original_max_position_embeddings") or 0
        if rope.get("rope_type") == "longrope" and longest > first:
            return DOCUMENTS, f"above {first:,} tokens, positions depend on the length of the document"
    if kind in table()["states"]:
        return STATES, ""
    layers = text.get("layer_types")
    if unknown := sorted({str(name) for name in (layers if isinstance(layers, list | tuple) else ())} - _LAYERS):
        listed = ", ".join(f"`{name}`" for name in unknown)
        return DOCUMENTS, f"packing is not tested with layers of type {listed}"
    return ATTENTION, ""


def read_packing(model: str, *, longest: int = 0) -> PackingLevel:
    """Return how the documents of a model are computed, from its files. Raise UserError if it cannot be trained."""
    config, _ = read_config(model)
    return packing_of(config, longest=longest)


def why_refused(config: Mapping[str, Any]) -> str:
    """Return why a model cannot be trained; empty if it can."""
    try:
        packing_of(config)
    except UserError as error:
        return error.what
    return ""


def is_verified(model_type: str) -> bool:
    """Return whether the tests compare this family with transformers."""
    return model_type in table()["verified"] or model_type in table()["states"]


def not_supported(model_type: str, why: str, fix: str = _OTHER_MODEL) -> UserError:
    """Return the error for a model that cannot be trained."""
    return UserError(f"`{model_type}` models are not supported: {why}", fix=fix)


def rope_parameters(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rope parameters: one set, or one set per layer type."""
    rules = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rules, dict):
        return []
    return [rules] if "rope_type" in rules else [rule for rule in rules.values() if isinstance(rule, dict)]


def _require_generator(config: Mapping[str, Any]) -> None:
    """Raise UserError if a model does not generate text from text."""
    kind = config.get("model_type", "")
    for reason, kinds in table()["refused"].items():
        if kind in kinds:
            raise not_supported(kind, reason)
    if config.get("is_encoder_decoder"):
        raise not_supported(kind, "encoder-decoder models cannot be trained")
    if text_part(dict(config)).get("use_bidirectional_attention") not in (None, False, "vision"):
        raise not_supported(kind, "the attention is bidirectional (`use_bidirectional_attention`)")
    modalities = [
        name.removesuffix("_config") for name in config if name.endswith("_config") and name.startswith(_MODALITIES)
    ]
    if modalities and kind not in table()["text_parts"]:
        known, listed = ", ".join(f"`{name}`" for name in table()["text_parts"]), ", ".join(modalities)
        raise not_supported(kind, f"the model is multimodal ({listed}); only the text part of {known} is supported")


@cache
def table() -> dict[str, Any]:
    """Return the table of families."""
    return parse_json(Path(__file__).with_name("families.json").read_bytes())
