"""Write `report.md`: a short report for a comment on a pull request.

Model output is escaped, so it cannot open a table cell, mention a user, add a link or close a block.
"""

import re
from dataclasses import replace

from tunewell.core.html import CODE, EMPTY, single_line, visible
from tunewell.core.text import shorten
from tunewell.core.units import count, date
from tunewell.evaluation.report.view import (
    ELLIPSIS,
    FAULT_WORDS,
    all_metrics,
    answer_mark,
    judge_sentences,
    sorted_answers,
    source_metrics,
    title,
)
from tunewell.records.report import Answer, AnsweredQuestion, Reason, Report

_MAX_CELL, _MAX_SENTENCE, _MAX_BLOCK = 160, 600, 800
"""Maximum lengths in characters."""
_MAX_REASONS, _MAX_SOURCES, _MAX_COMMANDS, _MAX_NOTES = 6, 10, 20, 6
_NUM_SELECTED, _NUM_MORE = 4, 6

# In a table, a backslash before a bar is removed before anything else is parsed, so backslashes become entities.
_ESCAPES = {**{mark: f"\\{mark}" for mark in "<>|`*_[]#~"}, **{mark: f"&#{ord(mark)};" for mark in "&\\$"}}
# Sites link names, issues and addresses in the rendered text, which has no escapes any more. Only an inserted character
# prevents `@name` from being linked. U+2060 has no width and does not break lines.
_LINKED = re.compile(r"(?<=[@#!~%$&^:])(?=[\w/])|(?<=www)(?=\.)|(?<=GH)(?=-\d)", re.IGNORECASE)
_STARTS_BLOCK = re.compile(r"^(\d{1,9}(?=[.)](?:\s|$))|(?=[-+]))(.)")


