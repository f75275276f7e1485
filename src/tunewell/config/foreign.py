"""Settings of other trainers that are not aliases: converted to tunewell's keys, or refused with the reason.

The names are those of transformers' `TrainingArguments`, TRL, Axolotl and LLaMA-Factory. `load.py` uses this module
only if a config has a key that tunewell does not know, or a training method of another tool. `foreign.json` lists the
names without an equivalent key: the values with which tunewell does the same (`same`; `null` always is one), and what
to write instead of any other value; and the names of optimizers.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tunewell.config.extensions import OPTIMIZERS

_GALORE_ARGUMENTS = {"rank": "galore_rank", "update_proj_gap": "galore_every", "scale": "galore_scale"}
_BATCH = ("per_device_train_batch_size", "micro_batch_size", "train_batch_size", "batch_size")
_ACCUMULATION = "gradient_accumulation_steps"
_NO_EQUIVALENT = "tunewell has no such setting; leave it out"
_NUM_NAMED = 8


@dataclass
class Translation:
    """The result of `translate`."""

    values: dict[str, tuple[Any, str]] = field(default_factory=dict[str, tuple[Any, str]])
    """Key of tunewell -> its value, and the foreign name that it comes from."""
    refused: dict[str, str] = field(default_factory=dict[str, str])
    """Foreign name -> the reason and tunewell's equivalent."""
    used: set[str] = field(default_factory=set[str])
    """All foreign names that were recognised."""
    notes: list[str] = field(default_factory=list[str])
    """What differs from the other trainer, for the user."""

    def set(self, key: str, value: Any, *names: str) -> None:
        """Set a key of tunewell from foreign names."""
        self.values[key] = (value, names[0])
        self.used.update(names)

    def refuse(self, name: str, reason: str) -> None:
        """Refuse a foreign name."""
        self.refused[name] = reason
        self.used.add(name)


def translate(found: Mapping[str, Any]) -> Translation:
    """Translate the foreign names among unknown keys; keys that are not recognised are left out."""
    result = Translation()
    _translate_method(found, result)
    _translate_batch(found, result)
    _translate_precision(found, result)
    _translate_choices(found, result)
    unchanged: list[str] = []
    for name in [name for name in found if name in table() and name not in result.used]:
        if found[name] is None or found[name] in table()[name].get("same", ()):
            unchanged.append(f"`{name}`")
            result.used.add(name)
        else:
            result.refuse(name, table()[name].get("instead", _NO_EQUIVALENT))
    if unchanged:
        more = f" and {len(unchanged) - _NUM_NAMED} more" if len(unchanged) > _NUM_NAMED else ""
        result.notes.append(
            f"ignored, because they change nothing in tunewell: {', '.join(unchanged[:_NUM_NAMED])}{more}"
        )
    return result


def _translate_method(found: Mapping[str, Any], result: Translation) -> None:
    """Translate a `method.kind` of another tool: `qlora` is LoRA on a base model in 4 bits."""
    raw = json.loads(Path(__file__).with_name("method_names.json").read_text(encoding="utf-8"))
    given = found.get("kind")
    own = raw["names"].get(re.sub(r"[\s_-]", "", str(given).lower()), {})
    if isinstance(own, str):
        return result.refuse("kind", own)
    for key, value in own.items():
        result.set(key, value, "kind")
    if own:
        settings = ", ".join(f"`{key}: {json.dumps(value)}`" for key, value in own.items()).replace('"', "")
        result.notes.append(f"`method.kind: {given}` is {settings}")


@cache
def table() -> dict[str, dict[str, Any]]:
    """Return the names without an equivalent key: values that change nothing in tunewell, and what to write instead."""
    return json.loads((Path(__file__).parent / "foreign.json").read_text(encoding="utf-8"))


def _translate_batch(found: Mapping[str, Any], result: Translation) -> None:
    """A step of other trainers has (documents per forward pass) x (accumulation steps) documents on each device."""
    size = next((name for name in _BATCH if name in found), None)
    if size is None and _ACCUMULATION in found:
        result.refuse(
            _ACCUMULATION,
            "write `train.batch_documents`, the number of documents in a whole step; micro-batches follow from "
            "`train.micro_batch_tokens`",
        )
    if size is None:
        return
    names = [size, *([_ACCUMULATION] if _ACCUMULATION in found else [])]
    factors = [found[name] for name in names]
    if not all(type(factor) is int and factor > 0 for factor in factors):
        result.refuse(size, "write `train.batch_documents`, the number of documents in a whole step")
        result.used.update(names)
        return
    result.set("train.batch_documents", factors[0] * (factors[1] if len(factors) > 1 else 1), *names)


