"""GaLore: AdamW on gradients that are projected to a low rank, for full fine-tuning with small optimizer states.

    gradient G [rows, cols] -> R = G Q [rows, rank] -> AdamW's moments and step D of R -> weight += scale * D Qᵀ

Q [cols, rank] is an orthonormal basis of the shorter side; with fewer rows than columns, R = Qᵀ G. A hook projects each
gradient as soon as it is computed and frees it. So gradients are accumulated, summed over ranks, measured and clipped
in projected form. In the step in which the basis of a matrix is due, its whole gradient is kept until the update,
summed over micro-batches and ranks, and gives the new basis: equal on all ranks, whatever the micro-batches.
"""

import math
import re
from functools import partial

import torch
from torch import Tensor, nn

from tunewell.config.schema import Train
from tunewell.training.optimizers.adamw import compiled, mixed, noise_at, rounded
from tunewell.training.optimizers.adamw8bit import AdamW8bit
from tunewell.training.optimizers.base import GradientGuard, Scaler

_IN_LAYER = re.compile(r"\.\d+\.")
"""Matches parameters of numbered layers: not the embedding, the output head and the last norm."""
_FIRST_ROUND = 16
"""Steps in which all matrices get their first basis: one step would keep all whole gradients in memory at once."""
_MULTIPLIER = 0x9E3779B1


