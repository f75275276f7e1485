"""Measure some steps of a run on throw-away state: phases, kernels, other settings, and the rates of the machine.

The steps are taken by the training loop itself, with its evaluations and checkpoints. Then the documents of one step
are computed again with other settings (threads, micro-batches), in turn with the present ones.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from tunewell.core.progress import Progress
from tunewell.data.batches import MicroBatch, Numbers, TokenizedDocuments, make_batch, micro_batches
from tunewell.data.read_ahead import ReadAhead
from tunewell.features.profile.ceilings import measure_ceilings, synchronize
from tunewell.features.profile.kernels import KernelTrace
from tunewell.features.profile.processor import ProcessorWait
from tunewell.features.profile.records import Profile, Rare, Reading, Trial
from tunewell.machine.device import useful_threads
from tunewell.machine.out_of_memory import OutOfMemory, free_memory, is_out_of_memory
from tunewell.records.plan import Chosen, Plan
from tunewell.training.checkpoints import NoCheckpoints
from tunewell.training.compile import Compiler, decoder_layers
from tunewell.training.engine import train
from tunewell.training.events import Evaluated, Event, StepTaken
from tunewell.training.run import Ending, Run
from tunewell.training.step import PROCESSOR

_WARMUP, _COMPILED_WARMUP = 2, 5
"""Steps before the measured ones. The first steps allocate memory, and the first compiled ones compile."""
_TRACED = 3
_ROUNDS = 5
_TRIAL_SECONDS = 1.0
"""Upper limit of the time of one forward and backward pass in a trial; fewer documents are used if it is longer."""
_MICRO_BATCHES = {"cpu": (512, 1024, 2048, 4096), "mps": (2048, 4096, 8192), "cuda": (4096, 8192, 16_384, 32_768)}
_MIN_DATA_SHARE = 0.05
_LEFT_OUT = frozenset({"evaluate", "answers", "save", "save_wait", PROCESSOR})
"""Phases that are not part of a step: work that is done once in many steps, and time that other programs took."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MIN_SLOWED = 0.1
_NEVER = 1 << 40


class ProfileStopped(Exception):
    """The run stopped before all steps were measured; the message has the reason."""


@dataclass
class _Recorder:
    """A listener that collects the measured steps, and traces the kernels of the steps after them."""

    run: Run
    first: int
    last: int
    trace: KernelTrace
    steps: list[StepTaken] = field(default_factory=list[StepTaken])
    num_evaluations: int = 0
    num_saves: int = 0
    trace_seconds: float = 0.0
    saves_measured: int = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Evaluated):
            self.num_evaluations += 1
        elif isinstance(event, Progress) and event.stage == "saving a checkpoint":
            self.num_saves += 1
            self.saves_measured += self.first < self.run.progress.step <= self.last
        elif isinstance(event, StepTaken):
            if self.first < event.step <= self.last:
                self.steps.append(event)
            if event.step == self.last:
                never = Chosen[int](value=_NEVER, because="kernels are traced")
                self.run.plan = self.run.plan.model_copy(update={"evaluate_every": never, "save_every": never})
                self.run.held_out = _NoDocuments()
                self.trace.start()
                self.trace_seconds = -time.perf_counter()
            elif event.step == self.last + _TRACED:
                self.trace.stop()
                self.trace_seconds += time.perf_counter()


