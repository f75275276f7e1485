"""`tunewell.index`, `tunewell.ask` and `tunewell.compare`: answer from documents, and compare that with training."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from tunewell.features.compare.workflow import RunComparison
from tunewell.features.retrieval.answer import IndexAnswer
from tunewell.features.retrieval.index_workflow import IndexResult
from tunewell.library.functions import data_paths
from tunewell.library.progress import Show, shown
from tunewell.library.results import TrainResult, as_result, html_table


class Answer(IndexAnswer):
    """The result of `tunewell.ask`: `answer`, `refused`, and `sources` with file, heading, lines, text and score."""

    def __repr__(self) -> str:
        return f"Answer({self.answer!r}, refused={self.refused}, sources={len(self.sources)})"

    def _repr_html_(self) -> str:
        rows = [(f"[{one.number}] {one.heading}", f"{one.file}, {one.lines}: {one.quote}") for one in self.sources]
        return f"<p>{escape(self.answer)}</p>{html_table(rows)}"


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
        from tunewell.evaluation.report.comparison import answer_rows

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


def index(
    documents: str | Path | Sequence[str | Path],
    *,
    out: str | Path = "index",
    questions: str | Path | None = None,
    embedder: str = "minilm",
    language: str = "auto",
    progress: Show = True,
) -> IndexResult:
    """Make documents searchable, or update an index. The search settings are chosen on `questions`, training rows."""
    from tunewell.features.retrieval.index_workflow import index as run_index

    paths = [documents] if isinstance(documents, str | Path) else documents
    with shown(progress) as show:
        return run_index(
            [str(path) for path in paths],
            str(out),
            embedder=embedder,
            language=language,
            questions=None if questions is None else str(questions),
            progress=show,
        )


def ask(
    question: str,
    *,
    index: str | Path = "index",
    model: str | Path | TrainResult | None = None,
    num_passages: int | None = None,
    max_new_tokens: int = 256,
    device: str = "auto",
) -> Answer:
    """Answer a question from an index with a model: a run, an adapter, a model, a `.gguf` file or `URL#MODEL`.

    The index and the model are opened for each call. Raises UserError if one of them is missing.
    """
    from tunewell.features.retrieval.ask_workflow import open_retrieval_chat
    from tunewell.inference.chat import ChatOptions

    path = model.run if isinstance(model, TrainResult) else model
    name = None if path is None else str(path)
    chat = open_retrieval_chat(
        str(index), name, ChatOptions(length=max_new_tokens), device=device, num_passages=num_passages
    )
    for _ in chat.ask(question):
        pass
    return as_result(Answer, chat.answer)


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
    return as_result(ComparisonResult, found)
