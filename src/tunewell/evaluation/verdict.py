"""The verdict: from what was measured to PASS, WEAK or FAIL, with reasons a person can act on. A pure function."""

from dataclasses import dataclass
from typing import Any

from tunewell.config.rules import VerdictRules
from tunewell.evaluation import answer_reasons, loss_reasons
from tunewell.evaluation.answer_reasons import count_right
from tunewell.evaluation.measurements import Measurements, count_answers, short_loss
from tunewell.records.plan import Chosen
from tunewell.records.report import Level, LossPair, Reason

REASON_CODES: dict[str, str] = {
    "weights_not_finite": "its weights are broken",
    "loss_not_finite": "its losses are not finite",
    "nothing_changed": "it is its base model",
    "answers_nothing": "it answers nothing",
    "loops": "it goes round in circles",
    "control_tokens": "it goes on with control tokens",
    "never_stops": "it does not stop",
    "over_fitted": "it knows its rows by heart",
    "forgets": "it has forgotten its language",
    "not_learned": "it has not learned what the rows have in common",
    "echoes": "it repeats the questions",
    "other_language": "it answers in another language",
    "few_right": "few of its answers are right",
    "no_better_than_base": "the base model answers better",
    "little_gain": "it has gained little",
    "not_enough_evidence": "there is too little to judge it by",
}
"""Every code of a reason in the order of causes, with its short form."""
_EXPLAIN_ALL = ("weights_not_finite", "loss_not_finite", "nothing_changed")
_EXPLAINED = {
    "answers_nothing": {"few_right", "no_better_than_base"},
    "loops": {"few_right", "no_better_than_base"},
    "control_tokens": {"few_right", "no_better_than_base"},
}
"""What a FAIL of one kind accounts for, and is left out."""
_JUDGING = ("min_gain", "min_right", "max_faults", "max_rise", "max_forgetting")


@dataclass(frozen=True)
class Verdict:
    """What came of judging."""

    level: Level
    summary: str
    """One sentence with the figures."""
    reasons: list[Reason]
    """The worst first: FAIL before WEAK, causes before what follows from them; none with PASS."""


def decide_verdict(facts: Measurements, rules: VerdictRules) -> Verdict:
    """Weigh what was measured: FAIL or WEAK where a reason says so, PASS where none does."""
    found = [
        *loss_reasons.weights_not_finite(facts),
        *loss_reasons.loss_not_finite(facts),
        *loss_reasons.nothing_changed(facts),
    ]
    if not found:
        found = [
            *answer_reasons.faulty_answers(facts, rules),
            *loss_reasons.over_fitted_or_not_learned(facts, rules),
            *loss_reasons.forgets(facts, rules),
            *answer_reasons.few_right(facts, rules),
            *answer_reasons.no_better_than_base(facts),
            *loss_reasons.not_enough_evidence(facts),
        ]
    reasons = _without_explained(found)
    level: Level = "FAIL" if any(reason.level == "FAIL" for reason in reasons) else "WEAK" if reasons else "PASS"
    return Verdict(level, _summary(facts, reasons), reasons)


def thresholds(rules: VerdictRules) -> dict[str, Chosen[Any]]:
    """List the figures that decide, as set in the config, each with what its key says about it."""
    return {
        name: Chosen(value=getattr(rules, name), because=" ".join((field.description or "").split()))
        for name, field in VerdictRules.model_fields.items()
        if name in _JUDGING
    }


def _without_explained(found: list[Reason]) -> list[Reason]:
    order = list(REASON_CODES)
    ranked = sorted(found, key=lambda reason: (reason.level == "WEAK", order.index(reason.code)))
    if ranked and ranked[0].code in _EXPLAIN_ALL:
        return ranked[:1]
    explained = set[str]().union(*(_EXPLAINED.get(reason.code, set()) for reason in ranked if reason.level == "FAIL"))
    return [reason for reason in ranked if reason.code not in explained]


def _summary(facts: Measurements, reasons: list[Reason]) -> str:
    figures = [part for part in (_answers(facts), _loss("held-out loss", facts.held_out)) if part]
    figures += [part for part in [_loss("everyday text", facts.everyday)] if part]
    told = ", ".join(figures) or "nothing was measured"
    sentence = f"{REASON_CODES[reasons[0].code]}: {told}" if reasons else told
    return sentence[:1].upper() + sentence[1:]


def _answers(facts: Measurements) -> str:
    asked, right = count_right(facts)
    num_base, base_right = count_right(facts, of_base=True)
    if asked:
        beside = f" (base: {base_right:,})" if num_base else ""
        return f"{right:,} of {asked:,} held-out question{'s' if asked != 1 else ''} answered right{beside}"
    if facts.exchanges:
        base = [exchange.base for exchange in facts.exchanges if exchange.base is not None]
        beside = f" (base: {count_answers(base).f1:.2f})" if base else ""
        return f"F1 {count_answers([exchange.tuned for exchange in facts.exchanges]).f1:.2f}{beside}"
    return ""


def _loss(name: str, pair: LossPair | None) -> str:
    if pair is None:
        return ""
    before = f"{short_loss(pair.base)} -> " if pair.base is not None else ""
    return f"{name} {before}{short_loss(pair.tuned)}"
