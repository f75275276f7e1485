"""Plan a run with its prediction, refuse what cannot fit, and keep predicted beside measured."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from tunewell.config.load import LoadedConfig
from tunewell.core.errors import UserError
from tunewell.core.units import size_bytes
from tunewell.data.batches import DataOrder
from tunewell.data.corpus.reader import Corpus
from tunewell.machine.device import Shape, measure_threads
from tunewell.machine.facts import DeviceFacts
from tunewell.planning.fit import Planner
from tunewell.planning.forecast import shape_of
from tunewell.planning.memory import CONTEXT_BYTES
from tunewell.planning.plan import plan_run
from tunewell.records.plan import Chosen, Plan
from tunewell.runs.config import RunOptions
from tunewell.runs.probe import cached_probe, probe_run, sweep_sizes, with_probe
from tunewell.runs.result import MetricsRecorder
from tunewell.training.distributed import World

_LONG_RUN = 2400.0
"""Seconds from which `train` measures micro-batch sizes: 5% of them are the two minutes that this may take."""


def plan_to_train(
    loaded: LoadedConfig,
    corpus: Corpus,
    device: DeviceFacts,
    recorder: MetricsRecorder,
    options: RunOptions,
    world: World,
) -> tuple[Plan, DataOrder]:
    """Plan a run and predict it. Raise UserError if it cannot fit, unless `plan.memory: warn` is set.

    Earlier measurements of the same run on this machine are used. On the command line, a new long run in one process
    measures the size of its micro-batches in a child process first.
    """
    may_measure = options.owns_process and not options.is_resuming and world.size == 1
    measure_once = cache(options.measure_threads or measure_threads)

    def threads(shapes: Sequence[Shape]) -> Chosen[int]:
        return measure_once(tuple(shapes))

    if device.kind == "cuda" and device.free_bytes is not None and device.memory_bytes is not None:
        # torch reports what is free beside the context of this process, which is part of the prediction.
        device = replace(device, free_bytes=min(device.memory_bytes, device.free_bytes + CONTEXT_BYTES))
    try:
        planner = Planner(loaded, corpus, device, shape_of(loaded, corpus), threads)
    except UserError:  # a model whose size is not known before it is loaded
        return plan_run(loaded, corpus, device, measure_threads=measure_threads)
    plan, order, outlook = planner.first
    found = cached_probe(loaded, plan, outlook)
    if found is None and may_measure and outlook.prediction.seconds.expected > _LONG_RUN and sweep_sizes(outlook)[0]:
        found, reason = probe_run(loaded, plan, outlook, recorder)
        if found is None:
            recorder.note(f"micro-batch sizes were not measured: {reason}")
    if found is not None:
        planner = with_probe(planner, found)
        plan, order, outlook = planner.first
    prediction = outlook.prediction
    if not prediction.fits:
        if loaded.config.plan.memory == "refuse":
            planner.require_fit()
        needed, free = prediction.memory.needed_bytes, prediction.memory.free_bytes or 0
        recorder.note(
            f"the run may be out of memory: it needs about {size_bytes(needed)}, and {size_bytes(free)} are free; "
            "`tunewell plan` lists what helps"
        )
    return plan, order
