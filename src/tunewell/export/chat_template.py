"""The chat template saved with an export, which renders the same text as in training."""

import json
import keyword
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date as Day
from datetime import timedelta
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.text import shorten
from tunewell.data.templates.chat_template import ChatTemplate, TemplateFailed

_DECLARATION = re.compile(r"\A\s*\{#-?\s*markers:.*?(?:-#\}|#\}\n?)", re.DOTALL)
_REPLY = "an answer"
_MAX_CHARS = 60


@dataclass(frozen=True)
class SavedTemplate:
    """A chat template as written to the exported files."""

    source: str
    date: str | None
    """The date used in training, if the template reads the current date."""
    notes: tuple[str, ...]


def saved_template(
    template: ChatTemplate, *, arguments: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> SavedTemplate:
    """Return the template with the template arguments of training set inside; it still reads the current date."""
    used = {name: value for name, value in arguments.items() if name in template.variables and _is_readable(name)}
    source, notes = bake(template.source, used), []
    if used:
        notes.append(
            f"the chat template contains the template arguments of training ({_format_arguments(used)}); other values "
            "passed by callers have no effect"
        )
    missing = missing_generation_prompt(lambda messages, asks: template.render(messages, add_generation_prompt=asks))
    if missing:
        notes.append(
            f"the chat template's generation prompt lacks {missing[-_MAX_CHARS:]!r}, which preceded every reply in "
            "training"
        )
    if template.uses_clock:
        dates = (template.date, another_day(template.date))
        if _renders_differ(*(ChatTemplate(source, special_tokens=special_tokens, date=date) for date in dates)):
            notes.append(f"the chat template writes today's date; training and verification used {template.date}")
    return SavedTemplate(source, template.date if template.uses_clock else None, tuple(notes))


def bake(source: str, arguments: Mapping[str, Any]) -> str:
    """Set arguments at the top of a template. They override the caller's values, such as those of llama.cpp's server.

    The declaration of the template's markers stays first, because it is read from the beginning of the file.
    """
    if not arguments:
        return source
    declared = _DECLARATION.match(source)
    head, rest = (declared.group(), source[declared.end() :]) if declared else ("", source)
    *others, last = [f"set {name} = {_literal(value, name)}" for name, value in arguments.items()]
    # Jinja removes the newline after a block, and spaces before a block at the start of a line. With a newline here,
    # the rest renders as if nothing preceded it. If the declaration strips white space after it, so does this block.
    end = "-%}" if head.endswith("-#}") else "%}\n"
    return head + "".join(f"{{%- {one} -%}}" for one in others) + f"{{%- {last} {end}" + rest


def missing_generation_prompt(render: Callable[[list[dict[str, str]], bool], str]) -> str:
    """Return the text before a reply that is missing from the generation prompt, or "" if nothing is missing.

        prompt    <|im_start|>user\\nHello<|im_end|>\\n
        answered  <|im_start|>user\\nHello<|im_end|>\\n<|im_start|>assistant\\nan answer<|im_end|>\\n
                                                         ^^^^^^^^^^^^^^^^^^^^^^  missing

    Some templates need no generation prompt: in `[INST] Hello [/INST]`, the end of the question starts the reply.
    Missing white space is ignored, because many templates let the model generate it.
    """
    question = [{"role": "user", "content": "Hello"}]
    try:
        plain, prompt = render(question, False), render(question, True)
        answered = render([*question, {"role": "assistant", "content": _REPLY}], False)
    except TemplateFailed:
        return ""
    before, found, _ = answered.rpartition(_REPLY)
    if plain != prompt or not found or before.rstrip() == prompt.rstrip():
        return ""
    return before.removeprefix(prompt)


def another_day(date: str) -> str:
    """Return a date with a different day, month, year and weekday."""
    day = Day.fromisoformat(date)
    others = (day + timedelta(days=366 + number) for number in range(100))
    return next(other for other in others if not _date_parts(day) & _date_parts(other)).isoformat()


def _date_parts(day: Day) -> set[tuple[str, int]]:
    return {("day", day.day), ("month", day.month), ("year", day.year), ("weekday", day.weekday())}


def _is_readable(name: str) -> bool:
    """Return True if the name is a valid variable name in a template."""
    return name.isidentifier() and not keyword.iskeyword(name)


def _literal(value: Any, name: str) -> str:
    """Return plain data as a Jinja literal."""
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
        f"the template argument `{name}` is {value!r}, which cannot be written into a template",
        where="template.arguments",
        fix="use text, numbers, lists, true or false",
    )


def _format_arguments(arguments: Mapping[str, Any]) -> str:
    return shorten(", ".join(f"{name} = {_literal(value, name)}" for name, value in arguments.items()), _MAX_CHARS)


def _renders_differ(template: ChatTemplate, other: ChatTemplate) -> bool:
    """Return True if a short conversation, with or without a system message, renders differently."""
    question = {"role": "user", "content": "Hello"}
    for messages in ([question], [{"role": "system", "content": "Be brief."}, question]):
        try:
            if template.render(messages) != other.render(messages):
                return True
        except TemplateFailed:
            continue
    return False
