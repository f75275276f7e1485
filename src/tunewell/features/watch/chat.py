"""Chat with the tuned model and its base, each in a `tunewell serve` of its own, which ends when it is idle.

The server of the page loads no model. It passes on what is written, with a token that only the two know.
"""

import json
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewell.core.files import read_text
from tunewell.core.remote_api import RemoteApi
from tunewell.core.units import size_bytes
from tunewell.features.watch.errors import WatchError, error_json
from tunewell.features.watch.exports import num_weights
from tunewell.features.watch.watched import Watched
from tunewell.machine.machine import read_machine
from tunewell.model_files.presets import is_preset
from tunewell.runs.state import StoredRun, read_object

_IDLE_MINUTES = 10
_MAX_TOKENS = 512
_BYTES_PER_WEIGHT = 5
"""In fp32, with what an answer needs."""
_END_SECONDS = 10.0
SIDES = ("tuned", "base")


@dataclass(frozen=True)
class Delta:
    """Some text of an answer."""

    text: str


def _models(watched: Watched, run: Path) -> dict[str, str]:
    """Return the model of each side. A model that was built from scratch has no base."""
    base = StoredRun(run).model
    models = {"tuned": watched.folder.name_of(run)}
    return models if base is None or is_preset(base) else models | {"base": base}


def state(watched: Watched, query: Mapping[str, Any]) -> dict[str, Any]:
    """Return whether each side can be asked, and why not."""
    run = watched.asked(query)
    sides = []
    for side, model in _models(watched, run).items():
        job = watched.jobs.newest_of(watched.folder.name_of(run), (f"chat-{side}",))
        status = job["status"] if job and job["status"] in ("running", "failed") else "off"
        if job and status == "running":
            status = "ready" if "url" in _info(watched, job["id"]) else "loading"
        error = job["error"] if job and status == "failed" else None
        command = shlex.join(["tunewell", *_words(model)])
        sides.append({"side": side, "name": model, "status": status, "error": error, "command": command})
    held = _obstacle(watched, run) if all(own["status"] == "off" for own in sides) else None
    blocked = error_json(held)["error"] if held else None
    return {"sides": sides, "idle_minutes": _IDLE_MINUTES, "blocked": blocked}


def _words(model: str) -> list[str]:
    return ["serve", model, "--port", "0", "--idle-minutes", str(_IDLE_MINUTES)]


def _info(watched: Watched, job: str) -> dict[str, Any]:
    """Return the line that `serve --json` prints."""
    return read_object(watched.jobs.path(job) / "out")


def _obstacle(watched: Watched, run: Path) -> WatchError | None:
    """Return why no model is loaded now: a run needs the memory, or there is too little."""
    if held := watched.jobs.holder():
        return WatchError("busy", f"{held.what}, and a chat would take its memory", where=held.where, fix=held.fix)
    models, weights = _models(watched, run), num_weights(StoredRun(run).model) or 0
    needed, free = len(models) * weights * _BYTES_PER_WEIGHT, read_machine().device("auto").free_bytes
    if free is not None and needed > free:
        what = f"the models need about {size_bytes(needed)} of memory, and {size_bytes(free)} are free"
        return WatchError("busy", what, fix="close other programs, or chat with one side")
    return None


def open_sides(watched: Watched, body: dict[str, Any]) -> dict[str, Any]:
    """Load the models of some sides; raise WatchError if a run needs the memory."""
    if not watched.features["chat"]:
        raise WatchError("feature", "the feature `serve` is not installed")
    run = watched.asked(body)
    wanted = body.get("sides") or SIDES
    if not isinstance(wanted, list | tuple):
        raise WatchError("refused", "`sides` is not a list")
    for own in state(watched, body)["sides"]:
        side = own["side"]
        if side in wanted and own["status"] in ("off", "failed"):
            if error := _obstacle(watched, run):
                raise error
            words = [*_words(own["name"]), "--json"]
            watched.jobs.start(f"chat-{side}", words, run=watched.folder.name_of(run), has_token=True)
    return state(watched, body)


def close(watched: Watched, body: dict[str, Any]) -> dict[str, Any]:
    """End the models of a run."""
    run = watched.folder.name_of(watched.asked(body))
    end_all(watched, run)
    return state(watched, body)


def end_all(watched: Watched, run: str | None = None) -> None:
    """End loaded models, and wait until their memory is free."""
    loaded = [job for job in watched.jobs.running() if job["kind"].startswith("chat") and run in (None, job["run"])]
    for job in loaded:
        watched.jobs.stop(job["id"])
    until = time.monotonic() + _END_SECONDS
    while time.monotonic() < until and any(watched.jobs.job(job["id"])["status"] == "running" for job in loaded):
        time.sleep(0.1)


def say(watched: Watched, body: dict[str, Any], emit: Callable[[Any], None]) -> dict[str, Any]:
    """Send a conversation to one side, and pass on its answer as it is written."""
    run = watched.folder.name_of(watched.asked(body))
    job = watched.jobs.newest_of(run, (f"chat-{body.get('side')}",))
    info = _info(watched, job["id"]) if job and job["status"] == "running" else {}
    if job is None or "url" not in info:
        raise WatchError("refused", "this model is not loaded", fix="open the chat again")
    key = read_text(watched.jobs.path(job["id"]) / "token").strip()
    api = RemoteApi(f"{info['url']}#{info['model']}", what="the model", key_variable="TUNEWELL_TOKEN", key=key)
    request = {"model": info["model"], "messages": body.get("messages"), "max_tokens": _MAX_TOKENS, "stream": True}
    if isinstance(temperature := body.get("temperature"), int | float):
        request["temperature"] = temperature
    started = time.monotonic()
    for line in api.lines("chat/completions", request):
        if line.startswith(b"data: {"):
            chunk = json.loads(line[6:])
            if error := chunk.get("error"):
                raise WatchError("refused", str(error.get("message")))
            with suppress(LookupError):
                emit(Delta(chunk["choices"][0]["delta"].get("content") or ""))
    return {"seconds": round(time.monotonic() - started, 3)}