def _translate_precision(found: Mapping[str, Any], result: Translation) -> None:
    names = [name for name in ("bf16", "fp16") if name in found]
    enabled = [name for name in names if found[name] is True]
    if not names:
        return
    if len(enabled) > 1 or any(found[name] not in (True, False, None, "auto") for name in names):
        result.refuse(names[0], "write `train.precision`: `bf16`, `fp16`, `fp32` or `auto`")
        result.used.update(names)
        return
    is_off = all(found[name] is False for name in names)
    result.set("train.precision", enabled[0] if enabled else "fp32" if is_off else "auto", *names)


def _translate_optimizer(found: Mapping[str, Any], result: Translation) -> None:
    """Translate transformers' names of optimizers. Nothing is paged here: paged states spill to the host unseen."""
    key = "optim" if "optim" in found else "optimizer"
    given = found.get(key)
    name = given if isinstance(given, str) else ""
    own = table()["optim"]["names"].get(name, name)
    if own in OPTIMIZERS.names():
        result.set("train.optimizer", own, key)
    elif key in found:
        known = ", ".join(f"`{own}`" for own in OPTIMIZERS.names())
        result.refuse(key, f"{given!r} is not supported; write `train.optimizer` with one of {known}")
    if own == "galore":
        if "8bit" in name:
            result.set("train.galore_8bit", True, key)
        _translate_galore(found, result)
    if name != own and name.startswith("paged"):
        result.notes.append(f"`{key}: {name}`: the optimizer states stay on the device; nothing is paged")


def _translate_galore(found: Mapping[str, Any], result: Translation) -> None:
    """Translate `optim_args: "rank=64, update_proj_gap=100, scale=0.1"`, and drop the list of target modules."""
    if "optim_target_modules" in found:
        result.used.add("optim_target_modules")
        result.notes.append("`optim_target_modules` is not used: GaLore projects all matrices of the decoder layers")
    if "optim_args" not in found:
        return
    pairs = dict(pair.split("=", 1) for pair in str(found["optim_args"]).replace(" ", "").split(",") if "=" in pair)
    try:
        if pairs.pop("proj_type", "std") != "std" or pairs.keys() - _GALORE_ARGUMENTS.keys():
            raise ValueError
        values = {key: float(pairs[name]) for name, key in _GALORE_ARGUMENTS.items() if name in pairs}
    except ValueError:
        result.refuse("optim_args", "write `train.galore_rank`, `train.galore_every` and `train.galore_scale`")
        return
    result.used.add("optim_args")
    for key, value in values.items():
        result.set(f"train.{key}", value if key == "galore_scale" else int(value), "optim_args")


def _translate_choices(found: Mapping[str, Any], result: Translation) -> None:
    _translate_optimizer(found, result)
    is_4bit = found.get("load_in_4bit") is True or found.get("adapter") == "qlora"
    for name, kind in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        if found.get(name) is True and not (kind == "int8" and is_4bit):
            result.set("method.quantize", kind, name)
    adapter = found.get("adapter", found.get("use_peft"))
    name = "adapter" if "adapter" in found else "use_peft"
    if adapter in ("lora", "qlora", True):
        result.set("method.kind", "lora", name)
    if adapter == "qlora":
        result.set("method.quantize", "nf4", name)
    if found.get("use_dora", found.get("peft_use_dora")) is True or adapter == "dora":
        result.set("method.kind", "dora", *(key for key in ("use_dora", "peft_use_dora", "adapter") if key in found))
    for name in ("attn_implementation", "flash_attention"):
        if name in found:
            kernels = {"sdpa": "sdpa", "flash_attention_2": "flash", True: "flash"}
            kernel = kernels.get(found[name]) if isinstance(found[name], str | bool) else None
            if kernel is None:
                result.refuse(name, "write `train.attention`: `auto`, `sdpa` or `flash`")
            else:
                result.set("train.attention", kernel, name)
    if isinstance(compiled := found.get("torch_compile"), bool):
        result.set("train.compile", "on" if compiled else "off", "torch_compile")
