"""Record losses and gradient norms of a model with hooks, and locate the first tensor that is NaN or infinite.

forward  -> stores a reference to the batch, and the loss on the device
backward -> stores the norm of every gradient before clipping on the device
read     -> transfers all values at once, the only synchronisation with the device
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tunewell.training.bisect import checked_outputs, is_finite, tensors_of

_KEPT_BYTES = 64 * 2**20
"""Limit for the stored batches of a step: token ids are small, but images could fill the device memory."""
_UNCLIPPED_SHARE = 0.999
"""A gradient norm below this share of the clipping norm was not clipped."""

ForwardArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a forward call."""


@dataclass(frozen=True)
class StepSignals:
    """Loss, gradient norm and token counts of a step over all ranks; None if unknown."""

    loss: float | None
    grad_norm: float | None
    """Norm before clipping; NaN or infinite if any gradient is."""
    tokens: int | None
    supervised_tokens: int | None
    is_stop_requested: bool
    """Whether any rank requests a stop."""

    @property
    def is_loss_finite(self) -> bool:
        """Whether every loss of the step is finite."""
        return self.loss is None or math.isfinite(self.loss)

    @property
    def are_gradients_finite(self) -> bool:
        """Whether every gradient of the step is finite."""
        return self.grad_norm is None or math.isfinite(self.grad_norm)


