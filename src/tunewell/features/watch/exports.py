"""Exports: targets with their predicted size, the comparison with the trained model, and the files."""

import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from tunewell.config.extensions import EXPORT_TARGETS, GgufFormat
from tunewell.core.errors import UserError
from tunewell.features.watch.errors import WatchError
from tunewell.features.watch.watched import Watched
from tunewell.records.base import read_record
from tunewell.records.events import plain
from tunewell.records.parity import PARITY, PROOF, Parity, read_proof
from tunewell.runs.state import StoredRun, value_in

FOLDER = "export"
_RECOMMENDED = "ollama"


def options_of(body: dict[str, Any]) -> list[str]:
    """Return the options of an export; raise WatchError for unknown targets."""
    wanted, kind = body.get("to"), body.get("gguf")
    if not isinstance(wanted, list) or not wanted or not set(map(str, wanted)) <= set(EXPORT_TARGETS.names()):
        raise WatchError("refused", "choose a target", fix=", ".join(EXPORT_TARGETS.names()))
    if kind is not None and kind not in get_args(GgufFormat):
        raise WatchError("refused", "this is not a type of GGUF", fix=", ".join(get_args(GgufFormat)))
    return ["--to", ",".join(wanted), *(["--gguf", str(kind)] if kind else [])]


def view(watched: Watched, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the targets, and the export that is there."""
    from tunewell.planning.forecast import export_bytes  # a second that the first page does not need

    run = watched.asked(query)
    name, stored = watched.folder.name_of(run), StoredRun(run)
    weights = num_weights(stored.model)
    settings = value_in(stored.plan, "config", "export", "gguf", kind=list) or ["q8_0"]
    targets = []
    for entry in EXPORT_TARGETS.entries():
        has_types = entry.name in ("gguf", "ollama")
        size = export_bytes(entry.name, weights, settings[:1]) if weights and entry.name != "adapter" else None
        own = {"name": entry.name, "about": entry.doc, "is_recommended": entry.name == _RECOMMENDED}
        own |= {"predicted_bytes": size, "precisions": list(get_args(GgufFormat)) if has_types else []}
        targets.append(own)
    return {
        "targets": targets,
        "folder": f"{name}/{FOLDER}",
        "free_bytes": shutil.disk_usage(run).free,
        "existing": _existing(watched, run),
        "job": watched.jobs.newest_of(name, ("export",)),
    }


def num_weights(model: str | None) -> int | None:
    """Return the number of weights of a model, or None if its files cannot be read."""
    from tunewell.model_files.shape import read_shape

    try:
        return read_shape(model, vocab_size=0).num_weights if model else None
    except (UserError, OSError):
        return None


def _existing(watched: Watched, run: Path) -> dict[str, Any] | None:
    """Return the comparison of each artefact with the trained model, and its files; also of an export that failed."""
    folder, failed = run / FOLDER, _parity(run / "export-failed.json")
    found = {"is_ok": False, "made_at": None, "links": [], "artefacts": [], "notes": [], "failed": failed}
    if not (folder / PROOF).is_file():
        return found if failed else None
    try:
        proof = read_proof(folder)
    except UserError as error:
        return found | {"notes": [str(error)]}
    name = watched.folder.name_of(folder)
    found["artefacts"] = [
        {"name": own.name, "files": [{"path": f"{name}/{file}", "bytes": _size(folder / file)} for file in own.sha256s]}
        for own in proof.artefacts
    ]
    ollama = next((own.path for own in proof.artefacts if own.kind == "ollama"), None)
    if ollama:
        command = f"cd {shlex.quote(str(folder / ollama))} && ollama create {shlex.quote(run.parent.name)} -f Modelfile"
        found["ollama"] = {"command": command}
    return found | {"notes": proof.notes} | (_parity(folder / PARITY) or {})


def _parity(path: Path) -> dict[str, Any] | None:
    try:
        found = read_record(path, Parity)
    except (UserError, OSError):
        return None
    links = [plain(own.model_dump()) | {"is_ok": own.is_ok} for own in found.links]
    return {"is_ok": found.is_ok, "made_at": found.made_at, "links": links}


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
