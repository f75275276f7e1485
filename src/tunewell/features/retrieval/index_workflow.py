"""`tunewell index`: make documents searchable, and choose the search settings on questions."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.progress import ProgressListener, silent
from tunewell.data.question_rows import read_questions
from tunewell.evaluation.passages import key_finder
from tunewell.features.retrieval.embedders.base import open_embedder
from tunewell.features.retrieval.indexing import BuiltIndex, build_index
from tunewell.features.retrieval.open_book import OpenBookRows, locate_questions, open_book_rows, write_rows
from tunewell.features.retrieval.search import Retriever
from tunewell.features.retrieval.stores.base import open_store, shown_address
from tunewell.features.retrieval.tuning import tune
from tunewell.scoring.answer_keys import ReferenceRow, answer_keys


@dataclass(frozen=True)
class IndexResult:
    """The result of `index`."""

    address: str
    built: BuiltIndex
    open_book: OpenBookRows | None = None
    open_book_folder: Path | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the object that `index --json` prints."""
        manifest = self.built.manifest.model_dump(mode="json", exclude={"files"})
        found = {"index": self.address, **manifest, "notes": self.built.notes, "seconds": round(self.built.seconds, 3)}
        if (rows := self.open_book) is None:
            return found
        return found | {
            "open_book": {
                "folder": str(self.open_book_folder),
                "train": len(rows.train),
                "held_out": len(rows.held_out),
                "held_out_documents": rows.held_out_documents,
                "without_answer": rows.num_without_answer,
            }
        }


def index(
    paths: Sequence[str],
    address: str,
    *,
    embedder: str = "minilm",
    language: str = "auto",
    questions: str | None = None,
    open_book: Path | None = None,
    progress: ProgressListener = silent,
) -> IndexResult:
    """Index documents, or update an index. Raise UserError if there is nothing to index; the old index stays.

    `open_book` is a folder for training rows in which the questions have passages.
    """
    if open_book is not None and questions is None:
        raise UserError("`--open-book` needs questions with answers", fix="add `--questions train.jsonl`")
    asked = read_questions(questions) if questions is not None else []
    opened = open_embedder(embedder)
    built = build_index(list(paths), address, opened, language=language, questions=questions, progress=progress)
    rows = None
    if asked:
        store = open_store(address)
        retriever = Retriever(store, opened)
        keys = answer_keys([ReferenceRow(question.text, question.reference, question.answers) for question in asked])
        settings, notes = tune(retriever, [question.text for question in asked], key_finder(keys), progress=progress)
        settings = settings.model_copy(update={"questions": questions})
        store.set_settings(settings)
        built.manifest = store.manifest
        built.notes += notes
        if open_book is not None:
            located = locate_questions(retriever, keys, progress=progress)
            rows = open_book_rows(located, num_passages=settings.num_passages.value)
            write_rows(open_book, rows)
    return IndexResult(shown_address(address), built, rows, open_book)
