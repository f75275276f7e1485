"""Reasons for WEAK or FAIL based on answers: faulty answers, wrong answers, a base model that answers better."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tunewell.config.rules import VerdictRules
from tunewell.core.units import count, percent
from tunewell.evaluation.intervals import sign_flip_p
from tunewell.evaluation.measurements import (
    FEW_QUESTIONS,
    Measurements,
    cluster_numbers,
    count_answers,
    quote_answer,
    soften,
    suggest_rate,
)
from tunewell.records.report import Answer, AnsweredQuestion, Reason

HALF = 0.5
"""Share of faulty answers from which the verdict is FAIL."""
MIN_FAULTY = 2
"""Minimum number of faulty answers for a reason, unless `verdict.max_faults` is 0: a single one may be chance."""
CHANCE = 0.05
"""Significance level of the sign-flip test that compares the answers of the two models."""


@dataclass(frozen=True)
class _FaultKind:
    """The reason code and the advice for one or more faults."""

    code: str
    faults: tuple[str, ...]
    does: str
    next: str


_KINDS = (
    _FaultKind(
        "answers_nothing",
        ("ends_at_once", "empty"),
        "are empty",
        "Run {inspect} and check that the replies are supervised, not only their end token. If they are, set {third}.",
    ),
    _FaultKind(
        "loops",
        ("loops",),
        "repeat themselves",
        "Set {third}. If the held-out loss is still falling, train longer (`train.epochs`).",
    ),
    _FaultKind(
        "control_tokens",
        ("control_tokens",),
        "contain control tokens or continue as the user",
        "Run {inspect} and check that the end of each turn is supervised. Use the chat template of the training "
        "(`template.name`).",
    ),
    _FaultKind(
        "never_stops",
        ("no_stop",),
        "do not stop before the length limit",
        "Run {inspect} and check that the end of each turn is supervised. Allow longer answers with "
        "`verdict.answer_tokens`, or train longer (`train.epochs`).",
    ),
    _FaultKind(
        "echoes",
        ("echo",),
        "begin with the question",
        "Set `template.learn_from: responses`, so that questions are not supervised, and run `tunewell prepare` again.",
    ),
    _FaultKind(
        "other_language",
        ("other_language",),
        "are in the wrong language",
        "Look for rows in that language in `data.sources`, or add rows with replies in the language of the question.",
    ),
)


def faulty_answers(measured: Measurements, rules: VerdictRules) -> Iterator[Reason]:
    """Yield a reason for each kind of fault that is too frequent, or for the most frequent if only the total is."""
    questions, asked = measured.questions, len(measured.questions)
    total = sum(bool(question.tuned.faults) for question in questions)
    if not _is_too_many(total, asked, rules):
        return
    faulty = [[each for each in questions if set(each.tuned.faults) & set(kind.faults)] for kind in _KINDS]
    most_frequent = max(faulty, key=len)
    for kind, found in zip(_KINDS, faulty, strict=True):
        number = len(found)
        if not _is_too_many(number, asked, rules) and found is not most_frequent:
            continue
        # If no single kind affects half of the answers but all kinds together do, the most frequent kind is a FAIL.
        fails = number >= HALF * asked or (total >= HALF * asked and found is most_frequent)
        others = f"; {count(total)} have a fault of any kind" if total > number else ""
        is_softened = asked < FEW_QUESTIONS and number >= HALF * asked
        few = f" With fewer than {FEW_QUESTIONS} questions this is not a FAIL." if is_softened else ""
        yield Reason(
            code=kind.code,
            level=soften("FAIL" if fails else "WEAK", asked),
            what=f"{count(number)} of {count(asked, 'answer')} {kind.does}{others} "
            f"(limit: {percent(rules.max_faults, 0)} faulty).{few}",
            example=quote_answer(found[0]),
            next=kind.next.format(inspect=measured.inspect_command, third=suggest_rate(measured, 1 / 3)),
        )


def few_right(measured: Measurements, rules: VerdictRules) -> Iterator[Reason]:
    """Yield a reason if too few of the judged questions are answered correctly."""
    asked, right = count_right(measured)
    if asked and right < rules.min_right * asked:
        wrong = next((question for question in measured.judged_questions if not question.tuned.right), None)
        yield Reason(
            code="few_right",
            level="WEAK",
            what=f"{count(right)} of {count(asked, 'question')} {'is' if right == 1 else 'are'} answered right "
            f"({percent(right / asked, 0)}; minimum: {percent(rules.min_right, 0)}).",
            example=quote_answer(wrong, with_reference=True) if wrong else None,
            next=f"Add rows with the same questions in other words, or train longer ({measured.longer_training}). "
            "If right answers count as wrong, add a column `answers`. If replies are free text, set "
            "`verdict.min_right: 0`.",
        )


def answers_improved(measured: Measurements) -> bool:
    """Return True if the tuned model answers significantly more questions correctly than the base model."""
    return _is_significant(measured, lambda tuned, base: bool(tuned.right) - bool(base.right))


def no_better_than_base(measured: Measurements) -> Iterator[Reason]:
    """Yield a reason if the base model answers significantly better."""
    lost, won = _lost_and_won(measured)
    if what := _describe_loss(measured, len(lost), len(won)):
        yield Reason(
            code="no_better_than_base",
            level="WEAK",
            what=what,
            example=quote_answer(lost[0], with_reference=True) if lost else None,
            next=f"Set {suggest_rate(measured, 1 / 3)}, and compare the answers side by side in the report.",
        )


def count_right(measured: Measurements, *, of_base: bool = False) -> tuple[int, int]:
    """Return the number of judged questions, and the number of right answers to them."""
    answers = [question.base if of_base else question.tuned for question in measured.judged_questions]
    present = [answer for answer in answers if answer is not None]
    return len(present), sum(bool(answer.right) for answer in present)


def _lost_and_won(measured: Measurements) -> tuple[list[AnsweredQuestion], list[AnsweredQuestion]]:
    """Return the questions that only the base model answers correctly, and those that only the tuned model does."""
    pairs = [(question, question.base) for question in measured.questions if question.base is not None]
    lost = [question for question, base in pairs if base.right and not question.tuned.right]
    return lost, [question for question, base in pairs if question.tuned.right and not base.right]


def _describe_loss(measured: Measurements, lost: int, won: int) -> str | None:
    if _is_significant(measured, lambda tuned, base: bool(base.right) - bool(tuned.right)):
        return f"{count(lost)} questions that the base model answers right are now wrong; {count(won)} are newly right."
    pairs = [(question.tuned, question.base) for question in measured.questions if question.base is not None]
    worse, better = sum(tuned.f1 < base.f1 for tuned, base in pairs), sum(tuned.f1 > base.f1 for tuned, base in pairs)
    now, before = count_answers([tuned for tuned, _ in pairs]).f1, count_answers([base for _, base in pairs]).f1
    is_lower = _is_significant(measured, lambda tuned, base: (tuned.f1 < base.f1) - (tuned.f1 > base.f1))
    if lost < won or now >= before or not is_lower:
        return None
    return (
        f"The answers overlap less with the references than the base model's: F1 {before:.2f} -> {now:.2f}, lower on "
        f"{worse} of {count(len(pairs), 'question')} and higher on {better}."
    )


def _is_too_many(number: int, asked: int, rules: VerdictRules) -> bool:
    is_enough = number >= min(MIN_FAULTY, asked) or rules.max_faults == 0
    return number > rules.max_faults * asked and is_enough


def _is_significant(measured: Measurements, difference: Callable[[Answer, Answer], int]) -> bool:
    """Return True if the difference between the tuned and the base model is significantly positive.

    Questions on one fact are one observation: a plain sign test finds differences by chance in 10% to 30% of the cases.
    """
    pairs = [(question, question.base) for question in measured.questions if question.base is not None]
    differences = [difference(question.tuned, base) for question, base in pairs]
    clusters = cluster_numbers([question for question, _ in pairs])
    return sum(differences) > 0 and sign_flip_p(differences, clusters, side="greater") < CHANCE
