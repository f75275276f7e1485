"""Reasons based on weights and losses: NaN, overfitting, forgetting, no gain, too little data."""

import math
import shlex
from collections.abc import Iterator
from statistics import fmean
from typing import Literal

from tunewell.config.rules import VerdictRules
from tunewell.core.text import shorten_line
from tunewell.core.units import count, percent
from tunewell.data.corpus.held_out import num_auto
from tunewell.evaluation.answer_reasons import answers_improved
from tunewell.evaluation.measurements import FEW_QUESTIONS, Measurements, short_loss, soften, suggest_rate
from tunewell.records.manifest import MIN_TO_JUDGE
from tunewell.records.report import LossPair, Reason

SAME_LOGITS = 1e-4
"""Largest logit difference that can be a rounding error: a logit of 20 in fp32 is exact to 2e-6, and even a short
training changes logits by hundredths."""
TINY_LOSS = 0.1
"""Held-out loss below which a model has nothing left to learn: the right tokens have a probability of 0.9."""
KNEW_SHARE = 0.7
"""Forgetting is checked if the base model's loss on everyday text is below this share of ln(vocabulary size), the
loss of an untrained model."""
USUAL_VOCABULARY = 32_000
"""Assumed vocabulary size if it is unknown."""
DOUBLED = 2.0
"""Factor of the everyday loss from which forgetting is a FAIL, unless `verdict.max_forgetting` allows more."""
FELL_SHARE = 0.1
"""A training loss below this share of its first value counts as near zero."""
FELL_TO = 0.1
"""A training loss below this value counts as near zero whatever its first value was: the rows are memorised."""
MIN_RISE = 0.1
"""Minimum rise of the held-out loss, in nats, that is more than noise."""


def weights_not_finite(measured: Measurements) -> Iterator[Reason]:
    """Yield a reason if weights are NaN or infinite."""
    if measured.bad_weights:
        values = sum(measured.bad_weights.values())
        names = [f"{shorten_line(name)} ({count(number)})" for name, number in measured.bad_weights.items()]
        path = shlex.quote(measured.model_path)
        yield Reason(
            code="weights_not_finite",
            level="FAIL",
            what=f"{count(values, 'value')} in {count(len(names), 'tensor')} of the model "
            f"{'is' if values == 1 else 'are'} not finite (NaN or infinite).",
            example=", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
            next=f"Try an earlier checkpoint: `tunewell validate {path} --checkpoint STEP`. Or set "
            f"`train.precision: fp32` and {suggest_rate(measured, 1 / 3)}, and train again.",
        )


def loss_not_finite(measured: Measurements) -> Iterator[Reason]:
    """Yield a reason if losses or logits are NaN or infinite."""
    pairs = [pair for pair in (measured.held_out, *measured.by_source, measured.everyday) if pair is not None]
    bad = [pair.name for pair in pairs if not math.isfinite(pair.tuned)]
    if measured.change is not None and math.isnan(measured.change.largest):
        bad.append("the logits")
    if bad:
        path = shlex.quote(measured.model_path)
        yield Reason(
            code="loss_not_finite",
            level="FAIL",
            what=f"{count(len(bad), 'measurement')} of the tuned model {'is' if len(bad) == 1 else 'are'} not finite "
            "(NaN or infinite).",
            example=", ".join(shorten_line(name) for name in bad[:5]),
            next=f"Validate on the CPU, in fp32: `tunewell validate {path} --device cpu`. If that does not help, set "
            f"{suggest_rate(measured, 1 / 3)} and train again.",
        )


def nothing_changed(measured: Measurements) -> Iterator[Reason]:
    """Yield a reason if the model is identical to its base model."""
    change = measured.change
    if change is not None and change.prompts > 0 and change.largest <= SAME_LOGITS:
        cause = "the adapter is empty or was not applied" if measured.is_adapter else "training changed nothing"
        yield Reason(
            code="nothing_changed",
            level="FAIL",
            what=f"On {count(change.prompts, 'prompt')} no logit differs from the base model's by more than "
            f"{change.largest:.1g}: {cause}.",
            next="Check that the adapter was made for this base model and that `method.targets` names its layers."
            if measured.is_adapter
            else "Check that this is the folder of the trained model. If it is, set "
            f"{suggest_rate(measured, 3)} and train again.",
        )


