"""Conversations to read and to try a layout on: orders of messages that Ollama hands to a template, awkward words.

Ollama joins neighbouring messages of one role, so no two of them stand side by side.
"""

import itertools
import random
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from tunewell.exporting.chat_layout import Roles
from tunewell.exporting.chat_reading import SPACES


@dataclass(frozen=True)
class Group:
    """Orders of messages that a template may know besides questions and replies in turn."""

    name: str
    forms: tuple[Roles, ...]
    otherwise: str
    """What becomes of them where the template refuses them; Ollama refuses nothing."""


def _both(*forms: Roles) -> tuple[Roles, ...]:
    return (*forms, *(("system", *form) for form in forms))


QUESTIONS: tuple[Roles, ...] = tuple(("user", *("assistant", "user") * num_later) for num_later in range(4))
"""One question to four, with the replies between them: what a layout cannot do without."""
UNFINISHED = Group(
    "a reply that is to be continued",
    _both(*(form[:-1] for form in QUESTIONS[1:])),
    "is shown like an earlier reply",
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
    "is shown as if a question stood before",
)
SYSTEM_ALONE = Group("a system message alone", (("system",),), "is shown as before a question")
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
"""Messages in the longest conversations tried: what a template does differently later than that goes unseen."""


def awkward(draw: random.Random) -> str:
    """Draw words that are easily spoiled, at times with white space around them."""
    lead, trail = (draw.choice(("", "", "", " ", "\n", "\n\n", " \n", draw.choice(SPACES))) for _ in range(2))
    return lead + draw.choice(_WORDS) + trail


def is_known(roles: Roles, groups: Collection[Group], *, has_system: bool) -> bool:
    """Say whether an order of messages is questions and replies in turn, or one of these groups'."""
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
    """Give every order of up to five messages in which nothing but these groups' occurs."""
    for num_messages in range(1, 6):
        for roles in itertools.product(("system", "user", "assistant"), repeat=num_messages):
            if is_known(roles, groups, has_system=has_system):
                yield roles


def random_order(draw: random.Random, groups: Collection[Group], *, has_system: bool) -> Roles:
    """Draw an order of messages, many of them longer than those that layouts are learned from."""
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
    """Make a conversation of awkward words."""
    return [{"role": role, "content": awkward(draw)} for role in roles]


def saying(roles: Sequence[str], role: str, words: str) -> list[dict[str, str]]:
    """Make a conversation in which one role says only these words."""
    return [{"role": each, "content": words if each == role else f"words {index}"} for index, each in enumerate(roles)]


_TAG = re.compile(r"\{[{%](.*?)[}%]\}", re.DOTALL)
_LITERAL = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)


def spelled_in(source: str) -> Iterator[str]:
    """Give the texts that a Jinja template writes or compares with, each once."""
    found = (match[1] or match[2] for tag in _TAG.findall(source) for match in _LITERAL.finditer(tag))
    for text in dict.fromkeys(text.replace("\\n", "\n") for text in found if text):
        if not text.isspace():
            yield text
