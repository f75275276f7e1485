"""Find the kind of each file by its content, and read them together as one config of another tool."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tunewell.config.releases import owner_of
from tunewell.config.schema import OPEN, Config
from tunewell.config.yaml_reader import MAX_BYTES, KeyPath, raise_problems, read_yaml
from tunewell.core.errors import UserError
from tunewell.core.files import open_file
from tunewell.features.migrate.ledger import Computed, ForeignConfig, Setting, as_dict, as_list, rows_of, scalar, tables
from tunewell.features.migrate.rows import is_file, read_data_set
from tunewell.features.migrate.script import notebook_code, read_script
from tunewell.features.migrate.shell import commands, read_flags

_ROWS = (".jsonl", ".csv", ".parquet", ".tsv")
_MAX_NOTEBOOK = 20 * MAX_BYTES
_PYTHON = re.compile(r"^\s*(?:from|import)\s+[\w.]+|\w\s*=\s*\w[\w.]*\(|\b\w+Config\(|^\s*def ", re.M)
_PARSER = re.compile(r"\b(?:TrlParser|HfArgumentParser|ArgumentParser)\(")
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|,(?=\s*[}\]])')
_LAUNCHERS = ("compute_environment", "ds_accelerator", "zero_optimization")
_INFO = "dataset_info.json"


def read_files(paths: Sequence[Path]) -> ForeignConfig:
    """Read the files of one training. Raise UserError if none of them is a config, or one cannot be read."""
    rows = [str(path) for path in paths if path.suffix in _ROWS]
    texts = {str(path): _text(path) for path in paths if str(path) not in rows}
    if not texts:
        raise UserError("there is no config among the files", fix="`tunewell init ROWS` writes one for rows")
    kinds = {name: _kind(name, text) for name, text in texts.items()}
    foreign: ForeignConfig | None = None
    order = ("launcher", "config", "script", "shell", "info")
    for name in sorted(texts, key=lambda name: order.index(kinds[name])):
        if kinds[name] != "info":
            found = _read(name, texts, kinds[name], rows)
            foreign = foreign.join(found) if foreign else found
    if foreign is None or not (
        foreign.data_sets or rows or any(not isinstance(one.value, Computed) for one in foreign.settings)
    ):
        fix = "name the training's config, its script, or the command (`.sh`) that sets its values"
        raise UserError("nothing that is known is set here", where=next(iter(texts)), fix=fix)
    _require_training(foreign, next(iter(texts)))
    _name_data_sets(foreign, texts)
    for one in foreign.data_sets:
        read_data_set(one, foreign)
    if rows and foreign.tool != "openai":
        foreign.sources = [{"path": path} for path in rows]
    return foreign


def _text(path: Path) -> str:
    if not path.is_file():
        raise UserError("this is a folder" if path.is_dir() else "the file does not exist", where=str(path))
    with open_file(path) as file:
        raw = file.read(_MAX_NOTEBOOK + 1)
    if len(raw) > _MAX_NOTEBOOK or (path.suffix != ".ipynb" and len(raw) > MAX_BYTES):
        raise UserError("the file is too large for a config", where=str(path))
    if b"\0" in raw:
        raise UserError("the file is not text in UTF-8", where=str(path))
    return raw.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")


def _kind(name: str, text: str) -> str:
    suffix = Path(name).suffix.lower()
    if name.endswith(_INFO):
        return "info"
    if any(re.search(rf"^\W*{word}\b", text, re.M) for word in _LAUNCHERS):
        return "launcher"
    if suffix == ".ipynb" or notebook_code(text) is not None:
        return "script"
    if suffix in (".yaml", ".yml", ".json") or text.lstrip().startswith("{"):
        return "config"
    if suffix == ".py":
        return "script"
    is_shell = suffix in (".sh", ".bash") or text.startswith("#!") or next(commands(text), None)
    return "shell" if is_shell else "script" if _PYTHON.search(text) else "config"


def _read(name: str, texts: Mapping[str, str], kind: str, rows: Sequence[str]) -> ForeignConfig:
    text = texts[name]
    if kind == "launcher":
        tree, _ = _read_tree(text, name)
        num = tree.get("num_processes")
        return ForeignConfig("", processes=num if type(num) is int and num > 0 else None)
    if kind == "config":
        return _read_config(text, name, rows)
    if kind == "shell":
        return _read_shell(text, name, texts, rows)
    code = notebook_code(text) if Path(name).suffix == ".ipynb" or text.lstrip().startswith("{") else text
    if code is None:
        raise UserError("the notebook cannot be read", where=name, fix="save it again as `.ipynb`")
    foreign = read_script(code, name)
    if _PARSER.search(code) and not any(one.name in ("learning_rate", "output_dir") for one in foreign.settings):
        _read_documented(foreign, ast.get_docstring(ast.parse(code), clean=False) or "", name)
    return foreign


def _read_documented(foreign: ForeignConfig, text: str, name: str) -> None:
    """Add the flags of the first command in the text at the head of a script that reads its command line."""
    for line, words in commands(text):
        if any(word.endswith(".py") or word == "sft" for word in words):
            foreign.settings += read_flags(words, name, line)
            foreign.own.pop("method.kind", None)
            foreign.tool = "trl" if "TrlParser(" in foreign.text else foreign.tool
            return


def _read_tree(text: str, name: str) -> tuple[dict[str, Any], Mapping[KeyPath, int]]:
    """Return the tree of a YAML or JSON file, and the line of each value. JSON may have comments."""
    if re.match(r"\s*(//[^\n]*\s+)*\{", text):
        text = _COMMENT.sub(lambda found: found[1] or "", text)
    document = read_yaml(text, name)
    if not document.is_complete:
        raise_problems(document.problems)
    if not isinstance(document.value, dict):
        raise UserError("the file has no keys", where=name, fix="name a config, a script, a notebook or a job")
    return cast(dict[str, Any], document.value), document.lines


def _read_config(text: str, name: str, rows: Sequence[str]) -> ForeignConfig:
    """Read a YAML or JSON config."""
    tree, lines = _read_tree(text, name)
    signs = tables()["tools"].items()
    tool = next((tool for tool, row in signs if {*row.get("signs", "").split()} & tree.keys()), "transformers")
    if tree.keys() <= Config.model_fields.keys():
        raise UserError("this is a config of tunewell", where=name, fix=f"`tunewell plan --config {name}` reads it")
    foreign = ForeignConfig(tool, text)
    foreign.settings = list(_flat(tree, name, lines, (), foreign))
    if tool == "openai":
        _read_job(foreign, rows)
    return foreign


def _flat(
    tree: Mapping[str, Any], name: str, lines: Mapping[KeyPath, int], path: KeyPath, foreign: ForeignConfig
) -> Iterator[Setting]:
    """Yield the keys of a tree with their lines: those of sections one by one, those of data sets into `data_sets`."""
    for key, value in _merged(tree).items():
        here = (*path, key)
        line = lines.get(here, lines.get(path, 1))
        call = str(path[-1]) if path and foreign.tool != "openai" else ""
        is_known = key in rows_of("")
        if key in ("datasets", "pretraining_dataset") and value:
            for number, one in enumerate(as_list(value)):
                section = _merged(as_dict(one) or {"path": one})
                section |= {inner: part for inner, part in as_dict(section.get("type")).items() if inner not in section}
                at = lines.get((*here, number), line)
                foreign.data_sets.append(
                    [
                        Setting(inner, scalar(part), name, lines.get((*here, number, inner), at), f"{key}[{number}]")
                        for inner, part in section.items()
                    ]
                )
        elif as_dict(value) and not is_known:
            yield from _flat(value, name, lines, here, foreign)
        else:
            yield Setting(key, scalar(value), name, line, call)


def _merged(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section with the keys that a merge key (`<<`) takes from other sections."""
    others = [as_dict(one) for one in as_list(tree.get("<<"))]
    merged = {key: value for other in reversed(others) for key, value in other.items()}
    return merged | {key: value for key, value in tree.items() if key != "<<"}


