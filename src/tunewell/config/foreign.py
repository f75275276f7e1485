"""Settings of other trainers that are not aliases: converted to tunewell's keys, or refused with the reason.

The names are those of transformers' `TrainingArguments`, TRL, PEFT, Unsloth, Axolotl and LLaMA-Factory. `load.py` uses
this module only if a config has a key that tunewell does not know, or a training method of another tool; `migrate` uses
it for all keys of a config of another tool, and `diagnose` knows configs by these names. `foreign.json` has a row for
each name, or for several with a space between them:

same         values without effect here; `null` always is one
unset_beside a name beside which `false` is a default, as in a dump of all settings
to           value -> the settings of tunewell with the same meaning
any          the settings of tunewell for any other value
key          the key of tunewell that takes any other value; with `is_list`, also from a text like `a,b`
is_method    the value is a name in `method_names.json`
is_computed  the value is translated by a function below
needless     why no other value changes anything here; with `like`, no value whose text this expression finds
instead      what to write instead of any other value
lost         what it means for the run that the value has no equivalent; without it, `instead` says it
refuse       what such a config trains, if that is nothing that tunewell trains
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

from tunewell.config.extensions import OPTIMIZERS
from tunewell.core.files import read_data

_GALORE_ARGUMENTS = {"rank": "galore_rank", "update_proj_gap": "galore_every", "scale": "galore_scale"}
_BATCH = ("per_device_train_batch_size", "micro_batch_size", "train_batch_size", "batch_size")
_ACCUMULATION = "gradient_accumulation_steps"
_PACKS = ("sample_packing", "neat_packing")
_NO_EQUIVALENT = "tunewell has no such setting; leave it out"
_NUM_NAMED = 8


Setting = tuple[str, Any, tuple[str, ...]]
"""A key of tunewell, its value, and the foreign names that it comes from."""
Note = tuple[str, dict[str, Any]]
"""A text, and the settings for which it is true. `{}` in the text is replaced with the final values."""


@dataclass
class Translation:
    """The result of `translate`."""

    settings: list[Setting] = field(default_factory=list[Setting])
    """Several entries may set one key."""
    refused: dict[str, str] = field(default_factory=dict[str, str])
    """Foreign name -> the reason and tunewell's equivalent."""
    used: set[str] = field(default_factory=set[str])
    """All foreign names that were recognised."""
    unneeded: dict[str, str] = field(default_factory=dict[str, str])
    """Foreign name -> why its value changes nothing here."""
    notes: list[Note] = field(default_factory=list[Note])
    """Differences from the other trainer."""

    def set(self, key: str, value: Any, *names: str) -> None:
        """Set a key of tunewell from foreign names."""
        self.settings.append((key, value, names))
        self.used.update(names)

    def skip(self, name: str, reason: str) -> None:
        """Leave out a foreign name whose value changes nothing."""
        self.unneeded[name] = reason
        self.used.add(name)

    def refuse(self, name: str, reason: str) -> None:
        """Refuse a foreign name."""
        self.refused[name] = reason
        self.used.add(name)


def translate(
    found: Mapping[str, Any], *, context_length: Any = None, rows: Mapping[str, dict[str, Any]] | None = None
) -> Translation:
    """Translate the foreign names among unknown keys; keys that are not recognised are left out.

    `context_length` is that of the config. The batch of a trainer that packs is counted in sequences of this length.
    `rows` is another table in place of `foreign.json`.
    """
    rows = table() if rows is None else rows
    result = Translation()
    given = {name: value for name, value in found.items() if value is not None}
    for name in [name for name in found if name in rows]:
        _translate_row(name, rows[name], given, result)
    _translate_method("kind", found.get("kind"), result)
    _translate_batch(given, result, context_length)
    _translate_precision(given, result)
    _translate_optimizer(given, result)
    if any(setting[:2] == ("method.kind", "dora") for setting in result.settings):  # `use_dora` refines LoRA
        result.settings = [setting for setting in result.settings if setting[:2] != ("method.kind", "lora")]
    if result.unneeded:
        unchanged = [f"`{name}`" for name in result.unneeded]
        more = f" and {len(unchanged) - _NUM_NAMED} more" if len(unchanged) > _NUM_NAMED else ""
        text = f"ignored, because they change nothing in tunewell: {', '.join(unchanged[:_NUM_NAMED])}{more}"
        result.notes.append((text, {}))
    return result


def _translate_row(name: str, row: dict[str, Any], given: Mapping[str, Any], result: Translation) -> None:
    """Translate a name by its row in the table."""
    value = given.get(name)
    if value is None or value in row.get("same", ()) or (value is False and row.get("unset_beside") in given):
        result.skip(name, "not set" if value is None else row.get("needless", "this is how tunewell trains"))
    elif own := row.get("to", {}).get(
        value.lower() if isinstance(value, str) else json.dumps(value, default=str), row.get("any")
    ):
        for key, meant in own.items():
            result.set(key, meant, name)
    elif "key" in row:
        if row.get("is_list") and isinstance(value, str):
            value = [part.strip() for part in value.split(",")]
        result.set(row["key"], value, name)
    elif "needless" in row and re.search(row.get("like", ""), str(value)):
        result.skip(name, row["needless"])
    elif not ("is_method" in row and _translate_method(name, value, result)) and not row.get("is_computed"):
        result.refuse(name, row.get("instead") or row.get("lost", _NO_EQUIVALENT))


