"""Translate the keys of another tool by the tables in `config/foreign*`, and write an entry for each."""

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, cast

from tunewell.config import foreign as foreign_module
from tunewell.config.extensions import TRACKERS
from tunewell.config.foreign import table, translate
from tunewell.config.load import load_config
from tunewell.config.releases import Release, owner_of, parse_release, stated_versions
from tunewell.config.schema import ALIASES
from tunewell.core.errors import UserError
from tunewell.core.files import read_bytes, read_data
from tunewell.core.units import count
from tunewell.features.migrate.configs import refuse_others
from tunewell.features.migrate.ledger import (
    Computed,
    Entry,
    ForeignConfig,
    Setting,
    Status,
    as_dict,
    as_list,
    entry,
    shown_value,
)
from tunewell.features.migrate.rows import tables

_SIZES = ("per_device_train_batch_size", "micro_batch_size", "train_batch_size", "batch_size")
_MAX_COUNTED = 1 << 30
_BATCH = (*_SIZES, "gradient_accumulation_steps")
_LENGTHS = tuple(alias for alias, key in ALIASES.items() if key == "packing.context_length")
_KERNELS = re.compile(r"(CutCrossEntropy|Liger|Kernels|Spectrum)Plugin$")
_UNPACKED = ("sample_packing", "packing", "neat_packing")
_PROJECTIONS = re.compile(r"\(([\w|]+)\)_proj|\b(\w+_proj)\b|\(([\w|]*_proj[\w|]*)\)")
_OWN_TOKENS = ("pad_token", "unk_token", "bos_token", "eos_token")


@dataclass
class Draft:
    """The config that is being written."""

    foreign: ForeignConfig
    tree: dict[str, Any] = field(default_factory=dict[str, Any])
    comments: dict[str, str] = field(default_factory=dict[str, str])
    entries: list[Entry] = field(default_factory=list[Entry])
    defaults: list[Entry] = field(default_factory=list[Entry])
    notes: list[str] = field(default_factory=list[str])
    batch: str = ""

    def add(self, one: Setting, status: Status, ours: str = "", why: str = "") -> None:
        """Add the entry of a setting."""
        is_default = one.call == "default"
        (self.defaults if is_default else self.entries).append(entry(one, status, ours, why))

    def set(self, one: Setting, own: Mapping[str, Any], why: str = "") -> None:
        """Set keys of ours from a setting. A value that our config does not take is lost, and the entry says why."""
        taken: dict[str, Any] = {}
        if own.get("train.attention") == "flash":
            own, why = {"train.attention": "auto"}, "the flash kernel is used where the GPU has it"
        for key, value in own.items():
            if one.call == "default" and key in self.tree:
                continue
            if problem := invalid(key, value):
                self.add(one, "lost", why=problem)
                return
            taken[key] = value
        if one.call == "default" and not any(_differs(key, value) for key, value in taken.items()):
            return
        self.tree |= taken
        where = "the default there" if one.call == "default" else f"{Path(one.file).name} line {one.line}"
        self.comments |= dict.fromkeys(taken, f"{one.label.removeprefix('default.')}, {where}")
        ours = ", ".join(f"{key}: {shown_value(value)}" for key, value in taken.items())
        is_kept = any(key.rpartition(".")[2] == one.name and value == one.value for key, value in taken.items())
        self.add(one, "kept" if is_kept else "translated", ours, why)


def invalid(key: str, value: Any) -> str:
    """Return why our config does not take a value, or an empty text."""
    tree: Any = value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    try:
        load_config(tree)
    except UserError as error:
        return error.what.partition("\n")[0]
    return ""


def _differs(key: str, value: Any) -> bool:
    """Return whether a value is not the default of our key."""
    from tunewell.config.keys import all_keys

    own = all_keys()[key].default
    return own != value or (type(own) is not type(value) and not isinstance(value, int | float))


def translate_config(foreign: ForeignConfig, *, processes: int | None = None) -> Draft:
    """Translate all settings and the defaults of the source. Raise UserError if it trains what tunewell does not."""
    draft = Draft(foreign)
    draft.entries += dict.fromkeys(foreign.entries)
    given = _last_ones(foreign, draft)
    refuse_others(given)
    draft.tree |= {key: value for key, value in foreign.own.items() if not key.startswith("data.held_out")}
    models = {name: one for name, one in given.items() if ALIASES.get(name) == "model" and one.value}
    _take_by_table(models, draft)
    rest = {name: one for name, one in given.items() if name not in models and not _take_special(one, given, draft)}
    _take_by_table(rest, draft)
    _take_defaults(given, draft)
    _take_held_out(given, draft)
    _take_learn_from(given, draft)
    _take_batch(given, processes, draft)
    if foreign.sources:
        draft.tree["data.sources"] = foreign.sources
    return draft


