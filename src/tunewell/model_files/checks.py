"""Find damaged weight files by their first bytes: Git LFS pointers, error pages, truncated or missing files."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from tunewell.core.errors import UserError
from tunewell.core.files import open_file, parse_json, read_bytes
from tunewell.model_files.families import packing_of
from tunewell.model_files.files import HUB_ID, WEIGHT_SUFFIXES
from tunewell.model_files.gguf import read_tensor_table
from tunewell.model_files.weights import header_size, tensor_shapes

_LFS = b"version https://git-lfs"
_MAX_FILES = 500


@dataclass(frozen=True)
class ModelState:
    """A model on this machine, and what is wrong with its files."""

    name: str
    path: str | None
    """None if it is not on this machine."""
    is_configured: bool
    """Whether the config or `--model` names it."""
    origin: Literal["folder", "file", "hub", "other"] = "other"
    damage: Sequence[tuple[str, str]] = ()
    """File and problem: `model.safetensors`, `is a Git LFS pointer`."""
    num_parameters: int | None = None
    """Elements of its weight files; None if they are not on this machine."""
    model_type: str | None = None
    """`model_type` in its `config.json`."""
    refusal: str = ""
    """Why it cannot be trained; empty if nothing is known against it."""
    packing: str = ""
    """How its documents are computed in training; empty if that is not known."""


def hub_cache() -> Path:
    """Return the folder of the hub cache, by the variables that huggingface_hub reads."""
    if folder := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(folder).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


def read_models(configured: str | None, *, base: Path | None = None, is_fast: bool = False) -> list[ModelState]:
    """Return the state of the configured model and, unless `is_fast`, of every model in the hub cache."""
    models: list[ModelState] = []
    if configured and not configured.startswith(("preset:", "package:", "ollama:")):
        models.append(_configured(configured, base or Path.cwd(), is_fast=is_fast))
    cache = hub_cache()
    for folder in [] if is_fast else sorted(cache.glob("models--*")):
        name = folder.name.removeprefix("models--").replace("--", "/")
        if all(model.name != name for model in models):
            models.append(_cached(name, folder, is_configured=False))
    return models


def _configured(name: str, base: Path, *, is_fast: bool) -> ModelState:
    path = (base / Path(name).expanduser()).absolute()
    if path.exists():
        damage = list(folder_damage(path, is_fast=is_fast))
        origin = "folder" if path.is_dir() else "file"
        return _with_size(ModelState(name, str(path), True, origin, damage), is_fast=is_fast)
    if not HUB_ID.fullmatch(name) or name.startswith("."):
        return ModelState(name, None, True, "other")
    return _cached(name, hub_cache() / f"models--{name.replace('/', '--')}", is_configured=True)


def _cached(name: str, folder: Path, *, is_configured: bool) -> ModelState:
    """Return the state of a model in the hub cache: its newest snapshot, and downloads that broke off."""
    newest = newest_snapshot(folder)
    if newest is None:
        return ModelState(name, None, is_configured, "hub")
    damage = list(folder_damage(newest))
    damage += [
        (path.name[:12] + "...", "is an unfinished download") for path in (folder / "blobs").glob("*.incomplete")
    ]
    return _with_size(ModelState(name, str(newest), is_configured, "hub", damage))


def newest_snapshot(folder: Path) -> Path | None:
    """Return the newest snapshot in a folder of the hub cache, or None."""
    snapshots = [path for path in (folder / "snapshots").glob("*") if path.is_dir()]
    return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)


def _with_size(model: ModelState, *, is_fast: bool = False) -> ModelState:
    """Add the number of parameters, from the headers of sound files, and the model type."""
    if model.damage or not model.is_configured or model.path is None or is_fast:
        return model
    path = Path(model.path)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    config = read_json_object(path / "config.json")
    number, kind = sum(map(_num_elements, files)) or None, config.get("model_type")
    sized = replace(model, num_parameters=number, model_type=kind)
    try:
        return replace(sized, packing=packing_of(config).words if config else "")
    except UserError as error:
        return replace(sized, refusal=error.what)


def _num_elements(path: Path) -> int:
    try:
        if path.suffix == ".gguf":
            return sum(math.prod(entry.shape) for entry in read_tensor_table(path))
        return sum(map(math.prod, tensor_shapes(path).values()))
    except (OSError, UserError, ValueError):
        return 0


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if the file is missing or damaged."""
    try:
        value: object = parse_json(read_bytes(path))
    except (OSError, ValueError):
        return {}
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def folder_damage(folder: Path, *, is_fast: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the damaged or missing weight files of a model folder, or a damaged file, each with its problem."""
    files = [folder]
    if folder.is_dir():
        files = [path for path in sorted(folder.iterdir()) if path.suffix in {*WEIGHT_SUFFIXES, ".gguf"}]
    for path in files[:_MAX_FILES]:
        if problem := weight_problem(path, is_fast=is_fast):
            yield path.name, problem
    for index in folder.glob("*.safetensors.index.json"):
        parts = read_json_object(index).get("weight_map")
        if not isinstance(parts, dict):
            yield index.name, _text_problem(index) or "is not JSON"
            continue
        for name in sorted({*map(str, cast(dict[str, object], parts).values())}):
            if not (folder / name).exists():
                yield name, "is missing, although the index lists it"
    small = folder / "tokenizer.json"
    if small.is_file() and (problem := _text_problem(small)):
        yield small.name, problem


def weight_problem(path: Path, *, is_fast: bool = False) -> str | None:
    """Return what is wrong with a weight file, or None. Only its header is read; `is_fast` reads no GGUF header.

    The header of a GGUF file holds the vocabulary, which takes up to 0.3 s.
    """
    try:
        size = path.stat().st_size
        with open_file(path) as file:
            head = file.read(64)
            if problem := _head_problem(head):
                return problem
            if path.suffix == ".safetensors":
                file.seek(8)
                return _safetensors_problem(head, size, file.read(header_size(head)))
        return _gguf_problem(path, size) if path.suffix == ".gguf" and not is_fast else None
    except FileNotFoundError:
        return "is a link to a file that does not exist"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def _text_problem(path: Path) -> str | None:
    try:
        with open_file(path) as file:
            return _head_problem(file.read(64))
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def _head_problem(head: bytes) -> str | None:
    if not head:
        return "is empty"
    if head.startswith(_LFS):
        return "is a Git LFS pointer, not the file itself"
    if head.lstrip()[:9].lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "is a web page, saved under the file's name"
    return None


def _safetensors_problem(head: bytes, size: int, header: bytes) -> str | None:
    length = header_size(head)
    if not length:
        return "is not a safetensors file: its header is damaged"
    if len(header) < length:
        return f"is truncated: the header has {length:,} bytes, the file {size:,}"
    try:
        entries: dict[str, Any] = parse_json(header)
        end = max((entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        return "is not a safetensors file: its header is damaged"
    expected = 8 + length + end
    return f"is truncated: {size:,} of {expected:,} bytes" if size < expected else None


def _gguf_problem(path: Path, size: int) -> str | None:
    try:
        table = read_tensor_table(path)
    except UserError as error:
        return error.what.removeprefix(f"`{path.name}` ")
    last = max((entry.offset for entry in table), default=0)
    return (
        f"is truncated: a tensor starts at byte {last:,}, the file has {size:,} bytes"
        if last >= size > 0 and table
        else None
    )