def over_fitted_or_not_learned(measured: Measurements, rules: VerdictRules) -> Iterator[Reason]:
    """Yield reasons for overfitting, and for a held-out loss that is not clearly lower than the base model's."""
    is_worse = measured.held_out is not None and measured.base_loss is not None and not _is_lower(measured.held_out)
    over_fitted = _over_fitted(measured, rules, is_worse=is_worse)
    if over_fitted is not None:
        yield over_fitted
    held_out, base = measured.held_out, measured.base_loss
    if held_out is None or base is None or (over_fitted and is_worse) or max(base, held_out.tuned) < TINY_LOSS:
        return
    gain = 1 - held_out.tuned / base
    losses = f"{short_loss(base)} -> {short_loss(held_out.tuned)} on {count(held_out.documents, 'row')}"
    if is_worse:
        yield Reason(
            code="not_learned",
            level=_level(measured, held_out.documents),
            what=f"The held-out loss is not lower than the base model's: {losses}.",
            example=_worst_source(measured),
            next=f"Run {measured.inspect_command} and check that the replies are supervised. If the training loss "
            f"jumped, set {suggest_rate(measured, 1 / 3)}. If it hardly fell, raise `train.epochs`.",
        )
    elif gain < rules.min_gain:
        yield Reason(
            code="little_gain",
            level="WEAK",
            what=f"The held-out loss is only {percent(gain)} lower than the base model's ({losses}; "
            f"minimum: {percent(rules.min_gain)}).",
            example=_worst_source(measured),
            next=f"Train longer ({measured.longer_training}) or on more rows.",
        )
    elif sources := [pair for pair in measured.by_source if pair.documents >= FEW_QUESTIONS and not _is_lower(pair)]:
        worst = sources[0]
        yield Reason(
            code="little_gain",
            level="WEAK",
            what=f"The held-out loss fell as a whole, but not on {count(len(sources), 'source')}: "
            f"`{shorten_line(worst.name)}` {short_loss(worst.base or 0.0)} -> {short_loss(worst.tuned)} "
            f"on {count(worst.documents, 'row')}.",
            next=f"Inspect its rows with {measured.inspect_command}, or set a larger `share` for it in `data.sources`.",
        )


def forgets(measured: Measurements, rules: VerdictRules) -> Iterator[Reason]:
    """Yield a reason if the loss on everyday text rose, unless the base model did not know such text either."""
    pair = measured.everyday
    if pair is None or pair.base is None:
        return
    if not 0 < pair.base < KNEW_SHARE * math.log(measured.vocab_size or USUAL_VOCABULARY):
        return
    factor = pair.tuned / pair.base
    if factor > 1 + rules.max_forgetting:
        yield Reason(
            code="forgets",
            level="FAIL" if factor >= DOUBLED else "WEAK",
            what=f"{percent(factor - 1, 0)} worse on everyday text that the model knew before: loss "
            f"{short_loss(pair.base)} -> {short_loss(pair.tuned)} (limit: {percent(rules.max_forgetting, 0)}).",
            next=f"Set {suggest_rate(measured, 1 / 3)}, lower `train.epochs`, or mix general conversations into "
            "`data.sources`.",
        )


def not_enough_evidence(measured: Measurements) -> Iterator[Reason]:
    """Yield a reason if there are too few held-out rows, or no base model to compare with."""
    num_rows = measured.held_out.documents if measured.held_out else 0
    asked = len(measured.judged_questions)
    if max(num_rows, asked) < MIN_TO_JUDGE:
        noun = "question" if measured.questions else "row"
        number = max(num_rows, asked)
        held_out = f"only {count(number, noun)} {'was' if number == 1 else 'were'} held out"
        held_out = held_out if number else f"no {noun} was held out"
        yield Reason(
            code="not_enough_evidence",
            level="UNPROVEN",
            what=f"Cannot tell: {held_out}; at least {MIN_TO_JUDGE} are needed.",
            next=_hold_out_more(measured),
        )
    elif measured.base_loss is None and asked < MIN_TO_JUDGE:
        yield Reason(
            code="not_enough_evidence",
            level="UNPROVEN",
            what="Cannot tell: there is no base model to compare with, and only "
            f"{count(asked, 'question')} with an answer that can be judged; at least {MIN_TO_JUDGE} are needed.",
            next="Name the base model with `--base` (`tunewell validate "
            f"{shlex.quote(measured.model_path)} --base MODEL`), or test on questions with short answers.",
        )


