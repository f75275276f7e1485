"""Tokenise one block of rows into token ids and masks, with a drop reason for every row that is not a document.

The result is cached on disk. The file name is a hash of the rows and of every setting that affects their tokens.
Therefore a second `prepare` tokenises only new rows, and an interrupted `prepare` continues where it stopped.
"""

import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tunewell.config.schema import Clean
from tunewell.core.arrays import Bools, Bytes, Ints, TokenIds
from tunewell.core.errors import UserError
from tunewell.core.files import open_file, sha256_text, write_atomic
from tunewell.core.text import shorten
from tunewell.data.encoding.encoder import EncodedDocuments, Encoder, PlannedDocument
from tunewell.data.masking.masker import Masker, MaskPlan
from tunewell.data.rows.cleaning import DIGEST_BYTES, Digests, clean, find_possible_secrets, find_secrets
from tunewell.data.rows.conversation import Conversation, Rejected
from tunewell.data.rows.formats import Converter
from tunewell.data.rows.functions import RowFunction
from tunewell.data.sources.blocks import Block, ReadOptions, parse_item

if TYPE_CHECKING:
    from tunewell.data.masking.rendered import RenderedTextParser

PIPELINE_VERSION = 7
"""Version of the tokenised output. Increase it when equal rows give other tokens or notes, to invalidate the cache."""
_ARRAYS = ("status", "whole", "question", "lengths", "boundary", "tokens", "turns", "turn_of")
_DETAIL_CHARS = 300
_PAIR_FORMATS = frozenset(("prompt_completion", "question_answer", "preference", "unpaired_preference"))
_MAY_BE_RENDERED = re.compile(r"\s*(?:[<\[\]#]|below is an |a chat between |(?:user|human):)", re.IGNORECASE)
"""The start of a prompt that may be rendered. Nearly all others are recognised by this fast check."""
_BAD_ROW_REASONS = {"unparsable", "not_a_conversation", "too_large", "mask_uncertain", "has_media"}


@dataclass(kw_only=True)
class RowFacts:
    """What is known about the rows of a block, apart from their tokens."""

    formats: Counter[str] = field(default_factory=Counter[str])
    notes: Counter[str] = field(default_factory=Counter[str])
    """Counts for the report that do not concern dropped rows, e.g. replies that the template leaves out."""
    unused: Counter[str] = field(default_factory=Counter[str])
    """Number of documents by column that is not used."""
    secrets: list[tuple[int, dict[str, int]]] = field(default_factory=list[tuple[int, dict[str, int]]])
    """The index of each row with secrets, and their number by kind."""
    answers: list[tuple[int, str, list[str]]] = field(default_factory=list[tuple[int, str, list[str]]])
    """The index of each document's row with accepted answers, their column, and the answers."""


@dataclass(kw_only=True)
class TokenizedBlock(RowFacts):
    """The result for each row of a block.

    status   0 0 2 0 1        0: a document; n: dropped for `reasons[n - 1]`
    lengths  5 7   4          one entry per document, like the digests; tokens are concatenated
    """

    status: Bytes
    whole: Bytes
    """Digest of each whole conversation, for finding duplicates: one row of 16 bytes per document."""
    question: Bytes
    """Digest of each question."""
    lengths: Ints
    boundary: Ints
    tokens: TokenIds
    supervised: Bools
    turns: Bytes = field(default_factory=lambda: _stack_digests([]))
    """Digests of the other questions of conversations with several turns."""
    turn_of: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """The document of each of `turns`."""
    reasons: list[str] = field(default_factory=list[str])
    details: list[str] = field(default_factory=list[str])
    """One entry per dropped row, in order."""
    unknown_characters: dict[str, int] = field(default_factory=dict[str, int])
    """Characters that the vocabulary lacks, counted in the first rows that contain some."""

    def __post_init__(self) -> None:
        num_documents = int((self.status == 0).sum())
        num_dropped = len(self.status) - num_documents
        if not num_documents == len(self.lengths) == len(self.whole) or num_dropped != len(self.details):
            raise ValueError("a tokenized block does not account for every row")
        if int(self.lengths.sum()) != len(self.tokens):
            raise ValueError("a tokenized block has more or fewer tokens than its documents")


@dataclass
class NumberedBlock:
    """A tokenized block with the numbers of its rows."""

    numbers: Sequence[int]
    tokens: TokenizedBlock
    is_held_out: Bools | None = None
    """The documents that a prepared corpus holds out."""
    num_bytes: int = 0
    cache_name: str = ""
    """The name of its file in the cache; empty for documents that were not tokenised here."""


