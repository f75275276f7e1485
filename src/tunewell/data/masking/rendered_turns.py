"""Where in a rendered text each turn begins and ends."""

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
    """A place in the rendered text that holds a message's own text."""

    start: int
    end: int
    message: int
    field: str


@dataclass
class RenderedTurns:
    """One shape as the template renders it with stand-ins, and the turns that can be found in it."""

    template: ChatTemplate
    frame: ReplyFrame
    marker: re.Pattern[str]
    conversation: Conversation
    text: str
    anchors: list[Anchor]
    inline_thinking: frozenset[int]
    """Messages whose thinking, or its empty frame, the row itself wrote into the reply."""
    only: frozenset[int] | None
    """Messages that have stand-ins; None for all."""
    safe: str = ""
    """The same text, letter for letter, with tool calls in disguise: a marker in it is the template's own."""

    def __post_init__(self) -> None:
        self.safe = self.text
        messages, tools = self.conversation.messages, self.conversation.tools
        if self.only is None and not tools and all(len(message) == 2 for message in messages):
            return
        self.safe = self._in_disguise(placeholders.with_placeholders(messages, PLAIN, self.only)[0])
        if not placeholders.is_equal_outside_redactions(self.text, self.safe):
            raise Rejected("mask_uncertain", "its tool data changes how the template renders it")
        for found in placeholders.REDACTED.finditer(self.safe):
            self.anchors.append(Anchor(*found.span(), placeholders.redacted_message(found[1]), "tool_calls"))
        self.anchors.sort(key=lambda anchor: anchor.start)

    def _in_disguise(self, messages: list[Message]) -> str:
        return self.template.render(*placeholders.redact(messages, self.conversation.tools, self.marker, self.only))

    @cached_property
    def _places(self) -> dict[int, list[int]]:
        """For each message, which of the anchors are its own."""
        places: dict[int, list[int]] = defaultdict(list)
        for place, anchor in enumerate(self.anchors):
            places[anchor.message].append(place)
        return dict(places)

    def is_shown(self, index: int) -> bool:
        """Whether anything of a message is rendered."""
        return index in self._places

    def find(self, index: int) -> Span:
        """Find a turn: its words, what the row's tool calls and thinking add to them, and its end marker."""
        places = self._places[index]
        own = [self.anchors[place] for place in places]
        fields = [anchor.field for anchor in own if anchor.field != "tool_calls"]
        if len(fields) != len(set(fields)) or places[-1] - places[0] >= len(places):
            raise Rejected("mask_uncertain", "the template renders a reply twice or in parts")
        if index in self._out_of_order:
            raise Rejected("mask_uncertain", "the template renders turns out of order")
        before = self.anchors[places[0] - 1].end if places[0] else 0
        is_last = places[-1] + 1 == len(self.anchors)
        limit = len(self.text) if is_last else self.anchors[places[-1] + 1].start
        return self._start(index, own[0], before), self._end(index, own, limit)

    @cached_property
    def _out_of_order(self) -> set[int]:
        """List replies that stand before what they answer; where system messages go is the template's affair."""
        messages = self.conversation.messages
        shown = [index for index in self._places if messages[index]["role"] != "system"]
        latest = [-1, *accumulate(shown, max)]
        earliest = [*accumulate(reversed(shown), min)][::-1]
        return {
            index for index, late, early in zip(shown, latest, earliest, strict=False) if late > index or early < index
        }

    def _start(self, index: int, first: Anchor, before: int) -> int:
        message, header = self.conversation.messages[index], self.frame.header
        gap = self.safe[before : first.start]
        has_thinking = index in self.inline_thinking or first.field not in ("content", "tool_calls")
        if not has_thinking and not message.get("tool_calls"):
            space = self.frame.leading_space if message["role"] == "assistant" else ""
            return first.start - len(space) if space and gap.endswith(space) else first.start
        # The model writes the frame of its calls and thoughts too; what stands before a plain reply is given.
        at = gap.rfind(header) if header else -1
        if has_thinking and at >= 0:
            return before + at + len(header)
        plain = self._gap_of_plain_reply(index)
        if plain is not None and gap.startswith(plain):
            return before + len(plain)
        if at >= 0:
            return before + at + len(header)
        raise Rejected("mask_uncertain", "where a turn with thinking or tool calls begins cannot be told")

    def _gap_of_plain_reply(self, index: int) -> str | None:
        """See what the template would write before this turn if it were a plain reply."""
        messages, _ = placeholders.with_placeholders(self.conversation.messages, PLAIN, self.only)
        messages[index] = {"role": messages[index]["role"], "content": placeholder(0, SPACED)}
        # Some templates take the results that follow only behind calls, so what follows is left out if need be.
        for some in (messages, messages[: index + 1]):
            try:
                before, found, _ = self._in_disguise(some).partition(placeholder(0, SPACED))
            except TemplateFailed:
                continue
            if found:
                return before[max([0, *(match.end() for match in placeholders.ANCHOR.finditer(before))]) :]
        return None

    def _end(self, index: int, own: list[Anchor], limit: int) -> int:
        frame, after = self.frame, own[-1].end
        message = self.conversation.messages[index]
        stops = frame.ends | frame.openers
        if any(found.group() in stops for found in self.marker.finditer(self.safe, own[0].start, after)):
            raise Rejected("mask_uncertain", "a turn with tool calls is rendered in parts")
        found = list(self.marker.finditer(self.safe, after, limit))
        is_framed = message["role"] != "assistant" or bool(message.get("tool_calls"))
        for place, marker in enumerate(found):
            if marker.group() in frame.ends:
                return marker.end()
            if marker.group() in frame.openers:
                break
            # Calls may have an end of their own; their frame's other markers come before the usual one.
            if is_framed and not any(later.group() in frame.ends for later in found[place:]):
                return marker.end()
        if message["role"] != "assistant":
            return after
        raise Rejected("mask_uncertain", "a reply is not followed by the template's end-of-turn marker")

    def marks(self) -> list[Span]:
        """List the template's own markers; refuse one that runs into words."""
        marks = [found.span() for found in self.marker.finditer(self.safe)]
        starts = [start for start, _ in marks]
        for anchor in self.anchors:
            at = bisect_left(starts, anchor.end) - 1
            if at >= 0 and marks[at][1] > anchor.start:
                raise Rejected("mask_uncertain", "a marker of the template's runs into the words")
        return marks
