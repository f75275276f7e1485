"""Plan the loss mask of a conversation: the position of each message in the rendered text, and the supervised parts.

The package docstring explains how a plan is made and why it is exact.
"""

import copy
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from tunewell.data.masking import placeholders
from tunewell.data.masking.placeholders import PLAIN, SPACED, Trim, placeholder
from tunewell.data.masking.turns import Anchor, RenderedTurns, Span, marker_pattern, probe_reply_frame
from tunewell.data.rows.conversation import Conversation, Rejected
from tunewell.data.templates.chat_template import ChatTemplate, TemplateFailed
from tunewell.data.tokenizers.load import AddedTokenInfo

_MAX_CACHED_PLANS = 4096


@dataclass(slots=True)
class Piece:
    """A part of a rendered text: a marker, other text of the template, or the text of a message."""

    text: str
    """The text of a marker or of the template; empty for a message."""
    slot: int = -1
    """The index of the message text for this piece, or -1 if the piece is not a message text."""
    is_marker: bool = False
    is_supervised: bool = False
    starts_reply: bool = False
    """Whether a prompt for this reply ends here, so that the reply must start with a new token."""


@dataclass(slots=True)
class MaskPlan:
    """The rendering of all conversations of one shape, with the supervised parts."""

    pieces: list[Piece]
    trims: list[Trim]
    num_supervised_turns: int
    num_unrendered_turns: int
    """Number of replies that the template does not render."""
    unrendered_slots: tuple[int, ...] = ()
    """The message texts that the template does not render, e.g. the thinking of replies."""
    compiled: Any = None
    """The compiled plan of the encoder, cached here."""

    def fill(self, texts: list[str]) -> str:
        """Return the rendered text for the given message texts."""
        filled = [trim(text) for trim, text in zip(self.trims, texts, strict=True)]
        return "".join([piece.text if piece.slot < 0 else filled[piece.slot] for piece in self.pieces])


@dataclass(frozen=True)
class SupervisionRule:
    """The rule that selects the supervised turns."""

    learn_from: str = "responses"
    roles: tuple[str, ...] = ("assistant",)


ASSISTANT_REPLIES = SupervisionRule()
"""The default rule: all replies of the assistant."""


