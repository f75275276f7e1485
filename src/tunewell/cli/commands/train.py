"""`tunewell train`: train a model under a supervisor, and test it."""

import os
import shlex
import sys
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunewell.cli.options import (
    AllowPickle,
    Argument,
    AsJson,
    ConfigOptions,
    DataPaths,
    Option,
    RunDevice,
    TrainedModel,
)
from tunewell.cli.prompt import progress_and_questions
from tunewell.cli.render import BestEffortStream, emit, hanging, json_text
from tunewell.cli.startup import import_libraries
from tunewell.config.extensions import ENGINES
from tunewell.core.errors import UserError
from tunewell.core.features import find_hook
from tunewell.core.launcher import is_first, num_restarts
from tunewell.core.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tunewell.config.load import LoadedConfig
    from tunewell.config.rules import Healing
    from tunewell.records.rundir import Outcome
    from tunewell.runs.config import RunOptions
    from tunewell.runs.result import TrainResult

_ROWS = "File, folder or glob of rows. Writes `tunewell.yaml` first, as `init` does. Without `--model`, it chooses one."
_REHEARSE = "Only train on a few rows, for two minutes at most: does the loss fall? No run is written."
_INDEX = "Train the model to answer from this index: the rows get passages, and whole documents are held out."
_STRICT = "Under `torchrun`, exit with the code of the verdict instead of 0."
_NO_SUPERVISOR = "Train in this process, for debuggers. A crash ends the run."
_ENGINE = f"The program that takes the steps: {', '.join(ENGINES.names())}."
_RESUME = "Resume the run in that folder. Without a config, use the settings of the run."
_RESUME_OR_START = "Resume the run in that folder if it has begun, else start it: for jobs that are started again."


def command(
    context: typer.Context,
    rows: Annotated[str | None, Argument(_ROWS, "DATA")] = None,
    *,
    given: ConfigOptions,
    model: TrainedModel = None,
    data: DataPaths = None,
    out: Annotated[Path | None, Option("Folder to write the run to.", "FOLDER")] = None,
    seed: Annotated[int | None, Option("Random seed.", "N")] = None,
    device: RunDevice = None,
    engine: Annotated[str | None, Option(_ENGINE, "NAME", is_rare=True)] = None,
    resume: Annotated[bool, Option(_RESUME)] = False,
    resume_or_start: Annotated[bool, Option(_RESUME_OR_START, is_rare=True)] = False,
    allow_change: Annotated[
        list[str] | None, Option("Resume even though this setting has changed. Can be repeated.", "NAME", is_rare=True)
    ] = None,
    allow_pickle: AllowPickle,
    enable_fault_injection: Annotated[bool, Option(hidden=True)] = False,
    no_supervisor: Annotated[bool, Option(_NO_SUPERVISOR, is_rare=True)] = False,
    worker: Annotated[str | None, Option(flags=("--worker", "--supervised"), hidden=True)] = None,
    rehearse: Annotated[bool, Option(_REHEARSE)] = False,
    no_validate: Annotated[bool, Option("Do not test the model after training.")] = False,
    index: Annotated[str | None, Option(_INDEX, "INDEX")] = None,
    export: Annotated[
        str | None,
        Option("Export the model after training, unless the verdict is FAIL: `ollama`, `gguf,merged`.", "TARGETS"),
    ] = None,
    strict: Annotated[bool, Option(_STRICT, is_rare=True)] = False,
    json: AsJson = False,
) -> int:
    """Train the model and test it (prepares the data first if needed)."""
    from tunewell.records.plan import PLAN
    from tunewell.runs.config import has_begun
    from tunewell.runs.supervisor import can_supervise

    if rows is not None and (Path(rows) / PLAN).is_file():
        from tunewell.config.load import FILE_NAME
        from tunewell.records.rundir import RUN_CONFIG

        run = shlex.quote(rows)  # a config in this folder would take precedence over that of the run
        own = f" --config {shlex.quote(f'{rows}/{RUN_CONFIG}')}" if Path(FILE_NAME).is_file() else ""
        raise UserError(
            f"`{rows}` is a run, and no rows", fix=f"to resume it: `tunewell train{own} --out {run} --resume`"
        )
    if rows is not None:
        _write_first_config(rows, model, given, data, can_ask=worker is None and not json)

    def load() -> "LoadedConfig":
        from tunewell.config.load import as_sets
        from tunewell.runs.config import index_sets, load_for_run

        sets = [*as_sets(run=out, device=device, engine=engine), *index_sets(index), *given.sets]
        if no_validate:
            sets.append("verdict.after_training=false")
        if export is not None:
            sets.append(f"export.to={dumps([name.strip() for name in export.split(',')])}")
        return load_for_run(given.config, sets, is_resuming=resume, model=model, data=data, seed=seed)

    if resume_or_start:
        resume = has_begun(load())
    if worker is None and not no_supervisor and not rehearse and can_supervise():
        return _supervise(load, context.obj)
    from tunewell.cli.screens.training import shown_training
    from tunewell.runs.config import RunOptions, ended_before, exit_code_of, require_inputs

    loaded = load()
    # A run that torchrun restarts is resumed, if it had begun.
    resume = resume or (num_restarts() > 0 and has_begun(loaded))
    if resume and not allow_change and (outcome := ended_before(loaded, is_repeated=resume_or_start)):
        code = _report_ended(loaded.config.run, outcome, json=json)
        return exit_code_of(outcome.status, code, is_strict=strict)
    require_inputs(loaded, is_resuming=resume)
    options = RunOptions(
        is_resuming=resume,
        allowed_changes=allow_change or (),
        allow_pickle=allow_pickle,
        argv=context.obj,
        supervisor_fds=worker,
        owns_process=True,
        faults=os.environ.get("TUNEWELL_FAULTS"),
        allow_faults=enable_fault_injection,
    )
    if rehearse:
        return _rehearse(loaded, options, json=json)
    with shown_training() as listener:
        from tunewell.training.events import send_notes

        _require_environment(loaded, send_notes(listener))
        name = loaded.config.model
        # Importing torch takes seconds, so the screen is shown first.
        import_libraries(listener, device=loaded.config.device, model=loaded.seen(name) if name else None)
        from tunewell.runs.heartbeat import send_to_supervisor
        from tunewell.workflows.train import run_training

        result = run_training(loaded, options, listener)
        if worker:
            code = exit_code_of(result.status, result.exit_code, is_strict=strict)
            send_to_supervisor(worker, f"ended {code}")
    if is_first() and not json:
        from tunewell.cli.screens.train_result import train_result_screen

        emit(train_result_screen(result, listener.run.start))
        sys.stdout.flush()
    exported, export_code = _export(loaded, result, allow_pickle=allow_pickle, json=json)
    if is_first() and json:
        emit(json_text(result.as_json() | exported))
    if worker:
        sys.stdout.flush()
        send_to_supervisor(worker, "printed")
    return exit_code_of(result.status, result.exit_code or export_code, is_strict=strict)


