"""Read a growing log in parts: what is new since a position, and whether it was cut or replaced since. No torch.

A resume and a rewind replace `events.jsonl` by a shorter file. A position is therefore the inode and the byte offset,
with a checksum of the bytes before it, because a file system may use an inode again.
"""

import os
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tunewell.core.files import open_file
from tunewell.records.events import as_number, parse_object

_BLOCK_BYTES = 4 << 20
_CHECKED_BYTES = 256
_MAX_NOT_FINITE = 1000


class LogReplaced(Exception):
    """Raised if the bytes before a position are no longer those that were read."""


@dataclass(frozen=True)
class LogPosition:
    """The end of a complete line in a log; written as text, it is the id of an event of a stream."""

    inode: int = 0
    offset: int = 0
    check: int = 0

    def __str__(self) -> str:
        return f"{self.inode:x}.{self.offset:x}.{self.check:x}"

    @classmethod
    def parse(cls, text: str) -> "LogPosition":
        """Return the position that a text names; raise ValueError for another text."""
        inode, offset, check = (int(part, 16) for part in text.split("."))
        if min(inode, offset, check) < 0:
            raise ValueError(f"{text!r} is not a position")
        return cls(inode, offset, check)


START = LogPosition()


def read_new(path: Path, position: LogPosition = START, *, needs_lines: bool = True) -> tuple[bytes, LogPosition]:
    """Return the bytes after a position, at most 4 MiB of complete lines, and the position after them.

    A missing file is empty. Raises LogReplaced if the log was cut or replaced. `needs_lines=False` also returns a line
    that is not complete.
    """
    try:
        file = open_file(path)
    except OSError:
        if position.offset:
            raise LogReplaced from None
        return b"", START
    with file:
        found = os.fstat(file.fileno())
        if position.offset and position != _position(file, position.offset, found):
            raise LogReplaced
        file.seek(position.offset)
        data, size = file.read(_BLOCK_BYTES), _BLOCK_BYTES
        while needs_lines and b"\n" not in data and len(data) == size:  # a line of many megabytes
            data, size = data + file.read(size), 2 * size
        data = data[: data.rfind(b"\n") + 1] if needs_lines else data
        return data, _position(file, position.offset + len(data), found) if data else position


def end_of(path: Path) -> LogPosition:
    """Return the end of the last complete line of a log."""
    try:
        with open_file(path) as file:
            found = os.fstat(file.fileno())
            end = found.st_size
            while end > 0:
                start = max(0, end - _BLOCK_BYTES)
                file.seek(start)
                if (last := file.read(end - start).rfind(b"\n")) >= 0:
                    return _position(file, start + last + 1, found)
                end = start
    except OSError:
        pass
    return START


def _position(file: Any, offset: int, found: os.stat_result) -> LogPosition:
    if offset > found.st_size:
        return START
    file.seek(max(0, offset - _CHECKED_BYTES))
    return LogPosition(found.st_ino, offset, zlib.crc32(file.read(min(offset, _CHECKED_BYTES))))


@dataclass
class StepIndex:
    """Where each step of a log is, with its loss, and the evaluations. `update` reads what is new.

    One step needs 24 bytes, so that the logs of many long runs can be kept.
    """

    path: Path
    position: LogPosition = START
    steps: "array[int]" = field(default_factory=lambda: array("q"))
    losses: "array[float]" = field(default_factory=lambda: array("d"))
    offsets: "array[int]" = field(default_factory=lambda: array("q"))
    held_out: list[dict[str, Any]] = field(default_factory=list)
    num_damaged: int = 0

    def update(self) -> None:
        """Read the new lines, or all of them if the log was cut."""
        try:
            while True:
                data, position = read_new(self.path, self.position)
                if not data:
                    return
                self._add(data)
                self.position = position
        except LogReplaced:
            self.__init__(self.path)
            self.update()

    def _add(self, data: bytes) -> None:
        at = self.position.offset
        for line in data.split(b"\n")[:-1]:
            event = parse_object(line)
            if event is None:
                self.num_damaged += 1
            elif event.get("kind") == "held_out":
                self.held_out.append(event)
            elif event.get("kind") == "step" and isinstance(step := event.get("step"), int):
                self.steps.append(step)
                self.losses.append(_loss(event))
                self.offsets.append(at)
            at += len(line) + 1

    def chosen(self, num_points: int) -> list[int]:
        """Return the indices of steps that draw the same curve: first, lowest, highest and last of each interval.

        Steps whose loss is not finite are among them.
        """
        losses = np.frombuffer(self.losses, np.float64)
        if len(losses) <= num_points:
            return list(range(len(losses)))
        kept = set(np.flatnonzero(~np.isfinite(losses))[:_MAX_NOT_FINITE].tolist())
        for part in np.array_split(np.arange(len(losses)), max(1, num_points // 4)):
            finite = part[np.isfinite(losses[part])]
            kept |= {int(part[0]), int(part[-1])}
            if len(finite):
                kept |= {int(finite[losses[finite].argmin()]), int(finite[losses[finite].argmax()])}
        return sorted(kept)

    def events(self, indices: list[int]) -> Iterator[dict[str, Any]]:
        """Yield the events of steps, as the log has them."""
        if not indices:  # before the first step there is no log
            return
        with open_file(self.path) as file:
            for index in indices:
                file.seek(self.offsets[index])
                if (event := parse_object(file.readline())) is not None:
                    yield event


def _loss(event: dict[str, Any]) -> float:
    try:
        return float(as_number(event.get("loss", "nan")))
    except (ValueError, TypeError):
        return float("nan")
