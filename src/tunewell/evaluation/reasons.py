"""The reasons of a verdict: broken weights, faulty answers, no shown gain, too few right answers, damage."""

import math
import shlex
from collections.abc import Iterator

from tunewell.config.rules import VerdictRules
from tunewell.core.files import read_data
from tunewell.core.text import shorten_line
from tunewell.core.units import count, percent
from tunewell.data.corpus.held_out import num_auto
from tunewell.evaluation.intervals import LEVEL, PairedDifference
from tunewell.evaluation.measurements import (
    FEW_QUESTIONS,
    Measurements,
    cluster_numbers,
    count_answers,
    quote_answer,
    short_loss,
)
from tunewell.records.manifest import MIN_TO_JUDGE
from tunewell.records.report import DifferenceRecord, Reason

TABLE = read_data(__file__, "reasons.jsonl")
"""Codes and summaries of all reasons, causes before effects, with the faults or the measure of some."""
SAME_LOGITS = 1e-4
"""Largest logit difference that can be a rounding error: a logit of 20 in fp32 is exact to 2e-6, and even a short
training changes logits by hundredths."""
HALF = 0.5
"""Share of faulty answers from which the verdict is FAIL."""
MIN_FAULTY = 2
"""Minimum number of faulty answers for a reason, unless `verdict.max_faults` is 0: a single one may be chance."""
MIN_NONE_RIGHT = 20
"""Number of questions of which one must be right: with 20 wrong answers, fewer than 14% are right (95% interval)."""

# A model that cannot be measured.


def broken(measured: Measurements) -> Iterator[Reason]:
    """Yield the reasons that explain everything else: weights or losses that are not finite, or no change at all."""
    path = shlex.quote(measured.model_path)
    if measured.bad_weights:
        values = sum(measured.bad_weights.values())
        names = [f"{shorten_line(name)} ({count(number)})" for name, number in measured.bad_weights.items()]
        yield Reason(
            code="weights_not_finite",
            level="FAIL",
            what=f"{count(values, 'value')} in {count(len(names), 'tensor')} of the model "
            f"{'is' if values == 1 else 'are'} not finite (NaN or infinite).",
            example=", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
            next=measured.train_again(
                "train.precision=fp32",
                measured.rate(1 / 3),
                expected="finite weights, from smaller steps",
            ),
        )
    pairs, change = (measured.held_out, *measured.by_source, measured.everyday), measured.change
    bad = [pair.name for pair in pairs if pair is not None and not math.isfinite(pair.tuned)]
    if change is not None and math.isnan(change.largest):
        bad.append("the logits")
    if bad:
        yield Reason(
            code="loss_not_finite",
            level="FAIL",
            what=f"{count(len(bad), 'measurement')} of the tuned model {'is' if len(bad) == 1 else 'are'} not finite "
            "(NaN or infinite).",
            example=", ".join(shorten_line(name) for name in bad[:5]),
            next=f"`tunewell validate {path} --device cpu` computes in fp32. If that does not help: "
            + measured.train_again(measured.rate(1 / 3), expected="smaller steps, so that the losses stay finite"),
        )
    if change is not None and change.prompts > 0 and change.largest <= SAME_LOGITS:
        cause = "the adapter is empty or was not applied" if measured.is_adapter else "training changed nothing"
        yield Reason(
            code="nothing_changed",
            level="FAIL",
            what=f"On {count(change.prompts, 'prompt')} no logit differs from the base model's by more than "
            f"{change.largest:.1g}: {cause}.",
            next="Was the adapter made for this base model, and does `method.targets` name its layers? "
            + measured.train_again(measured.rate(3), expected="larger steps, which change the answers"),
        )


# Faulty answers.


