"""Probe a chat template by rendering marker messages and splitting the text at them; generate test conversations."""

import itertools
import random
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from tunewell.data.templates.chat_template import TemplateFailed
from tunewell.export.ollama.layout import ContentSlot, Layout, NoExactLayout, Observation, Render, Roles, Segments

SPACES = "".join(character for character in map(chr, range(0x3001)) if character.isspace())
"""All characters that Python, and so Jinja's `trim`, treats as white space; all are below U+3001."""

# Markers contain upper and lower case, quotes, and characters that JSON and HTML escape, so that any edit shows.
_OPEN, _CLOSE = "Qz", "vXw'\"\\&<"
_MARKER = re.compile(f"{_OPEN}([0-9]+){re.escape(_CLOSE)}")

SystemPlacement = Literal["inline", "moved"]
Parts = tuple[str, ...]
"""A text split at its markers: text, marker number, text, marker number, ..., text."""


class ProbeResult(NamedTuple):
    """The output of a template for one sequence of roles."""

    observations: list[Observation]
    closing: str | None
    """The text after the last reply; None if the conversation does not end with a reply."""


class Prober:
    """Probes a template with sequences of roles; each sequence is rendered once."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.probe = cache(self._probe)

    def render(self, messages: Sequence[dict[str, str]]) -> str | None:
        """Render a conversation, with a generation prompt unless it ends with a reply.

        Return None if the template rejects it.
        """
        try:
            return self._render(list(messages), messages[-1]["role"] != "assistant")
        except TemplateFailed:
            return None

    def _probe(self, roles: Roles, placement: SystemPlacement) -> ProbeResult | None:
        """Observe every position of a conversation with these roles, or return None if the template rejects it.

        Raises `NoExactLayout` if the template changes content by more than stripping white space, or if the first
        system message is not at its `placement`.
        """
        is_moved = placement == "moved" and roles[0] == "system"
        parts = self._split(roles, is_moved=is_moved)
        if parts is None:
            return None
        segments: list[str | ContentSlot] = list(parts)
        for index, (left, right) in enumerate(self._find_stripped(roles, parts, is_moved=is_moved)):
            is_system = is_moved and parts[2 * index + 1] == "0"
            segments[2 * index + 1] = ContentSlot("system" if is_system else "message", left, right)
        groups = list(_group_by_message(segments))
        conversation = marked_conversation(roles)
        layout = Layout({}, system_placement=placement, shows_later_system=True)
        observations = [
            Observation(position, group, conversation)
            for (position, _), group in zip(layout.positions(conversation), groups, strict=False)
        ]
        if roles[-1] != "assistant":
            return ProbeResult(observations, None)
        if any(isinstance(segment, ContentSlot) for segment in groups[-1]):
            raise NoExactLayout("the system message comes after the last reply", conversation)
        return ProbeResult(observations, parts[-1])

    def _find_stripped(self, roles: Roles, parts: Parts, *, is_moved: bool) -> list[tuple[str, str]]:
        """Return the white space stripped from both ends of each marker, found by rendering spaces around markers."""
        num_markers = len(parts) // 2
        lefts, rights = [""] * num_markers, [""] * num_markers
        for space in SPACES:
            spaced_parts = self._split(roles, space, space, is_moved=is_moved)
            if spaced_parts is None or spaced_parts[1::2] != parts[1::2]:
                raise NoExactLayout(
                    f"the template rejects or moves text next to {space!r}", marked_conversation(roles, space, space)
                )
            for gap, (bare, spaced) in enumerate(zip(parts[::2], spaced_parts[::2], strict=True)):
                # The text between two markers may contain the space after the first and the space before the second.
                # No marker precedes the first text, and none follows the last.
                candidates = [
                    (right, left)
                    for right in ("", space)[: gap + 1]
                    for left in ("", space)[: num_markers - gap + 1]
                    if right + bare + left == spaced
                ]
                if not candidates:
                    raise NoExactLayout(
                        f"{space!r} next to a text changes more than the text",
                        marked_conversation(roles, space, space),
                    )
                right, left = candidates[0]
                if len(candidates) > 1:
                    # The text consists of this space only: render the markers with a space on the left side only.
                    left_only = self._split(roles, space, "", is_moved=is_moved)
                    right, left = ("", space) if left_only and left_only[2 * gap] != bare else (space, "")
                if gap and not right:
                    rights[gap - 1] += space
                if gap < num_markers and not left:
                    lefts[gap] += space
        return list(zip(lefts, rights, strict=True))

    def _split(self, roles: Roles, left: str = "", right: str = "", *, is_moved: bool) -> Parts | None:
        """Render markers and split the text at them; each marker must occur once, in order."""
        messages = marked_conversation(roles, left, right)
        text = self.render(messages)
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

# fmt: off
_CONTENTS = (
    "Hello there", "no", "7", "In 1984 3.14 was 1,000 times 0", "I and i, İ and ı, ß and ẞ", "été e\u0301 ﬁ",
    "你好，世界", "مرحبا", "👩‍👩‍👧 👍🏽", "\ufeffx\u200b", "a\u00a0b", "x = {\n\t'y': [1]\n}",
    "{{ .Content }} {{- x -}}", "{% if x %}{{ bos_token }}{# y #}", "{", "}}", "<b>&amp;</b> \"q\" 'r' `s`", '"""',
    "\\n \\", "%s %d %%", "a\r\nb", "one\n\ntwo\n\n\nthree", "- a\n- b", "# x", "user: hi\nassistant: ho", "null",
    "None", "[1, 2]", "'", "so " * 300,
)
# fmt: on

_MAX_MESSAGES = 80
"""Messages in the longest test conversations; differences that appear later are not detected."""


def awkward_text(draw: random.Random) -> str:
    """Return random content that templates often change, sometimes with white space around it."""
    left, right = (draw.choice(("", "", "", " ", "\n", "\n\n", " \n", draw.choice(SPACES))) for _ in range(2))
    return left + draw.choice(_CONTENTS) + right


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


_TAG = re.compile(r"\{[{%](.*?)[}%]\}", re.DOTALL)
_LITERAL = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)


def string_literals(source: str) -> Iterator[str]:
    """Yield the distinct string literals of a Jinja template."""
    found = (match[1] or match[2] for tag in _TAG.findall(source) for match in _LITERAL.finditer(tag))
    for text in dict.fromkeys(text.replace("\\n", "\n") for text in found if text):
        if not text.isspace():
            yield text
