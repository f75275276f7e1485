"""Find the first module of a model whose output is NaN or infinite.

This module imports only torch: its source is also run by other trainers (`features/engines`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def checked_outputs(model: nn.Module, found: list[str]) -> Iterator[None]:
    """Append to `found` the name of the first module with a non-finite output. Inner modules are checked first."""

    def check(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not found and not all(map(is_finite, tensors_of(output))):
            found.append(f"output of `{name}`")

    handles = [module.register_forward_hook(partial(check, name)) for name, module in model.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | tuple | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(part)


def is_finite(tensor: Tensor) -> bool:
    """Return whether every value of a tensor is finite. Integer tensors always are."""
    return bool(torch.isfinite(tensor).all())
