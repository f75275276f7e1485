"""Sort the kernels of a step by kind: matmul, attention, head, pointwise, optimizer, copy.

A trace of torch's profiler has the operators of the host, nested, and the kernels that each of them launched. Operators
inside our head and attention functions and inside the optimizer's phase belong to these; others are sorted by name.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tunewell.features.profile.ceilings import synchronize
from tunewell.features.profile.records import Kernels
from tunewell.training.step import PhaseClock

PHASE = "phase:"
_STEP_PHASES = ("forward", "backward", "reduce", "optimizer")
_HEAD = "_SupervisedLoss"
_ATTENTION = re.compile(
    r"_CausalProducts|scaled_dot_product|flash|fmha|varlen|attention|^_(forward|backward_(queries|keys))$",
    re.IGNORECASE,
)
"""The last three are the kernels of `models/triton_attention.py`."""
_MATMUL = re.compile(
    r"gemm|nvjet|cutlass|cublas|xmma|wgmma|splitk|matmul|::(add|b|badd)?mm\b|::(addmm|baddbmm|bmm|mm|linear|addmv|mv)\b"
    r"|_linear_pointwise|triton_tem",
    re.IGNORECASE,
)
_COPY = re.compile(r"^(memcpy|memset)", re.IGNORECASE)
_SYNC = re.compile(r"^cuda(Device|Stream|Event)Synchronize|^cudaMemcpy$", re.IGNORECASE)


@dataclass(frozen=True)
class Operation:
    """An operator of the host, or a kernel of a device, with its own time."""

    name: str
    parents: tuple[str, ...]
    """Names of the operators and phases around it, or around the operator that launched it."""
    seconds: float
    """Its own time, without that of nested operators."""
    start: float = 0.0
    is_kernel: bool = False


def kind_of(operation: Operation) -> str:
    """Return the kind of an operator or kernel."""
    around = (*operation.parents, operation.name)
    if PHASE + "optimizer" in operation.parents:
        return "optimizer"
    if any(_HEAD in name for name in around):
        return "head"
    if any(_ATTENTION.search(name) for name in around if not name.startswith(PHASE)):
        return "attention"
    if _COPY.match(operation.name):
        return "copy"
    return "matmul" if _MATMUL.search(operation.name) else "pointwise"


def sum_kinds(operations: Iterable[Operation]) -> dict[str, float]:
    """Return the seconds of each kind. On a CPU, time in no operator of torch's library is `host`."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for operation in operations:
        is_operator = "::" in operation.name and not operation.name.startswith("autograd::")
        is_computing = operation.is_kernel or is_operator
        seconds[kind_of(operation) if is_computing else "host"] += operation.seconds
    return dict(seconds)


def busy_seconds(operations: Iterable[Operation]) -> float:
    """Return how long at least one kernel ran: kernels of different streams may overlap."""
    busy, end = 0.0, float("-inf")
    for operation in sorted(operations, key=lambda operation: operation.start):
        last = operation.start + operation.seconds
        busy += max(0.0, last - max(end, operation.start))
        end = max(end, last)
    return busy


class KernelTrace:
    """A trace of some steps. `start` and `stop` are called between steps."""

    def __init__(self, phases: PhaseClock, device: torch.device) -> None:
        self._phases, self._device = phases, device
        self._profiler: Any = None

    def start(self) -> None:
        """Start the trace, when the device has finished all earlier work."""
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        synchronize(self._device)
        self._profiler = profile(activities=activities, acc_events=True)
        self._profiler.__enter__()
        self._phases.annotate = lambda name: torch.profiler.record_function(PHASE + name)

    def stop(self) -> None:
        """Stop the trace, when the device has finished everything in it."""
        self._phases.annotate = PhaseClock().annotate
        synchronize(self._device)
        self._profiler.__exit__(None, None, None)

    def read(self, num_steps: int, *, wall_seconds: float) -> Kernels:
        """Return the time of the kernels per step."""
        events = self._profiler.events()
        host = [
            Operation(event.name, _parents(event), event.self_cpu_time_total / 1e6)
            for event in events
            if _is_host(event) and not event.is_async
        ]
        if self._device.type == "cuda":
            kernels = list(_kernels(events))
            kinds, busy = sum_kinds(kernels), busy_seconds(kernels)
        else:
            in_step = {PHASE + name for name in _STEP_PHASES}
            kinds = sum_kinds(own for own in host if not in_step.isdisjoint((own.name, *own.parents)))
            busy = sum(value for kind, value in kinds.items() if kind != "host")
        syncs = [own.seconds for own in host if _SYNC.match(own.name)]
        return Kernels(
            seconds={kind: value / num_steps for kind, value in sorted(kinds.items())},
            busy_seconds=busy / num_steps,
            wall_seconds=wall_seconds / num_steps,
            num_syncs=len(syncs) / num_steps,
            sync_seconds=sum(syncs) / num_steps,
        )


def _kernels(events: Iterable[Any]) -> Iterator[Operation]:
    """Yield every kernel once, with the operator that launched it, if the trace has one."""
    launchers: defaultdict[tuple[str, float], list[Any]] = defaultdict(list)
    for event in events:
        for kernel in event.kernels if _is_host(event) else ():
            launchers[kernel.name, round(kernel.duration, 3)].append(event)
    for event in events:
        # A phase that was annotated on the host is shown on the device too, around its kernels.
        if _is_host(event) or event.is_user_annotation or event.name.startswith(PHASE):
            continue
        length = event.time_range.end - event.time_range.start
        found = launchers.get((event.name, round(length, 3)))
        launcher = found.pop(0) if found else None  # kernels of a CUDA graph may have none
        parents = () if launcher is None else (*_parents(launcher), launcher.name)
        yield Operation(event.name, parents, length / 1e6, event.time_range.start / 1e6, is_kernel=True)


def _is_host(event: Any) -> bool:
    return event.device_type.name == "CPU"


def _parents(event: Any) -> tuple[str, ...]:
    names: list[str] = []
    while (event := event.cpu_parent) is not None:
        names.append(event.name)
    return tuple(reversed(names))
