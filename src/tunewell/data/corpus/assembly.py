"""Gather parts into one set of documents: judge duplicates and the held-out part, and keep the ledger.

Tokens and the few numbers of each document go straight to staging files that are mapped afterwards, so that memory
holds neither; only the digests that duplicates are found by stay in it.
"""

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tunewell.data.corpus.parts import Part
from tunewell.data.corpus.seen import SeenDigests

_TWO_64 = float(2**64)
_COLUMNS = {
    "lengths": "<i4",
    "begins": "<i8",
    "boundary": "<i4",
    "source": "<i4",
    "row": "<i8",
    "is_held_out": "?",
    "order_key": "<u8",
}
DROPPED = "dropped.jsonl"


@dataclass
class SourceLedger:
    """What became of one source's rows."""

    name: str
    sha256: str
    num_bytes: int
    rows: int = 0
    documents: int = 0
    held_out: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)

    def closes(self) -> bool:
        return self.rows == self.documents + self.held_out + sum(self.dropped.values())


@dataclass
class Documents:
    """Every document that was kept, a few numbers each, and the tokens of all of them; all mapped from files."""

    lengths: npt.NDArray[np.int32]
    begins: npt.NDArray[np.int64]
    """Where each document's first token lies in `tokens`."""
    boundary: npt.NDArray[np.int32]
    source: npt.NDArray[np.int32]
    row: npt.NDArray[np.int64]
    is_held_out: npt.NDArray[np.bool_]
    order_key: npt.NDArray[np.uint64]
    """From the content: what sampling sorts by, so that it does not depend on the order of rows."""
    tokens: npt.NDArray[np.uint32]
    learned: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.lengths)


