"""Format the texts, numbers and answers of a report for the HTML page and for Markdown."""

import json
import math
from dataclasses import dataclass, replace
from typing import Any

from tunewell.config.extensions import SCORERS
from tunewell.core.html import single_line, visible
from tunewell.core.text import shorten
from tunewell.core.units import count, percent
from tunewell.records.report import Answer, AnswerCounts, AnsweredQuestion, LossPair, MetricResult, Report
from tunewell.runs.loss_curve import format_loss

FAULT_WORDS = {
    "empty": "empty",
    "ends_at_once": "stops at once",
    "loops": "loops",
    "echo": "echoes the question",
    "no_stop": "does not stop",
    "other_language": "other language",
    "control_tokens": "control tokens in the text",
}


_SMALL_RATIO = 1.5
ELLIPSIS = "\u2026"
NUM_ORDINARY = 6
"""Number of answers to everyday instructions that are shown: those that changed most."""


def answer_mark(answer: Answer) -> str:
    """Return `right`, `wrong` or `refused` for a judged answer, and an empty text for another."""
    if answer.right is None:
        return ""
    return "right" if answer.right else "refused" if answer.is_refusal else "wrong"


def loss(value: float | None) -> str:
    """Format a loss with four decimals, or return a description if it is missing or not finite."""
    return "not measured" if value is None else format_loss(value)


def perplexity(value: float | None) -> str:
    """Format the perplexity, i.e. exp(loss), of a loss."""
    if value is None or not math.isfinite(value):
        return loss(value)
    power = math.exp(value) if value < 700 else math.inf
    if power < 100:
        return f"{power:.2f}"
    return f"{power:,.0f}" if power < 1e6 else f"{power:.1e}" if power < math.inf else "over 1e304"


def nonfinite_text(value: float) -> str:
    """Return a description of a NaN or infinite number, or "" for a finite number."""
    return "" if math.isfinite(value) else format_loss(value)


