"""torch.compile and CUDA graphs: compile the decoder layers if that saves time over the remaining steps.

The first steps run uncompiled and are timed. Each layer is compiled as a whole for one fixed shape, so that all layers
share one compiled function; micro-batches are padded to that shape. torch caches the result on disk. Code that is not
in the cache is compiled by a second process while training goes on (`compile_ahead.py`). If launching the kernels of a
layer takes longer than running them, the launches are recorded once and replayed as CUDA graphs.
"""

import atexit
import json
import os
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn

from tunewell.core.cache import DiskCache, cache_folder
from tunewell.core.child import Child
from tunewell.core.files import sha256_text, stable_json
from tunewell.data.batches import DataOrder, FixedShape, micro_batches
from tunewell.models.fp32_modules import compute_dtype
from tunewell.models.load import count_parameters
from tunewell.models.loss import loss_and_grad_fused
from tunewell.training.events import StepTaken
from tunewell.training.run import Run
from tunewell.training.step import TrainableModel

# Measured on an H200 (torch 2.11): 15 to 60 s for models of 0.02 to 8 B parameters, 4 s from the cache; a third of the
# time of a step is saved. Measured values of earlier runs replace the last two.
_COMPILE_SECONDS = 60.0
_CACHED_SECONDS = 4.0
_SAVED_SHARE = 0.3
_MIN_SAVED_SECONDS = 5.0
"""Minimum time saved for which layers are compiled."""
_MIN_FREE_SHARE = 0.2
"""Share of the GPU's memory that must be free for a second process."""
_LAUNCH_BOUND_FLOP = 1.0e12
"""FLOP of a layer's forward and backward pass: about 3 ms on an H200; the host needs 4 ms to launch 110 kernels."""
_TIMED_STEPS = 2
_COMPARED_STEPS = 6
"""Number of compiled steps after which their time is compared with that of uncompiled ones."""
_FIRST_SHARE = 2
_MULTIPLE = 32
_CACHE = DiskCache("compiled")


