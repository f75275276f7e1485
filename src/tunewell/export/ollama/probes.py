"""Render a chat template with marked messages and cut the text at the marks; conversations to compare with."""

import itertools
import random
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from tunewell.data.templates.chat_template import TemplateFailed
from tunewell.export.ollama.layout import Layout, NoRule, Pieces, Render, Roles, Sight, Words

SPACES = "".join(character for character in map(chr, range(0x3001)) if character.isspace())
"""All white space according to Python and Jinja's `trim`; every character is below U+3001."""

# Mixed case, quotes, and characters that JSON and HTML escape: a template that changes text changes a mark too.
_OPEN, _CLOSE = "Qz", "vXw'\"\\&<"
_MARK = re.compile(f"{_OPEN}([0-9]+){re.escape(_CLOSE)}")

Opening = Literal["in place", "kept"]
Parts = tuple[str, ...]
"""A text cut at its marks: text, number, text, number, ..., text."""


class Reading(NamedTuple):
    """The result of rendering one order of messages."""

    sights: list[Sight]
    closing: str | None
    """The text after the last reply; None if the conversation ends with a question."""


class Reader:
    """Renders conversations by the roles of their messages, each order once."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.read = cache(self._read)

    def text_of(self, messages: Sequence[dict[str, str]]) -> str | None:
        """Render a conversation up to the reply; return None if the template rejects it."""
        try:
            return self._render(list(messages), messages[-1]["role"] != "assistant")
        except TemplateFailed:
            return None

    def _read(self, roles: Roles, opening: Opening) -> Reading | None:
        """Return the positions of all texts in conversations of these roles; None if the template rejects them.

        Raises `NoRule` if the template changes a text beyond trimming white space, or if the first system message is
        expected `in place` and is rendered elsewhere.
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
            raise NoRule("the system message comes after the last reply", conversation)
        return Reading(sights, parts[-1])

    def _taken_off(self, roles: Roles, parts: Parts, *, keeps_system: bool) -> list[tuple[str, str]]:
        """Find the white space that is trimmed from both ends of each mark, with a space next to every mark."""
        num_marks = len(parts) // 2
        leads, trails = [""] * num_marks, [""] * num_marks
        for space in SPACES:
            cut = self._cut(roles, space, space, keeps_system=keeps_system)
            if cut is None or cut[1::2] != parts[1::2]:
                raise NoRule(f"it rejects or moves text next to {space!r}", marked(roles, space, space))
            for gap, (bare, spaced) in enumerate(zip(parts[::2], cut[::2], strict=True)):
                # There is no trailing space before the first mark, and no leading space after the last.
                ends = [
                    (trail, lead) for trail in ("", space)[: gap + 1] for lead in ("", space)[: num_marks - gap + 1]
                ]
                fitting = [(trail, lead) for trail, lead in ends if trail + bare + lead == spaced]
                if not fitting:
                    raise NoRule(f"{space!r} next to a text changes more than the text", marked(roles, space, space))
                trail, lead = fitting[0]
                if len(fitting) > 1:
                    # One more space among equal spaces: it is either trailing or leading.
                    lone = self._cut(roles, space, "", keeps_system=keeps_system)
                    trail, lead = ("", space) if lone and lone[2 * gap] != bare else (space, "")
                if gap and not trail:
                    trails[gap - 1] += space
                if gap < num_marks and not lead:
                    leads[gap] += space
        return list(zip(leads, trails, strict=True))

    def _cut(self, roles: Roles, lead: str = "", trail: str = "", *, keeps_system: bool) -> Parts | None:
        """Render marks and cut the text at them; each must appear once, in order."""
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
                f"it changes or drops the text of the {roles[lost[0]]} message"
                if lost
                else "it repeats or reorders the messages"
            )
            raise NoRule(reason, messages)
        return parts


def marked(roles: Sequence[str], lead: str = "", trail: str = "") -> list[dict[str, str]]:
    """Return a conversation whose texts are marks."""
    return [{"role": role, "content": f"{lead}{_OPEN}{index}{_CLOSE}{trail}"} for index, role in enumerate(roles)]


def _rows(pieces: Sequence[str | Words]) -> Iterator[Pieces]:
    """Yield the text before each message with its content; the last row is the text at the end."""
    row: list[str | Words] = []
    for piece in pieces:
        row += [piece] if piece != "" else []
        if isinstance(piece, Words) and piece.of == "message":
            yield tuple(row)
            row = []
    yield tuple(row)


# Conversations for probes and comparisons: orders of messages that Ollama passes to a template, and difficult texts.


@dataclass(frozen=True)
class Group:
    """Orders of messages that a template may support besides alternating questions and replies."""

    name: str
    forms: tuple[Roles, ...]
    otherwise: str
    """How they are rendered if the template rejects them; Ollama cannot reject a conversation."""


def _both(*forms: Roles) -> tuple[Roles, ...]:
    return (*forms, *(("system", *form) for form in forms))


