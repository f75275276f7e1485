"""`tunewell track`: send the metrics of a run to a tracker, now."""

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

from tunewell.config.extensions import TRACKERS
from tunewell.core.errors import UserError
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.core.redact import redact
from tunewell.features.track.sender import Sender, require_trackers
from tunewell.runs.state import EVENTS, StoredRun


@dataclass(frozen=True)
class Tracked:
    """What was sent to one tracker."""

    run: Path
    tracker: str
    messages: str
    """What the tracker printed to stdout."""
    num_sent: int
    """Number of points: steps, evaluations and problems that were not sent before."""


def track(run: str | Path, *, to: str, progress: ProgressListener = silent) -> Tracked:
    """Send the metrics that were not sent yet. Raise UserError if there is no run, or if the tracker failed."""
    folder = Path(run).expanduser()
    TRACKERS.entry(to)
    if not (folder / EVENTS).is_file():
        raise UserError(
            f"there is no run in `{folder}`",
            where=f"expected `{folder / EVENTS}`",
            fix="`tunewell runs` lists runs",
        )
    require_trackers([to])
    progress(Progress(f"sending {folder} to {to}"))
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), Sender(folder, to) as sender:
            status = StoredRun(folder).status
            num_sent = sender.catch_up()
            if status != "running":
                sender.close(status)
    except UserError:
        raise
    except Exception as error:  # any error of a tracker: a server that is down, a full disk, a bug in it
        raise UserError(
            f"the run was not sent to `{to}`",
            where=redact(f"{type(error).__name__}: {error}"),
            fix="correct the problem, then run the same command again: it continues where it stopped",
        ) from error
    return Tracked(folder, to, redact(printed.getvalue().strip()), num_sent)
