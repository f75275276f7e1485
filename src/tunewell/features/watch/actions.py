"""What the page can do with a run, each as a command."""

import os
import shlex
import socket
from pathlib import Path
from typing import Any

from tunewell.config.load import FILE_NAME
from tunewell.features.watch import chat, exports
from tunewell.features.watch.errors import WatchError
from tunewell.features.watch.jobs import USES_DEVICE
from tunewell.features.watch.watched import Watched
from tunewell.records.rundir import RUN_CONFIG
from tunewell.runs.state import StoredRun
from tunewell.runs.status import stop_run

_LABELS = {
    "stop": "Stop and save",
    "resume": "Resume",
    "validate": "Test it again",
    "export": "Export",
    "chat": "Chat",
    "diagnose": "Find the cause",
}


def words_of(watched: Watched, run: Path, action: str) -> list[str]:
    """Return the command of an action, without `tunewell`."""
    name = watched.folder.name_of(run)
    if action == "resume":
        # A config in the folder would take precedence over that of the run.
        own = ["--config", f"{name}/{RUN_CONFIG}"] if (watched.root / FILE_NAME).is_file() else []
        return ["train", "--resume", *own, "--out", name]
    return {"stop": ["runs", name, "--stop"]}.get(action) or [action, name]


def obstacle(run: StoredRun) -> str | None:
    """Return why a run can only be read: it is on another machine, or it belongs to another user."""
    if run.is_running and run.owner and run.owner.host != socket.gethostname():
        return f"it runs on `{run.owner.host}`, so it can only be read here"
    if run.folder.exists() and not os.access(run.folder, os.W_OK):
        return "it belongs to another user, so it can only be read"
    return None


def possible(watched: Watched, run: StoredRun) -> list[dict[str, Any]]:
    """Return every action, with the reason why it is not possible, if it is not."""
    running = "the run is still running" if run.is_running else None
    untrained = None if run.steps else "it has no trained steps"
    reasons = {
        "stop": None if run.is_running else "the run is not running",
        "resume": running or ("it has finished" if run.ended.get("status") == "finished" else None),
        "validate": running or untrained,
        "export": running or untrained,
        "chat": running or untrained or (None if watched.features["chat"] else "it is not installed"),
        "diagnose": None if watched.features["diagnose"] else "it is not installed",
    }
    if why_not := "this page was started with `--read-only`" if watched.is_read_only else obstacle(run):
        reasons = dict.fromkeys(reasons, why_not)
    found = []
    for name, why_not in reasons.items():
        command = shlex.join(["tunewell", *words_of(watched, run.folder, name)])
        own = {"id": name, "label": _LABELS[name], "command": command}
        found.append(own | {"is_possible": why_not is None, "why_not": why_not})
    first = {"finished": "export", "running": "stop"}.get(run.status, "resume")
    return sorted(found, key=lambda own: (not own["is_possible"], own["id"] != first))


def act(watched: Watched, body: dict[str, Any]) -> dict[str, Any]:
    """Do something with a run."""
    folder, action = watched.asked(body), str(body.get("action"))
    found = {own["id"]: own for own in possible(watched, StoredRun(folder))}
    if action not in found or action == "chat":
        raise WatchError("refused", f"there is no action `{action[:40]}`")
    if not found[action]["is_possible"]:
        raise WatchError("refused", f"this is not possible: {found[action]['why_not']}")
    words, name = words_of(watched, folder, action), watched.folder.name_of(folder)
    if action == "stop":
        return {"message": stop_run(folder), "job": None}
    if action == "export":
        words += exports.options_of(body)
    if action in USES_DEVICE:
        job = start_on_device(watched, action, words, run=name)
    else:
        job = watched.jobs.start(action, [*words, "--json"], run=name)
    return {"message": "started", "job": job, "command": shlex.join(["tunewell", *words])}


def start_on_device(watched: Watched, kind: str, words: list[str], *, run: str) -> dict[str, Any]:
    """Start a job that needs the device; raise WatchError if another run holds it. Loaded chats are ended."""
    with watched.jobs.holding():
        chat.end_all(watched)
        watched.reader.close()
        return watched.jobs.start(kind, words, run=run)
