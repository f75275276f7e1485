"""Translate the keys of another tool by the tables in `config/foreign*`, and write an entry for each."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, cast

from tunewell.config import foreign as foreign_keys
from tunewell.config.foreign import table, translate
from tunewell.config.keys import all_keys
from tunewell.config.load import set_value
from tunewell.config.releases import parse_release, stated_versions
from tunewell.config.schema import ALIASES
from tunewell.core.errors import UserError
from tunewell.core.files import open_file, parse_json, read_data
from tunewell.core.units import count
from tunewell.features.migrate.ledger import (
    Computed,
    Entry,
    ForeignConfig,
    Setting,
    Status,
    as_dict,
    as_list,
    fate,
    rows_of,
    scalar,
    shown_value,
    why_not,
)
from tunewell.features.migrate.rows import is_file, read_function

_SIZES = ("per_device_train_batch_size", "micro_batch_size", "train_batch_size", "batch_size")
_PROCESSES = ("num_processes", "nproc_per_node", "num_gpus", "gpu_count", "ray_num_workers")
_UNPACKED = ("sample_packing", "packing", "neat_packing")
_BATCH = (*_SIZES, "gradient_accumulation_steps")
_HELD_OUT = ("val_set_size", "val_size", "test_datasets", "eval_dataset", "dataset_test_split")
_TAKEN = (*_BATCH, *_UNPACKED, *_PROCESSES, *_HELD_OUT)
_TARGETS = ("lora_target_modules", "target_modules")
_STOPS = ("early_stopping_patience", "early_stopping_steps", "load_best_model_at_end")
_PROJECTIONS = re.compile(r"\b(qkv|q|k|v|o|gate_up|gate|up|down|in|out)(?:_proj)?\b")


@dataclass
class Draft:
    """The config that is being written."""

    foreign: ForeignConfig
    given: dict[str, Setting]
    """The last setting of each name."""
    tree: dict[str, Any] = field(default_factory=dict[str, Any])
    comments: dict[str, str] = field(default_factory=dict[str, str])
    takers: dict[str, Setting] = field(default_factory=dict[str, Setting])
    """Our key -> the setting of the source that set it."""
    defaults: list[Entry] = field(default_factory=list[Entry])
    notes: list[str] = field(default_factory=list[str])
    batch: str = ""

    def add(self, one: Setting, status: Status, ours: str = "", why: str = "") -> None:
        """Add the entry of a setting."""
        if one.call == "default":
            self.defaults.append(Entry(one.name, shown_value(one.value), "", 0, status, ours, why))
        else:
            self.foreign.add(one, status, ours, why)

    def put(self, key: str, value: Any, comment: str) -> None:
        """Set a key of ours that no single key of the source stands for."""
        self.tree[key] = value
        self.comments[key] = comment

    def set(self, one: Setting, own: Mapping[str, Any], why: str = "") -> None:
        """Set keys of ours from a setting. A value that our config does not take is lost, and the entry says why."""
        is_default = one.call == "default"
        if own.get("train.attention") == "flash":
            own, why = {"train.attention": "auto"}, "the flash kernel is used where the GPU has it"
        if is_default:
            own = {key: value for key, value in own.items() if key not in self.tree and _differs(key, value)}
            if not own:
                return
        for key, value in own.items():
            other = self.takers.get(key)
            if other is not None and not value and self.tree.get(key):
                self.add(one, "not needed", why=f"`{other.label}` decides")
                return
            if problem := invalid(key, value):
                self.add(one, "lost", why=problem)
                return
        self.tree |= own
        self.takers |= dict.fromkeys(own, one)
        where = "the default there" if is_default else f"{Path(one.file).name} line {one.line}"
        self.comments |= dict.fromkeys(own, f"{one.name if is_default else one.label}, {where}")
        ours = ", ".join(f"{key}: {shown_value(value)}" for key, value in own.items())
        is_kept = any(key.rpartition(".")[2] == one.name and value == one.value for key, value in own.items())
        self.add(one, "kept" if is_kept else "translated", ours, why)


def invalid(key: str, value: Any) -> str:
    """Return why our config does not take a value, or an empty text."""
    tree: dict[str, Any] = {}
    set_value(tree, tuple(key.split(".")), value)
    return why_not(tree)


def _differs(key: str, value: Any) -> bool:
    """Return whether a value is not the default of our key."""
    own = all_keys()[key].default
    return own != value or (type(own) is not type(value) and not isinstance(value, int | float))


def translate_config(foreign: ForeignConfig, *, processes: int | None = None) -> Draft:
    """Translate all settings and the defaults of the source. Raise UserError if it trains what tunewell does not."""
    draft = Draft(foreign, _last_ones(foreign))
    _refuse_others(draft.given)
    draft.tree |= {key: value for key, value in foreign.own.items() if key != "data.held_out"}
    models = [one for name, one in draft.given.items() if ALIASES.get(name, name) == "model"]
    _take_all(models, draft)
    _take_all([one for one in draft.given.values() if one not in models], draft)
    _take_defaults(draft)
    _take_held_out(draft)
    _take_learn_from(draft)
    _take_batch(processes, draft)
    if foreign.sources:
        draft.tree["data.sources"] = foreign.sources
    return draft


def _last_ones(foreign: ForeignConfig) -> dict[str, Setting]:
    """Return the last setting of each name; earlier ones and unknown values get their entry."""
    given: dict[str, Setting] = {}
    known = {one.name for one in foreign.settings if not isinstance(one.value, Computed)}
    for one in foreign.settings:
        is_function = one.name in ("formatting_func", "data_collator")
        needless = table().get(one.name, {}).get("needless")
        if isinstance(one.value, Computed) and not is_function:
            needless = needless or ("another line or the command line sets it" if one.name in known else None)
            why = needless or "it is computed while the script runs: set it yourself"
            foreign.add(one, "not needed" if needless else "lost", why=why)
            continue
        if (earlier := given.pop(one.name, None)) is not None:
            foreign.add(earlier, "not needed", why=f"set again in {one.file} line {one.line}")
        given[one.name] = replace(one, value=scalar(one.value))
    return given


def _refuse_others(given: Mapping[str, Setting]) -> None:
    """Raise UserError for a training on preferences, rewards, images or sound."""
    for name, one in sorted(given.items(), key=lambda pair: "reward" not in table().get(pair[0], {}).get("refuse", "")):
        row = table().get(name, {})
        is_vision = name == "processor_type" and getattr(given.get("skip_prepare_dataset"), "value", None)
        is_harmless = one.value is None or one.value in row.get("same", ()) or str(one.value) in row.get("to", {})
        if is_vision or ("refuse" in row and not is_harmless):
            means = row.get("refuse", "training on images or sound")
            fix = "its chosen replies can be supervised: `tunewell init ROWS`" if "preferences" in means else None
            what = f"`{one.label}: {shown_value(one.value)}` means {means}, which tunewell does not do"
            raise UserError(what, where=f"{one.file} line {one.line}", fix=fix)


def _take_all(settings: list[Setting], draft: Draft) -> None:
    """Take settings by the tables."""
    rows = rows_of(draft.foreign.tool)
    rest = {one.name: one for one in settings if one.name not in _TAKEN and not _take_special(one, draft)}
    if draft.foreign.tool == "openai":
        rows = {name: rows.get(name, rows["other"]) for name in rest}
    found = translate({name: one.value for name, one in rest.items()}, rows=rows)
    for one in sorted(rest.values(), key=lambda one: one.name == "lora_target_linear"):
        status, own, why = fate(one, found, rows)
        if "template.name" in own and re.search(r"instruct|chat|-it\b", str(draft.tree.get("model", "")), re.I):
            own, why = {"template.name": "auto"}, f"the model's own template is used; `{one.value}` is its name there"
        draft.set(one, own, why) if own else draft.add(one, status, why=why)
    draft.notes += [text for text, wanted in found.notes if wanted and "{}" not in text]


def _take_special(one: Setting, draft: Draft) -> bool:
    """Take a setting that depends on more than its value. Return whether it was taken."""
    if one.name == "formatting_func":
        read_function(one, draft.foreign)
        draft.tree |= {key: value for key, value in draft.foreign.own.items() if key == "template.name"}
    elif one.name in _TARGETS and isinstance(one.value, str) and one.value not in ("", "all", "all-linear"):
        _take_targets(one, draft)
    elif one.name.startswith("tokenizer") and one.value == draft.tree.get("model"):
        draft.add(one, "not needed", why="the tokenizer is that of the model")
    elif one.name.startswith("chat_template") and str(one.value).endswith(".jinja"):
        draft.set(one, {"template.name": one.value})
    else:
        return False
    return True


def _take_targets(one: Setting, draft: Draft) -> None:
    """Take the names of layers out of a list in a text, or out of a regular expression."""
    found = [f"{stem}_proj" for stem in _PROJECTIONS.findall(one.value)]
    if re.fullmatch(r"[\w.]+(,\s*[\w.]+)*", one.value):
        draft.set(one, {"method.targets": re.split(r",\s*", one.value)})
    elif found:
        why = "the layers that the expression names, in the text part"
        draft.set(one, {"method.targets": list(dict.fromkeys(found))}, why)
    else:
        draft.add(one, "lost", why="an expression is not read: all linear layers get an adapter")


@cache
def _all_defaults() -> dict[str, Any]:
    return read_data(foreign_keys.__file__, "foreign_defaults.toml")


def default_values(foreign: ForeignConfig) -> dict[str, Any]:
    """Return the defaults of the source, by the releases that its text states."""
    stated = stated_versions(foreign.text)
    values: dict[str, Any] = {}
    for name in dict.fromkeys(foreign.defaults):
        for since, group in _all_defaults()[name].items():
            if since == "all" or name not in stated or stated[name] >= parse_release(since):
                values |= group
    return values


def _take_defaults(draft: Draft) -> None:
    """Take the defaults of the source for keys that it left out."""
    given, values = draft.given, default_values(draft.foreign)
    is_16_bit = any(one.value for name, one in given.items() if name in ("load_in_8bit", "load_in_16bit"))
    if draft.tree.get("method.kind") == "full" or is_16_bit or "full_finetuning" in given:
        values.pop("load_in_4bit", None)
    model = str(draft.tree.get("model", "")).lower()
    targets = _all_defaults()["peft_targets"]
    guess = (found for names, found in targets.items() if any(part in model for part in names.split()))
    if values.get("target_modules") == "?":
        values["target_modules"] = next(guess, targets["other"])
    rank = draft.tree.get("method.rank", 8)
    kind = getattr(given.get("finetuning_type"), "value", "lora")
    if draft.foreign.tool == "llama_factory" and kind == "lora" and type(rank) is int:
        values["lora_alpha"] = 2 * rank
    has_warmup = "train.warmup" in draft.tree
    left_out = [name for name in values if name not in given and not (has_warmup and name.startswith("warmup"))]
    _take_all([Setting(name, values[name], "", 0, "default") for name in left_out], draft)


def _take_held_out(draft: Draft) -> None:
    """Hold out what the source holds out, and keep its duplicates, so that the training rows are the same."""
    size = draft.foreign.own.get("data.held_out", 0)
    for one in [draft.given[name] for name in _HELD_OUT if name in draft.given]:
        first = next(iter(as_list(one.value)), None)
        value = as_dict(first).get("path", first)
        is_share = isinstance(value, float | int) and 0 <= value < 0.5
        if value is None:
            draft.add(one, "not needed", why="not set")
        elif is_share or is_file(str(value)):
            size = value
            draft.add(one, "translated", f"data.held_out: {shown_value(size)}")
        else:
            draft.add(one, "lost", why="its rows are not read: `data.held_out` is a file of rows, or a share below 0.5")
    draft.put("data.held_out", size, "the rows that are held out there")
    if not size:
        draft.comments["data.held_out"] = "nothing is held out there; without this line, 20 questions or 5% are"
    if not any(getattr(draft.given.get(name), "value", None) for name in _STOPS):
        draft.put("data.selection", 0, "no rows choose a checkpoint there; the last one is used")
    if "data.clean.exact_duplicate" not in draft.tree:
        draft.put("data.clean.exact_duplicate", "keep", "duplicates are kept there")


def _take_learn_from(draft: Draft) -> None:
    """TRL supervises a whole conversation unless a key says otherwise, but only the completion of a prompt."""
    foreign = draft.foreign
    if foreign.tool not in ("trl", "transformers", "unsloth") or "template.learn_from" in draft.tree:
        return
    row = _first_row(foreign)
    if "text" in row and not row.keys() & {"messages", "conversations", "prompt"}:
        for source in foreign.sources:  # TRL trains on the texts, also where there are labels
            source.setdefault("format", "text")
    has_completions = {"prompt", "completion"} <= row.keys()
    if has_completions and isinstance(row["prompt"], str):
        draft.notes.append("lost: plain texts are joined without a template there; here they are turns in a template")
    learn = "responses" if has_completions else "everything"
    why = "the completions alone are supervised there" if has_completions else "the whole text is supervised there"
    draft.put("template.learn_from", learn, why)
    one = Setting("assistant_only_loss", False, "", 0, "default")
    draft.add(one, "translated", f"template.learn_from: {learn}", why)


def _first_row(foreign: ForeignConfig) -> dict[str, Any]:
    """Return the first row of a local file, or an empty one."""
    for source in foreign.sources:
        path = str(source["path"])
        if path.endswith(".jsonl") and is_file(path):
            with suppress(OSError, ValueError, UserError, RecursionError), open_file(Path(path), "r") as file:
                return as_dict(parse_json(file.readline(1_000_000)))
    return {}


def _take_batch(processes: int | None, draft: Draft) -> None:
    """A step there is (rows or packed sequences per device) x (accumulation) x (processes)."""
    given, values = draft.given, default_values(draft.foreign)
    listed = [given[name].value for name in _PROCESSES if name in given]
    said = draft.foreign.processes or next((one for one in listed if type(one) is int and one > 0), None)
    num = processes or said or 1
    packs = [given[name].value for name in _UNPACKED if name in given]
    is_packed = True in packs or (not packs and "stage" in given and given["stage"].value == "pt")
    factors = [given[name].value for name in _BATCH if name in given and given[name].value not in (None, "auto")]
    sizes = [name for name in _SIZES if name in given and given[name].value not in (None, "auto")]
    if not sizes:
        factors += [values[name] for name in _SIZES if name in values][:1]
    is_known = bool(factors) and all(type(one) is int and one > 0 for one in factors) and len(sizes) < 2
    rows = prod(cast(list[int], factors)) * num if is_known else 0
    key, value, unit = "train.batch_documents", rows, "document" if rows == 1 else "documents"
    if is_packed:
        length = draft.tree.get("packing.context_length")
        value = rows * length if isinstance(length, int) else 0
        key, unit = "train.batch_tokens", f"packed sequences of {length} tokens"
    is_taken = bool(value) and not invalid(key, value)
    if is_taken:
        product = " x ".join(map(str, [*factors, *([num] if num > 1 else [])]))
        step = f"{product} = {rows} {unit}" if " x " in product else f"{rows} {unit}"
        draft.put(key, value, f"{step} a step")
        updates = draft.tree.get("train.max_steps")
        same = f": {count(updates)} updates there, {count(updates)} here" if updates else ""
        assumed = "" if processes or said else "; one process is assumed: `--processes N`"
        draft.batch = f"a step there is {step}, and here: `{key}: {value}`{same}{assumed}"
    for name in [name for name in (*_BATCH, *_PROCESSES, *_UNPACKED) if name in given]:
        one = given[name]
        if name in _UNPACKED:
            draft.add(one, "not needed", why="documents are always packed, and never attend to each other")
        elif one.value in (None, "auto"):
            draft.add(one, "not needed", why="not set")
        elif is_taken:
            draft.add(one, "translated", f"{key}: {value}", f"a step is {rows} {unit}")
        else:
            draft.add(one, "lost", why="the size of a step does not follow: write `train.batch_documents`")
