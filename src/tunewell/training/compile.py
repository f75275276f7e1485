"""torch.compile and CUDA graphs: compile the decoder layers when the remaining steps make up for the wait.

The first steps run uncompiled and are timed. Each layer is compiled as a whole and for one shape, so that all layers
share one compiled function; micro-batches are padded to that shape. torch caches the result on disk. If a layer takes
less time to compute than to launch, its launches are recorded once and replayed: CUDA graphs.
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
"""Forward and backward of a layer: an H200 takes about 3 ms for it, and a host 4 ms to launch its 110 kernels."""
_TIMED_STEPS = 3
_FIRST_SHARE = 4
_MULTIPLE = 32


@dataclass
class Compiler:
    """Decides when to compile, by the seconds of the first steps, and compiles."""

    mode: str
    """`auto`, `on` or `off`."""
    num_steps: int
    _seconds: float = 0.0
    _timed: int = 0

    def budget(self, learner: TrainableModel, planned: int) -> int:
        """Return the tokens of a micro-batch: a quarter until it is decided whether to compile."""
        # Uncompiled layers keep more activations; the first steps must not set the peak memory of the run.
        is_undecided = self._is_possible(learner) and self._timed <= _TIMED_STEPS
        return max(planned // _FIRST_SHARE, min(learner.longest, planned)) if is_undecided else planned

    def is_due(self, learner: TrainableModel, *, step: int, seconds: float) -> bool:
        """Return whether to compile after this step; the first step is a warm-up and is not timed."""
        if not self._is_possible(learner):
            return False
        if self.mode == "on":
            return True
        self._timed += 1
        if self._timed > 1:
            self._seconds += seconds
        if self._timed <= _TIMED_STEPS:
            return False
        mean = self._seconds / (self._timed - 1)
        is_worth_it = (self.num_steps - step) * mean * _SAVED_SHARE > 2 * _COMPILE_SECONDS
        return learner.world.any(is_worth_it)  # clocks differ between ranks, and all must decide alike

    def _is_possible(self, learner: TrainableModel) -> bool:
        return self.mode != "off" and learner.device.type == "cuda" and learner.shape is None and learner.may_compile

    def run(self, learner: TrainableModel, order: DataOrder, *, budget: int) -> str:
        """Compile the layers and the loss for one shape; return a note about it."""
        learner.shape = fixed_shape(order, budget=budget, longest=learner.longest)
        layers = decoder_layers(learner.model)
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        torch.cuda.empty_cache()  # cached blocks of uncompiled steps have other sizes
        learner.uses_graphs = can_use_graphs(learner, layers)
        for layer in layers:
            layer.compile(fullgraph=True, dynamic=False, mode="reduce-overhead" if learner.uses_graphs else None)
        learner.fused_loss = torch.compile(loss_and_grad_fused, dynamic=False)
        recorded = ", launches recorded in CUDA graphs" if learner.uses_graphs else ""
        shape = learner.shape
        return f"compiling {len(layers)} layers for {shape.tokens:,} tokens in {shape.documents} documents{recorded}"


def can_use_graphs(learner: TrainableModel, layers: list[nn.Module]) -> bool:
    """Return whether to use CUDA graphs: only if launches take most of the time and two replays are identical.

    Not with dropout, whose mask would be replayed, nor with gradient checkpointing, which launches layers in another
    order. Graphs keep memory, so they are not used after an out-of-memory error. torch before 2.13 keeps graphs per
    thread, and only for the main thread.
    """
    assert learner.shape is not None
    is_in_main = threading.current_thread() is threading.main_thread()
    is_recomputing = getattr(learner.model, "is_gradient_checkpointing", False)
    if not learner.may_use_graphs or learner.has_dropout or is_recomputing or not is_in_main:
        return False
    weights = max((sum(own.numel() for own in layer.parameters()) for layer in layers), default=0)
    return 0 < 6 * weights * learner.shape.tokens < _LAUNCH_BOUND_FLOP


def fixed_shape(order: DataOrder, *, budget: int, longest: int) -> FixedShape:
    """Return a shape that the micro-batches of the first 64 steps fit into; later ones are cut to it.

    Documents longer than `budget` get their own micro-batches and run uncompiled, unless most tokens are theirs:
    otherwise all the others would be padded to the longest of them.
    """
    longest = min(longest, budget)
    steps = order.steps_of_epoch(0)[:64]
    groups = [group for step in steps for group in micro_batches(step, order.lengths, budget)]
    sizes = [int(order.lengths[group].sum()) for group in groups]
    within = [size for size in sizes if size <= budget]
    tokens = -(-max(within if 2 * sum(within) >= sum(sizes) else sizes) // 128) * 128
    most = max(len(group) for group in groups)
    padding = -(-tokens // longest)
    return FixedShape(tokens, -(-(most + min(padding, _MULTIPLE)) // _MULTIPLE) * _MULTIPLE, longest)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of a model: its longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []
