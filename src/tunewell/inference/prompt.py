"""Build the token ids of a chat prompt: a conversation rendered with the chat template, up to the next reply.

The ids are the same as those before the first supervised token of a training document, because a prompt is planned like
one. Message text stays text, even if it contains a marker. If training would reject a conversation, it is rendered a
second time with all message text redacted, and only the markers in that rendering become special tokens.

    real      <|im_start|>user\\nsay <|im_end|> please<|im_end|>\\n<|im_start|>assistant\\n
    redacted  <|im_start|>user\\n### ########## ######<|im_end|>\\n<|im_start|>assistant\\n
    markers   ^^^^^^^^^^^^                            ^^^^^^^^^^    ^^^^^^^^^^^^
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from tunewell.core.errors import UserError
from tunewell.data.encoding.encoder import Encoder, PlannedDocument
from tunewell.data.masking import placeholders
from tunewell.data.masking.masker import Masker, MaskPlan, Piece
from tunewell.data.masking.placeholders import NO_TRIM
from tunewell.data.masking.turns import Span, marker_pattern
from tunewell.data.rows.conversation import Conversation, Message, Rejected, map_leaves
from tunewell.data.templates.chat_template import ChatTemplate, TemplateFailed


def prompt_ids(
    masker: Masker, encoder: Encoder, messages: Sequence[Message], tools: Sequence[Any] | None = None
) -> list[int]:
    """Return the prompt ids for the next reply. Raise UserError if the template fails or a marker is ambiguous.

    A message has `role` and `content` (text), and any other field that the template reads.
    """
    conversation = Conversation(list(messages), tools=list(tools) if tools else None)
    marker = marker_pattern(masker.frame.markers)
    for message in conversation.messages:
        if marker.search(str(message["role"])):
            raise UserError(f"`{message['role']}` is a marker of the template, not a role")
    try:
        text = masker.template.render(conversation.messages, conversation.tools, add_generation_prompt=True)
    except TemplateFailed as failure:
        raise UserError(
            f"the template `{masker.template.name}` rejects this conversation: {failure}",
            fix="some templates do not support a system prompt, and most need alternating questions and answers",
        ) from failure
    try:
        return _encode(encoder, PlannedDocument(*masker.for_prompts.plan(conversation)))
    except Rejected:
        # Training rejects such a conversation, so there are no ids to match.
        marks = _template_markers(masker.template, marker, conversation, text)
        return _encode(encoder, PlannedDocument(*_split_at(text, marks)))


def text_ids(encoder: Encoder, text: str) -> list[int]:
    """Return the ids of a text to continue, for a model without a template, with BOS but without EOS."""
    ids = _encode(encoder, PlannedDocument(None, [text]))
    eos = encoder.tokenizer.special_tokens.get("eos_token")
    return ids[:-1] if eos in encoder.tokenizer.added else ids


def _template_markers(
    template: ChatTemplate, marker: re.Pattern[str], conversation: Conversation, text: str
) -> list[Span]:
    """Return the spans of the markers that the template itself wrote."""
    for version, _ in placeholders.versions(conversation):
        redacted = placeholders.redact(version.messages, version.tools, marker, frozenset())
        try:
            redacted_text = template.render(*redacted, add_generation_prompt=True)
        except TemplateFailed:
            continue
        if placeholders.is_equal_outside_redactions(text, redacted_text):
            return [found.span() for found in marker.finditer(redacted_text)]

    # The template rewrites the messages, which matters only if a message contains a marker.
    def require_no_marker(value: Any) -> None:
        if isinstance(value, str) and (found := marker.search(value)):
            raise UserError(
                f"a message contains `{found.group()}`, and the template `{template.name}` rewrites messages: "
                "its markers cannot be distinguished from message text",
                where=repr(value[max(0, found.start() - 20) : found.end() + 20]),
                fix="remove the marker from the message",
            )

    map_leaves([conversation.messages, conversation.tools], require_no_marker, with_keys=True)
    return [found.span() for found in marker.finditer(text)]


def _split_at(text: str, marks: list[Span]) -> tuple[MaskPlan, list[str]]:
    """Split a text at its markers. Other text of the template is encoded like message text."""
    ends = dict(marks)
    edges = sorted({0, len(text), *(edge for mark in marks for edge in mark)})
    pieces: list[Piece] = []
    texts: list[str] = []
    for start, end in pairwise(edges):
        if ends.get(start) == end:
            pieces.append(Piece(text[start:end], is_marker=True))
        else:
            pieces.append(Piece("", slot=len(texts)))
            texts.append(text[start:end])
    return MaskPlan(pieces, [NO_TRIM] * len(texts), 0, 0), texts


def _encode(encoder: Encoder, layout: PlannedDocument) -> list[int]:
    encoded = encoder.encode([layout])
    failure = encoded.failed.get(0)
    # A prompt has no supervised tokens. Only text that cannot be encoded is an error.
    if isinstance(failure, Rejected) and failure.reason != "nothing_to_learn":
        raise UserError(f"this text cannot be encoded: {failure.detail}")
    return encoded.tokens.tolist()
