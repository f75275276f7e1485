"""AdamW with 8-bit moments: each block of 256 values has one scale, and each value is one of 256 codes.

    moment   0.013 -0.002 ...  ->  scale 0.013 (largest of the block)  +  codes 255 74 ...  (nearest of `dynamic_codes`)

The codes and blocks are those of bitsandbytes. The update is written in torch, because its kernel cannot skip an update
without waiting for the device. Moments are computed in fp32, used, and then quantised to the nearest code; the squares
never to 0, because the next update would divide the mean by the root of a single squared gradient.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tunewell.training.optimizers.adamw import AdamW, adamw_step, compiled, noise_at, rounded

BLOCK = 256
_MIN_SIZE = 4096
"""Smaller parameters keep their moments in full, as in bitsandbytes: norms are few, and small errors in them matter."""
_DECADES = 7
_HALF_BITS = 1 << 15


class Codes(NamedTuple):
    """The values that codes stand for, sorted, and how to find the code of a value."""

    values: Tensor
    limits: Tensor
    """The limit between each code and the next; infinite for the last code."""
    guesses: Tensor
    """For the upper 16 bits of an fp32 number, the code of the smallest number with these bits. There is at most one
    limit between numbers with equal bits, so the code of any of them is this one or the next."""


class Moment(NamedTuple):
    """A flat 8-bit moment."""

    codes: Tensor
    scale: Tensor
    """The largest magnitude of each block."""
    kind: Codes

    def part(self, start: int, end: int) -> "Moment":
        """Return a part that starts with a block."""
        return Moment(self.codes[start:end], self.scale[start // BLOCK : -(-end // BLOCK)], self.kind)


class AdamW8bit(AdamW):
    """AdamW with 8-bit moments, except for parameters of fewer than 4,096 elements."""

    is_fused = False
    min_size: float = _MIN_SIZE
    """Number of elements from which moments have 8 bits."""

    def new_moments(self, gradient: Tensor) -> dict[str, Tensor]:
        """Return codes and scales that stand for zero, or full moments of a small parameter."""
        if gradient.numel() < self.min_size:
            return super().new_moments(gradient)
        num_blocks = -(-gradient.numel() // BLOCK)
        return {
            "exp_avg": torch.zeros_like(gradient, dtype=torch.uint8),
            "exp_avg_sq": torch.zeros_like(gradient, dtype=torch.uint8),
            "exp_avg_scale": gradient.new_zeros(num_blocks, dtype=torch.float32),
            "exp_avg_sq_scale": gradient.new_zeros(num_blocks, dtype=torch.float32),
        }

    def update_moments(self, name: str, weight: Tensor, gradient: Tensor, values: Tensor, seed: Tensor) -> None:
        """Update a tensor and the moments of the parameter `name` in place."""
        state = self.state_of(name)
        if "exp_avg_scale" not in state:
            super().update_moments(name, weight, gradient, values, seed)
            return
        weight, gradient = weight.view(-1), gradient.view(-1)
        mean, square = (self._moment(name, part) for part in ("exp_avg", "exp_avg_sq"))
        update, size = compiled(update_8bit, weight.device.type)
        num_whole = len(weight) // BLOCK * BLOCK
        for at in range(0, num_whole, size):
            end = min(at + size, num_whole)
            own = weight[at:end], gradient[at:end], mean.part(at, end), square.part(at, end)
            update(*own, values, seed + at if at else seed)
        if num_whole < len(weight):  # the last block is short
            rest = (mean.part(num_whole, len(weight)), square.part(num_whole, len(weight)))
            _update_blocks(weight[None, num_whole:], gradient[None, num_whole:], *rest, values, seed + num_whole)

    def _moment(self, name: str, part: str) -> "Moment":
        value = self.state_of(name)[part].view(-1)
        return Moment(value, self.state_of(name)[f"{part}_scale"], dynamic_codes(value.device, part == "exp_avg"))

    def read_moment(self, name: str, part: str) -> Tensor:
        """Return a moment of a parameter in fp32."""
        value = self.state_of(name)[part]
        if f"{part}_scale" not in self.state_of(name):
            return value.float()
        moment = self._moment(name, part)
        return dequantised(_blocks(value), moment.scale, moment.kind).view(-1)[: value.numel()].view_as(value)

    def moment_parts(self, name: str, part: str, moment: Tensor) -> dict[str, Tensor]:
        """Return the parts of the state that store a moment of a parameter."""
        value = self.state_of(name)[part]
        if f"{part}_scale" not in self.state_of(name):
            return {part: moment.to(value.dtype)}
        codes, scale = quantised(_blocks(moment), dynamic_codes(value.device, part == "exp_avg"))
        return {part: codes.view(-1)[: value.numel()].view_as(value), f"{part}_scale": scale}


def _blocks(moment: Tensor) -> Tensor:
    """Return a copy as blocks, one per row; the last is filled up with zeros."""
    flat = moment.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


def update_8bit(weight: Tensor, grad: Tensor, mean: Moment, square: Moment, values: Tensor, seed: Tensor) -> None:
    """Update a flat weight of whole blocks and its moments in place."""
    _update_blocks(weight.view(-1, BLOCK), grad.view(-1, BLOCK), mean, square, values, seed)


def _update_blocks(weight: Tensor, grad: Tensor, mean: Moment, square: Moment, values: Tensor, seed: Tensor) -> None:
    """Update blocks, one per row, in place; `values` and `seed` are those of `update_rounded`."""
    mean_, square_ = [dequantised(own.codes.view_as(grad), own.scale, own.kind) for own in (mean, square)]
    weight_, mean_, square_, is_skipped = adamw_step(weight, grad, mean_, square_, values)
    if weight.dtype == torch.bfloat16:
        weight_ = rounded(weight_, noise_at(weight.view(-1), seed).view_as(weight) & 0xFFFF, weight.dtype)
    weight.copy_(torch.where(is_skipped, weight, weight_))
    for moment, new in ((mean, mean_), (square, square_)):
        codes, scale = quantised(new, moment.kind)
        moment.codes.copy_(torch.where(is_skipped, moment.codes, codes.view(-1)))
        moment.scale.copy_(torch.where(is_skipped, moment.scale, scale))


def dequantised(codes: Tensor, scale: Tensor, kind: Codes) -> Tensor:
    """Return the values of blocks, one per row."""
    # `index_select` instead of indexing, which takes three times as long on a CPU.
    return torch.index_select(kind.values, 0, codes.reshape(-1).int()).view_as(codes) * scale[:, None]


def quantised(blocks: Tensor, kind: Codes) -> tuple[Tensor, Tensor]:
    """Return the nearest codes of blocks, one per row, and the largest magnitude of each block."""
    scale = blocks.abs().amax(1)
    shares = blocks / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    # A search by `bucketize` takes ten times as long on a CPU.
    guess = torch.index_select(kind.guesses, 0, (shares.view(torch.int32) >> 16).view(-1) + _HALF_BITS)
    codes = guess + (shares.view(-1) > torch.index_select(kind.limits, 0, guess))
    return codes.view_as(shares).to(torch.uint8), scale


@cache
def dynamic_codes(device: torch.device, is_signed: bool) -> Codes:
    """Return bitsandbytes' dynamic map: seven decades below 1, each with twice the values of the one below, 0 and 1."""
    values = [torch.tensor([0.0, 1.0])]
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not is_signed)) + 1)
        centres = 10.0 ** (decade - _DECADES + 1) * ((edges[:-1] + edges[1:]) / 2)
        values += [centres, -centres] if is_signed else [centres]
    sorted_values = torch.cat(values).sort().values.to(device)
    limits = (sorted_values[:-1] + sorted_values[1:]) / 2
    if not is_signed:
        limits[0] = -1.0  # no square becomes 0: the update divides by its root
    upper = torch.arange(-_HALF_BITS, _HALF_BITS, dtype=torch.int32, device=device) << 16
    ends = torch.stack([upper, upper | 0xFFFF]).view(torch.float32)
    guesses = torch.bucketize(ends, limits, out_int32=True).amin(0)
    return Codes(sorted_values, torch.cat([limits, limits.new_full((1,), torch.inf)]), guesses)
