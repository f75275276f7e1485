"""The config of a run: check it, write it to the run folder, load it for `--resume`, and build the resume command."""

import json
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tunewell.config.keys import parse_key, resolve_alias
from tunewell.config.load import (
    ConfigLike,
    LoadedConfig,
    as_sets,
    load_config,
    relative_path,
    respell_paths,
    to_loaded_config,
)
from tunewell.config.open_points import require_no_open_points
from tunewell.config.schema import Config
from tunewell.config.yaml_reader import parse_scalar
from tunewell.core.errors import UserError
from tunewell.core.files import is_url
from tunewell.core.launcher import is_launched, num_restarts
from tunewell.core.options import WeightsOptions
from tunewell.core.redact import REDACTED, redact
from tunewell.data.sources.local import LocalFile
from tunewell.model_files.files import locate
from tunewell.model_files.presets import is_preset
from tunewell.records.adapter import ADAPTER_CONFIG
from tunewell.records.checkpoint import checkpoint_step
from tunewell.records.manifest import MANIFEST
from tunewell.records.plan import PLAN, Chosen, Start, read_plan
from tunewell.records.rundir import RUN_CONFIG, Outcome, RunDir, Status, find_outcome

# Options of one `train` call that are not part of the config: resume, command line, process-wide settings.


@dataclass(frozen=True, kw_only=True)
class RunOptions(WeightsOptions):
    """Options to start or resume a run. The defaults are those of a library call."""

    is_resuming: bool = False
    allowed_changes: Sequence[str] = ()
    """Settings that may differ from the checkpoint on resume (the values of `--allow-change`)."""
    argv: Sequence[str] | None = None
    """The command-line arguments after `tunewell train`; None in a library call."""
    supervisor_fds: str | None = None
    """File descriptors opened by the supervisor, `READ,WRITE,STACKS`; None without a supervisor."""
    owns_process: bool = False
    """True on the command line. The run may then set signal handlers, the number of threads and the allocator."""
    is_alone: bool = True
    """Whether the process has only this run. Otherwise its age, and on a CPU its memory, are not those of the run."""
    measure_threads: Callable[[Sequence[Any]], Chosen[int]] | None = None
    """Replaces the measurement of the fastest number of threads, which the runs of a sweep share."""
    faults: str | None = None
    """Faults to inject in tests, for example `nan@gradients:step=7`."""
    allow_faults: bool = False


OPEN_BOOK_CORPUS = "corpus-open-book"
REPEAT_FIRST_COMMAND = "repeat the command that started the run and add `--resume`"
_FLAGS_OF_ONE_START = {
    "--resume": False,
    "--resume-or-start": False,
    "--allow-change": True,
    "--worker": True,
    "--supervised": True,
}
"""Flags that a later resume must not repeat -> whether the flag has a value."""


def index_sets(index: str | Path | None) -> list[str]:
    """Return the settings of `train --index`. The corpus is another one than that of runs on the same rows alone."""
    return [] if index is None else as_sets(**{"data.index": index, "corpus": OPEN_BOOK_CORPUS})


def load_for_run(given: ConfigLike, sets: Sequence[str] = (), *, is_resuming: bool, **flags: Any) -> LoadedConfig:
    """Load the config for training.

    The config in the run folder is used on resume if no config is given and the current folder has no
    `tunewell.yaml`.
    """
    sets = [sets] if isinstance(sets, str) else sets
    saved = _saved_config(sets) if is_resuming and given in (None, "") else None
    if saved is None:
        loaded = to_loaded_config(given, sets, **flags)
        require_no_open_points(loaded)
        return loaded
    loaded = load_config(saved, sets, **flags)
    if REDACTED in loaded.config.model_dump_json():
        raise UserError(
            "the run's config is incomplete: a secret was removed from it",
            where=str(loaded.path(loaded.config.run) / RUN_CONFIG),
            fix=REPEAT_FIRST_COMMAND,
        )
    return loaded


