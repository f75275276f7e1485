"""Verify a loaded model: every weight on the right device, in the right dtype, and finite."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tunewell.core.errors import UserError

_SHOWN = 5


def verify_placement(
    model: nn.Module, *, device: torch.device, dtype: torch.dtype, trainable_dtype: torch.dtype = torch.float32
) -> None:
    """Check every parameter and buffer: on `device`, frozen in `dtype`, trainable in `trainable_dtype`, all finite.

    Buffers, and modules that the model's class keeps in fp32, may be in fp32 too. Integer buffers may have any dtype:
    a quantised layer keeps its packed weight in one. Raises RuntimeError for a wrong device or dtype, and UserError for
    a NaN or an infinity.
    """
    wrong = [*_on_wrong_device(model, device), *_in_wrong_dtype(model, dtype, trainable_dtype)]
    if wrong:
        raise RuntimeError(
            f"the model should be on {device} with frozen parameters in {_short(dtype)} and trainable ones in "
            f"{_short(trainable_dtype)}, but {_listed(wrong)}"
        )
    if broken := not_finite_names(model):
        listed = _listed([f"`{name}` holds a NaN or an infinity" for name in broken])
        raise UserError(
            f"the model's weights are damaged: {listed}",
            fix="download the model again; a run that diverged may have written this one",
        )


def not_finite_names(model: nn.Module) -> list[str]:
    """Return the names of parameters and buffers that hold a NaN or an infinity."""
    tensors = [(name, tensor) for name, tensor in _tensors(model) if tensor.is_floating_point() and tensor.numel()]
    # Read back at once: on a GPU each read waits for the work before it.
    are_finite = torch.stack([_is_finite(tensor) for _, tensor in tensors]).tolist() if tensors else []
    return [name for (name, _), is_finite in zip(tensors, are_finite, strict=True) if not is_finite]


def _is_finite(tensor: Tensor) -> Tensor:
    # The minimum and maximum keep any NaN or infinity, and need no mask as large as the tensor.
    low, high = torch.aminmax(tensor.detach())
    return torch.isfinite(low) & torch.isfinite(high)


def _on_wrong_device(model: nn.Module, device: torch.device) -> Iterator[str]:
    for name, tensor in _tensors(model):
        if tensor.device.type == "meta":
            yield f"`{name}` was never loaded"
        elif tensor.device.type != device.type or (device.index is not None and tensor.device.index != device.index):
            yield f"`{name}` is on {tensor.device}"


def _in_wrong_dtype(model: nn.Module, dtype: torch.dtype, trainable_dtype: torch.dtype) -> Iterator[str]:
    kept = _kept_in_fp32(model)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            yield f"`{name}` is in {_short(parameter.dtype)}"
            continue
        expected = trainable_dtype if parameter.requires_grad else dtype
        is_kept = parameter.dtype == torch.float32 and any(part in name for part in kept)
        if parameter.dtype != expected and not is_kept:
            yield f"`{name}` is in {_short(parameter.dtype)}"
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and buffer.dtype not in (dtype, torch.float32):
            yield f"`{name}` is in {_short(buffer.dtype)}"
        elif "inv_freq" in name and buffer.dtype != torch.float32:
            yield f"`{name}` is in {_short(buffer.dtype)}, too coarse for positions"


def _kept_in_fp32(model: nn.Module) -> set[str]:
    """Return the name parts of modules that the model's classes keep in fp32 in every precision."""
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
