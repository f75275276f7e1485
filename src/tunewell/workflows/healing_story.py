"""Tell what a run went through: what was healed, what that cost, and what to change next time."""

from collections.abc import Sequence

from tunewell.core.units import count, duration
from tunewell.records.healing import HealingEntry

_SHOWN = 6


def story(entries: Sequence[HealingEntry]) -> list[str]:
    """Give a line for each thing that was more than a note, the first few of many, and one for what it all cost."""
    told = [entry for entry in entries if entry.severity != "note" or entry.action != "none"]
    lines = [_line(entry) for entry in told[:_SHOWN]]
    if len(told) > _SHOWN:
        lines.append(f"and {count(len(told) - _SHOWN)} more, in `healing.jsonl`")
    return [*lines, *([cost] if (cost := _cost(told)) else [])]


def advice(entries: Sequence[HealingEntry]) -> list[str]:
    """Say what to change so that the next run need not be healed."""
    found: list[str] = []
    limits = [entry.micro_batch_tokens for entry in entries if entry.micro_batch_tokens is not None]
    if limits:
        found.append(f"set `train.micro_batch_tokens: {limits[-1]}`: more did not fit into memory")
    if any(entry.is_recomputing for entry in entries):
        found.append("set `train.recompute: true`: documents did not fit into memory without")
    shares = [entry.rate_share for entry in entries if entry.rate_share is not None]
    if shares:
        found.append(f"multiply `train.learning_rate` by {shares[-1]:g}: at the planned rate the run went wrong")
    precisions = [entry.precision for entry in entries if entry.precision is not None]
    if precisions:
        found.append(f"set `train.precision: {precisions[-1]}`: numbers overflowed in 16 bits")
    if any(entry.device for entry in entries):
        found.append("set `device: cpu`: numbers went bad on the GPU alone")
    rows = [row for entry in entries if entry.documents for row in entry.numbers.get("rows", [])]
    if rows:
        found.append(f"look at {', '.join(dict.fromkeys(rows[:3]))}: left out, since numbers went bad with them")
    names = {entry.name for entry in entries}
    if "overfitting" in names:
        found.append("train for fewer `train.epochs`, or set `evaluate.patience: 2`; the best checkpoint is kept")
    if "initial-loss-implausible" in names:
        found.append("check that the weights are whole and the tokenizer is the model's own: the first loss was absurd")
    if "killed" in names:
        found.append("close other programs or use a smaller `train.micro_batch_tokens`: the system ended the run")
    return found


def _line(entry: HealingEntry) -> str:
    return f"step {count(entry.step)}: {entry.words}"


def _cost(told: Sequence[HealingEntry]) -> str:
    skipped = sum(1 for e in told if e.action == "skip" and e.name != "out-of-memory")
    again = sum(1 for e in told if e.action in ("split", "recompute") and e.micro_batch_tokens is None)
    back = [e for e in told if e.action == "rewind"]
    restarts = sum(1 for e in told if e.action == "restart")
    rows = len({document for e in told for document in e.documents})
    lost = sum(e.seconds_lost for e in told)
    parts = [
        f"{count(skipped, 'update')} left out" if skipped else "",
        f"{count(rows, 'document')} left out" if rows else "",
        f"{count(again, 'step')} taken again in smaller parts" if again else "",
        f"{count(len(back), 'time')} back to a checkpoint" if back else "",
        f"{count(restarts, 'restart')}" if restarts else "",
        f"about {duration(lost)} lost" if lost >= 1 else "",
    ]
    words = ", ".join(part for part in parts if part)
    return f"in all: {words}" if words else ""
