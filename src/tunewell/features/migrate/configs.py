"""Read configs of Axolotl, LLaMA-Factory, TRL and OpenAI, and of scripts with the names of transformers."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tunewell.config.foreign import table
from tunewell.config.releases import owner_of
from tunewell.config.schema import ALIASES, OPEN, Config
from tunewell.config.yaml_reader import KeyPath, raise_problems, read_yaml
from tunewell.core.errors import UserError
from tunewell.features.migrate.ledger import Entry, ForeignConfig, Setting, as_dict, as_list, entry, shown_value
from tunewell.features.migrate.rows import read_axolotl_rows, read_factory_rows, source_of
from tunewell.features.migrate.shell import commands, read_flags

_SIGNS = {
    "openai": ("training_file",),
    "axolotl": ("base_model",),
    "llama_factory": ("stage", "finetuning_type", "cutoff_len", "lora_target"),
    "trl": ("model_name_or_path", "dataset_name", "dataset_mixture"),
}
"""Keys by which a config is recognised; the first that fits decides."""
_NAMES = {
    "openai": "an OpenAI fine-tuning job",
    "axolotl": "Axolotl",
    "llama_factory": "LLaMA-Factory",
    "trl": "TRL",
    "transformers": "transformers",
    "unsloth": "Unsloth",
}
_FACTORY_V1 = {"train_dataset", "dist_config", "kernel_config", "sample_backend"}
_VISION = ("processor_type", "skip_prepare_dataset")
_TRL_ROWS = ("dataset_config", "dataset_train_split", "dataset_test_split", "dataset_streaming")
_RECORD = "it belongs to the record of the job, and sets nothing"
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|,(?=\s*[}\]])')


def tool_name(tool: str) -> str:
    """Return the name of a tool for the screen."""
    return _NAMES[tool]


def read_tree(text: str, name: str) -> tuple[dict[str, Any], Mapping[KeyPath, int]]:
    """Return the tree of a YAML or JSON file, and the line of each value. JSON may have comments."""
    if re.match(r"\s*(//[^\n]*\s+)*\{", text):
        text = _COMMENT.sub(lambda found: found[1] or "", text)
    document = read_yaml(text, name)
    if not document.is_complete:
        raise_problems(document.problems)
    if not isinstance(document.value, dict):
        raise UserError("the file has no keys", where=name, fix="name a config, a script, a notebook or a job")
    return cast(dict[str, Any], document.value), document.lines


def read_config(text: str, name: str, others: Mapping[str, str], rows: Sequence[str]) -> ForeignConfig:
    """Read a YAML or JSON config. `others` are more files by name; `rows` are paths of row files."""
    tree, lines = read_tree(text, name)
    if as_list(tree.get("data")) and as_dict(as_list(tree["data"])[0]).get("object") == "fine_tuning.job":
        tree = as_dict(as_list(tree["data"])[0])  # the answer of `GET /v1/fine_tuning/jobs`: the newest job
    tool = next((tool for tool, signs in _SIGNS.items() if {*signs} & tree.keys()), "transformers")
    if tree.get("object") == "fine_tuning.job":
        tool = "openai"
    if tree.keys() <= Config.model_fields.keys():
        raise UserError("this is a config of tunewell", where=name, fix=f"`tunewell plan --config {name}` reads it")
    if len(_FACTORY_V1 & tree.keys()) > 1:
        fix = "write it with the keys of version 0 (`model_name_or_path`, `dataset`, `finetuning_type`)"
        raise UserError("configs of LLaMA-Factory's version 1 are not read", where=name, fix=fix)
    foreign = ForeignConfig(tool, text=text)
    settings = [Setting(key, value, name, lines.get((key,), 1)) for key, value in tree.items()]
    refuse_others({one.name: one for one in settings})
    if tool == "openai":
        _read_openai(foreign, settings, lines, rows)
    elif tool == "axolotl":
        for one in settings:
            if one.name in ("datasets", "pretraining_dataset") and one.value:
                read_axolotl_rows(foreign, one, lines)
            elif one.name == "test_datasets" and one.value:
                _held_out(foreign, one)
            else:
                foreign.settings.append(one)
        foreign.defaults = ["axolotl", *(["axolotl_lora"] if tree.get("adapter") else [])]
        foreign.own |= {} if tree.get("adapter") else {"method.kind": "full"}
    elif tool == "llama_factory":
        _read_factory(foreign, settings, others)
    else:
        foreign.settings = list(_flat(settings, lines))
        _require_known(foreign, name)
        read_trl_rows(foreign)
    return foreign


def refuse_others(given: Mapping[str, Setting]) -> None:
    """Raise UserError for a training on preferences, rewards, images or sound."""
    for name, one in sorted(given.items(), key=lambda pair: "reward" not in table().get(pair[0], {}).get("refuse", "")):
        row = table().get(name, {})
        if "refuse" not in row or one.value is None or one.value in row["same"] or str(one.value) in row.get("to", {}):
            continue
        shown = f"`{one.label}: {shown_value(one.value)}`"
        fix = "its chosen replies can be supervised: `tunewell init ROWS`" if "preferences" in row["refuse"] else None
        raise UserError(
            f"{shown} means {row['refuse']}, which tunewell does not do", where=f"{one.file} line {one.line}", fix=fix
        )
    if all(name in given and given[name].value for name in _VISION):
        one = given["processor_type"]
        raise UserError(
            "`processor_type` with `skip_prepare_dataset` trains on images or sound",
            where=f"{one.file} line {one.line}",
        )


def _flat(settings: Sequence[Setting], lines: Mapping[KeyPath, int], path: KeyPath = ()) -> Iterator[Setting]:
    """Yield the settings in sections of a config one by one."""
    for one in settings:
        inner = as_dict(one.value)
        here = (*path, one.name)
        if inner and one.name not in table():
            parts = [
                Setting(key, value, one.file, lines.get((*here, key), one.line), one.name)
                for key, value in inner.items()
            ]
            yield from _flat(parts, lines, here)
        else:
            yield one


def _require_known(foreign: ForeignConfig, name: str) -> None:
    known = [one.name for one in foreign.settings if one.name in table() or one.name in ALIASES or owner_of(one.name)]
    if not known:
        fix = "it reads configs of Axolotl, LLaMA-Factory and TRL, scripts, notebooks, shell scripts and OpenAI jobs"
        raise UserError("this is no config of a training that is known", where=name, fix=fix)
    if any(one.name in ("compute_environment", "ds_accelerator", "zero_optimization") for one in foreign.settings):
        raise UserError(
            "this is the config of a launcher, without a training", where=name, fix="name it beside the training's"
        )


def read_trl_rows(foreign: ForeignConfig) -> None:
    """Read the rows of TRL's command line, and of a script's flags: `dataset_name`, `data_dirs`, a mixture."""
    by_name = {one.name: one for one in foreign.settings}
    paths = ("dataset_name", "dataset_path", "train_file", "data_dirs", "data_path", "dataset", "train_data")
    for name in [*paths, "datasets"]:
        one = by_name.get(name)
        if one is None or not one.value:
            continue
        if name == "datasets":
            read_axolotl_rows(foreign, one, {})
        else:
            for path in as_list(one.value):
                extra = {"split": _text(by_name, "dataset_train_split"), "config": _text(by_name, "dataset_config")}
                source, lost = source_of(str(path), **(extra if name == "dataset_name" else {}))
                foreign.sources.append(source)
                ours = f"data.sources: path: {source['path']}"
                foreign.entries.append(entry(one, "translated", ours, lost))
        foreign.settings.remove(one)
        break
    for name in _TRL_ROWS:
        if (one := by_name.get(name)) is not None and one in foreign.settings:
            foreign.settings.remove(one)
            is_test = name == "dataset_test_split"
            why = "another split is not read: `data.held_out: FILE` names a file" if is_test else ""
            status = "lost" if is_test else "translated" if foreign.sources else "not needed"
            foreign.entries.append(entry(one, status, "" if is_test else "data.sources", why))
    foreign.defaults += ["transformers", *(["trl"] if foreign.tool == "trl" else [])]
    use_peft = by_name.get("use_peft")
    if use_peft is not None and use_peft.value is True:
        foreign.defaults.append("trl_cli")
    elif foreign.tool == "trl" and not {"lora_r", "lora_alpha", "load_in_4bit"} & by_name.keys():
        foreign.own["method.kind"] = "full"


def _text(by_name: Mapping[str, Setting], name: str) -> str | None:
    return str(by_name[name].value) if name in by_name and by_name[name].value else None


def _read_factory(foreign: ForeignConfig, settings: list[Setting], others: Mapping[str, str]) -> None:
    values = {one.name: one.value for one in settings}
    info: dict[str, Any] = {}
    folder = str(values.get("dataset_dir") or "data").partition(":")[2] or str(values.get("dataset_dir") or "data")
    found = next((text for name, text in others.items() if name.endswith("dataset_info.json")), None)
    if found is None and (path := Path(folder) / "dataset_info.json").is_file():
        found = path.read_text(encoding="utf-8", errors="replace")[:1_000_000]
    if found is not None:
        info = read_tree(found, "dataset_info.json")[0]
    for one in settings:
        if one.name == "dataset" and one.value:
            read_factory_rows(foreign, one, info, folder)
        elif one.name in ("dataset_dir", "media_dir") and one.value:
            foreign.entries.append(entry(one, "translated", "data.sources", "it is part of the paths"))
        elif one.name == "max_samples" and isinstance(one.value, int):
            foreign.own["limit"] = one.value
            foreign.entries.append(entry(one, "translated", f"data.sources: limit: {one.value}"))
        elif one.name == "eval_dataset" and one.value:
            _held_out(foreign, one)
        else:
            foreign.settings.append(one)
    for source in foreign.sources:
        limit = foreign.own.get("limit")
        source |= {"limit": min(limit, source.get("limit", limit))} if limit and limit > 0 else {}
    foreign.own.pop("limit", None)
    is_lora = values.get("finetuning_type", "lora") == "lora"
    foreign.defaults = ["llama_factory", *(["llama_factory_lora"] if is_lora else [])]
    rank = values.get("lora_rank", 8)
    if is_lora and not values.get("lora_alpha") and isinstance(rank, int):
        foreign.own["method.alpha"] = 2 * rank
    if values.get("stage") == "pt" and values.get("packing") is None:
        foreign.settings.append(Setting("packing", True, settings[0].file, 1))


def _held_out(foreign: ForeignConfig, one: Setting) -> None:
    value = as_list(one.value)[0]
    path = as_dict(value).get("path", value)
    if isinstance(path, str) and Path(path).is_file():
        foreign.own["data.held_out"] = path
        foreign.entries.append(entry(one, "translated", f"data.held_out: {path}"))
    else:
        why = "its rows are not read: `data.held_out: FILE` names a file of test rows"
        foreign.entries.append(entry(one, "lost", why=why))


def _read_openai(
    foreign: ForeignConfig, settings: list[Setting], lines: Mapping[KeyPath, int], rows: Sequence[str]
) -> None:
    """Read a job. Its files are ids, so the rows are the JSONL files that are named beside it."""
    by_name = {one.name: one for one in settings}
    method = as_dict(by_name["method"].value) if "method" in by_name else {}
    kind = str(method.get("type", "supervised"))
    if kind != "supervised":
        raise UserError(f"`method.type: {kind}` trains on preferences or rewards, which tunewell does not")
    inner: dict[str, Any] = {}
    for given in (by_name["hyperparameters"].value if "hyperparameters" in by_name else None, method):
        inner |= _hyperparameters(given)
    files: dict[str, str] = dict(zip(("training_file", "validation_file"), rows, strict=False))
    for one in settings:
        if one.name == "model":
            foreign.own["model"] = OPEN
            why = "its weights cannot be had: name an open model with `--model`, which `tunewell models ROWS` compares"
            foreign.entries.append(entry(one, "lost", why=why))
        elif one.name in ("training_file", "validation_file"):
            foreign.entries.append(_openai_file(foreign, one, files))
        elif one.name in ("method", "hyperparameters"):
            foreign.entries.append(entry(one, "translated", "", "its keys follow"))
        elif one.name == "seed":
            foreign.settings.append(one)
        elif one.name == "integrations" and one.value:
            names = [as_dict(part).get("type") for part in as_list(one.value)]
            foreign.own |= {"track": ["wandb"]} if "wandb" in names else {}
            foreign.entries.append(entry(one, "translated" if names == ["wandb"] else "lost", f"track: {names}"))
        elif one.name == "suffix" and one.value:
            foreign.own["run"] = f"run-{re.sub(r'[^a-z0-9]+', '-', str(one.value).lower())}"
            foreign.entries.append(entry(one, "translated", f"run: {foreign.own['run']}"))
        else:
            foreign.entries.append(entry(one, "not needed", why=_RECORD))
    line = by_name.get("hyperparameters", by_name.get("method", settings[0])).line
    for key, value in inner.items():
        at = Setting(key, value, settings[0].file, line, "hyperparameters")
        foreign.entries.append(_openai_number(foreign, at))
    foreign.own |= {"template.learn_from": "responses"}


def _hyperparameters(given: Any) -> dict[str, Any]:
    """Return the hyperparameters of a job, also of its `method`."""
    tree = as_dict(given)
    if isinstance(tree.get("supervised"), dict):
        return _hyperparameters(tree["supervised"])
    if "hyperparameters" in tree:
        return _hyperparameters(tree["hyperparameters"])
    return {key: value for key, value in tree.items() if key != "type"}


def _openai_file(foreign: ForeignConfig, one: Setting, files: Mapping[str, str]) -> Entry:
    path, is_rows = files.get(one.name), one.name == "training_file"
    if path is None and one.value is None:
        return entry(one, "not needed", why="not set")
    if path is None:
        if is_rows:
            foreign.sources.append({"path": OPEN})
        return entry(one, "lost", why="download the file, and name it after the job: `tunewell migrate JOB ROWS.jsonl`")
    if is_rows:
        foreign.sources.append({"path": path})
    else:
        foreign.own["data.held_out"] = path
    return entry(one, "translated", f"{'data.sources' if is_rows else 'data.held_out'}: {path}")


def _openai_number(foreign: ForeignConfig, at: Setting) -> Entry:
    key = {"n_epochs": "train.epochs", "batch_size": "train.batch_documents"}.get(at.name)
    if key is None and at.value not in ("auto", None, 1, 1.0):
        why = "the rate that it multiplies is not known: `train.learning_rate` is recommended for the model"
        return entry(at, "lost", why=why)
    if key is None or at.value in ("auto", None):
        return entry(at, "not needed", why="`auto` is a recommendation for these rows, here too")
    foreign.own[key] = at.value
    return entry(at, "translated", f"{key}: {at.value}")


def read_shell(text: str, name: str, others: Mapping[str, str], rows: Sequence[str]) -> ForeignConfig:
    """Read the commands of a shell script: their flags, and the configs that they name."""
    foreign, base = ForeignConfig("transformers", text=text), None
    for line, words in commands(text):
        foreign.words.update(word for word in words if not word.startswith("-"))
        is_factory = any(word.endswith("llamafactory-cli") for word in words)
        if "sft" in words and any(word.endswith("trl") for word in words):
            foreign.tool = "trl"
        configs = [
            word
            for word in words
            if word.endswith((".yaml", ".yml", ".json")) and (word in others or Path(word).is_file())
        ]
        for config in configs[:1] if base is None else []:
            content = others.get(config) or Path(config).read_text(encoding="utf-8", errors="replace")[:1_000_000]
            if "compute_environment" not in content:
                base = read_config(content, config, others, rows)
        for one in read_flags(words, name, line):
            if one.name in ("config", "config_file") and str(one.value) in configs:
                foreign.entries.append(entry(one, "translated", "", "its keys follow"))
            else:
                foreign.settings.append(one)
        if is_factory:
            foreign.tool = "llama_factory"
    if base is not None:
        foreign = _merged(base, foreign)
    elif not foreign.settings:
        raise UserError(
            "no command with flags is in the script", where=name, fix="name the config or the Python script"
        )
    elif foreign.tool == "llama_factory":
        settings, foreign.settings = foreign.settings, []
        _read_factory(foreign, settings, others)
        return foreign
    if base is None:
        _require_known(foreign, name)
    if not foreign.sources or base is None:
        read_trl_rows(foreign)
    return foreign


def _merged(base: ForeignConfig, flags: ForeignConfig) -> ForeignConfig:
    """Return a config with the flags of its command, which win."""
    base.settings += flags.settings
    base.entries += flags.entries
    base.words |= flags.words
    base.text += flags.text
    return base