def _saved_config(sets: Sequence[str]) -> dict[str, Any] | None:
    """Return the config in the run folder, with paths relative to the current folder, or None if it does not exist.

    Also return None if the current folder has a config file, which takes precedence.
    """
    current = load_config(sets=[text for text in sets if _key(text) == ("run",)])
    folder = current.path(current.config.run)
    if current.file is not None or not (folder / RUN_CONFIG).is_file():
        return None
    saved = load_config(folder / RUN_CONFIG)
    run_folder, working_folder = folder.resolve(), Path.cwd()
    tree = _with_paths(saved, lambda path: relative_path(os.path.normpath(run_folder / path), working_folder))
    if not (saved.path(saved.config.corpus) / MANIFEST).is_file():  # on another machine, copied together with the run
        name = Path(saved.config.corpus).name
        for folder in (run_folder.parent, run_folder, working_folder):
            if (folder / name / MANIFEST).is_file():
                tree["corpus"] = relative_path(str(folder / name), working_folder)
    return tree | {"run": current.config.run}


def _key(text: str) -> tuple[str | int, ...]:
    """Return the key of a `--set KEY=VALUE`. Return () if it cannot be parsed; `load_config` reports the error."""
    try:
        return resolve_alias(parse_key(text.partition("=")[0].strip()))
    except UserError:
        return ()


def has_begun(loaded: LoadedConfig) -> bool:
    """Return True if the run folder has a run to resume."""
    return (loaded.path(loaded.config.run) / PLAN).is_file()


def ended_before(loaded: LoadedConfig, *, is_repeated: bool = False) -> Outcome | None:
    """Return the outcome of a run that is started again after its end, by a launcher or `is_repeated`, or None.

    A stopped run counts only if its command is repeated: `--resume` alone continues it.
    """
    outcome = find_outcome(loaded.path(loaded.config.run)) if is_launched() or is_repeated else None
    ends = ("finished", "stopped") if num_restarts() or is_repeated else ("finished",)
    return outcome if outcome and outcome.status in ends else None


def exit_code_of(status: Status, code: int, *, is_strict: bool) -> int:
    """Return the exit code of a run. A launcher restarts the processes if one ends with another code than 0."""
    return 0 if status == "finished" and is_launched() and not is_strict else code


def require_training_data(loaded: LoadedConfig, *, is_resuming: bool) -> None:
    """Raise UserError if the config has no data or no model."""
    config = loaded.config
    fix = "`tunewell train FILE` trains on the rows of a file and chooses a model; in Python, set `data` and `model`"
    if is_resuming and config.model is None:
        RunDir.require_run(loaded.path(config.run))
        fix = REPEAT_FIRST_COMMAND
    if not config.data.sources and not (loaded.path(config.corpus) / MANIFEST).is_file():
        raise UserError(
            f"no training data: `data.sources` is not set, and the corpus `{config.corpus}` does not exist", fix=fix
        )
    if config.model is None:
        raise UserError("`model` is not set in the config", fix=fix)
    require_no_open_points(loaded)


def require_inputs(loaded: LoadedConfig, *, is_resuming: bool) -> None:
    """Raise UserError for missing data, rows or a missing model. This needs no torch, so nobody waits for the error."""
    require_training_data(loaded, is_resuming=is_resuming)
    if not is_resuming:
        if not is_launched():  # another process may have begun the run already
            RunDir.require_new(loaded.path(loaded.config.run), loaded.path(loaded.config.corpus))
        if missing := missing_rows(loaded):
            raise missing
    model = loaded.config.model
    if model is not None and not is_preset(model) and not loaded.path(model).exists():
        try:
            locate(loaded.seen(model))
        except UserError as error:
            if not is_resuming:
                raise
            where = f"`model` in the config of the run, `{loaded.path(loaded.config.run) / RUN_CONFIG}`"
            raise UserError(error.what, where=where, fix="say where it is on this machine with `--model`") from None


def missing_rows(loaded: LoadedConfig) -> UserError | None:
    """Return the error of the first source of rows that does not exist, or None."""
    data = loaded.config.data
    for path in (*(source.path for source in data.sources), data.held_out_file):
        try:
            if path is not None and not is_url(path):
                LocalFile.find(path, base=loaded.base)
        except UserError as error:
            return error
    return None


