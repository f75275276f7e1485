"""Decide the verdict from the reasons in `reasons.py`.

FAIL      worse than the base model or a constant answer, none of 20 right, half of the answers faulty, broken weights
UNPROVEN  otherwise, if no difference to the base model or to a constant answer is shown
WEAK      better than the base model, but below the threshold of the task, too many faults, or too much forgetting
PASS      everything else
"""

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tunewell.config.rules import VerdictRules
from tunewell.core.text import shorten_line
from tunewell.core.units import count
from tunewell.evaluation import reasons
from tunewell.evaluation.measurements import Measurements, bases_of, short_loss
from tunewell.records.plan import Chosen
from tunewell.records.report import Level, LossPair, Reason

REASON_CODES: dict[str, str] = {row["code"]: row["summary"] for row in reasons.TABLE}
"""All reason codes, causes before effects, with a short text for the summary."""
_EXPLAIN_ALL = ("weights_not_finite", "loss_not_finite", "nothing_changed")
_EXPLAIN_WRONG = ("answers_nothing", "loops", "control_tokens")
_EXPLAINED = ("few_right", "none_right", "no_better_than_base", "majority_only")
"""Reasons that are left out if there is a FAIL in `_EXPLAIN_WRONG`, which explains them."""
_NOTABLE = 0.2
"""Share of right answers from which the summary names a constant answer."""
_RANKS = ("FAIL", "UNPROVEN", "WEAK")
_DAMAGE = [row["code"] for row in reasons.TABLE if "measure" in row]
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
        has_right = measured.min_right is not None
        found += reasons.right_answers(measured) if has_right else reasons.held_out_loss(measured, rules)
    ranked = _without_explained(found)
    level: Level = ranked[0].level if ranked else "PASS"
    return Verdict(level, _summary(measured, ranked), ranked)


def thresholds(rules: VerdictRules, measured: Measurements) -> dict[str, Chosen[Any]]:
    """Return the verdict thresholds of the config, each with the description of its key."""
    found = dict[str, Chosen[Any]]()
    for name, field in VerdictRules.model_fields.items():
        if name in _THRESHOLDS:
            found[name] = Chosen(value=getattr(rules, name), because=" ".join((field.description or "").split()))
    if rules.min_right == "auto":
        because = f"the threshold of the task `{measured.task}`"
        found["min_right"] = Chosen(value=measured.min_right, because=because)
    return found


def changed_rules(rules: VerdictRules) -> list[str]:
    """Return the rules that the config changes, such as `max_faults 1 (usually 0.1)`."""
    usual = VerdictRules()
    values = [(name, getattr(rules, name), getattr(usual, name)) for name in _THRESHOLDS]
    return [f"{name} {value} (usually {other})" for name, value, other in values if value != other]


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
    losses = (_loss("held-out loss", measured.held_out), _loss("everyday text", measured.everyday))
    numbers = ", ".join(filter(None, (_answers(measured), *losses))) or "nothing was measured"
    names = [REASON_CODES[reason.code] for reason in ranked[:1]]
    # Damage is named in the sentence, whatever else there is.
    names += [REASON_CODES[reason.code] for reason in ranked[1:] if reason.code in _DAMAGE][:1]
    sentence = f"{'; '.join(names)}: {numbers}" if names else numbers
    return sentence[:1].upper() + sentence[1:]


def _answers(measured: Measurements) -> str:
    judged = measured.judged
    if judged and measured.min_right is not None:
        others = [f"base: {count(measured.num_right(of_base=True))}"] if bases_of(judged) else []
        if measured.constant is not None and measured.constant.right >= _NOTABLE * len(judged):
            others.append(f'always "{shorten_line(measured.constant.text, 24)}": {count(measured.constant.right)}')
        shown = f" ({', '.join(others)})" if others else ""
        return f"{count(measured.num_right())} of {count(len(judged))} {measured.noun} right{shown}"
    if measured.questions:
        answers = bases_of(measured.questions)
        base = f" (base: {fmean(one.f1 for one in answers):.2f})" if answers else ""
        return f"word overlap {fmean(one.tuned.f1 for one in measured.questions):.2f}{base}"
    return ""


def _loss(name: str, pair: LossPair | None) -> str:
    if pair is None:
        return ""
    before = f"{short_loss(pair.base)} -> " if pair.base is not None else ""
    return f"{name} {before}{short_loss(pair.tuned)}"