def faulty_answers(measured: Measurements, rules: VerdictRules) -> Iterator[Reason]:
    """Yield a reason for each kind of fault that is too frequent, or for the most frequent if only the total is."""
    questions, asked = measured.questions, len(measured.questions)
    total = sum(bool(question.tuned.faults) for question in questions)
    if not _is_too_many(total, asked, rules):
        return
    kinds = [row for row in TABLE if "faults" in row]
    faulty = [[each for each in questions if set(each.tuned.faults) & set(kind["faults"])] for kind in kinds]
    most_frequent = max(faulty, key=len)
    for kind, found in zip(kinds, faulty, strict=True):
        number = len(found)
        if not _is_too_many(number, asked, rules) and found is not most_frequent:
            continue
        # If no single kind affects half of the answers but all kinds together do, the most frequent kind is a FAIL.
        fails = number >= HALF * asked or (total >= HALF * asked and found is most_frequent)
        others = f"; {count(total)} have a fault of any kind" if total > number else ""
        is_few = asked < FEW_QUESTIONS
        few = f" With fewer than {FEW_QUESTIONS} questions this is not a FAIL." if fails and is_few else ""
        yield Reason(
            code=kind["code"],
            level="FAIL" if fails and not is_few else "WEAK",
            what=f"{count(number)} of {count(asked, 'answer')} {kind['does']}{others} "
            f"(limit: {percent(rules.max_faults, 0)} faulty).{few}",
            example=quote_answer(found[0]),
            next=kind["next"].format(
                inspect=measured.inspect_command,
                slower=measured.train_again(measured.rate(1 / 3), expected="fewer faults, from smaller steps"),
                longer=measured.train_again(measured.longer, expected="fewer faults, from a longer training"),
                replies=measured.train_again("template.learn_from=responses", expected="questions are not learned"),
            ),
        )


def _is_too_many(number: int, asked: int, rules: VerdictRules) -> bool:
    is_enough = number >= min(MIN_FAULTY, asked) or rules.max_faults == 0
    return number > rules.max_faults * asked and is_enough


# Tasks with right answers.


def right_answers(measured: Measurements) -> Iterator[Reason]:
    """Yield the reasons of a task with right answers: none right, no shown gain, or too few right."""
    judged, right = measured.judged, measured.num_right()
    asked, noun = len(judged), measured.noun
    if not asked:
        yield _unproven(measured, "Cannot tell: no held-out question can be judged.")
        return
    wrong = next((question for question in judged if not question.tuned.right), None)
    example = quote_answer(wrong, with_reference=True) if wrong else None
    if not right and asked >= MIN_NONE_RIGHT:
        yield Reason(
            code="none_right",
            level="FAIL",
            what=f"None of {count(asked)} {noun} is right.",
            example=example,
            next=_train_more(measured),
        )
        return
    score = f"{count(right)} of {count(asked)} {noun} right"
    if (difference := measured.difference) is None:
        yield _without_base(measured)
    else:
        base = measured.num_right(of_base=True)
        is_known = base >= (measured.min_right or 0.0) * asked
        known = ". The base model alone reaches the minimum: no training was needed" if is_known else ""
        what = f"the base model: {score}, {count(base)} with the base model{known}."
        yield from _compared(measured, "no_better_than_base", what, difference, example)
    if (constant := measured.constant) is not None:
        lead = f'always answering "{shorten_line(constant.text, 40)}"'
        what = f"{lead}: {score}, {count(constant.right)} by {lead}."
        yield from _compared(measured, "majority_only", what, constant.difference, example)
    yield from _below_minimum(measured, score, example)


def _below_minimum(measured: Measurements, score: str, example: str | None) -> Iterator[Reason]:
    """Yield the reason if too few answers are right, of all questions or of those that no training row asks alike."""
    judged, right = measured.judged, measured.num_right()
    asked, noun = len(judged), measured.noun
    least = measured.min_right or 0.0
    if right < least * asked:
        yield Reason(
            code="few_right",
            level="WEAK",
            what=f"{score} ({percent(right / asked, 0)}; minimum: {percent(least, 0)}).",
            example=example,
            next=_train_more(measured),
        )
        return
    near, others = ([one for one in judged if one.is_near is is_near] for is_near in (True, False))
    known, new = (count_answers([one.tuned for one in part], cluster_numbers(part)) for part in (near, others))
    if len(near) >= FEW_QUESTIONS <= len(others) and new.right_interval and new.right_interval[1] < least:
        yield Reason(
            code="memorised",
            level="WEAK",
            what=f"{count(known.right)} of {count(known.judged)} right where a training row asks nearly alike, but "
            f"{count(new.right)} of {count(new.judged)} of the other {noun} (minimum: {percent(least, 0)}).",
            example=quote_answer(next(one for one in others if not one.tuned.right), with_reference=True),
            next="Add rows to `data.sources` that ask in other words; the report has the score without near copies.",
        )


