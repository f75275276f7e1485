"""The processes that train together: one, or as many as `torchrun` started."""

import atexit
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tunewell.core.errors import SharedError, UserError
from tunewell.core.units import count

T = TypeVar("T")

_PATIENCE = timedelta(hours=12)
"""How long processes wait for each other: the first may prepare a large corpus. One that is gone is noticed at once."""


@dataclass(frozen=True)
class World:
    """This process's place among those that train together."""

    rank: int = 0
    size: int = 1
    hosts: Any = None
    """A way to talk that is patient, and does not wait for a GPU's queue."""

    @property
    def is_first(self) -> bool:
        """Whether this process writes what the run leaves behind."""
        return self.rank == 0

    @staticmethod
    def take_place(wanted: str) -> None:
        """Take the GPU that a launcher has meant for this process, before anyone asks which one is there.

        `wanted` is the device of the config. Raises UserError where there are more processes than GPUs.
        """
        is_cuda = wanted == "auto" or wanted.startswith("cuda")
        if "LOCAL_RANK" not in os.environ or not is_cuda or not torch.cuda.is_available():
            return
        place, num_gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if num_gpus == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
            place = 0  # the launcher shows each process its own alone
        elif (num_here := max(place + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))) > num_gpus:
            raise UserError(
                f"{num_here} processes were started on this machine, which has {count(num_gpus, 'GPU')}",
                fix=f"start one for each: `torchrun --nproc-per-node {num_gpus} -m tunewell train`",
            )
        torch.cuda.set_device(place)

    @classmethod
    def join(cls, device: torch.device) -> "World":
        """Join the others where a launcher has set `RANK` and `WORLD_SIZE`; else be alone.

        Raises UserError where they do not find each other.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size <= 1:
            return cls()
        try:
            if not dist.is_initialized():
                dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
            hosts = dist.new_group(backend="gloo", timeout=_PATIENCE)
        except (dist.DistError, ValueError, RuntimeError) as error:
            raise UserError(
                f"the {size} processes that are to train together have not found each other: {_story(error)}",
                fix="start all of them, each with its `RANK` and with the same `WORLD_SIZE`, `MASTER_ADDR` and a free "
                "`MASTER_PORT`, as `torchrun` does; where one has said more, that is the reason",
            ) from error
        return cls(dist.get_rank(), dist.get_world_size(), hosts)

    def leave(self) -> None:
        """Part from the others once all are here and all went well.

        Threads that talk to them would else still run when this process ends, and now and then abort it. Not where
        something went wrong: one that waits for an exchange that never ends would wait for ever.
        """
        if self.size > 1:
            try:
                self.wait()
            except RuntimeError:
                return  # one is gone, but what was to be done is done
            atexit.register(_part)

    def wait(self) -> None:
        """Go on when all others are here too."""
        if self.size > 1:
            dist.barrier(group=self.hosts)

    def as_one(self) -> "_AsOne":
        """Fail in every process where something inside fails in one; inside nobody may wait for another."""
        return _AsOne(self)

    def explaining_loss(self, fix: str) -> "_ExplainingLoss":
        """Raise UserError with this fix where something inside fails because another process has ended."""
        return _ExplainingLoss(self, fix)

    def name_of(self, rank: int) -> str:
        """Name one of the processes as people count."""
        return f"process {rank + 1} of {self.size}"

    def share(self, parts: Sequence[T]) -> list[T]:
        """Take this process's share; together the shares are everything, each part once."""
        return list(parts[self.rank :: self.size])

    def add_up(self, tensors: list[Tensor]) -> None:
        """Replace tensors by their sums over all processes, in one exchange."""
        if self.size == 1 or not tensors:
            return
        wide = torch.float64 if all(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
        flat = torch.cat([tensor.reshape(-1).to(wide) for tensor in tensors])
        dist.all_reduce(flat)
        at = 0
        for tensor in tensors:
            tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
            at += tensor.numel()

    def any(self, flag: bool) -> bool:
        """Whether any process says so; all get the same answer."""
        return bool(self.most(int(flag)))

    def most(self, number: int) -> int:
        """Give the greatest number that any process has; all get the same answer."""
        if self.size == 1:
            return number
        told = torch.tensor(number)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.hosts)
        return int(told.item())

    def from_first(self, value: T) -> T:
        """Give what the first process has, whatever this one has."""
        if self.size == 1:
            return value
        told = [value]
        dist.broadcast_object_list(told, src=0, group=self.hosts)
        return told[0]


def _part() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class _AsOne:
    def __init__(self, world: World) -> None:
        self._world = world

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        world = self._world
        if world.size == 1 or not (error is None or isinstance(error, Exception)):
            return
        troubles: list[tuple[str, str | None, str | None, bool] | None] = [None] * world.size
        dist.all_gather_object(troubles, _in_words(error), group=world.hosts)
        first = next((rank for rank, trouble in enumerate(troubles) if trouble), None)
        if first is None or not (error is None or isinstance(error, UserError)):
            return
        what, where, fix, is_bug = troubles[first] or ("", None, None, True)
        # What the first refuses is wrong with the run, and with all.
        who = "" if first == 0 and not is_bug else f"{world.name_of(first)}: "
        raise SharedError(f"{who}{what}", where=where, fix=fix) from error


def _in_words(error: BaseException | None) -> tuple[str, str | None, str | None, bool] | None:
    if error is None:
        return None
    if isinstance(error, UserError):
        return error.what, error.where, error.fix, False
    return f"{type(error).__name__}: {error}".partition("\n")[0], None, "look at what that process has printed", True


def _story(error: BaseException) -> str:
    """Tell torch's error in short: without where in its source it arose, and without its advice."""
    return re.sub(r"^\[\S+\] ", "", str(error)).partition("\n")[0].partition(". ")[0]


class _ExplainingLoss:
    def __init__(self, world: World, fix: str) -> None:
        self._world, self._fix = world, fix

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        is_gloos = isinstance(error, RuntimeError) and re.match(r"\[\S*gloo/", str(error)) is not None
        if self._world.size > 1 and error is not None and (is_gloos or isinstance(error, dist.DistNetworkError)):
            raise UserError(
                f"{self._world.name_of(self._world.rank)} has lost the others: {_story(error)}",
                fix=f"what the one that ended first has printed is the reason; then {self._fix}",
            ) from error
