"""The state of a project folder: its config, corpus, newest run, verdict and export, and the next command. No torch."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count as count_from
from pathlib import Path
from typing import Any

from tunewell.config.load import FILE_NAME, LoadedConfig, load_config
from tunewell.config.open_points import open_points
from tunewell.config.schema import Config
from tunewell.core.errors import UserError
from tunewell.core.files import read_text
from tunewell.core.units import count
from tunewell.data.sources.base import detect_format
from tunewell.records.manifest import MANIFEST, read_manifest
from tunewell.records.parity import PROOF, read_proof
from tunewell.records.plan import PLAN, read_plan
from tunewell.records.report import REPORT, read_report
from tunewell.records.rundir import RUN_CONFIG, find_outcome
from tunewell.runs.state import StoredRun

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

    @contextmanager
    def entry(self, name: str) -> Iterator[list[str]]:
        """Add an entry with the words that the `with` block appends, or with the UserError that it raises."""
        words: list[str] = []
        try:
            yield words
        except UserError as error:
            words[:] = [error.what]
        self.entries += [(name, text) for text in words]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `tunewell --json` prints."""
        return {**dict(self.entries), "next": self.next_step}


def read_overview(folder: Path | None = None) -> Overview:
    """Read the state of a project in a folder. A damaged file is an entry, not an error."""
    base = folder or Path()
    found = Overview()
    loaded = None
    if (base / FILE_NAME).is_file():
        with found.entry("config") as words:
            loaded = _read_config(base / FILE_NAME, found, words)
    if loaded is not None:
        if points := [f"`{key}`" for key, _ in open_points(loaded)]:
            found.entries.append(("open", ", ".join(points)))
            found.next_step = _DECIDE
        with found.entry("corpus") as words:
            words.append(_describe_corpus(loaded.path(loaded.config.corpus)))
    run = _newest_run(base, loaded)
    if run is not None:
        _read_run(StoredRun(run), base, loaded, found)
    if not found.entries:
        files = [shlex.quote(name) for name in _row_files(base)]
        named = f" (rows here: {', '.join(files[:_SHOWN_FILES])})" if files else ""
        found.next_step = f"`{_START.replace('DATA', files[0]) if files else _START}`{named}"
    return found


def _read_config(path: Path, found: Overview, words: list[str]) -> LoadedConfig:
    found.next_step = f"correct `{path}`; `tunewell explain KEY` describes a key"
    try:
        loaded = load_config(path)
    except UserError as error:
        raise UserError(f"`{path}` has an error: {error.what}") from error
    rows = ", ".join(f"`{source.path}`" for source in loaded.config.data.sources[:_SHOWN_FILES]) or "no rows"
    words.append(f"`{path}`: {rows}, model `{loaded.config.model}`")
    found.next_step = "`tunewell train`"
    return loaded


def _describe_corpus(path: Path) -> str:
    if not (path / MANIFEST).is_file():
        return "not prepared yet; `tunewell train` does it"
    manifest = read_manifest(path)
    dropped = sum(manifest.dropped.values())
    lost = f", {count(dropped)} dropped" if dropped else ""
    few = "; too few to judge" if manifest.too_few_to_judge else ""
    return (
        f"`{path}`: {count(manifest.documents, 'row')} for training, {count(manifest.held_out)} for testing{lost}{few}"
    )


def _newest_run(base: Path, loaded: LoadedConfig | None) -> Path | None:
    """Return the run folder that was started last: that of the config, or one in this folder or in `runs`."""
    named = [loaded.path(loaded.config.run)] if loaded is not None else []
    folders = {path.parent for pattern in (f"[!.]*/{PLAN}", f"runs/[!.]*/{PLAN}") for path in base.glob(pattern)}
    known = [path for path in (*named, *folders) if (path / PLAN).is_file()]
    return max(known, key=lambda path: (path / PLAN).stat().st_mtime, default=None)


def _read_run(run: StoredRun, base: Path, loaded: LoadedConfig | None, found: Overview) -> None:
    folder, name, resume = run.folder, shlex.quote(str(run.folder)), f"`{_resume_command(run.folder, base, loaded)}`"
    with found.entry("run") as words:
        num_steps, outcome = read_plan(folder).num_steps.value, find_outcome(folder)
        if run.owner is not None and run.is_running:
            words.append(f"`{folder}`: a process is working in it since {run.owner.since}")
            found.next_step = f"wait until it ends; `tunewell runs {name}` shows how far it is"
        elif outcome is None:
            words.append(f"`{folder}`: not finished, {count(num_steps, 'step')} planned")
            found.next_step = resume
        else:
            steps = f"{count(outcome.steps)} of {count(outcome.planned_steps, 'step')}"
            words.append(f"`{folder}`: {outcome.status}, {steps}")
            then = {"interrupted": resume, "finished": f"`tunewell validate {name}`"}
            found.next_step = then.get(outcome.status, f"`tunewell diagnose {name}`")
    if run.outcome.get("status") == "finished" and not run.is_running:
        _read_verdict(folder, found)
    config = base / FILE_NAME
    if words and loaded is not None and config.stat().st_mtime > (folder / PLAN).stat().st_mtime:
        found.entries.append(("note", f"`{config}` was changed after the start of this run"))
        if run.outcome.get("status", "interrupted") != "interrupted":
            names = (f"{loaded.config.run}{number if number > 1 else ''}" for number in count_from(1))
            free = next(own for own in names if not loaded.path(own).exists())
            new = "" if free == loaded.config.run else f" --out {shlex.quote(free)}"
            is_open = any(True for _ in open_points(loaded))
            found.next_step = _DECIDE if is_open else f"`tunewell train{new}` with the changed config"


def _read_verdict(run: Path, found: Overview) -> None:
    exported = run / "export"
    with found.entry("verdict") as words:
        if (run / REPORT).is_file():
            report = read_report(run)
            words.append(f"{report.verdict}: {report.summary}")
            found.next_step = report.next
            if report.verdict == "PASS" and not (exported / PROOF).is_file():
                found.next_step += f"; `tunewell export {shlex.quote(str(run))} --to ollama` to use it elsewhere"
        else:
            words.append("none yet")
    with found.entry("export") as words:
        is_exported = (exported / PROOF).is_file()
        names = ", ".join(artefact.name for artefact in read_proof(exported).artefacts) if is_exported else ""
        words.append(f"`{exported}`: {names}" if is_exported else "none yet")


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


def _row_files(base: Path) -> list[str]:
    """Return the names of files in a folder that may be rows, the newest first."""
    files = [entry for entry in base.iterdir() if entry.is_file() and not entry.name.startswith(".")]
    known = [
        file
        for file in files
        if detect_format(file.name)[0] is not None and not file.stem.casefold().startswith(_NOT_ROWS)
    ]
    return [file.name for file in sorted(known, key=lambda file: -file.stat().st_mtime)]
