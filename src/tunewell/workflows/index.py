"""`tunewell index`: make documents searchable, and choose the search settings on questions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tunewell.core.progress import ProgressListener, silent
from tunewell.evaluation.answer_keys import ReferenceRow, answer_keys
from tunewell.evaluation.judge import contains_key
from tunewell.retrieval.embedders.base import open_embedder
from tunewell.retrieval.indexing import BuiltIndex, build_index
from tunewell.retrieval.questions import read_questions
from tunewell.retrieval.search import Retriever
from tunewell.retrieval.stores.base import open_store, shown_address
from tunewell.retrieval.tuning import tune


@dataclass(frozen=True)
class IndexResult:
    """The result of `index`."""

    address: str
    built: BuiltIndex

    def as_json(self) -> dict[str, Any]:
        """Return the object that `index --json` prints."""
        manifest = self.built.manifest.model_dump(mode="json", exclude={"files"})
        return {"index": self.address, **manifest, "notes": self.built.notes, "seconds": round(self.built.seconds, 3)}


def index(
    paths: Sequence[str],
    address: str,
    *,
    embedder: str = "minilm",
    language: str = "auto",
    questions: str | None = None,
    progress: ProgressListener = silent,
) -> IndexResult:
    """Index documents, or update an index. Raise UserError if there is nothing to index; the old index stays."""
    asked = read_questions(questions) if questions is not None else []
    opened = open_embedder(embedder)
    built = build_index(list(paths), address, opened, language=language, progress=progress)
    if asked:
        store = open_store(address)
        keys = answer_keys([ReferenceRow(question.text, question.reference) for question in asked])
        settings, notes = tune(
            Retriever(store, opened),
            [question.text for question in asked],
            lambda number, text: contains_key(text, keys[number]),
            progress=progress,
        )
        store.set_settings(settings)
        built.manifest = store.manifest
        built.notes += notes
    return IndexResult(shown_address(address), built)
