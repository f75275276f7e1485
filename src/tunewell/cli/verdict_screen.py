"""A verdict in words: the figures before and after, every reason with its example, and what to do next."""

import math
from typing import TYPE_CHECKING

from tunewell.cli.render import fold, table, width
from tunewell.cli.training_words import one_line
from tunewell.core.units import count, duration

if TYPE_CHECKING:
    from tunewell.evaluation.comparing import Comparison
    from tunewell.records.report import LossPair, Report, Said, Tally

_SHOWN_EXCHANGES = 3


def verdict_screen(report: "Report", *, has_examples: bool = True) -> str:
    """Tell a report on one screen."""
    parts = [_head(report), "", _figures(report)]
    if has_examples and (examples := _exchanges(report)):
        parts += ["", examples]
    parts += ["", verdict_lines(report)]
    parts += [f"note: {one_line(note)}" for note in report.notes]
    return "\n".join(parts)


def verdict_lines(report: "Report") -> str:
    """Say the verdict, and what speaks against the model."""
    lines = [_hanging(f"{report.verdict}  ", report.summary)]
    for reason in report.reasons:
        lines.append(_hanging(f"  {reason.level}  ", f"{reason.code}: {reason.what}"))
        if reason.example:
            lines.append(_hanging("        for example: ", one_line(reason.example)))
        lines.append(_hanging("        do: ", reason.next))
    return "\n".join(lines)


def comparison_screen(comparison: "Comparison", notes: list[str]) -> str:
    """Tell what differs between two runs."""
    rows = [["", comparison.other, comparison.this], ["verdict", *comparison.verdicts]]
    for figure in comparison.figures:
        is_share = figure.name in ("right", "faulty answers")
        rows.append([figure.name, *(_number(value, is_share) for value in (figure.other, figure.this))])
    parts = [table(rows, right=(1, 2))]
    if comparison.num_both:
        asked = count(comparison.num_both, "question")
        parts.append(
            f"of {asked} that both were asked, {comparison.became_right} became right, "
            f"{comparison.became_wrong} became wrong"
        )
    for change in comparison.changed[:_SHOWN_EXCHANGES]:
        parts.append(f"\n{one_line(change.question)}")
        parts.append(table([["  should be", one_line(change.reference)]]))
        marks = [_mark(change.other_right), _mark(change.this_right)]
        sayings = [[f"  {comparison.other}", marks[0], one_line(change.other) or "(nothing)"]]
        sayings.append([f"  {comparison.this}", marks[1], one_line(change.this) or "(nothing)"])
        parts.append(table(sayings))
    for title, found in (("settings", comparison.config), ("data", comparison.data)):
        parts.append(f"\n{title}: " + ("nothing differs" if not found else ""))
        parts.append(table([[f"  {one.name}", one.other, "->", one.this] for one in found]))
    return "\n".join([*parts, *(f"note: {note}" for note in notes)]).replace("\n\n\n", "\n\n")


def _head(report: "Report") -> str:
    subject = report.subject
    rows = [["judged", subject.name, subject.because]]
    if subject.base:
        rows.append(["against", subject.base, "the model it was made from"])
    took = ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in report.seconds.items())
    rows.append(["on", report.data, f"in {duration(sum(report.seconds.values()))}: {took}" if took else ""])
    return table(rows)


def _figures(report: "Report") -> str:
    has_base = report.subject.base is not None
    rows = [["", "base", "tuned", ""] if has_base else ["", "model", ""]]

    def add(name: str, base: str, tuned: str, words: str = "") -> None:
        rows.append([name, base, tuned, words] if has_base else [name, tuned, words])

    for pair in (report.held_out, *report.by_source):
        if pair is not None:
            add(f"loss, {pair.name}", _loss(pair.base), _loss(pair.tuned), _perplexity(pair))
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
    return table(rows, right=(1, 2) if has_base else (1,))


def _of(exchange: object, who: str) -> "Said | None":
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
            rows.append(["  base", _mark(exchange.base.right), exchange.base.text or "(nothing)"])
        rows.append(["  tuned", _mark(exchange.tuned.right), exchange.tuned.text or "(nothing)"])
        room = max(width() - 24, 30)
        rows = [[label, mark, _short(text, room)] for label, mark, text in rows]
        blocks.append(f"{_short(exchange.question, width() - 2)}\n{table(rows)}")
    return "\n".join(blocks)


def _short(text: str, room: int) -> str:
    words = one_line(text)
    return words if len(words) <= room else words[: room - 3] + "..."


def _hanging(front: str, text: str) -> str:
    """Fold a sentence, further lines under its beginning."""
    folded = fold(one_line(text), indent=" " * len(front))
    return front + folded[len(front) :]


def _mark(is_right: bool | None) -> str:
    return "" if is_right is None else "right" if is_right else "wrong"


def _right(tally: "Tally | None") -> str:
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
