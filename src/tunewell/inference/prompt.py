"""What a model is given so that it answers: a conversation as its template renders it, up to where the reply begins.

The ids are those that a document of training has before its first learned token. Words stay words here too, whatever
they spell: the conversation is rendered a second time with every letter of it in disguise, and only what is a marker
in that rendering becomes a control id.

    real        <|im_start|>user\\nsay <|im_end|> please<|im_end|>\\n<|im_start|>assistant\\n
    in disguise <|im_start|>user\\n### ########## ######<|im_end|>\\n<|im_start|>assistant\\n
    markers     ^^^^^^^^^^^^                            ^^^^^^^^^^    ^^^^^^^^^^^^
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from tunewell.core.errors import UserError
from tunewell.data.encoding.encoder import Encoder, PlannedDocument
from tunewell.data.masking import placeholders
from tunewell.data.masking.masker import Masker, Piece, Plan
from tunewell.data.masking.placeholders import NO_TRIM
from tunewell.data.masking.rendered_turns import Span
from tunewell.data.masking.reply_frame import marker_pattern
from tunewell.data.rows.conversation import Conversation, Message, Rejected
from tunewell.data.templates.chat_template import ChatTemplate, TemplateFailed


def prompt_ids(
    masker: Masker, encoder: Encoder, messages: Sequence[Message], tools: Sequence[Any] | None = None
) -> list[int]:
    """Give the ids that ask for the next reply; raise UserError where the template refuses, or words could be markers.

    A message is `role` and `content` (text), and whatever else the template reads.
    """
    conversation = Conversation(list(messages), tools=list(tools) if tools else None)
    marker = marker_pattern(masker.frame.markers)
    for message in conversation.messages:
        if marker.search(str(message["role"])):
            raise UserError(f"`{message['role']}` is a marker of the template's, not a role")
    try:
        text = masker.template.render(conversation.messages, conversation.tools, add_generation_prompt=True)
    except TemplateFailed as failure:
        raise UserError(
            f"the template `{masker.template.name}` refuses this conversation: {failure}",
            fix="some templates know no system prompt, and most want questions and answers in turn",
        ) from failure
    marks = _own_marks(masker.template, marker, conversation, text)
    return _encoded(encoder, PlannedDocument(*_cut(text, marks)))


def text_ids(encoder: Encoder, text: str) -> list[int]:
    """Give the ids of a text that is to be continued, for a model without a template: begun, and not ended."""
    ids = _encoded(encoder, PlannedDocument(None, [text]))
    eos = encoder.tokenizer.special_tokens.get("eos_token")
    return ids[:-1] if eos in encoder.tokenizer.added else ids


def _own_marks(template: ChatTemplate, marker: re.Pattern[str], conversation: Conversation, text: str) -> list[Span]:
    """Find the markers that the template itself wrote."""
    versions = [conversation, *(version for version, _ in placeholders.with_separate_thinking(conversation))]
    for version in versions:
        hidden = placeholders.redact(version.messages, version.tools, marker, frozenset())
        try:
            safe = template.render(*hidden, add_generation_prompt=True)
        except TemplateFailed:
            continue
        if placeholders.is_equal_outside_redactions(text, safe):
            return [found.span() for found in marker.finditer(safe)]
    # The template does something with the words that cannot be followed; that matters only if they spell a marker.
    for words in _texts_in([conversation.messages, conversation.tools]):
        if found := marker.search(words):
            raise UserError(
                f"a message spells `{found.group()}`, and the template `{template.name}` rewrites messages: "
                "it cannot be told which markers are its own",
                where=repr(words[max(0, found.start() - 20) : found.end() + 20]),
                fix="leave it out of the message",
            )
    return [found.span() for found in marker.finditer(text)]


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts_in(key)
            yield from _texts_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts_in(inner)


def _cut(text: str, marks: list[Span]) -> tuple[Plan, list[str]]:
    """Cut a text into markers and words; the template's other text counts as words, for it is encoded like them."""
    ends = dict(marks)
    edges = sorted({0, len(text), *(edge for mark in marks for edge in mark)})
    pieces: list[Piece] = []
    words: list[str] = []
    for start, end in pairwise(edges):
        if ends.get(start) == end:
            pieces.append(Piece(text[start:end], is_marker=True))
        else:
            pieces.append(Piece("", slot=len(words)))
            words.append(text[start:end])
    return Plan(pieces, [NO_TRIM] * len(words), 0, 0), words


def _encoded(encoder: Encoder, layout: PlannedDocument) -> list[int]:
    encoded = encoder.encode([layout])
    failure = encoded.failed.get(0)
    # A prompt teaches nothing, and an empty text is only its end; what cannot be written as text is another matter.
    if isinstance(failure, Rejected) and failure.reason != "nothing_to_learn":
        raise UserError(f"this cannot be said to the model: {failure.detail}")
    return encoded.tokens.tolist()
