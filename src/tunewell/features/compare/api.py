"""`tunewell.compare`: compare training with answering from documents, and runs with each other."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from tunewell.features.compare.workflow import RunComparison
from tunewell.library.functions import data_paths
from tunewell.library.progress import Show, shown
from tunewell.runs.result import TrainResult


class ComparisonResult(RunComparison):
    """The result of `tunewell.compare`: counts and intervals by column, differences, and a recommendation."""

    @property
    def recommendation(self) -> str | None:
        """The recommended column, or None."""
        advice = self.comparison.recommendation
        return None if advice is None else advice.column

    def __repr__(self) -> str:
        counts = self.comparison.counts
        right = {name: f"{own.right}/{own.judged}" for name, own in zip(self.comparison.names, counts, strict=True)}
        return f"ComparisonResult(right={right}, recommendation={self.recommendation!r}, page={str(self.page)!r})"

    def _repr_html_(self) -> str:
        from tunewell.features.compare.page import answer_rows

        found = self.comparison
        head = "".join(f"<th>{escape(name)}</th>" for name in found.names)
        lines = "".join(
            f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
            for name, values in answer_rows(found)
        )
        advice = found.recommendation
        text = "" if advice is None else f"<p><b>{escape(advice.column or 'no recommendation')}</b>: "
        text += "" if advice is None else f"{escape(advice.because)}</p>"
        return f"<table style='text-align:left'><tr><th></th>{head}</tr>{lines}</table>{text}"


def compare(
    *models: str | Path | TrainResult,
    index: str | Path | Sequence[str | Path] = (),
    data: Any = None,
    out: str | Path = "comparison",
    progress: Show = True,
    **options: Any,
) -> ComparisonResult:
    """Compare runs and models on the same held-out questions, with and without indexes, and recommend one.

    Without models, the run of the current folder is compared with its base model and the index `index`. `data` are
    other questions with answers. `options` are `num_questions`, `num_passages`, `device` and `is_fresh`.
    """
    from tunewell.features.compare.workflow import compare as run_compare

    names = [model.run if isinstance(model, TrainResult) else model for model in models]
    indexes = [str(index)] if isinstance(index, str | Path) else [str(one) for one in index]
    with shown(progress) as show:
        found = run_compare(names, indexes=indexes, data=data_paths(data), out=out, progress=show, **options)
    return ComparisonResult(**vars(found))
