"""A verdict in words: the figures before and after, every reason with its example, and what to do next."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tunewell.cli.render import cell_width, fitting, folded_table, hanging, one_line, table, width
from tunewell.core.units import count, duration

if TYPE_CHECKING:
    from tunewell.evaluation.compare import Comparison
    from tunewell.records.report import Answer, AnswerCounts, LossPair, Report

_SHOWN_EXCHANGES = 3
_SHOWN_SOURCES = 8
_LONGEST_NAME = 28
_FIGURES = 58
"""Columns that two figures take with their words."""
_LEAST_ROOM = 20


def verdict_screen(report: "Report", *, has_examples: bool = True) -> str:
    """Tell a report on one screen."""
    parts = [_head(report), "", _figures(report)]
    if has_examples and (examples := _exchanges(report)):
        parts += ["", examples]
    parts += ["", verdict_lines(report)]
    parts += [hanging("note: ", note) for note in report.notes]
    return "\n".join(parts)


def verdict_lines(report: "Report") -> str:
    """Say the verdict, and what speaks against the model."""
    lines = [hanging(f"{report.verdict}  ", report.summary)]
    for reason in report.reasons:
        lines.append(hanging(f"  {reason.level}  ", f"{reason.code}: {reason.what}"))
        if reason.example:
            lines.append(hanging("        for example: ", one_line(reason.example)))
        lines.append(hanging("        do: ", reason.next))
    return "\n".join(lines)


def comparison_screen(comparison: "Comparison", notes: list[str]) -> str:
    """Tell what differs between two runs."""
    names = [_short(name, _LONGEST_NAME) for name in (comparison.other, comparison.this)]
    rows = [["", *names], ["verdict", *comparison.verdicts]]
    for figure in comparison.figures:
        is_share = figure.name in ("right", "faulty answers")
        rows.append([figure.name, *(_number(value, is_share) for value in (figure.other, figure.this))])
    parts = [table(rows, right=(1, 2))]
    if comparison.num_both:
        asked = count(comparison.num_both, "question")
        told = f"{comparison.became_right} became right, {comparison.became_wrong} became wrong"
        parts.append(hanging("", f"of {asked} that both were asked, {told}"))
    for change in comparison.changed[:_SHOWN_EXCHANGES]:
        rows = [["  should be", "", change.reference]]
        rows.append([f"  {names[0]}", _mark(change.other_right), change.other or "(nothing)"])
        rows.append([f"  {names[1]}", _mark(change.this_right), change.this or "(nothing)"])
        parts += ["", _short(change.question, width()), _cut_table(rows)]
    for title, found in (("settings", comparison.config), ("data", comparison.data)):
        parts += ["", f"{title}: nothing differs" if not found else f"{title}:"]
        if found:
            rows = [[f"  {one.name}", f"{one.other} -> {one.this}"] for one in found]
            parts.append(folded_table(rows))
    return "\n".join([*parts, *(hanging("note: ", note) for note in notes)])


def _head(report: "Report") -> str:
    subject = report.subject
    rows = [["judged", subject.name, subject.because]]
    if subject.base:
        rows.append(["against", subject.base, "the model it was made from"])
    took = ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in report.seconds.items())
    rows.append(["on", report.data, f"in {duration(sum(report.seconds.values()))}: {took}" if took else ""])
    return lined(rows)


def _figures(report: "Report") -> str:
    has_base = report.subject.base is not None
    rows = [["", "base", "tuned", ""] if has_base else ["", "model", ""]]

    def add(name: str, base: str, tuned: str, words: str = "") -> None:
        rows.append([name, base, tuned, words] if has_base else [name, tuned, words])

    for pair in (report.held_out, *report.by_source[:_SHOWN_SOURCES]):
        if pair is not None:
            name = f"loss, {_short(pair.name, max(10, min(_LONGEST_NAME, width() - _FIGURES)))}"
            add(name, _loss(pair.base), _loss(pair.tuned), _perplexity(pair))
    if more := report.by_source[_SHOWN_SOURCES:]:
        add(f"{count(len(more), 'more source')}", "", "", "in the report")
    if report.everyday is not None:
        add("loss, everyday text", _loss(report.everyday.base), _loss(report.everyday.tuned), _growth(report.everyday))
    base, tuned = report.base_tally, report.tuned_tally
    if tuned is not None and tuned.judged:
        add("answered right", _right(base), _right(tuned), f"{tuned.exact} word for word")
    if tuned is not None:
        add("word overlap (F1)", "-" if base is None else f"{base.f1:.2f}", f"{tuned.f1:.2f}")
        names = ", ".join(f"{name} {number}" for name, number in tuned.faults.items() if number)
        faulty = [sum(1 for e in report.exchanges if (s := _of(e, who)) and s.faults) for who in ("base", "tuned")]
        add("faulty answers", "-" if base is None else str(faulty[0]), str(faulty[1]), names)
    return folded_table(rows, right=(1, 2) if has_base else (1,))


def _of(exchange: object, who: str) -> "Answer | None":
    return getattr(exchange, who)


def _exchanges(report: "Report") -> str:
    """Show some exchanges: what went wrong first, else the first ones."""
    wrong = [exchange for exchange in report.exchanges if exchange.tuned.right is False or exchange.tuned.faults]
    right = [exchange for exchange in report.exchanges if exchange not in wrong]
    shown = [*wrong[:2], *right[: _SHOWN_EXCHANGES - min(2, len(wrong))]]
    blocks = []
    for exchange in shown:
        rows = [["  should be", "", exchange.reference]]
        if exchange.base is not None:
            rows.append(["  base", _mark(exchange.base.right, exchange.base.faults), exchange.base.text or "(nothing)"])
        rows.append(["  tuned", _mark(exchange.tuned.right, exchange.tuned.faults), exchange.tuned.text or "(nothing)"])
        blocks.append(f"{_short(exchange.question, width())}\n{_cut_table(rows)}")
    return "\n".join(blocks)


def lined(rows: Sequence[Sequence[str]]) -> str:
    """Align labels, each with a name and some words; words that do not fit beside the name go under it."""
    front = max(cell_width(row[0]) for row in rows) + 3
    names = max((cell_width(row[1]) for row in rows if cell_width(row[1]) <= _LONGEST_NAME + 4), default=0)
    lines = []
    for label, name, words in rows:
        lead = label + " " * (front - cell_width(label))
        beside = name + " " * (names - cell_width(name) + 3) + words
        if not words or front + cell_width(beside) <= width():
            lines.append((lead + beside).rstrip() if words else hanging(lead, name))
        else:
            lines += [hanging(lead, name), hanging(" " * front, words)]
    return "\n".join(lines)


def _short(text: str, room: int) -> str:
    words = one_line(text)
    return words if cell_width(words) <= room else fitting(words, room - 3) + "..."


def _cut_table(rows: Sequence[Sequence[str]]) -> str:
    """Align rows, and cut their last column where the screen ends."""
    lead = sum(max(cell_width(row[column]) for row in rows) + 3 for column in range(2))
    room = max(width() - lead, _LEAST_ROOM)
    return table([[*row[:-1], _short(row[-1], room)] for row in rows])


def _mark(is_right: bool | None, faults: Sequence[str] = ()) -> str:
    said = [] if is_right is None else ["right" if is_right else "wrong"]
    return ", ".join([*said, *(fault.replace("_", " ") for fault in faults[:1])])


def _right(tally: "AnswerCounts | None") -> str:
    return "-" if tally is None else f"{tally.right} of {tally.judged}"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _perplexity(pair: "LossPair") -> str:
    def of(value: float | None) -> str:
        return "-" if value is None or not math.isfinite(value) else f"{math.exp(min(value, 700)):.4g}"

    return (
        f"perplexity {of(pair.base)} -> {of(pair.tuned)}" if pair.base is not None else f"perplexity {of(pair.tuned)}"
    )


def _growth(pair: "LossPair") -> str:
    if pair.base is None or not pair.base > 0 or not math.isfinite(pair.tuned):
        return ""
    return f"{pair.tuned / pair.base - 1:+.0%}"


def _number(value: float | None, is_share: bool) -> str:
    return "-" if value is None else f"{value:.0%}" if is_share else f"{value:.4f}"
