"""Faults on purpose, for tests: out of memory, NaN, spikes, kills and hangs at a chosen place and step.

    oom@forward:tokens=100          every micro-batch of more than 100 tokens does not fit
    oom@backward:step=3             neither does the way back of step 3, the first time
    nan@gradients:step=5,times=2    gradients of steps 5 and 6 are not finite
    nan@weights:step=5,name=NAME    a weight is poisoned before step 5
    nan@document:document=4,name=N  the output of module N is not finite whenever document 4 is read
    scale@loss:step=40,times=3,factor=1000
    kill@step:step=7,marker=FILE    once: the file remembers that it was done; also hang@step, crash@step

Nobody meets this by accident: a run refuses a plan of faults unless they are switched on by name.
"""

import math
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from tunewell.core.errors import UserError
from tunewell.data.batches import MicroBatch

VARIABLE = "TUNEWELL_FAULTS"
SWITCH = "--enable-fault-injection"
_PLACES = {
    "oom": ("forward", "backward", "optimizer", "held_out", "generation"),
    "nan": ("gradients", "weights", "document"),
    "scale": ("loss",),
    "kill": ("step",),
    "hang": ("step",),
    "crash": ("step",),
}


class NoFaults:
    """Nothing happens that was not going to."""

    def before_step(self, step: int, model: nn.Module) -> None:
        """Let it be."""

    def before_forward(self, step: int, batch: MicroBatch) -> None:
        """Let it be."""

    def loss_factor(self, step: int) -> float:
        """Leave the loss as it is."""
        return 1.0

    def before_backward(self, step: int) -> None:
        """Let it be."""

    def before_update(self, step: int, parameters: dict[str, nn.Parameter]) -> None:
        """Let it be."""

    def before_look(self, batch: MicroBatch) -> None:
        """Let it be."""

    def before_answers(self, num_prompts: int) -> None:
        """Let it be."""


@dataclass
class _Fault:
    kind: str
    place: str
    options: dict[str, str]
    left: int
    """How often it still happens."""

    def number(self, name: str, default: float = math.inf) -> float:
        return float(self.options.get(name, default))

    def is_due(self, step: int) -> bool:
        """Whether it happens at this step; one that names no step happens whenever its other conditions hold."""
        if self.left <= 0 or ((marker := self.options.get("marker")) and Path(marker).exists()):
            return False
        return "step" not in self.options or self.number("step") <= step

    def happen(self) -> None:
        """Count it."""
        self.left -= 1
        if marker := self.options.get("marker"):
            Path(marker).touch()


@dataclass
class PlantedFaults(NoFaults):
    """Faults that happen where and when a test said."""

    faults: list[_Fault]
    _reading: frozenset[int] = frozenset()
    _hooked: set[str] = field(default_factory=set)

    def before_step(self, step: int, model: nn.Module) -> None:
        """Poison a weight, or end or stop the process."""
        for fault in self._due("weights", step):
            fault.happen()
            with torch.no_grad():
                dict(model.named_parameters())[fault.options["name"]].view(-1)[0] = math.nan
        for fault in self._of("document"):
            if fault.options["name"] not in self._hooked:
                self._hooked.add(fault.options["name"])
                model.get_submodule(fault.options["name"]).register_forward_hook(self._spoil)
        for fault in self._due("step", step):
            fault.happen()
            _end(fault.kind)

    def before_forward(self, step: int, batch: MicroBatch) -> None:
        """Run out of memory for what is too large, and remember what is being read."""
        self._reading = frozenset(batch.documents)
        for fault in self._due("forward", step):
            if batch.num_tokens > fault.number("tokens", -1):
                fault.happen()
                _run_out(f"reading {batch.num_tokens} tokens")

    def loss_factor(self, step: int) -> float:
        """Make a loss larger than it is."""
        factor = 1.0
        for fault in self._due("loss", step):
            fault.happen()
            factor *= fault.number("factor")
        return factor

    def before_backward(self, step: int) -> None:
        """Run out of memory on the way back."""
        for fault in self._due("backward", step):
            fault.happen()
            _run_out("going back")

    def before_update(self, step: int, parameters: dict[str, nn.Parameter]) -> None:
        """Spoil gradients, or run out of memory for the optimizer."""
        for fault in self._due("gradients", step):
            fault.happen()
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(math.nan)
        for fault in self._due("optimizer", step):
            fault.happen()
            _run_out("making the optimizer's memory")

    def before_look(self, batch: MicroBatch) -> None:
        """Run out of memory for what is too large."""
        for fault in self._due("held_out", 0):
            if batch.num_tokens > fault.number("tokens", -1):
                fault.happen()
                _run_out(f"looking at {batch.num_tokens} held-out tokens")

    def before_answers(self, num_prompts: int) -> None:
        """Run out of memory for too many at once."""
        for fault in self._due("generation", 0):
            if num_prompts > fault.number("prompts", -1):
                fault.happen()
                _run_out(f"answering {num_prompts} at once")

    def _spoil(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        guilty = {int(fault.options["document"]) for fault in self._of("document")}
        return output * math.nan if guilty & self._reading else output

    def _of(self, place: str) -> list[_Fault]:
        return [fault for fault in self.faults if fault.place == place]

    def _due(self, place: str, step: int) -> list[_Fault]:
        return [fault for fault in self._of(place) if fault.is_due(step)]


def parse_faults(spec: str | None, *, is_allowed: bool) -> NoFaults:
    """Read a plan of faults, parted by `;`. Raises UserError unless they are allowed, and for one that is not known."""
    if not spec:
        return NoFaults()
    if not is_allowed:
        raise UserError(
            f"`{VARIABLE}` plans faults for this run, and they are not switched on",
            fix=f"unset `{VARIABLE}`; tests of tunewell itself add `{SWITCH}`",
        )
    return PlantedFaults([_read(part.strip()) for part in spec.split(";") if part.strip()])


def _read(text: str) -> _Fault:
    head, _, rest = text.partition(":")
    kind, _, place = head.partition("@")
    if place not in _PLACES.get(kind, ()):
        known = ", ".join(f"{kind}@{place}" for kind, places in _PLACES.items() for place in places)
        raise UserError(f"`{head}` is no fault", where=VARIABLE, fix=f"known are {known}")
    options = dict(part.split("=", 1) for part in rest.split(",") if "=" in part)
    endless = 1 << 30
    default = endless if "step" not in options or (kind == "scale" and "times" not in options) else 1
    return _Fault(kind, place, options, int(options.get("times", default)))


def _run_out(doing: str) -> NoReturn:
    raise torch.OutOfMemoryError(f"planted: out of memory while {doing}")


def _end(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "crash":
        os.abort()
    while True:
        time.sleep(3600)
