"""Prove that a model lies where it should, in the precision that was asked for, and holds only numbers."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tunewell.core.errors import UserError

_SHOWN = 5


def verify_placement(
    model: nn.Module, *, device: torch.device, dtype: torch.dtype, trainable_dtype: torch.dtype = torch.float32
) -> None:
    """Check every parameter and buffer: on the device, frozen in `dtype`, trained in `trainable_dtype`, all finite.

    Buffers, and what a model's class keeps in fp32 for reasons of its own, may be in fp32 too. Raises RuntimeError for
    a wrong place or precision and UserError for a NaN or an infinity, naming the first offenders and their number.
    """
    wrong = [*_misplaced(model, device), *_imprecise(model, dtype, trainable_dtype)]
    if wrong:
        raise RuntimeError(
            f"the model was to be on {device} with frozen parameters in {_short(dtype)} and trained ones in "
            f"{_short(trainable_dtype)}, but {_listed(wrong)}"
        )
    if broken := not_finite_names(model):
        listed = _listed([f"`{name}` holds a NaN or an infinity" for name in broken])
        raise UserError(
            f"the model's weights are damaged: {listed}",
            fix="get the model again; a run that diverged may have written this one",
        )


def not_finite_names(model: nn.Module) -> list[str]:
    """Name every parameter and buffer that holds a NaN or an infinity."""
    tensors = [(name, tensor) for name, tensor in _tensors(model) if tensor.is_floating_point() and tensor.numel()]
    # All verdicts are read back at once: on a GPU each reading waits for the work before it.
    fine = torch.stack([_is_finite(tensor) for _, tensor in tensors]).tolist() if tensors else []
    return [name for (name, _), is_fine in zip(tensors, fine, strict=True) if not is_fine]


def _is_finite(tensor: Tensor) -> Tensor:
    # An infinity or NaN anywhere survives taking the extremes, which needs no mask as large as the tensor.
    low, high = torch.aminmax(tensor.detach())
    return torch.isfinite(low) & torch.isfinite(high)


def _misplaced(model: nn.Module, device: torch.device) -> Iterator[str]:
    for name, tensor in _tensors(model):
        if tensor.device.type == "meta":
            yield f"`{name}` was never filled"
        elif tensor.device.type != device.type or (device.index is not None and tensor.device.index != device.index):
            yield f"`{name}` is on {tensor.device}"


def _imprecise(model: nn.Module, dtype: torch.dtype, trainable_dtype: torch.dtype) -> Iterator[str]:
    kept = _kept_in_fp32(model)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            yield f"`{name}` is in {_short(parameter.dtype)}"
            continue
        wanted = trainable_dtype if parameter.requires_grad else dtype
        is_kept = parameter.dtype == torch.float32 and any(part in name for part in kept)
        if parameter.dtype != wanted and not is_kept:
            yield f"`{name}` is in {_short(parameter.dtype)}"
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and buffer.dtype not in (dtype, torch.float32):
            yield f"`{name}` is in {_short(buffer.dtype)}"
        elif "inv_freq" in name and buffer.dtype != torch.float32:
            yield f"`{name}` is in {_short(buffer.dtype)}, too coarse for positions"


def _kept_in_fp32(model: nn.Module) -> set[str]:
    """Name what the classes of a model keep in fp32 whatever precision is asked for."""
    names: set[str] = set()
    for module in model.modules():
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            names.update(getattr(module, attribute, None) or ())
    return names


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _listed(wrong: list[str]) -> str:
    more = f", and {len(wrong) - _SHOWN:,} more" if len(wrong) > _SHOWN else ""
    return f"{', '.join(wrong[:_SHOWN])}{more} ({len(wrong):,} in all)"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
