"""The segments of a document (fixed token ids or text to encode), and the computation of its loss mask with numpy."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from tunewell.core.arrays import Bools, Ints
from tunewell.data.masking.masker import MaskPlan, Piece
from tunewell.data.masking.placeholders import NO_TRIM, Trim
from tunewell.data.tokenizers.load import AddedTokenInfo, LoadedTokenizer

_ALL, _FIXED = 1 << 40, -1
# White space as the `tokenizers` library defines it; Python's definition has four more control characters.
_WHITE_SPACE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))

Span = tuple[int, int]


class Position(NamedTuple):
    """Where a text is in its document. Tokenizers may treat the ends of a text differently."""

    is_first: bool
    is_last: bool
    is_continued: bool = False
    """Whether the text continues a header, without a marker between them. It then gets no dummy space."""

    @property
    def of_prompt(self) -> "Position":
        """The position of the header of a text, as a prompt ends with it."""
        return self._replace(is_last=True)

    @property
    def of_reply(self) -> "Position":
        """The position of the reply in a text."""
        return Position(False, self.is_last, is_continued=True)


@dataclass(slots=True)
class FixedTokens:
    """Token ids that are the same in all rows of one shape."""

    ids: list[int]
    is_supervised: bool


@dataclass(slots=True)
class TextSegment:
    """Text between two markers, with slots for message texts. An adjacent marker can strip its white space."""

    pieces: Sequence[Piece]
    trims: Sequence[Trim]
    position: Position
    strip_left: bool = False
    strip_right: bool = False

    def fill(self, texts: Sequence[str]) -> tuple[str, list[Span], list[int]]:
        """Fill in message texts; return the text, its supervised spans and the starts of its replies, in characters."""
        parts: list[str] = []
        spans: list[Span] = []
        cuts: list[int] = []
        start = 0
        for piece in self.pieces:
            part = piece.text if piece.slot < 0 else self.trims[piece.slot](texts[piece.slot])
            parts.append(part)
            if piece.starts_reply:
                cuts.append(start)
            end = start + len(part)
            if piece.is_supervised and part:
                if spans and spans[-1][1] == start:
                    spans[-1] = (spans[-1][0], end)
                else:
                    spans.append((start, end))
            start = end
        text = "".join(parts)
        if self.strip_left or self.strip_right:
            bare = text.lstrip(_WHITE_SPACE) if self.strip_left else text
            lost = len(text) - len(bare)
            text = bare.rstrip(_WHITE_SPACE) if self.strip_right else bare
            moved = [(max(0, a - lost), min(b - lost, len(text))) for a, b in spans]
            spans, cuts = [(a, b) for a, b in moved if b > a], [cut - lost for cut in cuts]
        return text, spans, [cut for cut in cuts if 0 < cut < len(text)] if cuts else cuts


@dataclass(slots=True)
class TextToEncode:
    """A text to encode, with its supervised spans and the starts of its replies in characters."""

    index: int
    """The index of the segment in the batch."""
    text: str
    spans: list[Span]
    cuts: list[int]
    position: Position

    def part(self, start: int, end: int, cuts: list[int], position: Position) -> "TextToEncode":
        """Return a part of this text with its supervised spans."""
        spans = [(max(a, start) - start, min(b, end) - start) for a, b in self.spans if a < end and start < b]
        return TextToEncode(self.index, self.text[start:end], spans, cuts, position)


class EncodingPlan:
    """The segments that documents of one shape share: fixed ids, joined if equally supervised, and text with slots."""

    def __init__(self, items: Iterable[FixedTokens | TextSegment], num_supervised_markers: int) -> None:
        self.ids: list[list[int]] = []
        self.edges: list[tuple[int, int, int]] = []
        self.text_segments: list[tuple[int, TextSegment]] = []
        self.num_supervised_markers = num_supervised_markers
        for item in items:
            if isinstance(item, TextSegment):
                self.text_segments.append((len(self.ids), item))
                self.ids.append([])
                self.edges.append((0, 0, 0))
                continue
            edges = (0, _ALL if item.is_supervised else 0, _FIXED)
            if self.edges[-1:] == [edges]:
                self.ids[-1] = [*self.ids[-1], *item.ids]
            else:
                self.ids.append(item.ids)
                self.edges.append(edges)


class SegmentBatch:
    """The segments of several documents. `ends` contains the index after the last segment of each document."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = []
        self.edges: list[tuple[int, int, int]] = []
        """For each segment: start and end of its supervised bytes, and its size in bytes (-1 for fixed ids)."""
        self.texts: dict[int, TextToEncode] = {}
        """The texts by the index of their segment."""
        self.ends: list[int] = []
        self.num_supervised_markers: list[int] = []

    def add(self, plan: EncodingPlan, texts: Sequence[str]) -> None:
        """Add a document with these message texts."""
        begin = len(self.ids)
        self.ids += plan.ids
        self.edges += plan.edges
        for offset, segment in plan.text_segments:
            text, spans, cuts = segment.fill(texts)
            if text:
                self.edges[begin + offset] = _byte_span(text, spans)
                self.texts[begin + offset] = TextToEncode(begin + offset, text, spans, cuts, segment.position)
        self.ends.append(len(self.ids))
        self.num_supervised_markers.append(plan.num_supervised_markers)


