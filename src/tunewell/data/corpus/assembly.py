"""Collect tokenized blocks into one set of documents: drop duplicates, choose held-out and selected rows, count all.

The tokens and statistics of each document are appended to staging files, which are memory-mapped afterwards. Memory use
does not grow with the number of rows.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from tunewell.config.schema import Data
from tunewell.core.arrays import Bools, Bytes, Hashes, Ints, SmallInts, TokenIds
from tunewell.core.errors import UserError
from tunewell.core.units import count, percent
from tunewell.data.corpus.held_out import choose_auto, choose_selected, choose_share, num_selected
from tunewell.data.corpus.tokenized_block import TokenizedBlock
from tunewell.records.manifest import ANSWERS, DROPPED, SECRETS, SourceRecord, unknown_remark
from tunewell.records.plan import Chosen

SAMPLE_ROWS = 1000
_MAX_SECRET_ROWS = 1000
_MIN_HELD_OUT = 2
"""Rows of a share that need no adjustment."""
_PHRASE_ROWS, _PHRASE_SHARE, _MOST = 20, 0.01, 0.5
"""A held-out question that is a turn of more rows than the first two, or of most rows, is a phrase, such as `Hello`,
and reveals no answer."""
_TWO_64 = float(2**64)
_POOL = 20_000
"""Rows among which those of the selection slice are chosen: the ones whose questions have the highest hashes."""
_COLUMNS = {
    "tokens": "<u4",
    "supervised": "?",
    "lengths": "<i4",
    "begins": "<i8",
    "boundary": "<i4",
    "source": "<i4",
    "row": "<i8",
    "is_held_out": "?",
    "whole": "<u8",
    "question": "<u8",
    "turn": "<u8",
    "turn_of": "<i8",
}
_DIGESTS = ("whole", "question")

Digests = Hashes
"""One 128-bit digest per document, as two integers: shape (documents, 2)."""


@dataclass
class SourceLedger:
    """The row counts of one source: documents, selected, held out, dropped."""

    name: str
    sha256: str
    bytes: int
    rows: int = 0
    documents: int = 0
    held_out: int = 0
    selected: int = 0
    dropped: Counter[str] = field(default_factory=Counter[str])
    formats: Counter[str] = field(default_factory=Counter[str])
    unused: Counter[str] = field(default_factory=Counter[str])
    """Number of documents by column that is not used."""
    version: str = ""
    examples: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    """The first dropped row of each reason, with its details."""

    def is_balanced(self) -> bool:
        """Return True if every row is counted as a document, as selected, as held out or as dropped."""
        return self.rows == self.documents + self.selected + self.held_out + sum(self.dropped.values())

    def record(self) -> SourceRecord:
        """Return the record of the source in the manifest."""
        counts = {name: dict(sorted(getattr(self, name).items())) for name in ("dropped", "formats", "unused")}
        return SourceRecord.model_validate(vars(self) | counts)


@dataclass
class Documents:
    """The statistics and tokens of all documents. All arrays but `is_dropped` and `is_selected` are memory-mapped."""

    lengths: SmallInts
    begins: Ints
    """Index of each document's first token in `tokens`."""
    boundary: SmallInts
    source: SmallInts
    row: Ints
    is_held_out: Bools
    whole: Digests
    """Digest of the whole conversation."""
    question: Digests
    tokens: TokenIds
    supervised: Bools
    is_dropped: Bools
    is_selected: Bools
    """Whether each document is in the selection slice."""
    turn: Hashes = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    """Hashes of the other questions of conversations with several turns."""
    turn_of: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """The document of each of `turn`."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def is_trained(self) -> Bools:
        """Whether each document is trained on."""
        return ~self.is_held_out & ~self.is_selected & ~self.is_dropped

    @property
    def is_tested(self) -> Bools:
        """Whether each document is held out and used."""
        return self.is_held_out & ~self.is_dropped

    @property
    def order_key(self) -> Hashes:
        """The sort key for sampling: a hash of the content, so that the result does not depend on the order of rows."""
        return self.whole[:, 0]


class Assembly:
    """A collector that appends tokenized blocks to staging files. It must be closed, even after an error."""

    def __init__(self, folder: Path, config: Data, held_out_before: Hashes | None = None) -> None:
        self.folder = folder
        self.num_questions = 0
        self.known_questions: Hashes = np.zeros(0, dtype=np.uint64) if held_out_before is None else held_out_before
        """The questions that `auto` holds out now or held out before, also those of rows that were removed since."""
        self.sources: list[SourceLedger] = []
        self.notes: Counter[str] = Counter()
        self.unknown_characters: Counter[str] = Counter()
        self.secrets: Counter[str] = Counter()
        self.num_secret_rows = 0
        self.num_tokens = 0
        self.num_rows = 0
        """Rows of all files but the held-out one."""
        self.sampled = np.zeros(3, dtype=np.int64)
        """Documents, tokens and supervised tokens of the first `SAMPLE_ROWS` rows."""
        self._num_documents = 0
        self._is_auto = config.held_out == "auto"
        self._held_out_share = 0.0 if isinstance(config.held_out, str) else config.held_out
        self._clean = config.clean
        self._has_held_out_file = False
        self._open = ExitStack()
        self._files = {name: self._open.enter_context((folder / f"{name}.bin").open("wb")) for name in _COLUMNS}
        dropped = (folder / DROPPED).open("w", encoding="utf-8", errors="backslashreplace")
        self.first_dropped: dict[str, Any] = {}
        """The first line of `dropped.jsonl`."""
        self._lists: dict[str, TextIO] = {DROPPED: self._open.enter_context(dropped)}

    def begin_source(self, name: str, sha256: str, num_bytes: int, *, version: str = "") -> None:
        """Start a new source. The following blocks belong to it."""
        self.sources.append(SourceLedger(name, sha256, num_bytes, version=version))

    def add(
        self,
        block: TokenizedBlock,
        numbers: Sequence[int],
        *,
        is_held_out: bool = False,
        stays_held_out: Bools | None = None,
    ) -> None:
        """Append a block; set `is_held_out` for rows of a held-out file, which must be added before all others.

        `stays_held_out` marks the documents that a prepared corpus holds out.
        """
        if len(numbers) != len(block.status):
            raise RuntimeError(f"a block has {len(numbers)} rows, but its tokenized block has {len(block.status)}")
        self._has_held_out_file |= is_held_out
        ledger = self.sources[-1]
        ledger.rows += len(block.status)
        ledger.formats.update(block.formats)
        ledger.unused.update(block.unused)
        self.notes.update(block.notes)
        self.unknown_characters.update(block.unknown_characters)
        for index, kinds in block.secrets:
            self.num_secret_rows += 1
            self.secrets.update(kinds)
            if self.num_secret_rows <= _MAX_SECRET_ROWS:
                self._list(SECRETS, {"source": ledger.name, "row": numbers[index], "kinds": kinds})
        for index, column, answers in block.answers:
            line = {"source": ledger.name, "row": numbers[index], "column": column, "answers": answers}
            self._list(ANSWERS, line)
        rows = np.asarray(numbers, dtype=np.int64)
        is_dropped = block.status > 0
        codes: list[int] = block.status[is_dropped].tolist()
        for row, code, detail in zip(rows[is_dropped].tolist(), codes, block.details, strict=True):
            self.drop(ledger, row, block.reasons[code - 1], detail)
        rows, whole, question, turns = rows[~is_dropped], *map(_as_numbers, (block.whole, block.question, block.turns))
        supervised = block.supervised.astype(bool)
        starts = np.cumsum(block.lengths) - block.lengths
        supervised[starts] = False  # a first token cannot be predicted from earlier ones
        num_supervised = np.add.reduceat(supervised, starts, dtype=np.int64) if len(rows) else np.zeros(0, np.int64)
        keep = num_supervised > 0
        if not is_held_out:
            first = keep & (np.flatnonzero(~is_dropped) < SAMPLE_ROWS - self.num_rows)
            self.sampled += (first.sum(), block.lengths[first].sum(), num_supervised[first].sum())
            self.num_rows += len(block.status)
        for row in rows[~keep].tolist():
            self.drop(ledger, row, "nothing_to_learn")
        held_out = np.full(len(rows), is_held_out)
        if not is_held_out and self._held_out_share:
            held_out = question[:, 0] / _TWO_64 < self._held_out_share
        if stays_held_out is not None:
            held_out |= stays_held_out
            if self._is_auto:
                self.known_questions = np.union1d(self.known_questions, question[stays_held_out, 0])
        ledger.documents += int((keep & ~held_out).sum())
        ledger.held_out += int((keep & held_out).sum())
        keep_token = np.repeat(keep, block.lengths)
        lengths = block.lengths[keep]
        columns = {
            "tokens": block.tokens[keep_token],
            "supervised": supervised[keep_token],
            "lengths": lengths,
            "begins": self.num_tokens + np.cumsum(lengths) - lengths,
            "boundary": block.boundary[keep],
            "source": np.full(len(lengths), len(self.sources) - 1),
            "row": rows[keep],
            "is_held_out": held_out[keep],
            "whole": whole[keep],
            "question": question[keep],
            "turn": turns[keep[block.turn_of], 0],
            "turn_of": (self._num_documents + np.cumsum(keep) - 1)[block.turn_of][keep[block.turn_of]],
        }
        for name, values in columns.items():
            self._write(name, values)
        self.num_tokens += int(lengths.sum())
        self._num_documents += len(lengths)

    def _list(self, name: str, line: dict[str, Any]) -> None:
        """Write a line to a list of rows, which is created with its first line."""
        if name not in self._lists:
            file = (self.folder / "corpus" / name).open("w", encoding="utf-8", errors="backslashreplace")
            self._lists[name] = self._open.enter_context(file)
        self._lists[name].write(json.dumps(line, ensure_ascii=False) + "\n")

    def drop(self, ledger: SourceLedger, row: int, reason: str, detail: str = "") -> None:
        """Count a dropped row and write it to `dropped.jsonl`."""
        ledger.dropped[reason] += 1
        ledger.examples.setdefault(reason, (row, detail))
        line = {"source": ledger.name, "row": row, "reason": reason} | ({"detail": detail} if detail else {})
        self.first_dropped = self.first_dropped or line
        self._list(DROPPED, line)

    def drop_document(self, index: int, reason: str, detail: str = "") -> None:
        """Drop a document that has already been counted."""
        documents = self.documents
        ledger = self.sources[int(documents.source[index])]
        if documents.is_held_out[index]:
            ledger.held_out -= 1
        else:
            ledger.documents -= 1
        documents.is_dropped[index] = True
        self.drop(ledger, int(documents.row[index]), reason, detail)

    @property
    def dropped(self) -> Counter[str]:
        """The number of dropped rows of all sources by reason."""
        return sum((source.dropped for source in self.sources), Counter[str]())

    def place(self, index: int) -> tuple[str, int]:
        """Return the source and the row of a document."""
        return self.sources[int(self.documents.source[index])].name, int(self.documents.row[index])

    def _write(self, name: str, values: npt.NDArray[Any]) -> None:
        # `tofile` is not used: it reports a full disk as "1000 requested and 0 written", without the cause.
        self._files[name].write(np.ascontiguousarray(values, dtype=_COLUMNS[name]).data)

    def finish(self) -> Documents:
        """Memory-map the staging files, drop duplicates and return all documents. `drop_document` still works."""
        for file in self._files.values():
            file.close()
        columns: dict[str, Any] = {name: self._map(name) for name in _COLUMNS}
        is_dropped, is_selected = np.zeros((2, len(columns["lengths"])), dtype=bool)
        documents = self.documents = Documents(**columns, is_dropped=is_dropped, is_selected=is_selected)
        drops_answers = self._clean.answer_in_held_out == "drop"
        # Held-out rows are chosen by their question, so that equal questions are never in both splits.
        asked = documents.question[:, 0]
        if drops_answers and self._has_held_out_file:
            is_asked = np.isin(asked, asked[documents.is_held_out]) & ~documents.is_held_out
            for index in np.flatnonzero(is_asked).tolist():
                self.drop_document(index, "answer_in_held_out")
        if self._clean.exact_duplicate == "drop":
            candidates = np.flatnonzero(~documents.is_dropped)
            for index in candidates[find_repeats(documents.whole[candidates])].tolist():
                self.drop_document(index, "exact_duplicate")
        questions = np.unique(asked[~documents.is_dropped])
        self.num_questions = len(questions)
        if self._is_auto:
            chosen = choose_auto(questions, self.known_questions)
            self.known_questions = np.union1d(self.known_questions, chosen)
            self._hold_out(chosen)
        elif self._held_out_share and not self._has_held_out_file:
            num_rows = int(documents.is_tested.sum())
            if (
                not _MIN_HELD_OUT <= num_rows <= int((~documents.is_dropped).sum()) // 2
            ):  # chance may choose none or all of a few rows
                self._hold_out(choose_share(questions, self._held_out_share))
        if drops_answers:
            self._drop_held_out_turns()
        return documents

    def _drop_held_out_turns(self) -> None:
        """Drop training documents in which a turn is a held-out question. Phrases that are in many rows are counted."""
        documents = self.documents
        held_out = documents.question[:, 0][documents.is_tested]
        is_asked = np.isin(documents.turn, held_out) & documents.is_trained[documents.turn_of]
        turn, turn_of = documents.turn[is_asked], documents.turn_of[is_asked]
        asked, num_rows = np.unique(turn, return_counts=True)
        num_used = int((~documents.is_dropped).sum())
        limit = min(max(_PHRASE_ROWS, _PHRASE_SHARE * num_used), _MOST * num_used)
        dropped = np.unique(turn_of[~np.isin(turn, asked[num_rows > limit])])
        for index in dropped.tolist():
            self.drop_document(index, "answer_in_held_out", "one of its turns is a held-out question")
        if num_kept := len(np.setdiff1d(turn_of, dropped)):
            self.notes["held_out_phrases"] = num_kept

    def take_selection(self, setting: float | str) -> Chosen[int]:
        """Take the selection slice out of the training rows, and return its size. No row may be dropped afterwards."""
        documents = self.documents
        trained, asked = np.flatnonzero(documents.is_trained), documents.question[:, 0]
        wanted = num_selected(setting, len(trained))
        pool = trained[np.argsort(asked[trained], kind="stable")[-_POOL:]]
        if not wanted.value or not len(pool):
            return wanted
        replies = np.asarray([self._reply_hash(index) for index in pool.tolist()], dtype=np.uint64)
        chosen = pool[choose_selected(asked[pool], replies, wanted.value)]
        documents.is_selected = documents.is_trained & np.isin(asked, asked[chosen])
        for index, number in enumerate(np.bincount(documents.source[documents.is_selected], minlength=1).tolist()):
            self.sources[index].selected += number
            self.sources[index].documents -= number
        return Chosen(int(documents.is_selected.sum()), because=wanted.because)

    def _reply_hash(self, index: int) -> int:
        """Return a hash of the supervised tokens of a document."""
        begin = int(self.documents.begins[index])
        end = begin + int(self.documents.lengths[index])
        supervised = self.documents.tokens[begin:end][self.documents.supervised[begin:end]]
        return int.from_bytes(hashlib.blake2b(supervised.tobytes(), digest_size=8).digest(), "little")

    def _hold_out(self, questions: Hashes) -> None:
        """Hold out the rows with these questions and no others, and count them in the ledger."""
        documents = self.documents
        is_held_out = np.isin(documents.question[:, 0], questions)
        for index in np.flatnonzero(~documents.is_dropped & (is_held_out != documents.is_held_out)).tolist():
            ledger, change = self.sources[int(documents.source[index])], 1 if is_held_out[index] else -1
            ledger.held_out += change
            ledger.documents -= change
        documents.is_held_out = is_held_out

    def require_known_characters(self, normalizer: str) -> None:
        """Raise UserError if too many tokens stand for characters that the vocabulary lacks."""
        num_unknown, num_tokens = self.notes["unknown_tokens"], max(1, self.num_tokens)
        limit = self._clean.max_unknown_share
        if num_unknown > limit * num_tokens:
            raise UserError(
                f"{count(num_unknown)} of {count(num_tokens, 'token')} are unknown to the tokenizer "
                f"({percent(num_unknown / num_tokens)}; {count(self.notes['unknown_supervised_tokens'])} are "
                "supervised): the model would learn to answer `<unk>`",
                where=unknown_remark(self.unknown_characters, normalizer),
                fix="use the model's own tokenizer or one with byte fallback, replace the characters with `map`, or "
                f"raise `data.clean.max_unknown_share` (now {limit:g})",
            )

    def _map(self, name: str) -> npt.NDArray[Any]:
        path = self.folder / f"{name}.bin"
        shape = (-1, 2) if name in _DIGESTS else (-1,)
        if not path.stat().st_size:
            return np.zeros(0, dtype=_COLUMNS[name]).reshape(shape)
        # Use a plain array over the same pages, because slicing a `memmap` object is slow.
        return np.asarray(np.memmap(path, dtype=_COLUMNS[name], mode="r")).reshape(shape)

    def close(self) -> None:
        """Close every open file, including the list of dropped rows."""
        self._open.close()


def find_repeats(digests: Digests) -> Ints:
    """Return the indices of digests that equal an earlier one, in ascending order."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: equal digests keep their order
    is_repeat = np.ones(max(len(order) - 1, 0), dtype=bool)
    for half in (0, 1):  # one half at a time takes 16 bytes per row instead of 48
        in_order = digests[:, half][order]
        is_repeat &= in_order[1:] == in_order[:-1]
    return np.sort(order[1:][is_repeat])


