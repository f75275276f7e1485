"""One optimizer step: forward and backward over its micro-batches, one update, and its numbers, read later."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tunewell.config.schema import Train
from tunewell.data.batches import MicroBatch
from tunewell.methods.base import trainable_parameters
from tunewell.models.attention import SDPA
from tunewell.models.packed_forward import PackedModel
from tunewell.training.distributed import World
from tunewell.training.faults import NoFaults
from tunewell.training.memory import OutOfMemory, is_out_of_memory
from tunewell.training.optimizers.base import Scaler, build_optimizer


@dataclass(frozen=True)
class StepResult:
    """The numbers of a step on their way from the device; reading them before they are there waits."""

    values: Tensor
    """Mean loss, gradient norm, whether the update was left out, the scaler's factor."""
    arrived: Any
    """An event to wait for, on CUDA; None elsewhere."""

    def read(self) -> tuple[float, float, bool, float]:
        """Wait for the numbers and give them."""
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, norm, skipped, scale = self.values.tolist()
        return loss, norm, bool(skipped), scale


@dataclass
class TrainableModel(PackedModel):
    """A model that is being taught, with all it takes: optimizer, scaler, the others who train."""

    settings: Train = field(default_factory=Train)
    seed: int = 0
    world: World = field(default_factory=World)
    faults: NoFaults = field(default_factory=NoFaults)
    may_go_on: Callable[[], None] = lambda: None
    """Called between the parts of a look; raises what is to end it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parameters: dict[str, nn.Parameter] = trainable_parameters(self.model)
        self.optimizer = build_optimizer(self.parameters, self.settings)
        self.scaler = Scaler.make(self.precision, self.device)

    def take_step(
        self, batches: Sequence[MicroBatch], *, number: int, rate: float, norm_limit: float = math.inf
    ) -> StepResult:
        """Learn from a step's documents: the loss is its sum over all supervised tokens, however they are cut.

        Where a number is not finite, or the gradient longer than `norm_limit`, nothing is changed. Raises OutOfMemory,
        in all processes that train together, where it did not fit in one of them; nothing is changed then either.
        """
        num_supervised = sum(len(batch.rows) for batch in batches)
        self.faults.before_step(number, self.model)
        with self.fitting_everywhere():
            if not self.model.training:
                self.model.train()
            total = torch.zeros((), device=self.device)
            share = self.faults.loss_factor(number) / max(1, num_supervised)
            for turn, (place, batch) in enumerate(self.world.share(list(enumerate(batches)))):
                if turn == 1 and self.uses_graphs:
                    self._keep_gradients()
                with self.stance(batch):
                    loss = self.compute(batch, number=number, place=place)
                    self.faults.before_backward(number)
                    (loss * (self.scaler.scale * share)).backward()
                total += loss.detach()
        with self.fitting_everywhere():
            self._gather(total)
            self.optimizer.prepare()
            self.faults.before_update(number, self.parameters)
        done = self.optimizer.update(
            rate=rate,
            max_norm=self.settings.max_grad_norm,
            loss=total,
            scaler=self.scaler,
            norm_limit=norm_limit,
        )
        values = torch.stack([total / max(1, num_supervised), done.grad_norm, done.was_skipped, self.scaler.scale])
        return self._send(values)

    def compute(self, batch: MicroBatch, *, number: int, place: int) -> Tensor:
        """Sum the loss of one micro-batch of a step, drawing what that step and place draw."""
        self.faults.before_forward(number, batch)
        if self.has_dropout:
            torch.manual_seed(_mix(self.seed, number, place))
        return self.loss_sum(batch)

    def _keep_gradients(self) -> None:
        """Copy the gradients that graphs gave, before these begin anew and overwrite them; the copies are added to."""
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def drop_gradients(self) -> None:
        """Forget what was learned since the last update."""
        self.optimizer.zero_grad()

    def recompute(self, is_on: bool) -> None:
        """Keep only each layer's input and compute the rest again on the way back, or stop doing so."""
        if is_on:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.model.gradient_checkpointing_disable()

    def change(self, *, precision: str | None, device: str | None) -> None:
        """Go on in fp32, or on another device, with the weights and the optimizer's memory as they are."""
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
    def fitting_everywhere(self) -> Iterator[None]:
        """Raise OutOfMemory in every process where memory was short in one: the others must not wait for it."""
        trouble = None
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            trouble = str(error).splitlines()[0]
        if self.world.any(trouble is not None):
            self.drop_gradients()
            raise OutOfMemory(trouble or "in another process") from None

    def _gather(self, total: Tensor) -> None:
        if self.world.size == 1:
            return
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.world.add_up([total, *(p.grad for p in self.parameters.values() if p.grad is not None)])

    def _send(self, values: Tensor) -> StepResult:
        if self.device.type != "cuda":
            return StepResult(values.cpu(), None)
        here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        here.copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return StepResult(here, arrived)


def _mix(seed: int, step: int, place: int) -> int:
    """Make a seed of three numbers: what a step draws does not depend on what was drawn before it."""
    mixed = np.random.SeedSequence([seed, step, place]).generate_state(2)
    return int(mixed[0]) | (int(mixed[1]) & 0x7FFFFFFF) << 32
