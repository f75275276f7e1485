"""Show on stderr how far a long command is: a bar in a terminal, a line now and then elsewhere."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tunewell.core.progress import Progress, ProgressListener
from tunewell.core.units import count, duration

_LINE_SECONDS = 5.0


@contextmanager
def shown_progress() -> Iterator[ProgressListener]:
    """Give a function that shows progress; bars only in a real terminal, and not under `CI`."""
    if sys.stderr.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb":
        with _bar() as show:
            yield show
    else:
        yield _lines()


@contextmanager
def _bar() -> Iterator[ProgressListener]:
    from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    from tunewell.cli.render import err_console

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    started = time.monotonic()
    with Bars(*columns, console=err_console(), transient=True) as bars:

        def show(progress: Progress) -> None:
            if progress.stage not in tasks:
                tasks[progress.stage] = bars.add_task(progress.stage, total=progress.total or None, speed="")
            speed = (
                f"{count(int(progress.rows / max(time.monotonic() - started, 1e-9)))} rows/s" if progress.rows else ""
            )
            bars.update(tasks[progress.stage], completed=progress.done, total=progress.total or None, speed=speed)

        yield show


def _lines() -> ProgressListener:
    started = last = time.monotonic()

    def show(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _LINE_SECONDS:
            return
        last = now
        elapsed = now - started
        words = [progress.stage]
        if progress.rows:
            words.append(f"{count(progress.rows)} rows, {count(int(progress.rows / elapsed))} rows/s")
        if progress.total:
            share = min(1.0, progress.done / progress.total)
            words.append(f"{share:.0%}, {duration(elapsed * (1 - share) / max(share, 1e-9))} left")
        sys.stderr.write("  ".join(words) + "\n")

    return show


# Show on stderr which stage of a long command is going on: one line that changes in a terminal, lines elsewhere.

_STAGE_LINE_SECONDS = 10.0


@contextmanager
def shown_stages() -> Iterator[ProgressListener]:
    """Give a function that shows a stage and how much of it is done."""
    if not (sys.stderr.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"):
        yield _stage_lines()
        return
    from rich.status import Status

    from tunewell.cli.render import err_console

    with Status("", console=err_console()) as status:
        yield lambda progress: status.update(_words(progress))


def _words(progress: Progress) -> str:
    done = f", {count(progress.done)} of {count(progress.total)}" if progress.total else ""
    return progress.stage + done


def _stage_lines() -> ProgressListener:
    last_stage, last_time = "", 0.0

    def show(progress: Progress) -> None:
        nonlocal last_stage, last_time
        now = time.monotonic()
        if progress.stage == last_stage and now - last_time < _STAGE_LINE_SECONDS:
            return
        last_stage, last_time = progress.stage, now
        sys.stderr.write(_words(progress) + "\n")
        sys.stderr.flush()

    return show
