"""Fault injection for tests: out of memory, NaN, spikes, kills and hangs at a chosen step.

    oom@forward:tokens=100          every micro-batch of more than 100 tokens runs out of memory
    oom@backward:step=3             the first backward of step 3 runs out of memory
    nan@gradients:step=5,times=2    gradients of steps 5 and 6 are not finite
    nan@weights:step=5,name=NAME    a weight is set to NaN before step 5
    nan@document:document=4,name=N  the output of module N is NaN whenever document 4 is in the batch
    scale@loss:step=40,times=3,factor=1000      gradients of steps 40 to 42 are multiplied by 1000
    slow@read:seconds=0.01          reading a document takes longer; with folder=F only from a corpus in F
    kill@step:step=7,marker=FILE    the process is killed once; FILE marks that it happened. Also hang@step, crash@step

Fault injection requires `--enable-fault-injection`, so that it cannot be turned on by accident.
"""

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tunewell.core.errors import UserError
from tunewell.data.batches import MicroBatch, TokenizedDocuments
from tunewell.data.corpus.reader import Corpus
from tunewell.training.step import StepHooks

VARIABLE = "TUNEWELL_FAULTS"
SWITCH = "--enable-fault-injection"
_PARTS = {
    "oom": ("forward", "backward", "optimizer", "held_out", "generation"),
    "nan": ("gradients", "weights", "document"),
    "scale": ("loss",),
    "slow": ("read",),
    "kill": ("step",),
    "hang": ("step",),
    "crash": ("step",),
}


_ENDLESS = 1 << 30


@dataclass
class _Fault:
    kind: str
    part: str
    options: dict[str, str]
    left: int

    def number(self, name: str, default: float = math.inf) -> float:
        return float(self.options.get(name, default))

    def happens(self, step: int, size: float) -> bool:
        """Return whether the fault happens now, and count it. Without a `step` option it is due at every step."""
        marker = self.options.get("marker")
        is_large = size > self.number("prompts" if self.part == "generation" else "tokens", -1)
        if self.left <= 0 or self.number("step", 0) > step or not is_large or (marker and Path(marker).exists()):
            return False
        self.left -= 1
        if marker:
            Path(marker).touch()
        return True


@dataclass
class FaultInjector(StepHooks):
    """Hooks that inject the faults of a test."""

    faults: list[_Fault]
    _documents: frozenset[int] = frozenset()
    _hooked: set[str] = field(default_factory=set)

    @contextmanager
    def around_batch(self, number: int, batch: MicroBatch, model: nn.Module) -> Iterator[None]:
        """Set a weight to NaN, end or hang the process, or run out of memory in the forward or backward pass."""
        self._poison(number, model)
        for fault in self._happening("step", number):
            _end(fault.kind)
        self._documents = frozenset(batch.documents)
        self._run_out("forward", number, f"computing {batch.num_tokens} tokens", batch.num_tokens)
        yield
        self._run_out("backward", number, "computing gradients")

    @contextmanager
    def around_update(self, number: int, gradients: dict[str, Tensor]) -> Iterator[None]:
        """Set the gradients to NaN, scale them, or run out of memory while allocating optimizer state."""
        for fault in (*self._happening("gradients", number), *self._happening("loss", number)):
            for gradient in gradients.values():
                gradient.mul_(math.nan if fault.part == "gradients" else fault.number("factor"))
        yield
        self._run_out("optimizer", number, "allocating optimizer state")

    def before_evaluation(self, batch: MicroBatch) -> None:
        """Run out of memory if the batch is larger than the fault's limit."""
        self._run_out("held_out", 0, f"evaluating {batch.num_tokens} held-out tokens", batch.num_tokens)

    def before_answers(self, num_prompts: int) -> None:
        """Run out of memory if there are more prompts than the fault's limit."""
        self._run_out("generation", 0, f"answering {num_prompts} questions at once", num_prompts)

    def documents(self, corpus: Corpus) -> TokenizedDocuments:
        """Return documents that are slow to read, if the corpus is in the folder of a fault."""
        folder = corpus.path.resolve()
        slow = [fault for fault in self._of("read") if folder.is_relative_to(Path(fault.options.get("folder", "/")))]
        return SlowDocuments(corpus, sum(fault.number("seconds") for fault in slow)) if slow else corpus

    def _poison(self, number: int, model: nn.Module) -> None:
        for fault in self._happening("weights", number):
            with torch.no_grad():
                dict(model.named_parameters())[fault.options["name"]].view(-1)[0] = math.nan
        for fault in self._of("document"):
            if fault.options["name"] not in self._hooked:
                self._hooked.add(fault.options["name"])
                model.get_submodule(fault.options["name"]).register_forward_hook(self._spoil)

    def _spoil(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        guilty = {int(fault.options["document"]) for fault in self._of("document")}
        return output * math.nan if guilty & self._documents else output

    def _of(self, part: str) -> list[_Fault]:
        return [fault for fault in self.faults if fault.part == part]

    def _happening(self, part: str, step: int, size: float = math.inf) -> Iterator[_Fault]:
        """Yield and count the faults of a part that are due at this step, for this number of tokens or prompts."""
        yield from (fault for fault in self._of(part) if fault.happens(step, size))

    def _run_out(self, part: str, step: int, doing: str, size: float = math.inf) -> None:
        for _ in self._happening(part, step, size):
            raise torch.OutOfMemoryError(f"injected: out of memory while {doing}")


class SlowDocuments:
    """Documents that take longer to read."""

    def __init__(self, corpus: Corpus, seconds: float) -> None:
        self._corpus, self._seconds = corpus, seconds
        self.index = corpus.index

    def __len__(self) -> int:
        return len(self._corpus)

    def arrays(self, index: int) -> Any:
        """Wait, then return the ids and labels of a document."""
        time.sleep(self._seconds)
        return self._corpus.arrays(index)


def parse_faults(spec: str | None, *, is_allowed: bool) -> StepHooks:
    """Parse faults separated by `;`. Raise UserError if fault injection is off or a fault is unknown."""
    if not spec:
        return StepHooks()
    if not is_allowed:
        raise UserError(
            f"`{VARIABLE}` is set, but fault injection is off",
            fix=f"unset `{VARIABLE}`, or add `{SWITCH}` in a test",
        )
    return FaultInjector([_read(part.strip()) for part in spec.split(";") if part.strip()])


def _read(text: str) -> _Fault:
    head, _, rest = text.partition(":")
    kind, _, part = head.partition("@")
    if part not in _PARTS.get(kind, ()):
        known = ", ".join(f"{kind}@{part}" for kind, parts in _PARTS.items() for part in parts)
        raise UserError(f"unknown fault `{head}`", where=VARIABLE, fix=f"use one of: {known}")
    options = dict(part.split("=", 1) for part in rest.split(",") if "=" in part)
    default = 1 if "step" in options and kind != "scale" else _ENDLESS
    return _Fault(kind, part, options, int(options.get("times", default)))


def _end(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "crash":
        os.abort()
    while True:
        time.sleep(3600)
