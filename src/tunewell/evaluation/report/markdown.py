"""`report.md`: a report short enough for a comment on a pull request.

Whatever a model said is shown as text: it opens no table cell, calls nobody by name, links nowhere and closes nothing.
"""

import re

from tunewell.core.units import count
from tunewell.evaluation.report.view import (
    FAULT_WORDS,
    NOTHING,
    all_metrics,
    is_balanced,
    shortened,
    single_line,
    sorted_answers,
    source_metrics,
    visible,
)
from tunewell.records.report import Answer, AnsweredQuestion, Reason, Report

_LONGEST_CELL, _LONGEST_SENTENCE, _LONGEST_BLOCK = 160, 600, 800
_MOST_REASONS, _MOST_SOURCES, _MOST_COMMANDS, _MOST_NOTES = 6, 10, 20, 6
_TELLING, _MORE = 4, 6

# In a table a backslash before a bar is taken away before anything else is read, so none of the text's own may be left.
_ESCAPES = {**{mark: f"\\{mark}" for mark in "<>|`*_[]#~"}, **{mark: f"&#{ord(mark)};" for mark in "&\\$"}}
# Sites link names, issues and addresses in the text they have rendered, where no escape is left; only a character
# between its parts keeps `@name` from being a name. U+2060 has no width and breaks no line.
_LINKED = re.compile(r"(?<=[@#!~%$&^:])(?=[\w/])|(?<=www)(?=\.)|(?<=GH)(?=-\d)", re.IGNORECASE)
_STARTS_BLOCK = re.compile(r"^(\d{1,9}(?=[.)](?:\s|$))|(?=[-+]))(.)")


