"""Probe a chat template by rendering marker messages and splitting the text at them; generate test conversations."""

import itertools
import random
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from tunewell.core.files import read_data
from tunewell.data.templates.chat_template import TemplateFailed
from tunewell.export.ollama.layout import ContentSlot, Layout, NoExactLayout, Observation, Render, Roles, Segments

SPACES = "".join(character for character in map(chr, range(0x3001)) if character.isspace())
"""All characters that Python, and so Jinja's `trim`, treats as white space; all are below U+3001."""

# Markers contain upper and lower case, quotes, and characters that JSON and HTML escape, so that any edit shows.
_OPEN, _CLOSE = "Qz", "vXw'\"\\&<"
_NUM_RANDOM = 100
"""Random conversations per comparison, in addition to all short sequences of roles; about 30 ms for most templates."""
_MARKER = re.compile(f"{_OPEN}([0-9]+){re.escape(_CLOSE)}")

SystemPlacement = Literal["inline", "moved"]
Parts = tuple[str, ...]
"""A text split at its markers: text, marker number, text, marker number, ..., text."""


def marked_conversation(roles: Sequence[str], left: str = "", right: str = "") -> list[dict[str, str]]:
    """Return a conversation of marker messages, with the given text on both sides of each marker."""
    return [{"role": role, "content": f"{left}{_OPEN}{index}{_CLOSE}{right}"} for index, role in enumerate(roles)]


def _group_by_message(segments: Sequence[str | ContentSlot]) -> Iterator[Segments]:
    """Yield the segments up to and including each message's content, then the segments after the last message."""
    group: list[str | ContentSlot] = []
    for segment in segments:
        group += [segment] if segment != "" else []
        if isinstance(segment, ContentSlot) and segment.source == "message":
            yield tuple(group)
            group = []
    yield tuple(group)


# Conversations: sequences of roles that Ollama passes to a template, and contents that templates often change.


@dataclass(frozen=True)
class RoleGroup:
    """Sequences of roles that a template may support besides alternating questions and replies."""

    name: str
    sequences: tuple[Roles, ...]
    fallback: str
    """What the Go template does with these sequences if the original rejects them; Ollama itself rejects nothing."""


def _with_and_without_system(*sequences: Roles) -> tuple[Roles, ...]:
    return (*sequences, *(("system", *sequence) for sequence in sequences))


QUESTIONS: tuple[Roles, ...] = tuple(("user", *("assistant", "user") * num_later) for num_later in range(4))
"""One to four questions with the replies between them, which every layout must render."""
UNFINISHED = RoleGroup(
    "a reply to be continued",
    _with_and_without_system(*(sequence[:-1] for sequence in QUESTIONS[1:])),
    "is rendered like an earlier reply",
)
LATER_SYSTEM = RoleGroup(
    "a system message after the first message",
    _with_and_without_system(
        ("user", "system"),
        ("user", "system", "user"),
        ("user", "system", "assistant"),
        ("user", "system", "assistant", "user"),
        ("user", "assistant", "system"),
        ("user", "assistant", "system", "user"),
        ("user", "assistant", "system", "assistant"),
        ("user", "assistant", "user", "system"),
        ("user", "assistant", "system", "user", "assistant", "user"),
        ("user", "assistant", "user", "assistant", "system", "user", "assistant", "system", "user"),
    ),
    "is left out",
)
REPLY_FIRST = RoleGroup(
    "a conversation that begins with a reply",
    _with_and_without_system(
        *(("assistant", *sequence) for sequence in QUESTIONS),
        ("assistant",),
        ("assistant", "user", "assistant"),
        ("assistant", "system"),
        ("assistant", "system", "user"),
        ("assistant", "system", "assistant"),
    ),
    "is rendered as if a question came before it",
)
SYSTEM_ALONE = RoleGroup("a system message alone", (("system",),), "is rendered as before a question")
GROUPS = (UNFINISHED, SYSTEM_ALONE, LATER_SYSTEM, REPLY_FIRST)

_MAX_MESSAGES = 80
"""Messages in the longest test conversations; differences that appear later are not detected."""


@cache
def _contents() -> list[str]:
    """Return contents that templates often change."""
    return read_data(__file__, "awkward_texts.json")


def awkward_text(draw: random.Random) -> str:
    """Return random content that templates often change, sometimes with white space around it."""
    left, right = (draw.choice(("", "", "", " ", "\n", "\n\n", " \n", draw.choice(SPACES))) for _ in range(2))
    return left + draw.choice(_contents()) + right


