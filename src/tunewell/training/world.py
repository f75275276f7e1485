"""The processes that train together: one, or as many as `torchrun` started."""

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process's place among those that train together."""

    rank: int = 0
    size: int = 1
    hosts: Any = None
    """A way to talk that does not wait for a GPU's queue, where the processes have GPUs."""

    @property
    def is_first(self) -> bool:
        """Whether this process writes what the run leaves behind."""
        return self.rank == 0

    @staticmethod
    def take_place() -> None:
        """Take the GPU that a launcher has meant for this process, before anyone asks which one is there."""
        if "LOCAL_RANK" in os.environ and torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    @classmethod
    def join(cls, device: torch.device) -> "World":
        """Join the others where a launcher has set `RANK` and `WORLD_SIZE`; else be alone."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size <= 1:
            return cls()
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        hosts = dist.new_group(backend="gloo") if dist.get_backend() == "nccl" else None
        return cls(dist.get_rank(), dist.get_world_size(), hosts)

    def leave(self) -> None:
        """Part from the others once all are here and all went well.

        Threads that talk to them would else still run when this process ends, and now and then abort it. Not where
        something went wrong: one that waits for an exchange that never ends would wait for ever.
        """
        if self.size > 1:
            self.wait()
            atexit.register(_part)

    def wait(self) -> None:
        """Go on when all others are here too."""
        if self.size > 1:
            dist.barrier(group=self.hosts)

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
        if self.size == 1:
            return flag
        told = torch.tensor(float(flag))
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.hosts)
        return bool(told.item())

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
