"""Follow the files of a run in a separate process, and send new metrics to a tracker.

    python -m tunewell.features.track.follow RUN NAME package.module:Tracker [--once]

A tracker that hangs or crashes costs the run nothing: the run does not know of it. `track/NAME.json` has what was sent;
the next start goes on from there. `track/NAME.seen` has eight bytes for each line of `events.jsonl` that was sent, so a
log that was cut by a rewind and has grown again is noticed.
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import FolderLock, read_bytes, read_text, running_owner, write_atomic
from tunewell.core.redact import redact
from tunewell.features.track.base import Point, Progress, TrackedRun, Tracker
from tunewell.records.events import with_numbers

_POLL_SECONDS = 1.0
_RETRY_SECONDS = (1, 2, 5, 10, 30, 60)
_MAX_TRIES_AFTER_END = 5
"""How often a server that does not answer is tried after the run has ended."""
_BATCH = 200
_HASH_BYTES = 8
_LEFT_OUT = ("step", "kind")


class Follower:
    """Reads new lines of a run and turns them into points."""

    def __init__(self, run: Path, name: str) -> None:
        self.run = TrackedRun(run, run.resolve().name, _settings(run))
        self.folder = self.run.track_folder
        self._state_path, self._seen_path = self.folder / f"{name}.json", self.folder / f"{name}.seen"
        self.folder.mkdir(exist_ok=True)
        self.progress = _read_progress(self._state_path)
        self._seen = read_bytes(self._seen_path) if self._seen_path.is_file() else b""
        self._signature: object = None
        self._lines: list[bytes] = []

    def new_points(self) -> Iterator[list[Point]]:
        """Yield batches of new points. After each batch, `sent` must be called before the next is requested."""
        for entry in self._new_healing():
            yield [entry]
        self._read_events()
        num_kept = self._num_kept()
        if num_kept * _HASH_BYTES < len(self._seen):
            self.progress.segment += 1
            self._seen = self._seen[: num_kept * _HASH_BYTES]
            write_atomic(self._seen_path, self._seen)
            step = max((_step(line) for line in self._lines[:num_kept]), default=0)
            words = f"the run went back to step {step}"
            yield [self._point(step, {"segment": float(self.progress.segment)}, text=words)]
        for start in range(num_kept, len(self._lines), _BATCH):
            lines = self._lines[start : start + _BATCH]
            points = [
                self._point(_step(line), values, at=at) for at, line in enumerate(lines) if (values := _values(line))
            ]
            yield points
            self._seen += b"".join(map(_hash, lines))

    def sent(self, points: list[Point]) -> None:
        """Remember that points were sent."""
        if points:
            self.progress.number = max(point.number for point in points) + 1
        write_atomic(self._state_path, json.dumps(asdict(self.progress), indent=2) + "\n")

    def remember_lines(self) -> None:
        """Store which lines were sent."""
        write_atomic(self._seen_path, self._seen)

    def status(self) -> str:
        """Return the status of the run: `running`, `killed`, or the one in `outcome.json`."""
        owner, is_running = running_owner(self.run.folder / ".lock")
        if is_running:
            return "running"
        try:
            outcome = json.loads(read_text(self.run.folder / "outcome.json"))
            return "killed" if owner is not None else str(outcome["status"])
        except (OSError, ValueError, KeyError, TypeError):
            return "killed"

    def _point(self, step: int, values: dict[str, float], *, at: int = 0, text: str = "") -> Point:
        return Point(self.progress.number + at, step, self.progress.segment, values, time.time(), text)

    def _read_events(self) -> None:
        path = self.run.folder / "events.jsonl"
        try:
            stat = path.stat()
            signature = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if signature != self._signature:
                self._lines = read_bytes(path).split(b"\n")[:-1]
                self._signature = signature
        except OSError:
            self._lines = []

    def _num_kept(self) -> int:
        """Return the number of sent lines that are still at the start of the log."""
        num_sent = len(self._seen) // _HASH_BYTES
        for index, line in enumerate(self._lines[:num_sent]):
            if _hash(line) != self._seen[index * _HASH_BYTES : (index + 1) * _HASH_BYTES]:
                return index
        return min(num_sent, len(self._lines))

    def _new_healing(self) -> Iterator[Point]:
        """Yield the problems of the run. `healing.jsonl` is never cut, so it also has rewinds before this session."""
        try:
            lines = read_bytes(self.run.folder / "healing.jsonl").split(b"\n")[:-1]
        except OSError:
            return
        for line in lines[self.progress.healing_lines :]:
            entry = _parse(line)
            if entry.get("action") == "rewind":
                self.progress.rewinds += 1
            self.progress.healing_lines += 1
            words = f"{entry.get('action', '')}: {entry.get('words', '')}"
            yield self._point(_step(line), {"rewinds": float(self.progress.rewinds)}, text=words)


def follow(follower: Follower, tracker: Tracker, *, once: bool, poll_seconds: float = _POLL_SECONDS) -> int:
    """Send points until the run has ended, or what there is now with `once`. Return an exit code."""
    num_failures, is_open, has_ended = 0, False, False
    while True:
        status = follower.status()
        try:
            if not is_open:
                tracker.open(follower.run, follower.progress.state)
                is_open = True
            num_sent = 0
            for points in follower.new_points():
                tracker.log(points)
                follower.sent(points)
                num_sent += len(points)
            if num_sent:
                follower.remember_lines()
            num_failures = 0
            if status != "running" and (once or (has_ended and not num_sent)):
                tracker.close(status)
                follower.sent([])
                return 0
            if once and status == "running":
                return 0
            has_ended = status != "running"
            time.sleep(poll_seconds)
        except Exception as error:  # noqa: BLE001  any error of a tracker: a server that is down, a full disk, a bug in it
            num_failures += 1
            print(redact(f"{type(error).__name__}: {error}"), file=sys.stderr, flush=True)  # noqa: T201
            if once or (status != "running" and num_failures >= _MAX_TRIES_AFTER_END):
                return 1
            time.sleep(min(_RETRY_SECONDS[min(num_failures, len(_RETRY_SECONDS)) - 1], 60 * poll_seconds))


def _settings(run: Path) -> dict[str, Any]:
    try:
        plan = json.loads(read_text(run / "plan.json"))
    except (OSError, ValueError):
        return {}
    found: dict[str, Any] = {"model": plan.get("model")}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{prefix}.{key}" if prefix else str(key), inner)
        elif value is not None and prefix not in ("run", "corpus"):
            found[prefix] = value if isinstance(value, int | float | str | bool) else json.dumps(value)

    add("", plan.get("config") or {})
    found |= {
        f"plan.{key}": value["value"]
        for key, value in plan.items()
        if isinstance(value, dict) and isinstance(value.get("value"), int | float | str)
    }
    return found


def num_points(run: Path, name: str) -> int:
    """Return the number of points that were sent to a tracker so far."""
    return _read_progress(run / "track" / f"{name}.json").number


def _read_progress(path: Path) -> Progress:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Progress(**json.loads(read_text(path)))
    return Progress()


def _parse(line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return with_numbers(event) if isinstance(event, dict) else {}


def _step(line: bytes) -> int:
    step = _parse(line).get("step")
    return step if isinstance(step, int) else 0


def _values(line: bytes) -> dict[str, float]:
    """Return the metrics of an event: all numbers, with their raw values."""
    event = _parse(line)
    front = "held_out_" if event.get("kind") == "held_out" else ""
    if event.get("kind") not in ("step", "held_out"):
        return {}
    values = {
        f"{front}{name}": float(value)
        for name, value in event.items()
        if name not in _LEFT_OUT and isinstance(value, int | float) and not isinstance(value, bool)
    }
    if not front and event.get("seconds") and event.get("tokens"):
        values["tokens_per_second"] = event["tokens"] / event["seconds"]
    return values


def _hash(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=_HASH_BYTES).digest()


def main(arguments: list[str]) -> int:
    """Follow a run until it ends."""
    parser = argparse.ArgumentParser(description="Send the metrics of a run to a tracker.")
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("tracker")
    parser.add_argument("--once", action="store_true")
    wanted = parser.parse_args(arguments)
    (wanted.run / "track").mkdir(exist_ok=True)
    try:
        with FolderLock.take(wanted.run / "track" / f"{wanted.name}.lock", doing=f"sending `{wanted.run}`"):
            module, _, attribute = wanted.tracker.partition(":")
            tracker = getattr(importlib.import_module(module), attribute)()
            return follow(Follower(wanted.run, wanted.name), tracker, once=wanted.once)
    except UserError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
