"""AdamW with torch's fused kernel, which also clips, unscales the loss and skips non-finite gradients.

Parameters in bf16 (`train.masters: bf16`) are updated by `update_rounded`, with stochastic rounding: an update smaller
than the distance to the next bf16 number is made with the probability that keeps its mean.
"""

import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton

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
            lr=0.0,  # `update` sets the rate of each step
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_epsilon,
            fused=True,
        )

    def prepare(self) -> None:
        """Allocate the moments now, because torch would allocate them in the middle of its first step.

        Existing moments take the dtype of their parameter, which healing may have changed.
        """
        for parameter in self._parameters.values():
            state = self.torch_optimizer.state[parameter]
            if state and state["exp_avg"].dtype != parameter.dtype:
                state |= {part: state[part].to(parameter.dtype) for part in ("exp_avg", "exp_avg_sq")}
            elif parameter.grad is not None and not state:
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
        if any(grad.dtype == torch.bfloat16 for grad in grads):
            self._update_rounded(guard, scaler)
            return Update(guard.norm, guard.was_skipped)
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

    @torch.no_grad()
    def _update_rounded(self, guard: GradientGuard, scaler: Scaler) -> None:
        """Update the parameters one by one, so that no temporary is larger than a block of one parameter."""
        groups = [(g, [p for p in g["params"] if p.grad is not None]) for g in self.torch_optimizer.param_groups]
        parameters = [parameter for _, own in groups for parameter in own]
        states = [self.torch_optimizer.state[parameter] for parameter in parameters]
        for state in states:
            state["step"] += 1 - guard.was_skipped
        steps_P = torch.stack([state["step"] for state in states])
        decays_P = torch.cat(
            [steps_P.new_full((len(own),), 1 - group["lr"] * group["weight_decay"]) for group, own in groups]
        )
        values_PV = _step_values(groups[0][0], steps_P, decays_P, guard.shrink / scaler.scale, guard.was_skipped)
        seeds_P = mixed(steps_P.int() * 0x10001 + torch.arange(len(steps_P), dtype=torch.int32, device=steps_P.device))
        update, size = _rounding_kernel(steps_P.device.type)
        for parameter, state, values, seed in zip(parameters, states, values_PV, seeds_P, strict=True):
            flat = [one.detach().view(-1) for one in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])]
            for at in range(0, parameter.numel(), size):
                update(*(one[at : at + size] for one in flat), values, seed + at if at else seed)
        self.zero_grad()
        scaler.update(guard.found_inf)

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
            dtype = value.dtype if part == "step" else parameter.dtype
            self.torch_optimizer.state[parameter][part] = value.to(parameter.device, dtype).clone()

    def move(self, device: str) -> None:
        """Move the moments to another device."""
        for state in self.torch_optimizer.state.values():
            state |= {part: value.to(device) for part, value in state.items()}


def _step_values(
    group: dict[str, Any], steps_P: Tensor, decays_P: Tensor, scale: Tensor, was_skipped: Tensor
) -> Tensor:
    """Return the values that `update_rounded` unpacks, one row per parameter."""
    beta1, beta2 = group["betas"]
    fixed = [steps_P.new_full((), value) for value in (group["eps"], beta1, beta2)]
    step_sizes_P = group["lr"] / (1 - beta1 ** steps_P.double())
    root_scales_P = (1 - beta2 ** steps_P.double()).rsqrt()
    columns = (step_sizes_P, root_scales_P, decays_P, scale, was_skipped, *fixed)
    return torch.stack([column.float().expand(len(steps_P)) for column in columns], 1)


def update_rounded(weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, values: Tensor, seed: Tensor) -> None:
    """Update a flat bf16 weight and its moments in place; compute in fp32 and round at the end.

    The noise depends only on `seed` and the position, so a resumed run repeats it. The mean of the gradients is rounded
    to nearest, because each step changes it by more than a rounding error; the mean of the squares is not.
    """
    step_size, root_scale, decay, grad_scale, was_skipped, eps, beta1, beta2 = values.unbind()
    grad_ = grad.float() * grad_scale
    mean_ = torch.lerp(grad_, mean.float(), beta1)
    square_ = torch.lerp(grad_ * grad_, square.float(), beta2)
    weight_ = weight.float() * decay - step_size * mean_ / (square_.sqrt() * root_scale + eps)
    noise = mixed(torch.arange(len(weight), dtype=torch.int32, device=weight.device) + seed)
    is_skipped = was_skipped > 0
    weight.copy_(torch.where(is_skipped, weight, rounded(weight_, noise & 0xFFFF, weight.dtype)))
    square.copy_(torch.where(is_skipped, square, rounded(square_, (noise >> 16) & 0xFFFF, weight.dtype)))
    mean.copy_(torch.where(is_skipped, mean, mean_.to(mean.dtype)))


def rounded(value: Tensor, noise: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 to bf16: add 16 random bits below the last bit that bf16 keeps, and cut off the rest."""
    if dtype != torch.bfloat16:
        return value.to(dtype)
    return ((value.view(torch.int32) + noise) & -0x10000).view(torch.float32).to(dtype)


def mixed(number: Tensor) -> Tensor:
    """Return pseudo-random int32 numbers: the hash `lowbias32`, with logical shifts written for signed numbers."""
    number = (number ^ ((number >> 16) & 0xFFFF)) * 0x7FEB352D
    number = (number ^ ((number >> 15) & 0x1FFFF)) * -0x7B935975
    return number ^ ((number >> 16) & 0xFFFF)


@cache
def _rounding_kernel(device: str) -> tuple[Callable[..., None], int]:
    """Return `update_rounded`, compiled into one kernel where that is possible, and the elements per call."""
    if device == "cuda" and has_triton():
        compiled: Any = torch.compile(update_rounded, dynamic=True)
        return compiled, 1 << 31
    return update_rounded, 1 << 20
