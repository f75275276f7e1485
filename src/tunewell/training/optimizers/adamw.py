"""AdamW over what is trained, with clipping and the guard against non-finite numbers folded into its one kernel."""

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tunewell.config.schema import Train

_GROWTH_INTERVAL = 2000
_FIRST_SCALE = 2.0**16


_NORM = re.compile(r"(?:^|[._])(?:layer|rms)?norm\d*(?:[._]|$)", re.IGNORECASE)
"""In a parameter's name: Cohere's norms of queries and keys have a row for each head."""


def make_optimizer(parameters: dict[str, nn.Parameter], settings: Train) -> torch.optim.AdamW:
    """Make AdamW with two groups: matrices, which decay, and norms and vectors (biases), which do not."""
    is_matrix = {name: own.ndim >= 2 and not _NORM.search(name) for name, own in parameters.items()}
    matrices = [own for name, own in parameters.items() if is_matrix[name]]
    vectors = [own for name, own in parameters.items() if not is_matrix[name]]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        fused=True,
    )


@dataclass
class Scaler:
    """The factor that keeps small fp16 gradients from vanishing: halved when one overflows, doubled when long none did.

    It lives on the device, so that nobody waits for it; 1 and constant where the precision needs none.
    """

    scale: Tensor
    steps_since: Tensor
    is_on: bool

    @classmethod
    def make(cls, precision: str, device: torch.device) -> "Scaler":
        """Start a scaler for a precision."""
        is_on = precision == "fp16"
        first = _FIRST_SCALE if is_on else 1.0
        return cls(torch.full((), first, device=device), torch.zeros((), device=device), is_on)

    def update(self, found_inf: Tensor) -> None:
        """Learn from a step whether its gradients overflowed."""
        if not self.is_on:
            return
        self.steps_since = (self.steps_since + 1) * (1 - found_inf)
        grows = (self.steps_since >= _GROWTH_INTERVAL).float()
        self.scale = self.scale * (1 - 0.5 * found_inf) * (1 + grows)
        self.steps_since = self.steps_since * (1 - grows)


@dataclass(frozen=True)
class Update:
    """What an update was, still on the device."""

    grad_norm: Tensor
    was_skipped: Tensor
    """1 where nothing was changed."""


def prepare(optimizer: torch.optim.AdamW) -> None:
    """Make the optimizer's memory before its first step, which would make it half-way through: whole, or not yet."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def update(
    optimizer: torch.optim.AdamW,
    *,
    rate: float,
    max_norm: float | None,
    loss: Tensor,
    scaler: Scaler,
    norm_limit: float = math.inf,
) -> Update:
    """Clip and step; where the loss or a gradient is not finite, or beyond the limit, nothing at all is changed.

    Nothing here waits for the device: the factor and the verdict are tensors that the optimizer's kernel reads.
    """
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads, foreach=True) / scaler.scale
    found_inf = (~(torch.isfinite(norm) & torch.isfinite(loss))).float()
    was_skipped = torch.maximum(found_inf, (norm > norm_limit).float())
    shrink = torch.ones_like(norm) if max_norm is None else torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    if norm.device.type == "mps":
        return _update_in_python(optimizer, grads, Update(norm, was_skipped), shrink / scaler.scale)
    # The attributes by which torch's own scaler talks to a fused optimizer: gradients are divided by `grad_scale`, and
    # the update is left out where `found_inf` is 1.
    optimizer.grad_scale = scaler.scale / shrink  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.found_inf = was_skipped  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    scaler.update(found_inf)
    return Update(norm, was_skipped)


def _update_in_python(optimizer: torch.optim.AdamW, grads: list[Tensor], done: Update, factor: Tensor) -> Update:
    """Clip and step where the fused kernel takes the attributes and does nothing with them: on Apple GPUs."""
    if not bool(done.was_skipped):
        for grad in grads:
            grad.mul_(factor)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return done


def optimizer_tensors(optimizer: torch.optim.AdamW, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Give the optimizer's memory by the names of what is trained."""
    tensors = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = value
    return tensors


def load_optimizer(
    optimizer: torch.optim.AdamW, parameters: dict[str, nn.Parameter], tensors: dict[str, Tensor]
) -> None:
    """Put the optimizer's memory back, each tensor on its parameter's device."""
    optimizer.state.clear()
    for key, value in tensors.items():
        name, _, part = key.rpartition("/")
        parameter = parameters[name]
        # A clone: safetensors hands out views of one buffer, and the kernel wants tensors aligned of their own.
        optimizer.state[parameter][part] = value.to(parameter.device).clone()
