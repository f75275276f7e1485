"""Write `report.md`: a short report for a comment on a pull request.

Model output is escaped, so it cannot open a table cell, mention a user, add a link or close a block.
"""

import re
from dataclasses import replace
from functools import lru_cache

from jinja2 import Template

from tunewell.core.html import CODE, EMPTY, page_environment, single_line, visible
from tunewell.core.text import shorten
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
from tunewell.records.report import Answer, AnsweredQuestion, Report

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
    sources = source_metrics(report)
    metrics = all_metrics(report)
    if len(sources) > 1:
        metrics += [replace(row, name=f"Held-out loss of {row.name}") for _, row in sources[:_MAX_SOURCES]]
    page = _template().render(
        report=report,
        title=title(report),
        metrics=[(row.name, row.base, row.tuned, row.change) for row in metrics],
        num_sources=len(sources),
        answers=sorted_answers(report, num_selected=_NUM_SELECTED, max_answers=_NUM_MORE),
        judged=judge_sentences(report),
        answer_table=_answer_table,
        max_sources=_MAX_SOURCES,
        max_reasons=_MAX_REASONS,
        max_notes=_MAX_NOTES,
        max_commands=_MAX_COMMANDS,
    )
    return page.rstrip() + "\n"


@lru_cache(maxsize=1)
def _template() -> Template:
    environment = page_environment("tunewell.evaluation.report")
    environment.filters |= {"escaped": escaped, "cell": _cell, "sentence": prose, "fenced": fenced}
    return environment.get_template("report.md")


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


def _answer_table(questions: list[AnsweredQuestion]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table of answers."""
    models = ["base", "tuned"] if any(each.base for each in questions) else ["tuned"]
    rows = [[each.question, each.reference, *(_answer(getattr(each, model)) for model in models)] for each in questions]
    return ["question", "expected", *models], rows


def _answer(answer: Answer | None) -> str:
    if answer is None:
        return "not asked"
    faults = ", ".join(FAULT_WORDS[fault] for fault in answer.faults)
    mark = f"F1 {answer.f1:.2f}" if answer.right is None else answer_mark(answer)
    return f"{mark}{f' ({faults})' if faults else ''}: {answer.text.strip() or EMPTY}"