class Assembly:
    """Takes parts in order and writes their tokens to a staging folder; close it when done, whatever happened."""

    def __init__(
        self, folder: Path, *, held_out_share: float, drop_duplicates: bool, drop_answers_held_out: bool
    ) -> None:
        self.folder = folder
        self.sources: list[SourceLedger] = []
        self.notes: Counter[str] = Counter()
        self.num_tokens = 0
        self._share = held_out_share
        self._drop_duplicates = drop_duplicates
        self._drop_answers = drop_answers_held_out
        self._seen = SeenDigests()
        self._asked_held_out = SeenDigests()
        self._open = ExitStack()
        names = ("tokens", "learned", *_COLUMNS)
        self._files = {name: self._open.enter_context((folder / f"{name}.bin").open("wb")) for name in names}
        dropped = (folder / DROPPED).open("w", encoding="utf-8", errors="backslashreplace")
        self._dropped = self._open.enter_context(dropped)

    def begin_source(self, name: str, sha256: str, num_bytes: int) -> None:
        """Say whose parts come next."""
        self.sources.append(SourceLedger(name, sha256, num_bytes))

    def add(self, part: Part, numbers: Sequence[int], *, is_held_out: bool = False) -> None:
        """Take in a part; `is_held_out` for the rows of a held-out file, which must come before all others."""
        if len(numbers) != len(part.status):
            raise RuntimeError(f"a block had {len(numbers)} rows and its part has {len(part.status)}")
        ledger = self.sources[-1]
        ledger.rows += len(part.status)
        ledger.formats.update(part.formats)
        self.notes.update(part.notes)
        rows = np.asarray(numbers, dtype=np.int64)
        self._note_dropped(part, rows, ledger)
        document_rows = rows[part.status == 0]
        learned = _without_first_tokens(part)
        reasons = self._judge(part, learned, is_held_out)
        held = np.full(len(part.lengths), is_held_out)
        if not is_held_out and self._share:
            held = _first_word(part.question) / _TWO_64 < self._share
        for index in np.flatnonzero(reasons != ""):
            self.drop(ledger, int(document_rows[index]), str(reasons[index]))
        keep = reasons == ""
        ledger.documents += int((keep & ~held).sum())
        ledger.held_out += int((keep & held).sum())
        self._store(part, keep, learned, {"row": document_rows, "is_held_out": held})

    def _judge(self, part: Part, learned: npt.NDArray[np.bool_], is_held_out: bool) -> npt.NDArray[np.str_]:
        reasons = np.full(len(part.lengths), "", dtype="U24")
        if len(reasons):
            starts = np.cumsum(part.lengths) - part.lengths
            reasons[~np.logical_or.reduceat(learned, starts)] = "nothing_to_learn"
        if self._drop_answers and not is_held_out and len(self._asked_held_out):
            reasons[(reasons == "") & self._asked_held_out.contains(part.question)] = "answer_in_held_out"
        if self._drop_duplicates:
            is_open = np.flatnonzero(reasons == "")
            reasons[is_open[~self._seen.add(part.whole[is_open])]] = "exact_duplicate"
        if is_held_out:
            self._asked_held_out.add(part.question)
        return reasons

    def _note_dropped(self, part: Part, rows: npt.NDArray[np.int64], ledger: SourceLedger) -> None:
        dropped = np.flatnonzero(part.status)
        for index, detail in zip(dropped.tolist(), part.details, strict=True):
            self.drop(ledger, int(rows[index]), part.reasons[part.status[index] - 1], detail)

    def drop(self, ledger: SourceLedger, row: int, reason: str, detail: str = "") -> None:
        """Count a dropped row and write it down."""
        ledger.dropped[reason] += 1
        line = {"source": ledger.name, "row": row, "reason": reason}
        self._dropped.write(json.dumps(line | ({"detail": detail} if detail else {}), ensure_ascii=False) + "\n")

    def _store(
        self,
        part: Part,
        keep: npt.NDArray[np.bool_],
        learned: npt.NDArray[np.bool_],
        columns: dict[str, npt.NDArray[Any]],
    ) -> None:
        token_kept = np.repeat(keep, part.lengths)
        self._write("tokens", part.tokens[token_kept].astype("<u4"))
        self._write("learned", learned[token_kept])
        lengths = part.lengths[keep]
        self._write("lengths", lengths)
        self._write("begins", self.num_tokens + np.cumsum(lengths) - lengths)
        self._write("boundary", part.boundary[keep])
        self._write("source", np.full(len(lengths), len(self.sources) - 1))
        self._write("order_key", _first_word(part.whole)[keep])
        for name, column in columns.items():
            self._write(name, column[keep])
        self.num_tokens += int(lengths.sum())

    def _write(self, name: str, values: npt.NDArray[Any]) -> None:
        # Not `tofile`: it reports a full disk as "1000 requested and 0 written", without saying why.
        self._files[name].write(np.ascontiguousarray(values, dtype=_COLUMNS.get(name, values.dtype)).data)

    def finish(self) -> Documents:
        """Close the token files and give the documents; `drop` may still be called."""
        for file in self._files.values():
            file.close()
        self._seen = self._asked_held_out = SeenDigests()
        columns: dict[str, Any] = {name: self._mapped(name, dtype) for name, dtype in _COLUMNS.items()}
        return Documents(**columns, tokens=self._mapped("tokens", "<u4"), learned=self._mapped("learned", "?"))

    def _mapped(self, name: str, dtype: str) -> npt.NDArray[Any]:
        path = self.folder / f"{name}.bin"
        if not path.stat().st_size:
            return np.zeros(0, dtype=dtype)
        # A plain array over the same pages: `memmap` does work of its own for every slice.
        return np.asarray(np.memmap(path, dtype=dtype, mode="r"))

    def close(self) -> None:
        """Close every file that is still open, the list of dropped rows among them."""
        self._open.close()


def _without_first_tokens(part: Part) -> npt.NDArray[np.bool_]:
    """Take each document's first token out of what is learned: nothing comes before it to predict it from."""
    learned = part.learned.astype(bool)
    learned[np.cumsum(part.lengths) - part.lengths] = False
    return learned


def _first_word(digests: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    return digests[:, :8].copy().view("<u8")[:, 0]
