"""What a model shows while another trainer trains it: batches, losses and gradients, taken without waiting for it.

forward  -> batch kept by reference, loss kept on the device
backward -> length of every gradient, before anything is clipped; kept on the device
read     -> all of it in one reading, the only time that the device is waited for
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_KEPT_BYTES = 64 * 2**20
"""Of a step's batches: ids take a few, and pictures must not fill the device."""
_NEARLY = 0.999
"""Share of the longest allowed length up to which a gradient was not clipped."""

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""What a model was called with."""


@dataclass(frozen=True)
class Taken:
    """The numbers of a step, of all processes together; None is what cannot be known."""

    loss: float | None
    grad_norm: float | None
    """Before clipping; one that is not finite where any gradient is not."""
    tokens: int | None
    supervised_tokens: int | None
    is_stop_asked: bool
    """Whether any process wants to stop."""

    @property
    def is_loss_finite(self) -> bool:
        """Whether every loss of the step is a number."""
        return self.loss is None or math.isfinite(self.loss)

    @property
    def are_gradients_finite(self) -> bool:
        """Whether every gradient of the step is a number."""
        return self.grad_norm is None or math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class Rules:
    """What the trainer does with losses and gradients."""

    device: torch.device
    max_grad_norm: float = 0.0
    """0 where nothing is clipped."""
    is_loss_shared: bool = False
    """Whether each process's loss is divided by the tokens of all, so that losses add up."""


class Signals:
    """Listens to a model by hooks. Nothing is changed, and nothing is read from the device until `read`."""

    def __init__(self, model: nn.Module, rules: Rules) -> None:
        self._rules = rules
        self._parameters = list(model.named_parameters())
        self._is_paused = self._is_queued = False
        self.is_loss_used = False
        """Whether gradients came back through the model's own loss: then it is what is trained on."""
        self.begin()
        # A compiler is not to look into these: they leave traces in plain Python objects.
        before: Any = torch.compiler.disable(self._before_forward)
        after: Any = torch.compiler.disable(self._after_forward)
        self._handles = [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(after),
        ]

    def begin(self) -> None:
        """Forget the step before."""
        self.batches: list[Batch] = []
        self._losses: list[Tensor] = []
        self._tokens: list[Tensor | int] = []
        self._supervised: list[Tensor] = []
        self._is_divided = False
        self._lengths: tuple[list[str], Tensor] | None = None
        self._lengths_now: tuple[list[str], Tensor] | None = None

    def close(self) -> None:
        """Take the hooks away and forget everything."""
        for handle in self._handles:
            handle.remove()
        self.begin()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Look away from what is computed meanwhile."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @torch.no_grad()
    def read(self, *, scale: float | None, is_stopping: bool) -> Taken:
        """Read the step's numbers, which waits for the device once; `scale` is what an fp16 scaler multiplied by."""
        device = self._rules.device
        self._lengths_now = self._measured()
        zero = torch.zeros((), device=device)
        numbers = torch.stack(
            [
                zero + float(is_stopping),
                self._combined_loss().to(device) if self._losses else zero,
                zero if self._lengths is None else self._lengths[1].norm().to(device),
                zero if self._lengths_now is None else self._lengths_now[1].norm().to(device),
                *(_total(counts, zero) for counts in (self._tokens, self._supervised)),
            ]
        )
        world = world_size()
        if world > 1:
            torch.distributed.all_reduce(numbers)
        stopping, loss, before, now, tokens, supervised = numbers.tolist()
        is_added = self._rules.is_loss_shared and self._is_divided
        return Taken(
            loss=(loss if is_added else loss / world) if self._losses else None,
            grad_norm=self._norm(before, now, scale=scale or 1.0, is_alone=world == 1),
            tokens=round(tokens) if self._tokens else None,
            supervised_tokens=round(supervised) if self._supervised else None,
            is_stop_asked=stopping > 0,
        )

    def bad_gradients(self) -> list[str]:
        """Name the parameters whose gradients were not finite, in the model's order; none where that is not known."""
        bad = _not_finite(self._lengths)
        # Clipping by a length that is not finite spoils every gradient, and so does what other processes add.
        is_own = self._lengths is not None and world_size() == 1
        return bad or (_not_finite(self._lengths_now) if is_own else [])

    def _norm(self, before: float, now: float, *, scale: float, is_alone: bool) -> float | None:
        """Tell the length before clipping from what was measured; of several processes only the trainer knows it."""
        if not math.isfinite(before + now):
            return before if not math.isfinite(before) else now
        if self._lengths_now is None or not is_alone:
            return None
        if self._lengths is not None:
            return before / scale
        limit = self._rules.max_grad_norm
        return now if not limit or now < _NEARLY * limit else None

    def _combined_loss(self) -> Tensor:
        """Make one loss of the micro-batches': they add up where each is divided by the tokens of all."""
        losses = torch.stack([loss.to(self._rules.device) for loss in self._losses])
        if self._is_divided:
            return losses.sum()
        if len(self._supervised) != len(self._losses):
            return losses.mean()
        weights = torch.stack([count.to(losses) for count in self._supervised])
        # A loss of rows without anything to learn is 0 to some and NaN to others; it stays what it is.
        return (losses * weights).sum() / weights.sum().clamp(min=1) if len(losses) > 1 else losses[0]

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_paused or not module.training or not torch.is_grad_enabled():
            return
        self._is_queued = False
        self.batches.append((args, dict(kwargs)))
        while len(self.batches) > 1 and sum(map(_size, self.batches)) > _KEPT_BYTES:
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
        """Ask to be called when the way back is done: then gradients are whole, and not clipped yet."""
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)  # pyright: ignore

    @torch.no_grad()
    def _after_backward(self) -> None:
        self._is_queued = False
        self._lengths = self._measured()

    def _measured(self) -> tuple[list[str], Tensor] | None:
        """Give the length of every gradient that there is."""
        held = [(name, _plain(p.grad)) for name, p in self._parameters if p.grad is not None]
        held = [(name, gradient) for name, gradient in held if gradient.numel()]
        if not held:
            return None
        # In fp32, since the length of many fp16 numbers is often none of them.
        lengths = torch._foreach_norm([gradient for _, gradient in held], 2, dtype=torch.float32)  # pyright: ignore
        return [name for name, _ in held], torch.stack([length.to(lengths[0].device) for length in lengths])