QUESTIONS: tuple[Roles, ...] = tuple(("user", *("assistant", "user") * num_later) for num_later in range(4))
"""One to four questions with the replies between them; every layout must support these."""
UNFINISHED = Group(
    "a reply to be continued",
    _both(*(form[:-1] for form in QUESTIONS[1:])),
    "is rendered like an earlier reply",
)
LATER_SYSTEM = Group(
    "a system message after the first message",
    _both(
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
REPLY_FIRST = Group(
    "a conversation that begins with a reply",
    _both(
        *(("assistant", *form) for form in QUESTIONS),
        ("assistant",),
        ("assistant", "user", "assistant"),
        ("assistant", "system"),
        ("assistant", "system", "user"),
        ("assistant", "system", "assistant"),
    ),
    "is rendered as if a question came before it",
)
SYSTEM_ALONE = Group("a system message alone", (("system",),), "is rendered as before a question")
GROUPS = (UNFINISHED, SYSTEM_ALONE, LATER_SYSTEM, REPLY_FIRST)

_WORDS = (
    *("Hello there", "no", "7", "In 1984 3.14 was 1,000 times 0", "I and i, İ and ı, ß and ẞ", "été e\u0301 ﬁ"),
    *(
        "你好，世界",
        "مرحبا",
        "👩‍👩‍👧 👍🏽",
        "\ufeffx\u200b",
        "a\u00a0b",
        "x = {\n\t'y': [1]\n}",
        "{{ .Content }} {{- x -}}",
    ),
    *(
        "{% if x %}{{ bos_token }}{# y #}",
        "{",
        "}}",
        "<b>&amp;</b> \"q\" 'r' `s`",
        '"""',
        "\\n \\",
        "%s %d %%",
        "a\r\nb",
    ),
    *(
        "one\n\ntwo\n\n\nthree",
        "- a\n- b",
        "# x",
        "user: hi\nassistant: ho",
        "null",
        "None",
        "[1, 2]",
        "'",
        "so " * 300,
    ),
)

LONG = 80
"""Messages in the longest conversations compared; differences in longer ones are not detected."""


def awkward(draw: random.Random) -> str:
    """Draw a difficult text, sometimes with white space around it."""
    lead, trail = (draw.choice(("", "", "", " ", "\n", "\n\n", " \n", draw.choice(SPACES))) for _ in range(2))
    return lead + draw.choice(_WORDS) + trail


def is_known(roles: Roles, groups: Collection[Group], *, has_system: bool) -> bool:
    """Return whether an order of messages alternates questions and replies, or belongs to these groups."""
    opens_with_system, rest = roles[0] == "system", roles[int(roles[0] == "system") :]
    needed = {
        SYSTEM_ALONE: not rest,
        LATER_SYSTEM: "system" in rest,
        REPLY_FIRST: rest[:1] == ("assistant",),
        UNFINISHED: roles[-1] == "assistant",
    }
    is_joined = all(left != right for left, right in itertools.pairwise(roles))
    return is_joined and has_system >= opens_with_system and all(group in groups for group in needed if needed[group])


def short_orders(groups: Collection[Group], *, has_system: bool) -> Iterator[Roles]:
    """Yield every order of up to five messages that these groups allow."""
    for num_messages in range(1, 6):
        for roles in itertools.product(("system", "user", "assistant"), repeat=num_messages):
            if is_known(roles, groups, has_system=has_system):
                yield roles


def random_order(draw: random.Random, groups: Collection[Group], *, has_system: bool) -> Roles:
    """Draw an order of messages; many are longer than those used to derive a layout."""
    while True:
        roles = ["system"] if has_system and draw.random() < 0.5 else []
        roles.append("assistant" if REPLY_FIRST in groups and draw.random() < 0.3 else "user")
        num_messages = draw.randrange(1, 14) if draw.random() < 0.95 else draw.randrange(LONG - 1, LONG + 1)
        while len(roles) < num_messages:
            if roles[-1] == "system":
                roles.append(draw.choice(("user", "assistant")))
            elif LATER_SYSTEM in groups and draw.random() < 0.2:
                roles.append("system")
            else:
                roles.append("user" if roles[-1] == "assistant" else "assistant")
        if is_known(tuple(roles), groups, has_system=has_system):
            return tuple(roles)


def talk(roles: Sequence[str], draw: random.Random) -> list[dict[str, str]]:
    """Return a conversation of difficult texts."""
    return [{"role": role, "content": awkward(draw)} for role in roles]


def fill_role(roles: Sequence[str], role: str, words: str) -> list[dict[str, str]]:
    """Return a conversation in which all messages of one role have this text."""
    return [{"role": each, "content": words if each == role else f"words {index}"} for index, each in enumerate(roles)]


_TAG = re.compile(r"\{[{%](.*?)[}%]\}", re.DOTALL)
_LITERAL = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)


def spelled_in(source: str) -> Iterator[str]:
    """Yield the string literals of a Jinja template, each once."""
    found = (match[1] or match[2] for tag in _TAG.findall(source) for match in _LITERAL.finditer(tag))
    for text in dict.fromkeys(text.replace("\\n", "\n") for text in found if text):
        if not text.isspace():
            yield text