def _last_ones(foreign: ForeignConfig, draft: Draft) -> dict[str, Setting]:
    """Return the last setting of each name; earlier ones and unknown values get their entry."""
    given: dict[str, Setting] = {}
    known = {one.name for one in foreign.settings if not isinstance(one.value, Computed)}
    for one in foreign.settings:
        value = one.value
        needless = table().get(one.name, {}).get("needless")
        if isinstance(value, Computed) and (one.name in known or needless):
            draft.add(one, "not needed", why=needless or "another line or the command line sets it")
            continue
        if isinstance(value, Computed):
            draft.add(one, "lost", why="it is computed while the script runs: set it yourself")
            continue
        if isinstance(value, str) and re.fullmatch(r"\d{1,3}(_\d{3})+", value):
            value = int(value)
        if (
            isinstance(value, str)
            and re.fullmatch(r"[-+]?\d+(\.\d*)?(e[-+]?\d+)?", value, re.I)
            and one.name in ALIASES
        ):
            value = float(value) if re.search(r"[.e]", value, re.I) else int(value)
        if (earlier := given.pop(one.name, None)) is not None:
            draft.add(earlier, "not needed", why=f"set again in {one.file} line {one.line}")
        given[one.name] = Setting(one.name, value, one.file, one.line, one.call)
    return given


def _take_special(one: Setting, given: Mapping[str, Setting], draft: Draft) -> bool:
    """Take a setting whose value needs more than a row of the table. Return whether it was taken."""
    name, value = one.name, one.value
    if name in _BATCH or name in _UNPACKED:
        return True  # `_take_batch`
    if value is None or (value == -1 and name == "max_steps") or (name in ALIASES and value == ""):
        draft.add(one, "not needed", why="not set")
    elif name in ("chat_template", "template") and isinstance(value, str):
        _take_template(one, draft)
    elif name in ("chat_template_jinja", "chat_template_path") and isinstance(value, str) and value.endswith(".jinja"):
        draft.set(one, {"template.name": value})
    elif name in ("report_to", "wandb_project"):
        _take_trackers(one, draft)
    elif name in ("val_set_size", "val_size"):
        return True  # `_take_held_out`
    elif name in ("eval_steps", "save_steps") and (not isinstance(value, int) or value < 1):
        draft.add(one, "not needed", why="a run is evaluated and saved ten times")
    elif name in ("lora_target_modules", "target_modules") and isinstance(value, str) and value != "all-linear":
        _take_targets(one, draft)
    elif name == "plugins" and all(_KERNELS.search(str(part)) for part in as_list(value)):
        draft.add(one, "not needed", why="it changes speed and memory, not the result")
    elif name == "special_tokens" and not {*as_dict(value)} - {*_OWN_TOKENS}:
        draft.add(one, "not needed", why="the tokenizer's own tokens are used, and nothing is padded")
    elif name == "tokens" and all(str(part).startswith("<|im_") for part in as_list(value)):
        draft.set(one, {"template.add_missing_tokens": True}, "those of ChatML are added")
    elif name == "dataset_text_field" and isinstance(value, str) and value != "text":
        for source in draft.foreign.sources:
            source.setdefault("columns", {})["text"] = value
        draft.add(one, "translated", f"data.sources: columns: {{text: {value}}}")
    elif name in ("num_processes", "nproc_per_node", "num_gpus", "gpu_count", "ray_num_workers"):
        draft.add(one, "translated", why="it is part of the batch: `train.batch_documents` or `train.batch_tokens`")
    elif name == "seed":
        draft.set(one, {"seed": value})
    elif name in ("run", "output_dir") and isinstance(value, str):
        draft.set(one, {"run": value.rstrip("/") or "run"})
    elif name == "adapter_name_or_path" and isinstance(value, str) and not Path(value).exists():
        draft.add(one, "lost", why="the folder of the adapter is not here: a new one is trained")
    elif name == "warmup_steps" and given.get("warmup_ratio") is not None and value == 0:
        draft.add(one, "not needed", why="`warmup_ratio` decides")
    elif name == "warmup_ratio" and getattr(given.get("warmup_steps"), "value", None):
        draft.add(one, "not needed", why="`warmup_steps` decides")
    elif name == "lr_scheduler_kwargs" and isinstance(value, dict) and "min_lr_rate" in value:
        draft.set(one, {"train.min_rate_share": value["min_lr_rate"]})
    elif (own := _own_values(name, value)) is not None:
        if "lost" in own or not own:
            draft.add(one, "lost" if own else "not needed", why=own.get("lost", "this is how tunewell trains"))
        elif "needless" in own:
            draft.add(one, "not needed", why=own["needless"])
        else:
            draft.set(one, own)
    else:
        return False
    return True


