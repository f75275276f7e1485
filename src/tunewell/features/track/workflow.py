"""`tunewell track`: send the metrics of a run to a tracker, now."""

from dataclasses import dataclass
from pathlib import Path

from tunewell.config.extensions import TRACKERS
from tunewell.core.errors import UserError
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.features.track.follow import num_points
from tunewell.features.track.start import require_trackers, send_run


@dataclass(frozen=True)
class Tracked:
    """What was sent to one tracker."""

    run: Path
    tracker: str
    messages: str
    """What the tracker printed to stderr."""
    num_sent: int
    """Number of points: steps, evaluations and problems that were not sent before."""


def track(run: str | Path, *, to: str, python: str | None = None, progress: ProgressListener = silent) -> Tracked:
    """Send the metrics that were not sent yet. Raise UserError if there is no run, or if the tracker failed."""
    folder = Path(run).expanduser()
    TRACKERS.entry(to)
    if not (folder / "events.jsonl").is_file():
        raise UserError(
            f"there is no run in `{folder}`",
            where=f"expected `{folder / 'events.jsonl'}`",
            fix="`tunewell runs` lists runs",
        )
    require_trackers([to], python)
    progress(Progress(f"sending {folder} to {to}"))
    before = num_points(folder, to)
    code, messages = send_run(folder, to, python)
    if code:
        raise UserError(
            f"the run was not sent to `{to}`",
            where=messages.splitlines()[-1] if messages else f"exit code {code}",
            fix="correct the problem, then run the same command again: it continues where it stopped",
        )
    return Tracked(folder, to, messages, num_points(folder, to) - before)
