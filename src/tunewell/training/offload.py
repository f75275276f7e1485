"""Gradient checkpointing with layer inputs in main memory (`train.recompute: offload`).

    forward    layer 0 -> 1 -> 2 -> ...     the input of each layer is copied to pinned memory, beside the computation
    backward   ... 2 -> 1 -> 0              while layer 2 is computed again, the input of layer 1 is copied back

On a CPU nothing is copied, and the layers are only recomputed.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tunewell.training.memory import PinnedMemory


class Offloader:
    """Runs decoder layers without keeping their activations. `enable` sets it up for a model."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._inputs: list[weakref.ref[_Input]] = []
        """Inputs in the order of the forward pass. Those of a graph that was freed are dead."""
        self._pinned = PinnedMemory()
        """All copies from and to it are on one stream, so those of a micro-batch run after those of the one before."""
        self._in_main_memory: weakref.WeakSet[_Input] = weakref.WeakSet()
        """Inputs that still use pinned memory. It is used again when there are none."""
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    @classmethod
    def enable(cls, model: PreTrainedModel, device: torch.device) -> None:
        """Make transformers run each layer of the model through an offloader."""
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=cls(device).run)

    def run(self, layer: Callable[..., Tensor], hidden: Tensor, *others: Any) -> Tensor:
        """Run a layer. transformers passes its keyword arguments inside `layer`."""
        if not torch.is_grad_enabled():
            return layer(hidden, *others)
        # The anchor makes autograd call `backward` even if the input of the first layer needs no gradient.
        return _Recomputed.apply(self, layer, hidden, self._anchor, *others)

    def save(self, hidden: Tensor) -> "_Input":
        """Start copying the input of a layer to main memory."""
        saved = _Input(hidden.detach(), hidden.requires_grad)
        self._inputs = [own for own in self._inputs if own() is not None] + [weakref.ref(saved)]
        if self._stream is not None:
            if not self._in_main_memory:
                self._pinned.reset()
            saved.host = self._pinned.empty_like(hidden)
            self._in_main_memory.add(saved)
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                saved.host.copy_(hidden.detach(), non_blocking=True)
            hidden.record_stream(self._stream)
            saved.device_copy = None
        return saved

    def load(self, saved: "_Input") -> Tensor:
        """Return the input of a layer, and start copying back the one of the layer before."""
        self._fetch(saved)
        assert saved.device_copy is not None
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            saved.device_copy.record_stream(torch.cuda.current_stream())
        hidden, saved.device_copy, saved.host = saved.device_copy, None, None
        self._in_main_memory.discard(saved)
        while self._inputs and self._inputs.pop()() is not saved:
            pass
        before = self._inputs[-1]() if self._inputs else None
        if before is not None:
            self._fetch(before)
        return hidden.requires_grad_(saved.needs_grad)

    def _fetch(self, saved: "_Input") -> None:
        if saved.device_copy is None and saved.host is not None and self._stream is not None:
            with torch.cuda.stream(self._stream):
                saved.device_copy = saved.host.to(self._stream.device, non_blocking=True)


class _Input:
    """The input of a layer: on the device, in main memory, or being copied."""

    def __init__(self, hidden: Tensor, needs_grad: bool) -> None:
        self.needs_grad = needs_grad
        self.device_copy: Tensor | None = hidden
        self.host: Tensor | None = None


class _Recomputed(torch.autograd.Function):
    """A layer whose forward pass is repeated in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, offloader: Offloader, layer: Callable[..., Tensor], hidden: Tensor, anchor: Tensor, *others: Any
    ) -> Tensor:
        ctx.offloader, ctx.layer, ctx.others = offloader, layer, others
        ctx.saved = offloader.save(hidden)
        ctx.random_state = _random_state(hidden.device)
        return layer(hidden, *others)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden = ctx.offloader.load(ctx.saved)
        devices = [hidden.device] if hidden.device.type == "cuda" else []
        with torch.enable_grad(), torch.random.fork_rng(devices=devices):  # the same dropout as before
            _set_random_state(ctx.random_state, hidden.device)
            output = ctx.layer(hidden, *ctx.others)
        torch.autograd.backward(output, grads)
        return None, None, hidden.grad, None, *(None for _ in ctx.others)


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    if device.type == "mps":
        return torch.get_rng_state(), torch.mps.get_rng_state()
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None and device.type == "mps":
        torch.mps.set_rng_state(state[1])
    elif state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
