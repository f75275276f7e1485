"""Encode planned conversations into token ids and a loss mask, at the speed of the tokenizer.

A rendered text is split at the markers of the template, and each marker becomes one id. The text between them is
encoded as plain text, so a marker in the text of a message stays text. Text that all rows of a shape share is encoded
only once.

A reply starts with a new token, because it does so at inference, where the prompt ends with the header:

    header, as in a prompt         assistant\\n
    reply                                      Carlos<|im_end|>
    ids of the whole text          if they begin with the ids of the header, they are used
                                   else the ids of the header, then those of the reply alone
"""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, pairwise, takewhile
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding

from tunewell.core.arrays import Bools, Ints, TokenIds
from tunewell.core.errors import UserError
from tunewell.data.encoding.segments import (
    FixedTokens,
    Position,
    SegmentBatch,
    SegmentTable,
    Span,
    TextSegment,
    TextToEncode,
    compile_plain_text,
    compile_plan,
)
from tunewell.data.encoding.text_backends import TextBackends
from tunewell.data.masking.masker import MaskPlan
from tunewell.data.masking.turns import marker_pattern
from tunewell.data.rows.conversation import Rejected
from tunewell.data.tokenizers.load import LoadedTokenizer
from tunewell.machine.facts import num_cores

_ENCODE_BATCH = 2048
# The tokenizer takes about eight times as long as the word table, but it uses all cores.
_MAX_CORES_FOR_WORD_TABLE = 8
# Texts that tokenizers treat differently next to a marker.
_CHECK_TEXTS = ("x", " x", "  x  ", "\nx\n", "x\n\n", "\t x. ", "é 漢 \U0001f642")
_CHECK_PLANS = 4
_MAX_HEADERS = 4096
_MAX_UNKNOWN = 50
_MAX_HEADER_CHARS = 200

Tokens = tuple[list[int], list[Span]]
"""Token ids with their positions in the text."""

Mask = tuple[list[int], list[bool], list[bool]]
"""Token ids, with flags for supervised tokens and for tokens that cross the edge of a supervised span."""


@dataclass(slots=True)
class EncodedDocuments:
    """The token ids of documents, concatenated, with the loss mask and the length of each document."""

    tokens: TokenIds
    supervised: Bools
    lengths: Ints
    boundary: Ints
    """For each document, the number of boundary tokens: unsupervised tokens with both template and reply text."""
    failed: dict[int, Rejected]
    """Reasons for documents that cannot be used, by index. None of their tokens is supervised."""
    is_split: Bools
    """For each document, whether a program that encodes the whole text at once gets other ids."""
    has_markers: Bools
    """For each document, whether its texts contain a marker, which is encoded as plain text."""
    is_unknown: Bools
    """For each token, whether it stands for characters that the vocabulary lacks."""
    unknown_characters: Counter[str] = field(default_factory=Counter[str])
    """These characters, from the first documents that contain some."""


@dataclass(slots=True)
class PlannedDocument:
    """One document to encode: a plan with its message texts, or plain text."""

    plan: MaskPlan | None
    texts: list[str]


