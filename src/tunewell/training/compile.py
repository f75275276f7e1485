"""Compile the decoder layers for CUDA once it pays: the first steps run at once, uncompiled, and are timed.

Each layer is compiled whole and for one shape, so that all of them share one piece of machine code; every micro-batch
is filled up to that shape. What the compiler makes is kept on disk by torch, so a second start is quicker. Where a
layer computes for less time than its launches take, they are recorded once and replayed: CUDA graphs.
"""

import threading
from dataclasses import dataclass

import torch
from torch import nn

from tunewell.data.batches import DataOrder, FixedShape, micro_batches
from tunewell.models.loss import loss_and_grad_fused
from tunewell.training.step import TrainableModel

# Measured on an H200 (torch 2.11): 20 to 60 s for models of 0.02 to 8 B parameters; a third of the time is saved.
_COMPILE_SECONDS = 60.0
_SAVED_SHARE = 0.3
_LAUNCH_BOUND_FLOP = 1.0e12
"""Of a layer, both ways: an H200 takes some 3 ms for it, and a host some 4 ms to launch a layer's 110 kernels."""
_TIMED_STEPS = 3
_FIRST_CUT = 4
_ROOM = 32


@dataclass
class Compiler:
    """Decides when to compile, from the time that steps take, and does it."""

    wish: str
    """`auto`, `on` or `off`."""
    num_steps: int
    _seconds: float = 0.0
    _timed: int = 0

    def budget(self, learner: TrainableModel, wanted: int) -> int:
        """Give the size of micro-batches: while it is still open whether to compile, small ones.

        Uncompiled layers keep more for the way back, and the first steps should not be what decides how much memory a
        run needs.
        """
        is_open = self._is_possible(learner) and self._timed <= _TIMED_STEPS
        return max(wanted // _FIRST_CUT, min(learner.longest, wanted)) if is_open else wanted

    def is_due(self, learner: TrainableModel, *, step: int, seconds: float) -> bool:
        """Whether to compile after this step; the first steps are not counted, since they warm things up."""
        if not self._is_possible(learner):
            return False
        if self.wish == "on":
            return True
        self._timed += 1
        if self._timed > 1:
            self._seconds += seconds
        if self._timed <= _TIMED_STEPS:
            return False
        mean = self._seconds / (self._timed - 1)
        is_worth_it = (self.num_steps - step) * mean * _SAVED_SHARE > 2 * _COMPILE_SECONDS
        return learner.world.any(is_worth_it)  # clocks differ, and all must cut their steps alike

    def _is_possible(self, learner: TrainableModel) -> bool:
        return self.wish != "off" and learner.device.type == "cuda" and learner.shape is None and learner.may_compile

    def most_documents(self, learner: TrainableModel) -> int | None:
        """Give how many documents a micro-batch may have so that it fits the compiled shape with its filling."""
        return None if learner.shape is None else learner.shape.documents - 1

    def run(self, learner: TrainableModel, order: DataOrder, *, budget: int) -> str:
        """Compile the layers and the loss for one shape; give what was done in words."""
        learner.shape = fixed_shape(order, budget=budget, longest=learner.longest)
        layers = decoder_layers(learner.model)
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        torch.cuda.empty_cache()  # what uncompiled steps left is of other sizes
        learner.uses_graphs = can_be_graphs(learner, layers)
        for layer in layers:
            layer.compile(fullgraph=True, dynamic=False, mode="reduce-overhead" if learner.uses_graphs else None)
        learner.fused_loss = torch.compile(loss_and_grad_fused, dynamic=False)
        recorded = ", launches recorded in CUDA graphs" if learner.uses_graphs else ""
        shape = learner.shape
        return f"compiling {len(layers)} layers for {shape.tokens:,} tokens in {shape.documents} documents{recorded}"


def can_be_graphs(learner: TrainableModel, layers: list[nn.Module]) -> bool:
    """Whether to record the launches of the layers: where they take the time, and nothing differs between two runs.

    What is drawn at random would be drawn as it was recorded, and layers that are computed again on the way back are
    launched in another order. What graphs keep is missing elsewhere, so none once it was short beside them. torch
    before 2.13 keeps its graphs by thread, for the main one alone.
    """
    assert learner.shape is not None
    is_in_main = threading.current_thread() is threading.main_thread()
    is_recomputing = getattr(learner.model, "is_gradient_checkpointing", False)
    if not learner.may_use_graphs or learner.has_dropout or is_recomputing or not is_in_main:
        return False
    weights = max((sum(own.numel() for own in layer.parameters()) for layer in layers), default=0)
    return 0 < 6 * weights * learner.shape.tokens < _LAUNCH_BOUND_FLOP


def fixed_shape(order: DataOrder, *, budget: int, longest: int) -> FixedShape:
    """Choose a shape that the micro-batches of the first steps fit into; the rest is cut to it.

    Documents longer than `budget` have micro-batches to themselves, and run uncompiled, unless most of the tokens are
    theirs: else all the others would be filled up to the longest of them.
    """
    longest = min(longest, budget)
    steps = order.steps_of_epoch(0)[:64]
    groups = [group for step in steps for group in micro_batches(step, order.lengths, budget)]
    sizes = [int(order.lengths[group].sum()) for group in groups]
    within = [size for size in sizes if size <= budget]
    tokens = -(-max(within if 2 * sum(within) >= sum(sizes) else sizes) // 128) * 128
    most = max(len(group) for group in groups)
    filling = -(-tokens // longest)
    return FixedShape(tokens, -(-(most + min(filling, _ROOM)) // _ROOM) * _ROOM, longest)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Find the layers that make up the model: the longest list of modules in it."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []
