"""Take steps of a run and discard the result: `plan`, `profile` and `rehearse` differ in what they measure.

`workflows/trial.py` builds the run in a folder that is removed afterwards. For `plan`, a child process takes a few
steps with one or several micro-batch sizes (`take_probe_steps`). Their learning rate is zero, so every size sees the
same model.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tunewell.core.errors import UserError
from tunewell.core.progress import silent
from tunewell.data.batches import make_batch, micro_batches, spread_evenly
from tunewell.data.corpus.reader import Corpus
from tunewell.machine.facts import peak_memory_bytes
from tunewell.machine.out_of_memory import OutOfMemory, free_memory
from tunewell.records.plan import Chosen, Plan
from tunewell.training.checkpoints import Checkpoints, State
from tunewell.training.engine import train
from tunewell.training.evaluate import held_out_loss
from tunewell.training.events import Event, Healed, Listener, StepTaken
from tunewell.training.run import Ending, Run, RunProgress

_STEPS = {"cuda": 6, "mps": 4}
_MAX_CPU_STEPS = 8
_COMPILED_STEPS = 5
_SIZE_SECONDS = 1.0
"""Time for each micro-batch size; at least three steps are taken."""
_EVALUATED = 8
_CLIFF = 0.5
"""A larger micro-batch with less than this share of the speed has spilled into main memory."""


class NoCheckpoints(Checkpoints):
    """Checkpoints that are never written."""

    def save(self, state: State, *, is_best: bool = False, wait: bool = False) -> None:
        """Do nothing."""


class NoDocuments:
    """An empty split, so that nothing is evaluated."""

    index: Any = None

    def __len__(self) -> int:
        return 0

    def arrays(self, index: int) -> Any:
        raise IndexError(index)


@dataclass
class TrialSteps:
    """A listener that keeps the steps and forwards all events to the listener of the run."""

    forward: Listener
    taken: list[StepTaken] = field(default_factory=list[StepTaken])
    is_healed: bool = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepTaken):
            self.taken.append(event)
        self.is_healed = self.is_healed or isinstance(event, Healed)
        self.forward(event)


def keep_nothing(run: Run) -> None:
    """Evaluate no documents and write no checkpoints from now on."""
    run.held_out = NoDocuments()
    run.checkpoints = NoCheckpoints(run.checkpoints.folder, keep=1, on_trouble=silent)


def with_values(plan: Plan, because: str, values: Mapping[str, Any]) -> Plan:
    """Return the plan with other values, by name."""
    return plan.model_copy(update={name: Chosen(value, because=because) for name, value in values.items()})


def take_trial_steps(
    run: Run, num_steps: int, *, because: str, handle_signals: bool = False, **values: Any
) -> tuple[Ending, TrialSteps]:
    """Train up to a step with a constant learning rate and these values of the plan, which stay in it."""
    run.plan = with_values(run.plan, because, {"num_steps": num_steps, "schedule": "constant", **values})
    steps = TrialSteps(run.listener)
    run.listener = steps
    try:
        return train(run, handle_signals=handle_signals), steps
    finally:
        run.listener = steps.forward


# What a run needs and takes, for `plan`.


def take_probe_steps(run: Run, corpus: Corpus, request: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Take the steps of a request, and return what they held and took."""
    keep_nothing(run)
    size, compiled = request["micro_batch_tokens"], None
    eager = _measure_uncompiled(run, size, deadline)
    if eager is None:
        raise UserError("out of memory: a step with the planned micro-batch does not fit")
    eager["context_bytes"] = _context_bytes(run, request["used_bytes"])
    if run.learner.device.type == "cuda" and request["compile"] == "on":
        compiled = measure_size(run, size, "on", _COMPILED_STEPS)
    largest = _take_largest(run, size, known_tokens=eager["micro_tokens"])
    report = {"eager": eager, "compiled": compiled, "largest": largest, **_forward(run, corpus)}
    planned = compiled or eager
    number = int(min(max(_SIZE_SECONDS / max(planned["seconds"], 1e-9), 3), 20))

    def measure(other: int) -> dict[str, Any] | None:
        return planned if other == size else measure_size(run, other, "on" if compiled else "off", number)

    report["sizes"] = compare_sizes(request["sizes"], measure, deadline)
    report["peak_rss"] = peak_memory_bytes()
    return report


def compare_sizes(
    sizes: Sequence[int], measure: Callable[[int], dict[str, Any] | None], deadline: float
) -> list[dict[str, Any]]:
    """Measure micro-batch sizes, the smallest first, until one runs out of memory or spills into main memory."""
    found: list[dict[str, Any]] = []
    for tokens in sorted(sizes):
        own = measure(tokens) if time.perf_counter() <= deadline else None
        if own is None or own["rate"] < _CLIFF * max((smaller["rate"] for smaller in found), default=0.0):
            break
        found.append({"tokens": tokens, "rate": own["rate"], "loss": own["loss"], "peak": own["reserved"]})
    return found


