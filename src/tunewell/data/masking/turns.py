"""Find turns in rendered text: the text that a template writes around a reply, and the start and end of each turn."""

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, takewhile
from typing import Any

from tunewell.core.errors import UserError
from tunewell.data.masking import placeholders
from tunewell.data.masking.placeholders import PLAIN, SPACED, placeholder
from tunewell.data.rows.conversation import Conversation, Message, Rejected, objects_in
from tunewell.data.templates.chat_template import ChatTemplate, TemplateFailed
from tunewell.data.tokenizers.load import AddedTokenInfo

# Tags that replies can contain. The tokenizer encodes each tag as one token, wherever it appears.
_REPLY_TAG = re.compile("think|thought|reason|tool", re.IGNORECASE)
_BROKEN_TAG = re.compile(r"[<\[][^<>\[\]\s]*\Z")
"""The start of a tag whose rest differs: `<think>` and `</think>` share `<`."""


@dataclass(frozen=True)
class ReplyFrame:
    """The text around a reply, and the added tokens of the tokenizer that the template uses as markers."""

    header: str
    """The text of the generation prompt; empty if the template has none."""
    leading_space: str
    """White space between the generation prompt and a reply. The model must generate it."""
    end_marker: str
    """The marker that ends the last reply."""
    ends: frozenset[str]
    """All markers that can end a reply."""
    openers: frozenset[str]
    """Markers that begin a turn and do not end one."""
    markers: tuple[str, ...]
    """All special tokens, and the other added tokens that the template writes around turns."""
    turn_markers: tuple[str, ...]
    """The markers that appear in every conversation."""
    ends_of_parts: frozenset[str] = frozenset()
    """The ends that also stand after the thinking of a reply, where generation goes on: `<|end|>` of gpt-oss."""
    opening: str = ""
    """The start of the header that is written before every reply, with thinking or without; may be empty."""
    tags: tuple[str, ...] = ()
    """The added tokens that are no markers, for example `</tool_call>`."""
    added_end: str = ""
    """Text that ends replies between turns but that the template does not write after the last reply; else empty."""

    @property
    def stops(self) -> frozenset[str]:
        """The markers at which generation stops."""
        return self.ends - self.ends_of_parts


def probe_reply_frame(template: ChatTemplate, added: Mapping[str, AddedTokenInfo]) -> ReplyFrame:
    """Return the reply frame of a template; raise UserError if a reply cannot be supervised with an end marker."""
    question_only, prompt, whole, between = _render_probes(template)
    question, _, _ = whole.partition(placeholder(0))
    _, found, after = whole.rpartition(placeholder(1))
    if not found:
        raise UserError(
            f"the template `{template.name}` changes the text of a reply, so the loss mask cannot be found",
            fix="choose another template with `template.name`",
        )
    markers = _markers(added, prompt, whole, between)
    marker = marker_pattern(markers)
    end, added_end = marker.search(after), ""
    header = prompt[len(question_only) :] if prompt.startswith(question_only) else ""
    is_same_between = bool(after) and between.startswith(after)
    if end is not None and is_same_between:
        # All of this text ends the reply; in `<|close|>message<|sep|><|end_of_msg|>`, only the last marker is the end.
        end = list(marker.finditer(after))[-1]
    if not after.strip() and (end := marker.search(between)) is not None:
        added_end = between[: end.end()].removeprefix(after)
        if end.group() in marker.findall(header):  # it opens every turn and ends none
            end = None
    if end is None:
        raise UserError(
            f"the template `{template.name}` does not end replies with a token of this tokenizer",
            where=f"after a reply, the template writes {after!r}"
            if after
            else "after a reply, the template writes nothing",
            fix="without an end token the model would never stop: choose another template with `template.name`",
        )
    prompt_gap = prompt.rpartition(placeholder(0))[2]
    reply_gap = whole.rpartition(placeholder(1))[0].rpartition(placeholder(0))[2]
    space = reply_gap[len(prompt_gap) :] if reply_gap.startswith(prompt_gap) else ""
    others = [] if is_same_between else _end_between_turns(marker, header, question, between)
    ends = {end.group(), *others}
    in_headers = {*marker.findall(question), *marker.findall(header)}
    return ReplyFrame(
        header=header,
        leading_space=space if space.isspace() else "",
        end_marker=end.group(),
        ends=frozenset(ends),
        openers=frozenset(in_headers - ends - set(marker.findall(after) if is_same_between else ())),
        markers=markers,
        turn_markers=tuple(dict.fromkeys([*marker.findall(prompt), *sorted(ends)])),
        ends_of_parts=frozenset(ends & _markers_after_thinking(template, marker) - {end.group()}),
        opening=_shared_opening(template, header, prompt),
        tags=tuple(text for text in added if text.strip() and text not in markers),
        added_end=added_end,
    )


