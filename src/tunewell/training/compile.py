"""torch.compile and CUDA graphs: compile the decoder layers if that saves time over the remaining steps.

The first steps run uncompiled and are timed. Each layer is compiled as a whole for one fixed shape, so that all layers
share one compiled function; micro-batches are padded to that shape. torch caches the result on disk. If launching the
kernels of a layer takes longer than running them, the launches are recorded once and replayed as CUDA graphs.
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
"""FLOP of a layer's forward and backward pass: about 3 ms on an H200; the host needs 4 ms to launch 110 kernels."""
_TIMED_STEPS = 3
_FIRST_SHARE = 4
_MULTIPLE = 32


@dataclass
class Compiler:
    """Compiles the model, if the time of the first steps shows that it is worthwhile."""

    mode: str
    """`auto`, `on` or `off`."""
    num_steps: int
    _seconds: float = 0.0
    _timed: int = 0

    def budget(self, learner: TrainableModel, planned: int) -> int:
        """Return the tokens per micro-batch: a quarter of `planned` until the decision whether to compile."""
        # Uncompiled layers store more activations; the first steps must not determine the peak memory of the run.
        is_undecided = self._is_possible(learner) and self._timed <= _TIMED_STEPS
        return max(planned // _FIRST_SHARE, min(learner.longest, planned)) if is_undecided else planned

    def is_due(self, learner: TrainableModel, *, step: int, seconds: float) -> bool:
        """Return whether to compile after this step. The first step is a warm-up and is not timed."""
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
        return learner.world.any(is_worth_it)  # timings differ between ranks, but all ranks must decide the same

    def _is_possible(self, learner: TrainableModel) -> bool:
        return self.mode != "off" and learner.device.type == "cuda" and learner.shape is None and learner.may_compile

    def run(self, learner: TrainableModel, order: DataOrder, *, budget: int) -> str:
        """Compile the layers and the loss for one shape, and return a note for the user."""
        learner.shape = fixed_shape(order, budget=budget, longest=learner.longest)
        layers = decoder_layers(learner.model)
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        torch.cuda.empty_cache()  # the cached blocks of uncompiled steps have different sizes
        learner.uses_graphs = can_use_graphs(learner, layers)
        for layer in layers:
            layer.compile(fullgraph=True, dynamic=False, mode="reduce-overhead" if learner.uses_graphs else None)
        learner.fused_loss = torch.compile(loss_and_grad_fused, dynamic=False)
        recorded = ", launches recorded in CUDA graphs" if learner.uses_graphs else ""
        shape = learner.shape
        return f"compiling {len(layers)} layers for {shape.tokens:,} tokens in {shape.documents} documents{recorded}"


def can_use_graphs(learner: TrainableModel, layers: list[nn.Module]) -> bool:
    """Return whether to use CUDA graphs: only if kernel launches take most of the time and replays are identical.

    CUDA graphs are not used with dropout, because its mask would be replayed; with gradient checkpointing, because it
    launches layers in a different order; or after an out-of-memory error, because graphs hold memory. Before version
    2.13, torch supports graphs only in the main thread.
    """
    assert learner.shape is not None
    is_in_main = threading.current_thread() is threading.main_thread()
    is_recomputing = getattr(learner.model, "is_gradient_checkpointing", False)
    if not learner.may_use_graphs or learner.has_dropout or is_recomputing or not is_in_main:
        return False
    weights = max((sum(own.numel() for own in layer.parameters()) for layer in layers), default=0)
    return 0 < 6 * weights * learner.shape.tokens < _LAUNCH_BOUND_FLOP


def fixed_shape(order: DataOrder, *, budget: int, longest: int) -> FixedShape:
    """Return a shape that fits the micro-batches of the first 64 steps; later micro-batches are split to fit it.

    Documents longer than `budget` get their own micro-batches and run uncompiled, because otherwise all micro-batches
    would be padded to the longest document. If these documents have most of the tokens, the shape includes them.
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
    """Return the decoder layers of a model: the longest `ModuleList`."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []
