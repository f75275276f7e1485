"""Read the documents of the next step in other threads, while this step is computed."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tunewell.core.arrays import SmallInts
from tunewell.data.batches import TokenizedDocuments

Arrays = tuple[SmallInts, SmallInts]
NUM_READERS = 4
"""Readers mostly wait for a disk or a network, so there may be more of them than cores."""


class ReadAhead:
    """Documents that are read before they are needed. Other documents are read when they are asked for."""

    def __init__(self, documents: TokenizedDocuments) -> None:
        self._documents = documents
        self.index: Any = documents.index
        self._pending: dict[int, Future[Arrays]] = {}
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="read-ahead")

    def __len__(self) -> int:
        return len(self._documents)

    def request(self, documents: Iterable[int]) -> None:
        """Start to read these documents. Earlier requests that nobody asked for are dropped."""
        wanted = [int(document) for document in documents]
        for document in self._pending.keys() - set(wanted):
            self._pending.pop(document).cancel()
        for document in wanted:
            if document not in self._pending:
                self._pending[document] = self._readers.submit(self._read, document)

    def arrays(self, index: int) -> Arrays:
        """Return the ids and labels of a document, once they are read."""
        pending = self._pending.pop(index, None)
        return self._documents.arrays(index) if pending is None else pending.result()

    def _read(self, document: int) -> Arrays:
        ids, labels = self._documents.arrays(document)
        return ids.copy(), labels.copy()  # copying reads the pages of a memory-mapped file
