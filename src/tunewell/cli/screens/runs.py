"""The screens of `runs`: a table of runs that fits the terminal, and the state of one run."""

import shlex
import time
from collections.abc import Sequence
from pathlib import Path, PurePath

from tunewell.cli.render import cell_width, folded_table, hanging, one_line, table, width
from tunewell.cli.screens.numbers import format_loss
from tunewell.core.units import count, duration
from tunewell.runs.state import StoredRun
from tunewell.runs.status import RunStatus

_SHOWN = (
    *("run", "status", "verdict", "held_out", "steps", "tokens_per_second", "when"),
    *("model", "method", "data"),
)
_DROPPED = ("data", "method", "tokens_per_second", "model", "when", "steps")
"""Columns that a narrow terminal does not show, the first ones first."""
_TITLES = {"held_out": "held-out", "tokens_per_second": "tokens/s", "planned_steps": "planned"}
_RIGHT = ("held_out", "loss", "steps", "planned_steps", "tokens_per_second")
_MAX_CELL = 36
_EVENTS = {"held_out": "evaluation", "step": "end"}
"""What an event of `events.jsonl` is called on the screen."""


def runs_screen(runs: Sequence[StoredRun], *, folder: str, columns: Sequence[str], is_filtered: bool) -> str:
    """Return a table of runs. Without `columns`, those that fit the width of the terminal are shown."""
    if not runs:
        where = "this folder" if folder == "." else f"`{folder}`"
        what = f"no run in {where}" + (" matches the filters" if is_filtered else "")
        return what if is_filtered else f"{what}\nnext: `tunewell train` starts one"
    names = list(columns or _SHOWN)
    cells = {name: [_cell(run, name, folder) for run in runs] for name in names}
    dropped = []
    for name in () if columns else _DROPPED:
        if _table_width(cells) > width():
            del cells[name]
            dropped.append(_TITLES.get(name, name))
    names = list(cells)
    rows = [[_TITLES.get(name, name) for name in names], *zip(*cells.values(), strict=True)]
    right = [index for index, name in enumerate(names) if name in _RIGHT]
    lines = [table(rows, right=right, gap=2), count(len(runs), "run")]
    if dropped:
        lines.append(hanging("not shown here: ", f"{', '.join(reversed(dropped))} (`--columns`, `--json`)"))
    return "\n".join(lines)


def _table_width(cells: dict[str, list[str]]) -> int:
    columns = [[_TITLES.get(name, name), *values] for name, values in cells.items()]
    return sum(max(map(cell_width, column)) for column in columns) + 2 * (len(columns) - 1)


def _cell(run: StoredRun, name: str, folder: str) -> str:
    value = getattr(run, name)
    if value is None:
        return "-"
    match name:
        case "run":
            path = Path(value)
            base = Path(folder).expanduser()
            text = str(path.relative_to(base)) if base in path.parents else str(path)
        case "held_out" | "loss":
            text = format_loss(value)
        case "steps":
            text = f"{count(value)}/{count(run.planned_steps)}" if run.planned_steps else count(value)
        case "tokens_per_second":
            text = f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
        case "when":
            text = _ago(value)
        case "model":
            text = PurePath(value).name or value
        case _:
            text = str(value)
    text = one_line(text)
    return text if len(text) <= _MAX_CELL or name == "note" else f"...{text[3 - _MAX_CELL :]}"


def _ago(when: float) -> str:
    seconds = time.time() - when
    if seconds > 14 * 86400:
        return time.strftime("%Y-%m-%d", time.localtime(when))
    return "now" if seconds < 60 else f"{duration(seconds).rsplit(' ', 2)[0]} ago"


def status_screen(run: RunStatus) -> str:
    """Return the state of one run as one screen."""
    rows = [["run", run.run], ["state", run.state]]
    if run.stage:
        rows.append(["doing", run.stage])
    done = f"{count(run.steps)} of {count(run.planned_steps)}" if run.steps is not None and run.planned_steps else "-"
    speed = f", {run.tokens_per_second:,.0f} tokens/s" if run.tokens_per_second else ""
    usual = f", {duration(run.step_seconds)} each" if run.step_seconds else ""
    rows.append(["steps", f"{done}{usual}{speed}"])
    if run.owner:
        rows.append(["owner", str(run.owner)])
    if run.cpu_seconds is not None:
        now = "" if run.cpu_share is None else f", {run.cpu_share:.2f} cores busy now"
        rows.append(["CPU time", f"{duration(run.cpu_seconds)}{now}"])
    losses = [f"training {format_loss(run.loss)}"] if run.loss is not None else []
    losses += [f"held-out {format_loss(run.held_out)}"] if run.held_out is not None else []
    rows += [["loss", ", ".join(losses)]] if losses else []
    rows += [["verdict", run.verdict]] if run.verdict else []
    if run.last_event:
        event = run.last_event
        step = f" of step {count(event['step'])}" if isinstance(event.get("step"), int) else ""
        ago = f", {duration(run.since_event)} ago" if run.since_event is not None else ""
        kind = str(event.get("kind", "unknown"))
        rows.append(["last event", f"{_EVENTS.get(kind, kind)}{step}{ago}"])
    rows += [["model", run.model or "-"], ["data", run.data or "-"]]
    text = folded_table(rows)
    if run.stacks:
        return f"{text}\n\n{run.stacks}"
    if run.pid is not None:
        return f"{text}\nnext: `tunewell runs {shlex.quote(run.run)} --stacks` shows where each thread is"
    return text
