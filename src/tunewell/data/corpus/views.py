"""Views of a corpus for people: documents token by token, a sample of them, and near-duplicate pairs."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tunewell.core.plot import BarChart, BarRow
from tunewell.core.units import count, percent
from tunewell.data.batches import spread_evenly
from tunewell.data.corpus.reader import Corpus, Document, Split
from tunewell.data.tokenizers.load import LoadedTokenizer, joined_texts, load_tokenizer, token_texts
from tunewell.records.manifest import DroppedRow, NearPair

_MAX_NAMED_SOURCES = 40
_NUM_EXTREMES = 2
_TOKENS_BEFORE, _TOKENS_AFTER = 8, 16
_KINDS = ("near_held_out", "near_duplicate")


@dataclass(frozen=True)
class TokenView:
    """One token: its id, its text, and whether it is supervised."""

    id: int
    text: str
    is_supervised: bool


@dataclass(frozen=True)
class DocumentView:
    """One document, token by token."""

    index: int
    source: str
    row: int
    tokens: list[TokenView]
    is_held_out: bool = False

    @property
    def num_supervised(self) -> int:
        return sum(token.is_supervised for token in self.tokens)

    @property
    def text(self) -> str:
        """The text of all tokens."""
        return "".join(token.text for token in self.tokens)


@dataclass(frozen=True)
class PairView:
    """Two near-duplicate rows."""

    pair: NearPair
    documents: tuple[DocumentView, DocumentView] | None
    """None if the row was dropped."""

    def excerpts(self) -> tuple[str, str] | None:
        """Return the texts around the first difference."""
        if self.documents is None:
            return None
        first, second = (view.tokens for view in self.documents)
        start = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a.id != b.id), 0)
        part = slice(max(start - _TOKENS_BEFORE, 0), start + _TOKENS_AFTER)
        return "".join(token.text for token in first[part]), "".join(token.text for token in second[part])


class CorpusViews:
    """Views of one corpus. The tokenizer is loaded for the first document."""

    def __init__(self, corpus: Corpus, *, is_joined: bool = False) -> None:
        """If `is_joined`, a character that several tokens share is the text of the first; else bytes are shown."""
        self.corpus, self.is_joined = corpus, is_joined

    @cached_property
    def tokenizer(self) -> LoadedTokenizer:
        return load_tokenizer(self.corpus.path / "tokenizer")

    def document(self, index: int, *, is_held_out: bool = False) -> DocumentView:
        """Return a document of the training split or of the held-out split."""
        return self._view(self._split(is_held_out), index)

    def _view(self, split: Split, index: int) -> DocumentView:
        document = split[index]
        texts = (joined_texts if self.is_joined else token_texts)(self.tokenizer, document.input_ids)
        tokens = [
            TokenView(token, text, label != -100)
            for token, text, label in zip(document.input_ids, texts, document.labels, strict=True)
        ]
        return DocumentView(index, document.source, document.row, tokens, split is self.corpus.held_out)

    def replies(self, num_documents: int, *, is_held_out: bool = False) -> list[tuple[str, str, Document]]:
        """Return the prompt and the first supervised reply of documents that are spread evenly over a split."""
        split, found = self._split(is_held_out), list[tuple[str, str, Document]]()
        for index in spread_evenly(len(split), num_documents).tolist():
            document = split[index]
            supervised = [label != -100 for label in document.labels]
            begin = supervised.index(True) if True in supervised else 0
            end = supervised.index(False, begin) if False in supervised[begin:] else len(supervised)
            if begin > 1:
                parts = (document.input_ids[:begin], document.input_ids[begin:end])
                prompt, reply = (self.tokenizer.backend.decode(ids, skip_special_tokens=True) for ids in parts)
                found.append((prompt, reply.strip(), document))
        return found

    def find(self, source: str, row: int) -> DocumentView | None:
        """Return the first document of a row, or None if the row was dropped."""
        for split in (self.corpus, self.corpus.selection, self.corpus.held_out):
            if (index := split.find(source, row)) is not None:
                return self._view(split, index)
        return None

    def pairs(self, num_shown: int) -> list[PairView]:
        """Return the most similar pairs of each kind."""
        by_similarity = sorted(self.corpus.near_pairs(), key=lambda pair: -pair.similarity)
        shown = [pair for kind in _KINDS for pair in [p for p in by_similarity if p.kind == kind][:num_shown]]
        views: list[PairView] = []
        for pair in shown:
            first, second = self.find(pair.source, pair.row), self.find(pair.similar_source, pair.similar_row)
            views.append(PairView(pair, (first, second) if first and second else None))
        return views

    def length_chart(self) -> BarChart:
        """Return the lengths of the training rows; each bar is divided like the tokens of its rows."""
        manifest, index = self.corpus.manifest, self.corpus.index
        # A row that was split into pieces, or repeated, is one row. A piece begins with a token of the one before.
        _, row = np.unique(index["source"].astype(np.int64) << 40 | index["row"], return_inverse=True)
        is_later = index["piece_start"] > 0
        copies = np.maximum(np.bincount(row, ~is_later), 1)
        lengths, supervised = (
            np.bincount(row, tokens) / copies for tokens in (index["length"] - is_later, index["supervised"])
        )
        bars, rows = manifest.lengths.histogram, list[BarRow]()
        for start, end, number in bars:
            is_inside = (lengths >= start) & (lengths < end)
            share = float(supervised[is_inside].sum() / max(1, lengths[is_inside].sum()))
            shown = percent(share, 0) if number else "-"
            parts = (number * share, number * (1 - share))
            rows.append(BarRow(f"{count(start)} to {count(end - 1)}", (count(number), shown), parts))
        length = manifest.packing.context_length
        at = sum(start < length for start, _, _ in bars)
        rows.insert(at, BarRow(count(length), ("", ""), text="sequence length"))
        most = max((number for _, _, number in bars), default=1)
        return BarChart("tokens per row", ("rows", "trained on"), rows, most, {0: "trained on", 2: "context"})

    def dropped(self, num_rows: int) -> dict[str, list[DroppedRow]]:
        """Return the reasons for dropped rows, the most frequent first, with the first rows of each."""
        counts = self.corpus.manifest.dropped
        found = {reason: list[DroppedRow]() for reason in sorted(counts, key=lambda reason: (-counts[reason], reason))}
        left = sum(min(number, num_rows) for number in counts.values())
        rows = self.corpus.dropped_rows()
        while left and (row := next(rows, None)) is not None:
            if len(found[row.reason]) < num_rows:
                found[row.reason].append(row)
                left -= 1
        return found

    def sample(self, num_documents: int, *, is_held_out: bool = False) -> list[int]:
        """Return documents in the order of their rows: evenly spaced ones, the shortest, the longest, each source."""
        split = self._split(is_held_out)
        if len(split) <= num_documents:
            return list(range(len(split)))
        order = np.lexsort((split.index["row"], split.index["source"]))
        by_length = np.argsort(split.index["length"], kind="stable")
        firsts = np.unique(split.index["source"][order], return_index=True)[1][:_MAX_NAMED_SOURCES]
        named = np.concatenate([by_length[-_NUM_EXTREMES:], by_length[:_NUM_EXTREMES], order[firsts]])[:num_documents]
        spaced = order[np.linspace(0, len(order) - 1, num_documents - len(named)).astype(np.int64)]
        return order[np.isin(order, [*named, *spaced])].tolist()

    def _split(self, is_held_out: bool) -> Split:
        return self.corpus.held_out if is_held_out else self.corpus
