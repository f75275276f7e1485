"""The state of a project folder: its config, corpus, newest run, verdict and export, and the next command. No torch."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunewell.config.load import FILE_NAME, LoadedConfig, load_config
from tunewell.config.open_points import open_points
from tunewell.config.schema import Config
from tunewell.core.errors import UserError
from tunewell.core.files import read_text
from tunewell.core.units import count
from tunewell.data.sources.base import detect_format
from tunewell.data.sources.blocks import is_plainly_rows
from tunewell.records.manifest import MANIFEST, read_manifest
from tunewell.records.parity import PROOF, read_proof
from tunewell.records.plan import PLAN, read_plan
from tunewell.records.report import REPORT, read_report
from tunewell.records.rundir import RUN_CONFIG, find_outcome, free_name
from tunewell.runs.state import StoredRun

_SHOWN_FILES = 3
_DECIDE = f"replace `?` in `{FILE_NAME}`, then `tunewell train`"
_START = "which file has your rows? `tunewell train FILE` reads CSV, Excel, JSONL, exported chats and folders of texts"


@dataclass
class Overview:
    """What is in a folder. Each entry has a name and a sentence."""

    base: Path
    entries: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    next_step: str = ""
    """The next command, in backticks, with a few words."""
    loaded: LoadedConfig | None = None
    """The config of the folder."""

    def as_json(self) -> dict[str, Any]:
        """Return the object that `tunewell --json` prints."""
        return {**dict(self.entries), "next": self.next_step}

    def add(self, name: str, read: Callable[[], str]) -> None:
        """Add an entry with what `read` returns, or with the UserError that it raises."""
        try:
            text = read()
        except UserError as error:
            text = error.what
        self.entries.append((name, text))

    def read_config(self) -> str:
        path = self.base / FILE_NAME
        self.next_step = f"correct `{path}`; `tunewell explain KEY` describes a key"
        try:
            config = (loaded := load_config(path)).config
        except UserError as error:
            raise UserError(f"`{path}` has an error: {error.what}") from error
        self.loaded, self.next_step = loaded, "`tunewell train`"
        rows = ", ".join(f"`{source.path}`" for source in config.data.sources[:_SHOWN_FILES]) or "no rows"
        return f"`{path}`: {rows}, model `{config.model}`"

    def read_run(self, run: StoredRun) -> str:
        """Describe the newest run, and set the next step to what it needs."""
        folder, name = run.folder, shlex.quote(str(run.folder))
        num_steps, outcome = read_plan(folder).num_steps.value, find_outcome(folder)
        if run.owner is not None and run.is_running:
            self.next_step = f"wait until it ends; `tunewell runs {name}` shows how far it is"
            return f"`{folder}`: a process is working in it since {run.owner.since}"
        resume = f"`{self._resume_command(folder)}`"
        if outcome is None:
            self.next_step = resume
            return f"`{folder}`: not finished, {count(num_steps, 'step')} planned"
        then = {"interrupted": resume, "finished": f"`tunewell validate {name}`"}
        self.next_step = then.get(outcome.status, f"`tunewell diagnose {name}`")
        return f"`{folder}`: {outcome.status}, {count(outcome.steps)} of {count(outcome.planned_steps, 'step')}"

    def read_verdict(self, run: Path) -> str:
        if not (run / REPORT).is_file():
            return "none yet"
        report = read_report(run)
        self.next_step = report.next
        if report.verdict == "PASS" and not (run / "export" / PROOF).is_file():
            self.next_step += f"; `tunewell export {shlex.quote(str(run))} --to ollama` to use it elsewhere"
        return f"{report.verdict}: {report.summary}"

    def note_changed_config(self, run: StoredRun) -> None:
        """Note that the config was changed after the start of a run, which must be trained in a new folder then."""
        file, loaded = self.base / FILE_NAME, self.loaded
        if loaded is None or file.stat().st_mtime <= (run.folder / PLAN).stat().st_mtime:
            return
        self.entries.append(("note", f"`{file}` was changed after the start of this run"))
        if run.outcome.get("status", "interrupted") != "interrupted":
            path = loaded.path(loaded.config.run)
            new = f" --out {shlex.quote(free_name(path))}" if path.exists() else ""
            is_open = any(True for _ in open_points(loaded))
            self.next_step = _DECIDE if is_open else f"`tunewell train{new}` with the changed config"

    def _resume_command(self, run: Path) -> str:
        """Return the command that resumes a run with its own settings.

        A config in the folder takes precedence over that of the run, so a run that was started with other settings
        names its own. Otherwise, the run would go on with other settings, or not at all.
        """
        loaded = self.loaded
        is_usual = run == (self.base / Config().run if loaded is None else loaded.path(loaded.config.run))
        own = ["--config", str(run / RUN_CONFIG)] if loaded is not None and _has_options(run / RUN_CONFIG) else []
        out = ["--out", str(run)] if own or not is_usual else []
        return shlex.join(["tunewell", "train", "--resume", *own, *out])


def read_overview(folder: Path | None = None) -> Overview:
    """Read the state of a project in a folder. A damaged file is an entry, not an error."""
    base = folder or Path()
    found = Overview(base)
    if (base / FILE_NAME).is_file():
        found.add("config", found.read_config)
    if (loaded := found.loaded) is not None:
        if points := [f"`{key}`" for key, _ in open_points(loaded)]:
            found.entries.append(("open", ", ".join(points)))
            found.next_step = _DECIDE
        found.add("corpus", lambda: _describe_corpus(loaded.path(loaded.config.corpus)))
    if (folder := _newest_run(base, loaded)) is not None:
        run = StoredRun(folder)
        found.add("run", lambda: found.read_run(run))
        if run.outcome.get("status") == "finished" and not run.is_running:
            found.add("verdict", lambda: found.read_verdict(run.folder))
            found.add("export", lambda: _describe_export(run.folder / "export"))
        found.note_changed_config(run)
    if not found.entries:
        files = [shlex.quote(name) for name in _row_files(base)]
        named = f" (rows here: {', '.join(files[:_SHOWN_FILES])})" if files[1:] else ""
        found.next_step = f"`tunewell train {files[0]}`{named}" if files else _START
    return found


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


def _describe_export(folder: Path) -> str:
    if not (folder / PROOF).is_file():
        return "none yet"
    return f"`{folder}`: {', '.join(artefact.name for artefact in read_proof(folder).artefacts)}"


def _newest_run(base: Path, loaded: LoadedConfig | None) -> Path | None:
    """Return the run folder that was started last: that of the config, or one in this folder or in `runs`."""
    plans = [loaded.path(loaded.config.run) / PLAN] if loaded is not None else []
    plans += [*base.glob(f"[!.]*/{PLAN}"), *base.glob(f"runs/[!.]*/{PLAN}")]
    newest = max((plan for plan in plans if plan.is_file()), key=lambda plan: plan.stat().st_mtime, default=None)
    return newest.parent if newest else None


def _has_options(config: Path) -> bool:
    """Return True if a run was started with options that change its settings; its command is in the first line."""
    try:
        first = read_text(config).partition("\n")[0]
        words = shlex.split(first.removeprefix("# "))
    except (OSError, ValueError):
        return False
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    harmless = {"--out", "--resume", "--no-supervisor", "--json"}
    if not words[2:3] or not words[2].startswith("-"):
        harmless.add("--model")  # `tunewell train DATA --model MODEL` has written it to the config
    return not first.startswith("# tunewell") or bool(options - harmless)


def _row_files(base: Path) -> list[str]:
    """Return the names of files in a folder that are plainly rows, the newest first."""
    known = [
        file
        for file in base.glob("[!.]*")
        if file.is_file() and detect_format(file.name)[0] and is_plainly_rows(file.absolute())
    ]
    return [file.name for file in sorted(known, key=lambda file: -file.stat().st_mtime)]
