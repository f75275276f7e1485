"""The process that reads rows for the New screen. It answers one request after another, and ends when it is idle."""

import sys
import threading
from typing import Any

from tunewell.core.child import Child, ChildDied
from tunewell.core.errors import UserError
from tunewell.core.progress import ProgressListener
from tunewell.features.watch.errors import WatchError

SILENT_SECONDS = 600
_IDLE_SECONDS = 60
_MODULE = "tunewell.features.watch.draft"


class Reader:
    """Keeps the process of the last request, so that the next one need not import everything again."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._idle: Child | None = None
        self._timer: threading.Timer | None = None

    def ask(self, request: dict[str, Any], progress: ProgressListener) -> dict[str, Any]:
        """Return the answer to a request; raise UserError if the rows cannot be read."""
        child = self._swap(None)
        if child is None or child.has_ended:
            child = Child([sys.executable, "-m", _MODULE])
        is_usable = False
        try:
            answer = child.ask(request, progress=progress, seconds=SILENT_SECONDS)
            is_usable = True
            return answer
        except UserError:
            is_usable = True
            raise
        except ChildDied as error:
            fix = "name fewer rows, like `rows.csv#1000`, or a smaller file"
            raise WatchError("refused", f"reading these rows {error.ended}", fix=fix) from error
        except TimeoutError as error:
            raise WatchError("refused", f"reading these rows took too long: {error}", fix="name fewer rows") from error
        finally:
            unused = self._swap(child) if is_usable else child
            if unused is not None:
                unused.close()

    def close(self) -> None:
        """End the process, unless it answers a request."""
        if child := self._swap(None):
            child.close()

    def _swap(self, child: Child | None) -> Child | None:
        """Keep a process for some time, and return the one that was kept."""
        with self._guard:
            if self._timer:
                self._timer.cancel()
            if child is not None:
                self._timer = threading.Timer(_IDLE_SECONDS, self.close)
                self._timer.daemon = True
                self._timer.start()
            before, self._idle = self._idle, child
            return before