class Encoder:
    """An encoder for documents with one tokenizer. Only one thread may use it at a time."""

    def __init__(self, tokenizer: LoadedTokenizer, control_markers: Iterable[str] = ()) -> None:
        self.tokenizer = tokenizer
        self._backends = TextBackends(tokenizer.backend)
        self._word_table = self._backends.word_table if num_cores() <= _MAX_CORES_FOR_WORD_TABLE else None
        self._byte_lengths = None
        if tokenizer.byte_lengths is not None and (self._backends.keeps_text or self._backends.form):
            self._byte_lengths = np.asarray(tokenizer.byte_lengths, dtype=np.int64)
        control = set(tokenizer.control_ids)
        control |= {tokenizer.added[marker].id for marker in control_markers if marker in tokenizer.added}
        self._is_control = np.zeros(max(tokenizer.vocab_size, 1), dtype=bool)
        self._is_control[sorted(control)] = True
        markers = [text for text, facts in tokenizer.added.items() if facts.id in control]
        self._control_text = marker_pattern(markers)
        self._first_letters = sorted({text[:1] for text in markers})
        if self._backends.unknown_id is not None:
            # Text that is not in the vocabulary gets this id, so this id does not count as a marker.
            self._is_control[self._backends.unknown_id] = False
        self._plain_text = compile_plain_text(tokenizer)
        self._headers: dict[tuple[str, Position], Tokens] = {}

    def _encode_once(self, segment: TextSegment) -> list[FixedTokens] | None:
        text, spans, cuts = segment.fill(())
        [(ids, supervised, boundary)] = self._by_offsets([TextToEncode(0, text, spans, cuts)], segment.position)
        if any(boundary):
            return None  # fixed ids cannot contain boundary tokens, because these must be counted
        return [FixedTokens([token], is_supervised) for token, is_supervised in zip(ids, supervised, strict=True)]

    def encode(self, documents: Sequence[PlannedDocument]) -> EncodedDocuments:
        """Encode documents as one batch, with the threads of the tokenizer."""
        batch = self._gather(documents)
        by_offsets = self._encode_texts(batch)
        table = SegmentTable(batch)
        supervised, is_boundary, unsure = table.mask(self._byte_lengths)
        if unsure:
            missing = set(unsure) - by_offsets.keys()
            for position, texts in batch.texts.items():
                some = [text for text in texts if text.index in missing]
                by_offsets |= zip([text.index for text in some], self._by_offsets(some, position), strict=True)
        for index, (_, exact, edges) in by_offsets.items():
            start, end = table.bounds[index], table.bounds[index + 1]
            supervised[start:end], is_boundary[start:end] = exact, edges
        encoded = self._by_document(batch, table, supervised, is_boundary)
        if encoded.is_unknown.any():
            ends = np.cumsum(encoded.lengths)
            found: list[int] = np.unique(
                np.searchsorted(ends, np.flatnonzero(encoded.is_unknown), side="right")
            ).tolist()
            encoded.unknown_characters = self._unknown_characters([documents[at] for at in found[:_MAX_UNKNOWN]])
        return encoded

    def _unknown_characters(self, documents: Sequence[PlannedDocument]) -> Counter[str]:
        characters: Counter[str] = Counter()
        backend, unknown = self._backends[Position(False, False, True)], self._backends.unknown_id
        for document in documents:
            pieces = document.plan.pieces if document.plan else ()
            texts = [*document.texts, *(piece.text for piece in pieces if piece.text and not piece.is_marker)]
            for text, encoding in zip(texts, backend.encode_batch(texts, add_special_tokens=False), strict=True):
                for token, (x, y) in zip(encoding.ids, encoding.offsets, strict=True):
                    if token == unknown:
                        characters.update(text[x:y])
        return characters

    def _gather(self, documents: Sequence[PlannedDocument]) -> SegmentBatch:
        batch = SegmentBatch()
        for document in documents:
            plan = document.plan
            batch.has_markers.append(any(map(self._contains_marker, document.texts)))
            if plan is None:
                batch.add(self._plain_text, document.texts)
                continue
            if plan.compiled is None:
                plan.compiled = compile_plan(plan, self.tokenizer.added, self._encode_once)
            batch.add(plan.compiled, document.texts)
        return batch

    def _contains_marker(self, text: str) -> bool:
        # Searching for single characters first is much faster than the pattern.
        return any(first in text for first in self._first_letters) and self._control_text.search(text) is not None

    def _encode_texts(self, batch: SegmentBatch) -> dict[int, Mask]:
        """Fill in the ids of all texts; return the masks that byte lengths cannot determine."""
        masks: dict[int, Mask] = {}
        for position, texts in batch.texts.items():
            by_bytes = [text for text in texts if not text.spans or self._is_by_bytes(text)]
            known = {text.index for text in by_bytes}
            others = [text for text in texts if text.index not in known] if len(by_bytes) < len(texts) else []
            for start in range(0, len(by_bytes), _ENCODE_BATCH):
                others += self._encode_some(by_bytes[start : start + _ENCODE_BATCH], position, batch)
            for text, mask in zip(others, self._by_offsets(others, position, batch.split), strict=True):
                batch.ids[text.index], masks[text.index] = mask[0], mask
        return masks

    def _encode_some(self, texts: list[TextToEncode], position: Position, batch: SegmentBatch) -> list[TextToEncode]:
        """Fill in the ids of texts; return the texts in which a reply does not start with a new token."""
        for text, ids in zip(texts, self._ids_of([text.text for text in texts], position), strict=True):
            batch.ids[text.index] = ids
        with_reply = [text for text in texts if text.cuts]
        if not with_reply:
            return []
        prompt = Position(position.is_first, True, position.is_continued)
        headers = [text.text[: text.cuts[0]] for text in with_reply]
        distinct = list(dict.fromkeys(headers))
        ids_of = dict(zip(distinct, self._ids_of(distinct, prompt), strict=True))
        return [
            text
            for text, header in zip(with_reply, headers, strict=True)
            if len(text.cuts) > 1 or batch.ids[text.index][: len(ids_of[header])] != ids_of[header]
        ]

    def _ids_of(self, texts: list[str], position: Position) -> list[list[int]]:
        """Return the ids of texts, from the word table if it is faster than the threads of the tokenizer."""
        known: list[list[int] | None] = [None] * len(texts)
        if self._word_table is not None:
            ascii_texts = [index for index, text in enumerate(texts) if text.isascii()]
            for index, ids in zip(
                ascii_texts, self._word_table.encode([texts[index] for index in ascii_texts]), strict=True
            ):
                known[index] = ids
        others = [text for text, ids in zip(texts, known, strict=True) if ids is None]
        encodings = self._backends[position].encode_batch_fast(others, add_special_tokens=False) if others else []
        if len(encodings) != len(others):
            raise ValueError(f"the tokenizer returned {len(encodings)} of {len(others)} texts")
        encoded = iter(encodings)
        return [next(encoded).ids if ids is None else ids for ids in known]

    def _is_by_bytes(self, text: TextToEncode) -> bool:
        """Return True if byte lengths determine the position of each token in this text."""
        if self._byte_lengths is None or len(text.spans) > 1:
            return False
        form = self._backends.form
        return form is None or text.text.isascii() or unicodedata.is_normalized(form, text.text)

    def _by_offsets(
        self, texts: Sequence[TextToEncode], position: Position, split: set[int] | None = None
    ) -> list[Mask]:
        """Compute masks from the character offsets of the tokenizer. This is exact for any tokenizer, but slower.

        The indices of texts with other ids than those of the whole text are added to `split`.
        """
        masks: list[Mask] = []
        for start in range(0, len(texts), _ENCODE_BATCH):
            some = texts[start : start + _ENCODE_BATCH]
            encodings = self._backends[position].encode_batch([text.text for text in some], add_special_tokens=False)
            for text, encoding in zip(some, encodings, strict=True):
                ids, offsets = self._start_replies(text.text, text.cuts, position, encoding)
                masks.append((ids, *_mask_by_offsets(offsets, text.spans)))
                if split is not None and ids != encoding.ids:
                    split.add(text.index)
        return masks

    def _start_replies(self, text: str, cuts: Sequence[int], position: Position, encoding: Encoding) -> Tokens:
        """Return the tokens of a text in which every reply starts with a new token, after the tokens of its prompt."""
        ids, offsets = encoding.ids, _token_offsets(encoding, text)
        if not cuts:
            return ids, offsets
        *before, cut = cuts
        header_ids, header_offsets = self._header(text[:cut], before, position)
        num_header = len(header_ids)
        if ids[:num_header] == header_ids:
            # The first token of the reply can include white space that the tokenizer removes from the end of a prompt.
            return ids, [*header_offsets, *((max(x, cut), max(y, cut)) for x, y in offsets[num_header:])]
        reply = text[cut:]
        continued = Position(False, position.is_last, is_continued=True)
        [encoding] = self._backends[continued].encode_batch([reply], add_special_tokens=False)
        reply_offsets = [(x + cut, y + cut) for x, y in _token_offsets(encoding, reply)]
        return header_ids + encoding.ids, [*header_offsets, *reply_offsets]

    def _header(self, text: str, cuts: Sequence[int], position: Position) -> Tokens:
        """Return the tokens of the text before a reply, as a prompt ends with it."""
        prompt = Position(position.is_first, True, position.is_continued)
        if not cuts and (known := self._headers.get((text, prompt))):
            return known
        [encoding] = self._backends[prompt].encode_batch([text], add_special_tokens=False)
        header = self._start_replies(text, cuts, prompt, encoding)
        if not cuts and len(text) <= _MAX_HEADER_CHARS:
            if len(self._headers) >= _MAX_HEADERS:
                self._headers.clear()
            self._headers[text, prompt] = header
        return header

    def _by_document(
        self,
        batch: SegmentBatch,
        table: SegmentTable,
        supervised: Bools,
        is_boundary: Bools,
    ) -> EncodedDocuments:
        """Split the flat ids into documents. If the text of a document gives a control id, encode it again in parts."""
        stops = table.bounds[np.asarray(batch.ends, dtype=np.int64)]
        starts = np.concatenate([[0], stops[:-1]]).astype(np.int64)[: len(stops)]
        tokens, lengths = table.tokens, stops - starts
        failed: dict[int, Rejected] = {}
        is_split = np.zeros(len(stops), dtype=bool)
        is_split[np.searchsorted(np.asarray(batch.ends), sorted(batch.split), side="right")] = True
        has_markers = np.asarray(batch.has_markers, dtype=bool)
        is_split |= has_markers
        leaks = table.control_leaks(self._is_control)
        if len(leaks):
            leaky = set(np.searchsorted(stops, leaks, side="right").tolist())
            is_split[sorted(leaky)] = True
            columns: list[list[npt.NDArray[Any]]] = [[], [], []]
            for document, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
                arrays: tuple[npt.ArrayLike, ...] = (
                    tokens[start:stop],
                    supervised[start:stop],
                    is_boundary[start:stop],
                )
                if document in leaky:
                    try:
                        arrays = self._in_parts(batch, document)
                    except Rejected as rejected:
                        failed[document], arrays = rejected, ([], [], [])
                for column, values in zip(columns, arrays, strict=True):
                    column.append(np.asarray(values))
            tokens = np.concatenate(columns[0]).astype(np.uint32)
            supervised, is_boundary = (np.concatenate(column).astype(bool) for column in columns[1:])
            lengths = np.asarray([len(part) for part in columns[0]], dtype=np.int64)
            starts = np.cumsum(lengths) - lengths
        full = lengths > 0
        supervised[starts[full]] = False
        boundary = np.zeros(len(lengths), dtype=np.int64)
        num_supervised = np.zeros(len(lengths), dtype=np.int64)
        if full.any():
            boundary[full] = np.add.reduceat(is_boundary, starts[full], dtype=np.int64)
            num_supervised[full] = np.add.reduceat(supervised, starts[full], dtype=np.int64)
        only_ends = (num_supervised > 0) & (num_supervised <= np.asarray(batch.num_supervised_markers, dtype=np.int64))
        for document in np.flatnonzero(only_ends).tolist():
            supervised[starts[document] : starts[document] + lengths[document]] = False
            failed[document] = Rejected("nothing_to_learn", "only the end marker would be supervised")
        unknown = self._backends.unknown_id
        is_unknown = np.zeros(len(tokens), dtype=bool) if unknown is None else tokens == unknown
        return EncodedDocuments(tokens, supervised, lengths, boundary, failed, is_split, has_markers, is_unknown)

    def _in_parts(self, batch: SegmentBatch, document: int) -> Mask:
        """Encode a document piece by piece, so that message text is never tokenized as a control token."""
        masks: list[Mask] = []
        begin, end = batch.ends[document - 1] if document else 0, batch.ends[document]
        texts = {
            text.index: (text, position)
            for position, some in batch.texts.items()
            for text in some
            if begin <= text.index < end
        }
        for index in range(begin, end):
            ids = batch.ids[index]
            fixed = ids, [batch.edges[index][1] > 0] * len(ids), [False] * len(ids)
            masks.append(self._apart(*texts[index]) if index in texts else fixed)
        return _join(masks)

    def _apart(self, text: TextToEncode, position: Position) -> Mask:
        """Encode a text that is split in the middle of each control token it contains."""
        [encoding] = self._backends[position].encode_batch([text.text], add_special_tokens=False)
        leaks = [
            (x, y) for token, (x, y) in zip(encoding.ids, encoding.offsets, strict=True) if self._is_control[token]
        ]
        if not leaks:
            ids, offsets = self._start_replies(text.text, text.cuts, position, encoding)
            return ids, *_mask_by_offsets(offsets, text.spans)
        if text.cuts:
            *before, cut = text.cuts
            header, reply = text.part(0, cut, before), text.part(cut, len(text.text), [])
            prompt = Position(position.is_first, True, position.is_continued)
            return _join([self._apart(header, prompt), self._apart(reply, Position(False, position.is_last, True))])
        if any(y - x < 2 for x, y in leaks):
            raise Rejected("bad_text", "the text contains a control token that this tokenizer cannot encode as text")
        cuts = sorted({0, len(text.text), *((x + y) // 2 for x, y in leaks)})
        parts: list[Mask] = []
        for a, b in pairwise(cuts):
            part_position = Position(position.is_first and a == 0, position.is_last and b == len(text.text), a > 0)
            parts.append(self._apart(text.part(a, b, []), part_position))
        return _join(parts)

    def check_segmentation(self, documents: Sequence[PlannedDocument]) -> None:
        """Raise UserError if splitting real rows and difficult texts at markers changes their ids."""
        plans = {id(document.plan): document for document in documents if document.plan is not None}
        for document in list(plans.values())[:_CHECK_PLANS]:
            for text in _CHECK_TEXTS:
                self._check_one(document.plan, [text] * len(document.texts))
        for document in documents:
            self._check_one(document.plan, document.texts)

    def _check_one(self, plan: MaskPlan | None, texts: list[str]) -> None:
        if plan is None:
            return
        text = plan.fill(texts)
        num_markers = sum(piece.is_marker for piece in plan.pieces)
        if len(self._control_text.findall(text)) != num_markers:
            return  # the row itself contains a control token
        whole = self.tokenizer.backend.encode(text, add_special_tokens=False).ids
        # Replies are not split off here: their ids may differ from those of the whole text.
        uncut = replace(plan, pieces=[replace(piece, starts_reply=False) for piece in plan.pieces], compiled=None)
        ours: list[int] = self.encode([PlannedDocument(uncut, texts)]).tokens.tolist()
        if whole != ours:
            at = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(whole, ours, strict=False))))
            raise UserError(
                "this tokenizer gives different ids when text is split at markers, so the loss mask would be wrong",
                where=f"token {at} of {text[:60]!r}...: {whole[at : at + 3]} whole, {ours[at : at + 3]} in parts",
                fix="use another template (`template.name`), or report this tokenizer",
            )


def _join(masks: list[Mask]) -> Mask:
    ids, supervised, edges = (list(chain.from_iterable(column)) for column in zip(*masks, strict=True))
    return ids, supervised, edges


def _mask_by_offsets(offsets: list[Span], spans: list[Span]) -> tuple[list[bool], list[bool]]:
    supervised = [any(a <= x and y <= b for a, b in spans) for x, y in offsets]
    edges = [any(x < a < y or x < b < y for a, b in spans) for x, y in offsets]
    return supervised, edges


def _token_offsets(encoding: Encoding, text: str) -> list[Span]:
    """Return the offsets of tokens. Unigram tokenizers return the offsets of a whole run of bytes for each byte."""
    exact: list[Span] = []
    for (x, y), run in groupby(zip(encoding.offsets, encoding.tokens, strict=True), key=itemgetter(0)):
        tokens = [token for _, token in run]
        spans = [(x, y)] * len(tokens)
        if y - x > 1 and len(tokens) > 1 and all(token.startswith("<0x") for token in tokens):
            by_byte = [(position, position + 1) for position in range(x, y) for _ in text[position].encode()]
            spans = by_byte if len(by_byte) == len(tokens) else spans
        exact += spans
    return exact