@dataclass
class Compiler:
    """Compiles the model, if the time of the first steps shows that it is worthwhile."""

    mode: str
    """`auto`, `on` or `off`."""
    num_steps: int
    cache: "CompileCache | None" = None
    """What is known about this model's compiled code; None with several ranks, which compile for themselves."""
    _eager: list[float] = field(default_factory=list[float])
    _compiled: list[float] = field(default_factory=list[float])

    def budget(self, learner: TrainableModel, planned: int) -> int:
        """Return the tokens per micro-batch: half of `planned` until the decision whether to compile."""
        # Uncompiled layers store more activations; the first steps must not determine the peak memory of the run.
        is_compiling = self.cache is not None and self.cache.is_compiling
        is_undecided = self._is_possible(learner) and (len(self._eager) <= _TIMED_STEPS or is_compiling)
        return max(planned // _FIRST_SHARE, min(learner.longest, planned)) if is_undecided else planned

    def on_step(self, learner: TrainableModel, event: StepTaken) -> None:
        """Record the time of a step, and save what compiling cost and saved."""
        (self._eager if learner.shape is None else self._compiled).append(event.seconds)
        if self.cache is not None and len(self._compiled) == _COMPARED_STEPS and len(self._eager) > 1:
            first, *others = self._compiled
            mean, eager = sum(others) / len(others), sum(self._eager[1:]) / len(self._eager[1:])
            self.cache.save(CompileTimes(seconds=max(0.0, first - mean), saved_share=max(0.0, 1 - mean / eager)))

    def is_due(self, learner: TrainableModel, *, step: int) -> bool:
        """Return whether to compile after this step. The first step is a warm-up and is not timed."""
        if not self._is_possible(learner):
            return False
        if self.mode == "on":
            return True
        timed = self._eager[1:]
        if len(timed) < _TIMED_STEPS:
            return False
        is_worth_it = self._is_worth_it((self.num_steps - step) * sum(timed) / len(timed))
        return learner.world.any(is_worth_it)  # timings differ between ranks, but all ranks must decide the same

    def _is_worth_it(self, remaining_seconds: float) -> bool:
        cache = self.cache
        if cache is not None and cache.measured is not None:
            return remaining_seconds * cache.measured.saved_share > cache.measured.seconds
        saved = remaining_seconds * _SAVED_SHARE
        if cache is not None and cache.is_filled(wants=saved > _MIN_SAVED_SECONDS):
            return saved > _CACHED_SECONDS
        return saved > 2 * _COMPILE_SECONDS and not (cache is not None and cache.is_compiling)

    def _is_possible(self, learner: TrainableModel) -> bool:
        return self.mode != "off" and learner.device.type == "cuda" and learner.shape is None and learner.may_compile

    def run(self, learner: TrainableModel, order: DataOrder, *, budget: int) -> str:
        """Compile the layers and the loss for one shape, and return a note for the user."""
        return compile_model(learner, fixed_shape(order, budget=budget, longest=learner.longest))


def make_compiler(run: Run) -> Compiler | None:
    """Return the compiler of a run, or None if its plan excludes compilation."""
    mode = run.plan.compile.value
    if mode == "off":
        return None
    return Compiler(mode, run.plan.num_steps.value, CompileCache(run) if run.learner.world.size == 1 else None)


def compile_model(learner: TrainableModel, shape: FixedShape) -> str:
    """Compile the layers and the loss for one shape, and return a note for the user."""
    learner.shape = shape
    layers = decoder_layers(learner.model)
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    # Recompute normalised inputs and the products of the feed-forward layer in the backward pass, in kernels that read
    # the same tensors anyway: 28% less memory.
    functorch_config.ban_recompute_materialized_backward = False
    torch.cuda.empty_cache()  # the cached blocks of uncompiled steps have different sizes
    learner.uses_graphs = can_use_graphs(learner, layers)
    for layer in layers:
        layer.compile(fullgraph=True, dynamic=False, mode="reduce-overhead" if learner.uses_graphs else None)
    learner.fused_loss = torch.compile(loss_and_grad_fused, dynamic=False)
    recorded = ", launches recorded in CUDA graphs" if learner.uses_graphs else ""
    return f"compiling {len(layers)} layers for {shape.tokens:,} tokens in {shape.documents} documents{recorded}"


@dataclass(frozen=True)
class CompileTimes:
    """What compiling cost and saved in an earlier run of the same model and shape."""

    seconds: float = _CACHED_SECONDS
    """Seconds until the first compiled step, with torch's cache filled."""
    saved_share: float = _SAVED_SHARE
    """Share of a step's time that compiled layers save."""


def read_measured() -> dict[str, Any]:
    """Return what earlier runs measured, by signature; nothing if the file is damaged."""
    found = _CACHE.read("measured")
    return found if isinstance(found, dict) else {}


def save_measured(signature: str, measured: CompileTimes) -> None:
    """Save what a run measured, for later runs."""
    _CACHE.write("measured", read_measured() | {signature: asdict(measured)})


class CompileCache:
    """torch's cache of compiled code on disk, and what earlier runs measured."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._folder = cache_folder("compiled")
        self._process: Child | None = None
        self._has_failed = False
        if self._folder is not None:
            # Below the folder for temporary files, torch's default, the cache would be lost.
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(self._folder))

    @cached_property
    def measured(self) -> CompileTimes | None:
        """What an earlier run measured, or None if this model and shape were not compiled before."""
        with suppress(TypeError, KeyError, ValueError):  # a damaged entry, or one of another version
            known = read_measured()[self._signature]
            return CompileTimes(float(known["seconds"]), float(known["saved_share"]))
        return None

    @property
    def is_compiling(self) -> bool:
        return self._process is not None

    def is_filled(self, *, wants: bool) -> bool:
        """Return True once a second process has compiled the layers. Start it if that is wanted and possible."""
        if self._process is None and wants and not self._has_failed:
            self._has_failed = not self._start()
        if self._process is None or not self._process.has_ended:
            return False
        process, self._process = self._process, None
        self._has_failed = True  # either it failed, or the caller compiles now or never
        return process.wait().code == 0

    def save(self, measured: CompileTimes) -> None:
        """Save what this run measured, for later runs."""
        save_measured(self._signature, measured)

    @cached_property
    def _shape(self) -> FixedShape:
        run = self._run
        return fixed_shape(run.order, budget=run.micro_batch_tokens, longest=run.learner.longest)

    @cached_property
    def _signature(self) -> str:
        """A hash of everything that changes the compiled code: weights by name and shape, batch shape and versions."""
        model, device = self._run.learner.model, self._run.learner.device
        layers = decoder_layers(model)
        parts = [*layers[:1], *layers[-1:], model.get_output_embeddings()]
        weights = [
            (name, list(own.shape), str(own.dtype), own.requires_grad)
            for part in parts
            for name, own in part.named_parameters()
        ]
        library = sys.modules["transformers"].__version__
        found = [model.config.model_type, weights, asdict(self._shape), torch.__version__, library]
        return sha256_text(stable_json([*found, torch.cuda.get_device_name(device)]))[:16]

    def _start(self) -> bool:
        """Start a second process that compiles two layers of this model, if it supports that and there is memory."""
        free, total = torch.cuda.mem_get_info(self._run.learner.device)
        description = describe_for_ahead(self._run, self._shape)
        if description is None or self._folder is None or free < _MIN_FREE_SHARE * total:
            return False
        self._process = Child([sys.executable, "-m", "tunewell.training.compile_ahead"])
        atexit.register(self._process.close)
        self._process.send(description | {"signature": self._signature})
        return True


def describe_for_ahead(run: Run, shape: FixedShape) -> dict[str, Any] | None:
    """Return what the second process needs to know, as JSON values, or None for a model that it cannot build."""
    learner, config = run.learner, run.learner.model.config
    if config.get_text_config() is not config:
        return None
    settings: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    kinds = settings.get("layer_types") or []
    # Layers up to the first one of each kind, and one more: the first layer's input needs no gradient.
    number = max([kinds.index(kind) for kind in set(kinds)], default=0) + 2
    settings["num_hidden_layers"] = min(number, config.num_hidden_layers)
    if kinds:
        settings["layer_types"] = kinds[: settings["num_hidden_layers"]]
    return {
        "model": settings,
        "plan": run.plan.model_dump(mode="json"),
        "config": run.config.model_dump(mode="json", exclude_unset=True),
        "dtype": str(compute_dtype(learner.model)).removeprefix("torch."),
        "longest": learner.longest,
        "shape": asdict(shape),
        "is_recomputing": bool(getattr(learner.model, "is_gradient_checkpointing", False)),
        "may_use_graphs": learner.may_use_graphs,
    }


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
    weights = max((count_parameters(layer) for layer in layers), default=0)
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
