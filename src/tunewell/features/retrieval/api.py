"""`tunewell.index` and `tunewell.ask`: make documents searchable, and answer from them."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from tunewell.core.html import result_table
from tunewell.features.retrieval.index_workflow import IndexResult
from tunewell.inference.passages import IndexAnswer
from tunewell.library.functions import ModelPath, text_of
from tunewell.library.progress import Show, shown


class AskResult(IndexAnswer):
    """The result of `tunewell.ask`: `answer`, `refused`, and `sources` with file, heading, lines, text and score."""

    def __repr__(self) -> str:
        return f"AskResult({self.answer!r}, refused={self.refused}, sources={len(self.sources)})"

    def _repr_html_(self) -> str:
        rows = [(f"[{one.number}] {one.heading}", f"{one.file}, {one.lines}: {one.quote}") for one in self.sources]
        return f"<p>{escape(self.answer)}</p>{result_table(rows)}"


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
    model: ModelPath = None,
    num_passages: int | None = None,
    max_new_tokens: int = 256,
    device: str = "auto",
) -> AskResult:
    """Answer a question from an index with a model: a run, an adapter, a model, a `.gguf` file or `URL#MODEL`.

    The index and the model are opened for each call. Raises UserError if one of them is missing.
    """
    from tunewell.features.retrieval.ask_workflow import open_retrieval_chat
    from tunewell.inference.chat import ChatOptions
    from tunewell.workflows.models import recommend_model

    options = ChatOptions(length=max_new_tokens)
    chat = open_retrieval_chat(
        str(index),
        text_of(model),
        options,
        choose_model=lambda language: recommend_model(None, language=language)[0],
        device=device,
        num_passages=num_passages,
    )
    for _ in chat.ask(question):
        pass
    return AskResult(**vars(chat.answer))
