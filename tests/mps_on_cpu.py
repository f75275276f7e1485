"""An Apple GPU for tests on machines without one: CPU tensors that report the device `mps` and have its limits.

    torch function mode   devices named in Python: `mps` becomes the CPU, and the result is marked as being on `mps`
    torch dispatch mode   every operator, also in the backward pass: results of marked tensors are marked

As on a Mac: float64 is refused, tensors of two devices cannot be mixed, nothing is compiled, no memory can be pinned.
The numbers are those of the CPU, so a run must end with the same losses.
What differs on real hardware, such as its rounding and the bugs of its kernels, cannot be tested here.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # looks at the types that are replaced below
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from transformers import PreTrainedModel

MPS = torch.device("mps", 0)
_DEVICE_OF = torch.Tensor.device.__get__
_MEMORY_BYTES = 16 << 30
_Change = Callable[[str, Any], Any]


def on_mps(tensor: Tensor) -> bool:
    """Return whether a tensor is marked. The mark belongs to its storage, which all its views share."""
    return getattr(tensor.untyped_storage(), "is_mps", False)


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.dtype in (torch.float64, torch.complex128):
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. Please use "
                "float32 instead."
            )
        value.untyped_storage().is_mps = True  # type: ignore[attr-defined]
    return value


def _is_mps(value: Any) -> bool:
    return isinstance(value, torch.device | str) and torch.device(value).type == "mps"


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] in ("cpu", "mps"))


class _Devices(TorchFunctionMode):
    """Lets Python code name the device `mps`, and shows it as the device of marked tensors."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _DEVICE_OF:
            return MPS if on_mps(args[0]) else func(*args)
        if func is torch.Tensor.to:
            return _moved(args[0], [*args[1:], *kwargs.values()])
        if func is torch.Tensor.cpu:
            return _moved(args[0], ["cpu"])
        if func is torch.Tensor.numpy and on_mps(args[0]) and not kwargs.get("force"):
            raise TypeError("can't convert mps:0 device type tensor to numpy. Use Tensor.cpu() to copy it to the host.")
        if kwargs.get("pin_memory") or func is torch.Tensor.pin_memory:
            raise RuntimeError("Cannot access accelerator device when none is available.")
        if _is_mps(kwargs.get("device")):
            return _mark(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)


def _moved(tensor: Tensor, values: list[Any]) -> Any:
    """Return the result of `Tensor.to` or `Tensor.cpu`: a copy if the tensor changes its device or dtype."""
    others = [value for value in values if isinstance(value, Tensor)]
    devices = [*filter(_is_device, values), *("mps" if on_mps(value) else "cpu" for value in (*others, tensor))]
    dtypes = [*(value for value in values if isinstance(value, torch.dtype)), *(value.dtype for value in others)]
    is_leaving = on_mps(tensor) and not _is_mps(devices[0])
    if dtypes and not is_leaving:  # converted on the CPU before it moves there, as torch does
        tensor, dtypes = torch.Tensor.to(tensor, dtypes[0]), []
    if on_mps(tensor) != _is_mps(devices[0]):
        _MOVING.append(devices[0])
        try:
            tensor = torch.clone(tensor)
        finally:
            _MOVING.pop()
    return torch.Tensor.to(tensor, dtypes[0]) if dtypes else tensor


_MOVING: list[Any] = []
"""The target of the copy that is being made; its result is on that device, whatever its source."""


class _Operators(TorchDispatchMode):
    """Marks the results of marked tensors, and refuses what an Apple GPU refuses."""

    def __init__(self, change: _Change | None) -> None:
        super().__init__()
        self._change = change

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        marks = {on_mps(tensor) for tensor in tensors if tensor.dim() > 0}
        out = func(*args, **(kwargs or {}))
        if _MOVING:
            return tree_map(_mark, out) if _is_mps(_MOVING[-1]) else out
        if "copy_" in func._schema.name:
            return out
        if marks == {True, False}:
            raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found mps:0 and cpu!")
        if any(map(on_mps, tensors)):
            out = out if self._change is None else self._change(func._schema.name, out)
            return tree_map(_mark, out)
        return out


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> "_Generator":
        return super().__new__(cls, "cpu" if _is_mps(device) else device)


_RUN_BACKWARD: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    with _Devices():  # torch leaves the mode, but gradient checkpointing computes layers again
        return _RUN_BACKWARD(*args, **kwargs)


_FROM_PRETRAINED: Any = PreTrainedModel.from_pretrained


def _from_pretrained(cls: type, *args: Any, device_map: Any = None, **kwargs: Any) -> Any:
    """Load on the CPU, because the threads that transformers loads with do not have the modes; then move the model."""
    found = _FROM_PRETRAINED.__func__(cls, *args, **kwargs)
    if device_map is not None:
        (found[0] if isinstance(found, tuple) else found).to(device_map[""])
    return found


def _refuse_compiler(*_: Any, **__: Any) -> Any:
    raise RuntimeError("there is no compiled backend for mps")


@contextmanager
def mps_on_cpu(change: _Change | None = None, *, memory_bytes: int = _MEMORY_BYTES) -> Iterator[None]:
    """Simulate an Apple GPU in this process. `change` may replace the result of an operator, as a bug would."""
    functions = {
        "recommended_max_memory": lambda: memory_bytes,
        "driver_allocated_memory": lambda: 1 << 20,
        "current_allocated_memory": lambda: 1 << 20,
        "empty_cache": lambda: None,
        "synchronize": lambda: None,
        "manual_seed": lambda seed: None,
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": torch.set_rng_state,
    }
    with ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(mock.patch.object(torch.mps, name, function))
        stack.enter_context(mock.patch.object(torch.backends.mps, "is_available", lambda: True))
        stack.enter_context(mock.patch.object(torch, "compile", _refuse_compiler))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        # Gradient checkpointing saves the device of a tensor outside of the function mode, and compares it inside.
        checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
        stack.enter_context(mock.patch.dict(checks, {"default": lambda tensor: {}}))
        stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", _run_backward))
        stack.enter_context(mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(_from_pretrained)))
        stack.enter_context(_Operators(change))
        stack.enter_context(_Devices())
        yield
