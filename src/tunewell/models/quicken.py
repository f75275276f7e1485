"""Let parts of a model be computed in fewer passes on a CPU, where each pass over memory costs.

Set on the modules of one model, and taken off again; nothing of transformers is changed. What is not known to be the
same stays as it is, and the probe before the first step compares the whole with transformers' own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

from tunewell.models import norms, rotary

_KINDS: tuple[tuple[Callable[[nn.Module], bool], Callable[..., Any]], ...] = (
    (norms.is_rms_norm, norms.forward),
    (rotary.is_rotary_attention, rotary.forward),
)


def quicken(model: nn.Module) -> int:
    """Quicken what can be; give how many modules are. Calling it twice does no harm."""
    for module in model.modules():
        for is_it, forward in _KINDS:
            if "forward" not in vars(module) and is_it(module):
                module.forward = MethodType(forward, module)
    return len(_quickened(model))


@contextmanager
def stock_modules(model: nn.Module) -> Iterator[None]:
    """Let a model's modules be computed as transformers does."""
    found = [(module, module.forward) for module in _quickened(model)]
    for module, _ in found:
        del module.forward
    try:
        yield
    finally:
        for module, forward in found:
            module.forward = forward


def _quickened(model: nn.Module) -> list[nn.Module]:
    ours = {forward for _, forward in _KINDS}
    return [module for module in model.modules() if getattr(vars(module).get("forward"), "__func__", None) in ours]
