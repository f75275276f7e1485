"""Find the kind of each file by its content, and read them together as one config of another tool."""

import ast
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tunewell.config.yaml_reader import MAX_BYTES
from tunewell.core.errors import UserError
from tunewell.core.files import open_file
from tunewell.features.migrate.configs import read_config, read_shell, read_tree
from tunewell.features.migrate.ledger import ForeignConfig
from tunewell.features.migrate.script import notebook_code, read_script
from tunewell.features.migrate.shell import commands, read_flags

_ROWS = (".jsonl", ".csv", ".parquet", ".tsv")
_MAX_NOTEBOOK = 20 * MAX_BYTES
_PYTHON = re.compile(r"^\s*(?:from|import)\s+[\w.]+|\w\s*=\s*\w[\w.]*\(|\b\w+Config\(|^\s*def ", re.M)
_PARSER = re.compile(r"\b(?:TrlParser|HfArgumentParser|ArgumentParser)\(")
_PROCESSES = ("num_processes", "nproc_per_node", "num_gpus", "gpu_count", "ray_num_workers")


def read_files(paths: Sequence[Path]) -> ForeignConfig:
    """Read the files of one training. Raise UserError if none of them is a config, or one cannot be read."""
    rows = [str(path) for path in paths if path.suffix in _ROWS]
    texts = {str(path): _text(path) for path in paths if str(path) not in rows}
    if not texts:
        raise UserError("there is no config among the files", fix="`tunewell init ROWS` writes one for rows")
    ranked = sorted(texts, key=lambda name: _rank(name, texts[name]))
    main = ranked[0]
    foreign = _read(main, texts[main], {name: text for name, text in texts.items() if name != main}, rows)
    for name in ranked[1:]:
        _add(foreign, name, texts[name])
    if rows and foreign.tool != "openai":
        foreign.sources = [{"path": path} for path in rows]
    if foreign.processes is None:
        counts = {one.name: one.value for one in foreign.settings if one.name in _PROCESSES}
        foreign.processes = next((value for value in counts.values() if type(value) is int and value > 0), None)
    return foreign


def _text(path: Path) -> str:
    if not path.is_file():
        raise UserError("this is a folder" if path.is_dir() else "the file does not exist", where=str(path))
    with open_file(path) as file:
        raw = file.read(_MAX_NOTEBOOK + 1)
    if len(raw) > _MAX_NOTEBOOK or (path.suffix != ".ipynb" and len(raw) > MAX_BYTES):
        raise UserError("the file is too large for a config", where=str(path))
    if b"\0" in raw:
        raise UserError("the file is not text", where=str(path))
    return raw.decode("utf-8-sig", errors="replace")


def _rank(name: str, text: str) -> int:
    """Return the place of a file in the order of reading: commands, scripts, configs, and what they need."""
    if name.endswith("dataset_info.json") or "compute_environment" in text:
        return 3
    kind = _kind(name, text)
    return {"shell": 0, "script": 1, "notebook": 1}.get(kind, 2)


def _kind(name: str, text: str) -> str:
    suffix = Path(name).suffix.lower()
    if suffix == ".ipynb" or notebook_code(text) is not None:
        return "notebook"
    if suffix in (".yaml", ".yml", ".json") or text.lstrip().startswith("{"):
        return "config"
    if suffix == ".py":
        return "script"
    if suffix in (".sh", ".bash") or text.startswith("#!") or next(commands(text), None):
        return "shell"
    return "script" if _PYTHON.search(text) else "config"


def _read(name: str, text: str, others: dict[str, str], rows: Sequence[str]) -> ForeignConfig:
    kind = _kind(name, text)
    if kind == "config":
        return read_config(text, name, others, rows)
    if kind == "shell":
        return read_shell(text, name, others, rows)
    code = notebook_code(text) if kind == "notebook" else text
    if code is None:
        raise UserError("the notebook cannot be read", where=name, fix="save it again as `.ipynb`")
    foreign = read_script(code, name)
    if _PARSER.search(code) and not any(one.name in ("learning_rate", "output_dir") for one in foreign.settings):
        _read_documented(foreign, code, name, others)
    if not foreign.settings and not others and not rows:
        fix = "the settings come from the command line: name the command (`.sh`) or its YAML too"
        raise UserError("the script sets nothing that is known", where=name, fix=fix)
    return foreign


def _read_documented(foreign: ForeignConfig, code: str, name: str, others: dict[str, str]) -> None:
    """Add the flags of the first command in the text at the head of a script that reads its command line."""
    text = ast.get_docstring(ast.parse(code), clean=False) or ""
    for line, words in commands(text):
        if any(word.endswith(".py") or word == "sft" for word in words):
            shell = read_shell(_only(text, line), name, others, ())
            foreign.settings += shell.settings
            foreign.entries += shell.entries
            if shell.sources and not foreign.sources:
                foreign.sources = shell.sources
                made = [one for one in foreign.entries if one.key.endswith(".train_dataset") and one.status == "lost"]
                why = "its rows are named on the command line"
                foreign.entries = [
                    replace(one, status="not needed", why=why) if one in made else one for one in foreign.entries
                ]
            foreign.defaults += [one for one in shell.defaults if one not in foreign.defaults]
            if any(one.name == "use_peft" for one in shell.settings):
                foreign.own.pop("method.kind", None)
                foreign.defaults.append("trl_cli")
            else:
                foreign.own.setdefault("method.kind", "full")
            return


def _only(text: str, line: int) -> str:
    """Return the text with nothing but the command that begins in a line."""
    lines = text.split("\n")
    end = line
    while end < len(lines) and lines[end - 1].rstrip().endswith("\\"):
        end += 1
    return "\n" * (line - 1) + "\n".join(lines[line - 1 : end])


def _add(foreign: ForeignConfig, name: str, text: str) -> None:
    """Add what another file says: the number of processes and the precision of a launcher, flags of a command."""
    if name.endswith("dataset_info.json"):
        return
    if "compute_environment" in text:
        tree, _ = read_tree(text, name)
        if type(tree.get("num_processes")) is int:
            foreign.processes = tree["num_processes"]
        return
    foreign.text += text
    with suppress(UserError):
        read_json = cast(Any, json.loads(text)) if text.lstrip().startswith("{") else None
        if _kind(name, text) == "shell":
            for line, words in commands(text):
                foreign.settings += read_flags(words, name, line)
        elif read_json is None or isinstance(read_json, dict):
            other = _read(name, text, {}, ())
            known = {one.name for one in foreign.settings}
            foreign.settings = [one for one in other.settings if one.name not in known] + foreign.settings
            foreign.sources = foreign.sources or other.sources
            foreign.entries += [one for one in other.entries if one not in foreign.entries]
            foreign.defaults += [one for one in other.defaults if one not in foreign.defaults]
            foreign.own = other.own | foreign.own
            foreign.words |= other.words
