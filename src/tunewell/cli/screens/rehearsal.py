"""The screen after `tunewell train --rehearse`: passed or not and why, losses, an answer, memory and time."""

from tunewell.cli.render import fitting, folded_table, hanging, one_line
from tunewell.cli.screens.numbers import format_loss, format_speed
from tunewell.core.units import count, duration, size_bytes
from tunewell.runs.rehearsal import Rehearsal

_ANSWER_COLUMNS = 200


def rehearsal_screen(result: Rehearsal) -> str:
    """Return the screen of a rehearsal."""
    lines = [hanging("FAIL  ", f"{what}{f'. {remedy}' if remedy else ''}") for what, remedy in result.problems]
    if not lines:
        lines = ["PASS  the loss falls and answers change"]
    lines += ["", folded_table(_rows(result))]
    lines += [hanging("note: ", note) for note in dict.fromkeys(result.notes)]
    if not result.problems:
        lines.append(hanging("next: ", f"`{result.next_command}`"))
    return "\n".join(lines)


def _rows(result: Rehearsal) -> list[list[str]]:
    plan, num_steps = result.plan, result.plan.num_steps.value
    steps = f"{count(len(result.steps), 'step')} of up to {count(result.step_tokens)} tokens"
    losses = f"{format_loss(result.loss_before)} -> {format_loss(result.loss_after)}"
    rows = [
        ["trained", f"{steps}, on {count(result.num_rows)} of {count(result.num_documents)} training rows"],
        [
            "loss",
            f"{losses} on these rows; it fell in {count(int((result.falls > 0).sum()))} of {count(result.num_rows)}",
        ],
    ]
    pair = next((pair for pair in result.answers if pair[0].answer != pair[1].answer), None)
    if pair is not None:
        before, after = pair
        texts = {"question": before.question, "  before": before.answer, "  after": after.answer}
        texts["  expected"] = before.reference
        rows += [[label, fitting(one_line(text), _ANSWER_COLUMNS) or "(empty)"] for label, text in texts.items()]
    if result.peak_memory_bytes:
        size, micro_batch = size_bytes(result.peak_memory_bytes), plan.micro_batch_tokens.value
        less = f"; the run has {count(micro_batch)}, which needs more" if result.step_tokens < micro_batch else ""
        rows.append(
            ["memory", f"{size} at most, with {count(min(result.step_tokens, micro_batch))} tokens at once{less}"]
        )
    speed, step = format_speed(result.tokens_per_second), duration(result.full_seconds / num_steps)
    about = "at most about" if result.step_tokens < plan.micro_batch_tokens.value else "about"
    stages = ", ".join(f"{name} {duration(seconds)}" for name, seconds in result.stages.items() if seconds >= 0.05)
    return [
        *rows,
        ["speed", f"{speed}: {step} per step of the run"],
        ["whole run", f"{count(num_steps, 'step')}, {about} {duration(result.full_seconds)}, without evaluations"],
        ["time", f"{duration(result.seconds)}: {stages}"],
    ]
