"""Show the progress of a command on stderr: a status line in a terminal, log lines elsewhere."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from tunewell.cli.render import console, is_interactive
from tunewell.core.progress import Progress, ProgressListener
from tunewell.core.units import count, duration

_LINE_SECONDS = 5.0
_STAGE_LINE_SECONDS = 10.0
_SHOWN_LEFT_SECONDS = 3.0
"""Shorter times are not worth a number on the screen."""
_SURE_SHARE = 0.05


class StageText:
    """A listener that keeps the last progress, and describes it: stage, count, and the time left.

    `verifying gguf q8_0, 12 of 20, about 25 s left`. The time left is that of the stage, from its measured rate.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.progress = self._first = Progress("")
        self._began = self._counted = self._received = clock()

    def __call__(self, progress: Progress) -> None:
        """Keep the progress."""
        self._received = self.clock()
        is_new = progress.stage != self.progress.stage
        if is_new:
            self._began = self._received
        if is_new or progress.done < self.progress.done:  # a stage can count several things in turn
            self._first, self._counted = progress, self._received
        self.progress = progress

    @property
    def stage_seconds(self) -> float:
        """The time since the stage began."""
        return self.clock() - self._began

    def text(self) -> str:
        """Return the line for the screen, as of now."""
        progress = self.progress
        parts = [progress.stage or "starting"]
        if progress.total:
            parts.append(f"{_amount(progress.done, progress.unit)} of {_amount(progress.total, progress.unit)}")
        if (left := self._seconds_left()) is not None and left >= _SHOWN_LEFT_SECONDS:
            parts.append(f"about {duration(round(left))} left")
        elif not progress.total and self.stage_seconds >= _LINE_SECONDS:
            parts.append(duration(round(self.stage_seconds)))
        if progress.rows:
            parts.append(f"{count(progress.rows)} rows")
        return ", ".join(parts)

    def _seconds_left(self) -> float | None:
        done, rest = self.progress.done - self._first.done, self.progress.total - self.progress.done
        if not self.progress.total or done < max(1, _SURE_SHARE * (done + rest)):
            return None
        return (self._received - self._counted) * rest / done - (self.clock() - self._received)

    def __rich__(self) -> str:
        return self.text()


def _amount(number: int, unit: str) -> str:
    return f"{number >> 20:,} MiB" if unit == "bytes" else count(number)


@contextmanager
def shown_stages(*, quiet_seconds: float = 0.0) -> Iterator[ProgressListener]:
    """Yield a listener that shows the current stage in a status line, or in log lines without a terminal.

    No log line is written in the first `quiet_seconds`.
    """
    if not is_interactive():
        with _stage_lines(quiet_seconds) as show:
            yield show
        return
    from rich.live import Live
    from rich.spinner import Spinner

    text = StageText()
    screen = console(stderr=True)
    with Live(Spinner("dots", text=text), console=screen, transient=True, refresh_per_second=8):  # type: ignore[arg-type]
        yield text


shown_progress = partial(shown_stages, quiet_seconds=_LINE_SECONDS)
"""For commands that are usually quick: their log has lines only if they take longer."""


@contextmanager
def _stage_lines(quiet_seconds: float) -> Iterator[ProgressListener]:
    """Write a line when a stage begins, and one every few seconds while it lasts, also if it reports nothing."""
    text, lock, is_over = StageText(), threading.Lock(), threading.Event()
    last_time, started = 0.0, time.monotonic()

    def write() -> None:
        nonlocal last_time
        last_time = time.monotonic()
        if last_time - started < quiet_seconds:
            return
        sys.stderr.write(text.text() + "\n")
        sys.stderr.flush()

    def show(progress: Progress) -> None:
        with lock:
            is_new = progress.stage != text.progress.stage
            text(progress)
            if is_new or time.monotonic() - last_time >= _STAGE_LINE_SECONDS:
                write()

    def tick() -> None:
        while not is_over.wait(1.0):
            with lock:
                if text.progress.stage and time.monotonic() - last_time >= _STAGE_LINE_SECONDS:
                    write()

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield show
    finally:
        is_over.set()
        ticker.join()
