"""Limits of one template rendering: processor time, memory, size of each value and recursion depth."""

# pyright: basic
# A template can make values of any type.

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import NoneType
from typing import Any, TypeGuard

from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

CHECK_EVERY_BYTES = 16_384
"""The clock is read after this many charged bytes. A short conversation charges less."""
MAX_NESTING = 200
"""Maximum nesting of containers. Hashing nested tuples recurses in C without a depth check."""

_SCALARS = frozenset((str, int, float, bool, NoneType))
_LISTS = (list, tuple, *map(type, ({}.keys(), {}.values(), {}.items())))


class TemplateFailed(Exception):
    """Raised if a template rejects its input or cannot be rendered; `reason` describes the cause."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class TemplateLimit(TemplateFailed):
    """Raised if a template exceeds its time, memory, size or recursion limit."""


class Budget:
    """The resource limits of one rendering. Exceeding a limit stops the rendering.

    - A text, or a container written out in full, has at most `max_chars` characters.
    - All values that a rendering creates take at most about 36 MB, plus nine bytes per character of `max_chars`.
    - The processor time of this thread is limited. Waiting on a busy machine does not count.
    """

    def start(self, *, max_chars: int, max_seconds: float) -> None:
        """Begin a rendering."""
        self.max_chars, self.max_seconds, self.depth = max_chars, max_seconds, 0
        self._bytes_left = int((36_000_000 + 9 * max_chars) * max(1.0, max_seconds))
        self._next_check = self._bytes_left - CHECK_EVERY_BYTES
        self._deadline = 0.0

    def charge(self, num_bytes: int, value: Any = None) -> Any:
        """Charge bytes to the budget and return `value`. Slow operations charge in proportion to their time."""
        self._bytes_left -= num_bytes
        if self._bytes_left < self._next_check:
            self._check_limits()
        return value

    def add_texts(self, left: str, right: str) -> str:
        """Return `left + right`, and charge it. Templates do this most often, so it is one call."""
        num_chars = len(left) + len(right)
        if num_chars > self.max_chars:
            self.require_chars(num_chars)
        self._bytes_left -= 64 + 4 * num_chars
        if self._bytes_left < self._next_check:
            self._check_limits()
        return left + right

    def _check_limits(self) -> None:
        if self._bytes_left < 0:
            raise TemplateLimit("the template creates too many values and exceeds the memory limit of a rendering")
        now = time.thread_time()
        self._deadline = self._deadline or now + self.max_seconds
        if now > self._deadline:
            raise TemplateLimit(f"the template runs for more than {self.max_seconds:g} s")
        self._next_check = self._bytes_left - CHECK_EVERY_BYTES

    def require_chars(self, num_chars: int) -> None:
        """Raise TemplateLimit for a value of more than `max_chars` characters."""
        if num_chars > self.max_chars:
            raise TemplateLimit(f"the template creates a value of more than {self.max_chars:,} characters")

    def measure(self, value: Any) -> int:
        """Return the number of characters of a value written out in full; shared parts count each time they appear."""
        # After thirty times `x = [x, x]`, x has thirty small lists, but a billion characters to print, compare or hash.
        num_chars, level = 0, [value]
        for _ in range(MAX_NESTING):
            below: list[Any] = []
            for item in level:
                if isinstance(item, str):
                    num_chars += len(item) + 2
                elif isinstance(item, dict):
                    num_chars += 4 * len(item) + 2
                    self.require_chars(num_chars)
                    below.extend(item)
                    below.extend(item.values())
                elif isinstance(item, _LISTS):
                    num_chars += 2 * len(item) + 2
                    self.require_chars(num_chars)
                    below.extend(item)
                elif isinstance(item, TemplateNamespace):
                    num_chars += 16
                    below.append(item._Namespace__attrs)
                else:
                    num_chars += 2 + item.bit_length() // 3 if isinstance(item, int) else 16
            self.require_chars(num_chars)
            if not below:
                return self.charge(16 + (num_chars >> 2), num_chars)
            level = below
        raise TemplateLimit(f"the template nests values more than {MAX_NESTING} levels deep")

    def admit(self, value: Any) -> Any:
        """Check that a value is small enough to print, compare, hash or pass on; iterators are checked lazily."""
        if type(value) not in _SCALARS:
            if is_iterator(value):
                return (self.charge(64 + sys.getsizeof(item), self.admit(item)) for item in value)
            self.measure(value)
        return value

    def admit_items(self, value: Any) -> Any:
        """Check that a value is small enough to iterate over; text and ranges create an object for each item."""
        if isinstance(value, str | range):
            self.charge(80 * len(value))
        return self.admit(value)

    def admit_container(self, value: Any) -> Any:
        """Check that a value is small enough for `x in value`; a dict costs the same at any size."""
        self.charge(16 if type(value) is dict or not hasattr(value, "__len__") else 16 + len(value))
        return value if type(value) is dict else self.admit(value)

    def created(self, value: Any, item_bytes: int = 0) -> Any:
        """Charge a new value and return it; an iterator is wrapped so that it charges each item."""
        if isinstance(value, str):
            self.require_chars(len(value))
        elif type(value) is list:
            self.charge(item_bytes * len(value))
        elif type(value) not in _SCALARS and is_iterator(value):
            return self.charge(1_024, (self.charge(64 + sys.getsizeof(item), item) for item in value))
        return self.charge(64 + sys.getsizeof(value), value)


def is_iterator(value: object) -> TypeGuard[Iterator[Any]]:
    """Return True for an iterator of a template, but not for its `loop` variable."""
    kind = type(value)
    return isinstance(value, Iterator) and kind is not LoopContext


class TemplateNamespace(Namespace):
    """The global `namespace`. It rejects names that start with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # without `self`, so that `namespace(self=...)` works
        Namespace.__init__(args[0])
        for name, value in dict(*args[1:], **kwargs).items():
            args[0][name] = value

    def __setitem__(self, name: Any, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):  # `namespace({1: 2})` has names that are not text
            raise SecurityError(f"a namespace cannot contain {name!r}: names must not start with an underscore")
        super().__setitem__(name, value)
