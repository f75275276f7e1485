"""Measure some steps of a run on throw-away state: phases, the kernels of a GPU, and other settings.

The steps are taken by the training loop itself, with its evaluations and checkpoints. Then the documents of one step
are computed again with other settings (threads, micro-batches), in turn with the present ones.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as Trace

from tunewell.core.errors import UserError
from tunewell.core.progress import Progress
from tunewell.data.batches import MicroBatch, Numbers, make_batch, micro_batches
from tunewell.data.read_ahead import ReadAhead
from tunewell.features.profile.finished import make_profile, mean_phases, rare_work
from tunewell.features.profile.kernels import sum_kernels
from tunewell.features.profile.processor import ProcessorWait
from tunewell.features.profile.records import Profile, Rare, ReadTimes, TriedSetting
from tunewell.machine.device import useful_threads
from tunewell.machine.out_of_memory import OutOfMemory, free_memory, is_out_of_memory
from tunewell.records.plan import Plan
from tunewell.training.compile import Compiler
from tunewell.training.events import Evaluated, Event, Listener, StepTaken
from tunewell.training.run import Run
from tunewell.training.step import PROCESSOR
from tunewell.training.trial import NoDocuments, TrialSteps, keep_nothing, take_trial_steps, with_values

_WARMUP, _COMPILED_WARMUP = 2, 5
"""Steps before the measured ones. The first steps allocate memory, and the first compiled ones compile."""
_TRACED = 3
_ROUNDS = 5
_TRIAL_SECONDS = 1.0
"""Upper limit of the time of one forward and backward pass in a trial; fewer documents are used if it is longer."""
_MICRO_BATCHES = {"cpu": (512, 1024, 2048, 4096), "mps": (2048, 4096, 8192), "cuda": (4096, 8192, 16_384, 32_768)}
_MIN_DATA_SHARE = 0.05
_MIN_SLOWED = 0.1
_NEVER = 1 << 40


@dataclass
class _Counter:
    """A listener that counts evaluations and checkpoints, and traces a GPU's kernels after the measured steps.

    Nothing is evaluated or saved while kernels are traced.
    """

    run: Run
    first: int
    last: int
    trace: Trace | None
    """Of a GPU."""
    forward: Listener
    num_evaluations: int = 0
    num_saves: int = 0
    saves_measured: int = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Evaluated):
            self.num_evaluations += 1
        elif isinstance(event, Progress) and event.stage == "saving a checkpoint":
            self.num_saves += 1
            self.saves_measured += self.first < self.run.progress.step <= self.last
        elif isinstance(event, StepTaken) and event.step == self.last:
            never = {"evaluate_every": _NEVER, "save_every": _NEVER}
            self.run.plan = with_values(self.run.plan, "kernels are traced", never)
            self.run.held_out = NoDocuments()
            if self.trace is not None:
                torch.cuda.synchronize()
                self.trace.start()
        elif isinstance(event, StepTaken) and event.step == self.last + _TRACED and self.trace is not None:
            torch.cuda.synchronize()
            self.trace.stop()
        self.forward(event)

    def rare(self, plan: Plan, totals: dict[str, float], *, waited: float) -> dict[str, Rare | None]:
        """Return the work that was done once in many steps, from the seconds of each phase."""
        answers, every = totals.get("answers", 0.0), plan.evaluate_every.value
        evaluation = rare_work(
            totals.get("evaluate", 0.0) + answers,
            self.num_evaluations,
            number=1 + ceil(plan.num_steps.value / every),  # one before the first step
            every=every,
            answers_seconds=answers / max(1, self.num_evaluations),
        )
        every = plan.save_every.value
        checkpoint = rare_work(
            totals.get("save", 0.0),
            self.num_saves,
            number=ceil(plan.num_steps.value / every),
            every=every,
            queue_seconds=waited if self.saves_measured > 1 else 0.0,
        )
        return {"evaluation": evaluation, "checkpoint": checkpoint}


def profile_steps(run: Run, num_steps: int, *, device_label: str, keeps_waits: bool = False) -> Profile:
    """Take steps and return their profile.

    The time that other programs use the processor is left out, unless `keeps_waits`.

    The weights of the run change; nothing of it may be used afterwards. Raises UserError if a step fails.
    """
    plan, learner, listener = run.plan, run.learner, run.listener
    # More threads than cores wait for each other, which is not the fault of other programs.
    if learner.device.type == "cpu" and plan.threads.value <= max(useful_threads()) and not keeps_waits:
        learner.phases.waited = ProcessorWait().seconds
    take = partial(_take_steps, run, num_steps)
    is_compiled = _warm_up(run, take)
    first = run.progress.step + (_COMPILED_WARMUP if is_compiled else 1)
    last = first + num_steps
    trace = Trace(activities=[ProfilerActivity.CUDA]) if learner.device.type == "cuda" else None
    counter = _Counter(run, first, last, trace, listener)
    before = dict(learner.phases.total)
    run.listener = counter
    taken = take(last + (_TRACED if trace else 0), compile="on" if is_compiled else "off").taken
    run.listener = listener
    steps = [step.__dict__ for step in taken if first < step.step <= last]
    totals = {name: seconds - before.get(name, 0.0) for name, seconds in learner.phases.total.items()}
    phases = mean_phases(steps)
    trials = _Trials(run, documents := run.order.step(first).documents, is_compiled=is_compiled)
    tried = trials.measure(listener)
    per_step = sum(step["tokens"] for step in steps) / num_steps / trials.num_tokens
    profile = make_profile(
        plan,
        steps,
        source="steps",
        device=device_label,
        is_gpu=learner.device.type != "cpu",
        compile="on" if is_compiled else plan.compile.value,
        **counter.rare(plan, totals, waited=phases.get("save_wait", 0.0)),
        # A step is logged when the next one is launched: the first traced step was launched before the trace.
        kernels=trace and sum_kernels(trace.key_averages(), _TRACED - 1),
        compute_seconds=trials.present_seconds and trials.present_seconds * per_step,
        trials=tried,
        settings={
            "train.threads": plan.threads.value,
            "train.micro_batch_tokens": plan.micro_batch_tokens.value,
            "train.recompute": run.config.train.recompute,
        },
    )
    found: dict[str, Any] = {}
    if phases.get("data", 0.0) > _MIN_DATA_SHARE * profile.seconds:
        found["reading"] = ReadTimes(ahead_seconds=_read_ahead(run, documents))
    if (slowed := phases.get(PROCESSOR, 0.0)) >= _MIN_SLOWED * profile.seconds:
        times = f"{(profile.seconds + slowed) / profile.seconds:.1f} times as long"
        found["notes"] = [f"other programs use the processor: a step took {times}; their time is left out"]
    return profile.model_copy(update=found)


def _take_steps(run: Run, num_measured: int, num_steps: int, *, compile: str) -> TrialSteps:
    ending, steps = take_trial_steps(run, num_steps, because="a profile", compile=compile)
    if ending.status != "finished":
        raise UserError(f"the run stopped before {num_measured} steps were measured: {ending.reason}")
    return steps


def _warm_up(run: Run, take: Callable[..., TrialSteps]) -> bool:
    """Take the first steps without evaluations and checkpoints. Return whether the whole run would be compiled."""
    plan, held_out, checkpoints = run.plan, run.held_out, run.checkpoints
    keep_nothing(run)
    steps = take(_WARMUP + 1, compile="off")
    run.held_out, run.checkpoints, run.plan = held_out, checkpoints, plan
    compiler = Compiler(plan.compile.value, plan.num_steps.value)
    for event in steps.taken:
        compiler.on_step(run.learner, event)
    return compiler.is_due(run.learner, step=run.progress.step)


_Variant = tuple[str, int | str, list[MicroBatch], Callable[[], AbstractContextManager[None]]]
"""A key, another value, the micro-batches, and the setting during which they are computed."""


class _Trials:
    """The documents of one step, computed with other settings in turn with the present ones."""

    def __init__(self, run: Run, documents: Numbers, *, is_compiled: bool) -> None:
        self._run, self._learner, self._is_compiled = run, run.learner, is_compiled
        self._present = run.micro_batch_tokens
        self._documents = documents
        self.batches = self._make(self._present)
        # Uncompiled passes may not fit in the memory that compiled ones need.
        while not is_compiled and self._compute(self.batches) > _TRIAL_SECONDS and len(self._documents) > 1:
            self._documents = self._documents[: len(self._documents) // 2]
            self.batches = self._make(self._present)
        self.num_tokens = sum(batch.num_tokens for batch in self.batches)
        self.present_seconds: float | None = None

    def measure(self, listener: Callable[[Event], None]) -> list[TriedSetting]:
        """Return the time of each variant. A variant that runs out of memory is left out."""
        if self._is_compiled:  # the present kernels are compiled, and those of a variant would not be
            return []
        variants = list(self._variants())
        times: list[list[float]] = [[] for _ in variants]
        present: list[float] = []
        for turn in range(_ROUNDS):
            present.append(self._compute(self.batches))
            for (key, value, batches, setting), own in zip(variants, times, strict=True):
                if len(own) < turn:
                    continue
                listener(Progress(f"trying `{key}: {value}`", turn + 1, _ROUNDS))
                try:
                    with setting():
                        own.append(self._compute(batches))
                except (RuntimeError, MemoryError, OutOfMemory) as error:
                    if not is_out_of_memory(error):
                        raise
                    self._learner.drop_gradients()
                    free_memory(error)
        self.present_seconds = usual = statistics.median(present)
        return [
            TriedSetting(key=key, value=value, seconds=statistics.median(own), present_seconds=usual)
            for (key, value, *_), own in zip(variants, times, strict=True)
            if len(own) == _ROUNDS
        ]

    def _make(self, budget: int) -> list[MicroBatch]:
        groups = micro_batches(self._documents, self._run.order.lengths, budget)
        return [make_batch(self._run.documents, group) for group in groups]

    def _compute(self, batches: list[MicroBatch]) -> float:
        waited = self._learner.phases.waited or (lambda: 0.0)
        _synchronize(self._learner.device)
        started, waited_before = time.perf_counter(), waited()
        self._learner.accumulate_gradients(batches, number=0, num_supervised=1)
        _synchronize(self._learner.device)
        seconds = time.perf_counter() - started - (waited() - waited_before)
        self._learner.drop_gradients()
        return seconds

    def _variants(self) -> Iterator[_Variant]:
        device, present = self._learner.device.type, torch.get_num_threads()
        for number in useful_threads() if device == "cpu" else ():
            if number != present:
                yield "train.threads", number, self.batches, partial(self._with_threads, number)
        for size in _MICRO_BATCHES[device]:
            batches = self._make(size) if size > self._present else self.batches
            if len(batches) < len(self.batches):
                yield "train.micro_batch_tokens", size, batches, nullcontext
            if len(batches) == 1:
                break
        if self._run.config.train.recompute == "on":
            yield "train.recompute", "off", self.batches, self._without_recompute

    @contextmanager
    def _with_threads(self, number: int) -> Iterator[None]:
        present = torch.get_num_threads()
        torch.set_num_threads(number)
        self._compute(self.batches[:1])  # starts the threads
        try:
            yield
        finally:
            torch.set_num_threads(present)
            self._compute(self.batches[:1])

    @contextmanager
    def _without_recompute(self) -> Iterator[None]:
        self._learner.recompute("off")
        try:
            yield
        finally:
            self._learner.recompute("on")


def _synchronize(device: torch.device) -> None:
    """Wait until the device has finished; on a CPU there is nothing to wait for."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def _read_ahead(run: Run, documents: Numbers) -> float:
    """Return the seconds in which several threads read the documents of a step."""
    ahead = ReadAhead(run.documents)
    started = time.perf_counter()
    ahead.request(documents)
    for document in documents:
        ahead.arrays(int(document))
    return time.perf_counter() - started
