"""Read the licence of a base model from its GGUF metadata, model card, config or LICENSE file."""

import re
from pathlib import Path
from typing import Any

import yaml

from tunewell.core.errors import UserError
from tunewell.core.gguf import read_metadata
from tunewell.core.model_files import ModelFiles, hub_is_out_of_reach, locate

_FRONT_MATTER = re.compile(r"\A\ufeff?---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)
_LICENSE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE")
_HEAD_CHARS = 2_000
_SPDX_IDS = (
    (r"apache license\s+version 2\.0", "apache-2.0"),
    (r"mit license|permission is hereby granted, free of charge", "mit"),
    (r"gnu affero general public license\s+version 3", "agpl-3.0"),
    (r"gnu lesser general public license\s+version 3", "lgpl-3.0"),
    (r"gnu general public license\s+version 3", "gpl-3.0"),
    (r"bsd 3-clause|neither the name of", "bsd-3-clause"),
    (r"bsd 2-clause", "bsd-2-clause"),
    (r"llama 3\.3 community license", "llama3.3"),
    (r"llama 3\.2 community license", "llama3.2"),
    (r"llama 3\.1 community license", "llama3.1"),
    (r"llama 3 community license", "llama3"),
    (r"llama 2 community license", "llama2"),
    (r"gemma terms of use", "gemma"),
)
"""The first lines of known licences, with the names that model hubs use."""


def read_license(model: str) -> str | None:
    """Return the licence's short name, e.g. `apache-2.0`; None if the model does not state one.

    A LICENSE file that is not recognised gives `other`.
    """
    try:
        files = locate(model)
        if files.gguf is not None and (found := _as_name(read_metadata(files.gguf).get("general.license"))):
            return found
    except (UserError, OSError):
        return None
    return _from_card(_find_file(files, "README.md")) or _from_config(files) or _from_license_file(files)


def _find_file(files: ModelFiles, name: str) -> Path | None:
    """Return a file beside the model's small files; from the hub, download it if it is not in the cache."""
    beside = next((path.parent for path in (*files.small.values(), files.sentencepiece, files.gguf) if path), None)
    if beside is not None and (beside / name).is_file():
        return beside / name
    return _from_hub(files.source, name) if files.origin == "hub" else None


def _from_hub(repository: str, name: str) -> Path | None:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    cached = try_to_load_from_cache(repository, name)
    if isinstance(cached, str):
        return Path(cached)
    if cached is not None or hub_is_out_of_reach():
        return None
    try:
        return Path(hf_hub_download(repository, name))
    except (HfHubHTTPError, OSError):
        return None


def _from_card(path: Path | None) -> str | None:
    """Read the front matter of a model card; `license: other` is spelled out in `license_name`."""
    header = _FRONT_MATTER.match(_read_text(path)) if path else None
    if header is None:
        return None
    try:
        card: Any = yaml.safe_load(header[1])
    except yaml.YAMLError:
        return None
    if not isinstance(card, dict):
        return None
    name = _as_name(card.get("license"))
    return _as_name(card.get("license_name")) or name if name == "other" else name


def _from_config(files: ModelFiles) -> str | None:
    try:
        return _as_name(files.read_object("config.json").get("license"))
    except UserError:
        return None


def _from_license_file(files: ModelFiles) -> str | None:
    for name in _LICENSE_FILES:
        if path := _find_file(files, name):
            head = " ".join(_read_text(path)[:_HEAD_CHARS].lower().split())
            return next((spdx for pattern, spdx in _SPDX_IDS if re.search(pattern, head)), "other")
    return None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _as_name(value: Any) -> str | None:
    value = value[0] if isinstance(value, list) and value else value
    return value.strip() if isinstance(value, str) and value.strip() else None
