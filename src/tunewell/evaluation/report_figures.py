"""The figures of a report before and after training, and where the rows went, ready to be laid into a table."""

from dataclasses import dataclass
from typing import Any

from tunewell.core.units import count, percent
from tunewell.evaluation.report_text import FAULT_WORDS, in_order, loss, on_one_line, perplexity, unfinite
from tunewell.records.report import Ledger, LossPair, Report, Tally


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One thing that was measured, before and after, in words."""

    name: str
    hint: str = ""
    base: str
    tuned: str
    change: str = ""
    shares: tuple[float | None, float] | None = None
    """Base and tuned as shares of one, where the figure is one."""


@dataclass(frozen=True, kw_only=True)
class LedgerLine:
    """One term of the sum that must close."""

    name: str
    rows: int
    is_dropped: bool = False


def key_figures(report: Report) -> list[Figure]:
    """List the two or three figures that say most."""
    figures = []
    if report.tuned_tally and report.tuned_tally.asked:
        figures.append(_right(report.base_tally, report.tuned_tally))
    if report.held_out:
        figures.append(_loss("Held-out loss", report.held_out, hint="rows it was not trained on; lower is better"))
    if report.everyday:
        figures.append(_loss("Loss on everyday text", report.everyday, hint="what it knew before; should stay"))
    return figures


def all_figures(report: Report) -> list[Figure]:
    """List everything that was measured before and after."""
    figures = []
    if report.held_out:
        figures += [_loss("Held-out loss", report.held_out, hint="lower is better")]
        figures += [_perplexity("Held-out perplexity", report.held_out)]
    if report.tuned_tally and report.tuned_tally.asked:
        figures += _answers(report.base_tally, report.tuned_tally)
    if report.everyday:
        figures += [_loss("Everyday text, loss", report.everyday, hint="should stay about the same")]
        figures += [_perplexity("Everyday text, perplexity", report.everyday)]
    return figures


def source_figures(report: Report) -> list[tuple[LossPair, Figure]]:
    """List the held-out losses of every source."""
    return [(pair, _loss(on_one_line(pair.name), pair)) for pair in report.by_source]


def ledger_lines(ledger: Ledger) -> list[LedgerLine]:
    """List what the rows became, the dropped ones by reason, most first."""
    dropped = sorted(ledger.dropped.items(), key=lambda item: (-item[1], item[0]))
    return [
        LedgerLine(name="documents to train on", rows=ledger.documents),
        LedgerLine(name="held out", rows=ledger.held_out),
        *(LedgerLine(name=on_one_line(name).replace("_", " "), rows=rows, is_dropped=True) for name, rows in dropped),
    ]


def is_closed(ledger: Ledger) -> bool:
    """Say whether every row is accounted for."""
    return ledger.rows == sum(line.rows for line in ledger_lines(ledger))


def source_lines(ledger: Ledger) -> list[dict[str, str]]:
    """List the sources as texts; `unknown` where a source does not say."""
    return [{name: _source_value(source, name) for name in _SOURCE_COLUMNS} for source in ledger.sources]


_SOURCE_COLUMNS = ("name", "formats", "rows", "documents", "held_out", "dropped", "sha256")


def _source_value(source: dict[str, Any], name: str) -> str:
    value = source.get(name)
    if name == "formats" and isinstance(value, dict):
        return ", ".join(on_one_line(key) for key in sorted(value)) or "none"
    if name == "dropped" and isinstance(value, dict):
        value = sum(part for part in value.values() if isinstance(part, int))
    if value is None:
        return "unknown"
    return count(value) if isinstance(value, int) else on_one_line(value)


def _loss(name: str, pair: LossPair, hint: str = "") -> Figure:
    return Figure(name=name, hint=hint, base=loss(pair.base), tuned=loss(pair.tuned), change=_moved(pair))


def _perplexity(name: str, pair: LossPair) -> Figure:
    return Figure(name=name, hint="lower is better", base=perplexity(pair.base), tuned=perplexity(pair.tuned))


def _moved(pair: LossPair) -> str:
    if pair.base is None or unfinite(pair.base) or unfinite(pair.tuned) or pair.base <= 0:
        return ""
    share = pair.tuned / pair.base - 1
    if abs(share) < 0.0005:
        return "the same"
    if share > 10:
        return f"{count(round(share + 1))} times as high" if share < 1e6 else "far higher"
    return f"{percent(abs(share))} {'lower' if share < 0 else 'higher'}"


def _right(base: Tally | None, tuned: Tally) -> Figure:
    figure = _counted("Right answers", base, tuned, "right")
    shares = (base.right / base.judged if base and base.judged else None, tuned.right / max(1, tuned.judged))
    return Figure(**{**vars(figure), "hint": "of the questions with a short reference", "shares": shares})


def _answers(base: Tally | None, tuned: Tally) -> list[Figure]:
    figures = [
        _right(base, tuned),
        _counted("Word for word the reference", base, tuned, "exact"),
        _counted("Contain the reference", base, tuned, "contains"),
        Figure(
            name="Token F1, mean",
            hint="0 to 1, words in common with the reference",
            base=_f1(base),
            tuned=_f1(tuned),
            change=_f1_moved(base, tuned),
        ),
    ]
    for name in in_order({*tuned.faults, *(base.faults if base else ())}, FAULT_WORDS):
        was, now = (base.faults.get(name, 0) if base else 0), tuned.faults.get(name, 0)
        if was or now:
            words = on_one_line(FAULT_WORDS.get(name, name.replace("_", " ")))
            shown = _of(was, base.asked) if base else "not measured"
            figures.append(Figure(name=f"Fault: {words}", hint="none is best", base=shown, tuned=_of(now, tuned.asked)))
    return figures


def _counted(name: str, base: Tally | None, tuned: Tally, field: str) -> Figure:
    now, whole = getattr(tuned, field), tuned.judged if field == "right" else tuned.asked
    if base is None:
        return Figure(name=name, base="not measured", tuned=_of(now, whole))
    was, base_whole = getattr(base, field), base.judged if field == "right" else base.asked
    difference = now - was if base_whole == whole else 0
    change = f"{count(abs(difference))} {'more' if difference > 0 else 'fewer'}" if difference else ""
    return Figure(name=name, base=_of(was, base_whole), tuned=_of(now, whole), change=change)


def _of(part: int, whole: int) -> str:
    return f"{count(part)} of {count(whole)}"


def _f1(tally: Tally | None) -> str:
    return "not measured" if tally is None else unfinite(tally.f1) or f"{tally.f1:.3f}"


def _f1_moved(base: Tally | None, tuned: Tally) -> str:
    if base is None or unfinite(base.f1) or unfinite(tuned.f1):
        return ""
    difference = tuned.f1 - base.f1
    return f"{abs(difference):.3f} {'higher' if difference > 0 else 'lower'}" if abs(difference) >= 0.0005 else ""