def profile_steps(
    run: Run, num_steps: int, *, made_by: str, device_label: str, copy: Callable[[], Any], keeps_waits: bool = False
) -> Profile:
    """Take steps and return their profile. `copy` returns the documents from a copy of the corpus, or None.

    The time that other programs use the processor is left out, unless `keeps_waits`.

    The weights of the run change; nothing of it may be used afterwards. Raises ProfileStopped if a step fails.
    """
    plan, learner = run.plan, run.learner
    wait = ProcessorWait()
    # More threads than cores wait for each other, which is not the fault of other programs.
    if learner.device.type == "cpu" and plan.threads.value <= max(useful_threads()) and not keeps_waits:
        learner.phases.waited = wait.seconds
    is_compiled = _warm_up(run)
    first = run.progress.step + (_COMPILED_WARMUP if is_compiled else 1)
    recorder = _Recorder(run, first, first + num_steps, KernelTrace(learner.phases, learner.device))
    listener = run.listener

    def listen(event: Event) -> None:
        recorder(event)
        listener(event)

    run.listener = listen
    before = dict(learner.phases.total)
    ending = _take_steps(run, first + num_steps + _TRACED, compile="on" if is_compiled else "off")
    if ending.status != "finished":
        raise ProfileStopped(ending.reason)
    totals = {name: seconds - before.get(name, 0.0) for name, seconds in learner.phases.total.items()}
    # On CUDA, a step is logged when the next one is launched: the first traced step was launched before the trace.
    num_traced = _TRACED - (learner.device.type == "cuda")
    kernels = recorder.trace.read(num_steps=num_traced, wall_seconds=recorder.trace_seconds)
    steps = recorder.steps
    phases = _mean_phases(steps)
    middle = run.order.step(first).documents
    tokens = sum(step.tokens for step in steps) / num_steps
    seconds = sum(value for name, value in phases.items() if name not in _LEFT_OUT)
    listener(Progress("measuring this machine"))
    trials = _Trials(run, middle, is_compiled=is_compiled)
    tried = trials.measure(listener)
    per_step = tokens / trials.num_tokens
    return Profile(
        made_by=made_by,
        source="steps",
        model=plan.model,
        method=plan.method.value,
        device=device_label,
        is_gpu=learner.device.type != "cpu",
        precision=plan.precision.value,
        threads=plan.threads.value,
        micro_batch_tokens=plan.micro_batch_tokens.value,
        compile="on" if is_compiled else plan.compile.value,
        num_steps=plan.num_steps.value,
        num_measured=num_steps,
        tokens=tokens,
        computed_tokens=sum(step.computed_tokens or 0 for step in steps) / num_steps,
        micro_batches=sum(step.micro_batches or 0 for step in steps) / num_steps,
        phases={name: value for name, value in phases.items() if name not in _LEFT_OUT},
        seconds=seconds,
        evaluation=_evaluation(run, plan, totals, recorder.num_evaluations),
        checkpoint=_checkpoint(plan, totals, phases, recorder),
        kernels=kernels,
        useful_flop=sum(useful_flop(learner.model, batch) for batch in trials.batches) * per_step,
        optimizer_bytes=_optimizer_bytes(run),
        ceilings=measure_ceilings(learner.device, _DTYPES[plan.precision.value]),
        compute_seconds=trials.present_seconds and trials.present_seconds * per_step,
        trials=tried,
        reading=_measure_reading(run, middle, copy) if _is_reading_slow(phases, seconds) else Reading(),
        settings=_settings(run, plan),
        notes=_notes(seconds, phases.get(PROCESSOR, 0.0)),
    )


def _warm_up(run: Run) -> bool:
    """Take the first steps without evaluations and checkpoints. Return whether the whole run would be compiled."""
    plan, held_out, checkpoints = run.plan, run.held_out, run.checkpoints
    timed: list[StepTaken] = []
    listener = run.listener

    def listen(event: Event) -> None:
        if isinstance(event, StepTaken):
            timed.append(event)
        listener(event)

    run.listener = listen
    run.held_out = _NoDocuments()
    run.checkpoints = NoCheckpoints(checkpoints.folder, keep=1, on_trouble=lambda message: None)
    ending = _take_steps(run, _WARMUP + 1, compile="off")
    run.listener, run.held_out, run.checkpoints, run.plan = listener, held_out, checkpoints, plan
    if ending.status != "finished":
        raise ProfileStopped(ending.reason)
    compiler = Compiler(plan.compile.value, plan.num_steps.value)
    for event in timed:
        compiler.on_step(run.learner, event)
    return compiler.is_due(run.learner, step=run.progress.step)


def _take_steps(run: Run, num_steps: int, *, compile: str) -> Ending:
    because = "a profile"
    update = {
        "num_steps": Chosen[int](value=num_steps, because=because),
        "schedule": run.plan.schedule.model_copy(update={"value": "constant", "because": because}),
        "compile": run.plan.compile.model_copy(update={"value": compile, "because": because}),
    }
    run.plan = run.plan.model_copy(update=update)
    return train(run, handle_signals=False)


class _NoDocuments:
    """An empty split, so that nothing is evaluated."""

    index: Any = None

    def __len__(self) -> int:
        return 0

    def arrays(self, index: int) -> Any:
        raise IndexError(index)