class GaLore(AdamW8bit):
    """AdamW with projected gradients and moments for the matrices of the decoder layers."""

    def __init__(self, parameters: dict[str, nn.Parameter], settings: Train) -> None:
        super().__init__(parameters, settings)
        self._rank, self._every, self._scale = settings.galore_rank, settings.galore_every, settings.galore_scale
        self._first_steps = min(_FIRST_ROUND, self._every)
        if not settings.galore_8bit:
            self.min_size = math.inf
        self.projected = {name: at for at, name in enumerate(filter(self._is_projected, parameters))}
        """Names of the projected matrices, numbered."""
        self._number = 0
        self._due: set[str] = set()
        self._sums: dict[str, Tensor] = {}
        """Projected gradients, accumulated since the last update."""
        self._new_bases: dict[str, Tensor] = {}
        for name in self.projected:
            parameters[name].register_post_accumulate_grad_hook(partial(self._project_gradient, name))

    def _is_projected(self, name: str) -> bool:
        is_larger = name in self._matrices and self._rank < min(self.parameters[name].shape[-2:])
        return is_larger and _IN_LAYER.search(name) is not None

    def start(self, number: int) -> None:
        """Choose the matrices whose basis is due in this step."""
        self._number, self._due = number, {name for name, at in self.projected.items() if self._is_due(at, number)}

    def _is_due(self, at: int, number: int) -> bool:
        if number < self._first_steps:
            return at % self._first_steps == number
        return (number - at * self._every // len(self.projected)) % self._every == 0

    def _project_gradient(self, name: str, parameter: Tensor) -> None:
        """Add the projection of a new gradient to the sum and free the gradient. A due one is left to accumulate."""
        if name in self._due or parameter.grad is None:
            return
        projected = self._project(name, parameter.grad, self._basis(name))
        self._sums[name] = self._sums[name].add_(projected) if name in self._sums else projected
        parameter.grad = None

    def gradients(self, *, is_complete: bool = False) -> dict[str, Tensor]:
        """Return the gradients: projected, or whole for other parameters and, until `prepare`, due matrices."""
        found: dict[str, Tensor] = {}
        for name, own in self.parameters.items():
            gradient = self._sums.get(name, own.grad)
            if gradient is None and is_complete:
                gradient = own.grad = torch.zeros_like(own)
                if name in self.projected:
                    self._project_gradient(name, own)
                    gradient = self._sums.get(name, gradient)
            if gradient is not None:
                found[name] = gradient
        return found

    @torch.no_grad()
    def prepare(self) -> None:
        """Find the bases that are due, project the gradients that they come from, and allocate the moments."""
        for name in self.projected:
            own = self.parameters[name]
            if name in self._due and own.grad is not None:
                self._basis(name)
                self._new_bases[name] = self._find_basis(name, own.grad)
                self._sums[name] = self._project(name, own.grad, self._new_bases[name])
                own.grad = None
        super().prepare()

    @torch.no_grad()
    def _update_each(self, grads: dict[str, Tensor], guard: GradientGuard, scaler: Scaler, rate: float) -> None:
        for name, basis in self._new_bases.items():
            self._replace_basis(name, basis, guard.was_skipped > 0)
        super()._update_each(grads, guard, scaler, rate)

    def _replace_basis(self, name: str, basis: Tensor, is_skipped: Tensor) -> None:
        """Replace the basis of a matrix and rotate its moments into it. The first basis starts with moments of zero."""
        state = self.state_of(name)
        changed = {"basis": basis}
        if self._number < self._first_steps:
            changed |= {part: torch.zeros_like(value) for part, value in state.items() if part != "basis"}
        else:
            changed |= self._rotated_moments(name, state["basis"].float().mT @ basis.float())
        for part, value in changed.items():
            state[part] = torch.where(is_skipped, state[part], value)

    def _rotated_moments(self, name: str, turn_RR: Tensor) -> dict[str, Tensor]:
        """Return the parts of the state with the moments after a rotation from the old basis to the new one.

        The mean of the squares along a new direction is that of the old directions in it. For the share of the new
        direction that lies outside the old basis it is unknown: the mean of all old directions is taken.
        """
        mean, square = self.read_moment(name, "exp_avg"), self.read_moment(name, "exp_avg_sq")
        shares_RR = turn_RR.square()
        unknown_R = (1 - shares_RR.sum(-2)).clamp_min(0)
        axis = -1 if self._is_tall(name) else -2
        known = self._project(name, square, shares_RR)
        square = known + square.mean(axis, keepdim=True) * unknown_R.unsqueeze(-3 - axis)
        mean = self._project(name, mean, turn_RR)
        return self.moment_parts(name, "exp_avg", mean) | self.moment_parts(name, "exp_avg_sq", square)

    def update_one(self, name: str, gradient: Tensor, values: Tensor, seed: Tensor) -> None:
        """Update a parameter in place: a projected one by AdamW's step in its basis, projected back."""
        if name not in self._sums:
            super().update_one(name, gradient, values, seed)
            return
        step = torch.zeros_like(gradient, dtype=torch.float32)
        self.update_moments(name, step, gradient, values, seed)
        basis = self.state_of(name)["basis"].float()
        change = step @ basis.mT if self._is_tall(name) else basis @ step
        update, size = compiled(add_rounded, change.device.type)
        weight, change = self.parameters[name].detach().view(-1), change.mul_(self._scale).view(-1)
        for at in range(0, len(weight), size):
            update(weight[at : at + size], change[at : at + size], values, seed + at if at else seed)

    def zero_grad(self) -> None:
        """Clear the gradients."""
        super().zero_grad()
        self._sums.clear()
        self._new_bases.clear()

    def _is_tall(self, name: str) -> bool:
        rows, columns = self.parameters[name].shape[-2:]
        return rows >= columns

    def _project(self, name: str, gradient: Tensor, basis: Tensor) -> Tensor:
        return gradient @ basis if self._is_tall(name) else basis.mT @ gradient

    def _basis(self, name: str) -> Tensor:
        """Return the basis of a matrix. Before the first one is found, it is random."""
        state, own = self.state_of(name), self.parameters[name]
        if "basis" not in state:
            *others, rows, columns = own.shape
            signs = self._signs(name, (*others, min(rows, columns), self._rank), number=0)
            state["basis"] = _orthonormal(signs)
        state["basis"] = state["basis"].to(own.dtype)  # healing may have changed it
        return state["basis"]

    def _find_basis(self, name: str, gradient: Tensor) -> Tensor:
        """Return an orthonormal basis of the strongest directions of a gradient.

        A randomised range finder with two power iterations: the singular value decomposition of a matrix takes seconds.
        """
        wide = gradient.float().mT if self._is_tall(name) else gradient.float()
        wide = wide / wide.abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        shape = (*wide.shape[:-2], wide.shape[-1], self._rank)
        basis = wide @ self._signs(name, shape, number=self._number)
        for _ in range(2):
            basis = _orthonormal(wide @ (wide.mT @ basis))
        return basis.to(gradient.dtype)

    def _signs(self, name: str, shape: tuple[int, ...], *, number: int) -> Tensor:
        """Return random numbers 1 and -1. They depend only on step and matrix, so a resumed run and all ranks agree."""
        seed = (number * _MULTIPLIER + self.projected[name] * 0x10001) & 0x7FFFFFFF
        numbers = torch.arange(math.prod(shape), dtype=torch.int32, device=self.parameters[name].device)
        return (1 - 2 * (mixed(mixed(numbers) + seed) >> 7 & 1)).float().view(shape)


def _orthonormal(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns. A checkpoint stores it by rows, and so must this process."""
    return torch.linalg.qr(matrix).Q.contiguous()


def add_rounded(weight: Tensor, change: Tensor, values: Tensor, seed: Tensor) -> None:
    """Decay a flat weight and add a change in place, with `values` and rounding as in `update_rounded`."""
    decay, was_skipped = values[2], values[4]
    new = weight.float() * torch.where(was_skipped > 0, 1.0, decay) + change
    noise = noise_at(weight, seed) & 0xFFFF if weight.dtype == torch.bfloat16 else seed
    weight.copy_(rounded(new, noise, weight.dtype))
