"""Event logs: one JSON object per line, written immediately, truncated on resume, read without a partial last line.

{"step": 1, "loss": 2.31, "grad_norm": 0.9, ...}
{"step": 2, "loss": "nan", "grad_norm": "inf", ...}      strings, because JSON has no NaN
"""

import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import orjson

from tunewell.core.errors import UserError
from tunewell.core.files import open_file, open_handle, parse_json, read_bytes, sync_folder, write_all, write_atomic
from tunewell.core.redact import redact
from tunewell.core.units import count
from tunewell.records.base import FileRecord

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class EventLog:
    """An append-only log that a crash can truncate but not corrupt: each event is one line and one write.

    If `on_trouble` is set, a failed write (a full disk) is reported once, and its events are written later.
    Otherwise the OSError is raised. Secrets are redacted.
    """

    def __init__(self, path: Path, *, on_trouble: Callable[[str], None] | None = None) -> None:
        self.path = path
        self._on_trouble = on_trouble
        self._waiting = b""
        self._guard = threading.Lock()  # the thread that saves checkpoints also logs
        self._handle = self._open()
        written = read_bytes(path)
        if written.strip(b"\0") and not written.startswith(b"{") and not any(map(parse_object, written.splitlines())):
            os.close(self._handle)
            raise UserError(f"`{path}` is not a tunewell log", fix=f"move `{path}` away: tunewell writes its log there")
        whole = written[: written.rfind(b"\n") + 1]
        if len(whole) < len(written):  # after a partial line, the next event starts on a new line
            os.ftruncate(self._handle, len(whole))
        self._num_bytes, self._digest = len(whole), hashlib.sha256(whole)

    def append(self, event: dict[str, Any]) -> None:
        """Write an event. It survives a crash of the process and, after the next `sync`, a power failure."""
        data = event_line(event) + b"\n"
        with self._guard:
            try:
                self._write(self._waiting + data)
                self._waiting = b""
            except OSError as error:
                self._report(error, "cannot be written ({}); its lines are buffered")
                self._waiting += data

    def sync(self) -> None:
        """Flush everything written so far to disk (fsync)."""
        with self._guard:
            try:
                self._write(self._waiting)
                self._waiting = b""
                os.fsync(self._handle)
            except OSError as error:
                self._report(error, "cannot be flushed to disk ({})")

    def _report(self, error: OSError, message: str) -> None:
        if self._on_trouble is None:
            raise error
        if not self._waiting:
            self._on_trouble(f"`{self.path.name}` {message.format(error.strerror)}")

    def written(self) -> FileRecord:
        """Return the size and the hash of everything written so far. Later events do not change these bytes."""
        with self._guard:
            return FileRecord(bytes=self._num_bytes, sha256=self._digest.hexdigest())

    def truncate_to(self, step: int) -> int:
        """Delete damaged lines and the lines of later steps; return their number. Damaged lines are reported.

        A line without a `step` belongs to the step of the previous line.
        """
        with self._guard:
            lines = (read_bytes(self.path) + self._waiting).split(b"\n")[:-1]
            events = [parse_object(line) for line in lines]
            kept: list[bytes] = []
            at = 0
            for line, event in zip(lines, events, strict=True):
                at = _step_of(event, at)
                if event is not None and at <= step:
                    kept.append(line)
            if len(kept) < len(lines):
                whole = b"".join(line + b"\n" for line in kept)
                write_atomic(self.path, whole)
                self._num_bytes, self._digest = len(whole), hashlib.sha256(whole)
                self._waiting = b""
                os.close(self._handle)
                self._handle = self._open()
            if self._on_trouble and (damaged := events.count(None)):
                self._on_trouble(f"{count(damaged, 'damaged line')} of `{self.path.name}` removed")
            return len(lines) - len(kept)

    def close(self) -> None:
        """Flush and close the file; a second call does nothing."""
        if self._handle >= 0:
            self.sync()
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> int:
        is_new = not self.path.exists()
        handle = open_handle(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        if is_new:
            sync_folder(self.path.parent)
        return handle

    def _write(self, data: bytes) -> None:
        before = os.fstat(self._handle).st_size
        try:
            write_all(self._handle, data)
        except OSError:
            os.ftruncate(self._handle, before)  # remove a partly written line
            raise
        self._num_bytes += len(data)
        self._digest.update(data)


def event_line(event: dict[str, Any]) -> bytes:
    """Return an event as a line of a log, without the line break."""
    line = json.dumps(plain(event), ensure_ascii=False, allow_nan=False)
    # A lone surrogate cannot be encoded as UTF-8; its escape is valid JSON.
    return line.encode("utf-8", "backslashreplace")


def begins_as(path: Path, written: FileRecord) -> bool:
    """Return whether the first bytes of a file are those that `EventLog.written` described."""
    with open_file(path) as file:
        return hashlib.sha256(file.read(written.bytes)).hexdigest() == written.sha256


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return all events except a truncated last one; raise UserError if the file is missing or damaged."""
    if not path.is_file():
        raise UserError(f"there is no `{path.name}`", where=f"expected `{path}`")
    events = [parse_object(line) for line in read_bytes(path).split(b"\n")[:-1]]
    if None in events[:-1]:
        raise UserError(f"line {events.index(None) + 1:,} of `{path.name}` is damaged", where=str(path))
    return [event for event in events if event is not None]


def read_losses(path: Path) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Return the training losses and the held-out losses of a log by step. Raises UserError like `read_events`.

    A step without supervised tokens has no loss.
    """
    losses: dict[str, list[tuple[int, float]]] = {"step": [], "held_out": []}
    for event in read_events(path):
        if event["kind"] in losses and event.get("supervised_tokens") != 0:
            losses[event["kind"]].append((event["step"], as_number(event["loss"])))
    return losses["step"], losses["held_out"]


def last_step(path: Path) -> int | None:
    """Return the number of the last intact `step` event, or None if there is no such event."""
    try:
        lines = read_bytes(path).split(b"\n")[:-1]
    except OSError:
        return None
    events = (parse_object(line) for line in reversed(lines))
    steps = (event.get("step") for event in events if event and event.get("kind") == "step")
    return next((step for step in steps if isinstance(step, int)), None)


def as_number(value: float | str) -> float:
    """Convert an event's value to a float, including `"nan"`, `"inf"` and `"-inf"`; raise ValueError for other text."""
    if not isinstance(value, str):
        return value
    if value not in _NOT_FINITE:
        raise ValueError(f"{value!r} is not a number")
    return _NOT_FINITE[value]


def with_numbers(value: object) -> Any:
    """Convert the strings that `plain` wrote for NaN and infinity back to numbers, recursively."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: with_numbers(entry) for key, entry in cast(dict[str, object], value).items()}
    return [with_numbers(entry) for entry in cast(list[object], value)] if isinstance(value, list) else value


def plain(value: Any) -> Any:
    """Return a copy of a value for JSON: secrets redacted, NaN and infinity as strings, keys as text."""
    return _finite(redact(value))


def _finite(value: object) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, dict):
        return {str(key): _finite(entry) for key, entry in cast(dict[object, object], value).items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in cast(Sequence[object], value)]
    return value


def parse_object(line: bytes) -> dict[str, Any] | None:
    """Return a JSON object, or None for a damaged one or another value."""
    try:
        event = orjson.loads(line)  # eight times as fast, but it knows no `NaN` and no lone surrogates
    except ValueError:
        try:
            event = parse_json(line)
        except ValueError:
            return None
    return cast(dict[str, Any], event) if isinstance(event, dict) else None


def _step_of(event: dict[str, Any] | None, before: int) -> int:
    step = event.get("step") if event else None
    return step if isinstance(step, int) else before
