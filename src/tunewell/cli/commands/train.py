"""`tunewell train`."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunewell.cli.options import AllowPickle, AsJson, ConfigFile, DataPaths, Sets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tunewell.config.load import LoadedConfig
    from tunewell.training.events import RunStarted
    from tunewell.workflows.train import TrainResult

_RESUME = "Resume the run in that folder. Without a config, use the settings of the run."
_CURVE_WIDTH, _CURVE_MARGIN = 60, 14
_NO_BREAK = "\N{NO-BREAK SPACE}"


def command(
    context: typer.Context,
    config: ConfigFile = None,
    set_: Sets = None,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Model to train.")] = None,
    data: DataPaths = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder to write the run to.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Random seed.")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Device: `cpu`, `cuda`, `cuda:1` or `mps`.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help=_RESUME)] = False,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Resume even though this setting has changed. Can be repeated."),
    ] = None,
    allow_pickle: AllowPickle = False,
    enable_fault_injection: Annotated[bool, typer.Option("--enable-fault-injection", hidden=True)] = False,
    no_supervisor: Annotated[
        bool, typer.Option("--no-supervisor", help="Train in this process, for debuggers. A crash ends the run.")
    ] = False,
    worker: Annotated[str | None, typer.Option("--worker", "--supervised", hidden=True)] = None,
    no_validate: Annotated[bool, typer.Option("--no-validate", help="Do not test the model after training.")] = False,
    json: AsJson = False,
) -> None:
    """Train the model and test it (prepares the data first if needed)."""
    from tunewell.cli.render import emit, emit_json
    from tunewell.cli.screens.training import is_first_process, shown_training
    from tunewell.core.progress import Progress
    from tunewell.runs.config import load_for_run
    from tunewell.runs.options import RunOptions
    from tunewell.runs.supervisor import can_supervise

    sets = [*flags_as_sets(run=out, device=device), *(set_ or ())]
    if no_validate:
        sets.append("verdict.after_training=false")
    loaded = load_for_run(config, sets, is_resuming=resume, model=model, data=data, seed=seed)
    if worker is None and not no_supervisor and can_supervise():
        raise typer.Exit(_supervise(loaded, context.obj))
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
    with shown_training() as listener:
        listener(Progress("starting torch"))
        # Seconds go by before torch is there: not at a prompt that says nothing.
        from tunewell.runs.heartbeat import send_ended, send_printed
        from tunewell.workflows.train import run_training

        result = run_training(loaded, options, listener)
        if worker:
            send_ended(worker, result.exit_code)
    if is_first_process() and json:
        emit_json(result.as_json())
    elif is_first_process():
        emit(screen(result, listener.run.start))
    if worker:
        sys.stdout.flush()
        send_printed(worker)
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _supervise(loaded: "LoadedConfig", argv: "Sequence[str]") -> int:
    """Start the run in a child process with the same arguments, supervise it and return its exit code."""
    from tunewell.cli.render import LastingStream
    from tunewell.runs.supervisor import supervise

    stderr = LastingStream(sys.stderr)  # supervision continues after the terminal is closed

    def command_line(is_restart: bool, fds: str) -> list[str]:
        # In front of the user's arguments: those may end with `--`.
        added = ["--worker", fds, *(["--resume"] if is_restart else [])]
        return [sys.executable, "-m", "tunewell", "train", *added, *argv]

    def report(message: str) -> None:
        stderr.write(f"supervisor: {message}\n")
        stderr.flush()

    folder = loaded.path(loaded.config.run)
    return supervise(command_line, folder=folder, rules=loaded.config.healing, report=report)


def flags_as_sets(**values: Path | str | None) -> list[str]:
    """Spell flags as `KEY="VALUE"`, quoted so that spaces, colons and `5` stay the text they are."""
    import json

    return [f"{key}={json.dumps(str(value), ensure_ascii=False)}" for key, value in values.items() if value is not None]


def screen(result: "TrainResult", start: "RunStarted | None") -> str:
    """Say what was trained, how it went, what was made and what to do next."""
    from tunewell.cli.render import table
    from tunewell.cli.screens.numbers import one_line
    from tunewell.core.units import count

    parts = []
    if result.status != "finished":
        reason = f": {one_line(result.reason)}" if result.reason else ""
        parts.append(f"{result.status} at step {count(result.steps)} of {count(result.num_steps)}{reason}")
    parts.append(_folded(report_rows(result, start)))
    if curve := _curve(result):
        parts += ["", curve, ""]
    if result.validation is not None:
        from tunewell.cli.screens.verdict import verdict_screen

        parts += [verdict_screen(result.validation.report), ""]
    if result.artefacts:
        parts.append(table([["wrote", f"`{path}`", meaning] for path, meaning in result.artefacts]))
    if result.next_command:
        command = result.next_command if "`" in result.next_command else f"`{result.next_command}`"
        parts.append(f"{'to go on' if result.status == 'interrupted' else 'next'}: {command}")
    return "\n".join(parts)


def report_rows(result: "TrainResult", start: "RunStarted | None") -> list[tuple[str, str, str]]:
    """Tell a run in a few lines: label, number, detail; what has no number is only words."""
    from tunewell.cli.screens.numbers import loss_words, method_words, model_words, one_line, speed_words
    from tunewell.core.units import count, duration, size_bytes
    from tunewell.runs.outcome import healing_summary

    rows = []
    if start is not None:
        rows.append(("trained", "", f"{model_words(start.plan.model)}: {method_words(start)}"))
    ending = one_line(result.reason) if result.status == "finished" else ""
    rows.append(("steps", f"{count(result.steps)} of {count(result.num_steps)}", ending))
    rows.append(("tokens", count(result.tokens), f"{count(result.supervised_tokens)} of them learned"))
    change = f"{loss_words(result.first_loss)} -> {loss_words(result.last_loss)}"
    rows.append(("loss", change, "first step -> last step"))
    if result.held_out_last is not None:
        change = f"{loss_words(result.held_out_first)} -> {loss_words(result.held_out_last)}"
        rows.append(("held-out", change, _best(result)))
    memory = f"at most {size_bytes(result.peak_memory_bytes)} of memory" if result.peak_memory_bytes else ""
    rows.append(("speed", speed_words(result.tokens_per_second), memory))
    stages = ", ".join(_unbroken(name, seconds) for name, seconds in result.stages.items() if seconds >= 0.0005)
    rows.append(("time", duration(result.seconds), stages))
    rows += [("healed", "", one_line(line)) for line in healing_summary(result.healing)]
    rows += [("next time", "", one_line(line)) for line in result.advice]
    notes = dict.fromkeys([*(start.notes if start else ()), *result.notes])
    return [*rows, *(("note", "", one_line(note)) for note in notes)]


def _best(result: "TrainResult") -> str:
    from tunewell.cli.screens.numbers import loss_words
    from tunewell.core.units import count

    if result.held_out_best is None or result.best_step is None:
        return ""
    return f"best {loss_words(result.held_out_best)} at step {count(result.best_step)}"


def _unbroken(stage: str, seconds: float) -> str:
    """Join a stage and its time with spaces at which no line is folded."""
    from tunewell.core.units import duration

    return f"{stage} {duration(seconds)}".replace(" ", _NO_BREAK)


def _curve(result: "TrainResult") -> str:
    from tunewell.cli.render import width
    from tunewell.cli.screens.curve import draw_curve

    if len(result.losses) < 2:
        return ""
    is_utf8 = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"
    room = min(max(width() - _CURVE_MARGIN, 10), _CURVE_WIDTH)
    return draw_curve(result.losses, result.held_out, width=room, is_ascii=not is_utf8)


def _folded(rows: "Sequence[tuple[str, str, str]]") -> str:
    """Align the rows, and fold what would leave the screen under itself."""
    import textwrap

    from tunewell.cli.render import width

    label_width, number_width = (max(len(row[column]) for row in rows) + 3 for column in (0, 1))
    lines = []
    for label, number, words in rows:
        lead = label.ljust(label_width) + (number.ljust(number_width) if number else "")
        room = max(width() - len(lead), 20)
        folded = textwrap.wrap(words, room, break_long_words=False, break_on_hyphens=False) or [""]
        lines += [(lead + folded[0]).rstrip(), *(" " * len(lead) + more for more in folded[1:])]
    return "\n".join(lines).replace(_NO_BREAK, " ")
