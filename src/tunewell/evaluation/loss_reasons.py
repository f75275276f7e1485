"""What speaks against a model in its weights and its losses."""

import math
from collections.abc import Iterator
from typing import Literal

from tunewell.config.rules import VerdictRules
from tunewell.core.units import count, percent
from tunewell.evaluation.answer_reasons import answers_got_better
from tunewell.evaluation.measurements import FEW_QUESTIONS, Measurements, short_loss, short_text, soften, suggest_rate
from tunewell.records.report import LossPair, Reason

SAME_LOGITS = 1e-4
"""Largest difference of a logit that is rounding: one of size 20 in fp32 is exact to 2e-6, and the least training moves
logits by hundredths."""
TINY_LOSS = 0.1
"""Held-out loss of a base model that leaves nothing to learn: it gives each right token nine chances in ten."""
KNEW_SHARE = 0.7
"""Share of ln(vocabulary) below which the base's loss on everyday text shows that it knew something to forget; a model
that starts from nothing is at 1."""
USUAL_VOCABULARY = 32_000
"""Taken where the vocabulary is not known."""
DOUBLED = 2.0
"""Factor on the everyday loss from which on forgetting is FAIL, unless `verdict.max_forgetting` allows more."""
FELL_SHARE = 0.1
"""Share of its first value below which a training loss is near nothing."""
FELL_TO = 0.1
"""Training loss that is near nothing whatever it was at first: the rows are known by heart."""
LEAST_RISE = 0.1
"""Rise of the held-out loss in nats that is more than noise, however low the lowest was."""
LEAST_DOCUMENTS = 2
"""Held-out documents without which nothing is shown: one may be the easy one."""


def weights_not_finite(facts: Measurements) -> Iterator[Reason]:
    """Speak of weights that are not numbers."""
    if facts.bad_weights:
        values = sum(facts.bad_weights.values())
        names = [f"{short_text(name)} ({count(number)})" for name, number in facts.bad_weights.items()]
        yield Reason(
            code="weights_not_finite",
            level="FAIL",
            what=f"{count(values, 'value')} in {count(len(names), 'tensor')} of the model "
            f"{'is' if values == 1 else 'are'} not finite.",
            example=", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
            next="use an earlier checkpoint, or train again with `train.precision: fp32` and "
            + suggest_rate(facts, 1 / 3, "a third of what it was"),
        )


def loss_not_finite(facts: Measurements) -> Iterator[Reason]:
    """Speak of losses and logits that are not numbers."""
    pairs = [pair for pair in (facts.held_out, *facts.by_source, facts.everyday) if pair is not None]
    bad = [pair.name for pair in pairs if not math.isfinite(pair.tuned)]
    if facts.change is not None and math.isnan(facts.change.largest):
        bad.append("the logits")
    if bad:
        yield Reason(
            code="loss_not_finite",
            level="FAIL",
            what=f"{count(len(bad), 'figure')} of the tuned model {'is' if len(bad) == 1 else 'are'} not finite.",
            example=", ".join(short_text(name) for name in bad[:5]),
            next="judge it again with `train.precision: fp32`; if that does not help train again with "
            + suggest_rate(facts, 1 / 3, "a third of what it was"),
        )


def nothing_changed(facts: Measurements) -> Iterator[Reason]:
    """Speak of a model that is its base."""
    change = facts.change
    if change is not None and change.prompts > 0 and change.largest <= SAME_LOGITS:
        cause = "the adapter was never applied or holds nothing" if facts.is_adapter else "training changed nothing"
        yield Reason(
            code="nothing_changed",
            level="FAIL",
            what=f"On {count(change.prompts, 'prompt')} no logit differs from the base model's by more than "
            f"{change.largest:.1g}: {cause}.",
            next="check that the adapter was made for this base model and that `method.targets` names its layers"
            if facts.is_adapter
            else "check that this is the trained model's folder, and train again with "
            + suggest_rate(facts, 3, "three times what it was"),
        )


def over_fitted_or_not_learned(facts: Measurements, rules: VerdictRules) -> Iterator[Reason]:
    """Speak of rows known by heart; else of a held-out loss that is no lower than the base's, or hardly."""
    worse = facts.held_out is not None and facts.base_loss is not None and not _is_lower(facts.held_out)
    over_fitted = _over_fitted(facts, rules, is_worse=worse)
    if over_fitted is not None:
        yield over_fitted
    held_out, base = facts.held_out, facts.base_loss
    if held_out is None or base is None or (over_fitted and worse) or max(base, held_out.tuned) < TINY_LOSS:
        return
    gain = 1 - held_out.tuned / base
    figures = f"{short_loss(base)} -> {short_loss(held_out.tuned)} on {count(held_out.documents, 'document')}"
    if worse:
        yield Reason(
            code="not_learned",
            level=_level(facts, held_out.documents),
            what=f"The held-out loss is not lower than the base model's: {figures}.",
            example=_worst_source(facts),
            next=f"run `tunewell inspect {facts.corpus}` to see whether the replies are learned; if the training loss "
            f"jumped set {suggest_rate(facts, 1 / 3, 'a third of what it was')}, and if it hardly fell, "
            "more `train.epochs`",
        )
    elif gain < rules.min_gain:
        yield Reason(
            code="little_gain",
            level="WEAK",
            what=f"The held-out loss is only {percent(gain)} lower than the base model's ({figures}); "
            f"{percent(rules.min_gain)} is asked for.",
            example=_worst_source(facts),
            next=f"train longer (`train.epochs: {2 * facts.epochs:.3g}`)"
            if facts.epochs
            else "train longer (twice the `train.epochs`), or on more rows",
        )
    elif sources := [pair for pair in facts.by_source if pair.documents >= FEW_QUESTIONS and not _is_lower(pair)]:
        worst = sources[0]
        yield Reason(
            code="little_gain",
            level="WEAK",
            what=f"The held-out loss fell as a whole, but not on {count(len(sources), 'source')}: "
            f"`{short_text(worst.name)}` {short_loss(worst.base or 0.0)} -> {short_loss(worst.tuned)} "
            f"on {count(worst.documents, 'document')}.",
            next="look at its rows with `tunewell inspect`, or give it a larger `share` in `data.sources`",
        )


