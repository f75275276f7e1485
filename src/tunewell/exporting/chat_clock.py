"""The day that chat templates take for today's: one for the proof, another to see whether it shows in the text."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date as Day
from datetime import datetime, time
from typing import Any

# No two share a day of the month, a month, a year or a day of the week: with five of them, one differs from any day
# in all four.
_OTHER_DAYS = (Day(2001, 2, 4), Day(2002, 3, 5), Day(2004, 5, 7), Day(2008, 6, 9), Day(2011, 7, 14))


def another_day(date: str) -> str:
    """Give a day that differs from this one in every number, and in the day of the week."""
    own = _numbers(Day.fromisoformat(date))
    return next(day for day in _OTHER_DAYS if not own & _numbers(day)).isoformat()


def _numbers(day: Day) -> set[tuple[str, int]]:
    return {("day", day.day), ("month", day.month), ("year", day.year), ("weekday", day.weekday())}


@contextmanager
def clock_at(date: str | None) -> Iterator[None]:
    """Let templates that transformers renders see midnight of a day, while this lasts; None leaves the clock alone.

    transformers takes nothing but plain data from those who call it, so its clock cannot be handed in.
    """
    if date is None:
        yield
        return
    from transformers.utils import chat_template_utils as module

    clock: Any = module
    before = clock.datetime
    clock.datetime = _Still(date)
    try:
        yield
    finally:
        clock.datetime = before


class _Still:
    """Stands in for `datetime` where nothing but `now` is asked of it."""

    def __init__(self, date: str) -> None:
        self._midnight = datetime.combine(Day.fromisoformat(date), time())

    def now(self) -> datetime:
        return self._midnight
