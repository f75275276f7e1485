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
from tunewell.training.optimizers.base import GradientGuard, Optimizer, Scaler, Update, guard_gradients

_NORM = re.compile(r"(?:^|[._])(?:layer|rms)?norm\d*(?:[._]|$)", re.IGNORECASE)
"""Matches norm layers by name, because Cohere's query and key norms are matrices with one row per head."""


class AdamW(Optimizer):
    """Fused AdamW with two parameter groups: weight decay applies to matrices, not to norms and biases.

    Subclasses keep the moments in another form. They override `new_moments` and `update_one`.
    """

    is_fused = True
    """Whether torch's kernel updates all parameters in fp32 at once. If not, `update_one` updates one at a time."""

    def __init__(self, parameters: dict[str, nn.Parameter], settings: Train) -> None:
        super().__init__(parameters, settings)
        self._matrices = {name for name, weight in parameters.items() if weight.ndim >= 2 and not _NORM.search(name)}
        self._weight_decay = settings.weight_decay
        groups = [
            {
                "params": [own for name, own in parameters.items() if (name in self._matrices) == is_matrix],
                "weight_decay": decay,
            }
            for is_matrix, decay in ((True, settings.weight_decay), (False, 0.0))
        ]
        self.torch_optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=0.0,  # `update` sets the rate of each step
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_epsilon,
            fused=True,
        )

    def state_of(self, name: str) -> dict[str, Tensor]:
        """Return the state of a parameter, by part."""
        return self.torch_optimizer.state[self.parameters[name]]

    def new_moments(self, gradient: Tensor) -> dict[str, Tensor]:
        """Return the moments of a parameter before its first update."""
        return {"exp_avg": torch.zeros_like(gradient), "exp_avg_sq": torch.zeros_like(gradient)}

    def prepare(self) -> None:
        """Allocate the moments now, because torch would allocate them in the middle of its first step.

        Existing moments take the dtype of their parameter, which healing may have changed.
        """
        for name, gradient in self.gradients().items():
            state = self.state_of(name)
            if "step" not in state:
                step = torch.zeros((), dtype=torch.float32, device=gradient.device)
                state |= {"step": step, **self.new_moments(gradient)}
            state |= {part: value.to(gradient.dtype) for part, value in state.items() if _follows_weight(part, value)}

    def update(
        self, *, rate: float, max_norm: float | None, loss: Tensor, scaler: Scaler, norm_limit: float = math.inf
    ) -> Update:
        """Clip the gradients and update the weights, unless the guard skips the update."""
        grads = self.gradients()
        guard = guard_gradients(grads.values(), loss=loss, scaler=scaler, max_norm=max_norm, norm_limit=norm_limit)
        if not self.is_fused or any(grad.dtype == torch.bfloat16 for grad in grads.values()):
            self._update_each(grads, guard, scaler, rate)
        else:
            self._update_fused(list(grads.values()), guard, scaler, rate)
        self.zero_grad()
        scaler.update(guard.found_inf)
        return Update(guard.norm, guard.was_skipped)

    def _update_fused(self, grads: list[Tensor], guard: GradientGuard, scaler: Scaler, rate: float) -> None:
        adamw = self.torch_optimizer
        for group in adamw.param_groups:
            group["lr"] = rate
        if guard.norm.device.type != "mps":
            # torch's GradScaler sets these attributes on a fused optimizer: the kernel divides the gradients by
            # `grad_scale`, and skips the update if `found_inf` is 1.
            adamw.grad_scale = scaler.scale / guard.shrink  # pyright: ignore[reportAttributeAccessIssue]
            adamw.found_inf = guard.was_skipped  # pyright: ignore[reportAttributeAccessIssue]
            adamw.step()
        elif not bool(guard.was_skipped):  # the fused kernel on Apple GPUs ignores the two attributes
            for grad in grads:
                grad.mul_(guard.shrink / scaler.scale)
            adamw.step()

    @torch.no_grad()
    def _update_each(self, grads: dict[str, Tensor], guard: GradientGuard, scaler: Scaler, rate: float) -> None:
        """Update the parameters one by one, so that no temporary is larger than a block of one parameter."""
        names = sorted(grads, key=lambda name: name not in self._matrices)
        for name in names:
            self.state_of(name)["step"].add_(1 - guard.was_skipped)
        steps_P = torch.stack([self.state_of(name)["step"] for name in names])
        decays_P = torch.ones_like(steps_P)
        decays_P[: len(self._matrices & grads.keys())] = 1 - rate * self._weight_decay
        (beta1, beta2), eps = (self.torch_optimizer.defaults[name] for name in ("betas", "eps"))
        columns = (
            rate / (1 - beta1 ** steps_P.double()),
            (1 - beta2 ** steps_P.double()).rsqrt(),
            decays_P,
            guard.shrink / scaler.scale,
            guard.was_skipped,
            *(steps_P.new_full((), value) for value in (eps, beta1, beta2)),
        )
        values_PV = torch.stack([column.float().expand(len(steps_P)) for column in columns], 1)
        seeds_P = mixed(steps_P.int() * 0x10001 + torch.arange(len(steps_P), dtype=torch.int32, device=steps_P.device))
        for name, values, seed in zip(names, values_PV, seeds_P, strict=True):
            self.update_one(name, grads[name], values, seed)

    def update_one(self, name: str, gradient: Tensor, values: Tensor, seed: Tensor) -> None:
        """Update a parameter and its moments in place. `values` are those that `adamw_step` unpacks."""
        self.update_moments(name, self.parameters[name].detach(), gradient, values, seed)

    def update_moments(self, name: str, weight: Tensor, gradient: Tensor, values: Tensor, seed: Tensor) -> None:
        """Update a tensor and the moments of the parameter `name` in place."""
        state = self.state_of(name)
        update, size = compiled(update_rounded, weight.device.type)
        flat = [one.view(-1) for one in (weight, gradient, state["exp_avg"], state["exp_avg_sq"])]
        for at in range(0, weight.numel(), size):
            update(*(one[at : at + size] for one in flat), values, seed + at if at else seed)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return `step`, `exp_avg` and `exp_avg_sq` of every parameter that has been updated."""
        return {
            f"{name}/{part}": value
            for name, parameter in self.parameters.items()
            for part, value in self.torch_optimizer.state.get(parameter, {}).items()
        }

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Replace the optimizer state, and move each tensor to the device of its parameter."""
        self.torch_optimizer.state.clear()
        for key, value in tensors.items():
            name, _, part = key.rpartition("/")
            parameter = self.parameters[name]
            # Clone, because safetensors returns views of one buffer and the kernel needs aligned tensors.
            dtype = parameter.dtype if _follows_weight(part, value) else value.dtype
            self.state_of(name)[part] = value.to(parameter.device, dtype).clone()

    def move(self, device: str) -> None:
        """Move the state to another device."""
        for state in self.torch_optimizer.state.values():
            state |= {part: value.to(device) for part, value in state.items()}


