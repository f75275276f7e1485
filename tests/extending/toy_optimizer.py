"""A toy optimizer: plain gradient descent."""

import math

import torch
from torch import Tensor, nn

from tunewell.config.schema import Train
from tunewell.training.optimizers.base import Optimizer, Scaler, Update, guard_gradients


class GradientDescent(Optimizer):
    """Subtracts the gradient times the learning rate; it has no state but the number of updates."""

    def __init__(self, parameters: dict[str, nn.Parameter], settings: Train) -> None:
        super().__init__(parameters, settings)
        self._num_updates = torch.zeros(())

    @torch.no_grad()
    def update(
        self, *, rate: float, max_norm: float | None, loss: Tensor, scaler: Scaler, norm_limit: float = math.inf
    ) -> Update:
        """Clip, step and drop the gradients; do nothing if they are not finite."""
        grads = self.gradients()
        guard = guard_gradients(grads.values(), loss=loss, scaler=scaler, max_norm=max_norm, norm_limit=norm_limit)
        factor = rate * guard.shrink / scaler.scale
        for name, grad in grads.items():
            own = self.parameters[name]
            own.copy_(torch.where(guard.was_skipped > 0, own, own - factor * grad))
        self.zero_grad()
        self._num_updates += 1
        return Update(guard.norm, guard.was_skipped)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the number of updates."""
        return {"all/num_updates": self._num_updates}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore the number of updates."""
        self._num_updates = tensors.get("all/num_updates", torch.zeros(()))

    def move(self, device: str) -> None:
        """Move nothing: the parameters have moved already."""


class Momentum(GradientDescent):
    """Follows the mean of the gradients, which is its state."""

    def __init__(self, parameters: dict[str, nn.Parameter], settings: Train) -> None:
        super().__init__(parameters, settings)
        self._means = {name: torch.zeros_like(own) for name, own in parameters.items()}

    @torch.no_grad()
    def update(
        self, *, rate: float, max_norm: float | None, loss: Tensor, scaler: Scaler, norm_limit: float = math.inf
    ) -> Update:
        """Move the means, and step along them."""
        for name, gradient in self.gradients().items():
            self._means[name].lerp_(gradient, 0.1)
            gradient.copy_(self._means[name])
        return super().update(rate=rate, max_norm=max_norm, loss=loss, scaler=scaler, norm_limit=norm_limit)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the means."""
        return {f"{name}/mean": mean for name, mean in self._means.items()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore the means."""
        for name, mean in self._means.items():
            mean.copy_(tensors[f"{name}/mean"]) if tensors else mean.zero_()
