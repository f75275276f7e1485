"""Format the texts, numbers and answers of a report for the HTML page and for Markdown."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from tunewell.config.extensions import SCORERS
from tunewell.core.html import single_line, visible
from tunewell.core.text import shorten
from tunewell.core.units import count, listed, percent
from tunewell.records.report import (
    Answer,
    AnswerCounts,
    AnsweredQuestion,
    ConstantAnswer,
    LossPair,
    MeasurePair,
    MetricResult,
    Report,
)
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


_HELD_OUT, _EVERYDAY = "Held-out loss", "Loss on everyday text"
_SMALL_RATIO = 1.5
ELLIPSIS = "\u2026"
NUM_ORDINARY = 6
"""Number of answers to everyday instructions that are shown: those that changed most."""


def title(report: Report) -> str:
    """Return which model was tested on which rows: `SmolLM2-135M-Instruct on support.jsonl`."""
    model = report.subject.base or report.subject.name
    model = PurePath(model).name if PurePath(model).is_absolute() else model
    if model.startswith("package:"):
        model = model.partition(" (")[2].rstrip(")") or model.removeprefix("package:")
    return f"{model} on {tested_rows(report)}"


def tested_rows(report: Report) -> str:
    """Return the rows of a test by their files."""
    if report.subject.kind != "run" or report.ledger is None or "held-out rows" not in report.data:
        return report.data
    sources = sorted(report.ledger.sources, key=lambda source: not source.get("documents"))  # a test file comes last
    return listed([source["name"] for source in sources], 2, noun="file")


def kinds_of(question: AnsweredQuestion) -> str:
    """Return the kinds of an answer, by which the page can be filtered."""
    tuned, base = question.tuned, question.base
    kinds = {
        "right": tuned.right is True,
        "wrong": tuned.right is False,
        "faulty": bool(tuned.faults),
        "changed": base is not None and bool(base.right) != bool(tuned.right),
    }
    return " ".join(name for name, holds in kinds.items() if holds)


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
    if power == math.inf:
        return "over 1e304"
    return f"{power:.2f}" if power < 100 else f"{power:,.0f}" if power < 1e6 else f"{power:.1e}"


def nonfinite_text(value: float) -> str:
    """Return a description of a NaN or infinite number, or "" for a finite number."""
    return "" if math.isfinite(value) else format_loss(value)


def setting(value: Any) -> str:
    """Format the value of a setting of any type."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
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


@dataclass(frozen=True)
class MetricRow:
    """The formatted values of one metric for the base and the tuned model."""

    name: str
    base: str
    tuned: str
    change: str = ""
    hint: str = ""
    shares: tuple[float | None, float] | None = None
    """Values of the base and the tuned model between 0 and 1, if the metric is a share."""


def key_metrics(report: Report) -> list[MetricRow]:
    """Return the two or three most important metrics."""
    rows = {row.name: row for row in all_metrics(report)}
    return [rows[name] for name in (right_name(report), _HELD_OUT, _EVERYDAY) if name in rows]


def all_metrics(report: Report) -> list[MetricRow]:
    """Return every metric of the base and the tuned model."""
    rows = []
    if report.held_out:
        rows.append(_loss(_HELD_OUT, report.held_out, hint="rows not used for training; lower is better"))
        rows.append(_perplexity("Held-out perplexity", report.held_out))
    rows += _answers(report)
    if report.everyday:
        rows += [_everyday(report, report.everyday), _perplexity("Everyday text, perplexity", report.everyday)]
    rows += forgotten_rows(report)
    return [*rows, *(_user_metric(name, metric) for name, metric in sorted(report.metrics.items()))]


def source_metrics(report: Report) -> list[tuple[LossPair, MetricRow]]:
    """Return the held-out losses of each source."""
    return [(pair, _loss(single_line(pair.name), pair)) for pair in report.by_source]


def _loss(name: str, pair: LossPair, hint: str = "") -> MetricRow:
    return MetricRow(name, loss(pair.base), loss(pair.tuned), _loss_change(pair), hint)


def _perplexity(name: str, pair: LossPair) -> MetricRow:
    return MetricRow(name, perplexity(pair.base), perplexity(pair.tuned), perplexity_change(pair), "lower is better")


