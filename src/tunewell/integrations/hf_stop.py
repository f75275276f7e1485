"""How a training that another trainer runs is ended: with what was seen, where, and what to do."""

from pathlib import Path

from tunewell.core.units import count

_ADVICE = {
    "weight": "load the model or the last good checkpoint again: this weight was broken before the step",
    "output": "look at the rows of this batch; if they are fine, lower `learning_rate`, or leave 16 bits for fp32",
    "gradient": "lower `learning_rate`, or leave 16 bits for fp32",
    "loss-scale-exhausted": "use `bf16=True` in place of `fp16=True`, or fp32 where the device has no bf16",
    "lr-too-high": "go back to a checkpoint from before it and lower `learning_rate`, or warm up for longer",
    "zero-grad-no-learning": "check that what should be trained has `requires_grad`; with gradient checkpointing and "
    "an adapter call `model.enable_input_require_grads()`",
    "loss-zero-collapse": "check that labels are not all -100, and that the model's weights are finite",
}
_OTHERWISE = "start again from the last checkpoint; if it happens at the same step, look at the rows of that batch"


class HealthStop(RuntimeError):
    """Ends a training that cannot go on, and says what was seen, where, and what to do."""

    def __init__(self, what: str, *, step: int, place: str | None, log: Path, fix: str) -> None:
        where = f"\n  where: {place}" if place else ""
        super().__init__(f"step {count(step)}: {what}{where}\n  log:   {log}\n  fix:   {fix}")
        self.step = step
        self.place = place


def advice(name: str, place: str | None = None) -> str:
    """Say what to do about a finding; `place` begins with what went bad: a weight, an output or a gradient."""
    kind = place.partition(" ")[0] if place else ""
    return _ADVICE.get(name) or _ADVICE.get(kind) or _OTHERWISE
