"""Read a chat template by rendering conversations whose words are marks, and cutting the text at the marks."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Literal, NamedTuple

from tunewell.data.templates import TemplateFailed
from tunewell.exporting.chat_layout import Layout, Pieces, Render, Roles, Words
from tunewell.exporting.chat_rules import NoRule, Sight

SPACES = "".join(character for character in map(chr, range(0x3001)) if character.isspace())
"""Everything that Python, and so Jinja's `trim`, calls white space; all of it lies below U+3001."""

# Mixed letters, quotes, and what JSON and HTML escape: a template that changes words in such ways changes a mark.
_OPEN, _CLOSE = "Qz", "vXw'\"\\&<"
_MARK = re.compile(f"{_OPEN}([0-9]+){re.escape(_CLOSE)}")

Opening = Literal["in place", "kept"]
Parts = tuple[str, ...]
"""A text cut at its marks: text, number, text, number, ..., text."""


class Reading(NamedTuple):
    """What one order of messages showed."""

    sights: list[Sight]
    closing: str | None
    """The text after the last reply; None where the conversation ends with a question."""


class Reader:
    """Reads conversations by the roles of their messages, each order once."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.read = cache(self._read)

    def text_of(self, messages: Sequence[dict[str, str]]) -> str | None:
        """Render a conversation as it is when a reply is due; None where the template refuses it."""
        try:
            return self._render(list(messages), messages[-1]["role"] != "assistant")
        except TemplateFailed:
            return None

    def _read(self, roles: Roles, opening: Opening) -> Reading | None:
        """Say what stands where in conversations of these roles; None where the template refuses them.

        Raises `NoRule` where words do not come through as they are, but for white space taken off their ends, or the
        words of an opening system message are to be read `in place` and stand elsewhere.
        """
        keeps_system = opening == "kept" and roles[0] == "system"
        parts = self._cut(roles, keeps_system=keeps_system)
        if parts is None:
            return None
        taken = self._taken_off(roles, parts, keeps_system=keeps_system)
        pieces: list[str | Words] = list(parts)
        for index, (lead, trail) in enumerate(taken):
            is_system = keeps_system and parts[2 * index + 1] == "0"
            pieces[2 * index + 1] = Words("system" if is_system else "message", lead, trail)
        rows = list(_rows(pieces))
        conversation = marked(roles)
        layout = Layout({}, opening=opening, takes_later_system=True)
        sights = [
            Sight(place, row, conversation) for (place, _), row in zip(layout.places(conversation), rows, strict=False)
        ]
        if roles[-1] != "assistant":
            return Reading(sights, None)
        if any(isinstance(piece, Words) for piece in rows[-1]):
            raise NoRule("the system message stands after the last reply", conversation)
        return Reading(sights, parts[-1])

    def _taken_off(self, roles: Roles, parts: Parts, *, keeps_system: bool) -> list[tuple[str, str]]:
        """Find which white space is taken off the two ends of each mark, from texts with a space beside every mark."""
        num_marks = len(parts) // 2
        leads, trails = [""] * num_marks, [""] * num_marks
        for space in SPACES:
            cut = self._cut(roles, space, space, keeps_system=keeps_system)
            if cut is None or cut[1::2] != parts[1::2]:
                raise NoRule(f"it refuses or moves words beside {space!r}", marked(roles, space, space))
            for gap, (bare, spaced) in enumerate(zip(parts[::2], cut[::2], strict=True)):
                # Before the first mark nothing can trail, behind the last nothing can lead.
                ends = [
                    (trail, lead) for trail in ("", space)[: gap + 1] for lead in ("", space)[: num_marks - gap + 1]
                ]
                fitting = [(trail, lead) for trail, lead in ends if trail + bare + lead == spaced]
                if not fitting:
                    raise NoRule(f"{space!r} beside words changes more than the words", marked(roles, space, space))
                trail, lead = fitting[0]
                if len(fitting) > 1:
                    # One space more among nothing but such spaces: whose is it?
                    lone = self._cut(roles, space, "", keeps_system=keeps_system)
                    trail, lead = ("", space) if lone and lone[2 * gap] != bare else (space, "")
                if gap and not trail:
                    trails[gap - 1] += space
                if gap < num_marks and not lead:
                    leads[gap] += space
        return list(zip(leads, trails, strict=True))

    def _cut(self, roles: Roles, lead: str = "", trail: str = "", *, keeps_system: bool) -> Parts | None:
        """Render marks and cut the text at them; each must be there, once and in its order."""
        messages = marked(roles, lead, trail)
        text = self.text_of(messages)
        if text is None:
            return None
        parts = tuple(_MARK.split(text))
        found = [int(number) for number in parts[1::2] if not keeps_system or number != "0"]
        expected = list(range(int(keeps_system), len(roles)))
        if found != expected:
            lost = [index for index in expected if index not in found]
            reason = (
                f"the words of the {roles[lost[0]]} message do not come through as they are"
                if lost
                else "the messages do not stand once each, in their order"
            )
            raise NoRule(reason, messages)
        return parts


def marked(roles: Sequence[str], lead: str = "", trail: str = "") -> list[dict[str, str]]:
    """Make a conversation whose words are marks."""
    return [{"role": role, "content": f"{lead}{_OPEN}{index}{_CLOSE}{trail}"} for index, role in enumerate(roles)]


def _rows(pieces: Sequence[str | Words]) -> Iterator[Pieces]:
    """Give each message what stands before its words, and the words; the last row is what stands at the end."""
    row: list[str | Words] = []
    for piece in pieces:
        row += [piece] if piece != "" else []
        if isinstance(piece, Words) and piece.of == "message":
            yield tuple(row)
            row = []
    yield tuple(row)