def _own_values(name: str, value: Any) -> dict[str, Any] | None:
    """Return what a value means by the table: keys of ours, or why it is lost or not needed; None if it has no row."""
    rows = tables()["values"]
    row = next((rows[names] for names in rows if name in names.split()), None)
    if row is None:
        return None
    text = shown_value(value)
    found = row.get(text, row.get(text.replace("_lr", ""), row.get("any")))
    return {"lost": row["lost"]} if found is None and "lost" in row else found


def _take_template(one: Setting, draft: Draft) -> None:
    is_tuned = re.search(r"instruct|chat|-it\b", str(draft.tree.get("model", "")), re.I)
    own = None if is_tuned else tables()["templates"].get(one.value)
    why = "" if own else f"the template in the model's files is used; `{one.value}` is its name there"
    if one.value.endswith(".jinja"):
        own, why = one.value, ""
    draft.set(one, {"template.name": own or "auto"}, why)


def _take_trackers(one: Setting, draft: Draft) -> None:
    names = ["wandb"] if one.name == "wandb_project" else as_list(one.value)
    known = [name for name in names if name in TRACKERS.names()]
    if names in (["none"], ["all"]):
        draft.add(one, "not needed", why="no tracker is used unless it is named")
    elif known:
        draft.set(one, {"track": known}, "set WANDB_PROJECT to its name" if one.name == "wandb_project" else "")
    else:
        draft.add(
            one,
            "lost",
            why="this tracker is not supported; metrics are in `events.jsonl`, and `tunewell track` sends them",
        )


def _take_targets(one: Setting, draft: Draft) -> None:
    """Take the names of layers out of a regular expression."""
    found: list[str] = []
    for stems, name, group in _PROJECTIONS.findall(one.value):
        found += [f"{stem}_proj" for stem in stems.split("|") if stem] or ([name] if name else group.split("|"))
    names = list(dict.fromkeys(name for name in found if name))
    if names:
        draft.set(one, {"method.targets": names}, "the layers that the expression names, in the text part")
    elif re.fullmatch(r"[\w.]+(,\s*[\w.]+)*", one.value):
        draft.set(one, {"method.targets": [part.strip() for part in one.value.split(",")]})
    else:
        draft.add(one, "lost", why="an expression is not read: all linear layers get an adapter")


def _take_by_table(rest: Mapping[str, Setting], draft: Draft) -> None:
    """Take the other settings: aliases of ours, then the names of `foreign.json`."""
    aliases = [name for name in rest if name in ALIASES]
    for name in aliases:
        draft.set(rest[name], {ALIASES[name]: rest[name].value})
    found = translate({name: one.value for name, one in rest.items() if name not in aliases})
    for name, one in rest.items():
        if name in aliases:
            continue
        own = {key: value for key, value, names in found.settings if name in names}
        if name in found.refused:
            draft.add(one, "lost", why=table().get(name, {}).get("lost", found.refused[name]))
        elif name in found.unneeded:
            draft.add(one, "not needed", why=found.unneeded[name])
        elif own:
            draft.set(one, own)
        elif name in found.used:
            draft.add(one, "translated", why="together with other keys of its kind")
        else:
            owner = owner_of(name)
            why = f"tunewell has nothing like this setting of {owner}" if owner else "tunewell has no such setting"
            draft.add(one, "lost", why=why)
    draft.notes += [text for text, wanted in found.notes if wanted and "{}" not in text]


