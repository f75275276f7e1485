"""The chat template that is saved with an export: the one of training, so that whoever renders it writes the same."""

import json
import keyword
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunewell.core.errors import UserError
from tunewell.data.templates import ChatTemplate, TemplateFailed
from tunewell.exporting.chat_clock import another_day
from tunewell.exporting.chat_opening import missing_opening
from tunewell.exporting.chat_probes import QUESTIONS, saying

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
