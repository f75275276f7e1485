"""Import optional dependencies when they are used, and name the command that adds a missing one."""

import importlib
import importlib.metadata
import json
import logging
import urllib.parse
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from tunewell.core.errors import UserError


def import_optional(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency; raise UserError with the install command if it is missing."""
    try:
        with quiet_bitsandbytes():
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{purpose} needs `{module}`", fix=install_command(extra)) from error


@contextmanager
def quiet_bitsandbytes() -> Generator[None, None, None]:
    """Hide a warning about a kernel that some CPUs miss, when PEFT or transformers import bitsandbytes."""
    log = logging.getLogger("bitsandbytes")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this installation of tunewell, as it can be pasted."""
    *options, requirement = install_arguments(extra)
    return " ".join(["pip install", *options, f'"{requirement}"'])


def install_arguments(extra: str) -> list[str]:
    """Return the arguments of `pip install`: a clone is installed from its folder, because no index may have it."""
    origin = direct_url()
    if origin is None:
        return [f"tunewell[{extra}]"]
    url = str(origin.get("url", ""))
    if urllib.parse.urlsplit(url).scheme == "file":
        path = urllib.request.url2pathname(urllib.parse.urlsplit(url).path)
        about: dict[str, Any] = origin.get("dir_info") or {}
        is_editable = bool(about.get("editable"))
        return [*(["-e"] if is_editable else []), f"{path}[{extra}]"]
    if control := origin.get("vcs_info"):
        url = f"{control['vcs']}+{url}@{control['commit_id']}"
    return [f"tunewell[{extra}] @ {url}"]


def direct_url() -> dict[str, Any] | None:
    """Return the `direct_url.json` (PEP 610) of the installed package, or None if it comes from an index."""
    try:
        text = importlib.metadata.distribution("tunewell").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return {"url": Path(__file__).parents[3].as_uri()}  # not installed: run from a source tree
    return json.loads(text) if text else None
