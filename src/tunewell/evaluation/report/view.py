"""The figures of a report before and after training, and where the rows went, ready to be laid into a table."""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from tunewell.core.units import count, percent
from tunewell.records.report import AnswerCounts, AnsweredQuestion, LossPair, Report, RowCounts
from tunewell.runs.loss_curve import format_loss

# Texts of a report made fit to be shown: what cannot be seen is made visible, numbers are written for people.

NOTHING = "(nothing)"
FAULT_WORDS = {
    "empty": "says nothing",
    "ends_at_once": "ends at once",
    "loops": "loops",
    "echo": "echoes the question",
    "no_stop": "does not stop",
    "other_language": "other language",
    "control_tokens": "control tokens in the text",
}
_LONGEST = 20_000
"""Characters of one text on a page; a question can be a book, and a page is sent by mail."""

# The zero-width joiners (200C, 200D) belong to Persian, to Indic scripts and to emoji, so they stay as they are.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff"
    "\ufff0-\ufffb\ufffe\uffff\ufdd0-\ufdef\ud800-\udfff\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def visible(value: object) -> str:
    """Write a text so that every character of it is seen and can be encoded; at most 20,000 of them, the rest counted.

    visible("a\\x00b") = a[U+0000]b       visible("a\\u202eb") = a[U+202E]b       visible("\\ud800") = [U+D800]
    """
    text = str(value)
    shown = _UNSEEN.sub(lambda match: f"[U+{ord(match[0]):04X}]", text[:_LONGEST])
    left = len(text) - _LONGEST
    return shown if left <= 0 else f"{shown}\n[{count(left, 'more character')}]"


def single_line(value: object) -> str:
    """Write a text like `visible`, with its breaks and runs of white space as single spaces."""
    return " ".join(visible(value).split())


def shortened(text: str, longest: int) -> str:
    """Cut a text that is longer than `longest` characters, and show that it was cut."""
    return text if len(text) <= longest else text[: longest - 1].rstrip() + "\u2026"


def loss(value: float | None) -> str:
    """Format a loss with four decimals; a value that is not finite, or missing, in words."""
    return "not measured" if value is None else format_loss(value)


def perplexity(value: float | None) -> str:
    """Write the perplexity that a loss comes to: e to its power."""
    if value is None or not math.isfinite(value):
        return loss(value)
    power = math.exp(value) if value < 700 else math.inf
    if power < 100:
        return f"{power:.2f}"
    return f"{power:,.0f}" if power < 1e6 else f"{power:.1e}" if power < math.inf else "over 1e304"


def nonfinite_text(value: float) -> str:
    """Return the words for a number that is not finite; an empty text for a finite one."""
    return "" if math.isfinite(value) else format_loss(value)


def setting(value: Any) -> str:
    """Write the value of a setting, whatever it is."""
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
    """Order keys as they are declared, and those that are not by name, so that equal reports give equal pages."""
    places = {name: place for place, name in enumerate(known)}
    return sorted(keys, key=lambda key: (places.get(key, len(places)), key))


@dataclass(frozen=True, kw_only=True)
class MetricRow:
    """One thing that was measured, before and after, in words."""

    name: str
    hint: str = ""
    base: str
    tuned: str
    change: str = ""
    shares: tuple[float | None, float] | None = None
    """Base and tuned as shares of one, where the figure is one."""


@dataclass(frozen=True, kw_only=True)
class RowCountLine:
    """One term of the sum that must close."""

    name: str
    rows: int
    is_dropped: bool = False


def key_metrics(report: Report) -> list[MetricRow]:
    """List the two or three figures that say most."""
    figures = []
    if report.tuned_tally and report.tuned_tally.asked:
        figures.append(_right(report.base_tally, report.tuned_tally))
    if report.held_out:
        figures.append(_loss("Held-out loss", report.held_out, hint="rows it was not trained on; lower is better"))
    if report.everyday:
        figures.append(_loss("Loss on everyday text", report.everyday, hint="what it knew before; should stay"))
    return figures


def all_metrics(report: Report) -> list[MetricRow]:
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


def source_metrics(report: Report) -> list[tuple[LossPair, MetricRow]]:
    """List the held-out losses of every source."""
    return [(pair, _loss(single_line(pair.name), pair)) for pair in report.by_source]


def row_count_lines(ledger: RowCounts) -> list[RowCountLine]:
    """List what the rows became, the dropped ones by reason, most first."""
    dropped = sorted(ledger.dropped.items(), key=lambda item: (-item[1], item[0]))
    return [
        RowCountLine(name="documents to train on", rows=ledger.documents),
        RowCountLine(name="held out", rows=ledger.held_out),
        *(RowCountLine(name=single_line(name).replace("_", " "), rows=rows, is_dropped=True) for name, rows in dropped),
    ]


def is_balanced(ledger: RowCounts) -> bool:
    """Say whether every row is accounted for."""
    return ledger.rows == sum(line.rows for line in row_count_lines(ledger))


def source_lines(ledger: RowCounts) -> list[dict[str, str]]:
    """List the sources as texts; `unknown` where a source does not say."""
    return [{name: _source_value(source, name) for name in _SOURCE_COLUMNS} for source in ledger.sources]


