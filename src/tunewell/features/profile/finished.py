"""A profile from the events of steps; of a finished run, from its plan and its events. No torch here."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.features.profile.records import Profile, Rare
from tunewell.records.events import read_events
from tunewell.records.plan import Plan, read_plan

_LEFT_OUT = frozenset({"evaluate", "answers", "save", "save_wait", "processor"})
"""Phases that are not part of a step: work that is done once in many steps, and time that other programs took."""


def make_profile(plan: Plan, steps: Sequence[Mapping[str, Any]], **more: Any) -> Profile:
    """Return the profile of some steps, given as their events. `more` has the fields that the events do not tell."""
    phases = {name: seconds for name, seconds in mean_phases(steps).items() if name not in _LEFT_OUT}
    settings: dict[str, Any] = {
        "train.read_ahead": "true" if plan.config.get("train", {}).get("read_ahead") else "false",
        "train.compile": plan.compile.value,
        "evaluate.every_steps": plan.evaluate_every.value,
        "checkpoints.every_steps": plan.save_every.value,
    }
    known: dict[str, Any] = {
        "made_by": plan.made_by,
        "model": plan.model,
        "method": plan.method.value,
        "device": plan.device.value,
        "is_gpu": plan.device.value != "cpu",
        "precision": plan.precision.value,
        "threads": plan.threads.value,
        "micro_batch_tokens": plan.micro_batch_tokens.value,
        "compile": plan.compile.value,
        "num_steps": plan.num_steps.value,
        "num_measured": len(steps),
        "tokens": _mean(steps, "tokens"),
        "computed_tokens": _mean(steps, "computed_tokens"),
        "micro_batches": _mean(steps, "micro_batches"),
        "phases": phases,
        "seconds": sum(phases.values()) or _mean(steps, "seconds"),
    }
    return Profile(**{**known, **more, "settings": settings | more.get("settings", {})})


def mean_phases(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean seconds of each phase."""
    found = [step.get("phases") or {} for step in steps]
    names = dict.fromkeys(name for phases in found for name in phases)
    return {name: sum(phases.get(name, 0.0) for phases in found) / len(steps) for name in names}


def _mean(steps: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [value for step in steps if (value := step.get(name)) is not None]
    return sum(values) / len(values) if len(values) == len(steps) else None


def rare_work(seconds: float, number_measured: int, **more: Any) -> Rare | None:
    """Return work that took `seconds` in all; None if none was measured."""
    if not number_measured:
        return None
    return Rare(seconds=seconds / number_measured, number_measured=number_measured, **more)


def read_profile(folder: Path) -> Profile:
    """Return the profile of a run; raise UserError if it has no steps."""
    plan = read_plan(folder)
    events = read_events(folder / "events.jsonl")
    steps = [event for event in events if event.get("kind") == "step"]
    if not steps:
        raise UserError(
            f"the run `{folder}` has no finished step", fix="profile some steps: `tunewell profile --steps 20`"
        )
    evaluations = [event["seconds"] for event in events if event.get("kind") == "held_out"]
    # The last checkpoint is written after the last step's event.
    num_saves = sum("save" in (step.get("phases") or {}) for step in steps)
    totals = {name: seconds * len(steps) for name, seconds in mean_phases(steps).items()}
    num_evaluations = len(evaluations)
    evaluation = rare_work(
        sum(evaluations),
        num_evaluations,
        number=num_evaluations,
        every=plan.evaluate_every.value,
        answers_seconds=totals.get("answers", 0.0) / max(1, num_evaluations),
    )
    waited = totals.get("save_wait", 0.0) / len(steps)
    checkpoint = rare_work(
        totals.get("save", 0.0), num_saves, number=num_saves, every=plan.save_every.value, queue_seconds=waited
    )
    return make_profile(plan, steps, source="run", num_steps=len(steps), evaluation=evaluation, checkpoint=checkpoint)
