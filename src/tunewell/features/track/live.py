"""Send the metrics of a run while it trains, in a thread for each tracker.

The run puts each step into a bounded queue and never waits. What does not fit, or fails, is read from the files of the
run when the tracker answers again.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from tunewell.core.redact import redact
from tunewell.core.units import count
from tunewell.features.track.sender import Sender, num_unsent
from tunewell.records.events import event_line
from tunewell.training.events import Evaluated, Event, Healed, Listener, Rewound, StepTaken

_MAX_QUEUED = 1000
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
    """A listener that sends the metrics of a run to one tracker in a thread."""

    def __init__(self, run: Path, name: str, note: Callable[[str], None]) -> None:
        self._run, self._name, self._note = run, name, note
        self._steps: queue.Queue[StepTaken] = queue.Queue(_MAX_QUEUED)
        self._is_behind = True
        """Whether the files of the run may have something to send that is not in the queue."""
        self._status = ""
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Queue a step. Rarer events are read from the files."""
        match event:
            case StepTaken():
                try:
                    self._steps.put_nowait(event)
                except queue.Full:
                    self._is_behind = True
            case Evaluated() | Healed() | Rewound():
                self._is_behind = True
            case _:
                pass

    def end(self, status: str) -> None:
        """Ask the thread to send the rest, and to end the tracker's record with the status of the run."""
        self._status, self._is_behind = status, True
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
                    self._send(sender)
                    num_failures = 0
                    if has_ended:
                        sender.close(self._status)
                except Exception as error:  # noqa: BLE001  a server that is down, a full disk, a bug in the tracker
                    self._is_behind = True
                    num_failures += 1
                    if not is_noted:
                        words = redact(f"{type(error).__name__}: {error}")
                        self._note(f"the tracker `{self._name}` failed, and training goes on: {words}")
                        is_noted = True
                if has_ended:
                    return

    def _send(self, sender: Sender) -> None:
        is_behind, self._is_behind = self._is_behind, False
        steps = [self._steps.get_nowait() for _ in range(self._steps.qsize())]
        # A rewind sets the flag before its first step is queued. The steps that it has cut are in the queue only.
        if is_behind or self._is_behind:
            sender.catch_up()
        else:
            sender.send([event_line({"kind": "step", **step.__dict__}) for step in steps])