def _require_training(foreign: ForeignConfig, name: str) -> None:
    """Raise UserError if no key is known, or the only file is that of a launcher."""
    names = [one.name for one in foreign.settings]
    if foreign.tool == "":
        raise UserError("this is the config of a launcher", where=name, fix="name the training's config too")
    is_known = any(name in rows_of("") or owner_of(name) for name in names)
    if names and not is_known and not foreign.data_sets and foreign.tool != "openai":
        fix = "it reads configs of Axolotl, LLaMA-Factory and TRL, scripts, notebooks, shell scripts and OpenAI jobs"
        raise UserError("this is no config of a training that is known", where=name, fix=fix)


def _name_data_sets(foreign: ForeignConfig, texts: Mapping[str, str]) -> None:
    """Make data sets of keys like `dataset_name` and `dataset_train_split`, and set what the kind of method implies."""
    tool = tables()["tools"][foreign.tool]
    keys: dict[str, str] = tool.get("data_keys", tables()["tools"]["trl"]["data_keys"])
    given = {one.name: one for one in foreign.settings if one.value not in (None, "", [])}
    path = next((given[name] for name, own in keys.items() if own == "path" and name in given), None)
    if path is not None:
        folder = str(given["dataset_dir"].value if "dataset_dir" in given else "data").removeprefix("REMOTE:")
        sets: list[dict[str, Any]] = [{"path": one} for one in as_list(path.value)]
        if foreign.tool == "llama_factory":
            names = [name.strip() for one in as_list(path.value) for name in str(one).split(",") if name.strip()]
            sets = [_named(name, _dataset_info(texts, folder), folder) for name in names]
        foreign.data_sets += [
            [replace(path, name=key, value=facts[key], alias=path.name) for key in facts] for facts in sets
        ]
        foreign.settings.remove(path)
    others = [one for name, one in given.items() if keys.get(name) not in (None, "path")] if foreign.data_sets else []
    for one in others:
        for parts in foreign.data_sets:
            parts.append(replace(one, name=keys[one.name], alias=one.label))
    foreign.settings = [one for one in foreign.settings if one not in others]
    is_lora = any(name in given and given[name].value for name in tool.get("lora", "").split())
    is_lora |= tool.get("is_lora", False) and "finetuning_type" not in given
    foreign.defaults += f"{tool.get('defaults', '')} {tool.get('lora_defaults', '') if is_lora else ''}".split()
    if "otherwise" in tool and not is_lora:
        foreign.own.setdefault("method.kind", tool["otherwise"])


