"""Find out where each message lands in the rendered text, and so what is supervised.

Nothing is searched for in the text of the rows. The template is rendered with stand-ins in place of the words:

    real       <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\nhello<|im_end|>\\n
    stand-ins  <|im_start|>user\\nZq0wXv<|im_end|>\\n<|im_start|>assistant\\nZq1wXv<|im_end|>\\n
    supervised                                                             ^^^^^^^^^^^^^^^^

which shows the template's own text and the places of the words. A second rendering with other stand-ins, in spaces and
line ends, shows what the template trims; a third, where there are tool calls, whose text is whose. The real rendering
must then be exactly the template's text with the words in their places; if it is not, the template does something with
the words that we do not understand, and the row is refused. (A template whose source proves that it can do nothing of
the kind is spared this for most rows.)
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tunewell.data.masking import placeholders
from tunewell.data.masking.placeholders import NO_TRIM, PLAIN, SPACED, Trim, placeholder
from tunewell.data.masking.rendered_turns import Anchor, RenderedTurns, Span
from tunewell.data.masking.reply_frame import marker_pattern, probe_reply_frame
from tunewell.data.rows.conversation import Conversation, Rejected
from tunewell.data.templates.chat_template import ChatTemplate, TemplateFailed
from tunewell.data.tokenizers.load import AddedTokenInfo

_MAX_PLANS = 4096


@dataclass(slots=True)
class Piece:
    """A stretch of a rendered text: a marker of the template's, its other text, or a message's words."""

    text: str
    """Of a marker or of the template; empty for words."""
    slot: int = -1
    """Which words go here; -1 for none."""
    is_marker: bool = False
    is_supervised: bool = False


@dataclass(slots=True)
class Plan:
    """How conversations of one shape are rendered and what of them is supervised."""

    pieces: list[Piece]
    trims: list[Trim]
    num_supervised_turns: int
    num_unrendered_turns: int
    """Replies that the template does not render at all."""
    compiled: Any = None
    """What the encoder makes of it, kept here so that it is made once."""
    _parts: list[tuple[str, int, Trim | None]] = field(init=False)

    def __post_init__(self) -> None:
        self._parts = [
            (
                piece.text,
                piece.slot,
                None if piece.slot < 0 or self.trims[piece.slot] == NO_TRIM else self.trims[piece.slot],
            )
            for piece in self.pieces
        ]

    def fill(self, words: list[str]) -> str:
        """Put the words in their places."""
        return "".join(
            [text if slot < 0 else trim(words[slot]) if trim else words[slot] for text, slot, trim in self._parts]
        )


@dataclass(frozen=True)
class SupervisionRule:
    """Which turns are supervised."""

    learn_from: str = "responses"
    roles: tuple[str, ...] = ("assistant",)


ASSISTANT_REPLIES = SupervisionRule()
"""The usual rule: everything the assistant says."""


class Masker:
    """Lays out conversations for one template, one tokenizer's markers and one rule of what to learn."""

    def __init__(
        self, template: ChatTemplate, added: Mapping[str, AddedTokenInfo], rule: SupervisionRule = ASSISTANT_REPLIES
    ) -> None:
        self.template = template
        self.rule = rule
        self.frame = probe_reply_frame(template, added)
        self._marker = marker_pattern(self.frame.markers)
        self._plans: dict[Any, Plan | Rejected] = {}

    @property
    def end_marker(self) -> str:
        """The marker that ends the last reply."""
        return self.frame.end_marker

    @property
    def turn_markers(self) -> tuple[str, ...]:
        """The markers that stand in every conversation."""
        return self.frame.turn_markers

    def lay_out(self, conversation: Conversation) -> tuple[Plan, list[str]]:
        """Give the plan of a conversation and the words that go into it; raise Rejected when the mask is in doubt."""
        words, shape = placeholders.extract_texts(conversation)
        plan = self._plans.get(shape)
        try:
            text = self.template.render(conversation.messages, conversation.tools)
        except TemplateFailed as failure:
            raise Rejected("not_a_conversation", f"the template refuses it: {failure}") from failure
        if plan is None:
            plan = self._remember(shape, conversation, frozenset())
        if isinstance(plan, Plan) and plan.fill(words) == text:
            return plan, words
        return self._lay_out_rewritten(conversation, text, plan)

    def _lay_out_rewritten(
        self, conversation: Conversation, text: str, plan: Plan | Rejected
    ) -> tuple[Plan, list[str]]:
        """Lay out a row that the template does something to: it takes thinking out of replies, or rewrites context."""
        versions = placeholders.with_separate_thinking(conversation)
        for version, inline_thinking in versions:
            words, shape = placeholders.extract_texts(version)
            own = self._plans.get((shape, inline_thinking)) or self._remember(
                (shape, inline_thinking), version, inline_thinking
            )
            if isinstance(own, Plan) and own.fill(words) == text:
                return own, words
        versions.insert(0, (conversation, frozenset()))
        for version, inline_thinking in versions:
            # Only what is supervised has to be followed word by word; the rest may be anything, as it is in this row.
            wanted, refused = self._turns_to_supervise(version)
            only = frozenset(wanted | refused)
            own = self._try_plan(version, inline_thinking, only)
            words = [word for index in sorted(only) for word in placeholders.texts_of(version.messages[index])]
            if isinstance(own, Plan) and own.fill(words) == text:
                return own, words
        detail = plan.detail if isinstance(plan, Rejected) else "the template changes the words of this row"
        raise Rejected("mask_uncertain", detail)

    def _remember(self, shape: Any, conversation: Conversation, inline_thinking: frozenset[int]) -> Plan | Rejected:
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        plan = self._plans[shape] = self._try_plan(conversation, inline_thinking)
        return plan

    def _try_plan(
        self, conversation: Conversation, inline_thinking: frozenset[int], only: frozenset[int] | None = None
    ) -> Plan | Rejected:
        try:
            return self._make_plan(conversation, inline_thinking, only)
        except TemplateFailed as failure:
            return Rejected("mask_uncertain", f"the template refuses it with other words: {failure}")
        except Rejected as rejected:
            return rejected

    def _make_plan(
        self, conversation: Conversation, inline_thinking: frozenset[int], only: frozenset[int] | None
    ) -> Plan:
        if placeholders.contains_placeholder(conversation):
            raise Rejected("mask_uncertain", "its tool data cannot be told from what is put in place of its words")
        plain, slots = placeholders.with_placeholders(conversation.messages, PLAIN, only)
        spaced, _ = placeholders.with_placeholders(conversation.messages, SPACED, only)
        text = self.template.render(plain, conversation.tools)
        literals, order = placeholders.split_at_placeholders(text, PLAIN, len(slots))
        other = placeholders.split_at_placeholders(self.template.render(spaced, conversation.tools), SPACED, len(slots))
        trims = placeholders.compare_trims((literals, order), other, len(slots))
        spans: list[tuple[int, int, int]] = []
        at = 0
        for literal, slot in zip(literals, order, strict=False):
            at += len(literal)
            spans.append((at, at + len(placeholder(slot)), slot))
            at = spans[-1][1]
        anchors = [Anchor(start, end, *slots[slot]) for start, end, slot in spans]
        turns = RenderedTurns(
            self.template, self.frame, self._marker, conversation, text, anchors, inline_thinking, only
        )
        supervised, num_supervised, num_lost = self._supervised_spans(turns)
        return Plan(_split_pieces(turns, spans, supervised), trims, num_supervised, num_lost)

    def _supervised_spans(self, turns: RenderedTurns) -> tuple[list[Span], int, int]:
        """Find the stretches that are supervised: each wanted turn, from its first word to its end marker."""
        wanted, refused = self._turns_to_supervise(turns.conversation)
        spans = {index: turns.find(index) for index in sorted(wanted | refused) if turns.is_shown(index)}
        ordered = sorted(spans.values())
        if self.rule.learn_from != "everything":
            return ordered, len(spans), len(wanted) - len(spans)
        edges = [0, *(edge for span in ordered for edge in span), len(turns.text)]
        return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start], 1, 0

    def _turns_to_supervise(self, conversation: Conversation) -> tuple[set[int], set[int]]:
        """List the turns to learn; where everything is supervised, those that the row itself wants left out."""
        learn = conversation.learn or []
        asked = {index for index, weight in enumerate(learn) if weight}
        refused = {index for index, weight in enumerate(learn) if weight is False}
        if self.rule.learn_from == "everything":
            return set(), refused
        turns = [index for index, message in enumerate(conversation.messages) if message["role"] in self.rule.roles]
        if self.rule.learn_from == "last_response":
            turns = turns[-1:]
        return (set(turns) | asked) - refused, set()


def _split_pieces(turns: RenderedTurns, spans: list[tuple[int, int, int]], supervised: list[Span]) -> list[Piece]:
    """Cut the text at markers, words and the edges of what is supervised."""
    slots = {start: slot for start, _, slot in spans}
    marks = dict(turns.marks())
    edges = {0, len(turns.text), *(edge for span in supervised for edge in span)}
    edges |= {edge for start, end, _ in spans for edge in (start, end)}
    edges |= {edge for span in marks.items() for edge in span}
    begins = [begin for begin, _ in supervised]
    pieces = []
    for start, end in pairwise(sorted(edges)):
        at = bisect_right(begins, start) - 1
        is_supervised = at >= 0 and end <= supervised[at][1]
        if start in slots:
            pieces.append(Piece("", slot=slots[start], is_supervised=is_supervised))
        else:
            is_marker = marks.get(start) == end
            pieces.append(Piece(turns.text[start:end], is_marker=is_marker, is_supervised=is_supervised))
    return pieces