def perplexity_change(pair: LossPair) -> str:
    """Return how many times the perplexity has grown or shrunk, e.g. `4.1 times as high`; "" for a small change."""
    if pair.base is None or not (math.isfinite(pair.base) and math.isfinite(pair.tuned)):
        return ""
    ratio = math.exp(min(abs(pair.tuned - pair.base), 100.0))
    if ratio < _SMALL_RATIO:
        return ""
    return f"{ratio:,.1f} times as {'high' if pair.tuned > pair.base else 'low'}"


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

    def text(value: float | None) -> str:
        return "not measured" if value is None else nonfinite_text(value) or f"{value:{style}}"

    change = ""
    if base is not None and tuned is not None and math.isfinite(tuned - base):
        difference = f"{abs(tuned - base):{style}}"
        # A difference that rounds to 0 is not shown.
        change = f"{difference} {'higher' if tuned > base else 'lower'}" if difference.strip("0.") else ""
    return MetricRow(name, text(base), text(tuned), change, hint)


def _user_metric(name: str, metric: MetricResult) -> MetricRow:
    failed = f", failed on {count(metric.failed, 'answer')}" if metric.failed else ""
    hint = f"your metric, mean of {count(metric.questions, 'question')}{failed}"
    return _mean(single_line(name), metric.base, metric.tuned, hint=hint, style=",.4g")


def _everyday(report: Report, pair: LossPair) -> MetricRow:
    limit = report.thresholds.get("max_forgetting")
    allowed = f" (limit: {percent(limit.value, 0)} worse)" if limit and isinstance(limit.value, float) else ""
    row = _loss(_EVERYDAY, pair, hint=f"text that the base model knew{allowed}")
    return replace(row, change=row.change.replace("lower", "better").replace("higher", "worse"))


def right_name(report: Report) -> str:
    """Return what is counted: `Labels right`."""
    name = report.task.value if report.task is not None else "facts"
    noun = SCORERS.entry(name).noun if name in SCORERS.names() else "answers"
    return f"{sentence_case(noun)} right"


def sentence_case(text: str) -> str:
    """Return a text with an upper-case first letter."""
    return text[:1].upper() + text[1:]


def _right(report: Report) -> list[MetricRow]:
    """Return the row of the right answers, if answers can be right or wrong in the task of the rows."""
    base, tuned = report.base_tally, report.tuned_tally
    if tuned is None or not tuned.judged:
        return []
    shares = (base.right / base.judged if base and base.judged else None, tuned.right / tuned.judged)
    hint = ""
    if tuned.right_interval is not None:
        low, high = tuned.right_interval
        hint = f"tuned model, 95% interval: {percent(low, 0)} to {percent(high, 0)}"
    return [replace(_counted(right_name(report), base, tuned, "right"), hint=hint, shares=shares)]


def compared_rows(report: Report) -> list[MetricRow]:
    """Return what the right answers are compared with: the base with a hint, a constant answer, fewer questions."""
    if report.tuned_tally is None:
        return []
    rows = list[MetricRow]()
    if report.asked_tally is not None and report.hinted_tally is not None:
        name, used, other = "base asked with a list", "as asked", report.hinted_tally
        if report.is_base_hinted:
            name, used, other = "base asked as in the rows", "with a list of what to say", report.asked_tally
        rows.append(MetricRow(f"  {name}", _share(other), "", hint=f"the better of the two counts: {used}"))
    if report.constant is not None:
        text = shorten(single_line(report.constant.text), 32, mark=ELLIPSIS)
        rows.append(MetricRow("  one constant answer", "", _share(report.constant), hint=f'always "{text}"'))
    if report.without_near is not None and report.without_near.judged:
        hint = "questions that no training row asks alike"
        rows.append(MetricRow("  without near duplicates", "", _share(report.without_near), hint=hint))
    unclear = [bool(one.tuned.right) for one in report.exchanges if one.is_ambiguous and one.tuned.right is not None]
    if unclear:
        hint = "another row has the same question with another answer"
        rows.append(MetricRow("  ambiguous questions", "", _of(sum(unclear), len(unclear)), hint=hint))
    for name, pair in report.measures.items():
        base, tuned, expected = (_figure(value, pair) for value in (pair.base, pair.tuned, pair.expected))
        hint = f"in the expected replies: {expected}" if expected else ""
        rows.append(MetricRow(f"  {single_line(name)}", base, tuned, hint=hint))
    return [*rows, *_closer(list(report.measures.values()))]


def _figure(value: float | None, pair: MeasurePair) -> str:
    if value is None:
        return ""
    return percent(value, 0) if pair.is_share else f"{value:.2f}" if pair.expected is None else f"{value:g}"


