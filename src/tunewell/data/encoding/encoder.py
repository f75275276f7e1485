"""Turn laid-out conversations into token ids and a mask, at the speed of the tokenizer.

A rendered text is cut at the template's own markers, which become their ids; what lies between is encoded as plain
text, so words that spell a marker stay words. Text that is the same in every row of a shape is encoded once.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import orjson
import tokenizers
from tokenizers import Encoding

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
from tunewell.data.encoding.word_table import build_word_table
from tunewell.data.masking.masker import Plan
from tunewell.data.masking.reply_frame import marker_pattern
from tunewell.data.rows.conversation import Rejected
from tunewell.data.tokenizers.load import LoadedTokenizer
from tunewell.hardware.facts import num_cores

# Copies of a tokenizer that read text as nothing but text, one for each place a stretch can have in a document.

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
_FORMS: tuple[Form, ...] = get_args(Form)


class TextBackends:
    """The copies, made when first asked for; places that are treated alike share one."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        config = orjson.loads(backend.to_str())
        # A post-processor would trim offsets to the letters of a token, and these must cover its spaces too.
        config |= {"truncation": None, "padding": None, "post_processor": None}
        if all(token["special"] for token in config["added_tokens"]):
            # Nothing looks for special tokens in these copies; without them, nothing looks for their absence either.
            config["added_tokens"] = []
        self.keeps_text = config["normalizer"] is None or config["normalizer"].get("normalizers") == []
        """Whether text is encoded just as it is."""
        self.form: Form | None = _form(config["normalizer"])
        """The Unicode form that text is brought into, where that is all that happens to it."""
        self.unknown_id: int | None = _unknown_id(config["model"])
        self._by_place: dict[Position, tokenizers.Tokenizer] = {}
        places = [Position(is_first, is_last) for is_first in (True, False) for is_last in (True, False)]
        made: dict[bytes, tokenizers.Tokenizer] = {}
        for place in places:
            parts = {
                "normalizer": _for_position(place, config["normalizer"]),
                "pre_tokenizer": _for_position(place, config["pre_tokenizer"]),
            }
            key = orjson.dumps(parts)
            if key not in made:
                made[key] = _as_text(config | parts)
            self._by_place[place] = made[key]
        self.words = build_word_table(config) if len(made) == 1 and (self.keeps_text or self.form) else None
        """A quicker way for ASCII text, where there is one; every Unicode form leaves ASCII as it is."""

    def __getitem__(self, place: Position) -> tokenizers.Tokenizer:
        return self._by_place[place]