def _report_ended(run: str, outcome: "Outcome", *, json: bool) -> int:
    """Print the outcome of a run that a launcher has started again after its end. Return its exit code."""
    from tunewell.records.report import EXIT_CODES

    verdict = "FAIL" if outcome.status == "stopped" else outcome.verdict
    if is_first():
        text = f"`{run}` has already ended ({outcome.reason}); verdict: {outcome.verdict or 'none'}"
        command = f"tunewell {'validate' if outcome.status == 'finished' else 'diagnose'} {shlex.quote(run)}"
        emit(json_text(outcome.model_dump()) if json else f"{text}\nnext: {command}")
    return EXIT_CODES[verdict] if verdict and (is_first() or outcome.status == "stopped") else 0


def _write_first_config(
    rows: str,
    model: str | None,
    given: ConfigOptions,
    data: list[str] | None,
    *,
    can_ask: bool,
) -> None:
    """Write `tunewell.yaml` for these rows as `init` does, unless the existing one has these rows."""
    from functools import partial

    from tunewell.cli.commands.init import choose_model, config_table
    from tunewell.workflows.init import init_to_train

    if given.config is not None or data:
        raise UserError("the rows are named twice", fix="leave out `--config` and `--data`, or the first argument")
    with progress_and_questions(can_ask=can_ask) as (progress, ask):
        sets = given.set_ or ()
        choose = partial(choose_model, rows, sets=sets, ask=ask, progress=progress)
        result = init_to_train(rows, model=model or choose, sets=sets, ask=ask, progress=progress)
    if result is not None:
        sys.stderr.write(f"{config_table(result, rows)}\nwrote `{result.path}`\n")
        sys.stderr.flush()


def _export(
    loaded: "LoadedConfig", result: "TrainResult", *, allow_pickle: bool, json: bool
) -> "tuple[dict[str, Any], int]":
    """Carry out `export.to`, and print it. Return the entry for `--json` and the exit code."""
    if not loaded.config.export.to:
        return {}, 0
    from tunewell.cli.commands.export import announce, export_screen
    from tunewell.cli.progress import shown_stages
    from tunewell.workflows.export import export_after_training

    with shown_stages() as progress:
        step = export_after_training(loaded, result, allow_pickle=allow_pickle, progress=progress, announce=announce)
    if step.note:
        sys.stderr.write(hanging("note: ", step.note) + "\n")
    if step.exported is not None and not json:
        emit(f"\n{export_screen(step.exported)}")
    return {"export": step.exported.as_json() if step.exported else None}, step.exit_code


def _rehearse(loaded: "LoadedConfig", options: "RunOptions", *, json: bool) -> int:
    """Rehearse the run, print the result and return the exit code."""
    from tunewell.cli.progress import shown_stages
    from tunewell.cli.screens.rehearsal import rehearsal_screen

    with shown_stages() as progress:
        _require_environment(loaded, lambda message: print(f"note: {message}", file=sys.stderr))  # noqa: T201
        import_libraries(progress, device=loaded.config.device)
        from tunewell.workflows.rehearse import rehearse

        result = rehearse(loaded, options, lambda event: progress(event) if isinstance(event, Progress) else None)
    emit(json_text(result.as_json()) if json else rehearsal_screen(result))
    return result.exit_code


def _require_environment(loaded: "LoadedConfig", note: "Callable[[str], None]") -> None:
    """Run the fast checks of `doctor`, where it is installed."""
    if check := find_hook("doctor", "require_environment"):
        check(loaded, note)


def _supervise(load: "Callable[[], LoadedConfig]", argv: "Sequence[str]") -> int:
    """Start the run in a child process with the same arguments, supervise it and return its exit code."""
    from tunewell.runs.supervisor import supervise

    stderr = BestEffortStream(sys.stderr)  # supervision continues after the terminal is closed

    def command_line(is_restart: bool, fds: str) -> list[str]:
        # Before the user's arguments, which may end with `--`.
        added = ["--worker", fds, *(["--resume"] if is_restart else [])]
        return [sys.executable, "-m", "tunewell", "train", *added, *argv]

    def report(message: str) -> None:
        stderr.write((hanging("supervisor: ", message) if sys.stderr.isatty() else f"supervisor: {message}") + "\n")
        stderr.flush()

    def settings() -> "tuple[Path, Healing]":
        loaded = load()
        return loaded.path(loaded.config.run), loaded.config.healing

    return supervise(command_line, settings=settings, report=report)
