"""Show the progress of a command on stderr: bars or a status line in a terminal, log lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tunewell.cli.render import console, is_interactive
from tunewell.core.progress import Progress, ProgressListener
from tunewell.core.units import count, duration

_LINE_SECONDS = 5.0
_STAGE_LINE_SECONDS = 10.0


@contextmanager
def shown_progress() -> Iterator[ProgressListener]:
    """Yield a listener that shows one progress bar per stage in a terminal, and log lines elsewhere."""
    if is_interactive():
        with _bar() as show:
            yield show
    else:
        yield _lines()


@contextmanager
def _bar() -> Iterator[ProgressListener]:
    from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    started = time.monotonic()
    with Bars(*columns, console=console(stderr=True), transient=True) as bars:

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
        parts = [progress.stage]
        if progress.rows:
            parts.append(f"{count(progress.rows)} rows, {count(int(progress.rows / elapsed))} rows/s")
        if progress.total:
            share = min(1.0, progress.done / progress.total)
            parts.append(f"{share:.0%}, {duration(elapsed * (1 - share) / max(share, 1e-9))} left")
        sys.stderr.write("  ".join(parts) + "\n")

    return show


@contextmanager
def shown_stages() -> Iterator[ProgressListener]:
    """Yield a listener that shows the current stage in a status line, or in log lines without a terminal."""
    if not is_interactive():
        yield _stage_lines()
        return
    from rich.status import Status

    with Status("", console=console(stderr=True)) as status:
        yield lambda progress: status.update(_stage_text(progress))


def _stage_text(progress: Progress) -> str:
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
        sys.stderr.write(_stage_text(progress) + "\n")
        sys.stderr.flush()

    return show
