"""Compare a layout with the chat template that it was learned from, byte by byte."""

import random
from collections.abc import Collection, Sequence

from tunewell.exporting.chat_layout import Layout, Render, Roles
from tunewell.exporting.chat_probes import Group, random_order, short_orders, talk
from tunewell.exporting.chat_reading import Opening, Reader
from tunewell.exporting.chat_rules import NoRule, Sight

NUM_LONGER = 100
"""Random conversations that a layout is compared on each time it has grown, besides all orders of few messages; about
30 ms for most templates."""


class Trial:
    """A chat template under examination, and how often a layout has agreed with it."""

    def __init__(self, render: Render) -> None:
        self._reader = Reader(render)
        self.closing: str | None = None
        """What stands after a finished reply at the end of a conversation; None until it is known."""
        self.num_same = 0
        """Random conversations on which a layout and the template gave the same bytes."""

    def sights(self, forms: Sequence[Roles], opening: Opening) -> list[Sight]:
        """Read conversations of these forms; none where the template refuses them all."""
        readings = [reading for form in forms if (reading := self._reader.read(form, opening))]
        return [sight for reading in readings for sight in reading.sights]

    def find_closing(self, forms: Sequence[Roles], opening: Opening) -> None:
        """Find what stands after a finished reply; raise `NoRule` where it is not always the same."""
        readings = [reading for form in forms if (reading := self._reader.read(form, opening))]
        odd = next((reading for reading in readings if reading.closing != readings[0].closing), None)
        if odd:
            raise NoRule("what follows the last reply differs", odd.sights[0].conversation)
        self.closing = readings[0].closing

    def check(self, layout: Layout, groups: Collection[Group]) -> None:
        """Compare a layout with the template on conversations it was not learned from; raise `NoRule` on the first
        that differs. Beyond questions and replies in turn the template may refuse some."""
        draw = random.Random(len(groups))
        has_system = layout.opening != "left out"
        longer = (random_order(draw, groups, has_system=has_system) for _ in range(NUM_LONGER))
        num_same = 0
        for roles in (*short_orders(groups, has_system=has_system), *longer):
            messages = talk(roles, draw)
            expected = self._expected(messages)
            if expected is None and not groups:
                raise NoRule("it refuses some conversations of questions and replies in turn", messages)
            if expected is not None and layout.lay_out(messages) != expected:
                raise NoRule("its text depends on more than the order of the messages", messages)
            num_same += expected is not None
        self.num_same += num_same

    def agree(self, layout: Layout, probes: Sequence[list[dict[str, str]]]) -> bool:
        """Say whether a layout gives the template's texts of conversations that ask for a reply and are not refused."""
        try:
            texts = [self._reader.text_of(probe) for probe in probes]
        except NoRule:
            return False
        return all(text is None or layout.lay_out(probe) == text for text, probe in zip(texts, probes, strict=True))

    def _expected(self, messages: list[dict[str, str]]) -> str | None:
        """Render a conversation with the template, up to where the reply begins or goes on."""
        text = self._reader.text_of(messages)
        if text is None or messages[-1]["role"] != "assistant":
            return text
        if self.closing is None or not text.endswith(self.closing):
            raise NoRule("what follows the last reply differs", messages)
        return text.removesuffix(self.closing)