_SOURCE_COLUMNS = ("name", "formats", "rows", "documents", "held_out", "dropped", "sha256")


def _source_value(source: dict[str, Any], name: str) -> str:
    value = source.get(name)
    if name == "formats" and isinstance(value, dict):
        return ", ".join(single_line(key) for key in sorted(value)) or "none"
    if name == "dropped" and isinstance(value, dict):
        value = sum(part for part in value.values() if isinstance(part, int))
    if value is None:
        return "unknown"
    return count(value) if isinstance(value, int) else single_line(value)


def _loss(name: str, pair: LossPair, hint: str = "") -> MetricRow:
    return MetricRow(name=name, hint=hint, base=loss(pair.base), tuned=loss(pair.tuned), change=_moved(pair))


def _perplexity(name: str, pair: LossPair) -> MetricRow:
    return MetricRow(name=name, hint="lower is better", base=perplexity(pair.base), tuned=perplexity(pair.tuned))


def _moved(pair: LossPair) -> str:
    if pair.base is None or nonfinite_text(pair.base) or nonfinite_text(pair.tuned) or pair.base <= 0:
        return ""
    share = pair.tuned / pair.base - 1
    if abs(share) < 0.0005:
        return "the same"
    if share > 10:
        return f"{count(round(share + 1))} times as high" if share < 1e6 else "far higher"
    return f"{percent(abs(share))} {'lower' if share < 0 else 'higher'}"


def _right(base: AnswerCounts | None, tuned: AnswerCounts) -> MetricRow:
    figure = _counted("Right answers", base, tuned, "right")
    shares = (base.right / base.judged if base and base.judged else None, tuned.right / max(1, tuned.judged))
    return MetricRow(**{**vars(figure), "hint": "of the questions with a short reference", "shares": shares})


def _answers(base: AnswerCounts | None, tuned: AnswerCounts) -> list[MetricRow]:
    figures = [
        _right(base, tuned),
        _counted("Word for word the reference", base, tuned, "exact"),
        _counted("Contain the reference", base, tuned, "contains"),
        MetricRow(
            name="Token F1, mean",
            hint="0 to 1, words in common with the reference",
            base=_f1(base),
            tuned=_f1(tuned),
            change=_f1_moved(base, tuned),
        ),
    ]
    for name in declared_order({*tuned.faults, *(base.faults if base else ())}, FAULT_WORDS):
        was, now = (base.faults.get(name, 0) if base else 0), tuned.faults.get(name, 0)
        if was or now:
            words = single_line(FAULT_WORDS.get(name, name.replace("_", " ")))
            shown = _of(was, base.asked) if base else "not measured"
            figures.append(
                MetricRow(name=f"Fault: {words}", hint="none is best", base=shown, tuned=_of(now, tuned.asked))
            )
    return figures


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


def _f1(tally: AnswerCounts | None) -> str:
    return "not measured" if tally is None else nonfinite_text(tally.f1) or f"{tally.f1:.3f}"


def _f1_moved(base: AnswerCounts | None, tuned: AnswerCounts) -> str:
    if base is None or nonfinite_text(base.f1) or nonfinite_text(tuned.f1):
        return ""
    difference = tuned.f1 - base.f1
    return f"{abs(difference):.3f} {'higher' if difference > 0 else 'lower'}" if abs(difference) >= 0.0005 else ""


# The answers of a report in the order a reader wants them: a few that tell most, the wrong, the right.

_TELLING = 6
_MOST = 500
"""Exchanges on a page; all of them are in `report.json`."""


@dataclass(frozen=True)
class SortedAnswers:
    """Every exchange of a report in one of three lists."""

    telling: list[AnsweredQuestion]
    wrong: list[AnsweredQuestion]
    right: list[AnsweredQuestion]
    left_out: int


def sorted_answers(report: Report, *, telling: int = _TELLING, most: int = _MOST) -> SortedAnswers:
    """Sort the exchanges: half of the telling ones wrong, half right, and more of one where the other lacks."""
    ranked = sorted(report.exchanges, key=_rank)
    wrong = [exchange for exchange in ranked if _is_wrong(exchange)]
    right = [exchange for exchange in ranked if not _is_wrong(exchange)]
    num_wrong = max(min(len(wrong), telling // 2), min(len(wrong), telling - len(right)))
    num_right = min(len(right), telling - num_wrong)
    more_wrong = wrong[num_wrong:][:most]
    more_right = right[num_right:][: most - len(more_wrong)]
    return SortedAnswers(
        telling=[*wrong[:num_wrong], *right[:num_right]],
        wrong=more_wrong,
        right=more_right,
        left_out=len(ranked) - num_wrong - num_right - len(more_wrong) - len(more_right),
    )


def _is_wrong(exchange: AnsweredQuestion) -> bool:
    return exchange.tuned.right is False or bool(exchange.tuned.faults)


def _rank(exchange: AnsweredQuestion) -> tuple[bool, bool, bool, int]:
    """Put faults first, then what the base knew and the tuned model does not, then what it learned."""
    was_right = exchange.base is not None and bool(exchange.base.right)
    has_changed = was_right != bool(exchange.tuned.right)
    return (not exchange.tuned.faults, exchange.tuned.right is not False, not has_changed, exchange.document)