def _dataset_info(texts: Mapping[str, str], folder: str) -> dict[str, Any]:
    """Return LLaMA-Factory's list of data sets: of the files that were named, or of the data folder."""
    text = next((text for name, text in texts.items() if name.endswith(_INFO)), None)
    path = f"{folder}/{_INFO}"
    if text is None and is_file(path):
        text = _text(Path(path))
    return _read_tree(text, _INFO)[0] if text else {}


def _named(name: str, infos: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return the keys of a data set that LLaMA-Factory's list names."""
    known = as_dict(infos.get(name))
    columns = as_dict(known.get("columns"))
    if {"images", "videos", "audios"} & columns.keys() or "mllm" in name:
        raise UserError(f"`{name}` has images, video or audio, which tunewell does not train on")
    if known.get("ranking") or "kto_tag" in columns:
        raise UserError(f"`{name}` has preferences, which tunewell does not train on")
    path = known.get("hf_hub_url") or f"{folder}/{known.get('file_name') or f'{name}.json'}"
    facts = {"split": known.get("split"), "name": known.get("subset"), "limit": known.get("num_samples")}
    own = tables()["llama_factory_columns"]
    renamed = {own[key]: value for key, value in columns.items() if key in own and own[key] != value}
    kind = {"type": "alpaca_columns"} if renamed and not known.get("formatting") else {}
    return {key: value for key, value in {"path": path, **facts, **renamed, **kind}.items() if value is not None}


def _read_job(foreign: ForeignConfig, rows: Sequence[str]) -> None:
    """Read the files of an OpenAI job: they are ids, so the rows are the JSONL files that are named beside it."""
    kind = next((one for one in foreign.settings if one.name == "type"), None)
    if kind is not None and kind.value != "supervised":
        what = f"`method.type: {kind.value}` trains on preferences or rewards, which tunewell does not"
        raise UserError(what, where=f"{kind.file} line {kind.line}")
    foreign.own |= {"model": OPEN, "template.learn_from": "responses"}
    for name, path in zip(("training_file", "validation_file"), rows, strict=False):
        ours = "data.sources: path" if name == "training_file" else "data.held_out"
        foreign.own |= {"data.held_out": path} if name == "validation_file" else {}
        foreign.sources += [{"path": path}] if name == "training_file" else []
        for one in [one for one in foreign.settings if one.name == name]:
            foreign.settings.remove(one)
            foreign.add(one, "translated", f"{ours}: {path}")


def _read_shell(text: str, name: str, texts: Mapping[str, str], rows: Sequence[str]) -> ForeignConfig:
    """Read the commands of a shell script: their flags, and the configs that they name."""
    foreign = ForeignConfig("transformers", text)
    for line, words in commands(text):
        program = Path(words[0]).name
        if program == "trl" and words[1:2] != ["sft"]:
            what = f"`trl {words[1]}` is no supervised fine-tuning"
            raise UserError(what, where=f"{name} line {line}", fix="only supervised fine-tuning on text is read")
        foreign.tool = {"llamafactory-cli": "llama_factory", "trl": "trl"}.get(program, foreign.tool)
        configs = [word for word in words if word.endswith((".yaml", ".yml", ".json")) and is_file(word)]
        for config in [config for config in configs if config not in texts]:
            content = _text(Path(config))
            foreign = _read(config, {config: content}, _kind(config, content), rows).join(foreign)
        for one in read_flags(words, name, line):
            if str(one.value) in configs:
                foreign.add(one, "translated", why="its keys follow")
            else:
                foreign.settings.append(one)
    return foreign
