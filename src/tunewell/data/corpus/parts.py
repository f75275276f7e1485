"""What became of one block of rows: documents as tokens, and the reason for every row that is none.

Parts are kept in a cache under the hash of the rows and of everything that decided their tokens, so that a second
`prepare` tokenises only what is new, and one that was killed goes on where it stopped.
"""

import hashlib
import io
import json
import zipfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tunewell.core.errors import UserError
from tunewell.core.files import sha256_text, write_atomic
from tunewell.data.encoding.encoder import Encoded, Encoder, Layout
from tunewell.data.masking.masker import Masker
from tunewell.data.rows.cleaning import DIGEST_BYTES, CleanOptions, Digests, clean
from tunewell.data.rows.conversation import Conversation, Rejected
from tunewell.data.rows.formats import Converter
from tunewell.data.rows.functions import RowFunction
from tunewell.data.sources.blocks import Block, ReadOptions, parse_item

_ARRAYS = ("status", "whole", "question", "lengths", "boundary", "tokens", "learned")


@dataclass
class Part:
    """The outcome of a block, row by row.

    status   0 0 2 0 1        0: a document; n: dropped for `reasons[n - 1]`
    lengths  5 7   4          of the documents only, like the digests; tokens lie end to end
    """

    status: npt.NDArray[np.uint8]
    whole: npt.NDArray[np.uint8]
    question: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int64]
    boundary: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.uint32]
    learned: npt.NDArray[np.bool_]
    reasons: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    """One for each dropped row, in order."""
    formats: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    """Counts worth showing that drop nothing: replies a template leaves out, rows that spell control tokens."""

    def __post_init__(self) -> None:
        num_documents = int((self.status == 0).sum())
        if not num_documents == len(self.lengths) == len(self.whole) or len(self.details) + num_documents != len(
            self.status
        ):
            raise ValueError("a part does not account for every row of its block")
        if int(self.lengths.sum()) != len(self.tokens):
            raise ValueError("a part's tokens do not add up to its documents")


def save_part(path: Path, part: Part) -> None:
    """Write a part whole or not at all."""
    meta = {"reasons": part.reasons, "details": part.details, "formats": part.formats, "notes": part.notes}
    arrays = {name: getattr(part, name) for name in _ARRAYS}
    arrays["learned"] = np.packbits(part.learned)
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode("utf-8", "surrogatepass"), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_atomic(path, buffer.getvalue())


