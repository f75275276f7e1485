"""What speaks against a model in its answers."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tunewell.config.rules import VerdictRules
from tunewell.core.units import count, percent
from tunewell.evaluation.measurements import (
    FEW_QUESTIONS,
    Measurements,
    count_answers,
    quote_answer,
    soften,
    suggest_rate,
)
from tunewell.records.report import Answer, AnsweredQuestion, Reason

HALF = 0.5
"""Share of faulty answers that is FAIL: a reader meets more bad answers than good ones."""
LEAST_SLIPS = 2
"""Faulty answers from which on a share counts, unless `verdict.max_faults` is 0: a single one is a slip."""
CHANCE = 0.05
"""Likelihood that as many questions went from right to wrong by chance, below which the base is called better."""


@dataclass(frozen=True)
class _Kind:
    """A reason that some faults are gathered under."""

    code: str
    faults: tuple[str, ...]
    does: str
    next: str


_KINDS = (
    _Kind(
        "answers_nothing",
        ("ends_at_once", "empty"),
        "say nothing",
        "run `tunewell inspect {corpus}` to see whether the replies are learned, and not only their end; if they are, "
        "set {third}",
    ),
    _Kind(
        "loops",
        ("loops",),
        "go round in circles",
        "set {third}; if the held-out loss is still falling train longer (`train.epochs`)",
    ),
    _Kind(
        "control_tokens",
        ("control_tokens",),
        "go on with control tokens or play the user",
        "run `tunewell inspect {corpus}` to see whether the end of the turn is learned, and ask with the template it "
        "was trained with (`template.name`)",
    ),
    _Kind(
        "never_stops",
        ("no_stop",),
        "do not end by themselves",
        "run `tunewell inspect {corpus}` to see whether the end of the turn is learned; allow longer answers with "
        "`verdict.answer_tokens`, or train longer (`train.epochs`)",
    ),
    _Kind(
        "echoes",
        ("echo",),
        "begin by saying the question again",
        "set `template.learn_from: responses`, so that questions are not learned, and prepare the corpus anew",
    ),
    _Kind(
        "other_language",
        ("other_language",),
        "are in another language than asked for",
        "look for rows of that language in `data.sources`, or add rows whose replies are in the language of their "
        "questions",
    ),
)
FAULT_CODES = tuple(kind.code for kind in _KINDS)


def faulty_answers(facts: Measurements, rules: VerdictRules) -> Iterator[Reason]:
    """Speak of each kind of faulty answers that is too frequent, or of the most frequent if only all together are."""
    asked, total, counts = _counts(facts)
    if not _is_too_much(total, asked, rules):
        return
    worst = max(_KINDS, key=lambda kind: counts[kind.code])
    is_failing = total >= HALF * asked
    is_said = False
    for kind in _KINDS:
        number = counts[kind.code]
        if _is_too_much(number, asked, rules) or (kind is worst and not is_said):
            is_said = True
            # Where no kind alone is half of the answers but all together are, the most frequent stands for them.
            fails = number >= HALF * asked or (is_failing and kind is worst and number < total)
            yield _faulty(kind, facts, rules, (number, total, asked), soften("FAIL" if fails else "WEAK", asked))


def few_right(facts: Measurements, rules: VerdictRules) -> Iterator[Reason]:
    """Speak of too few right answers to questions with a short reference."""
    asked, right = count_right(facts)
    if asked and right < rules.min_right * asked:
        wrong = next((exchange for exchange in facts.short if not exchange.tuned.right), None)
        longer = f"`train.epochs: {2 * facts.epochs:.3g}`" if facts.epochs else "twice the `train.epochs`"
        yield Reason(
            code="few_right",
            level="WEAK",
            what=f"{count(right)} of {count(asked, 'question')} with a short reference "
            f"{'is' if right == 1 else 'are'} answered right ({percent(right / asked, 0)}); "
            f"{percent(rules.min_right, 0)} are asked for.",
            example=quote_answer(wrong, with_reference=True) if wrong else None,
            next=f"add rows that ask for the same in other words, or train longer ({longer}); where replies may be "
            "worded freely set `verdict.min_right: 0`",
        )


def answers_got_better(facts: Measurements) -> bool:
    """Say whether more questions are answered right than by the base model, by more than chance."""
    pairs = [(exchange.tuned, exchange.base) for exchange in facts.exchanges if exchange.base is not None]
    won = sum(bool(tuned.right and not base.right) for tuned, base in pairs)
    lost = sum(bool(base.right and not tuned.right) for tuned, base in pairs)
    return _is_beyond_chance(won, lost)


def no_better_than_base(facts: Measurements) -> Iterator[Reason]:
    """Speak of a base model that answers better, by more than chance."""
    pairs = [(exchange, exchange.base) for exchange in facts.exchanges if exchange.base is not None]
    lost = [exchange for exchange, base in pairs if base.right and not exchange.tuned.right]
    won = sum(bool(exchange.tuned.right and not base.right) for exchange, base in pairs)
    told = _how_base_is_better(pairs, len(lost), won) if pairs else _by_tallies(facts)
    if told:
        yield Reason(
            code="no_better_than_base",
            level="WEAK",
            what=told,
            example=quote_answer(lost[0], with_reference=True) if lost else None,
            next=f"set {suggest_rate(facts, 1 / 3, 'a third of what it was')}, and compare the answers in the report "
            "side by side",
        )


def _how_base_is_better(pairs: list[tuple[AnsweredQuestion, Answer]], lost: int, won: int) -> str | None:
    if _is_beyond_chance(lost, won):
        return (
            f"{count(lost)} questions the base model answers right are now wrong, and {count(won)} went the other way."
        )
    worse = sum(exchange.tuned.f1 < base.f1 for exchange, base in pairs)
    better = sum(exchange.tuned.f1 > base.f1 for exchange, base in pairs)
    now, before = (
        count_answers([exchange.tuned for exchange, _ in pairs]).f1,
        count_answers([base for _, base in pairs]).f1,
    )
    if lost < won or now >= before or not _is_beyond_chance(worse, better):
        return None
    return (
        f"The answers are further from the references than the base model's: F1 {before:.2f} -> {now:.2f}, lower on "
        f"{worse} of {count(len(pairs), 'question')} and higher on {better}."
    )


def _by_tallies(facts: Measurements) -> str | None:
    now, before = facts.tuned_tally, facts.base_tally
    if now is None or before is None or not _is_beyond_chance(before.right - now.right, 0):
        return None
    return (
        f"{count(now.right)} of {count(now.judged, 'question')} are answered right, by the base model {before.right}."
    )


def count_right(facts: Measurements, *, of_base: bool = False) -> tuple[int, int]:
    """Count the questions that can be right or wrong, and those that are right."""
    if not facts.exchanges:
        counted = facts.base_tally if of_base else facts.tuned_tally
        return (counted.judged, counted.right) if counted else (0, 0)
    said = [exchange.base if of_base else exchange.tuned for exchange in facts.short]
    present = [answer for answer in said if answer is not None]
    return len(present), sum(bool(answer.right) for answer in present)


def _counts(facts: Measurements) -> tuple[int, int, dict[str, int]]:
    """Count the answers, those with any fault, and those of each kind."""
    if facts.exchanges:
        by_kind = {kind.code: sum(_is_of(exchange, kind) for exchange in facts.exchanges) for kind in _KINDS}
        return len(facts.exchanges), sum(bool(exchange.tuned.faults) for exchange in facts.exchanges), by_kind
    if facts.tuned_tally is None:
        return 0, 0, dict.fromkeys(FAULT_CODES, 0)
    found = facts.tuned_tally.faults
    by_kind = {kind.code: sum(found.get(fault, 0) for fault in kind.faults) for kind in _KINDS}
    # One answer may have several faults: at least as many are faulty as have the most frequent one.
    return facts.tuned_tally.asked, max(by_kind.values()), by_kind


def _is_of(exchange: AnsweredQuestion, kind: _Kind) -> bool:
    return any(fault in kind.faults for fault in exchange.tuned.faults)


def _is_too_much(number: int, asked: int, rules: VerdictRules) -> bool:
    is_more_than_a_slip = number >= min(LEAST_SLIPS, asked) or rules.max_faults == 0
    return number > rules.max_faults * asked and is_more_than_a_slip


def _faulty(
    kind: _Kind, facts: Measurements, rules: VerdictRules, numbers: tuple[int, int, int], level: Literal["WEAK", "FAIL"]
) -> Reason:
    number, total, asked = numbers
    others = f"; with other faults {count(total)} of them are faulty" if total > number else ""
    few = (
        f" Of fewer than {FEW_QUESTIONS} questions no share is FAIL."
        if asked < FEW_QUESTIONS and number >= HALF * asked
        else ""
    )
    example = next((exchange for exchange in facts.exchanges if _is_of(exchange, kind)), None)
    return Reason(
        code=kind.code,
        level=level,
        what=f"{count(number)} of {count(asked, 'answer')} {kind.does}{others}; {percent(rules.max_faults, 0)} may be "
        f"faulty.{few}",
        example=quote_answer(example) if example else None,
        next=kind.next.format(corpus=facts.corpus, third=suggest_rate(facts, 1 / 3, "a third of what it was")),
    )


def _is_beyond_chance(worse: int, better: int) -> bool:
    """Test by signs whether so many of the questions that differ would be worse if worse and better were as likely."""
    differ = max(0, worse) + better
    ways = sum(math.comb(differ, number) for number in range(max(0, worse), differ + 1))
    return worse > better and ways < CHANCE * 2**differ
