"""Decide the verdict from the reasons in `reasons.py`.

FAIL      worse than the base model or a constant answer, none of 20 right, half of the answers faulty, broken weights
UNPROVEN  otherwise, if no difference to the base model or to a constant answer is shown
WEAK      better than the base model, but below the threshold of the task, too many faults, or too much forgetting
PASS      everything else
"""

from dataclasses import dataclass
from typing import Any

from tunewell.config.rules import VerdictRules
from tunewell.core.text import shorten_line
from tunewell.core.units import count
from tunewell.evaluation import reasons
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
    "echoes": "answers repeat the questions",
    "other_language": "answers are in the wrong language",
    "none_right": "no answer is right",
    "no_better_than_base": "not shown to be better than the base model",
    "majority_only": "not shown to be better than one constant answer",
    "not_learned": "worse than the base model on held-out rows",
    "not_enough_evidence": "cannot tell",
    "refuses": "the model refuses everyday questions",
    "forgets_instructions": "the model follows fewer everyday instructions",
    "forgets": "the model forgot everyday language",
    "few_right": "few answers are right",
    "little_gain": "the model improved only a little on held-out rows",
}
"""All reason codes, causes before effects, with a short text for the summary."""
_EXPLAIN_ALL = ("weights_not_finite", "loss_not_finite", "nothing_changed")
_EXPLAIN_WRONG = ("answers_nothing", "loops", "control_tokens")
_EXPLAINED = ("few_right", "none_right", "no_better_than_base", "majority_only")
"""Reasons that are left out if there is a FAIL in `_EXPLAIN_WRONG`, which explains them."""
_RANKS = ("FAIL", "UNPROVEN", "WEAK")
_THRESHOLDS = ("min_gain", "min_right", "max_faults", "max_rise", "max_forgetting", "max_lost")


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
    found = [*reasons.broken(measured)]
    if not found:
        found = [*reasons.faulty_answers(measured, rules), *reasons.damage(measured)]
        if measured.min_right is None:
            found += reasons.held_out_loss(measured, rules)
        else:
            found += reasons.right_answers(measured)
    ranked = _without_explained(found)
    level: Level = ranked[0].level if ranked else "PASS"
    return Verdict(level, _summary(measured, ranked), ranked)


def thresholds(rules: VerdictRules, measured: Measurements) -> dict[str, Chosen[Any]]:
    """Return the verdict thresholds of the config, each with the description of its key."""
    found = {
        name: Chosen[Any](value=getattr(rules, name), because=" ".join((field.description or "").split()))
        for name, field in VerdictRules.model_fields.items()
        if name in _THRESHOLDS
    }
    if rules.min_right == "auto":
        because = f"the threshold of the task `{measured.task}`"
        found["min_right"] = Chosen[Any](value=measured.min_right, because=because)
    return found


def changed_rules(rules: VerdictRules) -> list[str]:
    """Return the rules that the config changes, such as `max_faults 1 (usually 0.1)`."""
    usual = VerdictRules()
    return [
        f"{name} {getattr(rules, name)} (usually {getattr(usual, name)})"
        for name in _THRESHOLDS
        if getattr(rules, name) != getattr(usual, name)
    ]


def _without_explained(found: list[Reason]) -> list[Reason]:
    order = list(REASON_CODES)
    # UNPROVEN precedes WEAK: with too little evidence, a WEAK is not shown either.
    ranked = sorted(found, key=lambda reason: (_RANKS.index(reason.level), order.index(reason.code)))
    if ranked and ranked[0].code in _EXPLAIN_ALL:
        return ranked[:1]
    is_explained = any(reason.level == "FAIL" and reason.code in _EXPLAIN_WRONG for reason in ranked)
    return [reason for reason in ranked if not is_explained or reason.code not in _EXPLAINED]


def _summary(measured: Measurements, ranked: list[Reason]) -> str:
    if ranked and ranked[0].code == "not_enough_evidence":
        return ranked[0].what
    losses = [("held-out loss", measured.held_out), ("everyday text", measured.everyday)]
    parts = [_answers(measured), *(_loss(name, pair) for name, pair in losses)]
    numbers = ", ".join(part for part in parts if part) or "nothing was measured"
    names = [REASON_CODES[reason.code] for reason in ranked[:1]]
    # The summary names damage beside any other reason.
    names += [
        REASON_CODES[one.code] for one in ranked[1:] if one.code in ("refuses", "forgets_instructions", "forgets")
    ][:1]
    sentence = f"{'; '.join(names)}: {numbers}" if names else numbers
    return sentence[:1].upper() + sentence[1:]


def _answers(measured: Measurements) -> str:
    judged = measured.judged
    if judged and measured.min_right is not None:
        has_base = any(one.base is not None for one in judged)
        others = [f"base: {count(measured.num_right(of_base=True))}"] if has_base else []
        if measured.constant is not None:
            others.append(f'always "{shorten_line(measured.constant.text, 24)}": {count(measured.constant.right)}')
        shown = f" ({', '.join(others)})" if others else ""
        return f"{count(measured.num_right())} of {count(len(judged))} {measured.noun} right{shown}"
    if measured.questions:
        answers = [question.base for question in measured.questions if question.base is not None]
        base = f" (base: {count_answers(answers).f1:.2f})" if answers else ""
        return f"word overlap {count_answers([one.tuned for one in measured.questions]).f1:.2f}{base}"
    return ""


def _loss(name: str, pair: LossPair | None) -> str:
    if pair is None:
        return ""
    before = f"{short_loss(pair.base)} -> " if pair.base is not None else ""
    return f"{name} {before}{short_loss(pair.tuned)}"