def _hold_out_more(measured: Measurements) -> str:
    path = shlex.quote(measured.model_path)
    if measured.test_file is not None:
        return f"Use a test file with more rows: `tunewell validate {path} --data FILE`."
    now = f"Test this model on {MIN_TO_JUDGE} or more other questions: `tunewell validate {path} --data FILE`."
    rows, again = measured.num_rows, f"`tunewell train --out {shlex.quote(measured.model_path.rstrip('/') + '2')}`"
    if not rows:
        return now
    if (number := num_auto(rows)) >= MIN_TO_JUDGE:
        return (
            f"{now} Or set `data.held_out: auto` in tunewell.yaml, which holds out {count(number)} of your "
            f"{count(rows, 'row')}, and run {again}."
        )
    return f"{now} Or add {count(4 * MIN_TO_JUDGE - rows, 'row')} to your {count(rows)}, and run {again}."


def _level(measured: Measurements, number: int) -> Literal["WEAK", "FAIL"]:
    """Return FAIL for a higher loss, or WEAK if the answers improved and so are only worded differently."""
    return "WEAK" if answers_improved(measured) else soften("FAIL", number)


def _is_lower(pair: LossPair) -> bool:
    return pair.base is not None and (pair.tuned < pair.base or pair.tuned < TINY_LOSS)


def _over_fitted(measured: Measurements, rules: VerdictRules, *, is_worse: bool) -> Reason | None:
    train = [loss for _, loss in measured.train_curve if math.isfinite(loss)]
    evaluations = [(loss, step) for step, loss in measured.held_out_curve if math.isfinite(loss)]
    if len(train) < 2 or len(evaluations) < 2:
        return None
    # Single steps are noisy, so up to three steps at the start and up to ten at the end are averaged.
    window = max(1, min(10, len(train) // 10))
    first, last = fmean(train[: min(3, window)]), fmean(train[-window:])
    (lowest, best), (final, final_step) = min(evaluations), evaluations[-1]
    rise = final - lowest
    has_fallen = last < FELL_SHARE * first or last < FELL_TO
    if not has_fallen or rise <= max(MIN_RISE, rules.max_rise * lowest):
        return None
    step = measured.evaluated_step if measured.evaluated_step is not None else final_step
    which = f"this is step {step:,}" + (", the best" if step == best else f"; step {best:,} was the best")
    above = ""
    if is_worse and measured.held_out is not None and measured.base_loss is not None:
        tuned, base = short_loss(measured.held_out.tuned), short_loss(measured.base_loss)
        above = f" Its held-out loss {tuned} is above the base model's {base}."
    return Reason(
        code="over_fitted",
        level=_level(measured, measured.held_out.documents if measured.held_out else 0) if is_worse else "WEAK",
        what=f"The training loss fell from {short_loss(first)} to {short_loss(last)}, but the held-out loss rose from "
        f"{short_loss(lowest)} at step {best:,} to {short_loss(final)} at step {final_step:,} ({which}).{above}",
        next=_stop_earlier(measured, best, final_step),
    )


def _stop_earlier(measured: Measurements, best: int, final: int) -> str:
    if measured.epochs and 0 < best < final:
        return f"Set `evaluate.patience: 2` or `train.epochs: {measured.epochs * best / final:.2g}`, or add more rows."
    return "Set `evaluate.patience: 2`, lower `train.epochs`, or add more rows."


def _worst_source(measured: Measurements) -> str | None:
    gains = [
        (pair.base - pair.tuned, pair)
        for pair in measured.by_source
        if pair.base is not None and math.isfinite(pair.base) and math.isfinite(pair.tuned)
    ]
    if len(gains) < 2:
        return None
    _, worst = min(gains, key=lambda entry: entry[0])
    losses = f"{short_loss(worst.base or 0.0)} -> {short_loss(worst.tuned)}"
    return f"the source that improved least: {shorten_line(worst.name)}, {losses}"
