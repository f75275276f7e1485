"""Open-book training by config: with `data.index`, rows with passages are written beside the corpus and used."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunewell.config.load import LoadedConfig
from tunewell.config.schema import SourceConfig
from tunewell.core.errors import UserError
from tunewell.core.files import is_url, read_text, sha256_text, stable_json, write_atomic
from tunewell.core.progress import ProgressListener, silent
from tunewell.core.units import count
from tunewell.data.question_rows import Question, read_questions
from tunewell.data.sources.base import find_files
from tunewell.features.retrieval.open_book import NUM_COPIES, locate_questions, open_book_rows, write_rows
from tunewell.features.retrieval.search import Retriever, open_retriever
from tunewell.scoring.answer_keys import ReferenceRow, answer_keys

_VERSION = "1"
"""Increase it when a code change gives other rows for the same questions and index."""
_RECORD = "rows.json"


def with_open_book(loaded: LoadedConfig, progress: ProgressListener = silent) -> tuple[LoadedConfig, list[str]]:
    """Return the config with rows that have passages from `data.index`, and remarks; unchanged without that key.

    The rows are written beside the corpus, and used again if the questions and the index are the same.
    """
    data = loaded.config.data
    if data.index is None:
        return loaded, []
    for source in data.sources:
        if source.map is not None:
            raise UserError(
                "`data.index` cannot be used with a `map` function",
                where=f"data.sources, `{source.path}`",
                fix="write the changed rows to a file first",
            )
    address = data.index if "://" in data.index else str(loaded.path(data.index))
    retriever = open_retriever(address)
    folder = _folder(loaded)
    inputs = _inputs(loaded, retriever)
    record = _read(folder)
    if record.get("inputs_sha256") != inputs:
        record = _write(folder, loaded, retriever, progress) | {"inputs_sha256": inputs}
        write_atomic(folder / _RECORD, stable_json(record))
    first = data.sources[0]
    source = SourceConfig(path=str((folder / "train.jsonl").absolute()), format="messages", template=first.template)
    held_out = str((folder / "held_out.jsonl").absolute())
    # Copies of a question are near duplicates on purpose, and rows share passages; documents are held out instead.
    unset = {key for key in ("near_duplicate", "near_held_out") if key not in data.clean.model_fields_set}
    clean = data.clean.model_copy(update=dict.fromkeys(unset, "keep"))
    changed = data.model_copy(update={"sources": (source,), "held_out": held_out, "index": None, "clean": clean})
    return replace(loaded, config=loaded.config.model_copy(update={"data": changed})), _remarks(record, folder)


def held_out_documents(loaded: LoadedConfig) -> set[str] | None:
    """Return the documents that an open-book run has not seen; None if its rows were deleted."""
    found = _read(_folder(loaded)).get("held_out_documents")
    return None if found is None else set(found)


def _folder(loaded: LoadedConfig) -> Path:
    corpus = loaded.path(loaded.config.corpus)
    return corpus.with_name(f"{corpus.name}-rows")


def _read(folder: Path) -> dict[str, Any]:
    try:
        return json.loads(read_text(folder / _RECORD))
    except (OSError, ValueError):
        return {}


def _inputs(loaded: LoadedConfig, retriever: Retriever) -> str:
    data, manifest = loaded.config.data, retriever.store.manifest
    paths = [source.path for source in data.sources] + ([data.held_out_file] if data.held_out_file else [])
    files = [file.sha256() for path in paths for file in find_files(path, base=loaded.base)]
    index = [manifest.documents_sha256, manifest.embedder.sha256, manifest.settings.model_dump_json()]
    return sha256_text(_VERSION, str(loaded.config.seed), data.model_dump_json(), *index, *files)


def _write(folder: Path, loaded: LoadedConfig, retriever: Retriever, progress: ProgressListener) -> dict[str, Any]:
    data = loaded.config.data
    asked = [question for source in data.sources for question in read_questions(source, base=loaded.base)]
    tested: list[Question] = []
    if data.held_out_file is not None:
        like = data.sources[0].model_copy(update={"path": data.held_out_file, "limit": None})
        tested = read_questions(like, base=loaded.base)
    keys = answer_keys([ReferenceRow(one.text, one.reference, one.answers) for one in [*asked, *tested]])
    train, test = (
        locate_questions(retriever, part, progress=progress) for part in (keys[: len(asked)], keys[len(asked) :])
    )
    if not any(train):
        raise UserError(
            "no passage of the index contains the answer to a training question",
            where=f"`{data.index}`, {count(len(asked), 'question')}",
            fix="index the documents that the answers come from; or train without `--index`",
        )
    num_passages = retriever.store.manifest.settings.num_passages.value
    rows = open_book_rows(train, test, num_passages=num_passages, seed=loaded.config.seed)
    if is_url(loaded.config.corpus):
        raise UserError("rows with passages cannot be written to a remote address", fix="set `corpus` to a folder")
    write_rows(folder, rows)
    return {
        "train": len(rows.train),
        "held_out": len(rows.held_out),
        "copies": NUM_COPIES,
        "held_out_documents": rows.held_out_documents,
        "without_answer": rows.num_without_answer,
        "on_trained_documents": rows.num_seen_documents,
    }


def _remarks(record: dict[str, Any], folder: Path) -> list[str]:
    documents: Sequence[str] = record["held_out_documents"]
    found = [
        f"open book: {count(record['train'], 'row')} with passages in `{folder.name}`, {record['copies']} for each "
        f"question; {count(record['held_out'], 'test row')} about {count(len(documents), 'document')} that are held out"
    ]
    if record["without_answer"]:
        found.append(f"open book: {count(record['without_answer'], 'question')} left out: the index lacks the answer")
    if record["on_trained_documents"]:
        found.append(
            f"open book: {count(record['on_trained_documents'], 'test question')} left out: their documents are not "
            "held out"
        )
    return found
