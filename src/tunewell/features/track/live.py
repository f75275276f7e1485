"""Send the metrics of a run while it trains, in a thread for each tracker.

The thread follows the files of the run, so the run never waits. What a tracker refuses is sent when it answers again.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from tunewell.core.redact import redact
from tunewell.core.units import count
from tunewell.features.track.sender import Sender, num_unsent
from tunewell.training.events import Event, Listener, Rewound

_WAIT_SECONDS = (1, 1, 2, 5, 10, 30, 60)
"""Time between two batches, by the number of failures before."""
_PATIENCE_SECONDS = 5.0
"""How long the end of a run waits for all its trackers."""


def start_trackers(
    run: Path, names: Sequence[str], listeners: list[Listener], note: Callable[[str], None]
) -> Callable[[str], None]:
    """Add the trackers of a run to its listeners. Return a function that ends them with the status of the run."""
    trackers = [LiveTracker(run, name, note) for name in names]
    listeners += trackers

    def end(status: str) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for tracker in trackers:
            tracker.end(status)
        for tracker in trackers:
            tracker.wait(deadline)

    return end


class LiveTracker:
    """Sends the metrics of a run to one tracker in a thread. It listens to rewinds, which shorten the log."""

    def __init__(self, run: Path, name: str, note: Callable[[str], None]) -> None:
        self._run, self._name, self._note = run, name, note
        self._is_log_cut = True
        self._status = ""
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Read the log from its start after a rewind."""
        self._is_log_cut |= isinstance(event, Rewound)

    def end(self, status: str) -> None:
        """Ask the thread to send the rest, and to end the tracker's record with the status of the run."""
        self._status, self._is_log_cut = status, True
        self._has_ended.set()

    def wait(self, deadline: float) -> None:
        """Wait for the thread until `deadline`, and note how many points were not sent."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        num_left = num_unsent(self._run, self._name)
        if num_left or self._thread.is_alive():
            reason = f"has not answered within {_PATIENCE_SECONDS:.0f} seconds" if self._thread.is_alive() else "failed"
            later = f"`tunewell track {self._run} --to {self._name}` sends what is missing"
            self._note(f"the tracker `{self._name}` {reason}; {count(num_left, 'point')} not sent; {later}")

    def _work(self) -> None:
        sender, num_failures, is_noted = None, 0, False
        with ExitStack() as stack:
            while True:
                has_ended = self._has_ended.wait(_WAIT_SECONDS[min(num_failures, len(_WAIT_SECONDS) - 1)])
                try:
                    sender = sender or stack.enter_context(Sender(self._run, self._name))
                    is_log_cut, self._is_log_cut = self._is_log_cut, False
                    sender.catch_up(is_log_cut=is_log_cut)
                    num_failures = 0
                    if has_ended:
                        sender.close(self._status)
                except Exception as error:  # noqa: BLE001  a server that is down, a full disk, a bug in the tracker
                    self._is_log_cut = True
                    num_failures += 1
                    if not is_noted:
                        words = redact(f"{type(error).__name__}: {error}")
                        self._note(f"the tracker `{self._name}` failed, and training goes on: {words}")
                        is_noted = True
                if has_ended:
                    return