def _byte_span(text: str, spans: list[Span]) -> tuple[int, int, int]:
    """Return the first supervised span in UTF-8 bytes, and the size of the text."""
    a, b = spans[0] if spans else (0, 0)
    if text.isascii():
        return a, b, len(text)
    begin, end, size = (len(text[:place].encode()) for place in (a, b, len(text)))
    return begin, end, size


class SegmentTable:
    """The tokens of a batch as flat arrays, for vector operations over all tokens."""

    def __init__(self, batch: SegmentBatch) -> None:
        self.lengths = np.fromiter(map(len, batch.ids), dtype=np.int64, count=len(batch.ids))
        self.bounds = np.append(0, np.cumsum(self.lengths))
        self.tokens = np.fromiter(chain.from_iterable(batch.ids), dtype=np.uint32, count=int(self.bounds[-1]))
        edges = np.fromiter(chain.from_iterable(batch.edges), dtype=np.int64, count=3 * len(batch.edges))
        self._a, self._b, self._size = edges[0::3], edges[1::3], edges[2::3]

    def mask(self, byte_lengths: Ints | None) -> tuple[Bools, Bools, list[int]]:
        """Return masks of supervised tokens and of tokens that cross an edge, and the texts with uncertain masks."""
        sizes = np.ones(len(self.tokens), dtype=np.int64) if byte_lengths is None else byte_lengths[self.tokens]
        ends = np.append(0, np.cumsum(sizes))
        base = ends[self.bounds[:-1]]
        a, b = np.repeat(base + self._a, self.lengths), np.repeat(base + self._b, self.lengths)
        start, end = ends[:-1], ends[1:]
        supervised = (start >= a) & (end <= b)
        boundary = ((start < a) & (end > a)) | ((start < b) & (end > b))
        boundary &= b > a
        # The sizes of the tokens do not add up to the size of the text.
        unsure = (self._size != _FIXED) & (self._b > self._a) & (ends[self.bounds[1:]] - base != self._size)
        return supervised, boundary, np.flatnonzero(unsure).tolist()

    def control_leaks(self, is_control: Bools) -> list[int]:
        """Return the texts with control ids, which may only come from a marker."""
        found = np.flatnonzero(is_control[self.tokens])
        index = np.unique(np.searchsorted(self.bounds, found, side="right") - 1)
        return index[self._size[index] != _FIXED].tolist()


def compile_plan(
    plan: MaskPlan, added: Mapping[str, AddedTokenInfo], encode_once: Callable[[TextSegment], list[FixedTokens] | None]
) -> EncodingPlan:
    """Split a plan at its markers. `encode_once` returns fixed ids for a segment without message text, or None."""
    items: list[FixedTokens | TextSegment] = []
    run: list[Piece] = []
    strips_left = False
    for piece in [*plan.pieces, None]:
        if piece is not None and not piece.is_marker:
            run.append(piece)
            continue
        marker = added[piece.text] if piece is not None else None
        if run:
            segment = TextSegment(
                run,
                plan.trims,
                position=Position(not items, marker is None),
                strip_left=strips_left,
                strip_right=marker is not None and marker.lstrip,
            )
            has_messages = any(part.slot >= 0 for part in run)
            ids = None if has_messages else encode_once(segment)
            items += [segment] if ids is None else ids
            run = []
        if piece is not None and marker is not None:
            items.append(FixedTokens([marker.id], piece.is_supervised))
            strips_left = marker.rstrip
    return EncodingPlan(items, sum(piece.is_marker and piece.is_supervised for piece in plan.pieces))


def compile_plain_text(tokenizer: LoadedTokenizer) -> EncodingPlan:
    """Return the encoding plan of plain text: the bos token, the text and the eos token."""
    special, added = tokenizer.special_tokens, tokenizer.added
    bos, eos = special.get("bos_token"), special.get("eos_token")
    begin = [added[bos].id] if tokenizer.adds_bos and bos in added else []
    end = [added[eos].id] if eos in added else []
    segment = TextSegment([Piece("", slot=0, is_supervised=True)], [NO_TRIM], Position(not begin, not end))
    return EncodingPlan([FixedTokens(begin, True), segment, FixedTokens(end, True)], len(end))