def default_values(foreign: ForeignConfig) -> dict[str, Any]:
    """Return the defaults of the source, by the releases that its text states."""
    raw = read_data(foreign_module.__file__, "foreign_defaults.toml")
    stated = stated_versions(foreign.text)
    values: dict[str, Any] = {}
    for name in dict.fromkeys(foreign.defaults):
        for since, group in raw[name].items():
            release: Release | None = stated.get(name)
            if since == "all" or release is None or release >= parse_release(since):
                values |= group
    return values


def _take_defaults(given: Mapping[str, Setting], draft: Draft) -> None:
    """Take the defaults of the source for keys that it left out."""
    values = default_values(draft.foreign)
    if draft.tree.get("method.kind") == "full" or any(
        one.value for name, one in given.items() if name in ("load_in_8bit", "load_in_16bit", "full_finetuning")
    ):
        values.pop("load_in_4bit", None)
    if "train.warmup" in draft.tree:
        values = {name: value for name, value in values.items() if not name.startswith("warmup")}
    model = str(draft.tree.get("model", "")).lower()
    for name, value in values.items():
        if (
            name in given
            or name in _BATCH
            or name in _UNPACKED
            or name in ("val_set_size", "val_size", "dataset_train_split")
        ):
            continue
        if value == "?":
            pairs = raw_targets().items()
            value = next((found for names, found in pairs if any(part in model for part in names.split())), None)
            value = value or raw_targets()["other"]
        one = Setting(name, value, "", 0, "default")
        if not _take_special(one, given, draft):
            _take_by_table({name: one}, draft)


def raw_targets() -> dict[str, list[str]]:
    """Return PEFT's target modules by a part of the model's name."""
    return read_data(foreign_module.__file__, "foreign_defaults.toml")["peft_targets"]


def _take_held_out(given: Mapping[str, Setting], draft: Draft) -> None:
    """Hold out what the source holds out, and keep its duplicates, so that the training rows are the same."""
    one = next((given[name] for name in ("val_set_size", "val_size") if name in given), None)
    own = draft.foreign.own.get("data.held_out")
    size = own if own is not None else one.value if one else 0
    is_share = isinstance(size, float | int) and 0 < size < 0.5
    if one is not None:
        if isinstance(size, int | float) and size and not is_share:
            draft.add(one, "lost", why="held-out rows are a share: 20 questions or 5% are held out")
        else:
            draft.add(one, "kept" if is_share else "translated", f"data.held_out: {shown_value(size)}")
    if is_share or isinstance(size, str):
        draft.tree["data.held_out"] = size
    elif not size:
        draft.tree |= {"data.held_out": 0}
        draft.comments["data.held_out"] = (
            "nothing is held out there; without this line, 20 questions or 5% give a verdict"
        )
    stops = any(
        getattr(given.get(name), "value", None)
        for name in ("early_stopping_patience", "early_stopping_steps", "load_best_model_at_end")
    )
    if not stops:
        draft.tree["data.selection"] = 0
        draft.comments["data.selection"] = "no rows choose a checkpoint there; the last one is used"
    if "data.clean.exact_duplicate" not in draft.tree:
        draft.tree["data.clean.exact_duplicate"] = "keep"
        draft.comments["data.clean.exact_duplicate"] = "duplicates are kept there"


def _take_learn_from(given: Mapping[str, Setting], draft: Draft) -> None:
    """TRL supervises a whole conversation unless a key says otherwise, but only the completion of a prompt."""
    is_trl = draft.foreign.tool in ("trl", "transformers", "unsloth")
    if (
        not is_trl
        or "template.learn_from" in draft.tree
        or any(one.name == "train_on_responses_only" for one in given.values())
    ):
        return
    row = _first_row(draft.foreign)
    columns = {*row}
    if "text" in columns and not columns & {"messages", "conversations", "prompt"}:
        for source in draft.foreign.sources:  # TRL trains on the texts, also where there are labels
            source.setdefault("format", "text")
    if {"prompt", "completion"} <= columns and isinstance(row["prompt"], str):
        why = "plain texts are joined without a template there; here they are turns in the template of the model"
        draft.add(Setting("prompt, completion", "texts", str(draft.foreign.sources[0]["path"]), 1), "lost", why=why)
    learn = "responses" if {"prompt", "completion"} <= columns else "everything"
    draft.tree["template.learn_from"] = learn
    why = "the completions alone are supervised there" if learn == "responses" else "the whole text is supervised there"
    draft.comments["template.learn_from"] = why
    one = Setting("assistant_only_loss", False, "", 0, "default")
    draft.add(one, "translated", f"template.learn_from: {learn}", why)


