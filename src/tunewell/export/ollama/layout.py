"""The layout of a chat template: the text before each message, and the generation prompt.

A layout is what rendering probes tells about a chat template. `go_syntax` writes it as a Go template, and `lay_out`
renders it here in Python, so that it can be compared with the template it was learned from.

    <|im_start|>system\\n WORDS | <|im_end|>\\n<|im_start|>user\\n WORDS | <|im_end|>\\n<|im_start|>assistant\\n
    ----- a system message ---- | ------------ a question ------------ | ---------------- the end ------------
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Message = Mapping[str, str]
Roles = tuple[str, ...]
Render = Callable[[list[dict[str, str]], bool], str]
"""Messages, and whether the text is to ask for a reply; the text. Raises `TemplateFailed` where it refuses them."""


@dataclass(frozen=True)
class Words:
    """The words of a message, or those of the system message that opened the conversation."""

    of: Literal["message", "system"]
    lead: str = ""
    """The characters taken off the beginning."""
    trail: str = ""
    """The characters taken off the end."""

    def __call__(self, text: str) -> str:
        text = text.lstrip(self.lead) if self.lead else text
        return text.rstrip(self.trail) if self.trail else text


Pieces = tuple[str | Words, ...]


@dataclass(frozen=True)
class Place:
    """Where in a conversation something stands: all that a layout may depend on."""

    role: str
    """The role of the message here; `end` after the last one."""
    left: str
    """The role of the message before; empty at the beginning."""
    has_system: bool
    """Whether a system message opened the conversation."""
    has_asked: bool
    """Whether a question stands before."""
    has_replied: bool
    """Whether a reply stands before."""
    num_left: int
    """Messages from here on, this one included."""


@dataclass(frozen=True)
class Condition:
    """Something that can be asked about a place, in Python and in Go."""

    holds: Callable[[Place], bool]
    go: str


@dataclass(frozen=True)
class Choice:
    """One rule or another."""

    when: Condition
    yes: "Rule"
    no: "Rule"


Rule = Pieces | Choice


@dataclass(frozen=True)
class Layout:
    """How a template lays out conversations."""

    rules: Mapping[str, Rule]
    """By the role of a place."""
    opening: Literal["in place", "kept", "left out"] = "in place"
    """What is done with the words of a system message that opens a conversation: shown like another message's, kept for
    where a rule puts them (before the last question, say), or left out because the template refuses them."""
    skips_empty_system: bool = False
    """Whether an empty system message that opens a conversation counts as none."""
    takes_later_system: bool = False
    """Whether system messages after the first message are shown; if not they are left out."""

    def lay_out(self, messages: Sequence[Message]) -> str:
        """Render a conversation up to where the reply begins, or goes on if the last message is the assistant's."""
        kept = messages[0]["content"] if self.opening == "kept" and messages[0]["role"] == "system" else ""
        texts = []
        for place, words in self.places(messages):
            for piece in pieces_at(self.rules[place.role], place):
                texts.append(piece if isinstance(piece, str) else piece(words if piece.of == "message" else kept))
        return "".join(texts)

    def places(self, messages: Sequence[Message]) -> Iterator[tuple[Place, str]]:
        """Walk through a conversation: each message's place with its words, then the end if a reply is asked for."""
        left, has_system = "", False
        seen: set[str] = set()
        for index, message in enumerate(messages):
            role, words = message["role"], message["content"]
            if not index and role == "system":
                if self.opening == "left out" or (self.skips_empty_system and not words):
                    continue
                has_system = True
            if role == "system" and index and not self.takes_later_system:
                continue
            if self.opening == "in place" or index or role != "system":
                yield Place(role, left, has_system, "user" in seen, "assistant" in seen, len(messages) - index), words
            left = role
            seen.add(role)
        if left not in ("", "assistant"):
            yield Place("end", left, has_system, "user" in seen, "assistant" in seen, 0), ""


def pieces_at(rule: Rule, place: Place) -> Pieces:
    """Follow a rule's choices to what stands at a place."""
    while isinstance(rule, Choice):
        rule = rule.yes if rule.when.holds(place) else rule.no
    return rule


# Learn rules from observed positions: a small decision tree for each role.

CONDITIONS = (
    Condition(lambda place: place.left == "assistant", 'eq $left "assistant"'),
    Condition(lambda place: place.left == "", "not $left"),
    Condition(lambda place: place.left == "system", 'eq $left "system"'),
    Condition(lambda place: place.left == "user", 'eq $left "user"'),
    Condition(lambda place: place.has_system, "$has_system"),
    Condition(lambda place: place.num_left == 1, "eq $num_left 1"),
    Condition(lambda place: place.num_left == 2, "eq $num_left 2"),
    Condition(lambda place: place.has_asked, "$has_asked"),
    Condition(lambda place: place.has_replied, "$has_replied"),
)
"""In the order of preference among those that sort equally well."""


@dataclass(frozen=True)
class Sight:
    """What was seen at a place, and in which conversation."""

    place: Place
    pieces: Pieces
    conversation: Sequence[Message]


class NoRule(Exception):
    """No exact layout exists; `conversation` shows why."""

    def __init__(self, reason: str, conversation: Sequence[Message]) -> None:
        super().__init__(reason)
        self.reason = reason
        self.conversation = conversation


def find_rules(sights: Sequence[Sight]) -> dict[str, Rule]:
    """Find a rule for each role; raise `NoRule` where two places look alike and hold different texts."""
    roles = dict.fromkeys(sight.place.role for sight in sights)
    return {role: _grow([sight for sight in sights if sight.place.role == role]) for role in roles}


def _grow(sights: Sequence[Sight]) -> Rule:
    if _num_kinds(sights) == 1:
        return sights[0].pieces
    splits = []
    for condition in CONDITIONS:
        yes = [sight for sight in sights if condition.holds(sight.place)]
        no = [sight for sight in sights if not condition.holds(sight.place)]
        if yes and no:
            splits.append((_num_kinds(yes) + _num_kinds(no), condition, yes, no))
    if not splits:
        odd = next(sight for sight in sights if sight.pieces != sights[0].pieces)
        role = odd.place.role
        name = "the generation prompt" if role == "end" else f"the text before the {role} message"
        raise NoRule(f"{name} depends on more than the adjacent messages", odd.conversation)
    _, condition, yes, no = min(splits, key=lambda split: split[0])
    return Choice(condition, _grow(yes), _grow(no))


def _num_kinds(sights: Sequence[Sight]) -> int:
    return len({sight.pieces for sight in sights})