class TokenizedSource(Protocol):
    """A source that has tokens: a part of a prepared corpus, or a packed shard."""

    def blocks(self, pipeline: "RowPipeline", limit: int | None) -> Iterator[NumberedBlock]:
        """Yield at most `limit` documents."""
        ...


def save_tokenized(path: Path, block: TokenizedBlock) -> None:
    """Write a block atomically."""
    meta = vars(block).copy()
    arrays = {name: meta.pop(name) for name in _ARRAYS}
    arrays["learned"] = np.packbits(meta.pop("supervised"))
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode("utf-8", "surrogatepass"), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_atomic(path, buffer.getvalue())


def load_tokenized(path: Path) -> TokenizedBlock | None:
    """Load a cached block, or return None if it does not exist. A damaged file is deleted and counts as missing."""
    try:
        with open_file(path) as file, np.load(file, allow_pickle=False) as stored:
            arrays: dict[str, Any] = {name: stored[name] for name in _ARRAYS}
            supervised = np.unpackbits(stored["learned"], count=len(arrays["tokens"])).astype(bool)
            meta = json.loads(stored["meta"].tobytes().decode("utf-8", "surrogatepass"))
        return TokenizedBlock(**arrays, supervised=supervised, **meta)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        path.unlink(missing_ok=True)
        return None


@dataclass
class RowPipeline:
    """The objects that turn the rows of one source into documents, in the order in which they are applied."""

    source: str
    read: ReadOptions
    converter: Converter
    clean: Clean
    masker: Masker | None
    encoder: Encoder
    row_function: RowFunction | None = None
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """The config values from which the objects were created, for the cache key."""

    @cached_property
    def parser(self) -> "RenderedTextParser":
        """The parser of rendered text."""
        from tunewell.data.masking.rendered import RenderedTextParser  # not needed for other rows

        template = self.masker.template if self.masker else None
        return RenderedTextParser(template, self.encoder.tokenizer.special_tokens)

    def cache_key(self) -> str:
        """Return a hash of everything that affects the tokens, except the rows."""
        template = self.masker.template.sha256 if self.masker else "no template"
        function = self.row_function.sha256 if self.row_function else ""
        settings = json.dumps(self.settings, sort_keys=True, default=str)
        return sha256_text(str(PIPELINE_VERSION), settings, template, self.encoder.tokenizer.sha256, function)


@dataclass
class RenderedBlock(RowFacts):
    """A block after all Python work: conversations rendered by the template, ready for the tokenizer."""

    failures: list[tuple[str, str] | None] = field(default_factory=list[tuple[str, str] | None])
    """For each row, None or the reason for which it is dropped, with details."""
    layouts: list[PlannedDocument] = field(default_factory=list[PlannedDocument])
    digests: list[Digests] = field(default_factory=list[Digests])


def render_block(block: Block, pipeline: RowPipeline) -> RenderedBlock:
    """Parse, map, convert, clean and render the rows of a block; every failed row gets its drop reason."""
    rendered = RenderedBlock()
    values = _parse_and_map(block, pipeline)
    is_raw = pipeline.row_function is None
    texts = [
        item if is_raw and isinstance(item, bytes) else repr(value).encode("utf-8", "surrogatepass")
        for item, value in zip(block.items, values, strict=True)
    ]
    for number, value, may_have_secret in zip(block.numbers, values, find_possible_secrets(texts), strict=True):
        failure = None
        try:
            if isinstance(value, Rejected):
                raise value
            _render_row(value, pipeline, rendered, may_have_secret=may_have_secret)
        except Rejected as rejected:
            failure = rejected.reason, shorten(rejected.detail, _DETAIL_CHARS)
            key = "bad_rows" if rejected.reason in _BAD_ROW_REASONS else rejected.reason
            if key in ("bad_rows", "bad_text") and getattr(pipeline.clean, key) == "error":
                raise UserError(
                    ": ".join(filter(None, failure)),
                    where=f"{pipeline.source} row {number}",
                    fix=f"correct the row, or set `data.clean.{key}: drop` to drop and count such rows",
                ) from None
        rendered.failures.append(failure)
    return rendered


