"""Cut a `.json` file into its rows without holding it: only brackets, commas and quotes are looked at.

Each row comes as bytes and is parsed like a line of a `.jsonl`, so one broken row costs one row. What the rows are:

    [row, row]                     the elements of the list
    {"data": [row, row], ...}      the elements of the one list of objects
    {"id1": row, "id2": row}       the values, if all of them are objects
    row                            the file itself; several of them one behind the other are several rows
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from tunewell.core.errors import UserError
from tunewell.data.sources.files import SourceFile
from tunewell.data.sources.lines import TooLong, read_utf8

# A line end cannot stand in a JSON string: where one does, a quote is missing, and the next line begins outside.
_STRING = re.compile(rb'[^"\\\n]*+(?:\\[^\n][^"\\\n]*+)*+')
_STRUCTURE = re.compile(rb'["\[\]{},:]')
_OPENS = {ord("["): ord("]"), ord("{"): ord("}")}
_QUOTE, _BACKSLASH, _COMMA, _BRACE, _LINE_END = b'"\\,{\n'
_CONVERSATION_LISTS = {b'"messages"', b'"conversations"', b'"conversation"'}
_HEAD_BYTES = 4096
_MAX_OPEN = 10_000


@dataclass(frozen=True)
class Member:
    """One value inside a container (or at the top of a file), unparsed."""

    value: bytes | TooLong
    head: bytes
    """The value's first bytes, also when it is too long."""
    key: bytes = b""
    parent: int = 0
    """Which container it lies in, counting those of its level from 0."""


def read_rows(file: SourceFile, *, encoding: str, max_bytes: int) -> Iterator[bytes | TooLong]:
    """Yield the rows of a JSON file; raise UserError when the file as a whole is broken."""
    level, parent = _where_rows_are(file, encoding)
    for member in split_members(read_utf8(file, encoding), level=level, max_bytes=max_bytes, name=file.name):
        if parent is None or member.parent == parent:
            yield member.value
        elif level == 1:
            raise _more_behind(file.name)


def _where_rows_are(file: SourceFile, encoding: str) -> tuple[int, int | None]:
    """Give the level of nesting at which rows lie, and in which container of that level, if in one only."""
    start = next((block.lstrip() for block in read_utf8(file, encoding) if not block.isspace()), b"")
    if not start:
        raise UserError(f"`{file.name}` is empty", fix="it should hold a list of rows: `[{...}, {...}]`")
    if start[:1] == b"[":
        return 1, 0
    if start[:1] != b"{":
        return 0, None
    num_members = num_objects = num_containers = 0
    lists: list[int] = []
    for member in split_members(read_utf8(file, encoding), level=1, max_bytes=_HEAD_BYTES, name=file.name):
        if member.parent or member.key in _CONVERSATION_LISTS:
            return 0, None
        if re.match(rb"\[\s*\{", member.head):
            lists.append(num_containers)
        num_members += 1
        num_objects += member.head[:1] == b"{"
        num_containers += member.head[:1] in (b"{", b"[")
    if len(lists) == 1:
        return 2, lists[0]
    return (1, 0) if num_members and num_objects == num_members else (0, None)


@dataclass
class _Held:
    """The bytes of the value being read, as long as they are few enough."""

    max_bytes: int
    parts: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    head: bytes = b""

    def add(self, part: bytes) -> None:
        if not self.num_bytes:
            part = part.lstrip()
        self.num_bytes += len(part)
        if len(self.head) < _HEAD_BYTES:
            self.head += part[: _HEAD_BYTES - len(self.head)]
        if self.num_bytes > self.max_bytes:
            self.parts = []
        elif part:
            self.parts.append(part)

    def take(self) -> tuple[bytes | TooLong, bytes]:
        is_long = self.num_bytes > self.max_bytes
        taken = TooLong(self.num_bytes) if is_long else b"".join(self.parts).rstrip(), self.head.rstrip()
        self.parts, self.num_bytes, self.head = [], 0, b""
        return taken