def setting(value: Any) -> str:
    """Format the value of a setting of any type."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return count(value)
    if isinstance(value, float):
        return nonfinite_text(value) or (f"{value:,.6g}" if 1e-3 <= abs(value) < 1e6 or value == 0 else f"{value:.4g}")
    if isinstance(value, list | tuple) and all(isinstance(entry, str | int | float) for entry in value):
        return ", ".join(setting(entry) for entry in value) or "none"
    if isinstance(value, dict | list | tuple):
        return visible(json.dumps(value, ensure_ascii=False, sort_keys=True, default=str))
    return visible(value)


def declared_order(keys: Any, known: Any) -> list[str]:
    """Return the keys in their order in `known`, then other keys by name, so that the output is deterministic."""
    order = {name: index for index, name in enumerate(known)}
    return sorted(keys, key=lambda key: (order.get(key, len(order)), key))


@dataclass(frozen=True, kw_only=True)
class MetricRow:
    """The formatted values of one metric for the base and the tuned model."""

    name: str
    hint: str = ""
    base: str
    tuned: str
    change: str = ""
    shares: tuple[float | None, float] | None = None
    """Values of the base and the tuned model between 0 and 1, if the metric is a share."""


def key_metrics(report: Report) -> list[MetricRow]:
    """Return the two or three most important metrics."""
    rows = []
    if report.tuned_tally and report.tuned_tally.asked:
        rows += [_right(report)] if has_right(report) else []
    if report.held_out:
        rows.append(_loss("Held-out loss", report.held_out, hint="rows not used for training; lower is better"))
    if report.everyday:
        rows.append(_everyday("Loss on everyday text", report))
    return rows


def all_metrics(report: Report) -> list[MetricRow]:
    """Return every metric of the base and the tuned model."""
    rows = []
    if report.held_out:
        rows += [_loss("Held-out loss", report.held_out, hint="lower is better")]
        rows += [_perplexity("Held-out perplexity", report.held_out)]
    if report.tuned_tally and report.tuned_tally.asked:
        rows += _answers(report)
    if report.everyday:
        rows += [_everyday("Everyday text, loss", report)]
        rows += [_perplexity("Everyday text, perplexity", report.everyday)]
    rows += forgotten_rows(report)
    return [*rows, *(_user_metric(name, metric) for name, metric in sorted(report.metrics.items()))]


def source_metrics(report: Report) -> list[tuple[LossPair, MetricRow]]:
    """Return the held-out losses of each source."""
    return [(pair, _loss(single_line(pair.name), pair)) for pair in report.by_source]


def _loss(name: str, pair: LossPair, hint: str = "") -> MetricRow:
    return MetricRow(name=name, hint=hint, base=loss(pair.base), tuned=loss(pair.tuned), change=_loss_change(pair))


def _perplexity(name: str, pair: LossPair) -> MetricRow:
    texts = (perplexity(pair.base), perplexity(pair.tuned))
    return MetricRow(name=name, hint="lower is better", base=texts[0], tuned=texts[1], change=perplexity_change(pair))


def perplexity_change(pair: LossPair) -> str:
    """Return how many times the perplexity has grown or shrunk, e.g. `4.1 times as high`; "" for a small change."""
    if pair.base is None or not (math.isfinite(pair.base) and math.isfinite(pair.tuned)):
        return ""
    ratio = math.exp(min(abs(pair.tuned - pair.base), 100.0))
    if ratio < _SMALL_RATIO:
        return ""
    return f"{ratio:.1f} times as {'high' if pair.tuned > pair.base else 'low'}"


def _loss_change(pair: LossPair) -> str:
    if pair.base is None or nonfinite_text(pair.base) or nonfinite_text(pair.tuned) or pair.base <= 0:
        return ""
    share = pair.tuned / pair.base - 1
    if abs(share) < 0.0005:
        return "the same"
    if share > 10:
        return f"{count(round(share + 1))} times as high" if share < 1e6 else "far higher"
    return f"{percent(abs(share))} {'lower' if share < 0 else 'higher'}"


def _mean(name: str, base: float | None, tuned: float | None, *, hint: str, style: str) -> MetricRow:
    """Return the row of a mean value; `style` is the number format."""
    numbers = (base, tuned)
    texts = ["not measured" if each is None else nonfinite_text(each) or f"{each:{style}}" for each in numbers]
    change = ""
    if base is not None and tuned is not None and math.isfinite(tuned - base):
        difference = f"{abs(tuned - base):{style}}"
        # A difference that rounds to 0 is not shown.
        change = f"{difference} {'higher' if tuned > base else 'lower'}" if difference.strip("0.") else ""
    return MetricRow(name=name, hint=hint, base=texts[0], tuned=texts[1], change=change)


def _user_metric(name: str, metric: MetricResult) -> MetricRow:
    failed = f", failed on {count(metric.failed, 'answer')}" if metric.failed else ""
    hint = f"your metric, mean of {count(metric.questions, 'question')}{failed}"
    return _mean(single_line(name), metric.base, metric.tuned, hint=hint, style=",.4g")


def _everyday(name: str, report: Report) -> MetricRow:
    assert report.everyday is not None
    row = _loss(name, report.everyday)
    limit = report.thresholds.get("max_forgetting")
    allowed = f" (limit: {percent(limit.value, 0)} worse)" if limit and isinstance(limit.value, float) else ""
    change = row.change.replace("lower", "better").replace("higher", "worse")
    return replace(row, change=change, hint=f"text that the base model knew{allowed}")


def has_right(report: Report) -> bool:
    """Return True if answers can be right or wrong in the task of the rows."""
    return report.tuned_tally is not None and report.tuned_tally.judged > 0


def right_name(report: Report) -> str:
    """Return what is counted: `Labels right`."""
    name = report.task.value if report.task is not None else "facts"
    noun = SCORERS.entry(name).noun if name in SCORERS.names() else "answers"
    return f"{noun[:1].upper()}{noun[1:]} right"


def _right(report: Report) -> MetricRow:
    base, tuned = report.base_tally, report.tuned_tally
    assert tuned is not None
    row = _counted(right_name(report), base, tuned, "right")
    shares = (base.right / base.judged if base and base.judged else None, tuned.right / max(1, tuned.judged))
    return replace(row, hint=_interval_hint(tuned), shares=shares)


def compared_rows(report: Report) -> list[MetricRow]:
    """Return the rows below the right answers: the base with the other prompt, a constant answer, subsets, measures."""
    tuned, rows = report.tuned_tally, list[MetricRow]()
    if tuned is None:
        return rows
    now = _of(tuned.right, tuned.judged)
    if report.asked_tally is not None and report.hinted_tally is not None:
        other = report.asked_tally if report.is_base_hinted else report.hinted_tally
        name = "  base, without a list" if report.is_base_hinted else "  base, with a list"
        hint = "the better prompt counts: " + ("with a list" if report.is_base_hinted else "without a list")
        rows.append(MetricRow(name=name, hint=hint, base=_of(other.right, other.judged), tuned=""))
    if report.constant is not None:
        text = shorten(single_line(report.constant.text), 32, mark=ELLIPSIS)
        hint = f'always answering "{text}"'
        rows.append(
            MetricRow(
                name="  one constant answer",
                hint=hint,
                base=_of(report.constant.right, report.constant.judged),
                tuned=now,
            )
        )
    if report.without_near is not None:
        apart = report.without_near
        rows.append(
            MetricRow(
                name="  without near duplicates",
                hint="questions without a similar training row",
                base="",
                tuned=_of(apart.right, apart.judged),
            )
        )
    unclear = [one.tuned for one in report.exchanges if one.is_ambiguous and one.tuned.right is not None]
    if unclear:
        right = sum(bool(one.right) for one in unclear)
        rows.append(
            MetricRow(
                name="  ambiguous questions",
                hint="another row has the same question with another answer",
                base="",
                tuned=_of(right, len(unclear)),
            )
        )
    for name, pair in report.measures.items():
        base = "" if pair.base is None else f"{pair.base:.2f}"
        rows.append(MetricRow(name=f"  {single_line(name)}", base=base, tuned=f"{pair.tuned:.2f}"))
    return rows


def forgotten_rows(report: Report) -> list[MetricRow]:
    """Return the measures of forgetting other than the loss on everyday text."""
    rows = []
    for found in report.forgotten:
        if found.name != "everyday text":
            numbers = [f"{value:.0%}" for value in (found.base, found.tuned)]
            hint = f"limit: {100 * found.limit:.3g} points fewer" + (", exceeded" if found.is_damaged else "")
            name = {"replies": "Everyday questions answered"}.get(
                found.name, f"{single_line(found.name).capitalize()} followed"
            )
            rows.append(MetricRow(name=name, hint=hint, base=numbers[0], tuned=numbers[1]))
    return rows


def field_rows(report: Report, *, most: int = 20) -> list[tuple[str, list[int]]]:
    """Return each field with its numbers of right, wrong, missing and extra values."""
    kinds = ("right", "wrong", "missing", "extra")
    found = [(single_line(name), [marks.get(kind, 0) for kind in kinds]) for name, marks in report.fields.items()]
    return found[:most]


def _interval_hint(tuned: AnswerCounts) -> str:
    if tuned.right_interval is None:
        return ""
    low, high = tuned.right_interval
    return f"tuned model, 95% interval: {percent(low, 0)} to {percent(high, 0)}"


def _answers(report: Report) -> list[MetricRow]:
    base, tuned = report.base_tally, report.tuned_tally
    assert tuned is not None
    rows = [_right(report), *compared_rows(report)] if has_right(report) else compared_rows(report)
    rows += [
        _counted("Exact match with the reference", base, tuned, "exact"),
        _mean(
            "Token F1, mean", base and base.f1, tuned.f1, hint="0 to 1, word overlap with the reference", style=".3f"
        ),
    ]
    if tuned.refused or (base and base.refused):
        rows.append(_counted("Refusals", base, tuned, "refused"))
    for name in declared_order({*tuned.faults, *(base.faults if base else ())}, FAULT_WORDS):
        was, now = (base.faults.get(name, 0) if base else 0), tuned.faults.get(name, 0)
        if was or now:
            label = f"Fault: {single_line(FAULT_WORDS.get(name, name.replace('_', ' ')))}"
            before = _of(was, base.asked) if base else "not measured"
            rows.append(MetricRow(name=label, hint="fewer is better", base=before, tuned=_of(now, tuned.asked)))
    return rows


def _counted(name: str, base: AnswerCounts | None, tuned: AnswerCounts, field: str) -> MetricRow:
    now, whole = getattr(tuned, field), tuned.judged if field == "right" else tuned.asked
    if base is None:
        return MetricRow(name=name, base="not measured", tuned=_of(now, whole))
    was, base_whole = getattr(base, field), base.judged if field == "right" else base.asked
    difference = now - was if base_whole == whole else 0
    change = f"{count(abs(difference))} {'more' if difference > 0 else 'fewer'}" if difference else ""
    return MetricRow(name=name, base=_of(was, base_whole), tuned=_of(now, whole), change=change)


def _of(part: int, whole: int) -> str:
    return f"{count(part)} of {count(whole)}"


# Answers: a selection, then the other wrong answers, then the other right answers.

_NUM_SELECTED = 6
_MAX_ANSWERS = 500
"""Maximum number of answers on a page; `report.json` has all of them."""


@dataclass(frozen=True)
class SortedAnswers:
    """The answers of a report, sorted into three lists."""

    selected: list[AnsweredQuestion]
    wrong: list[AnsweredQuestion]
    right: list[AnsweredQuestion]
    left_out: int


def sorted_answers(
    report: Report, *, num_selected: int = _NUM_SELECTED, max_answers: int = _MAX_ANSWERS
) -> SortedAnswers:
    """Sort the answers. Half of the selected answers are wrong and half are right, if there are enough of both."""
    ranked = sorted(report.exchanges, key=_rank)
    wrong = [question for question in ranked if _is_wrong(question)]
    right = [question for question in ranked if not _is_wrong(question)]
    num_wrong = max(min(len(wrong), num_selected // 2), min(len(wrong), num_selected - len(right)))
    num_right = min(len(right), num_selected - num_wrong)
    more_wrong = wrong[num_wrong:][:max_answers]
    more_right = right[num_right:][: max_answers - len(more_wrong)]
    return SortedAnswers(
        selected=[*wrong[:num_wrong], *right[:num_right]],
        wrong=more_wrong,
        right=more_right,
        left_out=len(ranked) - num_wrong - num_right - len(more_wrong) - len(more_right),
    )


def judge_sentences(report: Report) -> list[str]:
    """Return how the answers were judged: the task with its reason, examples, and the difference between the models."""
    judge, found = report.judge, list[str]()
    if report.task is not None:
        found.append(f"Task `{report.task.value}`: {report.task.because}.")
    if judge is not None and judge.origins:
        facts = f"{count(sum(judge.origins.values()), 'question')} on {count(judge.clusters, 'fact')}"
        examples = ", ".join(f'"{shorten(single_line(example.key), 60, mark=ELLIPSIS)}"' for example in judge.examples)
        found.append(f"Judged by {judge.describe()}, such as {examples}; {facts}.")
    if judge is not None and judge.difference is not None:
        result = judge.difference.result
        found.append(f"{result[:1].upper()}{result[1:]}.")
    return found


def _is_wrong(question: AnsweredQuestion) -> bool:
    return question.tuned.right is False or bool(question.tuned.faults)


def _rank(question: AnsweredQuestion) -> tuple[bool, bool, bool, int]:
    """Return a sort key: faulty answers first, then wrong answers, then answers that became right or wrong."""
    was_right = question.base is not None and bool(question.base.right)
    has_changed = was_right != bool(question.tuned.right)
    return (not question.tuned.faults, question.tuned.right is not False, not has_changed, question.document)
