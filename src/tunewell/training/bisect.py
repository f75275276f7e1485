"""Find what made a step's numbers go bad: compute it again, with checks on every layer, document by document."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tunewell.data.batches import TokenizedDocuments, make_batch
from tunewell.models.placement import not_finite_names
from tunewell.training.memory import free_memory, is_out_of_memory
from tunewell.training.step import TrainableModel


@dataclass(frozen=True)
class Cause:
    """What was found to be at fault."""

    place: str | None
    """The layer and tensor that went bad first; None where it did not happen again."""
    documents: tuple[int, ...] = ()
    """Documents with which it happens, each by itself or, where none does alone, together."""
    are_weights_bad: bool = False


def find_cause(
    learner: TrainableModel, split: TokenizedDocuments, groups: Sequence[np.ndarray], *, number: int
) -> Cause:
    """Compute the micro-batches of a step again until one goes bad; nothing of the run is changed."""
    if broken := not_finite_names(learner.model):
        return Cause(f"weight `{broken[0]}`", are_weights_bad=True)
    try:
        for place, group in enumerate(groups):
            if cause := _cause_in(learner, split, [int(document) for document in group], number=number, place=place):
                return cause
    finally:
        learner.drop_gradients()
    return Cause(None)


def _cause_in(
    learner: TrainableModel, split: TokenizedDocuments, group: list[int], *, number: int, place: int
) -> Cause | None:
    """Look for a cause in one micro-batch; in halves of it, where it needs more memory with checks than without."""
    try:
        where = _goes_bad_at(learner, split, group, number=number, place=place)
        if where is None:
            return None
        alone = [
            document
            for document in group
            if len(group) == 1 or _goes_bad_at(learner, split, [document], number=number, place=place)
        ]
        return Cause(where, tuple(alone or group))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        learner.drop_gradients()
        free_memory(error)
    half = len(group) // 2
    for part in (group[:half], group[half:]) if half else ():
        if cause := _cause_in(learner, split, part, number=number, place=place):
            return cause
    return None


def _goes_bad_at(
    learner: TrainableModel, split: TokenizedDocuments, group: Any, *, number: int, place: int
) -> str | None:
    """Name the first tensor that is not finite, forwards or, where all is well there, backwards."""
    learner.drop_gradients()
    batch = make_batch(split, group)
    found: list[str] = []
    with _checked(learner.model, found), learner.uncompiled():
        learner.model.train()
        loss = learner.compute(batch, number=number, place=place)
        if found:
            return found[0]
        if not math.isfinite(float(loss.detach())):
            return "the loss"
        with learner.stance(batch):
            loss.backward()
    # The way back begins at the end: the last parameter that is bad was the first to be so.
    bad = [name for name, p in learner.parameters.items() if p.grad is not None and not _is_finite(p.grad)]
    return f"gradient of `{bad[-1]}`" if bad else None


@contextmanager
def _checked(model: nn.Module, found: list[str]) -> Iterator[None]:
    """Write down the first module whose output is not finite, innermost first."""

    def hook(name: str) -> Any:
        def check(module: nn.Module, inputs: Any, output: Any) -> None:
            if found:
                return
            for tensor in _tensors(output):
                if tensor.is_floating_point() and not _is_finite(tensor):
                    found.append(f"output of `{name}`")
                    return

        return check

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