def report_markdown(report: Report) -> str:
    """Return a report as Markdown; the output is deterministic."""
    parts = [
        f"## {report.verdict}: {escaped(report.subject.name)}, {escaped(title(report))}",
        prose(report.summary),
        f"Next: {prose(report.next)}" if report.next else "",
        *_metrics(report),
        *[part for reason in report.reasons[:_MAX_REASONS] for part in _reason(reason)],
        *_and_more(len(report.reasons) - _MAX_REASONS, "reason"),
        *_answers(report),
        *_rows(report),
        *_healing(report),
        *_notes(report),
        *_repeat(report),
        f"<sub>{escaped(report.made_by)}, {escaped(date(report.made_at))}; all details are in `report.html`</sub>",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def escaped(value: object, max_chars: int = _MAX_CELL) -> str:
    """Return a text on one line, escaped for Markdown and the sites that render it."""
    return _STARTS_BLOCK.sub(r"\1\\\2", _cell(value, max_chars))


def prose(value: str) -> str:
    """Return a sentence of the report as Markdown, with parts between backticks as code."""
    text = shorten(single_line(value), _MAX_SENTENCE, mark=ELLIPSIS)
    parts = enumerate(CODE.split(text))
    written = "".join(f"`{part}`" if index % 2 and part.strip() else _plain(part) for index, part in parts)
    is_long = len(written) > 2 * _MAX_SENTENCE
    return escaped(text, _MAX_SENTENCE) if is_long else _STARTS_BLOCK.sub(r"\1\\\2", written)


def _cell(value: object, max_chars: int = _MAX_CELL) -> str:
    return _plain(shorten(single_line(value), max_chars, mark=ELLIPSIS), limit=2 * max_chars)


def _plain(text: str, limit: int | None = None) -> str:
    """Escape a text, and truncate it to `limit` characters, counted with escapes."""
    written = [_ESCAPES.get(mark, mark) for mark in _LINKED.sub("\u2060", text)]
    if limit is None or sum(map(len, written)) <= limit:
        return "".join(written)
    while sum(map(len, written)) >= limit:
        written = written[: len(written) * 9 // 10]
    return "".join(written) + "\u2026"


def fenced(value: str) -> str:
    """Return a text as a code block that the text cannot close."""
    text = shorten(visible(value), _MAX_BLOCK, mark=ELLIPSIS)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(longest + 1, 3)
    return f"{fence}text\n{text}\n{fence}"


def _metrics(report: Report) -> list[str]:
    metrics, sources = all_metrics(report), source_metrics(report)
    if len(sources) > 1:
        shown = [metric for _, metric in sources[:_MAX_SOURCES]]
        metrics += [replace(each, name=f"Held-out loss of {each.name}") for each in shown]
    if not metrics:
        return []
    rows = [(metric.name, metric.base, metric.tuned, metric.change) for metric in metrics]
    return [_table(("", "base", "tuned", "change"), rows, right=3), *_and_more(len(sources) - _MAX_SOURCES, "source")]


def _reason(reason: Reason) -> list[str]:
    example = fenced(reason.example) if reason.example and reason.example.strip() else ""
    return [f"**{reason.level}** {prose(reason.what)}", example, f"What to do: {prose(reason.next)}"]


def _answers(report: Report) -> list[str]:
    answers = sorted_answers(report, num_selected=_NUM_SELECTED, max_answers=_NUM_MORE)
    if not answers.selected:
        return []
    more = [*answers.wrong, *answers.right]
    head = f"### Answers to {count(len(report.exchanges), 'held-out question')}"
    parts = [head, " ".join(map(prose, judge_sentences(report))), _answer_table(answers.selected)]
    if more:
        parts += [f"<details><summary>{count(len(more), 'more answer')}</summary>", _answer_table(more), "</details>"]
    return [*parts, *_and_more(answers.left_out, "answer")]


def _answer_table(questions: list[AnsweredQuestion]) -> str:
    models = ("base", "tuned") if any(each.base for each in questions) else ("tuned",)
    rows = [(each.question, each.reference, *(_answer(getattr(each, model)) for model in models)) for each in questions]
    return _table(("question", "expected", *models), rows)


def _answer(answer: Answer | None) -> str:
    if answer is None:
        return "not asked"
    faults = ", ".join(FAULT_WORDS[fault] for fault in answer.faults)
    mark = f"F1 {answer.f1:.2f}" if answer.right is None else answer_mark(answer)
    return f"{mark}{f' ({faults})' if faults else ''}: {answer.text.strip() or EMPTY}"


def _rows(report: Report) -> list[str]:
    counts = report.ledger
    if counts is None:
        return []
    dropped = sum(counts.dropped.values())
    end = "" if counts.rows == counts.total else " **Rows are missing.**"
    selected = f" + {count(counts.selected)} for choosing checkpoints" if counts.selected else ""
    used = f"{count(counts.documents)} used for training{selected} + {count(counts.held_out)} held out"
    return [f"Data: {count(counts.rows, 'row')} = {used} + {count(dropped)} dropped.{end}"]


def _healing(report: Report) -> list[str]:
    lines = [f"- {prose(line)}" for line in (*report.healing, *(f"next time: {line}" for line in report.advice))]
    return ["Problems during training:", "\n".join(lines)] if lines else []


def _notes(report: Report) -> list[str]:
    notes = [f"- {prose(note)}" for note in report.notes[:_MAX_NOTES]]
    return ["\n".join(notes), *_and_more(len(report.notes) - _MAX_NOTES, "note")]


def _repeat(report: Report) -> list[str]:
    if not report.repeat:
        return []
    commands = "\n".join(visible(command) for command in report.repeat[:_MAX_COMMANDS])
    return [f"<details><summary>How to repeat it</summary>\n\n{fenced(commands)}\n\n</details>"]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]], right: int = 0) -> str:
    """Return a Markdown table; the last `right` columns are right-aligned."""
    lines = [" | ".join(head), " | ".join([*["---"] * (len(head) - right), *["---:"] * right])]
    lines += [" | ".join(_cell(cell) for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _and_more(number: int, noun: str) -> list[str]:
    return [f"And {count(number, f'more {noun}')} in `report.html`."] if number > 0 else []
