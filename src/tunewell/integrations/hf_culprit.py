"""Name the layer and tensor that went bad first: look at the weights, then compute the batch again with checks."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tunewell.integrations.hf_signals import Batch, loss_of, tensors_of, world_size


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
