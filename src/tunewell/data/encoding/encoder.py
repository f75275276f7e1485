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
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, groupby, islice, pairwise, takewhile
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np
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


class Mask(NamedTuple):
    """The token ids of a text and their masks."""

    ids: list[int]
    supervised: list[bool]
    is_boundary: list[bool]
    """Whether a token crosses the edge of a supervised span."""
    is_split: bool
    """Whether the text as a whole has other ids."""


@dataclass(slots=True)
class EncodedDocuments:
    """The token ids of documents, concatenated, with the loss mask and the length of each document."""

    tokens: TokenIds
    supervised: Bools
    lengths: Ints
    num_supervised: Ints
    """For each document, the number of supervised tokens."""
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
        self._header = lru_cache(_MAX_HEADERS)(self._tokens)

    def _encode_once(self, segment: TextSegment) -> list[FixedTokens] | None:
        [mask] = self._by_offsets([TextToEncode(0, *segment.fill(()), segment.position)]).values()
        if any(mask.is_boundary):
            return None  # fixed ids cannot contain boundary tokens, because these must be counted
        return [FixedTokens([token], flag) for token, flag in zip(mask.ids, mask.supervised, strict=True)]

    def encode(self, documents: Sequence[PlannedDocument]) -> EncodedDocuments:
        """Encode documents as one batch, with the threads of the tokenizer."""
        batch = SegmentBatch()
        for document in documents:
            plan = document.plan
            if plan is not None and plan.compiled is None:
                plan.compiled = compile_plan(plan, self.tokenizer.added, self._encode_once)
            batch.add(plan.compiled if plan is not None else self._plain_text, document.texts)
        masks = self._encode_texts(batch)
        table = SegmentTable(batch)
        failed: dict[int, Rejected] = {}
        if leaks := table.control_leaks(self._is_control):
            failed = self._encode_apart(batch, leaks, masks)
            table = SegmentTable(batch)
        supervised, is_boundary, unsure = table.mask(self._byte_lengths)
        masks |= self._by_offsets([batch.texts[index] for index in unsure if index not in masks])
        for index, mask in masks.items():
            start, end = table.bounds[index], table.bounds[index + 1]
            supervised[start:end], is_boundary[start:end] = mask.supervised, mask.is_boundary
        ends = np.asarray(batch.ends, dtype=np.int64)
        has_markers = [any(map(self._contains_marker, document.texts)) for document in documents]
        is_split = np.asarray(has_markers, dtype=bool)
        is_split[np.searchsorted(ends, [index for index, mask in masks.items() if mask.is_split], side="right")] = True
        stops = table.bounds[ends]
        lengths = np.diff(stops, prepend=0)
        supervised[(stops - lengths)[lengths > 0]] = False
        num_supervised = _count_by_document(supervised, stops)
        only_ends = (num_supervised > 0) & (num_supervised <= np.asarray(batch.num_supervised_markers))
        for document in np.flatnonzero(only_ends).tolist():
            failed.setdefault(document, Rejected("nothing_to_learn", "only the end marker would be supervised"))
        num_supervised[list(failed)] = 0
        supervised &= np.repeat(num_supervised > 0, lengths)
        unknown = self._backends.unknown_id
        is_unknown = np.zeros(len(table.tokens), dtype=bool) if unknown is None else table.tokens == unknown
        found: list[int] = np.unique(np.searchsorted(stops, np.flatnonzero(is_unknown), side="right")).tolist()
        return EncodedDocuments(
            tokens=table.tokens,
            supervised=supervised,
            lengths=lengths,
            num_supervised=num_supervised,
            boundary=_count_by_document(is_boundary, stops),
            failed=failed,
            is_split=is_split,
            has_markers=np.asarray(has_markers, dtype=bool),
            is_unknown=is_unknown,
            unknown_characters=self._unknown_characters([documents[at] for at in found[:_MAX_UNKNOWN]]),
        )

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

    def _contains_marker(self, text: str) -> bool:
        # Searching for single characters first is much faster than the pattern.
        return any(first in text for first in self._first_letters) and self._control_text.search(text) is not None

    def _encode_texts(self, batch: SegmentBatch) -> dict[int, Mask]:
        """Fill in the ids of all texts; return the masks that byte lengths cannot determine."""
        by_bytes: list[TextToEncode] = []
        others: list[TextToEncode] = []
        for text in batch.texts.values():
            (by_bytes if not text.spans or self._is_by_bytes(text) else others).append(text)
        for position, texts in _batches(by_bytes):
            others += self._encode_some(texts, position, batch)
        masks = self._by_offsets(others)
        for index, mask in masks.items():
            batch.ids[index] = mask.ids
        return masks

    def _encode_some(self, texts: list[TextToEncode], position: Position, batch: SegmentBatch) -> list[TextToEncode]:
        """Fill in the ids of texts; return the texts in which a reply does not start with a new token."""
        for text, ids in zip(texts, self._ids_of([text.text for text in texts], position), strict=True):
            batch.ids[text.index] = ids
        with_reply = [(text, text.text[: text.cuts[0]]) for text in texts if text.cuts]
        headers = list(dict.fromkeys(header for _, header in with_reply))
        ids_of = dict(zip(headers, self._ids_of(headers, position.of_prompt), strict=True))
        return [
            text
            for text, header in with_reply
            if len(text.cuts) > 1 or batch.ids[text.index][: len(ids_of[header])] != ids_of[header]
        ]

    def _ids_of(self, texts: list[str], position: Position) -> list[list[int]]:
        """Return the ids of texts, from the word table if it is faster than the threads of the tokenizer."""
        known = self._word_table.encode(texts) if self._word_table is not None else [None] * len(texts)
        others = [text for text, ids in zip(texts, known, strict=True) if ids is None]
        encodings = self._backends[position].encode_batch_fast(others, add_special_tokens=False) if others else []
        encoded = {text: encoding.ids for text, encoding in zip(others, encodings, strict=True)}
        return [encoded[text] if ids is None else ids for text, ids in zip(texts, known, strict=True)]

    def _is_by_bytes(self, text: TextToEncode) -> bool:
        """Return True if byte lengths determine the position of each token in this text."""
        if self._byte_lengths is None or len(text.spans) > 1:
            return False
        form = self._backends.form
        return form is None or text.text.isascii() or unicodedata.is_normalized(form, text.text)

    def _by_offsets(self, texts: Sequence[TextToEncode]) -> dict[int, Mask]:
        """Return masks by the character offsets of the tokenizer. They are exact for any tokenizer, but slower."""
        masks: dict[int, Mask] = {}
        for position, some in _batches(texts):
            encodings = self._backends[position].encode_batch([text.text for text in some], add_special_tokens=False)
            for text, encoding in zip(some, encodings, strict=True):
                ids, offsets = self._tokens(text.text, tuple(text.cuts), position, encoding)
                supervised = [any(a <= x and y <= b for a, b in text.spans) for x, y in offsets]
                edges = [any(x < a < y or x < b < y for a, b in text.spans) for x, y in offsets]
                masks[text.index] = Mask(ids, supervised, edges, ids != encoding.ids)
        return masks

    def _encode_one(self, text: str, position: Position) -> Encoding:
        [encoding] = self._backends[position].encode_batch([text], add_special_tokens=False)
        return encoding

    def _tokens(self, text: str, cuts: tuple[int, ...], position: Position, encoding: Encoding | None = None) -> Tokens:
        """Return the tokens of a text in which every reply starts with a new token, after the tokens of its prompt."""
        encoding = encoding or self._encode_one(text, position)
        ids, offsets = encoding.ids, _token_offsets(encoding, text)
        if not cuts:
            return ids, offsets
        *before, cut = cuts
        tokens_of = self._header if cut <= _MAX_HEADER_CHARS else self._tokens
        header_ids, header_offsets = tokens_of(text[:cut], tuple(before), position.of_prompt)
        num_header = len(header_ids)
        if ids[:num_header] == header_ids:
            # The first token of the reply can include white space that the tokenizer removes from the end of a prompt.
            return ids, [*header_offsets, *((max(x, cut), max(y, cut)) for x, y in offsets[num_header:])]
        reply_ids, reply_offsets = self._tokens(text[cut:], (), position.of_reply)
        return header_ids + reply_ids, [*header_offsets, *((x + cut, y + cut) for x, y in reply_offsets)]

    def _encode_apart(self, batch: SegmentBatch, leaks: list[int], masks: dict[int, Mask]) -> dict[int, Rejected]:
        """Encode texts with control ids in parts. Documents for which this is impossible are emptied and returned."""
        failed: dict[int, Rejected] = {}
        for index in leaks:
            try:
                masks[index] = self._apart(batch.texts[index])
                batch.ids[index] = masks[index].ids
            except Rejected as rejected:
                failed[bisect_right(batch.ends, index)] = rejected
        for document in failed:
            for index in range(batch.ends[document - 1] if document else 0, batch.ends[document]):
                batch.ids[index], batch.edges[index] = [], (0, 0, 0)
                masks.pop(index, None)
        return failed

    def _apart(self, text: TextToEncode) -> Mask:
        """Encode a text that is split in the middle of each control token it contains."""
        encoding = self._encode_one(text.text, text.position)
        leaks = [
            (x, y) for token, (x, y) in zip(encoding.ids, encoding.offsets, strict=True) if self._is_control[token]
        ]
        if not leaks:
            return self._by_offsets([text])[text.index]
        if text.cuts:
            *before, cut = text.cuts
            header = text.part(0, cut, before, text.position.of_prompt)
            parts = [header, text.part(cut, len(text.text), [], text.position.of_reply)]
        elif any(y - x < 2 for x, y in leaks):
            raise Rejected("bad_text", "the text contains a control token that this tokenizer cannot encode as text")
        else:
            is_first, is_last, _ = text.position
            size = len(text.text)
            edges = sorted({0, size, *((x + y) // 2 for x, y in leaks)})
            places = [(a, b, Position(is_first and a == 0, is_last and b == size, a > 0)) for a, b in pairwise(edges)]
            parts = [text.part(a, b, [], position) for a, b, position in places]
        ids, supervised, edges, _ = zip(*map(self._apart, parts), strict=True)
        return Mask(*(list(chain.from_iterable(column)) for column in (ids, supervised, edges)), is_split=True)

    def check_segmentation(self, documents: Sequence[PlannedDocument]) -> None:
        """Raise UserError if splitting real rows and difficult texts at markers changes their ids."""
        # Replies are not split off here: their ids may differ from those of the whole text.
        plans = {
            id(plan): replace(plan, pieces=[replace(piece, starts_reply=False) for piece in plan.pieces], compiled=None)
            for plan in (document.plan for document in documents)
            if plan is not None
        }
        checked = [
            (plan, [text] * len(plan.trims)) for plan in list(plans.values())[:_CHECK_PLANS] for text in _CHECK_TEXTS
        ]
        checked += [(plans[id(document.plan)], document.texts) for document in documents if document.plan is not None]
        encoded = self.encode([PlannedDocument(plan, texts) for plan, texts in checked])
        parts = np.split(encoded.tokens, np.cumsum(encoded.lengths)[:-1])
        for (plan, texts), part in zip(checked, parts, strict=bool(checked)):
            text, ours = plan.fill(texts), part.tolist()
            if len(self._control_text.findall(text)) != sum(piece.is_marker for piece in plan.pieces):
                continue  # the row itself contains a control token
            whole = self.tokenizer.backend.encode(text, add_special_tokens=False).ids
            if whole != ours:
                at = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(whole, ours, strict=False))))
                raise UserError(
                    "this tokenizer gives different ids when text is split at markers, so the loss mask would be wrong",
                    where=f"token {at} of {text[:60]!r}...: {whole[at : at + 3]} whole, {ours[at : at + 3]} in parts",
                    fix="use another template (`template.name`), or report this tokenizer",
                )


def _batches(texts: Iterable[TextToEncode]) -> Iterator[tuple[Position, list[TextToEncode]]]:
    """Yield batches of texts that the same copy of the tokenizer encodes."""
    position_of = attrgetter("position")
    for position, group in groupby(sorted(texts, key=position_of), key=position_of):
        while batch := list(islice(group, _ENCODE_BATCH)):
            yield position, batch


def _count_by_document(flags: Bools, stops: Ints) -> Ints:
    """Return how many tokens of each document are True."""
    return np.diff(np.append(0, np.cumsum(flags))[stops], prepend=0)


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
