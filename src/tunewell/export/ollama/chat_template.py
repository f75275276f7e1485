"""The chat template that is saved with an export: the one of training, so that whoever renders it writes the same."""

import json
import keyword
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date as Day
from datetime import datetime, time
from typing import Any

from tunewell.core.errors import UserError
from tunewell.data.templates.chat_template import ChatTemplate, TemplateFailed
from tunewell.export.ollama.layout import Render
from tunewell.export.ollama.probes import QUESTIONS, saying

# The day that chat templates take for today's: one for the proof, another to see whether it shows in the text.

# No two share a day of the month, a month, a year or a day of the week: with five of them, one differs from any day
# in all four.
_OTHER_DAYS = (Day(2001, 2, 4), Day(2002, 3, 5), Day(2004, 5, 7), Day(2008, 6, 9), Day(2011, 7, 14))


def another_day(date: str) -> str:
    """Give a day that differs from this one in every number, and in the day of the week."""
    own = _numbers(Day.fromisoformat(date))
    return next(day for day in _OTHER_DAYS if not own & _numbers(day)).isoformat()


def _numbers(day: Day) -> set[tuple[str, int]]:
    return {("day", day.day), ("month", day.month), ("year", day.year), ("weekday", day.weekday())}


@contextmanager
def clock_at(date: str | None) -> Iterator[None]:
    """Let templates that transformers renders see midnight of a day, while this lasts; None leaves the clock alone.

    transformers takes nothing but plain data from those who call it, so its clock cannot be handed in.
    """
    if date is None:
        yield
        return
    from transformers.utils import chat_template_utils as module

    clock: Any = module
    before = clock.datetime
    clock.datetime = _Still(date)
    try:
        yield
    finally:
        clock.datetime = before


class _Still:
    """Stands in for `datetime` where nothing but `now` is asked of it."""

    def __init__(self, date: str) -> None:
        self._midnight = datetime.combine(Day.fromisoformat(date), time())

    def now(self) -> datetime:
        return self._midnight


# Whether a chat template begins the reply that it asks for.

_SAID = "an answer"


def missing_opening(render: Render) -> str:
    """Give what a template writes before a reply and does not write where one is asked for; empty where all is well.

        asked     <|im_start|>user\\nHello<|im_end|>\\n
        answered  <|im_start|>user\\nHello<|im_end|>\\n<|im_start|>assistant\\nan answer<|im_end|>\\n
                                                         ^^^^^^^^^^^^^^^^^^^^^^  missing

    A template may ignore `add_generation_prompt` all the same: in `[INST] Hello [/INST]` the question's end begins the
    reply. White space alone is left to models by many templates.
    """
    asked = saying(("user",), "user", "Hello")
    try:
        plain, prompt = render(asked, False), render(asked, True)
        whole = render([*asked, {"role": "assistant", "content": _SAID}], False)
    except TemplateFailed:
        return ""
    before, found, _ = whole.rpartition(_SAID)
    if plain != prompt or not found or before.rstrip() == prompt.rstrip():
        return ""
    return before.removeprefix(prompt)


_DECLARATION = re.compile(r"\A\s*\{#-?\s*markers:.*?(?:-#\}|#\}\n?)", re.DOTALL)
_SHOWN_CHARS = 60


@dataclass(frozen=True)
class SavedTemplate:
    """A template as it goes into files."""

    source: str
    date: str | None
    """The day that training saw where the template asks for today's; None where it does not ask."""
    notes: tuple[str, ...]
    """What whoever renders it should know."""


def saved_template(
    template: ChatTemplate, *, arguments: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> SavedTemplate:
    """Give the template with its arguments inside; its clock goes on, as everybody expects of it."""
    read = {name: value for name, value in arguments.items() if name in template.variables and _is_name(name)}
    source, notes = bake(template.source, read), []
    if read:
        notes.append(
            f"the template has the arguments of training inside ({_shown(read)}); what others hand to it for these "
            "has no effect"
        )
    if missing := missing_opening(lambda messages, asks: template.render(messages, add_generation_prompt=asks)):
        notes.append(
            f"where a reply is asked for the template does not write {missing[-_SHOWN_CHARS:]!r}, which stood before "
            "every reply in training"
        )
    if template.uses_clock:
        days = [ChatTemplate(source, special_tokens=special_tokens, date=date) for date in _two_days(template.date)]
        if _differ(*days):
            notes.append(f"the template writes today's date; training saw {template.date}, and so did the proof")
    return SavedTemplate(source, template.date if template.uses_clock else None, tuple(notes))


def bake(source: str, arguments: Mapping[str, Any]) -> str:
    """Set the arguments in front of a template, whatever is handed in: llama.cpp's server hands in its own.

    The template's declaration of its markers stays at the very beginning, where it is looked for.
    """
    if not arguments:
        return source
    declared = _DECLARATION.match(source)
    head, rest = (declared.group(), source[declared.end() :]) if declared else ("", source)
    *others, last = [f"set {name} = {_literal(value, name)}" for name, value in arguments.items()]
    # The line end behind a block is dropped, and so are spaces before a block that begins a line: with a line end the
    # rest is read as if nothing stood before it. White space that the declaration takes away is taken away here.
    end = "-%}" if head.endswith("-#}") else "%}\n"
    return head + "".join(f"{{%- {one} -%}}" for one in others) + f"{{%- {last} {end}" + rest


def _is_name(name: str) -> bool:
    """Whether a template can read an argument of this name at all."""
    return name.isidentifier() and not keyword.iskeyword(name)


def _literal(value: Any, name: str) -> str:
    """Write plain data in the template's language."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_literal(item, name) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_literal(key, name)}: {_literal(item, name)}' for key, item in value.items())}}}"
    raise UserError(
        f"the template's argument `{name}` holds {value!r}, which cannot be written into a template",
        where="template.arguments",
        fix="give text, numbers, lists or true and false",
    )


def _shown(arguments: Mapping[str, Any]) -> str:
    text = ", ".join(f"{name} = {_literal(value, name)}" for name, value in arguments.items())
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def _two_days(date: str) -> tuple[str, str]:
    return date, another_day(date)


def _differ(template: ChatTemplate, other: ChatTemplate) -> bool:
    """Whether a short conversation, with a system message or without, is another text on another day."""
    for form in (QUESTIONS[0], ("system", *QUESTIONS[0])):
        messages = saying(form, "user", "Hello")
        try:
            if template.render(messages) != other.render(messages):
                return True
        except TemplateFailed:
            continue
    return False
