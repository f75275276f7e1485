"""`tunewell compare`: runs side by side, or models with and without an index, on the same held-out questions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.core.features import find_hook
from tunewell.core.files import make_private, require_output_path, stable_json, write_atomic
from tunewell.core.html import render
from tunewell.core.progress import ProgressListener, silent
from tunewell.core.redact import redact
from tunewell.evaluation.comparison import Column, ColumnComparison, column_of, compare_columns
from tunewell.evaluation.report.view import tested_rows
from tunewell.features.compare.options import CompareOptions
from tunewell.features.compare.page import answer_rows, comparison_page, right_chart
from tunewell.records.plan import PLAN, Plan, read_plan
from tunewell.records.report import REPORT, Report, read_report
from tunewell.runs.loss_curve import line_of_run
from tunewell.runs.state import StoredRun, value_in

PAGE, DATA = "compare.html", "compare.json"
OUT = Path("comparison")
DEFAULT_INDEX = "index"


@dataclass(frozen=True)
class RunComparison:
    """A comparison and its folder."""

    comparison: ColumnComparison
    folder: Path

    @property
    def page(self) -> Path:
        return self.folder / PAGE

    @property
    def recommendation(self) -> str | None:
        """The recommended column, or None."""
        advice = self.comparison.recommendation
        return None if advice is None else advice.column

    def __repr__(self) -> str:
        counts = self.comparison.counts
        right = {name: f"{own.right}/{own.judged}" for name, own in zip(self.comparison.names, counts, strict=True)}
        return f"RunComparison(right={right}, recommendation={self.recommendation!r}, page={str(self.page)!r})"

    def _repr_html_(self) -> str:
        found = self.comparison
        chart = right_chart(found, found.names)
        rows = answer_rows(found)
        return render("tunewell.features.compare", "result.html", comparison=found, chart=chart, answers=rows)


def compare(
    subjects: Sequence[str | Path], *, options: CompareOptions, progress: ProgressListener = silent
) -> RunComparison:
    """Compare runs and models, with and without indexes, and write the page.

    Runs alone are compared by their reports, settings and curves. With an index, with rows or with a model that is not
    a run, all models are asked the same questions. Raises UserError if there is nothing to compare.
    """
    require_output_path(Path(options.out))
    is_runs = len(subjects) > 1 and all((Path(one).expanduser() / PLAN).is_file() for one in subjects)
    if is_runs and not options.indexes and options.data is None:
        return compare_runs(subjects, out=options.out, is_fresh=options.is_fresh, progress=progress)
    return _written(_compare_answers(subjects, _with_index(subjects, options), progress), Path(options.out))


def _compare_answers(
    subjects: Sequence[str | Path], options: CompareOptions, progress: ProgressListener
) -> ColumnComparison:
    from tunewell.evaluation.session import ValidateOptions
    from tunewell.features.compare.systems import compare_answers
    from tunewell.workflows.validate import evaluation_set

    rows = ValidateOptions(data=options.data)
    return compare_answers(subjects, options, lambda ref: evaluation_set(ref, rows, progress), progress)


def _with_index(subjects: Sequence[str | Path], options: CompareOptions) -> CompareOptions:
    """Return the options, with the index of this folder if none is named; raise UserError for only one column."""
    if options.indexes or len(subjects) > 1:
        return options
    is_index = find_hook("retrieval", "is_index")
    if is_index is not None and is_index(Path(DEFAULT_INDEX)):
        return replace(options, indexes=(DEFAULT_INDEX,))
    raise UserError(
        "there is nothing to compare with: no index, and no second run",
        where=f"there is no index in `{DEFAULT_INDEX}`",
        fix="make an index of your documents with `tunewell index DOCUMENTS --questions train.jsonl`, then run "
        "`tunewell compare` again; or name two runs: `tunewell compare RUN RUN`",
    )


def _written(comparison: ColumnComparison, folder: Path) -> RunComparison:
    comparison = replace(comparison, made_at=datetime.now(UTC).isoformat(timespec="seconds"))
    make_private(folder)
    write_atomic(folder / DATA, stable_json(comparison.as_json()))
    write_atomic(folder / PAGE, redact(comparison_page(comparison)))
    return RunComparison(comparison, folder)


def compare_runs(
    runs: Sequence[str | Path], *, out: str | Path = OUT, is_fresh: bool = False, progress: ProgressListener = silent
) -> RunComparison:
    """Compare runs on the held-out rows of the first, and write the page.

    Reports of the runs are used if they are of the same rows; other runs, and all with `is_fresh`, are validated.
    Raises UserError for a folder without a run, and for fewer than two runs.
    """
    paths = [Path(run).expanduser() for run in runs]
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("a run is named twice", fix="name each run once")
    folder = Path(out)
    plans = [read_plan(path) for path in paths]
    names, notes = column_names(paths), []
    columns, rows = [], ""
    for path, plan, name in zip(paths, plans, names, strict=True):
        report = None if is_fresh else _known_report(path, plan, plans[0])
        if report is None:
            report, found = _validated(path, paths[0], folder / name, progress)
            notes += [f"{name}: {note}" for note in found if f"{name}: {note}" not in notes]
        columns.append(_column(path, plan, report, name))
        rows = rows or f"held-out rows of {tested_rows(report)}"
    return _written(replace(compare_columns(columns, notes), rows=rows), folder)


def column_names(paths: Sequence[Path]) -> list[str]:
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
    stored = StoredRun(run)
    peak = value_in(stored.outcome, "measured", "peak_bytes")
    resources = {
        "tokens per second": stored.tokens_per_second,
        "seconds": stored.seconds,
        "peak memory, MiB": peak / 2**20 if peak else None,
        "steps": stored.steps,
    }
    line = line_of_run(run, name)
    return column_of(report, name, settings={**plan.config, "model": plan.model}, line=line, resources=resources)
