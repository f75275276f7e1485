"""Check before the first step that an Apple GPU computes what the CPU computes. If it does not, train on the CPU."""

from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from tunewell.core.units import size_bytes
from tunewell.data.batches import MicroBatch, make_batch
from tunewell.machine.facts import DeviceFacts, cpu_facts
from tunewell.machine.out_of_memory import free_memory, is_out_of_memory
from tunewell.records.healing import HealingEntry
from tunewell.records.plan import Chosen, write_plan
from tunewell.training.build import RunInputs
from tunewell.training.events import Healed, Note
from tunewell.training.leak_probe import distance
from tunewell.training.run import Run
from tunewell.training.step import TrainableModel

_TOKENS = 256
_BOUND = 1e-3
"""Relative difference. On a CPU, fp32 differs from fp64 by 2e-7; a product that is wrong by 1% makes more than 1e-3."""


def check_device(parts: RunInputs, run: Run, device: DeviceFacts) -> DeviceFacts:
    """Compare a forward and backward pass on `mps` with the CPU. Return the device to train on, which may be the CPU.

    The model is moved to the CPU and back, so that no third copy is needed. The check is skipped, with a note, if two
    copies do not fit into memory, which the Apple GPU shares with the CPU.
    """
    learner, host = run.learner, cpu_facts()
    if learner.device.type != "mps":
        return device
    model = chain(learner.model.parameters(), learner.model.buffers(), learner.parameters.values())  # and gradients
    needed, free = sum(tensor.nbytes for tensor in model), host.free_bytes
    if free is not None and needed > free:
        return _skip(
            run, device, f"a second copy of the model needs {size_bytes(needed)}, and {size_bytes(free)} are free"
        )
    lengths = run.order.lengths
    order = np.argsort(lengths, kind="stable")
    batch = make_batch(run.documents, order[: max(1, int((lengths[order].cumsum() <= _TOKENS).sum()))])
    try:
        found = _pass(learner, batch)
        learner.change(device="cpu")
        expected = _pass(learner, batch)
        loss, norms = distance(found[:1], expected[:1]), distance(found[1:], expected[1:])
        message = (
            f"the loss and the gradient norms of a micro-batch on mps differ from the CPU's by {loss:.0e} and "
            f"{norms:.0e}; rounding explains at most {_BOUND:.0e}"
        )
        if loss <= _BOUND and norms <= _BOUND:
            learner.change(device="mps")
            run.listener(Note(f"check passed: {message}"))
            return device
    except (RuntimeError, TypeError) as error:
        learner.drop_gradients()
        if is_out_of_memory(error):
            free_memory(error)
            learner.change(device="mps")
            return _skip(run, device, "out of memory")
        learner.change(device="cpu")
        message = f"mps cannot compute a step: {error}".partition("\n")[0]
    words = f"training on the CPU, because {message}"
    run.plan = parts.plan = run.plan.model_copy(update={"device": Chosen[str](value="cpu", because=words)})
    write_plan(parts.folder, run.plan)
    run.about = replace(run.about, device="cpu")
    entry = HealingEntry(run.progress.step, "wrong-device", "fault", "none", words)
    run.healing.add(entry)
    run.listener(Healed(entry))
    return host


def _skip(run: Run, device: DeviceFacts, because: str) -> DeviceFacts:
    run.listener(Note(f"the GPU (mps) was not checked against the CPU: {because}"))
    return device


def _pass(learner: TrainableModel, batch: MicroBatch) -> Tensor:
    """Return the loss of a micro-batch and the gradient norm of each parameter, without dropout."""
    learner.model.eval()
    loss = learner.loss_sum(batch)
    loss.backward()
    norms = [gradient.norm() for gradient in learner.optimizer.gradients().values()]
    learner.drop_gradients()
    return torch.stack([loss.detach(), *norms]).cpu()
