"""AdamW with torch's fused kernel, which also clips, unscales the loss and skips non-finite gradients."""

import math
import re

import torch
from torch import Tensor, nn

from tunewell.config.schema import Train
from tunewell.training.optimizers.base import GradientGuard, Scaler, Update, guard_gradients

_NORM = re.compile(r"(?:^|[._])(?:layer|rms)?norm\d*(?:[._]|$)", re.IGNORECASE)
"""Matches norm layers by name, because Cohere's query and key norms are matrices with one row per head."""


class AdamW:
    """Fused AdamW with two parameter groups: weight decay applies to matrices, not to norms and biases."""

    def __init__(self, parameters: dict[str, nn.Parameter], settings: Train) -> None:
        self._parameters = parameters
        is_matrix = {name: weight.ndim >= 2 and not _NORM.search(name) for name, weight in parameters.items()}
        matrices = [weight for name, weight in parameters.items() if is_matrix[name]]
        vectors = [weight for name, weight in parameters.items() if not is_matrix[name]]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.torch_optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_epsilon,
            fused=True,
        )

    def prepare(self) -> None:
        """Allocate the moments now, because torch would allocate them in the middle of its first step."""
        for parameter in self._parameters.values():
            if parameter.grad is not None and not self.torch_optimizer.state[parameter]:
                self.torch_optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    def update(
        self, *, rate: float, max_norm: float | None, loss: Tensor, scaler: Scaler, norm_limit: float = math.inf
    ) -> Update:
        """Clip the gradients and update the weights, unless the guard skips the update."""
        adamw = self.torch_optimizer
        grads = [p.grad for group in adamw.param_groups for p in group["params"] if p.grad is not None]
        guard = guard_gradients(grads, loss=loss, scaler=scaler, max_norm=max_norm, norm_limit=norm_limit)
        for group in adamw.param_groups:
            group["lr"] = rate
        if guard.norm.device.type == "mps":
            return self._update_on_mps(grads, guard, scaler)
        # torch's GradScaler sets these attributes on a fused optimizer: the kernel divides the gradients by
        # `grad_scale`, and skips the update if `found_inf` is 1.
        adamw.grad_scale = scaler.scale / guard.shrink  # pyright: ignore[reportAttributeAccessIssue]
        adamw.found_inf = guard.was_skipped  # pyright: ignore[reportAttributeAccessIssue]
        adamw.step()
        self.zero_grad()
        scaler.update(guard.found_inf)
        return Update(guard.norm, guard.was_skipped)

    def _update_on_mps(self, grads: list[Tensor], guard: GradientGuard, scaler: Scaler) -> Update:
        """Clip the gradients in Python, because the fused kernel on Apple GPUs ignores the two attributes."""
        if not bool(guard.was_skipped):
            for grad in grads:
                grad.mul_(guard.shrink / scaler.scale)
            self.torch_optimizer.step()
        self.zero_grad()
        return Update(guard.norm, guard.was_skipped)

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self.torch_optimizer.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return `step`, `exp_avg` and `exp_avg_sq` of every parameter that has been updated."""
        return {
            f"{name}/{part}": value
            for name, parameter in self._parameters.items()
            for part, value in self.torch_optimizer.state.get(parameter, {}).items()
        }

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Replace the optimizer state, and move each tensor to the device of its parameter."""
        self.torch_optimizer.state.clear()
        for key, value in tensors.items():
            name, _, part = key.rpartition("/")
            parameter = self._parameters[name]
            # Clone, because safetensors returns views of one buffer and the kernel needs aligned tensors.
            self.torch_optimizer.state[parameter][part] = value.to(parameter.device).clone()

    def move(self, device: str) -> None:
        """Move the moments to another device."""
        for state in self.torch_optimizer.state.values():
            state |= {part: value.to(device) for part, value in state.items()}