def as_first_started(loaded: LoadedConfig) -> LoadedConfig:
    """Return the config of a resumed run: one of an older version has no selection slice and no replay."""
    folder = loaded.path(loaded.config.run)
    if not (folder / PLAN).is_file():
        return loaded
    before, config = read_plan(folder).config, loaded.config
    for section, name in (("data", "selection"), ("train", "replay")):
        if name not in before.get(section, {}):
            own = getattr(config, section).model_copy(update={name: 0.0})
            config = config.model_copy(update={section: own})
    return replace(loaded, config=config)


def with_start(loaded: LoadedConfig) -> tuple[LoadedConfig, Start | None]:
    """Resolve a config whose `model` is a run or an adapter. Return the config of its base model, and the start.

    Other configs are returned unchanged, and so is a resolved one. Raises UserError if training cannot go on from it.
    """
    config = loaded.config
    if not config.method.adapter and (config.model is None or not _is_trained(loaded.path(config.model))):
        return loaded, None
    from tunewell.runs.start import find_start  # imports torch, which `prepare` does without

    return find_start(loaded)


def _is_trained(path: Path) -> bool:
    """Return whether a path is a run, one of its checkpoints or an adapter."""
    if checkpoint_step(path.name) is not None and (path.parent.parent / PLAN).is_file():
        return True
    return (path / PLAN).is_file() or (path / ADAPTER_CONFIG).is_file()


def dump_config(loaded: LoadedConfig, argv: Sequence[str] | None = None) -> str:
    """Return the keys that were set as YAML, without secrets. Paths are relative to the run folder."""
    # The run folder may be a symbolic link; relative paths must start from the real folder.
    run_folder = loaded.path(loaded.config.run).resolve()
    config = _with_paths(loaded, lambda path: relative_path(loaded.path(path), run_folder))
    text = yaml.dump(redact(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    if argv is not None:
        command = " ".join(shlex.join(["tunewell", "train", *_repeatable(argv)]).splitlines())
        text = f"# {command.encode('utf-8', 'backslashreplace').decode()}\n{text}"
    return redact(text)


def _with_paths(loaded: LoadedConfig, respell: Callable[[str], str]) -> dict[str, Any]:
    """Return every key that was set, and `corpus`, but not `run`. Relative paths are converted by `respell`."""
    config = loaded.config.model_dump(mode="json", exclude_unset=True, exclude={"run"})
    return respell_paths("", config | {"corpus": loaded.config.corpus}, respell, base=loaded.base)


class _Dumper(yaml.SafeDumper):
    """Writes YAML that our reader reads back unchanged. Text that looks like a number, such as `1e5`, is quoted."""


def _quoted_if_needed(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if parse_scalar(text) == text else "'")


_Dumper.add_representer(str, _quoted_if_needed)


def resume_command(loaded: LoadedConfig, options: RunOptions) -> str:
    """Return the command that resumes this run from the current folder.

    If the run folder has the complete config, the command contains only the folder. Otherwise it repeats the first
    command line or, after a library call, contains the path of the config in the run folder.
    """
    run, folder = loaded.config.run, loaded.path(loaded.config.run)
    pickle = ["--allow-pickle"] if options.allow_pickle else []
    if _is_complete_in_folder(loaded):
        words = [*pickle, *(["--out", run] if run != Config().run else [])]
    elif options.argv is not None:
        words = _repeatable(options.argv)
    else:
        words = [*pickle, "--config", str(folder / RUN_CONFIG), "--out", str(folder)]
    return shlex.join(["tunewell", "train", "--resume", *words])


def _is_complete_in_folder(loaded: LoadedConfig) -> bool:
    """Return True if `--resume` with at most the run folder would load the same config, from it or `tunewell.yaml`."""
    try:
        saved = load_for_run(None, [f"run={json.dumps(loaded.config.run)}"], is_resuming=True)
    except UserError:
        return False
    return saved.base == loaded.base and saved.config.model_dump() == loaded.config.model_dump()


def _repeatable(argv: Sequence[str]) -> list[str]:
    """Return the arguments without the flags that apply to only one start of the run."""
    kept, words = [], iter(argv)
    for word in words:
        flag, equals, _ = word.partition("=")
        if flag not in _FLAGS_OF_ONE_START:
            kept.append(word)
        elif _FLAGS_OF_ONE_START[flag] and not equals:
            next(words, None)
    return kept