def awkward_conversation(roles: Sequence[str], draw: random.Random) -> list[dict[str, str]]:
    """Return a conversation with random contents that templates often change."""
    return [{"role": role, "content": awkward_text(draw)} for role in roles]


def fill_role(roles: Sequence[str], role: str, content: str) -> list[dict[str, str]]:
    """Return a conversation in which all messages of one role have the given content."""
    return [
        {"role": each, "content": content if each == role else f"words {index}"} for index, each in enumerate(roles)
    ]


def is_covered(roles: Roles, groups: Collection[RoleGroup], *, has_system: bool) -> bool:
    """Return True if a sequence has only alternating questions and replies, and features that these groups allow."""
    begins_with_system, rest = roles[0] == "system", roles[int(roles[0] == "system") :]
    needed = {
        SYSTEM_ALONE: not rest,
        LATER_SYSTEM: "system" in rest,
        REPLY_FIRST: rest[:1] == ("assistant",),
        UNFINISHED: roles[-1] == "assistant",
    }
    has_no_repeats = all(left != right for left, right in itertools.pairwise(roles))
    is_allowed = all(group in groups for group in needed if needed[group])
    return has_no_repeats and has_system >= begins_with_system and is_allowed


def short_sequences(groups: Collection[RoleGroup], *, has_system: bool) -> Iterator[Roles]:
    """Yield every sequence of up to five roles that these groups allow."""
    for num_messages in range(1, 6):
        for roles in itertools.product(("system", "user", "assistant"), repeat=num_messages):
            if is_covered(roles, groups, has_system=has_system):
                yield roles


def random_sequence(draw: random.Random, groups: Collection[RoleGroup], *, has_system: bool) -> Roles:
    """Return a random sequence of roles; many are longer than the sequences that layouts are learned from."""
    while True:
        roles = ["system"] if has_system and draw.random() < 0.5 else []
        roles.append("assistant" if REPLY_FIRST in groups and draw.random() < 0.3 else "user")
        is_long = draw.random() >= 0.95
        num_messages = draw.randrange(_MAX_MESSAGES - 1, _MAX_MESSAGES + 1) if is_long else draw.randrange(1, 14)
        while len(roles) < num_messages:
            if roles[-1] == "system":
                roles.append(draw.choice(("user", "assistant")))
            elif LATER_SYSTEM in groups and draw.random() < 0.2:
                roles.append("system")
            else:
                roles.append("user" if roles[-1] == "assistant" else "assistant")
        if is_covered(tuple(roles), groups, has_system=has_system):
            return tuple(roles)