def _train_more(measured: Measurements) -> str:
    """Return what may make more answers right, best first: more training where it helps, rows, another model."""
    gain = "more right answers" if measured.min_right is not None else "a lower loss"
    falling = f"{gain}: the held-out loss was still falling when it ended"
    if measured.is_still_falling:
        first = measured.train_again(measured.longer, expected=falling)
    else:
        first = measured.train_again(measured.rate(1 / 3), expected="a later best step: the held-out loss rose again")
    look_up = " Are the answers in documents? `tunewell index FOLDER` looks them up instead."
    return (
        f"{first} Rows that say the same in other words help more than repetition. `tunewell models` compares larger "
        f"base models.{look_up if measured.task == 'facts' else ''}"
    )


def _compared(
    measured: Measurements, code: str, what: str, found: PairedDifference | DifferenceRecord, example: str | None
) -> Iterator[Reason]:
    """Yield FAIL if the model is worse than what it is compared with, UNPROVEN if no difference is shown."""
    if found.p > LEVEL:
        is_behind = found.difference < 0  # more questions would hardly show that it is better
        more = None if is_behind else found.more_questions
        reason = _unproven(measured, f"Not shown to be better than {what}", more=more, example=example, code=code)
        yield reason.model_copy(update={"next": _train_more(measured)}) if is_behind else reason
    elif found.difference < 0:
        advice = measured.train_again(measured.rate(1 / 3), expected="answers closer to those of the base model")
        yield Reason(code=code, level="FAIL", what=f"Worse than {what}", example=example, next=advice)


def _unproven(
    measured: Measurements,
    what: str,
    *,
    more: int | None = None,
    example: str | None = None,
    code: str = "not_enough_evidence",
) -> Reason:
    """Return the reason of an UNPROVEN verdict: how many questions were asked, and how many more would decide."""
    asked, held_out = len(measured.questions), measured.num_held_out
    needed = f"; a difference of this size needs about {count(more)} more" if more else ""
    numbers = f" Asked: {count(asked, 'question')} of {count(held_out, 'held-out row')}{needed}." if asked else ""
    if (num_different := len(set(cluster_numbers(measured.questions)))) < asked:
        numbers += f" Some ask the same, so they count as {count(num_different, 'question')}."
    return Reason(code=code, level="UNPROVEN", what=what + numbers, example=example, next=_ask_more(measured, more))


def _without_base(measured: Measurements) -> Reason:
    command = f"`tunewell validate {shlex.quote(measured.model_path)} --base MODEL`"
    found = _unproven(measured, "Cannot tell: there is no base model to compare with.")
    return found.model_copy(update={"next": f"Which model was it trained from? {command} compares with it."})


def _ask_more(measured: Measurements, more: int | None) -> str:
    path, asked = shlex.quote(measured.model_path), len(measured.questions)
    if asked and measured.num_held_out > asked:
        number = min(measured.num_held_out, asked + more if more else measured.num_held_out)
        data = "" if measured.test_file is None else f" --data {shlex.quote(measured.test_file)}"
        return f"`tunewell validate {path}{data} --set verdict.questions={number}` asks more of the held-out rows."
    other = f"Do you have more rows for a test? `tunewell validate {path} --data FILE` tests it on them."
    if measured.test_file is not None:
        return other
    number = num_auto(measured.num_rows or 0)
    if number > asked and not measured.is_held_out_auto:
        rows = f"{count(number)} of {count(measured.num_rows or 0, 'row')} are held out and asked"
        return f"{measured.train_again('data.held_out=auto', expected=rows)} {other}"
    longer = measured.train_again(measured.longer, expected="a larger difference, which fewer questions show")
    return f"{longer} {other}" if asked else f"{other} Rows with other questions are held out for the test too."