def split_members(blocks: Iterable[bytes], *, level: int, max_bytes: int, name: str) -> Iterator[Member]:
    """Yield the values that lie inside `level` containers, wherever the blocks are cut.

    A bracket that closes nothing, or closes more than the last one opened, ends no more than the value it stands in.
    """
    splitter = _Splitter(level, max_bytes)
    for block in blocks:
        yield from splitter.feed(block)
    yield from splitter.finish(name)


class _Splitter:
    def __init__(self, level: int, max_bytes: int) -> None:
        self._level = level
        self._held = _Held(max_bytes)
        self._key = b""
        self._parent = -1
        self._closers = bytearray()
        """The bracket that closes each open container, innermost last."""
        self._num_beyond = 0
        """Containers open beyond those we remember."""
        self._is_in_string = self._is_escaped = False
        self._num_yielded = 0

    def feed(self, block: bytes) -> Iterator[Member]:
        begin = at = 0
        while at < len(block):
            if self._is_in_string:
                at = self._pass_string(block, at)
                continue
            found = _STRUCTURE.search(block, at)
            if found is None:
                break
            byte, at = block[found.start()], found.end()
            if byte == _QUOTE:
                self._is_in_string = True
            elif byte in _OPENS:
                begin = at if self._opens_parent(byte) else begin
            elif byte in _OPENS.values():
                ended = self._closes(byte)
                if ended == "outer":
                    self._held.take()
                elif ended:
                    self._held.add(block[begin : at if ended == "value" else at - 1])
                    yield from self._member()
                begin = at if ended else begin
            elif len(self._closers) == self._level > 0:
                if byte == _COMMA:
                    self._held.add(block[begin : at - 1])
                    yield from self._member()
                    begin = at
                elif not self._key and self._closers[-1] == _OPENS[_BRACE]:
                    self._held.add(block[begin : at - 1])
                    self._key, begin = self._held.take()[1], at
        self._held.add(block[begin:])

    def _pass_string(self, block: bytes, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            if block[at] == _LINE_END:  # a line end ends a broken string, escaped or not, wherever the block is cut
                self._is_in_string = False
                return at + 1
            at += 1
        at = _STRING.match(block, at).end()  # type: ignore[union-attr]
        if at < len(block):
            self._is_escaped = block[at] == _BACKSLASH and at + 1 == len(block)
            self._is_in_string = self._is_escaped
        return at + 1

    def _opens_parent(self, byte: int) -> bool:
        if len(self._closers) >= _MAX_OPEN:
            self._num_beyond += 1
            return False
        self._closers.append(_OPENS[byte])
        if len(self._closers) != self._level:
            return False
        self._parent += 1
        self._key = b""
        self._held.take()
        return True

    def _closes(self, byte: int) -> Literal["value", "parent", "outer"] | None:
        """Tell what a bracket ends: a value at the top, the container of the values, one around that, or none."""
        if self._num_beyond:
            self._num_beyond -= 1
            return None
        place = self._closers.rfind(byte, self._level)
        if place >= 0:
            del self._closers[place:]
            return None if self._closers else "value"
        if self._closers[-1:] != bytes([byte]) or not self._level:
            return None
        self._closers.pop()
        return "parent" if len(self._closers) == self._level - 1 else "outer"

    def _member(self) -> Iterator[Member]:
        if self._held.num_bytes:
            self._num_yielded += 1
            yield Member(*self._held.take(), self._key, max(self._parent, 0))
        self._key = b""

    def finish(self, name: str) -> Iterator[Member]:
        if not self._level:
            yield from self._member()
        elif self._closers:
            raise UserError(
                f"`{name}` ends before its brackets are closed",
                where=f"in row {self._num_yielded + 1}",
                fix="it may be cut short: fetch it again, or close them",
            )
        elif self._held.num_bytes:
            raise _more_behind(name)


def _more_behind(name: str) -> UserError:
    return UserError(
        f"`{name}` goes on behind the end of its list",
        fix="put all rows into one list, or one on each line of a `.jsonl`",
    )