def _translate_method(name: str, given: Any, result: Translation) -> bool:
    """Translate a method of another tool: `qlora` is LoRA on a base model in 4 bits. Return False if it is unknown."""
    own = methods().get(re.sub(r"[\s_-]", "", str(given).lower()), {})
    if isinstance(own, str):
        result.refuse(name, own)
    else:
        for key, value in own.items():
            result.set(key, value, name)
        if own and name == "kind":
            result.notes.append((f"`method.kind: {given}` is {{}}", own))
    return bool(own)


@cache
def table() -> dict[str, dict[str, Any]]:
    """Return the names of `foreign.json`."""
    return _by_name(read_data(__file__, "foreign.json"))


@cache
def methods() -> dict[str, Any]:
    """Return the methods of `method_names.json`: their settings, or the reason why there are none."""
    return _by_name(read_data(__file__, "method_names.json")["names"])


def _by_name(rows: dict[str, Any]) -> dict[str, Any]:
    return {name: row for names, row in rows.items() for name in names.split()}


def _translate_batch(found: Mapping[str, Any], result: Translation, context_length: Any) -> None:
    """A step of other trainers has (rows per forward pass) x (accumulation steps) rows on each device.

    Where they pack, a row is a sequence full of documents, and a step is that many times its tokens.
    """
    sizes = [name for name in _BATCH if name in found]
    names = [*sizes, *([_ACCUMULATION] if _ACCUMULATION in found else [])]
    packs = [name for name in _PACKS if found.get(name) is True]
    factors = [found[name] for name in names]
    is_plain = len(sizes) == 1 and all(type(factor) is int and factor > 0 for factor in factors)
    length = context_length if type(context_length) is int and context_length > 0 else None
    for name in _PACKS:
        if name in found and name not in result.used:
            result.skip(name, "documents are always packed, and never attend to each other")
    if is_plain and packs and length:
        result.set("train.batch_tokens", prod(factors) * length, *names)
        text = f"`{packs[0]}`: a step is {prod(factors)} packed sequences of {length} tokens, not as many documents"
        result.notes.append((text, {}))
    elif is_plain and packs:
        sequences = f"with `{packs[0]}`, a step is {prod(factors)} packed sequences"
        result.refuse(names[0], f"{sequences}: write `train.batch_tokens`, that many times their length")
        result.used.update(names)
    elif is_plain:
        result.set("train.batch_documents", prod(factors), *names)
    elif names:
        others = f" ({' and '.join(f'`{name}`' for name in sizes)} are the same setting)" if len(sizes) > 1 else ""
        result.refuse(
            names[0],
            f"write `train.batch_documents`, the number of documents in a whole step{others}; micro-batches follow "
            "from `train.micro_batch_tokens`",
        )
        result.used.update(names)


def _translate_precision(found: Mapping[str, Any], result: Translation) -> None:
    names = [name for name in ("bf16", "fp16") if name in found]
    for name in names:
        if found[name] not in (True, False, "auto"):
            result.refuse(name, table()[name]["instead"])
        elif found[name] is True:
            result.set("train.precision", name, name)
    if names and not result.used.intersection(names):
        is_off = all(found[name] is False for name in names)
        result.set("train.precision", "fp32" if is_off else "auto", *names)
    result.used.update(names)


def _translate_optimizer(found: Mapping[str, Any], result: Translation) -> None:
    """Translate transformers' names of optimizers. Nothing is paged here: paged states spill to the host unseen."""
    for key in [key for key in ("optim", "optimizer") if key in found]:
        name = found[key] if isinstance(found[key], str) else ""
        own = table()["optim"]["names"].get(name, name)
        if own not in OPTIMIZERS.names():
            known = ", ".join(f"`{own}`" for own in OPTIMIZERS.names())
            result.refuse(key, f"{found[key]!r} is not supported; write `train.optimizer` with one of {known}")
            continue
        result.set("train.optimizer", own, key)
        if own == "galore" and "8bit" in name:
            result.set("train.galore_8bit", True, key)
        if name.startswith("paged"):
            text = f"`{key}: {name}`: the optimizer states stay on the device; nothing is paged"
            result.notes.append((text, {"train.optimizer": own}))
    if any(setting[:2] == ("train.optimizer", "galore") for setting in result.settings):
        _translate_galore(found, result)


def _translate_galore(found: Mapping[str, Any], result: Translation) -> None:
    """Translate `optim_args: "rank=64, update_proj_gap=100, scale=0.1"`, and drop the list of target modules."""
    for name in ("optim_target_modules", "optim_args"):
        result.refused.pop(name, None)
    if "optim_target_modules" in found:
        text = "`optim_target_modules` is not used: GaLore projects all matrices of the decoder layers"
        result.notes.append((text, {"train.optimizer": "galore"}))
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
    for key, value in values.items():
        result.set(f"train.{key}", value if key == "galore_scale" else int(value), "optim_args")
