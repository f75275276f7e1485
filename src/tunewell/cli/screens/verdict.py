"""The screen of `validate`: metrics of the base and the tuned model, example answers, and the verdict."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tunewell.cli.render import cell_width, folded_table, hanging, one_line, shortened, width
from tunewell.core.units import count, duration, percent

if TYPE_CHECKING:
    from tunewell.records.report import Answer, AnswerCounts, JudgeRecord, LossPair, Report

_MAX_EXAMPLES = 3
_MAX_SOURCES = 8
_MAX_NAME = 28
_NUMBERS = 58
"""Width of two numbers with their remarks."""
_MIN_NAME = 13
_ONE_LINE = 60
"""Columns from which an example's answer is one line; in fewer columns, it may take two."""
_MIN_COLUMNS = 20


def verdict_screen(report: "Report") -> str:
    """Return a report as one screen."""
    from tunewell.evaluation.report.view import field_rows

    parts = [_head(report), "", _metrics(report)]
    if examples := _examples(report):
        parts += ["", examples]
    if report.judge is not None and report.judge.origins:
        parts += ["", _judge_lines(report.judge)]
    elif report.judge is not None and report.judge.difference is not None:
        parts += ["", hanging("", report.judge.difference.result)]
    if confused := report.confusions[:_MAX_EXAMPLES]:
        rows = [[f"  {one.expected}", f"-> {one.said}", str(one.number)] for one in confused]
        parts += ["", "most confused:", folded_table(rows, right=(2,))]
    if report.fields:
        rows = [["field", "right", "wrong", "missing", "extra"]]
        rows += [[name, *map(str, numbers)] for name, numbers in field_rows(report, most=_MAX_SOURCES)]
        parts += ["", folded_table(rows, right=(1, 2, 3, 4))]
    if changed := [one for one in report.ordinary if one.base_right and not one.tuned_right][:1]:
        rows = [["  base", "", changed[0].base or "(empty)"], ["  tuned", "", changed[0].tuned or "(empty)"]]
        parts += ["", f"forgotten: {_question(changed[0].question)}\n{_cut_table(rows)}"]
    parts += ["", verdict_lines(report)]
    parts += [hanging("note: ", note) for note in report.notes]
    return "\n".join(parts)


def verdict_lines(report: "Report") -> str:
    """Return the verdict with its reasons."""
    lines = [hanging(f"{report.verdict}  ", report.summary)]
    if report.changed_rules:
        lines.append(hanging("  rules changed: ", ", ".join(report.changed_rules)))
    for reason in report.reasons:
        lines.append(hanging(f"  {reason.level}  ", f"{reason.code}: {reason.what}"))
        if reason.example:
            lines.append(hanging("        for example: ", one_line(reason.example)))
        lines.append(hanging("        do: ", reason.next))
    return "\n".join(lines)


def _judge_lines(judge: "JudgeRecord") -> str:
    """Return how answers were judged: the origins of the keys, examples, and the difference between the models."""
    facts = count(judge.clusters, "fact")
    lines = [hanging("judged by  ", f"{judge.describe()}; {count(sum(judge.origins.values()), 'question')} on {facts}")]
    for example in judge.examples:
        question = shortened(example.question, max(_MIN_COLUMNS, width() - cell_width(example.key) - 21))
        lines.append(hanging(" " * 11, f'"{one_line(example.key)}" for "{question}"'))
    if judge.difference is not None:
        lines.append(hanging(" " * 11, judge.difference.result))
    return "\n".join(lines)


def _head(report: "Report") -> str:
    model = report.subject
    rows = [["tested", model.name, model.because]]
    if model.base:
        reused = f", measured before ({report.base_measured_at[:10]})" if report.base_measured_at else ""
        rows.append(["against", model.base, f"{model.base_role}{reused}"])
    if report.task is not None:
        rows.append(["task", report.task.value, report.task.because])
    took = ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in report.seconds.items())
    rows.append(["on", report.data, f"took {duration(sum(report.seconds.values()))}: {took}" if took else ""])
    return lined(rows)


