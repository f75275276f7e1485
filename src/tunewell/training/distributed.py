"""Distributed training (torchrun): rank and world size, all-reduce, and errors that stop all ranks together."""

import atexit
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from tunewell.core.errors import SharedError, UserError
from tunewell.core.launcher import num_restarts, world_size
from tunewell.core.units import count

T = TypeVar("T")

_TIMEOUT = timedelta(hours=12)
"""How long ranks wait for each other: rank 0 may prepare a large corpus. A lost rank is detected at once."""


@dataclass(frozen=True)
class World:
    """The rank of this process and the world size of a distributed run."""

    rank: int = 0
    size: int = 1
    host_group: Any = None
    """A gloo process group with a long timeout; its operations do not wait for queued GPU work."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the run folder."""
        return self.rank == 0

    @staticmethod
    def select_gpu(device: str) -> None:
        """Select this process's GPU by `LOCAL_RANK`. Raise UserError if there are more processes than GPUs."""
        is_cuda = device == "auto" or device.startswith("cuda")
        if "LOCAL_RANK" not in os.environ or not is_cuda or not torch.cuda.is_available():
            return
        local_rank, num_gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if num_gpus == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
            local_rank = 0  # the launcher makes one GPU visible to each process
        elif (num_here := max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))) > num_gpus:
            raise UserError(
                f"{num_here} processes were started on this host, which has {count(num_gpus, 'GPU')}",
                fix=f"start one per GPU: `torchrun --nproc-per-node {num_gpus} -m tunewell train`",
            )
        torch.cuda.set_device(local_rank)

    @classmethod
    def initialise(cls, device: torch.device) -> "World":
        """Connect to the other ranks if a launcher set `RANK` and `WORLD_SIZE`; otherwise return a world of size 1."""
        size = world_size()
        if size <= 1:
            return cls()
        try:
            if not dist.is_initialized():
                backend = "nccl" if device.type == "cuda" else "gloo"
                # torchrun keeps its store when it restarts the processes: it still has the addresses of the old ones.
                store, rank, size = next(rendezvous("env://"))
                store = PrefixStore(f"restart {num_restarts()}", store)
                dist.init_process_group(backend, store=store, rank=rank, world_size=size)
            host_group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        except (dist.DistError, ValueError, RuntimeError) as error:
            raise UserError(
                f"distributed initialisation failed: {size} processes could not connect: {_short(error)}",
                fix="start every process with its `RANK` and with the same `WORLD_SIZE`, `MASTER_ADDR` and a free "
                "`MASTER_PORT`, as `torchrun` does; see what the other processes printed",
            ) from error
        return cls(dist.get_rank(), dist.get_world_size(), host_group)

    def shut_down(self) -> None:
        """Disconnect from the other ranks after a successful run.

        Otherwise the communication threads are still running at exit and sometimes abort the process. It is not called
        after an error, because a rank waiting for a lost rank would wait forever.
        """
        if self.size > 1:
            try:
                self.barrier()
            except RuntimeError:
                return  # a rank is gone, but the work is done
            atexit.register(_destroy_group)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier(group=self.host_group)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Raise one rank's error on all ranks, so that all stop and it is printed once. No rank may wait inside."""
        try:
            yield
        except Exception as error:
            self._raise_shared(error)
            raise
        self._raise_shared(None)

    def _raise_shared(self, error: Exception | None) -> None:
        """Raise the error of the first failed rank. A rank whose own error is not a UserError raises that one."""
        if self.size == 1:
            return
        errors: list[tuple[str, str | None, str | None, bool] | None] = [None] * self.size
        dist.all_gather_object(errors, _description(error), group=self.host_group)
        first = next((rank for rank, described in enumerate(errors) if described), None)
        if first is None or not (error is None or isinstance(error, UserError)):
            return
        what, where, fix, is_bug = errors[first] or ("", None, None, True)
        # A user error on rank 0 concerns the whole run, not that rank.
        who = "" if first == 0 and not is_bug else f"rank {first} of {self.size}: "
        raise SharedError(f"{who}{what}", where=where, fix=fix) from error

    @contextmanager
    def explaining_lost_ranks(self, fix: str) -> Iterator[None]:
        """Raise UserError with this fix if the block fails because another rank has exited."""
        try:
            yield
        except RuntimeError as error:
            is_lost = isinstance(error, dist.DistNetworkError) or re.match(r"\[\S*gloo/", str(error)) is not None
            if self.size == 1 or not is_lost:
                raise
            raise UserError(
                f"rank {self.rank} of {self.size} lost the connection to the others: {_short(error)}",
                fix=f"see what the rank that ended first printed; then {fix}",
            ) from error

    def all_reduce(self, tensors: list[Tensor]) -> None:
        """Replace tensors in place by their sums over all ranks, in one all-reduce."""
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
        """Return whether the flag is set on any rank. The result is the same on all ranks."""
        return flag if self.size == 1 else bool(self.max(int(flag)))

    def max(self, number: int) -> int:
        """Return the maximum of a number over all ranks."""
        if self.size == 1:
            return number
        largest = torch.tensor(number)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.host_group)
        return int(largest.item())

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.host_group)
        return values[0]


def _destroy_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _description(error: BaseException | None) -> tuple[str, str | None, str | None, bool] | None:
    if error is None:
        return None
    if isinstance(error, UserError):
        return error.what, error.where, error.fix, False
    return f"{type(error).__name__}: {error}".partition("\n")[0], None, "see what that process printed", True


def _short(error: BaseException) -> str:
    """Return the first sentence of torch's message, without its source location."""
    return re.sub(r"^\[\S+\] ", "", str(error)).partition("\n")[0].partition(". ")[0]
