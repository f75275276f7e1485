"""The Optimizer interface, and shared parts: gradient guard, fp16 loss scaler, learning-rate schedule.

To add an optimizer, write a subclass of `Optimizer` in this package and add one line to `OPTIMIZERS` in
`config/extensions.py`. `train.optimizer`, `--help` and the docs take its name and description from there.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from tunewell.config.extensions import OPTIMIZERS
from tunewell.config.schema import Train

Schedule = Literal["cosine", "linear", "constant"]
_GROWTH_INTERVAL = 2000
"""Steps without an overflow after which the loss scale is doubled, as in torch's GradScaler."""
_FIRST_SCALE = 2.0**16


class Optimizer(ABC):
    """Updates the weights from their gradients. Constructed from the named parameters and the train settings.

    No method may wait for the GPU: values that depend on a gradient stay tensors on the device.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], settings: Train) -> None:
        self.parameters = parameters

    def start(self, number: int) -> None:  # noqa: B027  most optimizers need no number
        """Called before the gradients of step `number` are computed; again if the step is repeated."""

    def gradients(self, *, is_complete: bool = False) -> dict[str, Tensor]:
        """Return the gradients accumulated since the last update. With several ranks, their sums replace them in place.

        With `is_complete`, parameters without a gradient get one of zeros.
        """
        for parameter in self.parameters.values():
            if is_complete and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return {name: own.grad for name, own in self.parameters.items() if own.grad is not None}

    def prepare(self) -> None:  # noqa: B027  an optimizer may have no state
        """Allocate the state of every parameter that has a gradient and no state yet.

        Called before each update. An out-of-memory error here leaves the weights and the state unchanged.
        """

    @abstractmethod
    def update(
        self, *, rate: float, max_norm: float | None, loss: Tensor, scaler: "Scaler", norm_limit: float = math.inf
    ) -> "Update":
        """Clip the gradients to `max_norm`, update the weights with this learning rate, and clear the gradients.

        The update is skipped if the loss or a gradient is not finite, or the gradient norm exceeds `norm_limit`.
        """

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @abstractmethod
    def state_tensors(self) -> dict[str, Tensor]:
        """Return the state as `PARAMETER/PART` -> tensor, for a checkpoint."""

    @abstractmethod
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Load the state from a checkpoint. An empty dict resets the state."""

    @abstractmethod
    def move(self, device: str) -> None:
        """Move the state to the device that the parameters have moved to."""


def build_optimizer(parameters: dict[str, nn.Parameter], settings: Train) -> Optimizer:
    """Return the optimizer selected by `train.optimizer` for the trainable parameters."""
    return OPTIMIZERS.load(settings.optimizer)(parameters, settings)


@dataclass(frozen=True)
class Update:
    """The result of an update, still on the device."""

    grad_norm: Tensor
    """Before clipping."""
    was_skipped: Tensor
    """1 if the update was skipped, otherwise 0."""


@dataclass
class Scaler:
    """The fp16 loss scaler: the scale is halved on an overflow and doubled after 2,000 steps without one.

    The scale is a tensor on the device, so that no step waits for it. In other precisions it is always 1.
    """

    scale: Tensor
    steps_since: Tensor
    is_on: bool

    @classmethod
    def make(cls, precision: str, device: torch.device) -> "Scaler":
        """Return the initial scaler for a precision."""
        is_on = precision == "fp16"
        first = _FIRST_SCALE if is_on else 1.0
        return cls(torch.full((), first, device=device), torch.zeros((), device=device), is_on)

    def update(self, found_inf: Tensor) -> None:
        """Update the scale after a step. `found_inf` is 1 if the gradients overflowed."""
        if not self.is_on:
            return
        self.steps_since = (self.steps_since + 1) * (1 - found_inf)
        grows = (self.steps_since >= _GROWTH_INTERVAL).float()
        self.scale = self.scale * (1 - 0.5 * found_inf) * (1 + grows)
        self.steps_since = self.steps_since * (1 - grows)


@dataclass(frozen=True)
class GradientGuard:
    """The gradient norm, clipping factor and skip flags of a step, as scalar tensors on the device."""

    norm: Tensor
    """Norm of the unscaled gradients, before clipping."""
    found_inf: Tensor
    """1 if the loss or a gradient is not finite."""
    was_skipped: Tensor
    """1 if the update must be skipped, because `found_inf` is 1 or the norm is above the limit."""
    shrink: Tensor
    """The factor that clips the gradients; 1 if their norm is below the maximum."""


def guard_gradients(
    grads: Iterable[Tensor], *, loss: Tensor, scaler: Scaler, max_norm: float | None, norm_limit: float
) -> GradientGuard:
    """Compute the gradient norm, clipping factor and skip flags without waiting for the device."""
    norm = _total_norm(list(grads)) / scaler.scale
    found_inf = (~(torch.isfinite(norm) & torch.isfinite(loss))).float()
    was_skipped = torch.maximum(found_inf, (norm > norm_limit).float())
    shrink = torch.ones_like(norm) if max_norm is None else torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return GradientGuard(norm, found_inf, was_skipped, shrink)


def _total_norm(grads: list[Tensor]) -> Tensor:
    if grads and grads[0].dtype == torch.bfloat16:  # torch would also return the norm in bf16
        return torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads])
        )
    return torch.nn.utils.get_total_norm(grads, foreach=True)


def rate_at(
    step: int, *, num_steps: int, warmup_steps: int, peak: float, schedule: Schedule, min_share: float = 0.0
) -> float:
    """Return the learning rate of update number `step`, counted from 0.

        warmup_steps = 3, num_steps = 8, linear to 0
        step    0    1    2    3    4    5    6    7   (8)
        share  1/3  2/3   1    1   4/5  3/5  2/5  1/5  (0)

    The warm-up starts at 1/warmup_steps, not at zero, so that no update is wasted. After the warm-up, the learning rate
    equals that of transformers' schedule of the same name. The last update is still above the floor `min_share * peak`,
    which only step `num_steps` would reach.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    # Clamp at the end, because a cosine would rise again.
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress
    return peak * (min_share + (1.0 - min_share) * left)
