"""Show on stderr which stage of a long command is going on: one line that changes in a terminal, lines elsewhere."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tunewell.core.units import count

_LINE_SECONDS = 10.0


@contextmanager
def shown_stages() -> Iterator[Callable[[str, int, int], None]]:
    """Give a function that shows a stage and how much of it is done; (0, 0) where that is not known."""
    if not (sys.stderr.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"):
        yield _lines()
        return
    from rich.status import Status

    from tunewell.cli.render import err_console

    with Status("", console=err_console()) as status:
        yield lambda stage, done, of: status.update(_words(stage, done, of))


def _words(stage: str, done: int, of: int) -> str:
    return f"{stage}, {count(done)} of {count(of)}" if of else stage


def _lines() -> Callable[[str, int, int], None]:
    last_stage, last_time = "", 0.0

    def show(stage: str, done: int, of: int) -> None:
        nonlocal last_stage, last_time
        now = time.monotonic()
        if stage == last_stage and now - last_time < _LINE_SECONDS:
            return
        last_stage, last_time = stage, now
        sys.stderr.write(_words(stage, done, of) + "\n")
        sys.stderr.flush()

    return show