def _parse_and_map(block: Block, pipeline: RowPipeline) -> list[Any]:
    values: list[Any] = []
    for item in block.items:
        try:
            values.append(parse_item(item, pipeline.read))
        except Rejected as rejected:
            values.append(rejected)
    if pipeline.row_function:
        parsed = [index for index, value in enumerate(values) if not isinstance(value, Rejected)]
        numbers = [block.numbers[index] for index in parsed]
        mapped = pipeline.row_function.apply([values[index] for index in parsed], numbers, pipeline.source)
        for index, value in zip(parsed, mapped, strict=True):
            values[index] = Rejected("dropped_by_map") if value is None else value
    return values


def _render_row(value: Any, pipeline: RowPipeline, rendered: RenderedBlock, *, may_have_secret: bool) -> None:
    conversation, format_name = pipeline.converter.convert(value)
    if conversation.text is not None:
        conversation, format_name = _parse_rendered(conversation, format_name, pipeline)
    elif format_name in _PAIR_FORMATS and _MAY_BE_RENDERED.match(conversation.messages[-2:][0]["content"]):
        format_name = _parse_rendered_prompt(conversation, format_name, pipeline)
    if may_have_secret and (secrets := find_secrets(conversation, pipeline.clean)):
        rendered.secrets.append((len(rendered.failures), dict(secrets)))
        if pipeline.clean.secrets == "drop":
            raise Rejected("has_secret", ", ".join(secrets))
    if pipeline.masker and any(len(message) > 2 or "<tool" in message["content"] for message in conversation.messages):
        from tunewell.data.templates.tool_calls import fit_template  # not needed for plain rows

        fit_template(conversation, pipeline.masker.template)
    digests = clean(conversation, pipeline.clean)
    if conversation.text is not None:
        layout = PlannedDocument(None, [conversation.text])
    else:
        if pipeline.masker is None:
            raise UserError(
                f"{pipeline.source} contains conversations, but the model has no chat template",
                fix="choose one with `template.name`; `alpaca` works with any tokenizer that has an end token",
            )
        plan, texts = pipeline.masker.plan(conversation)
        if not plan.num_supervised_turns:
            raise Rejected(
                "nothing_to_learn",
                _why_unrendered(conversation) if plan.num_unrendered_turns else "every reply has weight 0",
            )
        if plan.num_unrendered_turns:
            rendered.notes["replies_not_rendered"] += plan.num_unrendered_turns
        if conversation.tools or any(len(message) > 2 for message in conversation.messages):
            _check_tools(conversation, pipeline.masker, rendered)
        if plan.unrendered_slots and _lacks_thinking(conversation, plan, texts):
            rendered.notes["thinking_not_rendered"] += 1
        layout = PlannedDocument(plan, texts)
    # The tokenizer has no tokens for these bytes and silently drops them.
    lost, data = bytes(pipeline.encoder.tokenizer.lost_bytes), "".join(layout.texts).encode()
    if lost and len(data.translate(None, lost)) != len(data):
        rendered.notes["characters_not_written"] += 1
    rendered.formats[format_name] += 1
    rendered.unused.update(conversation.unused)
    if conversation.answers:
        rendered.answers.append((len(rendered.failures), conversation.answers_column, list(conversation.answers)))
    rendered.notes.update(conversation.notes)
    rendered.layouts.append(layout)
    rendered.digests.append(digests)


def _parse_rendered(conversation: Conversation, format_name: str, pipeline: RowPipeline) -> tuple[Conversation, str]:
    """Return the conversation of a text that a chat template has rendered, or the plain text."""
    assert conversation.text is not None
    keeps_text = pipeline.converter.keeps_text
    found = None if keeps_text else pipeline.parser.parse(conversation.text, pipeline.source)
    if found is None:
        rule = pipeline.masker.rule.learn_from if pipeline.masker else "responses"
        if rule == "last_response" or pipeline.settings.get("source", {}).get("learn_from") == "responses":
            raise UserError(
                f"`learn_from: {rule}` cannot apply to plain text, which has no responses",
                where=pipeline.source,
                fix="set `learn_from: everything` on this source, or convert its rows to `messages`",
            )
        return conversation, format_name
    return found[0], f"text rendered by {found[1]}"


