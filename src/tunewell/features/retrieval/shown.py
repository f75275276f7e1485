"""Search the passages for many questions, once with and once without those that contain the answer.

question 1   found: [A] [b] [c]    removed: [b] [c] [d]      A contains the answer
question 2   found: [b] [c]        removed: none             no passage contains the answer: a search miss
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.evaluation.passages import HasAnswer, SearchedQuestions, Shown
from tunewell.features.retrieval.records import INDEX
from tunewell.features.retrieval.search import Retriever, open_retriever
from tunewell.features.retrieval.stores.base import shown_address

_CANDIDATES = 100


def search_all(
    retriever: Retriever,
    questions: Sequence[str],
    has_answer: HasAnswer,
    *,
    num_passages: int | None = None,
    progress: ProgressListener = silent,
) -> SearchedQuestions:
    """Return the passages for all questions, with and without those that contain the answer."""
    limit = num_passages or retriever.store.manifest.settings.num_passages.value
    began = time.perf_counter()
    vectors = retriever.embedder.embed(list(questions), is_query=True)
    result = SearchedQuestions([], [], time.perf_counter() - began)
    seconds = result.seconds
    for number, (question, vector) in enumerate(zip(questions, vectors, strict=True)):
        progress(Progress("searching", number, len(questions), "questions"))
        began = time.perf_counter()
        found, is_answerable = retriever.find(question, limit, vector=vector)
        seconds += time.perf_counter() - began
        passages = [one.passage for one in found]
        matches = [has_answer(number, passage) for passage in passages]
        right = None if None in matches else [bool(one) for one in matches]
        result.found.append(Shown(passages, right, not is_answerable))
        if right is None:
            result.removed.append(None)
            continue
        near = retriever.search(question, _CANDIDATES, vector=vector)
        gone = [one.number for one in near if has_answer(number, one.passage)]
        if not gone:
            result.removed.append(None)
            continue
        left, is_answerable = retriever.find(question, limit, vector=vector, hidden=gone)
        result.removed.append(Shown([one.passage for one in left], [False] * len(left), not is_answerable))
    return replace(result, seconds=seconds)


class SearchableIndex:
    """An index as `compare` uses it."""

    def __init__(self, address: str) -> None:
        """Open the index at an address; raise UserError if there is none."""
        self.address = shown_address(address)
        retriever = open_retriever(address)
        manifest = retriever.store.manifest
        self.notes = list(retriever.notes)
        """What the user must know about the index."""
        self.seconds = manifest.seconds
        """Time to read and embed the documents; None if unknown."""
        self.tuned_on = manifest.settings.questions
        """The file with the questions on which the search settings were chosen, or None."""
        self.search_all = partial(search_all, retriever)


def is_index(folder: Path) -> bool:
    """Return True if there is an index in a folder."""
    return (folder / INDEX).is_file()
