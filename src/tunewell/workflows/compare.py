"""`tunewell compare`: several runs side by side, on the same held-out rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import require_output_path, stable_json, write_atomic
from tunewell.core.progress import ProgressListener, silent
from tunewell.evaluation.columns import Column, ColumnComparison, column_of, compare_columns
from tunewell.evaluation.report.comparison import comparison_page
from tunewell.records.plan import PLAN, Plan, read_plan
from tunewell.records.report import REPORT, Report, read_report
from tunewell.records.rundir import OUTCOME
from tunewell.runs.curves import line_of_run
from tunewell.runs.listing import read_object, summarise

PAGE, DATA = "comparison.html", "comparison.json"
OUT = Path("comparison")


@dataclass(frozen=True)
class RunComparison:
    """A comparison and its folder."""

    comparison: ColumnComparison
    folder: Path

    @property
    def page(self) -> Path:
        return self.folder / PAGE


def compare_runs(
    runs: Sequence[str | Path], *, out: str | Path = OUT, is_fresh: bool = False, progress: ProgressListener = silent
) -> RunComparison:
    """Compare runs on the held-out rows of the first, and write the page.

    Reports of the runs are used if they are of the same rows; other runs, and all with `is_fresh`, are validated.
    Raises UserError for a folder without a run, and for fewer than two runs.
    """
    paths = [Path(run).expanduser() for run in runs]
    if len(paths) < 2:
        raise UserError("a comparison needs at least two runs", fix="name them: `tunewell compare RUN RUN`")
    for path in paths:
        if not (path / PLAN).is_file():
            raise UserError(
                f"there is no run in `{path}`", where=f"expected `{path / PLAN}`", fix="`tunewell runs` lists runs"
            )
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("a run is named twice", fix="name each run once")
    folder = Path(out)
    require_output_path(folder)
    plans = [read_plan(path) for path in paths]
    names, notes = _names(paths), []
    columns = []
    for path, plan, name in zip(paths, plans, names, strict=True):
        report = None if is_fresh else _known_report(path, plan, plans[0])
        if report is None:
            report, found = _validated(path, paths[0], folder / name, progress)
            notes += [f"{name}: {note}" for note in found if f"{name}: {note}" not in notes]
        columns.append(_column(path, plan, report, name))
    comparison = compare_columns(columns, notes)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / DATA, stable_json(comparison.as_json()))
    write_atomic(folder / PAGE, comparison_page(comparison))
    return RunComparison(comparison, folder)


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the names of the folders, or their paths if two have the same name."""
    names = [path.resolve().name for path in paths]
    return names if len(set(names)) == len(names) else [str(path).strip("/").replace("/", "_") for path in paths]


def _known_report(run: Path, plan: Plan, first: Plan) -> Report | None:
    """Return the report of a run if it is of the held-out rows of the first run; else None."""
    if not (run / REPORT).is_file() or plan.corpus_sha256 != first.corpus_sha256:
        return None
    try:
        report = read_report(run)
    except UserError:
        return None
    return report if report.data == "the held-out rows of the run" and report.subject.kind == "run" else None


def _validated(run: Path, first: Path, out: Path, progress: ProgressListener) -> tuple[Report, list[str]]:
    """Validate a run on the rows of the first run, if both use the same tokens; else on its own."""
    from tunewell.evaluation.rows import shared_rows
    from tunewell.evaluation.session import ValidateOptions
    from tunewell.runs.resolve import resolve_model
    from tunewell.workflows.validate import validate

    corpus, notes = (None, []) if run == first else shared_rows(resolve_model(first), resolve_model(run))
    return validate(run, options=ValidateOptions(corpus=corpus, out=out), progress=progress).report, notes


def _column(run: Path, plan: Plan, report: Report, name: str) -> Column:
    summary, outcome = summarise(run), read_object(run / OUTCOME) or {}
    measured: dict[str, Any] = outcome.get("measured") or {}
    peak = measured.get("peak_bytes")
    resources = {
        "tokens per second": summary.tokens_per_second,
        "seconds": measured.get("seconds") or outcome.get("seconds"),
        "peak memory, MiB": peak / 2**20 if isinstance(peak, int) else None,
        "steps": summary.steps,
    }
    line = line_of_run(run, name)
    return column_of(report, name, settings={**plan.config, "model": plan.model}, line=line, resources=resources)