def _follows_weight(part: str, value: Tensor) -> bool:
    """Return whether a part of the state has the dtype of its parameter. 8-bit moments and their scales do not."""
    return value.is_floating_point() and part != "step" and not part.endswith("_scale")


def adamw_step(weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Return the new weight and moments in fp32, and whether the update is skipped."""
    step_size, root_scale, decay, grad_scale, was_skipped, eps, beta1, beta2 = values.unbind()
    grad_ = grad.float() * grad_scale
    mean_ = torch.lerp(grad_, mean, beta1)
    square_ = torch.lerp(grad_ * grad_, square, beta2)
    weight_ = weight.float() * decay - step_size * mean_ / (square_.sqrt() * root_scale + eps)
    return weight_, mean_, square_, was_skipped > 0


def update_rounded(weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, values: Tensor, seed: Tensor) -> None:
    """Update a flat weight and its moments in place; compute in fp32, and round to bf16 at the end.

    The noise depends only on `seed` and the position, so a resumed run repeats it. The mean of the gradients is rounded
    to nearest, because each step changes it by more than a rounding error; the mean of the squares is not.
    """
    weight_, mean_, square_, is_skipped = adamw_step(weight, grad, mean.float(), square.float(), values)
    is_rounding = torch.bfloat16 in (weight.dtype, square.dtype)
    noise = noise_at(weight, seed) if is_rounding else seed
    weight.copy_(torch.where(is_skipped, weight, rounded(weight_, noise & 0xFFFF, weight.dtype)))
    square.copy_(torch.where(is_skipped, square, rounded(square_, (noise >> 16) & 0xFFFF, square.dtype)))
    mean.copy_(torch.where(is_skipped, mean, mean_.to(mean.dtype)))


def rounded(value: Tensor, noise: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 to bf16: add 16 random bits below the last bit that bf16 keeps, and cut off the rest."""
    if dtype != torch.bfloat16:
        return value.to(dtype)
    return ((value.view(torch.int32) + noise) & -0x10000).view(torch.float32).to(dtype)


def noise_at(weight: Tensor, seed: Tensor) -> Tensor:
    """Return 32 random bits for each element of a flat tensor. They depend only on the seed and the position."""
    return mixed(torch.arange(len(weight), dtype=torch.int32, device=weight.device) + seed)


def mixed(number: Tensor) -> Tensor:
    """Return pseudo-random int32 numbers: the hash `lowbias32`, with logical shifts written for signed numbers."""
    number = (number ^ ((number >> 16) & 0xFFFF)) * 0x7FEB352D
    number = (number ^ ((number >> 15) & 0x1FFFF)) * -0x7B935975
    return number ^ ((number >> 16) & 0xFFFF)


@cache
def compiled(update: Callable[..., None], device: str) -> tuple[Callable[..., None], int]:
    """Return an elementwise update, compiled into one kernel where that is possible, and the elements per call."""
    if device == "cuda" and has_triton():
        kernel: Any = torch.compile(update, dynamic=True)
        return kernel, 1 << 31
    return update, 1 << 20