def _first_row(foreign: ForeignConfig) -> dict[str, Any]:
    """Return the first row of a local file, or an empty one."""
    from tunewell.core.files import open_file, parse_json

    for source in foreign.sources:
        path = Path(str(source["path"]))
        with suppress(OSError, ValueError, UserError, RecursionError):
            if path.is_file() and path.suffix == ".jsonl":
                with open_file(path, "r", encoding="utf-8") as file:
                    row = parse_json(file.readline(1_000_000))
                return as_dict(row)
    return {}


def _num_updates(draft: Draft, batch: int) -> int | None:
    """Return the number of updates of the run, if its steps are set or its rows can be counted."""
    epochs, total = draft.tree.get("train.epochs"), 0
    for source in draft.foreign.sources:
        path = Path(str(source["path"]))
        if path.suffix != ".jsonl" or not path.is_file() or path.stat().st_size > _MAX_COUNTED:
            return draft.tree.get("train.max_steps")
        num_rows = sum(bool(line.strip()) for line in read_bytes(path).splitlines())
        total += min(num_rows, source.get("limit", num_rows))
    if "train.max_steps" in draft.tree:
        return draft.tree["train.max_steps"]
    if not isinstance(epochs, int | float) or epochs != int(epochs) or draft.tree.get("data.held_out"):
        return None
    return math.ceil(total / batch) * int(epochs) or None


def _take_batch(given: Mapping[str, Setting], processes: int | None, draft: Draft) -> None:
    """A step there is (rows or packed sequences per device) x (accumulation) x (processes)."""
    values = default_values(draft.foreign)
    packs = next((given[name] for name in _UNPACKED if name in given and given[name].value is True), None)
    names = [name for name in _BATCH if name in given and given[name].value is not None]
    num = processes or draft.foreign.processes or 1
    sizes = [name for name in names if name in _SIZES]
    factors = [given[name].value for name in names]
    if not sizes:
        factors += [values[name] for name in _SIZES if name in values][:1]
    length = draft.tree.get("packing.context_length")
    if "batch_size" in sizes and len(sizes) > 1:  # Axolotl's `batch_size` is the whole step, in micro-batches
        sizes, factors = ["batch_size"], [given["batch_size"].value]
    is_known = bool(factors) and all(type(factor) is int and factor > 0 for factor in factors) and len(sizes) < 2
    rows = prod(cast(list[int], factors)) * num if is_known else 0
    key, unit = "train.batch_documents", "documents"
    own: dict[str, Any] = {key: rows}
    if packs is not None and rows and isinstance(length, int):
        key, unit = "train.batch_tokens", f"packed sequences of {count(length)} tokens"
        own = {key: rows * length}
    is_taken = bool(rows) and not invalid(key, own[key]) and not (packs is not None and not isinstance(length, int))
    if is_taken:
        draft.tree |= own
        factors_text = " x ".join(map(str, [*factors, *([num] if num > 1 else [])]))
        step = f"{factors_text} = {rows} {unit}" if " x " in factors_text else f"{rows} {unit}"
        draft.comments[key] = f"{step} a step"
        assumed = "" if processes or draft.foreign.processes else "; one process is assumed: `--processes N`"
        updates = _num_updates(draft, rows) if key == "train.batch_documents" else draft.tree.get("train.max_steps")
        same = f": {count(updates)} updates there, {count(updates)} here" if updates else ""
        draft.batch = f"a step there is {step}, and here: `{key}: {own[key]}`{same}{assumed}"
    for name in [name for name in (*_BATCH, *_UNPACKED) if name in given]:
        one = given[name]
        if name in _UNPACKED:
            why = "documents are always packed, and never attend to each other"
            counted = f"; the batch is in packed sequences, as {key}" if one is packs and is_taken else ""
            draft.add(one, "not needed", why=why + counted)
        elif one.value is None:
            draft.add(one, "not needed", why="not set")
        elif is_taken:
            draft.add(one, "translated", f"{key}: {own[key]}", "" if packs is None else f"a step is {rows} {unit}")
        else:
            draft.add(one, "lost", why="the size of a step does not follow: write `train.batch_documents`")
