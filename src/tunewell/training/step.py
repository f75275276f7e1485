"""One optimizer step: forward and backward over its micro-batches, then one update of the trainable parameters.

documents of the step -> micro-batches -> loss and backward of each -> all-reduce -> clip, guard, update

Its time is divided into phases, and so is the time between steps:

data -> forward -> backward -> reduce -> optimizer -> wait -> log        then, when due: evaluate, answers, save

On CUDA these are seconds of the host, which launches kernels and runs ahead. The time of the GPU is then in `wait`.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tunewell.config.schema import Recompute, Train
from tunewell.data.batches import MicroBatch, Step, TokenizedDocuments
from tunewell.data.corpus.reader import Corpus
from tunewell.machine.out_of_memory import OutOfMemory, is_out_of_memory
from tunewell.methods.base import trainable_parameters
from tunewell.models.attention import SDPA
from tunewell.models.loss import LEAN_ROWS
from tunewell.models.packed_forward import PackedModel
from tunewell.training.distributed import World
from tunewell.training.optimizers.base import Scaler, build_optimizer


@dataclass(frozen=True)
class StepResult:
    """The metrics of a step, which are being copied from the device."""

    values: Tensor
    """Mean loss, gradient norm, 1 if the update was skipped, loss scale."""
    arrived: Any
    """A CUDA event to wait for; None on other devices."""

    def read(self) -> tuple[float, float, bool, float]:
        """Wait for the metrics and return them."""
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, norm, skipped, scale = self.values.tolist()
        return loss, norm, bool(skipped), scale


@dataclass(frozen=True)
class StepRecord:
    """A finished step. Its metrics may still be on the device."""

    step: Step
    groups: Sequence[np.ndarray]
    """The documents of each micro-batch."""
    result: StepResult
    rate: float
    norm_limit: float
    tokens: int
    supervised_tokens: int


class StepHooks:
    """Hooks around the parts of a step and an evaluation. They do nothing by default; `faults.py` overrides them."""

    def around_batch(self, number: int, batch: MicroBatch, model: nn.Module) -> AbstractContextManager[None]:
        """Wrap the forward and backward pass of one micro-batch of step `number`."""
        return nullcontext()

    def around_update(self, number: int, gradients: dict[str, Tensor]) -> AbstractContextManager[None]:
        """Wrap the allocation of optimizer state, when all gradients are present."""
        return nullcontext()

    def before_evaluation(self, batch: MicroBatch) -> None:
        """Run before the loss of a held-out batch is computed."""

    def before_answers(self, num_prompts: int) -> None:
        """Run before held-out questions are answered."""

    def documents(self, corpus: Corpus) -> TokenizedDocuments:
        """Return the training documents of a corpus."""
        return corpus


PROCESSOR = "processor"
"""The phase in which other programs use the processor."""
_DIGITS = 6


class PhaseClock:
    """Adds up the seconds of each phase. A nested phase interrupts the outer one, so each second belongs to one phase.

    Entering and leaving a phase takes a few microseconds.
    """

    def __init__(self) -> None:
        self.total: dict[str, float] = {}
        """Seconds of each phase since the clock was made."""
        self.waited: Callable[[], float] | None = None
        """Returns how long other programs kept this thread from the processor. If it is set, that is a phase too."""
        self._waited = 0.0
        self._active: list[str] = []
        self._at = time.perf_counter()
        self._taken: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of a `with` block as a phase."""
        self._switch()
        self._active.append(name)
        try:
            yield
        finally:
            self._switch()
            self._active.pop()

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call. `other` is the time outside of all phases."""
        self._switch()
        since = {name: seconds - self._taken.get(name, 0.0) for name, seconds in self.total.items()}
        self._taken = dict(self.total)
        return {name: kept for name, seconds in since.items() if (kept := round(seconds, _DIGITS)) > 0}

    def start(self) -> None:
        """Start from here: the time since the last phase belongs to none."""
        self._at = time.perf_counter()
        self._waited = self.waited() if self.waited else 0.0

    def _switch(self) -> None:
        now = time.perf_counter()
        name = self._active[-1] if self._active else "other"
        seconds, self._at = now - self._at, now
        if self.waited is not None:
            total = self.waited()
            waited, self._waited = min(total - self._waited, seconds), total
            self.total[PROCESSOR] = self.total.get(PROCESSOR, 0.0) + waited
            seconds -= waited
        self.total[name] = self.total.get(name, 0.0) + seconds


@dataclass
class TrainableModel(PackedModel):
    """A packed model with its optimizer, loss scaler and distributed world."""

    settings: Train = field(default_factory=Train)
    seed: int = 0
    world: World = field(default_factory=World)
    hooks: StepHooks = field(default_factory=StepHooks)
    phases: PhaseClock = field(default_factory=PhaseClock)
    check_interrupt: Callable[[], None] = lambda: None
    """Called between the batches of an evaluation; raises Interrupted to end it."""

    num_done: int = 0
    """Number of tokens in the finished micro-batches of this rank."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parameters: dict[str, nn.Parameter] = trainable_parameters(self.model)
        self.optimizer = build_optimizer(self.parameters, self.settings)
        self.scaler = Scaler.make(self.precision, self.device)

    def take_step(
        self, batches: Sequence[MicroBatch], *, number: int, rate: float, norm_limit: float = math.inf
    ) -> StepResult:
        """Take one optimizer step. The loss is the mean over all supervised tokens, independent of micro-batch size.

        The update is skipped if the loss or a gradient is not finite or the gradient norm exceeds `norm_limit`. Raises
        OutOfMemory on all ranks if one of them runs out of memory; the weights are then unchanged.
        """
        num_supervised = max(1, sum(len(batch.rows) for batch in batches))
        self.optimizer.start(number)
        with self.sharing_out_of_memory():
            loss_sum = self.accumulate_gradients(batches, number=number, num_supervised=num_supervised)
        with self.sharing_out_of_memory():
            with self.phases("reduce"):
                if self.world.size > 1:
                    self.world.all_reduce([loss_sum, *self.optimizer.gradients(is_complete=True).values()])
            with self.hooks.around_update(number, self.optimizer.gradients()), self.phases("optimizer"):
                self.optimizer.prepare()
        self.heartbeat()
        with self.phases("optimizer"):
            done = self.optimizer.update(
                rate=rate,
                max_norm=self.settings.max_grad_norm,
                loss=loss_sum,
                scaler=self.scaler,
                norm_limit=norm_limit,
            )
        self.heartbeat()
        values = torch.stack([loss_sum / num_supervised, done.grad_norm, done.was_skipped, self.scaler.scale])
        return self._copy_to_host(values)

    def accumulate_gradients(self, batches: Sequence[MicroBatch], *, number: int, num_supervised: int) -> Tensor:
        """Run the forward and backward pass of this rank's micro-batches, and return the sum of their losses."""
        if not self.model.training:
            self.model.train()
        loss_sum = torch.zeros((), device=self.device)
        mine = list(enumerate(batches))[self.world.rank :: self.world.size]
        for turn, (index, batch) in enumerate(mine):
            if turn == 1 and self.uses_graphs:
                self._copy_gradients()
            with self.hooks.around_batch(number, batch, self.model), self.stance(batch):
                with self.phases("forward"):
                    loss = self.compute(batch, number=number, index=index)
                with self.phases("backward"):
                    (loss * (self.scaler.scale * (1.0 / num_supervised))).backward()
            loss_sum += loss.detach()
            self.num_done += len(batch.input_ids)
        return loss_sum

    def compute(self, batch: MicroBatch, *, number: int, index: int) -> Tensor:
        """Return the loss sum of micro-batch `index` of step `number`. Its dropout mask depends only on these two."""
        if self.has_dropout:
            torch.manual_seed(_seed_of(self.seed, number, index))
        return self.loss_sum(batch)

    def _copy_gradients(self) -> None:
        """Copy the gradients out of CUDA graph memory, which the next replay overwrites."""
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def drop_gradients(self) -> None:
        """Clear the gradients accumulated since the last update."""
        self.optimizer.zero_grad()

    def recompute(self, mode: Recompute) -> None:
        """Switch gradient checkpointing (activation recomputation) on or off, or on with inputs in main memory."""
        self.loss_rows = LEAN_ROWS if mode == "offload" else None
        if mode == "offload":
            from tunewell.training.offload import Offloader

            Offloader.enable(self.model, self.device)
        elif mode == "on":
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.model.gradient_checkpointing_disable()

    def change(self, *, precision: str | None = None, device: str | None = None) -> None:
        """Switch to fp32 or to another device, with the same weights and optimizer state."""
        self.uncompile()
        self.may_compile = False
        model: Any = self.model
        if precision is not None:
            assert precision == "fp32"
            self.precision = precision
            model.float()
            if self.is_flash:
                model.set_attn_implementation(SDPA)
        if device is not None:
            model.to(device)
            self.optimizer.move(device)
        super().__post_init__()
        self.scaler = Scaler.make(self.precision, self.device)

    @contextmanager
    def sharing_out_of_memory(self) -> Iterator[None]:
        """Raise OutOfMemory on every rank if one runs out of memory inside, so that the others do not wait for it."""
        message = None
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            message = str(error).splitlines()[0]
        if self.world.any(message is not None):
            self.drop_gradients()
            raise OutOfMemory(message or "in another process") from None

    def _copy_to_host(self, values: Tensor) -> StepResult:
        """Start copying the metrics to the host without waiting for them."""
        if self.device.type != "cuda":
            return StepResult(values.cpu(), None)
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return StepResult(host, arrived)


def _seed_of(seed: int, step: int, index: int) -> int:
    """Return the random seed of a micro-batch. It does not depend on earlier random numbers."""
    mixed = np.random.SeedSequence([seed, step, index]).generate_state(2)
    return int(mixed[0]) | (int(mixed[1]) & 0x7FFFFFFF) << 32
