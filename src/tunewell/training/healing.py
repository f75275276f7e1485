"""The healer: check each step, find the cause of a bad step (NaN, spike), and apply the remedy of `recovery.py`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tunewell.core.progress import Progress
from tunewell.core.text import shorten_line
from tunewell.core.units import count, percent
from tunewell.models.load import not_finite_names
from tunewell.records.healing import ActionName, HealingEntry
from tunewell.records.report import Fault
from tunewell.training.bisect import Cause, find_cause
from tunewell.training.events import Evaluated, Healed, Note, StepTaken
from tunewell.training.health import HealthFinding, HealthMonitor, StepMetrics, is_far_above
from tunewell.training.log_rules import flat_loss
from tunewell.training.recovery import RecoveryHistory, Rewind, ShrinkMicroBatches, Skip, Stop, decide
from tunewell.training.run import Run, past_events, rewind
from tunewell.training.step import StepRecord

_SHOWN_DOCUMENTS = 3
_NAMED_DOCUMENTS = 50
_MIN_RISE = 0.05
"""Share by which the held-out loss must rise in a whole run to be called worse than before training."""
_FLAT, _VERY_FLAT, _MIN_STEPS = 0.005, 0.0005, 16
"""A loss that changes by less than this share in at least this many steps is flat. The held-out loss must be very flat
if the training loss ended lower: the model may learn rows that do not help with others."""
_MIN_EVALUATIONS = 3
"""Evaluations after which a held-out loss is called flat before the end of the run."""
_SHOWN_ANSWERS, _SHOWN_CHARS = 2, 60
_DEGENERATE_IN_A_ROW = 2
_FAULT_WORDS: dict[Fault, str] = {
    "ends_at_once": "are empty",
    "empty": "are empty",
    "loops": "loop",
    "echo": "repeat the question",
}
_UNKNOWN = Cause(None)
_FEW_DOCUMENTS = 8
"""Number of documents that may be left out of any corpus, however small."""


class Healer:
    """Checks the metrics of each step, and applies remedies between two steps."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._rules = run.config.healing
        self.monitor = HealthMonitor(run.about)
        self._load_history()
        start = RecoveryHistory(run.plan.precision.value, run.learner.device.type)
        self.history = start.after_all(run.healing.entries, self._rules)
        self._pending: list[tuple[list[HealthFinding], StepRecord]] = []
        self._last_record: StepRecord | None = None
        self._reported: set[tuple[int, str]] = {(entry.step, entry.name) for entry in run.healing.entries}
        self._repeated = _skips_since_rewind(run.healing.entries)
        self._unexplained: set[int] = set()
        """Documents of bad steps that were finite when recomputed."""
        self.stop: Stop | None = None
        """Set by an evaluation that ends the run."""

    def restore(self) -> None:
        """Restore the precision, device and gradient checkpointing that remedies had changed before a resume."""
        run = self._run
        precision = None if self.history.precision == run.plan.precision.value else self.history.precision
        device = None if self.history.device == run.learner.device.type else self.history.device
        if precision or device:
            run.learner.change(precision=precision, device=device)
        if run.healing.limits.is_recomputing:
            run.learner.recompute("on")

    def on_step(self, record: StepRecord, event: StepTaken) -> None:
        """Check the metrics of a step. Report notes at once, and queue problems for `apply`."""
        self._last_record = record
        findings = self.monitor.observe(replace(_metrics(event.__dict__), norm_limit=record.norm_limit))
        # Memory use differs between ranks, but all ranks must apply the same remedy: a spill is only reported.
        is_alone = self._run.learner.world.size == 1
        remarks = [f for f in findings if f.severity == "note" or (f.name == "memory-spill" and not is_alone)]
        for finding in remarks:
            self._report(finding, "none", finding.words)
        if worse := [finding for finding in findings if finding not in remarks]:
            self._pending.append((worse, record))
        if self._is_flat_due(event.step):
            self._check_flat(event.step)

    def _load_history(self) -> None:
        """Add the steps before a resume to the monitor, on every rank."""
        until = self._run.progress.step
        for event in past_events(self._run, kind="step", until=until):
            self.monitor.remember(_metrics(event))
        for event in past_events(self._run, kind="held_out", until=until):
            self.monitor.remember(StepMetrics(event["step"], held_out_loss=event["loss"]))
            self.monitor.add_answers(event["step"], event.get("are_degenerate"), event.get("num_faulty", 0))

    def on_evaluation(self, event: Evaluated) -> None:
        """Check the loss and the sample answers of an evaluation."""
        best_share = self._run.progress.most_right or 0.0
        for finding in self.monitor.observe(StepMetrics(event.step, held_out_loss=event.loss)):
            words = finding.words
            if not math.isfinite(event.loss) and (broken := not_finite_names(self._run.learner.model)):
                words += f" (weight `{broken[0]}`)"
            if finding.name == "overfitting" and event.right_words:
                words += f"; of the questions, {event.right_words} (best: {percent(best_share, 0)})"
            self._report(finding, "none", words)
        if self._last_record and (finding := self._held_out_divergence(event)):
            self._pending.append(([finding], self._last_record))
        if finding := self._degenerate_answers(event):
            is_deciding = self._rules.on and not self._pending  # a rewind discards these answers
            action = decide([finding], self.history, self._rules) if is_deciding else None
            self.stop = action if isinstance(action, Stop) else None
            advice = f". {self.stop.advice}" if self.stop else ""
            self._report(finding, "stop" if self.stop else "none", f"{finding.words}{advice}")

    def _held_out_divergence(self, event: Evaluated) -> HealthFinding | None:
        """Return a finding if two evaluations in a row, or the last one, are far above the one at step 0.

        The step rules need many steps, and they do not know the loss before training if the first updates destroyed
        the model. The held-out rows are always the same, so that two evaluations are enough.
        """
        monitor = self.monitor
        (first_step, first), *later = monitor.held_out
        needed = 1 if event.step == self._run.plan.num_steps.value else 2
        is_above = len(later) >= needed and all(is_far_above(loss, first, monitor.about) for _, loss in later[-needed:])
        if first_step != 0 or not is_above or monitor.has_learned() or "lr-too-high" in monitor.reported:
            return None
        monitor.reported.add("lr-too-high")
        rates = [metrics.learning_rate for metrics in monitor.recent if metrics.learning_rate is not None]
        words = f"the held-out loss rose from {first:.3g} before training to {event.loss:.3g}"
        numbers = {"low": first, "low_step": 0, "now": event.loss, "learning_rate": max(rates, default=None)}
        return HealthFinding("lr-too-high", "fault", event.step, words, numbers)

    def conclude(self) -> str:
        """Report a loss that rose or stayed flat over the whole run. Return a short description, or "" if it fell."""
        monitor, step, losses = self.monitor, self._run.progress.step, self._held_out_losses()
        if len(losses) > 1 and losses[-1] > (1 + _MIN_RISE) * losses[0] and not monitor.has_learned():
            if "lr-too-high" not in monitor.reported:
                words = f"the held-out loss ended at {losses[-1]:.3g}, above {losses[0]:.3g} before training"
                numbers = {"low": losses[0], "now": losses[-1]}
                self._report(HealthFinding("lr-too-high", "warning", step, words, numbers), "none", words)
            return "the held-out loss rose"
        return self._check_flat(step)

    def _held_out_losses(self) -> list[float]:
        """Return the held-out losses, that of the base model first; an empty list if that one is not known."""
        found = [(step, loss) for step, loss in self.monitor.held_out if math.isfinite(loss)]
        return [loss for _, loss in found] if found and found[0][0] == 0 else []

    def _is_flat_due(self, step: int) -> bool:
        """Return whether enough of the run is over to call its loss flat before its end."""
        plan = self._run.plan
        if step % plan.evaluate_every.value or step < 2 * plan.warmup_steps.value:
            return False
        found = len(self._held_out_losses())
        return found > _MIN_EVALUATIONS if found else 2 * step >= plan.num_steps.value

    def _check_flat(self, step: int) -> str:
        """Report a loss that has not fallen since the start, once. Return a short description, or "" if it fell."""
        monitor, run = self.monitor, self._run
        name, losses = "held-out", self._held_out_losses()
        if len(losses) > 1:
            limit = _VERY_FLAT if monitor.has_learned() else _FLAT
            is_flat = step >= _MIN_STEPS and all(abs(loss - losses[0]) < limit * losses[0] for loss in losses)
            words = f"the held-out loss stayed at {losses[0]:.3g} for {count(step, 'step')}"
            numbers = {"first": losses[0], "last": losses[1:]}
            finding = HealthFinding("flat-loss", "warning", step, words, numbers) if is_flat else None
        else:
            name, events = "training", past_events(run, kind="step", until=step)
            finding = flat_loss([_metrics(event) for event in events])
        if finding is None:
            return ""
        if "flat-loss" not in monitor.reported:
            monitor.reported.add("flat-loss")
            words = (
                f"{finding.words}: the learning rate is too low, too few layers are trainable, or the supervised "
                "tokens do not depend on the text before them. In the next run, try "
                f"`--set train.learning_rate={min(1, 10 * run.plan.learning_rate.value):.1g}` or `auto`; `tunewell "
                "inspect` shows the supervised tokens"
            )
            self._report(finding, "none", words)
        return f"the {name} loss did not fall"

    def _degenerate_answers(self, event: Evaluated) -> HealthFinding | None:
        """Return a finding if most samples are empty, loop or echo at two evaluations in a row, step 0 excluded."""
        monitor = self.monitor
        monitor.add_answers(event.step, event.are_degenerate, event.num_faulty)
        if not event.are_degenerate or len(monitor.degenerate) != _DEGENERATE_IN_A_ROW:
            return None
        faulty = [sample for sample in event.samples if sample.fault]
        faults = sorted({_FAULT_WORDS[sample.fault] for sample in faulty if sample.fault})
        answers = [sample.answer for sample in faulty[:_SHOWN_ANSWERS]]
        steps = " and ".join(count(step) for step in monitor.degenerate)
        shown = ", ".join(f'"{shorten_line(answer, _SHOWN_CHARS)}"' for answer in answers)
        share = "all" if len(faulty) == len(event.samples) else f"{len(faulty)} of"
        words = f"{share} {len(event.samples)} sample answers {' or '.join(faults)} at steps {steps}: {shown}"
        # A model with random weights repeats a few tokens until it has learned to answer.
        is_new = self._run.about.is_from_scratch and not monitor.has_answered
        numbers = {"faults": faults, "steps": list(monitor.degenerate), "answers": answers}
        return HealthFinding("degenerate-answers", "note" if is_new else "warning", event.step, words, numbers)

    def apply(self) -> "Stop | Rewind | None":
        """Apply remedies for the last steps. A returned `Rewind` is already done; the caller must act on a `Stop`."""
        pending, self._pending = self._pending, []
        for findings, record in pending:
            if (action := self._apply(findings, record)) is not None:
                return action
        return None

    def _apply(self, findings: list[HealthFinding], record: StepRecord) -> "Stop | Rewind | None":
        run, worst = self._run, findings[0]
        if (worst.step, worst.name) in self._repeated:
            return None  # already skipped before the resume; its remedy is in force
        worst.numbers["step_documents"] = [int(document) for document in record.step.documents[:_NAMED_DOCUMENTS]]
        cause = self._find_cause(worst, record)
        if worst.name == "lr-too-high" and cause.are_weights_bad:
            # Updates are always finite, so the learning rate cannot have made the weights NaN.
            worst = replace(worst, name="nan-gradients", words="the loss or the gradient is not finite")
            findings = [worst]
        if not self._rules.on:
            self._report(worst, "none", f"{worst.words}{_where(cause)}; healing is off", cause=Cause(cause.tensor))
            return None
        is_explained = self._is_explained(cause, record)
        action = decide(
            findings, self.history, self._rules, are_weights_bad=cause.are_weights_bad, is_explained=is_explained
        )
        match action:
            case None:
                self._report(worst, "none", worst.words)
            case Skip(finding, is_quarantining):
                cause = cause if is_quarantining else Cause(cause.tensor)
                self._skip(finding, cause, record, is_explained=is_explained and bool(cause.documents))
            case ShrinkMicroBatches(finding):
                half = max(1, run.micro_batch_tokens // 2)
                words = f"{finding.words}; from now on, {count(half)} tokens are computed at once"
                self._report(finding, "split", words, micro_batch_tokens=half)
            case Rewind():
                self._rewind(action, cause, record)
                return action
            case Stop(finding, advice):
                self._report(finding, "stop", f"{finding.words}{_where(cause)}. {advice}", cause=Cause(cause.tensor))
                return action
        return None

    def _find_cause(self, worst: HealthFinding, record: StepRecord) -> Cause:
        """Recompute a step on rank 0 if it was not finite, and return the cause on all ranks."""
        run, cause = self._run, _UNKNOWN
        numbers = (worst.numbers.get(name) for name in ("loss", "grad_norm"))
        if all(not isinstance(number, float) or math.isfinite(number) for number in numbers):
            return cause
        run.listener(Progress("finding the rows that made the loss NaN"))
        if run.learner.world.is_first:
            cause = find_cause(run.learner, run.documents, record.groups, number=record.step.number)
        return run.learner.world.broadcast(cause)

    def _is_explained(self, cause: Cause, record: StepRecord) -> bool:
        """Return whether documents are the cause and are few enough to be left out."""
        if not 0 < len(cause.documents) < len(record.step.documents):
            return False
        left_out = len({*self._run.healing.quarantine, *cause.documents})
        return left_out <= max(_FEW_DOCUMENTS, self._rules.max_left_out * len(self._run.order.lengths))

    def _skip(self, finding: HealthFinding, cause: Cause, record: StepRecord, *, is_explained: bool) -> None:
        if finding.name != "loss-spike" and not cause.documents:
            self._unexplained.update(map(int, record.step.documents))
        who = f"; {self._documents(cause)} left out from now on" if cause.documents else ""
        again = "" if cause.tensor or finding.name == "loss-spike" else "; it was finite when computed again"
        words = f"{finding.words}{_where(cause)}: the update was skipped{again}{who}"
        since = self._run.progress.step
        self._report(finding, "skip", words, cause=cause, since=since, is_explained=is_explained)

    def _rewind(self, action: Rewind, cause: Cause, record: StepRecord) -> None:
        run = self._run
        before, lost = run.progress.step, run.seconds["train"]
        num_rewinds = self.history.num_rewinds
        run.listener(Progress("going back to a checkpoint"))
        step = rewind(run, not_after=action.not_after, or_later=action.or_later, are_weights_bad=cause.are_weights_bad)
        self.monitor.rewind(step)
        self._pending.clear()
        self._repeated.clear()
        self._reported = {(at, name) for at, name in self._reported if at <= step}
        self._unexplained.update(map(int, record.step.documents))
        if action.is_quarantining and not cause.documents and num_rewinds:
            # The steps were finite when recomputed, but the problem came back: leave out all suspect documents.
            cause = Cause(cause.tensor, tuple(sorted(self._unexplained)))
        elif not action.is_quarantining:
            cause = Cause(cause.tensor, are_weights_bad=cause.are_weights_bad)
        if action.precision or action.device:
            run.learner.change(precision=action.precision, device=action.device)
        changes = [
            f"without {self._documents(cause)}" if cause.documents else "",
            f"with {action.rate_share:.3g} times the planned learning rate" if action.rate_share else "",
            f"in {action.precision}" if action.precision else "",
            f"on the {action.device.upper()}" if action.device else "",
            "with the base model's weights loaded again" if cause.are_weights_bad else "",
        ]
        how = ", ".join(change for change in changes if change)
        words = f"{action.finding.words}{_where(cause)}: rewound from step {count(before)} to step {count(step)}"
        self._report(
            action.finding,
            "rewind",
            f"{words}, continuing {how}" if how else words,
            cause=cause,
            since=step,
            rewound_to=step,
            rate_share=action.rate_share,
            precision=action.precision,
            device=action.device,
            seconds_lost=round(lost * (before - step) / max(1, before), 3),
        )

    def _documents(self, cause: Cause) -> str:
        shown = ", ".join(self._run.name_of(document) for document in cause.documents[:_SHOWN_DOCUMENTS])
        more = len(cause.documents) - _SHOWN_DOCUMENTS
        return f"{shown} and {count(more)} more" if more > 0 else shown

    def memory_reporter(self, step: int) -> Callable[..., None]:
        """Return a function that records a remedy for an out-of-memory error: action, message and new limits."""

        def report(action: ActionName, words: str, **values: Any) -> None:
            severity = "fault" if action == "stop" else "warning"
            self._report(HealthFinding("out-of-memory", severity, step, words), action, words, **values)

        return report

    def _report(
        self, finding: HealthFinding, action: ActionName, words: str, *, cause: Cause = _UNKNOWN, **values: Any
    ) -> None:
        rows = [self._run.name_of(document) for document in cause.documents[:_NAMED_DOCUMENTS]]
        entry = HealingEntry(
            finding.step,
            finding.name,
            finding.severity,
            action,
            words,
            numbers=finding.numbers | ({"rows": rows} if rows else {}),
            documents=list(cause.documents),
            place=cause.tensor,
            **values,
        )
        if action in ("skip", "rewind", "stop"):
            self.history = self.history.at(entry.step, self._rules).after(entry)
        if (entry.step, entry.name) in self._reported and action in ("none", "skip"):
            return  # reported before the resume
        self._reported.add((entry.step, entry.name))
        self._run.healing.add(entry)
        is_note = finding.severity == "note" and action == "none"
        self._run.listener(Note(f"step {count(entry.step)}: {words}") if is_note else Healed(entry))


def _metrics(event: dict[str, Any]) -> StepMetrics:
    return StepMetrics(**{key: event[key] for key in event if key in StepMetrics.__dataclass_fields__})


def _where(cause: Cause) -> str:
    return f" ({cause.tensor})" if cause.tensor else ""


def _skips_since_rewind(entries: Sequence[HealingEntry]) -> set[tuple[int, str]]:
    """Return the steps skipped since the last rewind, which a resumed run may skip again."""
    last = max((index for index, entry in enumerate(entries) if entry.action == "rewind"), default=-1)
    return {(entry.step, entry.name) for entry in entries[last + 1 :] if entry.action == "skip"}
