"""Make models through transformers, of files or of tensors, and let it neither invent a weight nor lose one."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tunewell.core.errors import UserError
from tunewell.models.support import TextPart

_SHOWN = 5


def wanted(device: torch.device, dtype: torch.dtype, attention: str) -> dict[str, Any]:
    """Say to transformers where and how a model is wanted."""
    # On the CPU the plain path is taken; elsewhere each weight goes straight to the device, not through main memory.
    device_map = {} if device.type == "cpu" else {"device_map": {"": device}}
    return {"dtype": dtype, "attn_implementation": attention, **device_map}


def read_config(place: str, *, is_local: bool) -> PreTrainedConfig:
    """Read a model's settings; code that comes with a model is never run."""
    try:
        return AutoConfig.from_pretrained(place, local_files_only=is_local, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"the settings of `{place}` cannot be read: {_first_line(error)}", where="config.json"
        ) from error


def refuse_folder(folder: Path, *, allow_pickle: bool) -> None:
    """Raise UserError for a folder that holds an adapter, or weights in a format that can carry code."""
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            "this is an adapter, not a model",
            where=str(folder),
            fix=f"name the model it was made for, or merge the two: `tunewell export {folder} --to merged --out NEW`",
        )
    if not allow_pickle and not any(folder.glob("*.safetensors*")):
        raise UserError(
            "the weights are in `.bin` files, a format that can carry code",
            where=str(folder),
            fix="convert them to safetensors, or allow them with `--allow-pickle`: then tensors alone are read",
        )


def from_files(
    place: str,
    config: PreTrainedConfig,
    *,
    part: TextPart | None,
    allow_pickle: bool,
    is_local: bool,
    how: dict[str, Any],
) -> tuple[PreTrainedModel, list[str]]:
    """Load a folder or a hub id, or its text part, and name the weights in its files that are no part of that."""
    # A part is made twice, so it goes to the device the second time only.
    first = how if part is None else {key: value for key, value in how.items() if key != "device_map"}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            place,
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
        raise UserError(f"the weights of `{place}` cannot be loaded: {_first_line(error)}") from error
    model, found = loaded
    _refuse_gaps(found, place)
    if part is not None:
        # What was renamed on reading is renamed back on saving; made anew, the part is saved as what it is.
        model = from_tensors(part.config, model.state_dict(), source=place, how=how)
    return model, sorted(found["unexpected_keys"])


def from_tensors(
    config: PreTrainedConfig, weights: dict[str, Tensor], *, source: str, how: dict[str, Any]
) -> PreTrainedModel:
    """Make a model of its settings and its weights, as if it had been read from files of transformers' own."""
    model_class = type(skeleton(config))
    config.architectures = [model_class.__name__]
    loaded: Any = model_class.from_pretrained(
        None, config=config, state_dict=weights, ignore_mismatched_sizes=True, output_loading_info=True, **how
    )
    model, found = loaded
    _refuse_gaps(found, source)
    if unknown := sorted(found["unexpected_keys"]):
        raise UserError(f"`{source}` has {len(unknown):,} weights that the model does not: {named(unknown)}")
    return model


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """Make a model without numbers, to see its names and shapes."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def named(names: list[str]) -> str:
    """List the first names."""
    return ", ".join(f"`{name}`" for name in names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _refuse_gaps(found: dict[str, Any], source: str) -> None:
    missing = sorted(found["missing_keys"])
    misshapen = sorted(str(entry[0]) for entry in found["mismatched_keys"])
    if missing:
        what = f"{len(missing):,} weights are missing: {named(missing)}"
    elif misshapen:
        what = f"{len(misshapen):,} weights have another shape than the model: {named(misshapen)}"
    else:
        return
    raise UserError(
        f"`{source}` is not whole: {what}",
        fix="download or convert it again; a model without a head for text cannot be trained",
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