class SignalRecorder:
    """Records a model's losses and gradients with hooks, without changing them; synchronises only in `read`.

    `max_grad_norm` is 0 without clipping. With `is_loss_shared`, each rank divides its loss by the tokens of all ranks,
    so the losses of the ranks are summed.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, *, max_grad_norm: float = 0.0, is_loss_shared: bool = False
    ) -> None:
        self._device, self._max_grad_norm, self._is_loss_shared = device, max_grad_norm, is_loss_shared
        self._parameters = list(model.named_parameters())
        self._is_paused = self._is_queued = False
        self.is_loss_used = False
        """Whether gradients flowed through the model's own loss, so that this loss is optimised."""
        self.begin()
        # The compiler must not trace these hooks, because they change plain Python objects.
        before: Any = torch.compiler.disable(self._before_forward)
        after: Any = torch.compiler.disable(self._after_forward)
        self._handles = [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(after),
        ]

    def begin(self) -> None:
        """Start a new step."""
        self.batches: list[ForwardArguments] = []
        self._losses: list[Tensor] = []
        self._tokens: list[Tensor | int] = []
        self._supervised: list[Tensor] = []
        self._is_divided = False
        self._norms: tuple[list[str], Tensor] | None = None
        self._norms_now: tuple[list[str], Tensor] | None = None

    def close(self) -> None:
        """Remove the hooks and clear the recorded step."""
        for handle in self._handles:
            handle.remove()
        self.begin()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause recording inside the `with` block."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @torch.no_grad()
    def read(self, *, scale: float | None, is_stopping: bool) -> StepSignals:
        """Return the signals of the step with one device synchronisation; `scale` is the fp16 loss scale."""
        device = self._device
        self._norms_now = self._gradient_norms()
        zero = torch.zeros((), device=device)
        numbers = torch.stack(
            [
                zero + float(is_stopping),
                self._combined_loss().to(device) if self._losses else zero,
                zero if self._norms is None else self._norms[1].norm().to(device),
                zero if self._norms_now is None else self._norms_now[1].norm().to(device),
                *(sum((zero + count for count in counts), zero) for counts in (self._tokens, self._supervised)),
            ]
        )
        world = world_size()
        if world > 1:
            torch.distributed.all_reduce(numbers)
        stopping, loss, before, now, tokens, supervised = numbers.tolist()
        is_summed = self._is_loss_shared and self._is_divided
        return StepSignals(
            loss=(loss if is_summed else loss / world) if self._losses else None,
            grad_norm=self._norm(before, now, scale=scale or 1.0, is_single=world == 1),
            tokens=round(tokens) if self._tokens else None,
            supervised_tokens=round(supervised) if self._supervised else None,
            is_stop_requested=stopping > 0,
        )

    def bad_gradients(self) -> list[str]:
        """Return the parameters with NaN or infinite gradients, in the model's order; empty if they are unknown."""
        bad = _not_finite(self._norms)
        # Clipping by a NaN or infinite norm makes every gradient NaN, and a sum over ranks spreads NaN to all ranks.
        is_known = self._norms is not None and world_size() == 1
        return bad or (_not_finite(self._norms_now) if is_known else [])

    def _norm(self, before: float, now: float, *, scale: float, is_single: bool) -> float | None:
        """Return the norm before clipping, or None if it is unknown, as with several ranks."""
        if not math.isfinite(before + now):
            return before if not math.isfinite(before) else now
        if self._norms_now is None or not is_single:
            return None
        if self._norms is not None:
            return before / scale
        is_unclipped = not self._max_grad_norm or now < _UNCLIPPED_SHARE * self._max_grad_norm
        return now if is_unclipped else None

    def _combined_loss(self) -> Tensor:
        """Return the sum of the micro-batch losses if each is divided by the tokens of the step, else their mean."""
        losses = torch.stack([loss.to(self._device) for loss in self._losses])
        if self._is_divided:
            return losses.sum()
        if len(self._supervised) != len(self._losses):
            return losses.mean()
        weights = torch.stack([count.to(losses) for count in self._supervised])
        # The loss of rows without supervised tokens is 0 in some models and NaN in others; it is not changed.
        return (losses * weights).sum() / weights.sum().clamp(min=1) if len(losses) > 1 else losses[0]

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_paused or not module.training or not torch.is_grad_enabled():
            return
        self._is_queued = False
        self.batches.append((args, dict(kwargs)))
        while len(self.batches) > 1 and sum(map(_num_bytes, self.batches)) > _KEPT_BYTES:
            del self.batches[0]
        self._is_divided = kwargs.get("num_items_in_batch") is not None
        ids, mask, labels = (kwargs.get(name) for name in ("input_ids", "attention_mask", "labels"))
        if isinstance(mask, Tensor) and mask.dim() == 2:
            self._tokens.append(mask.sum())
        elif isinstance(ids, Tensor):
            self._tokens.append(ids.numel())
        if isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point():
            self._supervised.append((labels[:, 1:] != -100).sum())

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._is_paused or not module.training or not torch.is_grad_enabled():
            return
        loss = loss_of(output)
        if loss is not None:
            self._losses.append(loss.detach().float())
            if loss.requires_grad:
                loss.register_hook(self._at_loss)
        for tensor in tensors_of(output):
            if tensor.requires_grad and tensor is not loss:
                tensor.register_hook(self._at_backward)

    def _at_loss(self, gradient: Tensor) -> None:
        self.is_loss_used = True
        self._at_backward(gradient)

    def _at_backward(self, gradient: Tensor) -> None:
        """Queue a callback for the end of the backward pass, when gradients are complete but not yet clipped."""
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)  # pyright: ignore

    @torch.no_grad()
    def _after_backward(self) -> None:
        self._is_queued = False
        self._norms = self._gradient_norms()

    def _gradient_norms(self) -> tuple[list[str], Tensor] | None:
        """Return the names and norms of all gradients, or None if there are no gradients."""
        gradients = [(name, _plain(p.grad)) for name, p in self._parameters if p.grad is not None]
        gradients = [(name, gradient) for name, gradient in gradients if gradient.numel()]
        if not gradients:
            return None
        # In fp32, because the norm of many fp16 values can overflow fp16.
        norms = torch._foreach_norm([gradient for _, gradient in gradients], 2, dtype=torch.float32)  # pyright: ignore
        return [name for name, _ in gradients], torch.stack([norm.to(norms[0].device) for norm in norms])


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in a model's output, or None if the output has no loss."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple) and output:
        loss = output[0]
    return loss if isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point() else None


def _num_bytes(batch: ForwardArguments) -> int:
    args, kwargs = batch
    return sum(part.nbytes for part in (*args, *kwargs.values()) if isinstance(part, Tensor))