def _measure_uncompiled(run: Run, size: int, deadline: float) -> dict[str, Any] | None:
    """Take as many steps as fit into half of the time. On a slow machine this is a single step."""
    kind = run.learner.device.type
    first = measure_size(run, size, "off", _STEPS.get(kind, 1))
    if first is None:
        return None
    found = first
    if kind == "cpu":
        possible = int(min(0.5 * (deadline - time.perf_counter()) / max(first["seconds"], 1e-9), _MAX_CPU_STEPS))
        found = measure_size(run, size, "off", possible) if possible >= 2 else first
    return found and found | {"warm_up": max(0.0, first["first_seconds"] - first["first_tokens"] / found["rate"])}


def measure_size(run: Run, micro_tokens: int, compiling: str, num_steps: int) -> dict[str, Any] | None:
    """Take the first steps of the run with a micro-batch size. Return their speed and memory; None if out of memory."""
    device = run.learner.device
    run.progress = RunProgress(last_look=10**9)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    # The first step warms up, and is not timed if there are others.
    last = num_steps + (num_steps > 1) + (compiling == "on")
    try:
        ending, steps = take_trial_steps(
            run, last, because="a probe", micro_batch_tokens=micro_tokens, compile=compiling
        )
    except (OutOfMemory, torch.OutOfMemoryError) as error:
        free_memory(error)
        return None
    if steps.is_healed or ending.status != "finished" or not steps.taken:
        return None
    first, timed = steps.taken[0], steps.taken[-num_steps:]
    tokens = sum(step.tokens for step in timed)
    # The median per token: on a busy machine single steps take twice as long.
    seconds = tokens * statistics.median(step.seconds / max(1, step.tokens) for step in timed)
    return {
        "seconds": seconds / len(timed),
        "tokens": tokens / len(timed),
        "rate": tokens / max(seconds, 1e-9),
        "first_seconds": first.seconds,
        "first_tokens": first.tokens,
        "loss": first.loss if math.isfinite(first.loss) else None,
        "micro_tokens": _largest_group(run, micro_tokens, range(len(steps.taken)))[1],
        **_peaks(device),
    }


def _peaks(device: torch.device) -> dict[str, int]:
    """Return the most memory that torch's allocator reserved and handed out, or that of the process on a CPU."""
    if device.type != "cuda":
        return dict.fromkeys(("reserved", "allocated"), peak_memory_bytes() or 0)
    return {
        "reserved": torch.cuda.max_memory_reserved(device),
        "allocated": torch.cuda.max_memory_allocated(device),
    }


def _largest_group(run: Run, micro_tokens: int, steps: Any) -> tuple[Any, int]:
    """Return the documents of the largest micro-batch among some steps, and its tokens."""
    steps_documents = [run.order.step(number).documents for number in steps]
    lengths = run.order.lengths
    groups = [group for documents in steps_documents for group in micro_batches(documents, lengths, micro_tokens)]
    largest = max(groups, key=lambda group: int(lengths[group].sum()))
    return largest, int(lengths[largest].sum())


def _take_largest(run: Run, micro_tokens: int, *, known_tokens: int) -> dict[str, Any]:
    """Take the largest micro-batch of the run in a step alone, unless one of that size was taken.

    Return its tokens and the peak of all steps.
    """
    epoch_steps = len(run.order.steps_of_epoch(0))
    group, tokens = _largest_group(run, micro_tokens, spread_evenly(epoch_steps, 64).tolist())
    lengths = run.order.lengths
    if int(lengths.max()) > tokens:  # alone in its micro-batch, and in none of the sampled steps
        group, tokens = np.flatnonzero(lengths == lengths.max())[:1], int(lengths.max())
    device = run.learner.device
    if tokens > 1.02 * known_tokens and (device.type != "cuda" or run.plan.compile.value == "off"):
        run.learner.take_step([make_batch(run.documents, group)], number=0, rate=0.0).read()
    return {"tokens": tokens, **_peaks(device)}


def _forward(run: Run, corpus: Corpus) -> dict[str, Any]:
    """Return the seconds per token of an evaluation, and per generated token of sample answers."""
    evaluated = corpus.evaluated
    if not len(evaluated):
        return {}
    split = evaluated.select(spread_evenly(len(evaluated), _EVALUATED))
    budget = run.plan.micro_batch_tokens.value
    held_out_loss(run.learner, split, budget=budget, most=None)
    started = time.perf_counter()
    held_out_loss(run.learner, split, budget=budget, most=None)
    seconds = time.perf_counter() - started
    found: dict[str, Any] = {"forward_token": seconds / max(1, int(split.index["length"].sum()))}
    # On a GPU, setting up takes longer than a few short answers, so these say little about the verdict's.
    if run.config.evaluate.samples and run.learner.device.type != "cuda":
        started = time.perf_counter()
        samples = run.ask(0, 8192)
        seconds = time.perf_counter() - started
        # Reading the prompts is a forward pass; only the rest grows with the length of the answers.
        prompts = sum(int((evaluated.arrays(own.document)[1] == -100).sum()) for own in samples)
        reading = min(prompts * found["forward_token"], 0.9 * seconds)
        per_token = (seconds - reading) / run.config.evaluate.sample_tokens
        found |= {"answer_token": per_token, "answers": len(samples)}
    return found


def _context_bytes(run: Run, before: int | None) -> int | None:
    """Return the memory of this process on the GPU outside torch's allocator. `before`: used when it was started."""
    device = run.learner.device
    if before is None:  # not a GPU, or its memory is not known
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free - before - torch.cuda.memory_reserved(device)
