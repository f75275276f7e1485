"""Models on this disk: in the hub cache, Ollama's and LM Studio's folders, installed packages and the project."""

import importlib.metadata
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tunewell.core.files import read_text
from tunewell.model_files.checks import folder_damage, hub_cache, newest_snapshot, read_json_object, weight_problem
from tunewell.model_files.families import why_refused
from tunewell.model_files.files import WEIGHT_SUFFIXES
from tunewell.model_files.ollama import PREFIX as OLLAMA
from tunewell.model_files.ollama import list_ollama

Where = Literal["hub cache", "Ollama", "LM Studio", "package", "this folder"]
_POINTER = Path("~/.lmstudio-home-pointer")
"""A file in which LM Studio writes the folder that the user has chosen."""
_LM_STUDIO = (Path("~/.lmstudio"), Path("~/.cache/lm-studio"))
_NOT_A_MODEL = re.compile(r"mmproj|-of-\d{5}\.gguf$|imatrix", re.IGNORECASE)
"""The image part of a model, a part of a split file, and statistics for quantising."""
_MAX_MODELS = 200


@dataclass(frozen=True)
class LocalModel:
    """A model on this disk."""

    name: str
    """As `--model` accepts it."""
    where: Where
    path: Path
    num_bytes: int
    problem: str = ""
    """Why it cannot be trained; empty if nothing is known against it."""


def find_local_models(folder: Path) -> list[LocalModel]:
    """Return the models on this disk. `folder` is the user's project, whose model folders and GGUF files count."""
    found: dict[str, LocalModel] = {}
    for model in (*_in_folder(folder), *_in_packages(), *_in_hub_cache(), *_in_ollama(), *_in_lm_studio()):
        found.setdefault(model.name, model)
    return list(found.values())[:_MAX_MODELS]


def _in_folder(folder: Path) -> Iterator[LocalModel]:
    for path in sorted(folder.glob("*")):
        if path.suffix == ".gguf" and path.is_file() and not _NOT_A_MODEL.search(path.name):
            yield _file(path, path.name, "this folder")
        elif path.is_dir() and (path / "config.json").is_file():
            yield from _folder(path, path.name, "this folder")


def _in_packages() -> Iterator[LocalModel]:
    for package in importlib.metadata.distributions():
        record = package.read_text("RECORD") or ""
        if ".gguf," not in record:
            continue
        files = [Path(str(file.locate())) for file in package.files or () if file.suffix == ".gguf"]
        if len(files) == 1 and files[0].is_file():
            yield _file(files[0], f"package:{package.name}", "package")


def _in_hub_cache() -> Iterator[LocalModel]:
    for folder in sorted(hub_cache().glob("models--*")):
        name = folder.name.removeprefix("models--").replace("--", "/")
        newest = newest_snapshot(folder) or folder
        if (newest / "config.json").is_file():
            yield from _folder(newest, name, "hub cache")
        else:  # a repository of GGUF files
            files = [path for path in sorted(newest.glob("*.gguf")) if not _NOT_A_MODEL.search(path.name)]
            yield from (_file(path, str(path), "hub cache") for path in files)


def _in_ollama() -> Iterator[LocalModel]:
    for model in list_ollama():
        name = OLLAMA + model.name.removesuffix(":latest")
        problem = model.problem or (weight_problem(model.blob, is_fast=True) if model.blob else "")
        yield LocalModel(name, "Ollama", model.blob or Path(), model.num_bytes, problem or "")


def _in_lm_studio() -> Iterator[LocalModel]:
    homes, pointer, user = list(_LM_STUDIO), _POINTER.expanduser(), Path.home()
    if pointer.is_file():
        homes.insert(0, Path(read_text(pointer, errors="replace").strip() or "~/.lmstudio"))
    for home in homes:
        for path in sorted((home.expanduser() / "models").glob("*/*/*.gguf")):
            if not _NOT_A_MODEL.search(path.name):
                name = f"~/{path.relative_to(user)}" if path.is_relative_to(user) else str(path)
                yield _file(path, name, "LM Studio")


def _file(path: Path, name: str, where: Where) -> LocalModel:
    size = path.stat().st_size if path.exists() else 0
    return LocalModel(name, where, path, size, weight_problem(path, is_fast=True) or "")


def _folder(folder: Path, name: str, where: Where) -> Iterator[LocalModel]:
    """Yield the model of a folder in transformers format; none if it has no weights or does not generate text."""
    config = read_json_object(folder / "config.json")
    kinds: Any = config.get("architectures") or [""]
    is_text = "CausalLM" in str(kinds[0]) or isinstance(config.get("text_config"), dict)
    files = [path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES and path.stem != "training_args"]
    if is_text and files:
        damage = next(folder_damage(folder, is_fast=True), None)
        size = sum(path.stat().st_size for path in files if path.exists())
        problem = f"`{damage[0]}` {damage[1]}" if damage else why_refused(config)
        yield LocalModel(name, where, folder, size, problem)