def forgets(facts: Measurements, rules: VerdictRules) -> Iterator[Reason]:
    """Speak of everyday text that has become strange, to a model that knew it."""
    pair = facts.everyday
    if (
        pair is None
        or pair.base is None
        or not 0 < pair.base < KNEW_SHARE * math.log(facts.vocab_size or USUAL_VOCABULARY)
    ):
        return
    times = pair.tuned / pair.base
    if times > 1 + rules.max_forgetting:
        yield Reason(
            code="forgets",
            level="FAIL" if times >= DOUBLED else "WEAK",
            what=f"The loss on everyday text rose from {short_loss(pair.base)} to {short_loss(pair.tuned)}, by "
            f"{percent(times - 1, 0)}; {percent(rules.max_forgetting, 0)} is allowed.",
            next=f"set {suggest_rate(facts, 1 / 3, 'a third of what it was')}, or fewer `train.epochs`, or mix general "
            "conversations into `data.sources`",
        )


def not_enough_evidence(facts: Measurements) -> Iterator[Reason]:
    """Speak of a judgement that rests on nothing: too few held-out rows, or nothing to compare with."""
    documents = facts.held_out.documents if facts.held_out else 0
    asked = facts.tuned_tally.asked if facts.tuned_tally and not facts.exchanges else len(facts.short)
    if max(documents, asked) < LEAST_DOCUMENTS:
        yield Reason(
            code="not_enough_evidence",
            level="WEAK",
            what=f"There {'is' if documents == 1 else 'are'} {count(documents, 'held-out document')}; "
            f"at least {LEAST_DOCUMENTS} are needed to say anything.",
            next="hold out more rows: `data.held_out: 0.1`, or a file of questions and answers of its own",
        )
    elif facts.base_loss is None and asked < LEAST_DOCUMENTS:
        yield Reason(
            code="not_enough_evidence",
            level="WEAK",
            what=f"There is no base model to compare with, and {count(asked, 'question')} with a short reference.",
            next="name the base model in `model`, or put questions with short answers into `data.held_out`",
        )


def _level(facts: Measurements, number: int) -> Literal["WEAK", "FAIL"]:
    """Fail a loss that got worse, unless the answers got better: the references are then worded otherwise."""
    return "WEAK" if answers_got_better(facts) else soften("FAIL", number)


def _is_lower(pair: LossPair) -> bool:
    return pair.base is not None and (pair.tuned < pair.base or pair.tuned < TINY_LOSS)


def _over_fitted(facts: Measurements, rules: VerdictRules, *, is_worse: bool) -> Reason | None:
    train = [loss for _, loss in facts.train_curve if math.isfinite(loss)]
    looks = [(loss, step) for step, loss in facts.held_out_curve if math.isfinite(loss)]
    if len(train) < 2 or len(looks) < 2:
        return None
    # Single steps are noisy: the first few and the last tenth are averaged.
    window = max(1, min(10, len(train) // 10))
    first, last = _mean(train[: min(3, window)]), _mean(train[-window:])
    (lowest, best), (final, final_step) = min(looks), looks[-1]
    rise = final - lowest
    has_fallen = last < FELL_SHARE * first or last < FELL_TO
    if not has_fallen or rise <= max(LEAST_RISE, rules.max_rise * lowest):
        return None
    judged = facts.judged_step if facts.judged_step is not None else final_step
    which = f"step {judged:,} is judged" + (", the best" if judged == best else f"; step {best:,} was the best")
    above = ""
    if is_worse and facts.held_out is not None and facts.base_loss is not None:
        tuned, base = short_loss(facts.held_out.tuned), short_loss(facts.base_loss)
        above = f" Its held-out loss {tuned} is above the base model's {base}."
    documents = facts.held_out.documents if facts.held_out else 0
    return Reason(
        code="over_fitted",
        level=_level(facts, documents) if is_worse else "WEAK",
        what=f"While the training loss fell from {short_loss(first)} to {short_loss(last)}, the held-out loss rose "
        f"from its lowest, {short_loss(lowest)} at step {best:,}, to {short_loss(final)} at step {final_step:,} "
        f"({which}).{above}",
        next=_stop_earlier(facts, best, final_step),
    )


def _stop_earlier(facts: Measurements, best: int, final: int) -> str:
    if facts.epochs and 0 < best < final:
        return f"set `evaluate.patience: 2` or `train.epochs: {facts.epochs * best / final:.2g}`, or add more rows"
    return "set `evaluate.patience: 2`, or fewer `train.epochs`, or add more rows"


def _worst_source(facts: Measurements) -> str | None:
    gains = [
        (pair.base - pair.tuned, pair)
        for pair in facts.by_source
        if pair.base is not None and math.isfinite(pair.base) and math.isfinite(pair.tuned)
    ]
    if len(gains) < 2:
        return None
    _, worst = min(gains, key=lambda entry: entry[0])
    losses = f"{short_loss(worst.base or 0.0)} -> {short_loss(worst.tuned)}"
    return f"the least was learned of {short_text(worst.name)}: {losses}"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