def _mean_phases(steps: list[StepTaken]) -> dict[str, float]:
    names = dict.fromkeys(name for step in steps for name in step.phases or {})
    return {name: sum((step.phases or {}).get(name, 0.0) for step in steps) / len(steps) for name in names}


def _evaluation(run: Run, plan: Plan, totals: dict[str, float], number_measured: int) -> Rare | None:
    if not number_measured:
        return None
    answers = totals.get("answers", 0.0) / number_measured
    every, num_steps = plan.evaluate_every.value, plan.num_steps.value
    return Rare(
        seconds=totals.get("evaluate", 0.0) / number_measured + answers,
        number=1 + ceil(num_steps / every),  # one before the first step
        every=every,
        number_measured=number_measured,
        answers_seconds=answers,
    )


def _checkpoint(plan: Plan, totals: dict[str, float], phases: dict[str, float], recorder: _Recorder) -> Rare | None:
    if not recorder.num_saves:
        return None
    every = plan.save_every.value
    return Rare(
        seconds=totals.get("save", 0.0) / recorder.num_saves,
        number=ceil(plan.num_steps.value / every),
        every=every,
        number_measured=recorder.num_saves,
        queue_seconds=phases.get("save_wait", 0.0) if recorder.saves_measured > 1 else 0.0,
    )


def _optimizer_bytes(run: Run) -> float | None:
    """Return the bytes of an AdamW update: weight, gradient and two moments are read, all but the gradient written."""
    if run.config.train.optimizer != "adamw":
        return None
    return float(sum(7 * parameter.nbytes for parameter in run.learner.parameters.values()))


def _settings(run: Run, plan: Plan) -> dict[str, int | str]:
    config = run.config
    return {
        "train.threads": plan.threads.value,
        "train.micro_batch_tokens": plan.micro_batch_tokens.value,
        "train.recompute": config.train.recompute,
        "train.read_ahead": "true" if config.train.read_ahead else "false",
        "train.compile": plan.compile.value,
        "evaluate.every_steps": plan.evaluate_every.value,
        "checkpoints.every_steps": plan.save_every.value,
        "corpus": config.corpus,
    }


class LinearFlop(NamedTuple):
    """FLOP of the forward and backward pass of a model."""

    per_token: float
    """In the linear layers of the decoder."""
    per_row: float
    """In the head, for each position that passes it."""
    per_pair: float
    """In attention, for each pair of a query and a key that is not masked; causal attention has L * L / 2."""


def linear_flop(model: PreTrainedModel) -> LinearFlop:
    """Return the FLOP of a model per token, per row of the head and per pair in attention."""
    text, layers = model.config.get_text_config(), decoder_layers(model)
    per_token = 0.0
    for layer in layers:
        for module in layer.modules():
            if hasattr(module, "in_features") and hasattr(module, "out_features"):
                weight = getattr(module, "weight", None)
                # Forward, gradient of the input, and of the weight if it is trained.
                products = 3 if weight is not None and weight.requires_grad else 2
                linear: Any = module
                per_token += 2.0 * products * linear.in_features * linear.out_features
        per_token += 6.0 * sum(own.numel() for name, own in layer.named_parameters() if "lora_" in name)
    head: Any = model.get_output_embeddings()
    per_row = 2.0 * (3 if head.weight.requires_grad else 2) * head.weight.numel()
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    # Two products forward and four backward, of two operations each.
    return LinearFlop(per_token, per_row, 12.0 * width * len(layers))


def useful_flop(model: PreTrainedModel, batch: MicroBatch) -> float:
    """Return the FLOP that the forward and backward pass of a micro-batch need, without padding or recomputation."""
    flop = linear_flop(model)
    pairs = sum(length * length for length in batch.lengths) / 2
    return flop.per_token * batch.num_tokens + flop.per_row * len(batch.rows) + flop.per_pair * pairs


def _notes(seconds: float, slowed: float) -> list[str]:
    if slowed < _MIN_SLOWED * seconds:
        return []
    times = (seconds + slowed) / seconds
    return [f"other programs use the processor: a step took {times:.1f} times as long; their time is left out"]


