"""One optimizer step: forward and backward over its micro-batches, one update, and its numbers, read later."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tunewell.config.schema import Train
from tunewell.models.adapters import trainable
from tunewell.models.lora import LoraLinear
from tunewell.training.batches import MicroBatch
from tunewell.training.optim import Scaler, make_optimizer, update
from tunewell.training.reading import Reader
from tunewell.training.world import World


@dataclass(frozen=True)
class Numbers:
    """The numbers of a step on their way from the device; reading them before they are there waits."""

    values: Tensor
    """Loss sum, gradient norm, whether the update was left out, the scaler's factor."""
    arrived: Any
    """An event to wait for, on CUDA; None elsewhere."""

    def read(self) -> tuple[float, float, bool, float]:
        """Wait for the numbers and give them."""
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, norm, skipped, scale = self.values.tolist()
        return loss, norm, bool(skipped), scale


@dataclass
class Learner(Reader):
    """A model that is being taught, with all it takes: optimizer, scaler, the others who train."""

    settings: Train = field(default_factory=Train)
    seed: int = 0
    world: World = field(default_factory=World)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parameters: dict[str, nn.Parameter] = trainable(self.model)
        self.optimizer = make_optimizer(self.parameters, self.settings)
        self.scaler = Scaler.make(self.precision, self.device)
        self.is_drawing = _is_drawing(self.model)

    def take_step(self, batches: Sequence[MicroBatch], *, number: int, rate: float) -> Numbers:
        """Learn from a step's documents: the loss is its sum over all supervised tokens, however they are cut."""
        num_supervised = sum(len(batch.rows) for batch in batches)
        if not self.model.training:
            self.model.train()
        total = torch.zeros((), device=self.device)
        for place, batch in self.world.share(list(enumerate(batches))):
            if self.is_drawing:
                torch.manual_seed(_mix(self.seed, number, place))
            loss = self.loss_sum(batch)
            (loss * (self.scaler.scale / max(1, num_supervised))).backward()
            total += loss.detach()
        self._gather(total)
        done = update(self.optimizer, rate=rate, max_norm=self.settings.max_grad_norm, loss=total, scaler=self.scaler)
        values = torch.stack([total / max(1, num_supervised), done.grad_norm, done.found_inf, self.scaler.scale])
        return self._send(values)

    def _gather(self, total: Tensor) -> None:
        if self.world.size == 1:
            return
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.world.add_up([total, *(p.grad for p in self.parameters.values() if p.grad is not None)])

    def _send(self, values: Tensor) -> Numbers:
        if self.device.type != "cuda":
            return Numbers(values.cpu(), None)
        here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        here.copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return Numbers(here, arrived)


def _is_drawing(model: PreTrainedModel) -> bool:
    """Whether anything in the model is drawn at random while it learns."""
    rates = [getattr(model.config, "attention_dropout", 0.0) or 0.0]
    for module in model.modules():
        if isinstance(module, LoraLinear):
            rates.append(module.dropout)
        elif isinstance(module, nn.Dropout):
            rates.append(module.p)
    return any(rates)


def _mix(seed: int, step: int, place: int) -> int:
    """Make a seed of three numbers: what a step draws does not depend on what was drawn before it."""
    mixed = np.random.SeedSequence([seed, step, place]).generate_state(2)
    return int(mixed[0]) | (int(mixed[1]) & 0x7FFFFFFF) << 32