def load_part(path: Path) -> Part | None:
    """Read a part; None if there is none or if it is damaged, in which case it is made anew."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays: dict[str, Any] = {name: stored[name] for name in _ARRAYS}
            meta = json.loads(stored["meta"].tobytes().decode("utf-8", "surrogatepass"))
        arrays["learned"] = np.unpackbits(arrays["learned"], count=len(arrays["tokens"])).astype(bool)
        return Part(**arrays, **meta)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        path.unlink(missing_ok=True)
        return None


def digest_rows(digests: list[bytes]) -> npt.NDArray[np.uint8]:
    """Stack digests as rows of bytes."""
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, DIGEST_BYTES)


# From a block of rows to a part: convert, clean, lay out, encode, and account for every row.

PIPELINE_VERSION = 1
"""Raised whenever the same rows would give other tokens, so that no old part is taken for a new one."""
_DETAIL_CHARS = 300


@dataclass
class Recipe:
    """Everything that decides what the rows of one source become."""

    source: str
    read: ReadOptions
    converter: Converter
    cleaning: CleanOptions
    masker: Masker | None
    encoder: Encoder
    row_function: RowFunction | None = None
    bad_rows: str = "drop"
    settings: dict[str, Any] = field(default_factory=dict)
    """The config values behind all this, for the cache key."""

    def key(self) -> str:
        """Hash what decides the tokens, the rows themselves apart."""
        template = self.masker.template.sha256 if self.masker else "no template"
        function = self.row_function.sha256 if self.row_function else ""
        settings = json.dumps(self.settings, sort_keys=True, default=str)
        return sha256_text(str(PIPELINE_VERSION), settings, template, self.encoder.tokenizer.sha256, function)


@dataclass
class Laid:
    """A block after all that Python does to it: ready for the tokenizer."""

    status: list[int]
    layouts: list[Layout]
    digests: list[Digests]
    reasons: list[str]
    details: list[str]
    formats: Counter[str]
    notes: Counter[str]
    numbers: list[int]

    def reason_code(self, reason: str) -> int:
        if reason not in self.reasons:
            self.reasons.append(reason)
        return self.reasons.index(reason) + 1


def lay_out_block(block: Block, recipe: Recipe) -> Laid:
    """Parse, map, convert, clean and lay out the rows of a block; a row that fails says why."""
    laid = Laid([], [], [], [], [], Counter(), Counter(), block.numbers)
    values: list[Any] = []
    for item in block.items:
        try:
            values.append(parse_item(item, recipe.read))
        except Rejected as rejected:
            values.append(rejected)
    if recipe.row_function:
        whole = [index for index, value in enumerate(values) if not isinstance(value, Rejected)]
        numbers = [block.numbers[index] for index in whole]
        mapped = recipe.row_function.apply([values[index] for index in whole], numbers, recipe.source)
        for index, value in zip(whole, mapped, strict=True):
            values[index] = Rejected("dropped_by_map") if value is None else value
    for number, value in zip(block.numbers, values, strict=True):
        try:
            if isinstance(value, Rejected):
                raise value
            _lay_out_row(value, recipe, laid)
        except Rejected as rejected:
            _stop_if_asked(rejected, recipe, number)
            laid.status.append(laid.reason_code(rejected.reason))
            laid.details.append(_short(rejected.detail))
        else:
            laid.status.append(0)
    return laid


def _short(detail: str) -> str:
    """Keep a ledger readable when a row of megabytes is quoted in its own refusal."""
    return detail if len(detail) <= _DETAIL_CHARS else f"{detail[:_DETAIL_CHARS]}..."


_MENDABLE = {"unparsable", "not_a_conversation", "too_large", "mask_uncertain"}


def _stop_if_asked(rejected: Rejected, recipe: Recipe, number: int) -> None:
    is_bad_row = rejected.reason in _MENDABLE and recipe.bad_rows == "error"
    is_bad_text = rejected.reason == "bad_text" and recipe.cleaning.bad_text == "error"
    if is_bad_row or is_bad_text:
        key = "data.clean.bad_text" if is_bad_text else "data.clean.bad_rows"
        raise UserError(
            f"{rejected.reason}: {_short(rejected.detail)}".rstrip(": "),
            where=f"{recipe.source} row {number}",
            fix=f"mend the row, or set `{key}: drop` to leave such rows out and count them",
        )


def _lay_out_row(value: Any, recipe: Recipe, laid: Laid) -> None:
    conversation, format_name = recipe.converter.convert(value)
    digests = clean(conversation, recipe.cleaning)
    if conversation.text is not None:
        layout = Layout(None, [conversation.text])
    else:
        if recipe.masker is None:
            raise UserError(
                f"{recipe.source} holds conversations, but the model has no chat template",
                fix="choose one with `template.name`; `alpaca` works with any tokenizer that has an end token",
            )
        plan, words = recipe.masker.lay_out(conversation)
        if not plan.learned_turns:
            raise Rejected(
                "nothing_to_learn", "every reply has weight 0" if not plan.lost_turns else "no reply is rendered"
            )
        if plan.lost_turns:
            laid.notes["replies_not_rendered"] += plan.lost_turns
        if conversation.tools or any(len(message) > 2 for message in conversation.messages):
            _judge_tools(conversation, recipe.masker, laid)
        layout = Layout(plan, words)
    if (lost := recipe.encoder.tokenizer.lost_bytes) and _has_any(layout.words, bytes(lost)):
        laid.notes["characters_not_written"] += 1
    laid.formats[format_name] += 1
    laid.layouts.append(layout)
    laid.digests.append(digests)


def _judge_tools(conversation: Conversation, masker: Masker, laid: Laid) -> None:
    """Note tool data that the template does not show; refuse a row that would teach an empty reply for it."""
    template = masker.template
    calls = [message for message in conversation.messages if message.get("tool_calls")]
    if conversation.tools and "tools" not in template.variables:
        laid.notes["tools_not_rendered"] += 1
    if not calls or "tool_calls" in template.source:
        return
    if masker.rule.learn_from == "everything" and not all(message["content"].strip() for message in calls):
        raise Rejected("nothing_to_learn", "the template does not show its tool calls: an empty reply would be learned")
    laid.notes["tool_calls_not_rendered"] += 1


def _has_any(words: list[str], wanted: bytes) -> bool:
    """Whether a word has one of some bytes: a tokenizer without a token for a byte leaves it out silently."""
    texts = [word.encode() for word in words]
    return any(len(text.translate(None, wanted)) != len(text) for text in texts)


def finish_block(laid: Laid, encoded: Encoded) -> Part:
    """Join what Python knows of the rows with what the tokenizer made of them."""
    starts = np.cumsum(encoded.lengths) - encoded.lengths
    num_learned = np.zeros(len(starts), dtype=np.int64)
    full = encoded.lengths > 0
    if full.any():
        num_learned[full] = np.add.reduceat(encoded.learned.astype(np.int64), starts[full])
    keep = num_learned > 0
    if not keep.all():
        details: list[str] = []
        dropped = iter(laid.details)
        document = 0
        for index, code in enumerate(laid.status):
            if code:
                details.append(next(dropped))
                continue
            if not keep[document]:
                failure = encoded.failed.get(document, Rejected("nothing_to_learn", "no token of it would be learned"))
                laid.status[index] = laid.reason_code(failure.reason)
                details.append(failure.detail)
            document += 1
        laid.details = details
    token_kept = np.repeat(keep, encoded.lengths)
    digests = [own for own, is_kept in zip(laid.digests, keep.tolist(), strict=True) if is_kept]
    return Part(
        status=np.asarray(laid.status, dtype=np.uint8),
        whole=digest_rows([own.whole for own in digests]),
        question=digest_rows([own.question for own in digests]),
        lengths=encoded.lengths[keep],
        boundary=encoded.boundary[keep],
        tokens=encoded.tokens[token_kept],
        learned=encoded.learned[token_kept],
        reasons=laid.reasons,
        details=laid.details,
        formats=dict(laid.formats),
        notes=dict(laid.notes),
    )


def part_name(block: Block, key: str) -> str:
    """Name the part of a block: the same rows under the same settings have the same name."""
    return hashlib.sha256(f"{block.digest}:{key}".encode()).hexdigest()[:40] + ".npz"
