"""Build models with transformers from files or tensors. Missing or unexpected weights are errors."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tunewell.core.errors import UserError
from tunewell.models.support import TextPart

_SHOWN = 5


def read_config(source: str, *, is_local: bool) -> PreTrainedConfig:
    """Read a model's config. Code in the model folder is never run."""
    try:
        return AutoConfig.from_pretrained(source, local_files_only=is_local, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"the config of `{source}` cannot be read: {_first_line(error)}", where="config.json"
        ) from error


def require_safe_folder(folder: Path, *, allow_pickle: bool) -> None:
    """Raise UserError if a folder contains an adapter, or weights in a format that can contain code (pickle)."""
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            "this is an adapter, not a model",
            where=str(folder),
            fix=f"use the adapter's base model, or merge the two: `tunewell export {folder} --to merged --out NEW`",
        )
    if not allow_pickle and not any(folder.glob("*.safetensors*")):
        raise UserError(
            "the weights are in `.bin` files, a format that can contain code",
            where=str(folder),
            fix="convert them to safetensors, or add `--allow-pickle`, which loads only tensors",
        )


def from_files(
    source: str,
    config: PreTrainedConfig,
    *,
    part: TextPart | None,
    allow_pickle: bool,
    is_local: bool,
    arguments: dict[str, Any],
) -> tuple[PreTrainedModel, list[str]]:
    """Load a model, or its text part, from a folder or the hub. Also return the names of unused weights."""
    # A text part is built twice; only the second build is moved to the device.
    first = arguments if part is None else {key: value for key, value in arguments.items() if key != "device_map"}
    try:
        loaded: Any = auto_class(config if part is None else part.config).from_pretrained(
            source,
            config=config if part is None else part.config,
            key_mapping=None if part is None else part.key_mapping,
            use_safetensors=None if allow_pickle else True,
            local_files_only=is_local,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **first,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"the weights of `{source}` cannot be loaded: {_first_line(error)}") from error
    except (KeyError, TypeError, AttributeError, IndexError, ArithmeticError, AssertionError) as error:
        # The constructors of transformers fail like this if the values of a config do not fit together.
        raise UserError(
            f"transformers cannot build `{source}` from its config: {type(error).__name__}: {_first_line(error)}",
            where=f"{source}/config.json",
            fix="correct the config, or download the model again",
        ) from error
    model, found = loaded
    _require_complete(found, source)
    if part is not None:
        # transformers would undo the renaming on save; a new model is saved with the names of the text part.
        model = from_tensors(part.config, model.state_dict(), source=source, arguments=arguments)
    return model, sorted(found["unexpected_keys"])


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the class that loads a model of this config; some multimodal models have no causal one."""
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def has_causal_class(config: dict[str, Any]) -> bool:
    """Return whether `AutoModelForCausalLM` loads a folder with this `config.json`."""
    return CONFIG_MAPPING[config["model_type"]] in MODEL_FOR_CAUSAL_LM_MAPPING


def from_tensors(
    config: PreTrainedConfig, weights: dict[str, Tensor], *, source: str, arguments: dict[str, Any]
) -> PreTrainedModel:
    """Build a model from its config and weights."""
    model_class = type(skeleton(config))
    config.architectures = [model_class.__name__]
    loaded: Any = model_class.from_pretrained(
        None, config=config, state_dict=weights, ignore_mismatched_sizes=True, output_loading_info=True, **arguments
    )
    model, found = loaded
    _require_complete(found, source)
    if unknown := sorted(found["unexpected_keys"]):
        raise UserError(f"`{source}` has {len(unknown):,} weights that the model does not have: {first_names(unknown)}")
    return model


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model on the meta device, to get its weight names and shapes."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def first_names(names: list[str]) -> str:
    """Return the first few names as text."""
    return ", ".join(f"`{name}`" for name in names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _require_complete(found: dict[str, Any], source: str) -> None:
    missing = sorted(found["missing_keys"])
    wrong_shape = sorted(str(entry[0]) for entry in found["mismatched_keys"])
    if missing:
        what = f"{len(missing):,} weights are missing: {first_names(missing)}"
    elif wrong_shape:
        what = f"{len(wrong_shape):,} weights do not have the model's shape: {first_names(wrong_shape)}"
    else:
        return
    raise UserError(
        f"`{source}` is incomplete: {what}",
        fix="download or convert it again; a model without a language-modeling head (`lm_head`) cannot be trained",
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
