"""Find rules for what stands at the places of conversations, from places that were looked at.

The conditions are what Go can ask while it walks through Ollama's messages. A template that needs more than these, one
that counts the messages for instance, does not get through: either two places look alike and hold different texts, or
the rules fail on the conversations that they are checked on afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tunewell.exporting.chat_layout import Choice, Condition, Message, Pieces, Place, Rule

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
    """A layout that cannot be had; `conversation` shows it."""

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
        name = "the request for a reply" if role == "end" else f"what stands before the {role} message"
        raise NoRule(f"{name} depends on more than the messages beside it", odd.conversation)
    _, condition, yes, no = min(splits, key=lambda split: split[0])
    return Choice(condition, _grow(yes), _grow(no))


def _num_kinds(sights: Sequence[Sight]) -> int:
    return len({sight.pieces for sight in sights})