def loss_of(output: Any) -> Tensor | None:
    """Find the loss in what a model gives; None where it gives none."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple) and output:
        loss = output[0]
    return loss if isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point() else None


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Give every tensor of floats in a nest of tuples, lists and dicts."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict | tuple | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(part)


def _size(batch: Batch) -> int:
    args, kwargs = batch
    return sum(part.nbytes for part in (*args, *kwargs.values()) if isinstance(part, Tensor))


def _total(counts: Sequence[Tensor | int], zero: Tensor) -> Tensor:
    return sum((count.to(zero) if isinstance(count, Tensor) else zero + count for count in counts), zero)


def _plain(gradient: Tensor) -> Tensor:
    """Give what this process holds of a gradient, as one block of numbers."""
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient  # pyright: ignore
    return local.coalesce().values() if local.is_sparse else local


def _not_finite(measured: tuple[list[str], Tensor] | None) -> list[str]:
    if measured is None:
        return []
    names, lengths = measured
    return [name for name, length in zip(names, lengths.tolist(), strict=True) if not math.isfinite(length)]


def world_size() -> int:
    """Give the number of processes that train together."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else 1


# Name the layer and tensor that went bad first: look at the weights, then compute the batch again with checks.


@dataclass(frozen=True)
class Culprit:
    """What went bad first."""

    place: str | None
    """The layer and tensor; None where they are not known."""
    remark: str = ""
    """Why they are not."""


@torch.no_grad()
def bad_weight(model: nn.Module) -> str | None:
    """Name the first parameter or buffer that is not finite."""
    weights = (*model.named_parameters(), *model.named_buffers())
    return next((name for name, weight in weights if weight.is_floating_point() and not _is_finite(weight)), None)


def find_culprit(
    model: nn.Module, batches: Sequence[Batch], *, bad_gradients: Sequence[str], is_loss_bad: bool
) -> Culprit:
    """Say what went bad first in a step; every process of a training must ask, and all are told the same.

    `bad_gradients` are the parameters whose gradients are known to be bad, in the model's order. Nothing is changed:
    random numbers are drawn as if this had not happened.
    """
    found = _find_here(model, batches, bad_gradients, is_loss_bad=is_loss_bad)
    if world_size() == 1:
        return found
    all_found: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(all_found, found)
    return next((each for each in all_found if each.place), found)


def _find_here(model: nn.Module, batches: Sequence[Batch], bad: Sequence[str], *, is_loss_bad: bool) -> Culprit:
    if weight := bad_weight(model):
        return Culprit(f"weight `{weight}`")
    # Gradients of a loss that is not finite are none either, and say nothing.
    known = Culprit(f"gradient of `{bad[-1]}`") if bad and not is_loss_bad else None
    if is_spread(model):
        return known or Culprit(None, "a model that is spread over processes is not computed again")
    try:
        with _as_if_never(model):
            if place := _in_forward(model, batches):
                return Culprit(place)
            place = None if known or is_loss_bad else _in_backward(model, batches)
    except RuntimeError as error:  # out of memory, or layers that are computed twice and give no single gradients
        return known or Culprit(None, f"it could not be computed again: {str(error).partition(chr(10))[0][:120]}")
    return known or Culprit(place, "" if place else "computed again, it was finite")


def is_spread(model: nn.Module) -> bool:
    """Whether each process holds a part of every weight."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        return True
    return any(hasattr(p, "to_local") or hasattr(p, "ds_id") for p in model.parameters())  # FSDP 2, DeepSpeed's stage 3


def _in_forward(model: nn.Module, batches: Sequence[Batch]) -> str | None:
    """Name the first module whose output is not finite, innermost first."""
    found: list[str] = []

    def check(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not found and not all(map(_is_finite, tensors_of(output))):
                found.append(f"output of `{name}`" if name else "the loss")

        return hook

    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            stack.callback(module.register_forward_hook(check(name)).remove)
        for args, kwargs in batches:
            model(*args, **kwargs)
            if found:
                return found[0]
    return None


def _in_backward(model: nn.Module, batches: Sequence[Batch]) -> str | None:
    """Name the parameter whose gradient goes bad first: the way back begins at the model's end."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for args, kwargs in batches:
        with torch.enable_grad():
            loss = loss_of(model(*args, **kwargs))
        if loss is None or not loss.requires_grad:
            return None
        gradients = torch.autograd.grad(loss, [p for _, p in trained], allow_unused=True)
        pairs = zip(trained, gradients, strict=True)
        bad = [name for (name, _), gradient in pairs if gradient is not None and not _is_finite(gradient)]
        if bad:
            return f"gradient of `{bad[-1]}`"
    return None


@contextmanager
def _as_if_never(model: nn.Module) -> Iterator[None]:
    """Compute without a compiler, and put random numbers back to where they were."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)), torch.compiler.set_stance("force_eager"):
        yield


def _is_finite(tensor: Tensor) -> bool:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore
    return bool(torch.isfinite(local).all())
