"""Freeze the clock that transformers gives to chat templates, while a proof renders with it.

One of the patches of other libraries that CONTRIBUTING.md lists: transformers accepts no clock from its callers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date as Day
from datetime import datetime, time
from typing import Any


@contextmanager
def clock_at(date: str | None) -> Iterator[None]:
    """Let chat templates that transformers renders see midnight of a day; None leaves the clock alone."""
    if date is None:
        yield
        return
    from transformers.utils import chat_template_utils

    module: Any = chat_template_utils
    before = module.datetime
    module.datetime = _FrozenDatetime(date)
    try:
        yield
    finally:
        module.datetime = before


class _FrozenDatetime:
    """Replaces `datetime` in transformers, which calls nothing but `now`."""

    def __init__(self, date: str) -> None:
        self._midnight = datetime.combine(Day.fromisoformat(date), time())

    def now(self) -> datetime:
        return self._midnight
