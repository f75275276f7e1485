"""`tunewell.compare`: compare training with answering from documents, and runs with each other."""

from collections.abc import Sequence
from html import escape
from os import PathLike, fspath

from tunewell.features.compare.workflow import RunComparison
from tunewell.library.functions import Data, StrPath, data_paths, text_of
from tunewell.library.progress import Show, shown


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
    *models: StrPath,
    index: StrPath | Sequence[StrPath] = (),
    data: Data = None,
    num_questions: int = 100,
    num_passages: int | None = None,
    judge: str | None = None,
    labels: StrPath | None = None,
    is_fresh: bool = False,
    device: str = "auto",
    out: StrPath = "comparison",
    progress: Show = True,
) -> ComparisonResult:
    """Compare runs and models on the same held-out questions, with and without indexes, and recommend one.

    Without models, the run of the current folder is compared with its base model and the index `index`. `data` are
    other questions with answers. The other parameters are the options of `tunewell compare`.
    """
    from tunewell.features.compare.options import CompareOptions
    from tunewell.features.compare.workflow import compare as run_compare

    options = CompareOptions(
        indexes=[fspath(one) for one in ([index] if isinstance(index, str | PathLike) else index)],
        data=data_paths(data),
        num_questions=num_questions,
        num_passages=num_passages,
        judge=judge,
        labels=text_of(labels),
        is_fresh=is_fresh,
        device=device,
        out=fspath(out),
    )
    with shown(progress) as show:
        found = run_compare([fspath(model) for model in models], options=options, progress=show)
    return ComparisonResult(**vars(found))