def _closer(pairs: list[MeasurePair]) -> list[MetricRow]:
    """Return how many figures of the style each model is closer in, if there are such figures."""
    leads = [
        abs(one.base - one.expected) - abs(one.tuned - one.expected)
        for one in pairs
        if one.expected is not None and one.base is not None
    ]
    if not leads:
        return []
    base, tuned = sum(lead < 0 for lead in leads), sum(lead > 0 for lead in leads)
    hint = f"of {count(len(leads), 'figure')} above; {count(len(leads) - base - tuned)} alike"
    return [MetricRow("  closer to that style in", str(base), str(tuned), hint=hint)]


def forgotten_rows(report: Report) -> list[MetricRow]:
    """Return the measures of forgetting other than the loss on everyday text."""
    rows = []
    for found in report.forgotten:
        if found.name != "everyday text":
            hint = f"limit: {100 * found.limit:.3g} points fewer" + (", exceeded" if found.is_damaged else "")
            name = f"{single_line(found.name).capitalize()} followed"
            if found.name == "replies":
                name = "Everyday questions answered"
            rows.append(MetricRow(name, f"{found.base:.0%}", f"{found.tuned:.0%}", hint=hint))
    return rows


def field_rows(report: Report, *, most: int = 20) -> list[tuple[str, list[int]]]:
    """Return each field with its numbers of right, wrong, missing and extra values."""
    kinds = ("right", "wrong", "missing", "extra")
    shown = list(report.fields.items())[:most]
    return [(single_line(name), [marks.get(kind, 0) for kind in kinds]) for name, marks in shown]


def _answers(report: Report) -> list[MetricRow]:
    base, tuned = report.base_tally, report.tuned_tally
    if tuned is None or not tuned.asked:
        return []
    compared = [replace(row, name=sentence_case(row.name.strip())) for row in compared_rows(report)]
    rows = [*_right(report), *compared, _counted("Exact match with the reference", base, tuned, "exact")]
    hint = "0 to 1, word overlap with the reference"
    rows.append(_mean("Token F1, mean", base and base.f1, tuned.f1, hint=hint, style=".3f"))
    if tuned.refused or (base and base.refused):
        rows.append(_counted("Refusals", base, tuned, "refused"))
    faults = base.faults if base else {}
    for name in declared_order({*tuned.faults, *faults}, FAULT_WORDS):
        was, now = faults.get(name, 0), tuned.faults.get(name, 0)
        if was or now:
            label = f"Fault: {single_line(FAULT_WORDS.get(name, name.replace('_', ' ')))}"
            before = _of(was, base.asked) if base else "not measured"
            rows.append(MetricRow(label, before, _of(now, tuned.asked), hint="fewer is better"))
    return rows


def _counted(name: str, base: AnswerCounts | None, tuned: AnswerCounts, field: str) -> MetricRow:
    def numbers(counts: AnswerCounts) -> tuple[int, int]:
        return getattr(counts, field), counts.judged if field == "right" else counts.asked

    now, whole = numbers(tuned)
    if base is None:
        return MetricRow(name, "not measured", _of(now, whole))
    was, base_whole = numbers(base)
    difference = now - was if base_whole == whole else 0
    change = f"{count(abs(difference))} {'more' if difference > 0 else 'fewer'}" if difference else ""
    return MetricRow(name, _of(was, base_whole), _of(now, whole), change)


def _share(counts: AnswerCounts | ConstantAnswer) -> str:
    return _of(counts.right, counts.judged)


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
    num_wrong = min(len(wrong), max(num_selected // 2, num_selected - len(right)))
    num_right = num_selected - num_wrong
    selected = [*wrong[:num_wrong], *right[:num_right]]
    more_wrong = wrong[num_wrong:][:max_answers]
    more_right = right[num_right:][: max_answers - len(more_wrong)]
    left_out = len(ranked) - len(selected) - len(more_wrong) - len(more_right)
    return SortedAnswers(selected, more_wrong, more_right, left_out)


def judge_sentences(report: Report) -> list[str]:
    """Return how the answers were judged: the task with its reason, examples, and the difference between the models."""
    judge, found = report.judge, list[str]()
    if report.task is not None:
        found.append(f"Task `{report.task.value}`: {report.task.because}.")
    if judge is None:
        return found
    if judge.origins:
        facts = f"{count(sum(judge.origins.values()), 'question')} on {count(judge.clusters, 'fact')}"
        examples = ", ".join(f'"{shorten(single_line(example.key), 60, mark=ELLIPSIS)}"' for example in judge.examples)
        found.append(f"Judged by {judge.describe()}, such as {examples}; {facts}.")
    if judge.difference is not None:
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
