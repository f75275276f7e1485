"""The profile of a finished run, from its plan and its events; no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.features.profile.records import Profile, Rare
from tunewell.records.events import read_events
from tunewell.records.plan import Plan, read_plan

_RARE = frozenset({"evaluate", "answers", "save", "save_wait"})


def read_profile(folder: Path) -> Profile:
    """Return the profile of a run; raise UserError if it has no steps."""
    plan = read_plan(folder)
    events = read_events(folder / "events.jsonl")
    steps = [event for event in events if event.get("kind") == "step"]
    if not steps:
        raise UserError(
            f"the run `{folder}` has no finished step", fix="profile some steps: `tunewell profile --steps 20`"
        )
    phases = _means(steps)
    kept = {name: seconds for name, seconds in phases.items() if name not in _RARE}
    train: dict[str, Any] = plan.config.get("train", {})
    return Profile(
        made_by=plan.made_by,
        source="run",
        model=plan.model,
        method=plan.method.value,
        device=plan.device.value,
        is_gpu=plan.device.value != "cpu",
        precision=plan.precision.value,
        threads=plan.threads.value,
        micro_batch_tokens=plan.micro_batch_tokens.value,
        compile=plan.compile.value,
        num_steps=len(steps),
        num_measured=len(steps),
        tokens=sum(step["tokens"] for step in steps) / len(steps),
        computed_tokens=_mean(steps, "computed_tokens"),
        micro_batches=_mean(steps, "micro_batches"),
        phases=kept,
        seconds=sum(kept.values()) or sum(step["seconds"] for step in steps) / len(steps),
        evaluation=_evaluations(events, plan, phases),
        checkpoint=_checkpoints(steps, plan, phases),
        settings={
            "train.read_ahead": "true" if train.get("read_ahead") else "false",
            "train.compile": plan.compile.value,
            "evaluate.every_steps": plan.evaluate_every.value,
            "checkpoints.every_steps": plan.save_every.value,
        },
    )


def _means(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    found = [step.get("phases") or {} for step in steps]
    names = dict.fromkeys(name for phases in found for name in phases)
    return {name: sum(phases.get(name, 0.0) for phases in found) / len(steps) for name in names}


def _mean(steps: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [value for step in steps if (value := step.get(name)) is not None]
    return sum(values) / len(values) if len(values) == len(steps) else None


def _evaluations(events: Sequence[dict[str, Any]], plan: Plan, phases: dict[str, float]) -> Rare | None:
    found = [event for event in events if event.get("kind") == "held_out"]
    if not found:
        return None
    steps = sum(event.get("kind") == "step" for event in events)
    return Rare(
        seconds=sum(event["seconds"] for event in found) / len(found),
        number=len(found),
        every=plan.evaluate_every.value,
        number_measured=len(found),
        answers_seconds=phases.get("answers", 0.0) * steps / len(found),
    )


def _checkpoints(steps: Sequence[dict[str, Any]], plan: Plan, phases: dict[str, float]) -> Rare | None:
    """Return the cost of the checkpoints, without the last one, which is written after the last step's event."""
    number = sum("save" in (step.get("phases") or {}) for step in steps)
    if not number:
        return None
    return Rare(
        seconds=phases["save"] * len(steps) / number,
        number=number,
        every=plan.save_every.value,
        number_measured=number,
        queue_seconds=phases.get("save_wait", 0.0),
    )