class OriginalTemplate:
    """The model's chat template: observed with markers, and compared with layouts byte by byte."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.closing: str | None = None
        """The text after a finished reply at the end of a conversation; None until it is observed."""
        self.num_same = 0
        """Number of conversations that a layout rendered identically."""

    def observe(self, sequences: Sequence[Roles], placement: SystemPlacement) -> list[Observation]:
        """Return the template's output at every position of conversations with these roles, and set `closing`.

        Conversations that the template rejects are skipped. Raises `NoExactLayout` if the template changes content by
        more than stripping white space, if the first system message is not at its `placement`, or if the text after the
        last reply varies.
        """
        observations: list[Observation] = []
        closing = self.closing
        for roles in sequences:
            is_moved = placement == "moved" and roles[0] == "system"
            parts = self._split(roles, is_moved=is_moved)
            if parts is None:
                continue
            conversation = marked_conversation(roles)
            groups = list(_group_by_message(self._with_slots(roles, parts, is_moved=is_moved)))
            if roles[-1] == "assistant":
                if any(isinstance(segment, ContentSlot) for segment in groups[-1]):
                    raise NoExactLayout("the system message comes after the last reply", conversation)
                if closing not in (None, parts[-1]):
                    raise NoExactLayout("the text after the last reply varies", conversation)
                closing = parts[-1]
            positions = Layout({}, system_placement=placement, shows_later_system=True).positions(conversation)
            observations += [
                Observation(position, group, conversation)
                for (position, _), group in zip(positions, groups, strict=False)
            ]
        self.closing = closing
        return observations

    def require_match(self, layout: Layout, groups: Collection[RoleGroup]) -> None:
        """Compare a layout with the template on new conversations; raise `NoExactLayout` at the first difference.

        The template may reject conversations other than alternating questions and replies.
        """
        draw = random.Random(len(groups))
        longer = (random_sequence(draw, groups, has_system=layout.has_system) for _ in range(_NUM_RANDOM))
        num_same = 0
        for roles in (*short_sequences(groups, has_system=layout.has_system), *longer):
            messages = awkward_conversation(roles, draw)
            expected = self._render_text(messages)
            if expected is not None and roles[-1] == "assistant":
                if self.closing is None or not expected.endswith(self.closing):
                    raise NoExactLayout("the text after the last reply varies", messages)
                expected = expected.removesuffix(self.closing)
            if expected is None and not groups:
                raise NoExactLayout("the template rejects some alternating questions and replies", messages)
            if expected is not None and layout.render(messages) != expected:
                raise NoExactLayout("the rendered text depends on more than the order of the messages", messages)
            num_same += expected is not None
        self.num_same += num_same

    def matches(self, layout: Layout, conversations: Sequence[list[dict[str, str]]]) -> bool:
        """Return True if a layout and the template render these identically; rejected conversations are skipped."""
        try:
            texts = [self._render_text(messages) for messages in conversations]
        except NoExactLayout:
            return False
        pairs = zip(texts, conversations, strict=True)
        return all(text is None or layout.render(messages) == text for text, messages in pairs)

    def _render_text(self, messages: list[dict[str, str]]) -> str | None:
        """Render a conversation, with a generation prompt unless it ends with a reply; None if it is rejected."""
        try:
            return self._render(messages, messages[-1]["role"] != "assistant")
        except TemplateFailed:
            return None

    def _with_slots(self, roles: Roles, parts: Parts, *, is_moved: bool) -> list[str | ContentSlot]:
        """Return the parts with a slot for each marker, with the white space that is stripped from the content.

        Every marker is rendered between two different white-space characters, so each of them is found in the text.
        """
        lefts, rights = ([""] * (len(parts) // 2) for _ in range(2))
        for left, right in zip(SPACES, SPACES[1:] + SPACES[:1], strict=True):
            spaced_parts = self._split(roles, left, right, is_moved=is_moved)
            messages = marked_conversation(roles, left, right)
            if spaced_parts is None or spaced_parts[1::2] != parts[1::2]:
                raise NoExactLayout(f"the template rejects or moves text next to {left!r} or {right!r}", messages)
            for gap, (bare, spaced) in enumerate(zip(parts[::2], spaced_parts[::2], strict=True)):
                # No marker precedes the first text, and none follows the last.
                after, before = right if gap else "", left if gap < len(lefts) else ""
                kept = [(a, b) for a in {after, ""} for b in {before, ""} if a + bare + b == spaced]
                if not kept:
                    raise NoExactLayout(f"{left!r} or {right!r} next to a text changes more than the text", messages)
                [(kept_after, kept_before)] = kept
                if kept_after != after:
                    rights[gap - 1] += right
                if kept_before != before:
                    lefts[gap] += left
        segments: list[str | ContentSlot] = list(parts)
        for index, (left, right) in enumerate(zip(lefts, rights, strict=True)):
            is_system = is_moved and parts[2 * index + 1] == "0"
            stripped = left, "".join(sorted(right))
            segments[2 * index + 1] = ContentSlot("system" if is_system else "message", *stripped)
        return segments

    def _split(self, roles: Roles, left: str = "", right: str = "", *, is_moved: bool) -> Parts | None:
        """Render markers and split the text at them; each marker must occur once, in order."""
        messages = marked_conversation(roles, left, right)
        text = self._render_text(messages)
        if text is None:
            return None
        parts = tuple(_MARKER.split(text))
        found = [int(number) for number in parts[1::2] if not is_moved or number != "0"]
        expected = list(range(int(is_moved), len(roles)))
        if found != expected:
            lost = [index for index in expected if index not in found]
            reason = (
                f"the template changes or drops the text of the {roles[lost[0]]} message"
                if lost
                else "the template repeats or reorders the messages"
            )
            raise NoExactLayout(reason, messages)
        return parts


_TAG = re.compile(r"\{[{%](.*?)[}%]\}", re.DOTALL)
_LITERAL = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)


def string_literals(source: str) -> Iterator[str]:
    """Yield the distinct string literals of a Jinja template."""
    found = (match[1] or match[2] for tag in _TAG.findall(source) for match in _LITERAL.finditer(tag))
    for text in dict.fromkeys(text.replace("\\n", "\n") for text in found if text):
        if not text.isspace():
            yield text
