"""Progress of library calls: the command line's screen in a terminal, a live table in a notebook, or a listener."""

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tunewell.cli.progress import shown_progress
from tunewell.cli.screens.run_state import RunState
from tunewell.cli.screens.training import shown_training
from tunewell.core.html import render
from tunewell.core.progress import Progress, silent
from tunewell.core.units import count
from tunewell.training.events import Evaluated, Event, Listener

_UPDATE_SECONDS = 0.5
_MAX_TABLE_ROWS = 20

Show = bool | Listener
"""True: the default display for a terminal or notebook. False: no output. A function: called with every event."""


@contextmanager
def shown(progress: Show, *, is_training: bool = False) -> Iterator[Listener]:
    """Yield the listener for one call. The number of torch threads, which the work changes, is restored after it."""
    torch = sys.modules.get("torch")
    num_threads = torch.get_num_threads() if torch is not None else 0
    try:
        with warnings.catch_warnings():
            # tqdm warns in every notebook without ipywidgets, and none of its bars is shown.
            warnings.filterwarnings("ignore", message="IProgress not found")
            yield from _listeners(progress, is_training=is_training)
    finally:
        if torch is not None:
            torch.set_num_threads(num_threads)


def _listeners(progress: Show, *, is_training: bool) -> Iterator[Listener]:
    if callable(progress):
        yield progress
    elif not progress:
        yield silent
    elif in_notebook():
        table = NotebookTable()
        yield table
        table.update(is_final=True)
    elif is_training:
        with shown_training() as screen:
            yield screen
    else:
        with shown_progress() as show:
            yield lambda event: show(event) if isinstance(event, Progress) else None


def in_notebook() -> bool:
    """Return whether the code runs in a Jupyter kernel, including Colab and VS Code."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


class NotebookTable:
    """A listener that shows a table in a notebook cell: the stage, the last step, and one row per evaluation."""

    def __init__(self) -> None:
        self._run = RunState()
        self._rows: list[tuple[int, float | None, float | None]] = []
        self._handle: Any = None
        self._drawn = 0.0

    def __call__(self, event: Event) -> None:
        """Record an event and redraw the table, at most twice a second."""
        if isinstance(event, Evaluated):
            self._rows.append((event.step, self._run.last.loss if self._run.last else None, event.loss))
        self._run(event)
        self.update()

    def update(self, *, is_final: bool = False) -> None:
        """Redraw the table if it is due or final."""
        now = time.monotonic()
        if not is_final and now - self._drawn < _UPDATE_SECONDS:
            return
        self._drawn = now
        run, progress = self._run, self._run.stage_text.progress
        stage = run.stage or ("training" if run.start else "")
        if run.stage and progress.total:
            stage += f" ({count(progress.done)} of {count(progress.total)})"
        from IPython.display import HTML, display  # type: ignore[reportMissingImports]

        page = HTML(
            render(
                "tunewell.library",
                "progress.html",
                stage="" if is_final else stage,
                last=run.last,
                num_steps=run.num_steps,
                left=run.seconds_left() if run.last else None,
                rows=self._rows[-_MAX_TABLE_ROWS:],
            )
        )
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)