def _parse_rendered_prompt(conversation: Conversation, format_name: str, pipeline: RowPipeline) -> str:
    """Replace a prompt that a chat template has rendered, and its completion, by their messages."""
    roles = [message["role"] for message in conversation.messages]
    if roles[-2:] != ["user", "assistant"] or roles[:-2] not in ([], ["system"]) or pipeline.converter.keeps_text:
        return format_name
    *system, asked, replied = conversation.messages
    found = pipeline.parser.parse(
        asked["content"], pipeline.source, completion=replied["content"], format_name=format_name
    )
    if found is None:
        return format_name
    messages = found[0].messages
    conversation.messages = messages if messages[0]["role"] == "system" else [*system, *messages]
    if sum(message["role"] == "assistant" for message in messages) > 1:  # the earlier replies belong to the prompt
        conversation.learn = [*[False] * (len(conversation.messages) - 1), None]
    return f"{format_name} rendered by {found[1]}"


def _why_unrendered(conversation: Conversation) -> str:
    replies = [message for message in conversation.messages if message["role"] == "assistant"]
    only_calls = all(message.get("tool_calls") and not message["content"].strip() for message in replies)
    return f"the template renders {'no tool calls' if only_calls else 'none of the replies'}"


def _check_tools(conversation: Conversation, masker: Masker, rendered: RenderedBlock) -> None:
    """Count tool data that the template does not render; raise Rejected for a row that would teach an empty reply."""
    template = masker.template
    calls = [message for message in conversation.messages if message.get("tool_calls")]
    if conversation.tools and "tools" not in template.variables:
        rendered.notes["tools_not_rendered"] += 1
    if not calls:
        return
    from tunewell.data.templates.tool_calls import renders_tool_calls  # not needed for rows without calls

    if renders_tool_calls(template):
        return
    if masker.rule.learn_from == "everything" and not all(message["content"].strip() for message in calls):
        raise Rejected(
            "nothing_to_learn", "the template does not render tool calls: the model would learn an empty reply"
        )
    rendered.notes["tool_calls_not_rendered"] += 1


def _lacks_thinking(conversation: Conversation, plan: MaskPlan, texts: list[str]) -> bool:
    """Return True if the template leaves out the thinking of a reply. Rows may have the same thinking in two fields."""
    unrendered = {texts[slot] for slot in plan.unrendered_slots}
    contents = {message["content"] for message in conversation.messages}
    return not unrendered <= contents.union(texts[piece.slot] for piece in plan.pieces if piece.slot >= 0)


def join_tokens(rendered: RenderedBlock, encoded: EncodedDocuments) -> TokenizedBlock:
    """Combine the status of the rows with their tokens; drop documents without a supervised token."""
    keep = encoded.num_supervised > 0
    rows = [row for row, failure in enumerate(rendered.failures) if failure is None]
    for document in np.flatnonzero(~keep).tolist():
        failure = encoded.failed.get(document, Rejected("nothing_to_learn", "no token is supervised"))
        rendered.failures[rows[document]] = failure.reason, failure.detail
    dropped = [failure for failure in rendered.failures if failure is not None]
    reasons = list(dict.fromkeys(reason for reason, _ in dropped))
    keep_token = np.repeat(keep, encoded.lengths)
    is_unknown = encoded.is_unknown & keep_token
    counts = {
        "other_ids_as_a_whole": encoded.is_split & keep,
        "rows_with_markers": encoded.has_markers & keep,
        "unknown_tokens": is_unknown,
        "unknown_supervised_tokens": is_unknown & encoded.supervised,
    }
    rendered.notes.update({note: int(counted.sum()) for note, counted in counts.items() if counted.any()})
    digests = [digest for digest, is_kept in zip(rendered.digests, keep.tolist(), strict=True) if is_kept]
    return TokenizedBlock(
        **{each.name: getattr(rendered, each.name) for each in fields(RowFacts)},
        status=np.asarray([reasons.index(row[0]) + 1 if row else 0 for row in rendered.failures], dtype=np.uint8),
        whole=_stack_digests([digest.whole for digest in digests]),
        question=_stack_digests([digest.question for digest in digests]),
        lengths=encoded.lengths[keep],
        boundary=encoded.boundary[keep],
        tokens=encoded.tokens[keep_token],
        supervised=encoded.supervised[keep_token],
        turns=_stack_digests([turn for digest in digests for turn in digest.turns]),
        turn_of=np.repeat(np.arange(len(digests)), [len(digest.turns) for digest in digests]),
        reasons=reasons,
        details=[detail for _, detail in dropped],
        unknown_characters=encoded.unknown_characters,
    )


def _stack_digests(digests: list[bytes]) -> Bytes:
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
