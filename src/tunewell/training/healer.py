"""Watch a run while it goes, and do about trouble what `recovery` decides: leave out, go back, change, stop."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tunewell.core.progress import Progress
from tunewell.core.units import count
from tunewell.models.placement import not_finite_names
from tunewell.records.healing import ActionName, HealingEntry
from tunewell.training.bisect import Cause, find_cause
from tunewell.training.events import Healed, Note, Sample, StepTaken
from tunewell.training.health import HealthMonitor
from tunewell.training.metrics import Finding, StepMetrics
from tunewell.training.recovery import CarryOn, Past, Rewind, Skip, Split, Stop, decide, remembered
from tunewell.training.run import Run, past_events, rewind
from tunewell.training.step_log import StepRecord

_SHOWN_DOCUMENTS = 3
_NAMED_DOCUMENTS = 50
_SAMPLES_TO_JUDGE = 2
_FEW_DOCUMENTS = 8
"""Documents that may be left out of the smallest corpus."""


class Healer:
    """Sees each step's numbers, and treats the run between two steps."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._rules = run.config.healing
        self.watch = HealthMonitor(run.about)
        self._remember()
        start = Past(run.plan.precision.value, run.learner.device.type)
        self.past = remembered(run.remedies.entries, start, self._rules)
        self._pending: list[tuple[list[Finding], StepRecord]] = []
        self._told: set[tuple[int, str]] = {(entry.step, entry.name) for entry in run.remedies.entries}
        self._repeated = _skips_since_rewind(run.remedies.entries)
        self._unexplained: set[int] = set()
        """Documents of steps that went bad and were well when they were computed again."""
        self.seconds = 0.0
        """Spent on watching, all of it."""

    def reinstate(self) -> None:
        """Go on in the precision, on the device and with the layers computed twice that the run has come to need."""
        run = self._run
        precision = None if self.past.precision == run.plan.precision.value else self.past.precision
        device = None if self.past.device == run.learner.device.type else self.past.device
        if precision or device:
            run.learner.change(precision=precision, device=device)
        if run.remedies.fitting.is_recomputing:
            run.learner.recompute(True)

    @property
    def rate_share(self) -> float:
        """Share of the planned learning rate that is used."""
        return self.past.rate_share

    def norm_limit(self) -> float:
        """Say how long the next gradient may be; any length where nothing is to be healed."""
        began = time.perf_counter()
        limit = self.watch.norm_limit() if self._rules.on else math.inf
        self.seconds += time.perf_counter() - began
        return limit

    def see(self, taken: StepRecord, event: StepTaken) -> None:
        """Judge a step by its numbers."""
        began = time.perf_counter()
        known = {key: value for key, value in event.__dict__.items() if key in StepMetrics.__dataclass_fields__}
        findings = self.watch.see(StepMetrics(**known, norm_limit=taken.norm_limit))
        if findings:
            # What one process measures the others do not, and what is treated must be known to all.
            is_alone = self._run.learner.world.size == 1
            told = [f for f in findings if f.severity == "note" or (f.name == "memory-spill" and not is_alone)]
            for finding in told:
                self._tell(finding, "none", finding.words)
            if worse := [finding for finding in findings if finding not in told]:
                self._pending.append((worse, taken))
        self.seconds += time.perf_counter() - began

    def _remember(self) -> None:
        """Know of the steps before a resume what was known when they were taken, in every process alike."""
        until = self._run.progress.step
        for event in past_events(self._run, kind="step", until=until):
            self.watch.remember(
                StepMetrics(**{key: event[key] for key in event if key in StepMetrics.__dataclass_fields__})
            )
        for event in past_events(self._run, kind="held_out", until=until):
            self.watch.remember(StepMetrics(event["step"], held_out_loss=event["loss"]))

    def look(self, step: int, loss: float, samples: list[Sample]) -> None:
        """Judge a look at the held-out rows, and what was answered there."""
        for finding in self.watch.see(StepMetrics(step, held_out_loss=loss)):
            words = finding.words
            if not math.isfinite(loss) and (broken := not_finite_names(self._run.learner.model)):
                words += f" (weight `{broken[0]}`)"
            self._tell(finding, "none", words)
        if finding := self._silence(step, samples):
            self._tell(finding, "none", finding.words)

    def _silence(self, step: int, samples: list[Sample]) -> Finding | None:
        """See every answer fall silent that was none before."""
        empty = sum(1 for sample in samples if not sample.answer.strip())
        said = self.watch.history.said
        if step == 0 or not samples or empty < len(samples):
            if samples and empty < len(samples):
                said.add("has-answered")
            return None
        if len(samples) < _SAMPLES_TO_JUDGE or "has-answered" not in said or "empty-answers" in said:
            return None
        said.add("empty-answers")
        words = f"all {len(samples)} samples are empty, and before they were not: the model has stopped answering"
        return Finding("empty-answers", "warning", step, words, {"samples": len(samples)})

    def treat(self) -> "Stop | Rewind | None":
        """Answer what was seen; a rewind has been made when it is given, a stop is for the caller to make."""
        pending, self._pending = self._pending, []
        for findings, taken in pending:
            if (action := self._treat(findings, taken)) is not None:
                return action
        return None

    def _treat(self, findings: list[Finding], taken: StepRecord) -> "Stop | Rewind | None":
        worst = findings[0]
        if (worst.step, worst.name) in self._repeated:
            return None  # left out in an earlier sitting, and now again: what was done about it is in force
        worst.numbers["step_documents"] = [int(document) for document in taken.step.documents[:_NAMED_DOCUMENTS]]
        run = self._run
        cause = Cause(None)
        numbers = (worst.numbers.get(name) for name in ("loss", "grad_norm"))
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            run.listener(Progress("looking for what went wrong"))
            if run.learner.world.is_first:
                cause = find_cause(run.learner, run.documents, taken.groups, number=taken.step.number)
            cause = run.learner.world.from_first(cause)
            if worst.name == "lr-too-high" and cause.are_weights_bad:  # updates are finite, so it was not the rate
                findings = [worst := replace(worst, name="nan-gradients", words="a number is not finite")]
        if not self._rules.on:
            self._tell(worst, "none", f"{worst.words}{_at(cause)}; healing is off", cause=Cause(cause.place))
            return None
        is_explained = self._is_explained(cause, taken)
        action = decide(
            findings, self.past, self._rules, are_weights_bad=cause.are_weights_bad, is_explained=is_explained
        )
        match action:
            case CarryOn():
                self._tell(worst, "none", worst.words)
            case Skip(finding, is_quarantining):
                cause = cause if is_quarantining else Cause(cause.place)
                self._skip(finding, cause, taken, is_explained=is_explained and bool(cause.documents))
            case Split(finding):
                self._split(finding)
            case Rewind():
                self._rewind(action, cause, taken)
                return action
            case Stop(finding, advice):
                self._tell(finding, "stop", f"{finding.words}{_at(cause)}; {advice}", cause=Cause(cause.place))
                return action
        return None

    def _is_explained(self, cause: Cause, taken: StepRecord) -> bool:
        """Whether few documents did it by themselves: others of the step are well, and little would be left out."""
        if not 0 < len(cause.documents) < len(taken.step.documents):
            return False
        left_out = len({*self._run.remedies.quarantine, *cause.documents})
        return left_out <= max(_FEW_DOCUMENTS, self._rules.max_left_out * len(self._run.order.lengths))

    def _skip(self, finding: Finding, cause: Cause, taken: StepRecord, *, is_explained: bool) -> None:
        if finding.name != "loss-spike" and not cause.documents:
            self._unexplained.update(map(int, taken.step.documents))
        who = f"; {self._documents(cause)} left out from now on" if cause.documents else ""
        again = "" if cause.place or finding.name == "loss-spike" else "; computed again, it was finite"
        words = f"{finding.words}{_at(cause)}: the update was left out{again}{who}"
        since = self._run.progress.step
        self._tell(finding, "skip", words, cause=cause, since=since, is_explained=is_explained)

    def _split(self, finding: Finding) -> None:
        run = self._run
        half = max(1, run.remedies.fitting.budget(run.plan.micro_batch_tokens.value) // 2)
        words = f"{finding.words}; from now on {count(half)} tokens are computed at once"
        self._tell(finding, "split", words, micro_batch_tokens=half)

    def _rewind(self, action: Rewind, cause: Cause, taken: StepRecord) -> None:
        run = self._run
        before, lost = run.progress.step, run.seconds["train"]
        num_rewinds = self.past.num_rewinds
        run.listener(Progress("going back to a checkpoint"))
        step = rewind(run, not_after=action.not_after, or_later=action.or_later, are_weights_bad=cause.are_weights_bad)
        self.watch.rewind(step)
        self._pending.clear()
        self._repeated.clear()
        self._told = {(at, name) for at, name in self._told if at <= step}
        self._unexplained.update(map(int, taken.step.documents))
        if action.is_quarantining and not cause.documents and num_rewinds:
            # It was well when it was computed again, and yet it came back: the same is not tried a third time.
            cause = Cause(cause.place, tuple(sorted(self._unexplained)))
        elif not action.is_quarantining:
            cause = Cause(cause.place, are_weights_bad=cause.are_weights_bad)
        if action.precision or action.device:
            run.learner.change(precision=action.precision, device=action.device)
        changes = [
            f"without {self._documents(cause)}" if cause.documents else "",
            f"with {action.rate_share:.3g} of the planned rate" if action.rate_share else "",
            f"in {action.precision}" if action.precision else "",
            f"on the {action.device.upper()}" if action.device else "",
            "with the model's weights read again" if cause.are_weights_bad else "",
        ]
        how = ", ".join(change for change in changes if change)
        words = f"{action.finding.words}{_at(cause)}: went back from step {count(before)} to step {count(step)}"
        entry = {
            "rewound_to": step,
            "rate_share": action.rate_share,
            "precision": action.precision,
            "device": action.device,
            "seconds_lost": round(lost * (before - step) / max(1, before), 3),
        }
        self._tell(
            action.finding, "rewind", f"{words}, and goes on {how}" if how else words, cause=cause, since=step, **entry
        )

    def _documents(self, cause: Cause) -> str:
        shown = ", ".join(self._run.name_of(document) for document in cause.documents[:_SHOWN_DOCUMENTS])
        more = len(cause.documents) - _SHOWN_DOCUMENTS
        return f"{shown} and {count(more)} more" if more > 0 else shown

    def tell_memory(self, step: int, action: ActionName, words: str, **values: Any) -> None:
        """Write down what was done where memory did not suffice."""
        severity = "fault" if action == "stop" else "warning"
        self._tell(Finding("out-of-memory", severity, step, words), action, words, **values)

    def _tell(
        self, finding: Finding, action: ActionName, words: str, *, cause: Cause | None = None, **values: Any
    ) -> None:
        cause = cause or Cause(None)
        rows = [self._run.name_of(document) for document in cause.documents[:_NAMED_DOCUMENTS]]
        entry = HealingEntry(
            finding.step,
            finding.name,
            finding.severity,
            action,
            words,
            numbers=finding.numbers | ({"rows": rows} if rows else {}),
            documents=list(cause.documents),
            place=cause.place,
            **values,
        )
        if action in ("skip", "rewind", "stop"):
            self.past = self.past.at(entry.step, self._rules).after(entry)
        if (entry.step, entry.name) in self._told and action in ("none", "skip"):
            return  # seen again on a resume, where it is in force already
        self._told.add((entry.step, entry.name))
        self._run.remedies.write(entry)
        if finding.severity != "note" or action != "none":
            self._run.listener(Healed(entry))
        else:
            self._run.listener(Note(f"step {count(entry.step)}: {words}"))


def _at(cause: Cause) -> str:
    return f" ({cause.place})" if cause.place else ""


def _skips_since_rewind(entries: Sequence[HealingEntry]) -> set[tuple[int, str]]:
    """List the steps whose updates were left out and, after a resume, may be taken again."""
    last = max((place for place, entry in enumerate(entries) if entry.action == "rewind"), default=-1)
    return {(entry.step, entry.name) for entry in entries[last + 1 :] if entry.action == "skip"}