def marker_pattern(markers: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds the longest marker at each position."""
    ordered = sorted(markers, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else re.compile(r"(?!)")


def _render_probes(template: ChatTemplate) -> tuple[str, str, str, str]:
    """Render a question, with and without a generation prompt, and with its reply; return the text between turns too.

    The last text is empty if the template rejects a second question.
    """
    turns = [{"role": role, "content": placeholder(n)} for n, role in enumerate(["user", "assistant"] * 2)]
    asked, replied, tools = turns[:1], turns[:2], template.probe_tools
    try:
        texts = (
            template.render(asked, tools),
            template.render(asked, tools, add_generation_prompt=True),
            template.render(replied, tools),
        )
    except TemplateFailed as failure:
        raise UserError(
            f"the template `{template.name}` cannot render one question and one answer: {failure}",
            fix="choose another template with `template.name`",
        ) from failure
    try:
        text = template.render(turns, tools)
    except TemplateFailed:
        return *texts, ""
    return *texts, text.partition(placeholder(1))[2].partition(placeholder(2))[0]


def _thinking_turns() -> list[Message]:
    reply = {"role": "assistant", "content": placeholder(1), "reasoning_content": placeholder(4)}
    return [{"role": "user", "content": placeholder(0)}, {**reply, "thinking": placeholder(4)}]


def _markers_after_thinking(template: ChatTemplate, marker: re.Pattern[str]) -> set[str]:
    text = template.try_render(_thinking_turns(), template.probe_tools) or ""
    return {*marker.findall(text.partition(placeholder(4))[2].partition(placeholder(1))[0])}


def _shared_opening(template: ChatTemplate, header: str, prompt: str) -> str:
    turns = [{"role": role, "content": placeholder(n)} for n, role in enumerate(["user", "assistant"] * 2)]
    conversations = (turns[:2], turns, _thinking_turns())
    rendered = (template.try_render(some, template.probe_tools) for some in conversations)
    after = [text.partition(placeholder(0))[2] for text in (prompt, *filter(None, rendered))]
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*after, strict=False))
    shared = _BROKEN_TAG.sub("", "".join(letters[0] for letters in same))
    return shared[len(after[0]) - len(header) :] if header else ""


def _markers(added: Mapping[str, AddedTokenInfo], *texts: str) -> tuple[str, ...]:
    special = [text for text, facts in added.items() if facts.special]
    others = [text for text, facts in added.items() if not facts.special and text.strip()]
    used = {found for text in texts for found in marker_pattern(others).findall(text) if not _REPLY_TAG.search(found)}
    markers = [*special, *sorted(used)]
    if broken := [text for text in markers if added[text].single_word and any(text in rendered for rendered in texts)]:
        raise UserError(
            f"the tokenizer recognises `{broken[0]}` only between spaces or punctuation (`single_word`)",
            fix="add this token to the tokenizer as a special token without `single_word`",
        )
    return tuple(markers)


def _end_between_turns(marker: re.Pattern[str], header: str, question: str, gap: str) -> list[str]:
    """Return the marker that ends a reply before another turn, or nothing if it belongs to the next turn's header."""
    end = marker.search(gap)
    if end is None or end.group() in marker.findall(header):
        return []
    if end.group() in question and not marker.search(gap, end.end()):
        return []
    return [end.group()]


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
    """Messages in which the `<think>` tags are part of the reply text in the row."""
    only: frozenset[int] | None
    """Messages that have placeholders, or None if all messages have them."""
    redacted: str = ""
    """The same text with redacted tool calls, at the same positions. All of its markers come from the template."""

    def __post_init__(self) -> None:
        self.redacted = self.text
        messages, tools = self.conversation.messages, self.conversation.tools
        if self.only is None and not tools and all(len(message) == 2 for message in messages):
            return
        self.redacted = self._render_redacted(placeholders.with_placeholders(messages, PLAIN, self.only)[0])
        if not placeholders.is_equal_outside_redactions(self.text, self.redacted):
            raise Rejected("mask_uncertain", "the tool data changes how the template renders the conversation")
        for match in placeholders.REDACTED.finditer(self.redacted):
            self.anchors.append(Anchor(*match.span(), ord(match[1]) - placeholders.FIRST_REDACTION, "tool_calls"))
        self.anchors.sort(key=lambda anchor: anchor.start)
        for index, message in enumerate(messages):
            names = Counter(call.get("function", call).get("name") for call in objects_in(message.get("tool_calls")))
            self._drop_repeated_names(index, names)

    def _drop_repeated_names(self, index: int, names: Counter[Any]) -> None:
        """Drop names of calls in the headers of results: `<|start|>functions.weather to=assistant<|message|>`."""
        own = [at for at, a in enumerate(self.anchors[:-1]) if (a.message, a.field) == (index, "tool_calls")]
        tag = marker_pattern([*self.frame.markers, *self.frame.tags])
        texts = [self.text[self.anchors[at].start : self.anchors[at].end] for at in own]
        while own and texts.count(texts[-1]) > names[texts[-1]] > 0:
            last, following = self.anchors[own[-1]], self.anchors[own[-1] + 1]
            if following.message == index or not tag.search(self.redacted, last.end, following.start):
                break
            del self.anchors[own.pop()], texts[-1]

    def _render_redacted(self, messages: list[Message]) -> str:
        return self.template.render(*placeholders.redact(messages, self.conversation.tools, self.marker, self.only))

    @cached_property
    def anchor_indices(self) -> dict[int, list[int]]:
        """The indices of the anchors of each rendered message."""
        indices: dict[int, list[int]] = defaultdict(list)
        for index, anchor in enumerate(self.anchors):
            indices[anchor.message].append(index)
        return dict(indices)

    def find_span(self, message: int) -> Span:
        """Return the span of a turn: its text, tool calls, thinking, tags and end marker."""
        indices = self.anchor_indices[message]
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
        """The replies that are rendered before the messages they answer. System messages may be anywhere."""
        messages = self.conversation.messages
        rendered = [index for index in self.anchor_indices if messages[index]["role"] != "system"]
        latest = [-1, *accumulate(rendered, max)]
        earliest = [*accumulate(reversed(rendered), min)][::-1]
        return {
            index
            for index, late, early in zip(rendered, latest, earliest, strict=False)
            if late > index or early < index
        }

    def _find_start(self, index: int, first: Anchor, previous_end: int) -> int:
        message, frame = self.conversation.messages[index], self.frame
        gap = self.redacted[previous_end : first.start]
        # The model generates all that follows the generation prompt, also an empty frame of thinking.
        for written in (frame.header, frame.opening) if message["role"] == "assistant" else ():
            if written.strip() and written in gap:
                return previous_end + gap.rfind(written) + len(written)
        if first.field == "content" and index not in self.inline_thinking:
            space = frame.leading_space if message["role"] == "assistant" else ""
            return first.start - len(space) if space and gap.endswith(space) else first.start
        context = self._gap_before_plain_reply(index)
        if context is not None and gap.startswith(context):
            return previous_end + len(context)
        raise Rejected("mask_uncertain", "the start of a turn with thinking or tool calls cannot be found")

    def _gap_before_plain_reply(self, index: int) -> str | None:
        """Return the text that the template would write before this turn if it were a plain reply."""
        messages, _ = placeholders.with_placeholders(self.conversation.messages, PLAIN, self.only)
        messages[index] = {"role": messages[index]["role"], "content": placeholder(0, SPACED)}
        # Some templates accept tool results only after tool calls, so the second attempt omits the following messages.
        for some in (messages, messages[: index + 1]):
            try:
                before, found, _ = self._render_redacted(some).partition(placeholder(0, SPACED))
            except TemplateFailed:
                continue
            if found:
                return before[max([0, *(match.end() for match in placeholders.ANCHOR.finditer(before))]) :]
        return None

    @cached_property
    def _next_part(self) -> re.Pattern[str]:
        ends = "|".join(map(re.escape, self.frame.ends))
        opening = self.frame.opening
        return re.compile(rf"(?:(?:{ends})\s*)?{re.escape(opening)}" if opening.strip() else r"(?!)")

    def _find_end(self, index: int, anchors: list[Anchor], limit: int) -> int:
        frame, text_end = self.frame, anchors[-1].end
        quotes = self.marker.findall(self.redacted, anchors[-2].end, anchors[-1].start) if len(anchors) > 1 else ()
        message = self.conversation.messages[index]
        # A reply can have parts: `thinking<|end|><|start|>assistant<|channel|>final<|message|>text<|return|>`.
        inside = self._next_part.sub("", self.redacted[anchors[0].start : text_end])
        if not frame.ends.isdisjoint(self.marker.findall(inside)):
            raise Rejected("mask_uncertain", "a turn with tool calls is rendered in parts")
        matches = list(self.marker.finditer(self.redacted, text_end, limit))
        calls = bool(message.get("tool_calls"))
        for position, marker in enumerate(matches):
            if marker.group() in frame.ends:
                # A model that learned to end its earlier replies with the end of a part would not stop.
                return marker.end() if marker.group() in frame.stops else marker.start()
            if marker.group() in frame.openers:
                break
            # Tool calls can have their own end marker. Other markers around them come before the usual end.
            has_other_end = message["role"] != "assistant" or (calls and marker.group() not in quotes)
            if has_other_end and not any(later.group() in frame.ends for later in matches[position:]):
                return marker.end()
        if calls and not matches and limit == len(self.text):
            return len(self.text.rstrip())
        if calls and (tag := marker_pattern(frame.tags).search(self.redacted, text_end, limit)):
            return tag.end()
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
