"""Find where each turn begins and ends in a conversation rendered with placeholders."""

import re
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from tunewell.data.masking import placeholders
from tunewell.data.masking.placeholders import PLAIN, SPACED, placeholder
from tunewell.data.masking.reply_frame import ReplyFrame
from tunewell.data.rows.conversation import Conversation, Message, Rejected
from tunewell.data.templates.chat_template import ChatTemplate, TemplateFailed

Span = tuple[int, int]


@dataclass(slots=True)
class Anchor:
    """A span of the rendered text that comes from a message."""

    start: int
    end: int
    message: int
    field: str


@dataclass
class RenderedTurns:
    """A conversation rendered with placeholders, and the turns in it."""

    template: ChatTemplate
    frame: ReplyFrame
    marker: re.Pattern[str]
    conversation: Conversation
    text: str
    anchors: list[Anchor]
    inline_thinking: frozenset[int]
    """Messages whose `<think>` tags the row itself wrote into the reply."""
    only: frozenset[int] | None
    """Messages that have placeholders; None for all."""
    redacted: str = ""
    """The same text, character for character, with tool calls redacted: every marker in it is from the template."""

    def __post_init__(self) -> None:
        self.redacted = self.text
        messages, tools = self.conversation.messages, self.conversation.tools
        if self.only is None and not tools and all(len(message) == 2 for message in messages):
            return
        self.redacted = self._render_redacted(placeholders.with_placeholders(messages, PLAIN, self.only)[0])
        if not placeholders.is_equal_outside_redactions(self.text, self.redacted):
            raise Rejected("mask_uncertain", "its tool data changes how the template renders it")
        for match in placeholders.REDACTED.finditer(self.redacted):
            self.anchors.append(Anchor(*match.span(), placeholders.redacted_message(match[1]), "tool_calls"))
        self.anchors.sort(key=lambda anchor: anchor.start)

    def _render_redacted(self, messages: list[Message]) -> str:
        return self.template.render(*placeholders.redact(messages, self.conversation.tools, self.marker, self.only))

    @cached_property
    def _anchor_indices(self) -> dict[int, list[int]]:
        """For each rendered message, the indices of its anchors."""
        indices: dict[int, list[int]] = defaultdict(list)
        for index, anchor in enumerate(self.anchors):
            indices[anchor.message].append(index)
        return dict(indices)

    def is_rendered(self, message: int) -> bool:
        """Return whether the template renders any text of a message."""
        return message in self._anchor_indices

    def find_span(self, message: int) -> Span:
        """Return the span of a turn: its text, its tool calls and thinking with their tags, and its end marker."""
        indices = self._anchor_indices[message]
        anchors = [self.anchors[index] for index in indices]
        fields = [anchor.field for anchor in anchors if anchor.field != "tool_calls"]
        if len(fields) != len(set(fields)) or indices[-1] - indices[0] >= len(indices):
            raise Rejected("mask_uncertain", "the template renders a reply twice or in parts")
        if message in self._out_of_order:
            raise Rejected("mask_uncertain", "the template renders turns out of order")
        previous_end = self.anchors[indices[0] - 1].end if indices[0] else 0
        is_last = indices[-1] + 1 == len(self.anchors)
        limit = len(self.text) if is_last else self.anchors[indices[-1] + 1].start
        return self._find_start(message, anchors[0], previous_end), self._find_end(message, anchors, limit)

    @cached_property
    def _out_of_order(self) -> set[int]:
        """The replies that are rendered before what they answer; system messages may be anywhere."""
        messages = self.conversation.messages
        rendered = [index for index in self._anchor_indices if messages[index]["role"] != "system"]
        latest = [-1, *accumulate(rendered, max)]
        earliest = [*accumulate(reversed(rendered), min)][::-1]
        return {
            index
            for index, late, early in zip(rendered, latest, earliest, strict=False)
            if late > index or early < index
        }

    def _find_start(self, index: int, first: Anchor, previous_end: int) -> int:
        message, header = self.conversation.messages[index], self.frame.header
        gap = self.redacted[previous_end : first.start]
        has_thinking = index in self.inline_thinking or first.field not in ("content", "tool_calls")
        if not has_thinking and not message.get("tool_calls"):
            space = self.frame.leading_space if message["role"] == "assistant" else ""
            return first.start - len(space) if space and gap.endswith(space) else first.start
        # The model also writes the tags of its tool calls and thoughts. The text before a plain reply is context.
        header_start = gap.rfind(header) if header else -1
        if has_thinking and header_start >= 0:
            return previous_end + header_start + len(header)
        plain_gap = self._gap_before_plain_reply(index)
        if plain_gap is not None and gap.startswith(plain_gap):
            return previous_end + len(plain_gap)
        if header_start >= 0:
            return previous_end + header_start + len(header)
        raise Rejected("mask_uncertain", "the start of a turn with thinking or tool calls cannot be found")

    def _gap_before_plain_reply(self, index: int) -> str | None:
        """Return what the template would write before this turn if it were a plain reply."""
        messages, _ = placeholders.with_placeholders(self.conversation.messages, PLAIN, self.only)
        messages[index] = {"role": messages[index]["role"], "content": placeholder(0, SPACED)}
        # Some templates accept tool results only after tool calls, so the second attempt leaves out what follows.
        for some in (messages, messages[: index + 1]):
            try:
                before, found, _ = self._render_redacted(some).partition(placeholder(0, SPACED))
            except TemplateFailed:
                continue
            if found:
                return before[max([0, *(match.end() for match in placeholders.ANCHOR.finditer(before))]) :]
        return None

    def _find_end(self, index: int, anchors: list[Anchor], limit: int) -> int:
        frame, text_end = self.frame, anchors[-1].end
        message = self.conversation.messages[index]
        turn_edges = frame.ends | frame.openers
        inside = self.marker.finditer(self.redacted, anchors[0].start, text_end)
        if any(match.group() in turn_edges for match in inside):
            raise Rejected("mask_uncertain", "a turn with tool calls is rendered in parts")
        matches = list(self.marker.finditer(self.redacted, text_end, limit))
        has_other_end = message["role"] != "assistant" or bool(message.get("tool_calls"))
        for position, marker in enumerate(matches):
            if marker.group() in frame.ends:
                return marker.end()
            if marker.group() in frame.openers:
                break
            # Tool calls can have their own end marker. Other markers around them come before the usual end.
            if has_other_end and not any(later.group() in frame.ends for later in matches[position:]):
                return marker.end()
        if message["role"] != "assistant":
            return text_end
        raise Rejected("mask_uncertain", "a reply is not followed by the template's end-of-turn marker")

    def marker_spans(self) -> list[Span]:
        """Return the spans of the template's markers; raise Rejected if one overlaps the text of a message."""
        spans = [match.span() for match in self.marker.finditer(self.redacted)]
        starts = [start for start, _ in spans]
        for anchor in self.anchors:
            index = bisect_left(starts, anchor.end) - 1
            if index >= 0 and spans[index][1] > anchor.start:
                raise Rejected("mask_uncertain", "a marker of the template overlaps the text of a message")
        return spans
