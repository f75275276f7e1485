"""Send what is new in a run to a tracker, and remember beside the run what was sent.

`track/NAME.json` has the tracker's own state and counts; `track/NAME.seen` has eight bytes for each line of
`events.jsonl` that was sent. So no line is sent twice, whoever sends it: the run, a resumed run or `tunewell track`.
"""

import hashlib
import importlib.util
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tunewell.config.extensions import TRACKERS
from tunewell.core.errors import UserError
from tunewell.core.files import FolderLock, open_file, write_atomic
from tunewell.core.redact import redact
from tunewell.evaluation.comparison import flat_settings
from tunewell.features.track.base import Point, SentState, TrackedRun, Tracker
from tunewell.records.events import with_numbers
from tunewell.records.healing import HEALING
from tunewell.runs.state import EVENTS, StoredRun, read_object

_BATCH = 200
_HASH_BYTES = 8


def require_trackers(names: Sequence[str]) -> None:
    """Raise UserError if the package of a tracker is missing."""
    for name in names:
        module, package = TRACKERS.entry(name).module, TRACKERS.entry(name).package
        if module and importlib.util.find_spec(module) is None:
            raise UserError(f"the tracker `{name}` needs the package `{package}`", fix=f"`pip install {package}`")


class Sender:
    """Sends the points of one run to one tracker. While it is open, it holds `track/NAME.lock`."""

    def __init__(self, run: Path, name: str) -> None:
        self.run = TrackedRun(run, redact(run.resolve().name), _settings(run))
        folder = self.run.track_folder
        folder.mkdir(exist_ok=True)
        self._lock = FolderLock.take(folder / f"{name}.lock", doing=f"sending `{run}` to `{name}`")
        self._state_path, self._seen_path = folder / f"{name}.json", folder / f"{name}.seen"
        self._progress = SentState(**read_object(self._state_path))
        self._seen = _read_seen(self._seen_path)
        self._offset = 0
        try:
            self._tracker: Tracker = TRACKERS.load(name)()
            self._tracker.open(self.run, self._progress.state)
            self._save()
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> "Sender":
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def catch_up(self, *, is_log_cut: bool = True) -> int:
        """Send what the files of the run have and was not sent. Return the number of points.

        Unless the log may have been cut since the last call, only its new lines are read.
        """
        num_before = self._progress.number
        self._send_healing()
        start = 0 if is_log_cut else self._offset
        content = _content(self.run.folder / EVENTS, start)
        lines = content.split(b"\n")[:-1]
        if is_log_cut:
            self._begin_segment([line for line in lines if _hash(line) in self._seen])
        new = [line for line in lines if _hash(line) not in self._seen]
        for first in range(0, len(new), _BATCH):
            batch = new[first : first + _BATCH]
            self._log([(step, values, "") for step, event in map(_parse, batch) if (values := _metrics(event))])
            self._seen.update(map(_hash, batch))
            self._save()
        self._offset = start + content.rfind(b"\n") + 1
        return self._progress.number - num_before

    def _begin_segment(self, kept: Sequence[bytes]) -> None:
        """Begin a segment if lines that were sent are no longer in the log."""
        num_cut = len(self._seen) - len(set(kept))
        if num_cut > self._progress.num_cut:
            step = max((_parse(line)[0] for line in kept), default=0)
            segment = self._progress.segment + 1
            self._log([(step, {"segment": float(segment)}, f"the run went back to step {step}")], segment)
            self._progress.segment, self._progress.num_cut = segment, num_cut

    def close(self, status: str) -> None:
        """End the tracker's record with the status of the run."""
        self._tracker.close(status)
        self._save()

    def _send_healing(self) -> None:
        """Send the problems of the run. `healing.jsonl` is never cut, so it also has rewinds before this session."""
        for line in _lines(self.run.folder / HEALING)[self._progress.healing_lines :]:
            step, entry = _parse(line)
            rewinds = self._progress.rewinds + (entry.get("action") == "rewind")
            words = redact(f"{entry.get('action', '')}: {entry.get('words', '')}")
            self._log([(step, {"rewinds": float(rewinds)}, words)])
            self._progress.rewinds = rewinds
            self._progress.healing_lines += 1
            self._save()

    def _log(self, found: Sequence[tuple[int, dict[str, float], str]], segment: int | None = None) -> None:
        """Send points: step, values and text."""
        if segment is None:
            segment = self._progress.segment
        points = [
            Point(number, step, segment, values, time.time(), text)
            for number, (step, values, text) in enumerate(found, self._progress.number)
        ]
        self._tracker.log(points)
        self._progress.number += len(points)

    def _save(self) -> None:
        write_atomic(self._state_path, json.dumps(asdict(self._progress), indent=2) + "\n")
        write_atomic(self._seen_path, b"".join(self._seen))


def num_unsent(run: Path, name: str) -> int:
    """Return the number of steps and evaluations in the log of a run that were not sent to a tracker."""
    seen = _read_seen(run / "track" / f"{name}.seen")
    return sum(_hash(line) not in seen for line in _lines(run / EVENTS) if _metrics(_parse(line)[1]))


def _settings(run: Path) -> dict[str, Any]:
    """Return the settings and the choices of a plan by dotted keys, as single values."""
    plan = redact(StoredRun(run).plan)
    chosen = {
        f"plan.{key}": value["value"] for key, value in plan.items() if isinstance(value, dict) and "value" in value
    }
    found = {"model": plan.get("model"), **flat_settings(plan.get("config") or {}), **chosen}
    return {
        key: value if isinstance(value, int | float | str) else json.dumps(value)
        for key, value in found.items()
        if value is not None and key not in ("run", "corpus")
    }


def _content(path: Path, start: int = 0) -> bytes:
    """Return the content of a file from `start` on; nothing if there is none."""
    if not path.is_file():
        return b""
    with open_file(path) as file:
        file.seek(start)
        return file.read()


def _read_seen(path: Path) -> set[bytes]:
    data = _content(path)
    return {data[at : at + _HASH_BYTES] for at in range(0, len(data), _HASH_BYTES)}


def _lines(path: Path) -> list[bytes]:
    """Return the whole lines of a log."""
    return _content(path).split(b"\n")[:-1]


def _parse(line: bytes) -> tuple[int, dict[str, Any]]:
    """Return the step and the values of a line; a damaged line has none."""
    try:
        event = with_numbers(json.loads(line))
        return int(event["step"]), event
    except (ValueError, LookupError, TypeError):
        return 0, {}


def _metrics(event: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of an event: all numbers, with their raw values."""
    front = {"step": "", "held_out": "held_out_"}.get(event.get("kind", ""))
    if front is None:
        return {}
    values = {
        f"{front}{name}": float(value)
        for name, value in event.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
    if not front and event.get("seconds") and event.get("tokens"):
        values["tokens_per_second"] = event["tokens"] / event["seconds"]
    return values


def _hash(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=_HASH_BYTES).digest()
