"""The screen of `sweep`: a table of its runs, their curves, and the best one."""

from pathlib import Path
from typing import TYPE_CHECKING

from tunewell.cli.render import hanging, is_utf8, one_line, table, width
from tunewell.cli.screens.numbers import format_loss
from tunewell.core.units import count
from tunewell.runs.loss_curve import draw_curves, letter, line_of_run

if TYPE_CHECKING:
    from tunewell.features.sweep.sweep import SweepResult, TrialResult

_MAX_DRAWN = 8


def sweep_screen(result: "SweepResult") -> str:
    """Return the result of a sweep as one screen."""
    keys = [*result.alternatives]
    if any("seed" in run.settings for run in result.runs) and "seed" not in keys:
        keys.append("seed")
    drawn = [run for run in result.runs if run.steps][:_MAX_DRAWN]
    letters = {run.name: letter(index) for index, run in enumerate(drawn)}
    has_answers = any(run.judged for run in result.runs)
    last = ["right"] if has_answers else ["verdict"] if any(run.verdict for run in result.runs) else []
    head = ["", *(key.rpartition(".")[2] for key in keys), "held-out", "steps", *last]
    rows = [[*head, "status"]]
    for run in result.runs:
        judged = f"{run.right} of {run.judged}" if run.judged else "-"
        verdict = [judged if has_answers else run.verdict or "-"] if last else []
        values = [one_line(run.settings.get(key, "-")) for key in keys]
        loss = "-" if run.held_out is None else format_loss(run.held_out)
        rows.append([letters.get(run.name, ""), *values, loss, _steps(run), *verdict, run.status])
    parts = [table(rows, right=(len(keys) + 1, len(keys) + 2), gap=2)]
    lines = [line_of_run(Path(run.run), run.name) for run in drawn]
    if curves := draw_curves(lines, width=max(20, min(60, width() - 12)), is_ascii=not is_utf8()):
        parts.append(curves)
    if result.best is not None:
        best = result.best
        loss = format_loss(best.held_out)
        parts.append(hanging("best: ", f"{best.name}, held-out loss {loss}, {result.conclusion}"))
        parts.append(hanging("      ", f"`{best.run}`"))
    else:
        parts.append(hanging("no best run: ", result.conclusion))
    parts += [
        hanging("failed: ", f"{run.name}: {one_line(run.note or '')}")
        for run in result.runs
        if run.note is not None and run.status in ("failed", "stopped", "unreadable")
    ]
    parts += [hanging("note: ", note) for note in result.notes]
    parts.append(hanging("wrote   ", f"`{result.folder / 'sweep.json'}`, `{result.folder / 'curves.svg'}`"))
    if result.next_command:
        parts.append(hanging("next: ", f"`{result.next_command}`"))
    return "\n".join(parts)


def _steps(run: "TrialResult") -> str:
    if run.steps is None:
        return "-"
    return f"{count(run.steps)}/{count(run.planned_steps)}" if run.planned_steps else count(run.steps)
