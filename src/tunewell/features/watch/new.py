"""From rows to a run: each question, the models, the draft and the start. The page holds the answers."""

import re
import shlex
from typing import Any

from tunewell.core.progress import ProgressListener
from tunewell.data.sources.base import split_limit
from tunewell.features.watch.actions import start_on_device
from tunewell.features.watch.errors import WatchError, error_json
from tunewell.features.watch.folder import free_path, safe_name
from tunewell.features.watch.watched import Watched

_MAX_ANSWERS = 20
_NAME = re.compile(r"\w[\w.-]{0,59}")


def _request(watched: Watched, body: dict[str, Any]) -> dict[str, Any]:
    """Return a request for the rows, with a path below the folder."""
    data, answers = str(body.get("data") or ""), body.get("answers") or []
    plain, limit = split_limit(data)
    path = watched.folder.below(plain) if plain else watched.root
    if not path.exists() or path == watched.root:
        raise WatchError(
            "not_found", f"there is no file `{plain[:200]}`", fix="drop a file, or choose one of the folder"
        )
    if not isinstance(answers, list) or len(answers) > _MAX_ANSWERS:
        raise WatchError("refused", "there are too many answers", fix="begin again with these rows")
    name = watched.folder.name_of(path)
    return {**body, "data": f"{name}#{limit}" if limit else name, "answers": answers, "folder": str(watched.root)}


def read(watched: Watched, body: dict[str, Any], progress: ProgressListener) -> dict[str, Any]:
    """Return the next question about the rows, or how they are read."""
    request = _request(watched, body)
    found = watched.reader.ask(request | {"act": "read"}, progress)
    return found | {"suggested_name": _free_name(watched, request["data"])}


def models(watched: Watched, body: dict[str, Any], progress: ProgressListener) -> dict[str, Any]:
    """Return the models for the rows."""
    return watched.reader.ask(_request(watched, body) | {"act": "models"}, progress)


def draft(watched: Watched, body: dict[str, Any], progress: ProgressListener) -> dict[str, Any]:
    """Return everything about the run that would be started, and whether it could be."""
    found = watched.reader.ask(_named_request(watched, body) | {"act": "draft"}, progress)
    look_up = found.get("look_up") if watched.features["index"] else None
    held = watched.jobs.holder()
    return found | {"look_up": look_up, "blocked": error_json(held)["error"] if held else None}


def start(watched: Watched, body: dict[str, Any], progress: ProgressListener) -> dict[str, Any]:
    """Write the config with `tunewell init`, and start `tunewell train`; raise WatchError if the device is held."""
    if held := watched.jobs.holder():
        raise held
    request = _named_request(watched, body)
    found = watched.reader.ask(request | {"act": "write"}, progress)
    name = f"{request['name']}/run"
    job = start_on_device(watched, "train", ["train", "--config", found["config"]["path"]], run=name)
    return {"job": job, "run": name, "commands": found["commands"]}


def index(watched: Watched, body: dict[str, Any], progress: ProgressListener) -> dict[str, Any]:
    """Make documents searchable instead of training on them."""
    if not watched.features["index"]:
        raise WatchError("feature", "documents cannot be searched: the feature `retrieval` is not installed")
    words = ["index", _request(watched, body)["data"]]
    return {"job": watched.jobs.start("index", [*words, "--json"]), "command": shlex.join(["tunewell", *words])}


def _free_name(watched: Watched, data: str) -> str:
    """Return a name for a project that no folder has yet."""
    stem = safe_name(split_limit(data)[0]).partition(".")[0].lower()
    return free_path(watched.root, stem).name


def _named_request(watched: Watched, body: dict[str, Any]) -> dict[str, Any]:
    """Return a request with the name of a new folder."""
    request = _request(watched, body)
    name = str(body.get("name") or _free_name(watched, request["data"]))
    if not _NAME.fullmatch(name) or watched.folder.below(name).exists():
        free = _free_name(watched, safe_name(name))
        raise WatchError("refused", f"`{name[:60]}` cannot be the name of a new folder", fix=f"use `{free}`")
    return request | {"name": name}