# Tasks without right answers: the held-out loss decides.


def held_out_loss(measured: Measurements, rules: VerdictRules) -> Iterator[Reason]:
    """Yield the reasons of a task without right answers, in which the held-out loss decides."""
    pair, base, difference = measured.held_out, measured.base_loss, measured.loss_difference
    if pair is None or pair.documents < MIN_TO_JUDGE:
        number = pair.documents if pair is not None else 0
        what = f"Cannot tell: {count(number)} held-out rows, at least {MIN_TO_JUDGE} are needed."
        yield _unproven(measured, what)
        return
    if base is None or difference is None:
        yield _without_base(measured)
        return
    losses = f"held-out loss {short_loss(base)} -> {short_loss(pair.tuned)} on {count(pair.documents, 'row')}"
    advice = (
        measured.train_again(measured.rate(1 / 3), expected="a loss below the base model's, from smaller steps")
        + f" {measured.inspect_command} shows whether the replies are supervised."
    )
    gain = 1 - pair.tuned / base if base > 0 else 0.0
    if not difference.is_shown:
        yield _unproven(
            measured, f"No difference to the base model is shown: {losses}.", more=difference.more_questions
        )
    elif difference.difference < 0:
        yield Reason(code="not_learned", level="FAIL", what=f"Worse than the base model: {losses}.", next=advice)
    elif gain < rules.min_gain:
        yield Reason(
            code="little_gain",
            level="WEAK",
            what=f"The held-out loss is only {percent(gain)} lower than the base model's ({losses}; minimum: "
            f"{percent(rules.min_gain)}).",
            next=_train_more(measured),
        )


# Damage.


def damage(measured: Measurements) -> Iterator[Reason]:
    """Yield a reason for each measure of forgetting beyond its limit."""
    kinds = {row["measure"]: row for row in TABLE if "measure" in row}
    for found in measured.forgotten:
        if found.is_damaged:
            yield Reason(
                code=kinds[found.name]["code"],
                level="WEAK",
                what=f"{kinds[found.name]['lead']}: {found.result}.",
                next=_forget_less(measured),
            )


def _forget_less(measured: Measurements) -> str:
    smaller = measured.train_again(measured.rate(1 / 3), expected="smaller steps forget less")
    if measured.replay is None or measured.more_replay <= measured.replay:
        return smaller
    replay = f"train.replay={measured.more_replay:g}"
    return f"{measured.train_again(replay, expected='it repeats everyday answers, and forgets less')} {smaller}"


def loss_notes(measured: Measurements, rules: VerdictRules) -> list[str]:
    """Return notes on the losses: a rise after the best step, and sources with a higher loss than before."""
    notes = []
    evaluations = [(loss, step) for step, loss in measured.held_out_curve if math.isfinite(loss)]
    if len(evaluations) >= 2:
        (lowest, best), (final, last) = min(evaluations), evaluations[-1]
        if final - lowest > max(0.1, rules.max_rise * lowest):
            used = measured.evaluated_step if measured.evaluated_step is not None else last
            notes.append(
                f"the held-out loss rose from {short_loss(lowest)} at step {best:,} to {short_loss(final)} at step "
                f"{last:,}; step {used:,} was evaluated" + (", the best" if used == best else "")
            )
    worse = [pair for pair in measured.by_source if pair.base is not None and pair.tuned > pair.base]
    if worse:
        shown = ", ".join(
            f"`{shorten_line(pair.name)}` {short_loss(pair.base or 0.0)} -> {short_loss(pair.tuned)}"
            for pair in worse[:3]
        )
        notes.append(f"the loss rose on {count(len(worse), 'source')}: {shown}")
    return notes