class Masker:
    """A planner of loss masks for one template, the markers of one tokenizer and one supervision rule."""

    def __init__(
        self, template: ChatTemplate, added: Mapping[str, AddedTokenInfo], rule: SupervisionRule = ASSISTANT_REPLIES
    ) -> None:
        self.rule = rule
        self.frame = probe_reply_frame(template, added)
        self.template = template.with_end(self.frame.added_end) if self.frame.added_end else template
        self._marker = marker_pattern(self.frame.markers)
        self._plans: dict[Any, MaskPlan | Rejected] = {}

    @cached_property
    def for_prompts(self) -> "Masker":
        """The masker of prompts: the template also writes the header of the next reply."""
        masker = copy.copy(self)
        masker.template, masker._plans = self.template.for_prompts(), {}
        return masker

    def plan(self, conversation: Conversation) -> tuple[MaskPlan, list[str]]:
        """Return the plan of a conversation and the texts that fill it; raise Rejected if the mask is not certain."""
        try:
            text = self.template.render(conversation.messages, conversation.tools)
        except TemplateFailed as failure:
            raise Rejected("not_a_conversation", f"the template rejects the conversation: {failure}") from failure
        plans: list[MaskPlan | Rejected] = []
        for is_whole in (True, False):
            for version, inline_thinking in placeholders.versions(conversation):
                if is_whole:
                    texts, shape = placeholders.extract_texts(version)
                    plan = self._cached_plan((shape, inline_thinking), version, inline_thinking)
                else:
                    # Only supervised turns must match a plan exactly. Other turns are used as they are in this row.
                    only = frozenset[int]().union(*self._select_turns(version))
                    texts = [part for index in sorted(only) for part in placeholders.texts_of(version.messages[index])]
                    plan = self._try_plan(version, inline_thinking, only)
                if isinstance(plan, MaskPlan) and plan.fill(texts) == text:
                    return plan, texts
                plans.append(plan)
        detail = plans[0].detail if isinstance(plans[0], Rejected) else "the template changes the text of this row"
        raise Rejected("mask_uncertain", detail)

    def _cached_plan(
        self, key: Any, conversation: Conversation, inline_thinking: frozenset[int]
    ) -> MaskPlan | Rejected:
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_CACHED_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._try_plan(conversation, inline_thinking)
        return plan

    def _try_plan(
        self, conversation: Conversation, inline_thinking: frozenset[int], only: frozenset[int] | None = None
    ) -> MaskPlan | Rejected:
        try:
            return self._make_plan(conversation, inline_thinking, only)
        except TemplateFailed as failure:
            return Rejected("mask_uncertain", f"the template rejects the conversation with placeholders: {failure}")
        except Rejected as rejected:
            return rejected

    def _make_plan(
        self, conversation: Conversation, inline_thinking: frozenset[int], only: frozenset[int] | None
    ) -> MaskPlan:
        if placeholders.contains_placeholder(conversation):
            raise Rejected("mask_uncertain", "the tool data contains the text of a placeholder")
        plain, slots = placeholders.with_placeholders(conversation.messages, PLAIN, only)
        spaced, _ = placeholders.with_placeholders(conversation.messages, SPACED, only)
        text = self.template.render(plain, conversation.tools)
        literals, order = placeholders.split_at_placeholders(text, PLAIN, len(slots))
        spaced_text = self.template.render(spaced, conversation.tools)
        spaced_parts = placeholders.split_at_placeholders(spaced_text, SPACED, len(slots))
        trims = placeholders.compare_trims((literals, order), spaced_parts, len(slots))
        spans: list[tuple[int, int, int]] = []
        position = 0
        for literal, slot in zip(literals, order, strict=False):
            position += len(literal)
            spans.append((position, position + len(placeholder(slot)), slot))
            position = spans[-1][1]
        turns = RenderedTurns(
            template=self.template,
            frame=self.frame,
            marker=self._marker,
            conversation=conversation,
            text=text,
            anchors=[Anchor(start, end, *slots[slot]) for start, end, slot in spans],
            inline_thinking=inline_thinking,
            only=only,
        )
        supervised, num_supervised, num_unrendered = self._supervised_spans(turns)
        pieces = _split_pieces(turns, spans, supervised, self._reply_starts(turns))
        unrendered = sorted(set(range(len(slots))).difference(order))
        return MaskPlan(pieces, trims, num_supervised, num_unrendered, tuple(unrendered))

    def _reply_starts(self, turns: RenderedTurns) -> set[int]:
        """Return the start of each turn that a prompt can ask for, supervised in this row or not."""
        starts: set[int] = set()
        for index, message in enumerate(turns.conversation.messages):
            is_reply = message["role"] == "assistant" or message["role"] in self.rule.roles
            if is_reply and index in turns.anchor_indices and (turns.only is None or index in turns.only):
                try:
                    starts.add(turns.find_span(index)[0])
                except Rejected:  # an unsupervised turn; those that are supervised were found before
                    continue
        return starts

    def _supervised_spans(self, turns: RenderedTurns) -> tuple[list[Span], int, int]:
        """Return the span of each supervised turn, from its first character to its end marker."""
        supervised, unsupervised = self._select_turns(turns.conversation)
        selected = sorted(supervised | unsupervised)
        spans = {index: turns.find_span(index) for index in selected if index in turns.anchor_indices}
        ordered = sorted(spans.values())
        if self.rule.learn_from != "everything":
            return ordered, len(spans), len(supervised) - len(spans)
        edges = [0, *(edge for span in ordered for edge in span), len(turns.text)]
        return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start], 1, 0

    def _select_turns(self, conversation: Conversation) -> tuple[set[int], set[int]]:
        """Return the turns to supervise and, for `learn_from: everything`, the turns that the row excludes."""
        weights = conversation.learn or []
        included = {index for index, weight in enumerate(weights) if weight}
        excluded = {index for index, weight in enumerate(weights) if weight is False}
        if self.rule.learn_from == "everything":
            return set(), excluded
        turns = [index for index, message in enumerate(conversation.messages) if message["role"] in self.rule.roles]
        if self.rule.learn_from == "last_response":
            turns = turns[-1:]
        return (set(turns) | included) - excluded, set()


def _split_pieces(
    turns: RenderedTurns, spans: list[tuple[int, int, int]], supervised: list[Span], reply_starts: set[int]
) -> list[Piece]:
    """Split the text at markers, message texts and the edges of supervised spans."""
    slots = {start: slot for start, _, slot in spans}
    markers = dict(turns.marker_spans())
    edges = {0, len(turns.text), *reply_starts, *(edge for span in supervised for edge in span)}
    edges |= {edge for start, end, _ in spans for edge in (start, end)}
    edges |= {edge for span in markers.items() for edge in span}
    starts = [start for start, _ in supervised]
    pieces: list[Piece] = []
    for start, end in pairwise(sorted(edges)):
        index = bisect_right(starts, start) - 1
        is_supervised = index >= 0 and end <= supervised[index][1]
        is_slot = start in slots
        pieces.append(
            Piece(
                "" if is_slot else turns.text[start:end],
                slot=slots.get(start, -1),
                is_marker=not is_slot and markers.get(start) == end,
                is_supervised=is_supervised,
                starts_reply=start in reply_starts,
            )
        )
    return pieces