def _as_text(config: dict[str, Any]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(orjson.dumps(config).decode())
    backend.encode_special_tokens = True
    return backend


def _form(normalizer: dict[str, Any] | None) -> Form | None:
    return next((form for form in _FORMS if normalizer is not None and normalizer["type"] == form), None)


def _unknown_id(model: dict[str, Any]) -> int | None:
    if model["type"] == "Unigram":
        return model.get("unk_id")
    unknown = model.get("unk_token")
    return model["vocab"].get(unknown) if unknown is not None else None


def _for_position(place: Position, step: dict[str, Any] | None) -> dict[str, Any] | None:
    """Leave out what a tokenizer does to the first or the last letters of a text, where a stretch has not got them."""
    if step is None:
        return None
    if step["type"] == "Sequence":
        name = next(key for key in ("normalizers", "pretokenizers") if key in step)
        kept = [inner for own in step[name] if (inner := _for_position(place, own)) is not None]
        return {**step, name: kept}
    if step["type"] == "Metaspace" and step.get("prepend_scheme") == "first" and not place.is_first:
        return {**step, "prepend_scheme": "never"}
    if step["type"] == "Replace" and "Regex" in step["pattern"]:
        pattern = step["pattern"]["Regex"].removeprefix("(?#dummy space)")
        if pattern.startswith(r"\A") and not place.is_first:
            return None
        if pattern.endswith(r"\z") and not place.is_last:
            return None
    return step


_ENCODE_BATCH = 2048
# The tokenizer takes about eight times as long for a text as the table of words does, in as many threads as there are.
_MAX_CORES_FOR_WORD_TABLE = 8
# Words that tokenizers treat in ways of their own where they meet a marker.
_CHECK_TEXTS = ("x", " x", "  x  ", "\nx\n", "x\n\n", "\t x. ", "é 漢 \U0001f642")
_CHECK_PLANS = 4

Mask = tuple[list[int], list[bool], list[bool]]
"""Ids, which of them are supervised, and which lie across an edge."""


@dataclass(slots=True)
class EncodedDocuments:
    """Documents laid end to end: ids, which of them are supervised, and each document's length."""

    tokens: npt.NDArray[np.uint32]
    supervised: npt.NDArray[np.bool_]
    lengths: npt.NDArray[np.int64]
    boundary: npt.NDArray[np.int64]
    """Per document, tokens that hold both template text and a reply's first or last letters; they are context."""
    failed: dict[int, Rejected]
    """Documents (by their place in the batch) that are of no use, and why; nothing of them is supervised."""


@dataclass(slots=True)
class PlannedDocument:
    """One document to encode: a plan with its words, or plain text."""

    plan: Plan | None
    words: list[str]


class Encoder:
    """Encodes documents for one tokenizer; safe to use from one thread at a time."""

    def __init__(self, tokenizer: LoadedTokenizer, control_markers: Iterable[str] = ()) -> None:
        self.tokenizer = tokenizer
        self._backends = TextBackends(tokenizer.backend)
        self._words = self._backends.words if num_cores() <= _MAX_CORES_FOR_WORD_TABLE else None
        self._byte_lengths = None
        if tokenizer.byte_lengths is not None and (self._backends.keeps_text or self._backends.form):
            self._byte_lengths = np.asarray(tokenizer.byte_lengths, dtype=np.int64)
        control = set(tokenizer.control_ids)
        control |= {tokenizer.added[marker].id for marker in control_markers if marker in tokenizer.added}
        self._is_control = np.zeros(max(tokenizer.vocab_size, 1), dtype=bool)
        self._is_control[sorted(control)] = True
        self._control_text = marker_pattern(text for text, facts in tokenizer.added.items() if facts.id in control)
        if self._backends.unknown_id is not None:
            # What the vocabulary cannot spell becomes this id, in any text; it marks nothing.
            self._is_control[self._backends.unknown_id] = False
        self._plain_text = compile_plain_text(tokenizer)

    def _encode_once(self, stretch: TextSegment) -> list[FixedTokens] | None:
        text, spans = stretch.fill(())
        [(ids, supervised, boundary)] = self._by_offsets([TextToEncode(0, text, spans)], stretch.place)
        if any(boundary):
            return None  # fixed ids know no boundary tokens, and these are to be counted
        return [FixedTokens([token], is_supervised) for token, is_supervised in zip(ids, supervised, strict=True)]

    def encode(self, layouts: Sequence[PlannedDocument]) -> EncodedDocuments:
        """Encode documents together in the tokenizer's own threads; the number that comes back is checked."""
        batch = self._gather(layouts)
        by_offsets = self._encode_texts(batch)
        table = SegmentTable(batch)
        supervised, is_boundary, unsure = table.mask(self._byte_lengths)
        if unsure:
            missing = set(unsure) - by_offsets.keys()
            for place, texts in batch.texts.items():
                some = [text for text in texts if text.index in missing]
                by_offsets |= zip([text.index for text in some], self._by_offsets(some, place), strict=True)
        for index, (_, exact, edges) in by_offsets.items():
            start, end = table.bounds[index], table.bounds[index + 1]
            supervised[start:end], is_boundary[start:end] = exact, edges
        return self._by_document(batch, table, supervised, is_boundary)

    def _gather(self, layouts: Sequence[PlannedDocument]) -> SegmentBatch:
        batch = SegmentBatch()
        for layout in layouts:
            plan = layout.plan
            if plan is None:
                batch.add(self._plain_text, layout.words)
                continue
            if plan.compiled is None:
                plan.compiled = compile_plan(plan, self.tokenizer.added, self._encode_once)
            batch.add(plan.compiled, layout.words)
        return batch

    def _encode_texts(self, batch: SegmentBatch) -> dict[int, Mask]:
        """Put the ids of every text in its place; also give the masks that byte lengths cannot tell."""
        masks: dict[int, Mask] = {}
        for place, texts in batch.texts.items():
            by_bytes = [text for text in texts if not text.spans or self._is_by_bytes(text)]
            known = {text.index for text in by_bytes}
            others = [text for text in texts if text.index not in known] if len(by_bytes) < len(texts) else []
            for start in range(0, len(by_bytes), _ENCODE_BATCH):
                self._encode_some(by_bytes[start : start + _ENCODE_BATCH], place, batch)
            for text, mask in zip(others, self._by_offsets(others, place), strict=True):
                batch.ids[text.index], masks[text.index] = mask[0], mask
        return masks

    def _encode_some(self, texts: list[TextToEncode], place: Position, batch: SegmentBatch) -> None:
        """Put the ids of texts in their places: from the table of words where that is quicker than more threads."""
        if self._words is not None:
            by_words = [text for text in texts if text.text.isascii()]
            texts = [text for text in texts if not text.text.isascii()]
            for text, ids in zip(by_words, self._words.encode([text.text for text in by_words]), strict=True):
                if ids is None:
                    texts.append(text)
                else:
                    batch.ids[text.index] = ids
        encodings = self._backends[place].encode_batch_fast([text.text for text in texts], add_special_tokens=False)
        _require_count(len(encodings), len(texts))
        for text, encoding in zip(texts, encodings, strict=True):
            batch.ids[text.index] = encoding.ids

    def _is_by_bytes(self, text: TextToEncode) -> bool:
        """Whether the ids' byte lengths tell where in this text each token stands."""
        if self._byte_lengths is None or len(text.spans) > 1:
            return False
        form = self._backends.form
        return form is None or text.text.isascii() or unicodedata.is_normalized(form, text.text)

    def _by_offsets(self, texts: Sequence[TextToEncode], place: Position) -> list[Mask]:
        """Mask texts by the tokenizer's own character offsets: right for any tokenizer, slower."""
        masks = []
        for start in range(0, len(texts), _ENCODE_BATCH):
            some = texts[start : start + _ENCODE_BATCH]
            encodings = self._backends[place].encode_batch([text.text for text in some], add_special_tokens=False)
            _require_count(len(encodings), len(some))
            for text, encoding in zip(some, encodings, strict=True):
                masks.append(_mask_by_offsets(encoding, text))
        return masks

    def _by_document(
        self,
        batch: SegmentBatch,
        table: SegmentTable,
        supervised: npt.NDArray[np.bool_],
        is_boundary: npt.NDArray[np.bool_],
    ) -> EncodedDocuments:
        """Cut the flat ids into documents, those with a control id in their text encoded again in parts."""
        stops = table.bounds[np.asarray(batch.ends, dtype=np.int64)]
        starts = np.concatenate([[0], stops[:-1]]).astype(np.int64)[: len(stops)]
        tokens, lengths, failed = table.tokens, stops - starts, {}
        leaks = table.control_leaks(self._is_control)
        if len(leaks):
            leaky = set(np.searchsorted(stops, leaks, side="right").tolist())
            columns: tuple[list, list, list] = ([], [], [])
            for document, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
                own: tuple = (tokens[start:stop], supervised[start:stop], is_boundary[start:stop])
                if document in leaky:
                    try:
                        own = self._in_parts(batch, document)
                    except Rejected as rejected:
                        failed[document], own = rejected, ([], [], [])
                for column, values in zip(columns, own, strict=True):
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
            failed[document] = Rejected("nothing_to_learn", "only its end would be supervised")
        return EncodedDocuments(tokens, supervised, lengths, boundary, failed)

    def _in_parts(self, batch: SegmentBatch, document: int) -> Mask:
        """Encode the texts of a document cut so that none of them spells a control token."""
        ids: list[int] = []
        supervised: list[bool] = []
        boundary: list[bool] = []
        begin, end = batch.ends[document - 1] if document else 0, batch.ends[document]
        texts = {
            text.index: (text, place)
            for place, some in batch.texts.items()
            for text in some
            if begin <= text.index < end
        }
        for index in range(begin, end):
            if index not in texts:
                ids += batch.ids[index]
                supervised += [batch.edges[index][1] > 0] * len(batch.ids[index])
                boundary += [False] * len(batch.ids[index])
                continue
            new, mask, edges = self._apart(*texts[index])
            ids += new
            supervised += mask
            boundary += edges
        return ids, supervised, boundary

    def _apart(self, text: TextToEncode, place: Position) -> Mask:
        """Encode a text cut in the middle of every control token that it spells, so that none can form."""
        [encoding] = self._backends[place].encode_batch([text.text], add_special_tokens=False)
        leaks = [
            (x, y) for token, (x, y) in zip(encoding.ids, encoding.offsets, strict=True) if self._is_control[token]
        ]
        if not leaks:
            return _mask_by_offsets(encoding, text)
        if any(y - x < 2 for x, y in leaks):
            raise Rejected("bad_text", "it spells a control token that this tokenizer cannot write as text")
        cuts = sorted({0, len(text.text), *((x + y) // 2 for x, y in leaks)})
        ids, supervised, edges = [], [], []
        for a, b in pairwise(cuts):
            spans: list[Span] = [(max(x, a) - a, min(y, b) - a) for x, y in text.spans if x < b and a < y]
            own_place = Position(place.is_first and a == 0, place.is_last and b == len(text.text))
            part = self._apart(TextToEncode(0, text.text[a:b], spans), own_place)
            ids, supervised, edges = ids + part[0], supervised + part[1], edges + part[2]
        return ids, supervised, edges

    def check_segmentation(self, layouts: Sequence[PlannedDocument]) -> None:
        """Prove on real rows that cutting at markers gives the ids of the whole text; raise UserError if not.

        The first few shapes are tried with words that are hard on tokenizers too.
        """
        plans = {id(layout.plan): layout for layout in layouts if layout.plan is not None}
        for layout in list(plans.values())[:_CHECK_PLANS]:
            for words in _CHECK_TEXTS:
                self._check_one(PlannedDocument(layout.plan, [words] * len(layout.words)))
        for layout in layouts:
            self._check_one(layout)

    def _check_one(self, layout: PlannedDocument) -> None:
        if layout.plan is None:
            return
        text = layout.plan.fill(layout.words)
        num_markers = sum(piece.is_marker for piece in layout.plan.pieces)
        if len(self._control_text.findall(text)) != num_markers:
            return  # the row itself spells a control token
        whole = self.tokenizer.backend.encode(text, add_special_tokens=False).ids
        ours = self.encode([layout]).tokens.tolist()
        if whole != ours:
            at = next(
                (i for i, (x, y) in enumerate(zip(whole, ours, strict=False)) if x != y), min(len(whole), len(ours))
            )
            raise UserError(
                "this tokenizer reads text around its markers in a way that cannot be followed",
                where=f"token {at} of {text[:60]!r}...: {whole[at : at + 3]} as a whole, {ours[at : at + 3]} in parts",
                fix="use another template (`template.name`), or report this tokenizer",
            )


def _mask_by_offsets(encoding: Encoding, text: TextToEncode) -> Mask:
    offsets, spans = _token_offsets(encoding, text.text), text.spans
    supervised = [any(a <= x and y <= b for a, b in spans) for x, y in offsets]
    edges = [any(x < a < y or x < b < y for a, b in spans) for x, y in offsets]
    return encoding.ids, supervised, edges


def _token_offsets(encoding: Encoding, text: str) -> list[Span]:
    """Give the tokens' places, single letters too where letters without a token are written as a run of bytes.

    Unigram tokenizers give the place of the whole run for each of its bytes.
    """
    offsets, tokens = encoding.offsets, encoding.tokens
    begin = 0
    while begin < len(offsets):
        x, y = offsets[begin]
        end = begin + 1
        while end < len(offsets) and offsets[end] == (x, y):
            end += 1
        run = [place for place in range(x, y) for _ in text[place].encode()] if y - x > 1 and end - begin > 1 else []
        if len(run) == end - begin and all(token.startswith("<0x") for token in tokens[begin:end]):
            offsets[begin:end] = [(place, place + 1) for place in run]
        begin = end
    return offsets


def _require_count(given: int, wanted: int) -> None:
    if given != wanted:
        raise RuntimeError(f"the tokenizer gave back {given} of {wanted} texts")