def report_markdown(report: Report) -> str:
    """Write a report as Markdown; equal reports give equal texts."""
    parts = [
        f"## {report.verdict}: {escaped(report.subject.name)}",
        prose(report.summary),
        f"Next: {prose(report.next)}" if report.next else "",
        *_figures(report),
        *[part for reason in report.reasons[:_MOST_REASONS] for part in _reason(reason)],
        *_and_more(len(report.reasons) - _MOST_REASONS, "reason"),
        *_answers(report),
        *_rows(report),
        *_healing(report),
        *_notes(report),
        *_repeat(report),
        f"<sub>{escaped(report.made_by)}, {escaped(report.made_at)}; everything is in `report.html`</sub>",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def escaped(value: object, longest: int = _LONGEST_CELL) -> str:
    """Write a text on one line so that Markdown, and the sites that show it, see nothing but text in it."""
    return _STARTS_BLOCK.sub(r"\1\\\2", _cell(value, longest))


def prose(value: str) -> str:
    """Write a sentence of ours, with what stands between backticks as code."""
    text = shortened(single_line(value), _LONGEST_SENTENCE)
    *pairs, last = text.split("`")
    if len(pairs) % 2:
        last = f"{pairs.pop()}`{last}"
    parts = [f"`{part}`" if place % 2 and part.strip() else _plain(part) for place, part in enumerate(pairs)]
    written = "".join((*parts, _plain(last)))
    is_long = len(written) > 2 * _LONGEST_SENTENCE
    return escaped(text, _LONGEST_SENTENCE) if is_long else _STARTS_BLOCK.sub(r"\1\\\2", written)


def _cell(value: object, longest: int = _LONGEST_CELL) -> str:
    return _plain(shortened(single_line(value), longest), room=2 * longest)


def _plain(text: str, room: int | None = None) -> str:
    """Escape a text; cut it where its escapes would take more than `room` characters."""
    written = [_ESCAPES.get(mark, mark) for mark in _LINKED.sub("\u2060", text)]
    if room is None or sum(map(len, written)) <= room:
        return "".join(written)
    while sum(map(len, written)) >= room:
        written = written[: len(written) * 9 // 10]
    return "".join(written) + "\u2026"


def fenced(value: str) -> str:
    """Write a text as a block of code that it cannot close."""
    text = shortened(visible(value), _LONGEST_BLOCK)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(longest + 1, 3)
    return f"{fence}text\n{text}\n{fence}"


def _figures(report: Report) -> list[str]:
    figures = all_metrics(report)
    sources = source_metrics(report)
    rows = [(figure.name, figure.base, figure.tuned, figure.change) for figure in figures]
    if len(sources) > 1:
        shown = [figure for _, figure in sources[:_MOST_SOURCES]]
        rows += [(f"Held-out loss of {each.name}", each.base, each.tuned, each.change) for each in shown]
    if not rows:
        return []
    return [_table(("", "base", "tuned", "change"), rows, right=3), *_and_more(len(sources) - _MOST_SOURCES, "source")]


def _reason(reason: Reason) -> list[str]:
    example = fenced(reason.example) if reason.example and reason.example.strip() else ""
    return [f"**{reason.level}** {prose(reason.what)}", example, f"Do next: {prose(reason.next)}"]


def _answers(report: Report) -> list[str]:
    answers = sorted_answers(report, telling=_TELLING, most=_MORE)
    if not answers.telling:
        return []
    more = [*answers.wrong, *answers.right]
    parts = [f"### Answers to {count(len(report.exchanges), 'held-out question')}", _exchanges(answers.telling)]
    if more:
        parts += [f"<details><summary>{count(len(more), 'more answer')}</summary>", _exchanges(more), "</details>"]
    return [*parts, *_and_more(answers.left_out, "answer")]


def _exchanges(exchanges: list[AnsweredQuestion]) -> str:
    has_base = any(exchange.base for exchange in exchanges)
    head = ("question", "should say", *(("base said",) if has_base else ()), "tuned said")
    rows = [
        (
            exchange.question,
            exchange.reference,
            *((_answer(exchange.base),) if has_base else ()),
            _answer(exchange.tuned),
        )
        for exchange in exchanges
    ]
    return _table(head, rows)


def _answer(said: Answer | None) -> str:
    if said is None:
        return "not asked"
    faults = ", ".join(FAULT_WORDS[fault] for fault in said.faults)
    mark = f"F1 {said.f1:.2f}" if said.right is None else "right" if said.right else "wrong"
    return f"{mark}{f' ({faults})' if faults else ''}: {said.text.strip() or NOTHING}"


def _rows(report: Report) -> list[str]:
    ledger = report.ledger
    if ledger is None:
        return []
    dropped = sum(ledger.dropped.values())
    end = "" if is_balanced(ledger) else " **The sum does not close.**"
    return [
        f"Data: {count(ledger.rows, 'row')} = {count(ledger.documents, 'document')} + {count(ledger.held_out)} held out"
        f" + {count(dropped)} dropped.{end}"
    ]


def _healing(report: Report) -> list[str]:
    lines = [f"- {prose(line)}" for line in (*report.healing, *(f"next time: {line}" for line in report.advice))]
    return ["Healed while it was trained:", "\n".join(lines)] if lines else []


def _notes(report: Report) -> list[str]:
    notes = [f"- {prose(note)}" for note in report.notes[:_MOST_NOTES]]
    return ["\n".join(notes), *_and_more(len(report.notes) - _MOST_NOTES, "note")]


def _repeat(report: Report) -> list[str]:
    if not report.repeat:
        return []
    commands = "\n".join(visible(command) for command in report.repeat[:_MOST_COMMANDS])
    return [f"<details><summary>How to repeat it</summary>\n\n{fenced(commands)}\n\n</details>"]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]], right: int = 0) -> str:
    """Lay texts into a table; the last `right` columns are numbers."""
    lines = [" | ".join(head), " | ".join([*["---"] * (len(head) - right), *["---:"] * right])]
    lines += [" | ".join(_cell(cell) for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _and_more(number: int, noun: str) -> list[str]:
    return [f"And {count(number, f'more {noun}')} in `report.html`."] if number > 0 else []
