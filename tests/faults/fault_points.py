"""Every place where a prepare touches the disk, counted, so that each can be made to fail in turn."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

from tunewell.data.corpus.assembly import Assembly
from tunewell.workflows import prepare as workflow
from tunewell.workflows.prepare import load_spec

WRITES = [(os, "mkdir"), (os, "fsync"), (os, "rename"), (os, "replace"), (io, "open"), (pa, "OSFile")]
WRITES += [(Assembly, "_write"), (pa.ipc.RecordBatchStreamWriter, "write_batch")]
REMOVALS = [(os, "unlink"), (os, "rmdir")]


class Killed(BaseException):
    """Stands for a process that ends here: nothing that catches errors catches it."""


@contextmanager
def planned_once() -> Iterator[None]:
    """Let the first prepare load its tokenizer and all later ones use it again, which is most of their time.

    Only for prepares of one config and the same rows.
    """
    specs: list[Any] = []

    def load_once(*arguments: Any) -> Any:
        if not specs:
            specs.append(load_spec(*arguments))
        return specs[0]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(workflow, "load_spec", load_once)
        yield


@contextmanager
def failing(at: int, places: list[tuple[Any, str]], error: Callable[[], BaseException]) -> Iterator[list[int]]:
    """Let the first `at` touches of the disk pass and fail all that follow, as a dead process or a full disk does.

    Gives a list whose length is the number of touches so far.
    """
    touched: list[int] = []

    def guarded(original: Callable[..., Any], only_writing: bool) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            mode = str(options.get("mode", arguments[1] if len(arguments) > 1 else "r"))
            if not only_writing or set(mode) & set("wax+"):
                touched.append(1)
                if len(touched) > at:
                    raise error()
            return original(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patched:
        for owner, name in places:
            patched.setattr(owner, name, guarded(getattr(owner, name), only_writing=name == "open"))
        yield touched
