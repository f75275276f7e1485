"""The state of a project folder: its config, corpus, newest run, verdict and export, and the next command. No torch."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count as count_from
from pathlib import Path
from typing import Any

from tunewell.config.load import FILE_NAME, LoadedConfig, load_config
from tunewell.config.open_points import open_points
from tunewell.config.schema import Config
from tunewell.core.errors import UserError
from tunewell.core.files import read_text, running_owner
from tunewell.core.units import count
from tunewell.data.sources.base import detect_format
from tunewell.records.manifest import MANIFEST, read_manifest
from tunewell.records.parity import PROOF, read_proof
from tunewell.records.plan import PLAN, read_plan
from tunewell.records.report import REPORT, read_report
from tunewell.records.rundir import LOCK, RUN_CONFIG, find_outcome

_SHOWN_FILES = 3
_DECIDE = f"replace `?` in `{FILE_NAME}`, then `tunewell train`"
_START = "tunewell train DATA --model MODEL"
_NOT_ROWS = ("readme", "license", "licence", "changelog", "requirements")


@dataclass
class Overview:
    """What is in a folder. Each entry has a name and a sentence."""

    entries: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    next_step: str = ""
    """The next command, in backticks, with a few words."""

    @property
    def is_empty(self) -> bool:
        return not self.entries

    def as_json(self) -> dict[str, Any]:
        """Return the object that `tunewell --json` prints."""
        return {**dict(self.entries), "next": self.next_step}


def read_overview(folder: Path | None = None) -> Overview:
    """Read the state of a project in a folder. A damaged file is an entry, not an error."""
    base = folder or Path()
    found = Overview()
    loaded = _read_config(base, found)
    if loaded is not None:
        _read_corpus(loaded, found)
    run = _newest_run(base, loaded)
    if run is not None:
        _read_run(run, base, loaded, found)
    if found.is_empty:
        rows = [shlex.quote(name) for name in _row_files(base)]
        named = f" (rows here: {', '.join(rows[:_SHOWN_FILES])})" if rows else ""
        found.next_step = f"`{_START.replace('DATA', rows[0]) if rows else _START}`{named}"
    return found


def _read_config(base: Path, found: Overview) -> LoadedConfig | None:
    path = base / FILE_NAME
    if not path.is_file():
        return None
    try:
        loaded = load_config(path)
    except UserError as error:
        found.entries.append(("config", f"`{path}` has an error: {error.what}"))
        found.next_step = f"correct `{path}`; `tunewell explain KEY` describes a key"
        return None
    config = loaded.config
    rows = ", ".join(f"`{source.path}`" for source in config.data.sources[:_SHOWN_FILES]) or "no rows"
    found.entries.append(("config", f"`{path}`: {rows}, model `{config.model}`"))
    points = [key for key, _ in open_points(loaded)]
    if points:
        found.entries.append(("open", ", ".join(f"`{key}`" for key in points)))
        found.next_step = _DECIDE
    else:
        found.next_step = "`tunewell train`"
    return loaded


def _read_corpus(loaded: LoadedConfig, found: Overview) -> None:
    path = loaded.path(loaded.config.corpus)
    if not (path / MANIFEST).is_file():
        found.entries.append(("corpus", "not prepared yet; `tunewell train` does it"))
        return
    try:
        manifest = read_manifest(path)
    except UserError as error:
        found.entries.append(("corpus", error.what))
        return
    dropped = sum(manifest.dropped.values())
    lost = f", {count(dropped)} dropped" if dropped else ""
    numbers = f"{count(manifest.documents, 'row')} for training, {count(manifest.held_out)} for testing{lost}"
    few = "; too few to judge" if manifest.too_few_to_judge else ""
    found.entries.append(("corpus", f"`{path}`: {numbers}{few}"))


def _newest_run(base: Path, loaded: LoadedConfig | None) -> Path | None:
    """Return the run folder that was started last: that of the config, or one in this folder or in `runs`."""
    named = [loaded.path(loaded.config.run)] if loaded is not None else []
    folders = {path for path in (*named, *_folders(base), *_folders(base / "runs")) if (path / PLAN).is_file()}
    return max(folders, key=lambda path: (path / PLAN).stat().st_mtime, default=None)


def _folders(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from (entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _read_run(run: Path, base: Path, loaded: LoadedConfig | None, found: Overview) -> None:
    name, resume = shlex.quote(str(run)), f"`{_resume_command(run, base, loaded)}`"
    try:
        num_steps = read_plan(run).num_steps.value
        outcome = find_outcome(run)
    except UserError as error:
        found.entries.append(("run", error.what))
        return
    owner, is_running = running_owner(run / LOCK)
    if owner is not None and is_running:
        found.entries.append(("run", f"`{run}`: a process is working in it since {owner.since}"))
        found.next_step = f"wait until it ends; `tunewell runs {name}` shows how far it is"
    elif outcome is None:
        found.entries.append(("run", f"`{run}`: not finished, {count(num_steps, 'step')} planned"))
        found.next_step = resume
    else:
        steps = f"{count(outcome.steps)} of {count(outcome.planned_steps, 'step')}"
        found.entries.append(("run", f"`{run}`: {outcome.status}, {steps}"))
        found.next_step = resume if outcome.status == "interrupted" else f"`tunewell validate {name}`"
        if outcome.status in ("stopped", "failed"):
            found.next_step = f"`tunewell diagnose {name}`"
        if outcome.status == "finished":
            _read_verdict(run, found)
            _read_export(run / "export", found)
    config = base / FILE_NAME
    if loaded is not None and config.stat().st_mtime > (run / PLAN).stat().st_mtime:
        found.entries.append(("note", f"`{config}` was changed after the start of this run"))
        if outcome is not None and outcome.status != "interrupted":
            names = (f"{loaded.config.run}{number if number > 1 else ''}" for number in count_from(1))
            free = next(own for own in names if not loaded.path(own).exists())
            new = "" if free == loaded.config.run else f" --out {shlex.quote(free)}"
            is_open = any(True for _ in open_points(loaded))
            found.next_step = _DECIDE if is_open else f"`tunewell train{new}` with the changed config"


def _resume_command(run: Path, base: Path, loaded: LoadedConfig | None) -> str:
    """Return the command that resumes a run with its own settings.

    A config in the folder takes precedence over that of the run, so a run that was started with other settings names
    its own. Otherwise, the run would go on with other settings, or not at all.
    """
    is_usual = run == (base / Config().run if loaded is None else loaded.path(loaded.config.run))
    words = ["tunewell", "train", "--resume"]
    has_own = loaded is not None and _has_options(run / RUN_CONFIG)
    words += ["--config", str(run / RUN_CONFIG)] if has_own else []
    return shlex.join([*words, *(["--out", str(run)] if has_own or not is_usual else [])])


def _has_options(config: Path) -> bool:
    """Return True if a run was started with options that change its settings; its command is in the first line."""
    try:
        first, *_ = read_text(config).split("\n", 1)
        words = shlex.split(first.removeprefix("# "))
    except (OSError, ValueError):
        return False
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    harmless = {"--out", "--resume", "--no-supervisor", "--json"}
    if not words[2:3] or not words[2].startswith("-"):
        harmless.add("--model")  # `tunewell train DATA --model MODEL` has written it to the config
    return not first.startswith("# tunewell") or bool(options - harmless)


def _read_verdict(run: Path, found: Overview) -> None:
    if not (run / REPORT).is_file():
        found.entries.append(("verdict", "none yet"))
        return
    try:
        report = read_report(run)
    except UserError as error:
        found.entries.append(("verdict", error.what))
        return
    found.entries.append(("verdict", f"{report.verdict}: {report.summary}"))
    found.next_step = report.next
    if report.verdict == "PASS" and not (run / "export" / PROOF).is_file():
        found.next_step += f"; `tunewell export {shlex.quote(str(run))} --to ollama` to use it elsewhere"


def _read_export(folder: Path, found: Overview) -> None:
    if not (folder / PROOF).is_file():
        found.entries.append(("export", "none yet"))
        return
    try:
        names = ", ".join(artefact.name for artefact in read_proof(folder).artefacts)
    except UserError as error:
        found.entries.append(("export", error.what))
        return
    found.entries.append(("export", f"`{folder}`: {names}"))


def _row_files(base: Path) -> list[str]:
    """Return the names of files in a folder that may be rows, the newest first."""
    files = [entry for entry in base.iterdir() if entry.is_file() and not entry.name.startswith(".")]
    known = [
        file
        for file in files
        if detect_format(file.name)[0] is not None and not file.stem.casefold().startswith(_NOT_ROWS)
    ]
    return [file.name for file in sorted(known, key=lambda file: -file.stat().st_mtime)]
