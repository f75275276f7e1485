"""The screen after `tunewell train`: the metrics of the run, loss curve, verdict, files and the next command."""

from collections.abc import Sequence

from tunewell.cli.render import folded_table, hanging, is_utf8, width
from tunewell.cli.screens.numbers import describe_method, format_loss, format_speed, short_model_name
from tunewell.core.units import count, duration, size_bytes
from tunewell.runs.loss_curve import draw_curve
from tunewell.runs.result import TrainResult, healing_summary
from tunewell.training.events import RunStarted

_CURVE_WIDTH, _CURVE_MARGIN = 60, 14
# Keys of `stages` in `--json` that have a different label on the screen.
_STAGE_LABELS = {"look": "evaluate", "judge": "validate"}


def train_result_screen(result: TrainResult, start: RunStarted | None) -> str:
    """Return the screen for a run that has ended."""
    parts = [] if result.status == "finished" else [hanging("", _stop_message(result))]
    parts.append(_folded(_result_rows(result, start)))
    if curve := _curve(result):
        parts += ["", curve, ""]
    if result.validation is not None:
        from tunewell.cli.screens.verdict import verdict_screen

        parts += [verdict_screen(result.validation.report), ""]
    if result.artefacts:
        parts.append(folded_table([["wrote", f"`{path}`", meaning] for path, meaning in result.artefacts]))
    if result.next_command:
        command = result.next_command if "`" in result.next_command else f"`{result.next_command}`"
        parts.append(hanging("to resume: " if result.status == "interrupted" else "next: ", command))
    return "\n".join(parts)


def _stop_message(result: TrainResult) -> str:
    where = f"after step {count(result.steps)} of {count(result.num_steps)}"
    if result.status == "interrupted" and "SIGINT" in result.reason:
        return f"Stopped by you (Ctrl-C) {where}. Everything is saved."
    return f"{result.status} {where}{f': {result.reason}' if result.reason else ''}"


def _result_rows(result: TrainResult, start: RunStarted | None) -> list[tuple[str, str, str]]:
    """Return the label, number and detail of each line. A line without a number has only a detail."""
    rows = []
    if start is not None:
        rows.append(("trained", "", f"{short_model_name(start.plan.model)}: {describe_method(start)}"))
    reason = result.reason if result.status == "finished" else ""
    rows.append(("steps", f"{count(result.steps)} of {count(result.num_steps)}", reason))
    rows.append(("tokens", count(result.tokens), f"{count(result.supervised_tokens)} of them trained on"))
    change = f"{format_loss(result.first_loss)} -> {format_loss(result.last_loss)}"
    rows.append(("loss", change, "first step -> last step"))
    if result.held_out_last is not None:
        change = f"{format_loss(result.held_out_first)} -> {format_loss(result.held_out_last)}"
        has_best = result.held_out_best is not None and result.best_step is not None
        best = f"best {format_loss(result.held_out_best)} at step {count(result.best_step or 0)}" if has_best else ""
        if any(loss < (result.held_out_best or 0.0) for step, loss in result.held_out if step):
            best += ", by right answers"  # not the lowest loss
        rows.append(("held-out", change, best))
    memory = f"at most {size_bytes(result.peak_memory_bytes)} of memory" if result.peak_memory_bytes else ""
    rows.append(("speed", format_speed(result.tokens_per_second), memory))
    stages = [
        f"{_STAGE_LABELS.get(name, name)} {duration(seconds)}"
        for name, seconds in result.stages.items()
        if seconds >= 0.0005
    ]
    rows.append(("time", duration(result.seconds), ", ".join(stages)))
    for label, is_warning in (("warning", True), ("healed", False)):
        entries = [entry for entry in result.healing if (entry.action == "none") == is_warning]
        rows += [(label, "", line) for line in healing_summary(entries)]
    rows += [("next time", "", line) for line in result.advice]
    return [*rows, *(("note", "", note) for note in dict.fromkeys(result.notes))]


def _curve(result: TrainResult) -> str:
    if len(result.losses) < 2:
        return ""
    curve_width = min(max(width() - _CURVE_MARGIN, 10), _CURVE_WIDTH)
    return draw_curve(result.losses, result.held_out, width=curve_width, is_ascii=not is_utf8())


def _folded(rows: Sequence[tuple[str, str, str]]) -> str:
    """Align the rows and wrap each detail. A detail without a number starts in the number's column."""
    label_width, number_width = (max(len(row[column]) for row in rows) + 3 for column in (0, 1))
    lines = []
    for label, number, detail in rows:
        lead = label.ljust(label_width) + (number.ljust(number_width) if number else "")
        lines.append(hanging(lead, detail))
    return "\n".join(lines)
