"""The screen of `models`: models on this disk, models of the catalogue, and the recommended one."""

import shlex

from tunewell.cli.render import ending, folded_table, hanging, table, width
from tunewell.cli.screens.numbers import format_parameters
from tunewell.core.units import count, size_bytes
from tunewell.data.row_statistics import LANGUAGES
from tunewell.planning.model_choice import ModelNeeds
from tunewell.workflows.models import ModelsResult

_GAP = 2
_ALWAYS = 4
"""Columns that are never left out: mark, name, memory, time."""


def models_screen(result: ModelsResult) -> str:
    """Return the tables and the recommendation, as wide as the screen."""
    lines = [_heading(result), ""]
    if result.local:
        lines += [_table(result.local, result, title="on this disk", place="where"), ""]
    if result.models:
        ordered = sorted(result.models, key=lambda model: model.num_parameters)
        lines += [_table(ordered, result, title="model", place="download"), ""]
    lines += _legend(result)
    return "\n".join([*lines, *_recommended(result)])


def _heading(result: ModelsResult) -> str:
    rows, device = result.rows, result.machine.device("auto")
    language = f", {LANGUAGES[rows.language]}" if rows.language else ""
    about = f"{count(rows.num_rows, 'row')} of about {count(round(rows.num_tokens / max(1, rows.num_rows)))} tokens"
    named = f"`{result.data}`: {about}{language}" if result.data else f"no rows named; assumed: {about}"
    memory = (
        f"{size_bytes(device.free_bytes)} of {size_bytes(device.memory_bytes)} free"
        if device.free_bytes is not None and device.memory_bytes
        else "memory unknown"
    )
    where = f"{device.label}, {count(result.machine.cores, 'core')}" if device.kind == "cpu" else device.label
    return folded_table([["rows", named], ["machine", f"{where}, {memory}"], ["run", "LoRA, as `init` sets it up"]])


def _table(models: list[ModelNeeds], result: ModelsResult, *, title: str, place: str) -> str:
    """Return a table with as many columns as fit on the screen."""
    head = ["", title, "memory", "time", place, "weights", "kind", "licence"]
    rows = [head, *(_row(model, marks=_marks(result), is_best=model is result.recommended) for model in models)]
    for number in range(len(head), _ALWAYS - 1, -1):
        shown = table([row[:number] for row in rows], right=(2, 3, 4, 5), gap=_GAP)
        if max(map(len, shown.splitlines())) <= width():
            hidden = hanging("not shown here: ", f"{', '.join(head[number:])} (a wider terminal, or `--json`)")
            is_last = title == "model" or not result.models
            return f"{shown}\n{hidden}" if number < len(head) and is_last else shown
    # A long path: its start is left out.
    others = max(len(row[2]) for row in rows) + max(len(row[3]) for row in rows) + 3 * _GAP + 1
    short = [[row[0], ending(row[1], max(20, width() - others)), *row[2:_ALWAYS]] for row in rows]
    return table(short, right=(2, 3), gap=_GAP)


def _marks(result: ModelsResult) -> dict[str, str]:
    """Return a letter for each reason not to use a model of the list: `x` for one that does not fit."""
    reasons = dict.fromkeys(["does not fit", *(_reason(model) for model in result.models if model.problem)])
    return dict(zip(reasons, "xabcdefgh", strict=False))


def _reason(model: ModelNeeds) -> str:
    return model.problem.partition(":")[0]


def _row(model: ModelNeeds, *, marks: dict[str, str], is_best: bool) -> list[str]:
    entry = model.model
    bad = marks.get(_reason(model), "x") if model.problem else ""
    mark = "*" if is_best else bad or ("4" if model.method == "qlora" else "")
    download = model.where or size_bytes(model.download_bytes)
    licence = f"{entry.license}{' (login)' if entry.is_gated else ''}" if entry else ""
    unsure = "?" if entry and entry.unverified else ""
    seconds = model.seconds if model.fits else None
    return [
        mark,
        f"{model.name} {unsure}".strip(),
        size_bytes(model.peak_bytes) if model.peak_bytes is not None else "-",
        rough_duration(seconds) if seconds is not None else "-",
        download,
        format_parameters(model.num_parameters) if model.num_parameters else "-",
        entry.kind if entry else "",
        licence,
    ]


def _legend(result: ModelsResult) -> list[str]:
    shown = [*result.local, *result.models]
    marks = [["*", "recommended"]] if result.recommended else []
    letters = _marks(result)
    used = {_reason(model) for model in result.models if model.problem}
    marks += [[letter, reason] for reason, letter in letters.items() if reason in used]
    marks += [
        [letters.get(_reason(model), "x"), f"{model.name}: {model.problem}"] for model in result.local if model.problem
    ]
    if any(model.model and model.model.unverified for model in shown):
        marks.append(["?", "some of its facts are not verified (`--json` names them), so it is not recommended"])
    if any(model.method == "qlora" and not model.problem for model in shown):
        marks.append(["4", "fits only with a base model in 4 bits: `tunewell init ROWS --model NAME --method qlora`"])
    return [folded_table(marks), ""] if marks else []


def rough_duration(seconds: float) -> str:
    """Return an estimate of a duration in one unit: `40 s`, `12 min`, `3.4 h`, `2 days`."""
    for limit, unit, size in ((90, "s", 1), (5400, "min", 60), (129_600, "h", 3600)):
        if seconds < limit:
            value = seconds / size
            return f"{value:.1f} {unit}" if unit == "h" else f"{value:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


def _recommended(result: ModelsResult) -> list[str]:
    best = result.recommended
    fitting = [shlex.quote(model.name) for model in result.models if not model.problem]
    if best is None and fitting and result.because:
        init = f"`tunewell init{_rows(result)} --model {fitting[0]}`"
        ways = f"{init} with a connection, or `--model FOLDER` with a copy of it"
        return [hanging("fits: ", f"{', '.join(fitting)}; but {result.because}"), hanging("next: ", ways)]
    if best is None:
        return ["no model in the list is suitable", hanging("next: ", "train on a larger GPU: `tunewell notebook`")]
    name = shlex.quote(best.name)
    seconds = f"; about {rough_duration(best.seconds)}" if best.seconds is not None else ""
    rows = [["recommended", f"{best.name}: {result.because}{seconds}"]]
    if best.model is not None:
        entry = best.model
        languages = "English" if entry.num_languages == 1 else f"{entry.num_languages} languages"
        rows.append(["good for", entry.good_for])
        rows.append(["licence", f"{entry.license}; {languages}; context of {count(entry.context)} tokens"])
    if best.level:
        rows.append(["documents", best.level])
    method = " --method qlora" if best.method == "qlora" else ""
    steps = f"`tunewell init{_rows(result)} --model {name}{method}`; to talk to it first: `tunewell chat {name}`"
    return [folded_table(rows), hanging("next: ", steps)]


def _rows(result: ModelsResult) -> str:
    return f" {shlex.quote(result.data)}" if result.data else " ROWS"