def _metrics(report: "Report") -> str:
    from tunewell.evaluation.report.view import compared_rows, forgotten_rows, right_name

    has_base = report.subject.base is not None
    rows = [["", "base", "tuned", ""] if has_base else ["", "model", ""]]

    def add(name: str, base: str, tuned: str, remark: str = "") -> None:
        rows.append([name, base, tuned, remark] if has_base else [name, tuned, remark])

    for pair in (report.held_out, *report.by_source[:_MAX_SOURCES]):
        if pair is not None:
            name = f"loss, {shortened(pair.name, max(_MIN_NAME, min(_MAX_NAME, width() - _NUMBERS)))}"
            add(name, _number(pair.base), _number(pair.tuned), _perplexity(pair))
    if more := report.by_source[_MAX_SOURCES:]:
        add(f"{count(len(more), 'more source')}", "", "", "in the report")
    if (everyday := report.everyday) is not None:
        add("loss, everyday text", _number(everyday.base), _number(everyday.tuned), _growth(everyday))
    base, tuned = report.base_tally, report.tuned_tally
    if tuned is not None and tuned.judged:
        add(right_name(report).lower(), _right(base), _right(tuned), count(tuned.exact, "exact match", "exact matches"))
        if tuned.right_interval is not None:
            add("  95% interval", _interval(base), _interval(tuned))
    for row in compared_rows(report):
        add(row.name, row.base or "-", row.tuned or "-", row.hint)
    for row in forgotten_rows(report):
        add(row.name.lower(), row.base, row.tuned, row.hint)
    if tuned is not None and (tuned.refused or (base and base.refused)):
        add("refused", "-" if base is None else str(base.refused), str(tuned.refused), "said that they do not know")
    if tuned is not None:
        add("word overlap (F1)", "-" if base is None else f"{base.f1:.2f}", f"{tuned.f1:.2f}")
        names = ", ".join(f"{name} {number}" for name, number in tuned.faults.items() if number)
        faulty_base = sum(bool(question.base and question.base.faults) for question in report.exchanges)
        faulty_tuned = sum(bool(question.tuned.faults) for question in report.exchanges)
        add("faulty answers", "-" if base is None else str(faulty_base), str(faulty_tuned), names)
    for name, metric in sorted(report.metrics.items()):
        failed = f"failed on {count(metric.failed, 'answer')}" if metric.failed else "your metric"
        add(shortened(name, _MAX_NAME), _metric(metric.base), _metric(metric.tuned), failed)
    return folded_table(rows, right=(1, 2) if has_base else (1,))


def _examples(report: "Report") -> str:
    """Return some answers, with wrong and faulty ones first."""
    wrong = [exchange for exchange in report.exchanges if exchange.tuned.right is False or exchange.tuned.faults]
    right = [exchange for exchange in report.exchanges if exchange not in wrong]
    shown = [*wrong[:2], *right[: _MAX_EXAMPLES - min(2, len(wrong))]]
    blocks = []
    for exchange in shown:
        rows = [["  expected", "", exchange.reference]]
        if exchange.base is not None:
            rows.append(["  base", _mark_of(exchange.base), exchange.base.text or "(empty)"])
        rows.append(["  tuned", _mark_of(exchange.tuned), exchange.tuned.text or "(empty)"])
        blocks.append(f"{_question(exchange.question)}\n{_cut_table(rows)}")
    return "\n".join(blocks)


def lined(rows: Sequence[Sequence[str]]) -> str:
    """Align rows of label, name and remark. If one remark does not fit next to its name, all are placed below."""
    front = max(cell_width(row[0]) for row in rows) + 3
    names = max((cell_width(row[1]) for row in rows if cell_width(row[1]) <= _MAX_NAME + 4), default=0)
    leads = [label + " " * (front - cell_width(label)) for label, _, _ in rows]
    beside = [name + " " * max(names - cell_width(name) + 3, 3) + remark for _, name, remark in rows]
    if all(front + cell_width(text.rstrip()) <= width() for text in beside):
        return "\n".join((lead + text).rstrip() for lead, text in zip(leads, beside, strict=True))
    below = [f"\n{hanging(' ' * front, remark)}" if remark else "" for _, _, remark in rows]
    return "\n".join(hanging(lead, row[1]) + text for lead, row, text in zip(leads, rows, below, strict=True))


def _question(text: str) -> str:
    return hanging("", shortened(text, 2 * width() - 3))


def _cut_table(rows: Sequence[Sequence[str]]) -> str:
    """Align rows, and wrap their last column at the width of the screen. Long texts are truncated."""
    lead = sum(max(cell_width(row[column]) for row in rows) + 3 for column in range(2))
    columns = max(width() - lead, _MIN_COLUMNS)
    longest = columns if columns >= _ONE_LINE else 2 * columns - 3
    return folded_table([[*row[:-1], shortened(row[-1], longest)] for row in rows])


def _mark_of(answer: "Answer") -> str:
    from tunewell.evaluation.report.view import answer_mark

    return ", ".join(filter(None, [answer_mark(answer), *(fault.replace("_", " ") for fault in answer.faults[:1])]))


def _right(counts: "AnswerCounts | None") -> str:
    return "-" if counts is None else f"{counts.right} of {counts.judged}"


def _interval(counts: "AnswerCounts | None") -> str:
    if counts is None or counts.right_interval is None:
        return "-"
    low, high = counts.right_interval
    return f"{percent(low, 0)} to {percent(high, 0)}"


def _metric(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}"


def _perplexity(pair: "LossPair") -> str:
    def of(value: float | None) -> str:
        return "-" if value is None or not math.isfinite(value) else f"{math.exp(min(value, 700)):.4g}"

    return (
        f"perplexity {of(pair.base)} -> {of(pair.tuned)}" if pair.base is not None else f"perplexity {of(pair.tuned)}"
    )


def _growth(pair: "LossPair") -> str:
    if pair.base is None or not pair.base > 0 or not math.isfinite(pair.tuned):
        return ""
    from tunewell.evaluation.report.view import perplexity_change

    growth = f"{pair.tuned / pair.base - 1:+.0%}"
    change = perplexity_change(pair)
    return f"{growth}, perplexity {change}" if change else growth


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
