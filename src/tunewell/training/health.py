"""Is this run well: judged on plain numbers, for our own runs as they go and for any log that is replayed.

    readings -> Watch.see -> findings     live, one step at a time; memory of the last 128
    readings -> replay   -> findings      a whole log, ours or another trainer's, with what only its end shows

A finding has a name, how bad it is, the numbers that show it, and a plain line. Every threshold was chosen on logbooks
of long runs and threads about short ones; a healthy run must raise nothing above a note.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from tunewell.training.log_rules import NOTHING_READ, apply_log_rules
from tunewell.training.metrics import WINDOW, Finding, History, RunContext, StepMetrics
from tunewell.training.step_rules import ARMED_AFTER, BEGINNING, RECENT, RULES

_SIGMAS = 6.0
_LEAST_SIGMA = 0.25
"""Spread of the logarithm of norms below which steadiness is luck: six of them are a factor of 4.5."""
_ORDER: dict[str, int] = {"fault": 0, "warning": 1, "note": 2}


def norm_limit(norms: Sequence[float], *, factor: float, floor: float) -> float:
    """Say above which length a gradient is a spike: infinite until enough is known of what is usual.

    Four things must hold at once, since a hard batch is no spike: so many times the median, six sigmas beyond it on a
    logarithmic scale, twice the longest of the window, and longer than what is clipped anyway.
    """
    if len(norms) < ARMED_AFTER:
        return math.inf
    logs = [math.log(norm) for norm in norms]
    middle = median(logs)
    sigma = max(_LEAST_SIGMA, 1.4826 * median(abs(value - middle) for value in logs))
    return max(math.exp(middle + _SIGMAS * sigma), factor * math.exp(middle), 2.0 * max(norms), floor)


class HealthMonitor:
    """Sees the readings of one run in order, and says what it finds in each."""

    def __init__(self, about: RunContext) -> None:
        self.about = about
        self.history = History()

    def see(self, reading: StepMetrics) -> list[Finding]:
        """Take a reading; give what it shows, worst first."""
        if reading.supervised_tokens == 0:
            return []  # every document of the step is left out: it has no numbers
        if reading.norm_limit is None and reading.grad_norm is not None:
            reading = replace(reading, norm_limit=self.norm_limit())
        found = [finding for rule in RULES if (finding := rule(reading, self.history, self.about)) is not None]
        self.remember(reading)
        return sorted(found, key=lambda finding: _ORDER[finding.severity])

    def norm_limit(self) -> float:
        """Say how long the next gradient may be."""
        floor = self.about.max_grad_norm or 1.0
        return norm_limit(self.history.norms(), factor=self.about.spike_factor, floor=floor)

    def rewind(self, step: int) -> None:
        """Forget what was after a step: it is taken again."""
        history = self.history
        kept = [reading for reading in history.recent if reading.step <= step]
        history.recent = deque(kept, maxlen=WINDOW)
        history.held_out = [look for look in history.held_out if look[0] <= step]
        history.bad_in_a_row = history.zero_norms_in_a_row = history.zero_losses_in_a_row = 0
        history.said -= {"lr-too-high", "loss-spike"}
        if history.low_step > step:
            history.lows, history.low_step = math.inf, 0

    def remember(self, reading: StepMetrics) -> None:
        """Take a reading without judging it."""
        if reading.supervised_tokens == 0:
            return
        history = self.history
        if reading.held_out_loss is not None:
            history.held_out.append((reading.step, reading.held_out_loss))
            return
        if history.first is None and reading.loss is not None:
            history.first = reading
        is_learning = reading.supervised_tokens != 0
        history.bad_in_a_row = 0 if reading.is_finite else history.bad_in_a_row + 1
        history.zero_norms_in_a_row = history.zero_norms_in_a_row + 1 if is_learning and reading.grad_norm == 0 else 0
        history.zero_losses_in_a_row = history.zero_losses_in_a_row + 1 if is_learning and reading.loss == 0 else 0
        if reading.is_quiet:
            history.recent.append(reading)
            if len(history.beginning) < BEGINNING and reading.loss is not None:
                history.beginning.append(reading.loss)
            losses = history.losses(RECENT)
            if len(losses) == RECENT and (low := median(losses)) < history.lows:
                history.lows, history.low_step = low, reading.step


def replay(readings: Iterable[StepMetrics], about: RunContext) -> list[Finding]:
    """Find what a whole log shows, in the order of its steps; a log of a few lines is judged by their proportions."""
    watch, seen, found = HealthMonitor(about), [], []
    for reading in readings:
        seen.append(reading)
        found += watch.see(reading)
    known = {finding.name for finding in found}
    return sorted([*found, *(f for f in apply_log_rules(seen, about) if f.name not in known)], key=lambda f: f.step)


def verdict(findings: Sequence[Finding]) -> str:
    """Name the one thing that is wrong with a log: the first that is more than a note; `healthy` where nothing is.

    A log in which no number could be read is `nothing-read`.
    """
    if any(finding.name == NOTHING_READ for finding in findings):
        return NOTHING_READ
    return next((finding.name for finding in findings if finding.severity != "note"), "healthy")
