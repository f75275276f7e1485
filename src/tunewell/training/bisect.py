"""Find the document, layer or weight that made a step NaN, by recomputing the step with finite checks."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tunewell.data.batches import TokenizedDocuments, make_batch
from tunewell.machine.out_of_memory import free_memory, is_out_of_memory
from tunewell.models.load import not_finite_names
from tunewell.training.step import TrainableModel


@dataclass(frozen=True)
class Cause:
    """The cause of a NaN."""

    tensor: str | None
    """The first non-finite tensor; None if every tensor was finite when the step was recomputed."""
    documents: tuple[int, ...] = ()
    """Documents that each cause the NaN alone, or the whole micro-batch if no single document does."""
    are_weights_bad: bool = False


def find_cause(
    learner: TrainableModel, split: TokenizedDocuments, groups: Sequence[np.ndarray], *, number: int
) -> Cause:
    """Recompute the micro-batches of a step until one is not finite. Weights and optimizer state do not change."""
    if broken := not_finite_names(learner.model):
        return Cause(f"weight `{broken[0]}`", are_weights_bad=True)
    try:
        for index, group in enumerate(groups):
            check = partial(_first_not_finite, learner, split, number=number, index=index)
            if cause := _cause_in(learner, [int(document) for document in group], check):
                return cause
    finally:
        learner.drop_gradients()
    return Cause(None)


def _cause_in(learner: TrainableModel, group: list[int], check: Callable[[list[int]], str | None]) -> Cause | None:
    """Search one micro-batch. Search its halves separately if the checks run out of memory."""
    try:
        where = check(group)
        if where is None:
            return None
        alone = [document for document in group if len(group) == 1 or check([document])]
        return Cause(where, tuple(alone or group))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        learner.drop_gradients()
        free_memory(error)
    half = len(group) // 2
    for part in (group[:half], group[half:]) if half else ():
        if cause := _cause_in(learner, part, check):
            return cause
    return None


def _first_not_finite(
    learner: TrainableModel, split: TokenizedDocuments, group: list[int], *, number: int, index: int
) -> str | None:
    """Return the name of the first non-finite tensor of the forward or backward pass, or None if all are finite."""
    learner.drop_gradients()
    batch = make_batch(split, group)
    found: list[str] = []
    hooked = learner.hooks.around_batch(number, batch, learner.model)
    with checked_outputs(learner.model, found), learner.uncompiled(), hooked:
        learner.model.train()
        loss = learner.compute(batch, number=number, index=index)
        if found:
            return found[0]
        if not math.isfinite(float(loss.detach())):
            return "the loss"
        with learner.stance(batch):
            loss.backward()
    # The backward pass runs from the last layer to the first, so the last bad parameter became non-finite first.
    broken = [name for name, gradient in learner.optimizer.gradients().items() if not is_finite(gradient)]
    return f"gradient of `{broken[-1]}`" if broken else None


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
