"""The stream of a tab: what is new in the logs of a run, in the list of runs and in the jobs.

Files are looked at several times a second and read only where they have grown. The id of an event is the position in
each log, so a stream that was cut goes on where it was, also with another server.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
from starlette.concurrency import run_in_threadpool

from tunewell.core.errors import UserError
from tunewell.features.watch import views
from tunewell.features.watch.errors import WatchError, error_json
from tunewell.features.watch.watched import Watched, run_signature
from tunewell.records.events import event_line, parse_object, plain
from tunewell.runs.follow import START, LogPosition, LogReplaced, end_of, read_new
from tunewell.runs.state import StoredRun
from tunewell.runs.status import RunStatus

_SECONDS = 0.25
_RUN_SECONDS, _LIST_SECONDS, _ALIVE_SECONDS = 1.5, 2.0, 10.0
_KINDS = ("steps", "healing", "samples")
Event = tuple[str, Any]


class Stream:
    """The events of one tab."""

    def __init__(self, watched: Watched, query: Mapping[str, str], after: str) -> None:
        """Prepare a stream that goes on after an id; raise WatchError if there is no such run or id."""
        self._watched = watched
        self._run = watched.run(query["run"]) if query.get("run") else None
        self._name = query.get("run", "")
        self._has_list = query.get("runs") == "1"
        self._due: dict[str, float] = {}
        self._seen: dict[str, Any] = {}
        self._files = [self._run / name for name in views.LOGS] if self._run else []
        try:
            parts = [part for part in (*after.split("_"), query.get("log")) if part] if after else []
            self._positions = [LogPosition.parse(part) for part in parts][: len(self._files) + 1]
        except ValueError:
            raise WatchError("refused", "this is not the id of an event") from None
        # A log without a known position is followed from its end.
        log = views.log_path(watched, self._run) if self._run else None
        self._positions += [end_of(file) if file else START for file in [*self._files, log][len(self._positions) :]]

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events until the client leaves, or the log of the run is cut."""
        sent_at = 0.0
        while not self._watched.is_over():
            lines, is_over = await run_in_threadpool(self._poll)
            now = time.monotonic()
            if lines:
                yield b"".join(lines)
            elif now - sent_at > _ALIVE_SECONDS:
                yield b": alive\n\n"
            sent_at = now if lines or now - sent_at > _ALIVE_SECONDS else sent_at
            if is_over:
                return
            await asyncio.sleep(_SECONDS)

    def _poll(self) -> tuple[list[bytes], bool]:
        try:
            return [sse(kind, data, views.cursor_of(self._positions)) for kind, data in self._new_events()], False
        except LogReplaced:
            return [sse("reset", {"file": "events.jsonl", "last_step": self._last_step()})], True
        except (UserError, OSError) as error:
            known = error if isinstance(error, UserError) else WatchError("not_found", str(error))
            return [sse("gone", error_json(known))], True

    def _new_events(self) -> Iterator[Event]:
        if self._run is not None:
            if not self._run.is_dir():
                self._watched.run(self._name)  # raises, unless the run has only begun
            yield from self._new_lines()
            yield from self._changed_run(self._run)
        if self._has_list and self._is_due("runs", _LIST_SECONDS):
            yield from self._changed_list()

    def _new_lines(self) -> Iterator[Event]:
        for number, (kind, file) in enumerate(zip(_KINDS, self._files, strict=True)):
            if _has_grown(file, self._positions[number]):
                data, position = read_new(file, self._positions[number])
                rows = [row for line in data.split(b"\n") if (row := parse_object(line)) is not None]
                parts = {kind: rows}
                if kind == "steps":
                    parts = {"held_out": [row for row in rows if row.get("kind") == "held_out"]}
                    parts["steps"] = [views.with_speed(row) for row in rows if row.get("kind") == "step"]
                events = [(name, {"rows": own}) for name, own in parts.items() if own]
                yield from events[:-1]
                self._positions[number] = position  # only now: a stream that is cut before loses no step
                yield from events[-1:]
        if self._run and self._is_due("log", _RUN_SECONDS) and (path := views.log_path(self._watched, self._run)):
            try:
                data, self._positions[-1] = read_new(path, self._positions[-1])
            except LogReplaced:  # the log of another job
                data, self._positions[-1] = read_new(path)
            if data:
                yield "log", {"text": data.decode(errors="replace")}

    def _changed_run(self, run: Path) -> Iterator[Event]:
        if self._is_due("run", _RUN_SECONDS):
            status = RunStatus(run, is_quick=True)
            state = [status.stage, status.state if status.is_running else ""]
            signature = [run_signature(run), self._watched.jobs.signature(), state]
            if self._seen.get("run") != signature:
                self._seen["run"] = signature
                yield "run", views.run_state(self._watched, status)

    def _changed_list(self) -> Iterator[Event]:
        before: dict[Path, StoredRun] | None = self._seen.get("runs")
        now = self._watched.stored_runs()
        self._seen["runs"] = now
        if before is not None:
            rows = [views.row_of(self._watched, run) for path, run in now.items() if before.get(path) is not run]
            gone = [before[path].run for path in before.keys() - now.keys()]
            if rows or gone:
                yield "runs", {"rows": rows, "gone": gone}

    def _is_due(self, name: str, seconds: float) -> bool:
        now = time.monotonic()
        if now < self._due.get(name, 0.0):
            return False
        self._due[name] = now + seconds
        return True

    def _last_step(self) -> int | None:
        assert self._run is not None
        index, guard = self._watched.index(self._run)
        with guard:
            index.update()
            return index.steps[-1] if index.steps else None


def _has_grown(file: Path, position: LogPosition) -> bool:
    try:
        found = file.stat()
    except OSError:
        return bool(position.offset)
    return (found.st_ino, found.st_size) != (position.inode, position.offset) and bool(found.st_size or position.offset)


def sse(kind: str, data: Any, id_: str = "") -> bytes:
    """Return one server-sent event."""
    return f"{f'id: {id_}' if id_ else ':'}\nevent: {kind}\ndata: ".encode() + json_bytes(data) + b"\n\n"


def json_bytes(data: Any) -> bytes:
    """Return JSON, without secrets. A lone surrogate, which UTF-8 cannot encode, is escaped."""
    try:
        return orjson.dumps(plain(data), default=str)
    except TypeError:
        return event_line(data)
