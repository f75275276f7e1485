"""How much one rendering may do: a budget that every costly step of a template draws from.

A template is other people's code. It cannot be interrupted inside C code (a signal needs the main thread), so the
sandbox asks *before* each step that could be large: how large will it be, and is there room? Three limits hold:

    size     no text, and no container written out in full, is larger than `limit` characters
    budget   all steps together, in about bytes made or touched; also counts loop rounds, so memory stays bounded
    clock    processor seconds of this thread, read every `CHECK_EVERY` bytes of budget, so a busy machine takes
             nothing from a template and ordinary templates never read the clock at all
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from types import NoneType
from typing import Any

from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

CHECK_EVERY = 65_536
MAX_NESTING = 200
"""Containers inside containers: hashing nested tuples recurses in C without a check of its own."""
MAX_CALLS_DEEP = 64
"""Macros inside macros: about six Python frames each, well inside Python's 1,000."""
MAX_INT_BITS = 16_384
"""Above Python's own 4,300 digits nothing can be printed, and arithmetic starts to cost."""
SMALL = 4_096

_NUMBERS = frozenset((int, float, bool, NoneType))
SCALARS = frozenset((str, int, float, bool, NoneType))
_CONTAINERS = (list, tuple, dict)  # unions of types are slower to test against, and this is the hot path
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
_LISTS = (list, tuple, *_VIEWS)


def text_bytes(text: str) -> int:
    """Say how many bytes a text takes, never too few."""
    return sys.getsizeof(text) if len(text) > 256 else 4 * len(text)


def is_iterator(value: Any) -> bool:
    """Say whether a value gives its items once, as generators do; a `loop` is not meant."""
    kind = type(value)
    return kind is not LoopContext and hasattr(kind, "__next__") and hasattr(kind, "__iter__")


class TemplateFailed(Exception):
    """A template that refused its input or cannot be rendered; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class TemplateLimit(TemplateFailed):
    """A template that asked for more time, memory or depth than a rendering gets."""


class Meter:
    """Count what one rendering uses and stop it at its limits; one per thread and template."""

    __slots__ = ("_deadline", "_next_check", "budget", "calls_deep", "emitted", "limit", "seconds", "spans", "spent")

    def __init__(self) -> None:
        self.begin(limit=4_000_000, seconds=1.0)

    def begin(self, *, limit: int, seconds: float) -> None:
        """Start a rendering with everything unspent."""
        self.limit = limit
        self.seconds = seconds
        self.budget = int((36_000_000 + 9 * limit) * max(1.0, seconds))
        self.spent = 0
        self._next_check = CHECK_EVERY
        self._deadline = 0.0
        self.calls_deep = 0
        self.spans: list[tuple[int, int]] | None = None
        self.emitted = 0

    def spend(self, amount: int) -> None:
        """Draw from the budget, and look at the clock now and then."""
        self.spent += amount
        if self.spent > self._next_check:
            self._check()

    def _check(self) -> None:
        if self.spent > self.budget:
            raise TemplateLimit(f"the template made or touched more than {self.budget // 1_000_000:,} MB")
        now = time.thread_time()
        if not self._deadline:
            self._deadline = now + self.seconds
        elif now > self._deadline:
            raise TemplateLimit(f"the template ran for more than {self.seconds:g} s")
        self._next_check = self.spent + CHECK_EVERY

    def room(self, num_chars: int) -> None:
        """Refuse a text or container that would be too large, before it is made."""
        if num_chars > self.limit:
            raise TemplateLimit(f"the template asked for more than {self.limit:,} characters at once")

    def keep(self, made: Any) -> Any:
        """Account for a value that was just made, and give it back (iterators give their items against payment)."""
        kind = type(made)
        if kind in _NUMBERS:
            self.spend(64)
        elif isinstance(made, str):
            size = len(made)
            if size > self.limit:
                self.room(size)
            self.spend(64 + text_bytes(made))
        elif isinstance(made, _CONTAINERS):
            self.spend(64 + (96 if kind is dict else 8) * len(made))
        elif is_iterator(made):
            self.spend(1_024)
            return self._paid(made)
        else:
            self.spend(512)
        return made

    def _paid(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.spend(16 + 8 * len(item) if type(item) is list else 16)
            yield item

    def weigh(self, value: Any) -> int:
        """Count the characters a value would need if written out in full, shared parts as often as they appear.

        `x = [x, x]` thirty times over is thirty small lists, and a billion characters once printed, compared or
        hashed; all three happen in C and cannot be stopped half-way.
        """
        total = 0
        level = [value]
        for _ in range(MAX_NESTING):
            below: list[Any] = []
            for item in level:
                kind = type(item)
                if kind is str:
                    total += len(item) + 2
                elif kind is dict:
                    total += 4 * len(item) + 2
                    if total > self.limit:
                        self.room(total)
                    below.extend(item)
                    below.extend(item.values())
                elif kind is list or kind is tuple:
                    total += 2 * len(item) + 2
                    if total > self.limit:
                        self.room(total)
                    below.extend(item)
                else:
                    total += self._weigh_other(item, below)
            if total > self.limit:
                self.room(total)
            if not below:
                self.spend(total >> 2)
                return total
            level = below
        raise TemplateLimit(f"the template nests values deeper than {MAX_NESTING}")

    def _weigh_other(self, item: Any, below: list[Any]) -> int:
        if isinstance(item, str):
            return len(item) + 2
        if isinstance(item, int):
            return 2 + int.bit_length(item) // 3
        if isinstance(item, _LISTS):
            self.room(len(item))
            below.extend(item)
            return 2 * len(item) + 2
        if isinstance(item, Namespace):
            below.append(item._Namespace__attrs)  # pyright: ignore[reportAttributeAccessIssue]
        return 16

    def flat(self, value: Any) -> Any:
        """Let a value into a step that compares, hashes or walks it, if it is not too large for that."""
        kind = type(value)
        if kind in SCALARS:
            if kind is str and len(value) > SMALL:
                self.spend(len(value) >> 5)
            return value
        if is_iterator(value):
            return (self.flat(item) for item in self._paid(value))
        if kind is LoopContext:
            raise TemplateFailed("`loop` is not a value to compare or filter")
        self.weigh(value)
        return value

    def within(self, value: Any) -> Any:
        """Let any value be looked for in this one by `in`: a long text costs its length."""
        return self.searched(value) if type(value) is str else self.flat(value)

    def searched(self, value: Any) -> Any:
        """Let a constant be looked for in a value by `in`: comparing with its items costs next to nothing."""
        kind = type(value)
        if kind is str or kind is list or kind is tuple or kind is range:
            if len(value) > 256:
                self.spend(len(value))
        elif kind is not dict:
            return self.flat(value)
        return value

    def printable(self, value: Any) -> Any:
        """Let a value be turned into text, if it is not too large for that."""
        kind = type(value)
        if kind is str:
            return value
        self.spend(64)
        if kind not in SCALARS and kind is not LoopContext and not is_iterator(value):
            self.weigh(value)
        return value

    def gather(self, value: Any) -> Any:
        """Turn an iterator into a list, paying for each item; other values stay as they are."""
        return list(self._paid(value)) if is_iterator(value) else value

    def number(self, value: Any) -> Any:
        """Refuse an integer that arithmetic would choke on."""
        if isinstance(value, int) and int.bit_length(value) > MAX_INT_BITS:
            raise TemplateLimit(f"the template computes with integers of more than {MAX_INT_BITS:,} bits")
        return value
