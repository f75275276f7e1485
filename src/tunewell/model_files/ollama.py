"""Models in Ollama's folder: a manifest for each name and tag, and the GGUF file among its blobs.

    ~/.ollama/models/manifests/registry.ollama.ai/library/llama3.2/latest      JSON: layers with media type and digest
    ~/.ollama/models/blobs/sha256-dde5aa3f...                                  the file of a layer

Ollama is not started and not needed.
"""

import difflib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError, did_you_mean
from tunewell.core.files import parse_json, read_bytes

PREFIX = "ollama:"
_SYSTEM_FOLDER = Path("/usr/share/ollama/.ollama/models")
"""Where Ollama runs as a service on Linux."""
_HOSTS = ("registry.ollama.ai", "ollama.com")
_MANIFESTS = ("manifests", "manifests-v2", "manifest-v2")
_MODEL = "application/vnd.ollama.image.model"
_ADAPTER = "application/vnd.ollama.image.adapter"
_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")
_MAX_MANIFEST_BYTES = 1 << 20


@dataclass(frozen=True)
class OllamaModel:
    """A model in Ollama's folder."""

    name: str
    """As `ollama list` shows it: `llama3.2:latest`, `hf.co/bartowski/Qwen3-4B-GGUF:Q4_K_M`."""
    blob: Path | None
    """The GGUF file; None if the manifest names none, or if it is not on the disk."""
    num_bytes: int
    problem: str = ""
    """Why it cannot be trained; empty if it can."""


def ollama_folders() -> list[Path]:
    """Return the folders of models that exist: `OLLAMA_MODELS`, or the user's and the one of the service."""
    named = os.environ.get("OLLAMA_MODELS")
    folders = [Path(named).expanduser()] if named else [Path("~/.ollama/models").expanduser(), _SYSTEM_FOLDER]
    return [folder for folder in folders if _is_dir(folder)]


def _is_dir(folder: Path) -> bool:
    try:
        return folder.is_dir()
    except OSError:  # a folder of another user
        return False


def list_ollama() -> list[OllamaModel]:
    """Return the models of all folders by name."""
    found: dict[str, OllamaModel] = {}
    for folder in ollama_folders():
        for manifest in _manifests(folder):
            name = _name_of(manifest)
            found.setdefault(name, OllamaModel(name, *_read(folder, manifest)))
    return [found[name] for name in sorted(found)]


def find_ollama(name: str) -> OllamaModel:
    """Return the model `NAME[:TAG]`; raise UserError if Ollama does not have it or it cannot be used."""
    wanted = name.removeprefix(PREFIX)
    parts = wanted.rpartition("/")
    tagged = wanted if ":" in parts[2] else f"{wanted}:latest"
    models = list_ollama()
    found = next((model for model in models if model.name.lower() == tagged.lower()), None)
    if found is None:
        raise _missing(wanted, [model.name for model in models])
    if found.problem or found.blob is None:
        raise UserError(
            f"`{PREFIX}{wanted}` cannot be used: {found.problem}",
            where=str(found.blob or ""),
            fix=f"`ollama pull {wanted}`, or use the model's hub id",
        )
    return found


def _missing(wanted: str, names: list[str]) -> UserError:
    folders = ollama_folders()
    if not folders:
        return UserError(
            f"there is no model `{PREFIX}{wanted}`: Ollama has no models on this machine",
            where="searched ~/.ollama/models and /usr/share/ollama (set OLLAMA_MODELS if it is elsewhere)",
            fix=f"`ollama pull {wanted}`, or use a hub id: `tunewell models` lists some",
        )
    known = [name.rpartition(":")[0] for name in names]
    near = difflib.get_close_matches(wanted.partition(":")[0], known, n=3)
    close = [name for name in names if name.rpartition(":")[0] in near]
    has = f"Ollama has: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" if names else "it has no models"
    return UserError(
        f"there is no model `{wanted}` in Ollama's folder",
        where=f"{folders[0]}; {has}",
        fix=did_you_mean([PREFIX + name for name in close[:3]], f"`ollama pull {wanted}`"),
    )


def _manifests(folder: Path) -> Iterator[Path]:
    for name in _MANIFESTS:
        try:
            yield from sorted(path for path in (folder / name).glob("*/*/*/*") if path.is_file())
        except OSError:
            continue


def _name_of(manifest: Path) -> str:
    host, owner, model, tag = manifest.parts[-4:]
    front = [] if host in _HOSTS else [host]
    front += [] if owner == "library" and host in _HOSTS else [owner]
    return f"{'/'.join([*front, model])}:{tag}"


def _read(folder: Path, manifest: Path) -> tuple[Path | None, int, str]:
    """Return the GGUF file of a model, its size, and why it cannot be trained."""
    try:
        if manifest.stat().st_size > _MAX_MANIFEST_BYTES:
            raise ValueError("too large")
        layers: list[dict[str, Any]] = parse_json(read_bytes(manifest))["layers"]
        by_type = {str(layer.get("mediaType")): layer for layer in layers}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None, 0, "its manifest is damaged"
    layer = by_type.get(_MODEL)
    if layer is None:
        return None, 0, "it has no GGUF file (it runs in the cloud, or is stored in another format)"
    digest = _DIGEST.fullmatch(str(layer.get("digest")))
    if digest is None:
        return None, 0, "its manifest is damaged"
    # Versions before 0.1.33 separated the hash with a colon on Linux and macOS.
    paths = [folder / "blobs" / f"sha256{mark}{digest[1]}" for mark in "-:"]
    blob = next((path for path in paths if path.is_file()), None)
    size = layer.get("size")
    num_bytes = size if type(size) is int else 0
    if blob is None:
        return None, num_bytes, "its file is missing"
    if num_bytes and blob.stat().st_size != num_bytes:
        return blob, num_bytes, "its file is incomplete"
    if _ADAPTER in by_type:
        return blob, num_bytes, "it has an adapter beside its weights, which would be left out"
    return blob, blob.stat().st_size, ""