def _as_numbers(digests: Bytes) -> Digests:
    return np.ascontiguousarray(digests).view("<u8").reshape(-1, 2)


BYTES_PER_TOKEN = 8
"""Bytes per token in a shard: an id and a label of 4 bytes each."""
_SOURCE_BYTES_PER_TOKEN = 3
"""Bytes of a row file per token, until the first tokens are counted: a low estimate, as English chat has about four."""
_CACHED_BYTES = 5
"""Bytes per token in a cached block: the id and some overhead."""
_STAGED_BYTES = 5
"""Bytes per token in the staging files: the id and the mask."""
_REST_BYTES = 8 << 20
"""Bytes of all other files: tokenizer, index, data card."""


@dataclass
class SpaceEstimate:
    """An estimate of the disk space of a build, based on the data read so far."""

    source_bytes: int
    read_bytes: int = 0
    tokens: int = 0
    is_read: bool = False

    def shard_bytes(self) -> int:
        """Return the size of all shards. It is exact after all tokens have been counted."""
        return self.tokens * BYTES_PER_TOKEN

    def bytes_for_retry(self) -> int:
        """Estimate the bytes that a retry would write: missing cached blocks, staging files, shards and other files."""
        total = float(self.tokens)
        if not self.is_read:
            share_read = self.read_bytes / self.source_bytes if self.source_bytes else 1.0
            guess = self.source_bytes / _SOURCE_BYTES_PER_TOKEN
            total = max(self.tokens / share_read if self.tokens else guess, total)
        cached = (total - self.tokens) * _CACHED_BYTES
        return int(cached + total * (_STAGED_BYTES + BYTES_PER_TOKEN)) + _REST_BYTES