def _plain(gradient: Tensor) -> Tensor:
    """Return this rank's part of a gradient or weight as a dense tensor."""
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient  # pyright: ignore
    return local.coalesce().values() if local.is_sparse else local


def _not_finite(measured: tuple[list[str], Tensor] | None) -> list[str]:
    if measured is None:
        return []
    names, norms = measured
    return [name for name, norm in zip(names, norms.tolist(), strict=True) if not math.isfinite(norm)]


def world_size() -> int:
    """Return the number of ranks."""
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_distributed else 1


@dataclass(frozen=True)
class Fault:
    """The first tensor of a step that is NaN or infinite."""

    place: str | None
    """Kind and name of the tensor, such as `gradient of `...``; None if unknown."""
    remark: str = ""
    """The reason why the tensor is unknown."""


def locate_fault(
    model: nn.Module, batches: Sequence[ForwardArguments], *, bad_gradients: Sequence[str], is_loss_bad: bool
) -> Fault:
    """Return the first tensor of a step that is NaN or infinite. All ranks must call this and get the same result.

    `bad_gradients` are the parameters known to have NaN or infinite gradients, in the model's order. The model and the
    random state are not changed.
    """
    found = _find_here(model, batches, bad_gradients, is_loss_bad=is_loss_bad)
    if world_size() == 1:
        return found
    all_found: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(all_found, found)
    return next((each for each in all_found if each.place), found)


def _find_here(
    model: nn.Module, batches: Sequence[ForwardArguments], bad: Sequence[str], *, is_loss_bad: bool
) -> Fault:
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if not is_finite(_plain(weight)):
            return Fault(f"weight `{name}`")
    # If the loss is NaN or infinite, so are all gradients, and they do not locate the fault.
    known = Fault(f"gradient of `{bad[-1]}`") if bad and not is_loss_bad else None
    if _is_sharded(model):
        return known or Fault(None, "the tensor was not located, because the model is sharded")
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    try:
        # The random state is restored afterwards.
        with torch.random.fork_rng(devices=list(devices)), torch.compiler.set_stance("force_eager"):
            if place := _in_forward(model, batches):
                return Fault(place)
            place = None if known or is_loss_bad else _in_backward(model, batches)
    except RuntimeError as error:  # out of memory, or gradient checkpointing without gradients of single layers
        return known or Fault(None, f"recomputing the batch failed: {str(error).partition(chr(10))[0][:120]}")
    return known or Fault(place, "" if place else "the recomputed batch was finite")


def _is_sharded(model: nn.Module) -> bool:
    """Return True if each rank holds a part of every weight: FSDP, FSDP 2 or DeepSpeed stage 3."""
    is_wrapped = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    return is_wrapped or any(hasattr(p, "to_local") or hasattr(p, "ds_id") for p in model.parameters())


def _in_forward(model: nn.Module, batches: Sequence[ForwardArguments]) -> str | None:
    """Return the first module, innermost first, with a NaN or infinite output."""
    found: list[str] = []
    with checked_outputs(model, found), torch.no_grad():
        for args, kwargs in batches:
            is_good = all(map(is_finite, tensors_of(model(*args, **kwargs))))
            if found or not is_good:
                return found[0] if found else "the loss"
    return None


def _in_backward(model: nn.Module, batches: Sequence[ForwardArguments]) -> str | None:
    """Return the last parameter with a NaN or infinite gradient, which the backward pass reaches first."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for args, kwargs in batches:
        with torch.enable_grad():
            loss = loss_of(model(*args, **kwargs))
        if loss is None or not loss.requires_grad:
            return None
        gradients = torch.autograd.grad(loss, [p for _, p in trainable], allow_unused=True)
        pairs = zip(trainable, gradients, strict=True)
        bad = [name for (name, _), gradient in pairs if gradient is not None and not is_finite(gradient)]
        if bad:
            return f"gradient of `{bad[-1]}`"
    return None