class _Trials:
    """The documents of one step, computed with other settings in turn with the present ones."""

    def __init__(self, run: Run, documents: Numbers, *, is_compiled: bool) -> None:
        self._run, self._learner, self._is_compiled = run, run.learner, is_compiled
        self._present = run.healing.limits.cap(run.plan.micro_batch_tokens.value)
        self._documents = documents
        self.batches = self._make(self._present)
        # Uncompiled passes may not fit in the memory that compiled ones need.
        while not is_compiled and self._compute(self.batches) > _TRIAL_SECONDS and len(self._documents) > 1:
            self._documents = self._documents[: len(self._documents) // 2]
            self.batches = self._make(self._present)
        self.num_tokens = sum(batch.num_tokens for batch in self.batches)
        self.present_seconds: float | None = None

    def measure(self, listener: Callable[[Event], None]) -> list[Trial]:
        """Return the time of each variant. A variant that runs out of memory is left out."""
        variants = [*self._threads(), *self._micro_batches(), *self._recompute()]
        if self._is_compiled:  # the present kernels are compiled, and those of a variant would not be
            return []
        times: list[list[float]] = [[] for _ in variants]
        present: list[float] = []
        for turn in range(_ROUNDS):
            present.append(self._compute(self.batches))
            for number, (key, value, batches, setting) in enumerate(variants):
                if len(times[number]) < turn:
                    continue
                listener(Progress(f"trying `{key}: {value}`", turn + 1, _ROUNDS))
                try:
                    with setting():
                        times[number].append(self._compute(batches))
                except (RuntimeError, MemoryError, OutOfMemory) as error:
                    if not is_out_of_memory(error):
                        raise
                    self._learner.drop_gradients()
                    free_memory(error)
        usual = statistics.median(present)
        measured = [
            Trial(key=key, value=value, seconds=statistics.median(found), present_seconds=usual)
            for (key, value, _, _), found in zip(variants, times, strict=True)
            if len(found) == _ROUNDS
        ]
        self.present_seconds = usual
        return measured

    def _make(self, budget: int) -> list[MicroBatch]:
        groups = micro_batches(self._documents, self._run.order.lengths, budget)
        return [make_batch(self._run.documents, group) for group in groups]

    def _compute(self, batches: list[MicroBatch]) -> float:
        waited = self._learner.phases.waited or (lambda: 0.0)
        synchronize(self._learner.device)
        started, waited_before = time.perf_counter(), waited()
        self._learner.accumulate_gradients(batches, number=0, num_supervised=1)
        synchronize(self._learner.device)
        seconds = time.perf_counter() - started - (waited() - waited_before)
        self._learner.drop_gradients()
        return seconds

    def _threads(self) -> Iterator[Any]:
        if self._learner.device.type != "cpu":
            return
        present = torch.get_num_threads()

        @contextmanager
        def using(number: int) -> Iterator[None]:
            torch.set_num_threads(number)
            self._compute(self.batches[:1])  # starts the threads
            try:
                yield
            finally:
                torch.set_num_threads(present)
                self._compute(self.batches[:1])

        for number in useful_threads():
            if number != present:
                yield "train.threads", number, self.batches, partial(using, number)

    def _micro_batches(self) -> Iterator[Any]:
        for size in _MICRO_BATCHES[self._learner.device.type]:
            batches = self._make(size) if size > self._present else self.batches
            if len(batches) < len(self.batches):
                yield "train.micro_batch_tokens", size, batches, nullcontext
            if len(batches) == 1:
                return

    def _recompute(self) -> Iterator[Any]:
        mode = self._run.config.train.recompute

        @contextmanager
        def off() -> Iterator[None]:
            self._learner.recompute("off")
            try:
                yield
            finally:
                self._learner.recompute(mode)

        if mode == "on":
            yield "train.recompute", "off", self.batches, off


def _is_reading_slow(phases: dict[str, float], seconds: float) -> bool:
    return phases.get("data", 0.0) > _MIN_DATA_SHARE * seconds


def _measure_reading(run: Run, documents: Numbers, copy: Callable[[], TokenizedDocuments | None]) -> Reading:
    """Read the documents of a step from a copy of the corpus, and with several threads."""
    ahead, copied = ReadAhead(run.documents), copy()
    started = time.perf_counter()
    ahead.request(documents)
    for document in documents:
        ahead.arrays(int(document))
    ahead_seconds = time.perf_counter() - started
    if copied is None:
        return Reading(ahead_seconds=ahead_seconds)
    started = time.perf_counter()
    make_batch(copied, documents)
    return Reading(copy_seconds=time.perf_counter() - started, ahead_seconds=ahead_seconds)
