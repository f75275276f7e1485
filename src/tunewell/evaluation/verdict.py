"""Decide the verdict from `loss_reasons.py` and `answer_reasons.py`; thresholds are in `config/rules.py`."""

from dataclasses import dataclass
from typing import Any

from tunewell.config.rules import VerdictRules
from tunewell.evaluation import answer_reasons, loss_reasons
from tunewell.evaluation.answer_reasons import count_right
from tunewell.evaluation.measurements import Measurements, count_answers, short_loss
from tunewell.records.plan import Chosen
from tunewell.records.report import Level, LossPair, Reason

REASON_CODES: dict[str, str] = {
    "weights_not_finite": "the weights are not finite",
    "loss_not_finite": "the losses are not finite",
    "nothing_changed": "the model is identical to its base model",
    "answers_nothing": "answers are empty",
    "loops": "answers repeat themselves",
    "control_tokens": "answers contain control tokens",
    "never_stops": "answers do not stop",
    "over_fitted": "the model overfits its training rows",
    "forgets": "the model forgot everyday language",
    "not_learned": "the model did not improve on held-out rows",
    "echoes": "answers repeat the questions",
    "other_language": "answers are in the wrong language",
    "few_right": "few answers are right",
    "no_better_than_base": "the base model answers better",
    "little_gain": "the model improved only a little on held-out rows",
    "not_enough_evidence": "cannot tell",
}
"""All reason codes, causes before effects, with a short text for the summary."""
_EXPLAIN_ALL = ("weights_not_finite", "loss_not_finite", "nothing_changed")
_EXPLAIN_WRONG = ("answers_nothing", "loops", "control_tokens")
_EXPLAINED = ("few_right", "no_better_than_base")
"""Reasons that are left out if there is a FAIL in `_EXPLAIN_WRONG`, which explains them."""
_RANKS = ("FAIL", "UNPROVEN", "WEAK")
_THRESHOLDS = ("min_gain", "min_right", "max_faults", "max_rise", "max_forgetting")


@dataclass(frozen=True)
class Verdict:
    """The result of an evaluation."""

    level: Level
    summary: str
    """One sentence with the most important metrics."""
    reasons: list[Reason]
    """Reasons for the verdict: FAIL, UNPROVEN, then WEAK, causes before effects; empty for PASS."""


def decide_verdict(measured: Measurements, rules: VerdictRules) -> Verdict:
    """Return the verdict: the level of the worst reason, or PASS if there are no reasons."""
    found = [
        *loss_reasons.weights_not_finite(measured),
        *loss_reasons.loss_not_finite(measured),
        *loss_reasons.nothing_changed(measured),
    ]
    if not found:
        found = [
            *answer_reasons.faulty_answers(measured, rules),
            *loss_reasons.over_fitted_or_not_learned(measured, rules),
            *loss_reasons.forgets(measured, rules),
            *answer_reasons.few_right(measured, rules),
            *answer_reasons.no_better_than_base(measured),
            *loss_reasons.not_enough_evidence(measured),
        ]
    reasons = _without_explained(found)
    level: Level = reasons[0].level if reasons else "PASS"
    return Verdict(level, _summary(measured, reasons), reasons)


def thresholds(rules: VerdictRules) -> dict[str, Chosen[Any]]:
    """Return the verdict thresholds of the config, each with the description of its key."""
    return {
        name: Chosen(value=getattr(rules, name), because=" ".join((field.description or "").split()))
        for name, field in VerdictRules.model_fields.items()
        if name in _THRESHOLDS
    }


def _without_explained(found: list[Reason]) -> list[Reason]:
    order = list(REASON_CODES)
    # A WEAK from too few rows is as little proven as a PASS; a FAIL has another cause than chance.
    ranked = sorted(found, key=lambda reason: (_RANKS.index(reason.level), order.index(reason.code)))
    if ranked and ranked[0].code in _EXPLAIN_ALL:
        return ranked[:1]
    is_explained = any(reason.level == "FAIL" and reason.code in _EXPLAIN_WRONG for reason in ranked)
    return [reason for reason in ranked if not is_explained or reason.code not in _EXPLAINED]


def _summary(measured: Measurements, reasons: list[Reason]) -> str:
    if reasons and reasons[0].code == "not_enough_evidence":
        return reasons[0].what
    losses = [("held-out loss", measured.held_out), ("everyday text", measured.everyday)]
    parts = [_answers(measured), *(_loss(name, pair) for name, pair in losses)]
    numbers = ", ".join(part for part in parts if part) or "nothing was measured"
    sentence = f"{REASON_CODES[reasons[0].code]}: {numbers}" if reasons else numbers
    return sentence[:1].upper() + sentence[1:]


def _answers(measured: Measurements) -> str:
    asked, right = count_right(measured)
    num_base, base_right = count_right(measured, of_base=True)
    if asked:
        base = f" (base: {base_right:,})" if num_base else ""
        return f"{right:,} of {asked:,} held-out question{'s' if asked != 1 else ''} answered right{base}"
    if measured.questions:
        answers = [question.base for question in measured.questions if question.base is not None]
        base = f" (base: {count_answers(answers).f1:.2f})" if answers else ""
        return f"F1 {count_answers([question.tuned for question in measured.questions]).f1:.2f}{base}"
    return ""


def _loss(name: str, pair: LossPair | None) -> str:
    if pair is None:
        return ""
    before = f"{short_loss(pair.base)} -> " if pair.base is not None else ""
    return f"{name} {before}{short_loss(pair.tuned)}"
