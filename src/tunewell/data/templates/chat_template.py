"""Render chat templates exactly as transformers 5.22 does; load built-in templates and list their markers."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import product, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from jinja2 import TemplateSyntaxError, meta, nodes
from jinja2.exceptions import TemplateError

from tunewell.core.errors import UserError
from tunewell.core.text import shorten
from tunewell.data.rows.conversation import REASONING_KEYS, Message, is_list
from tunewell.data.templates.sandbox import TemplateFailed, TemplateLimit, TemplateSandbox
from tunewell.data.trial import find_problem


class _NotPlain(Exception):
    """Raised for a value that is not text, a number, a list or a dict."""


def to_template_data(messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[Any, Any, int]:
    """Return messages and tools as plain data with all reasoning fields, and their size in characters."""
    try:
        size = _plain_size(messages) + (_plain_size(tools) if tools is not None else 0)
    except _NotPlain:
        messages, tools = plain_data(messages), plain_data(tools)
        size = _plain_size(messages) + _plain_size(tools)
    for message in messages:
        if type(message) is not dict:
            raise TemplateFailed(
                f"a message must be an object with a role and content: {shorten(repr(message), _SHOWN_CHARS)}"
            )
    for tool in tools or ():
        if type(tool) is not dict:
            raise TemplateFailed("a tool must be a JSON schema (an object)")
    return [_with_reasoning(message) for message in messages], tools, size


def _with_reasoning(message: Message) -> Message:
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain_size(value: Any) -> int:
    """Return the number of characters of plain data, which needs no copy; raise `_NotPlain` for other values.

    Most rows are plain: copying them took 8% of `prepare`.
    """
    kind = type(cast(object, value))
    if kind is str:
        return len(value)
    if kind is dict:
        return sum(_plain_size(key) + _plain_size(item) for key, item in value.items())
    if kind is list or kind is tuple:
        return sum(map(_plain_size, value))
    if value is None or kind is int or kind is float or kind is bool:
        return 8
    raise _NotPlain


def plain_data(value: Any) -> Any:
    """Return a copy that has only text, numbers, lists and dicts, so that templates cannot call other methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, dict | Mapping):
        return {plain_data(key): plain_data(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if is_list(value):
        return [plain_data(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain_data(item) for item in cast("tuple[Any, ...]", value))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return plain_data(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return plain_data(dump())
    return f"<{type(value).__name__}>"


_SHOWN_CHARS = 500
BUILTIN_NAMES = ("chatml", "zephyr", "llama3", "gemma", "alpaca", "instruct", "human-assistant")
_MAX_CHARS = 4_000_000
"""Maximum size of a rendered text, plus four times the conversation."""
_TRIAL_SECONDS = 2
_TRIED: dict[str, str] = {}
"""The problems of the templates that this process has tried, by their hash; empty for harmless ones."""

_PROBE_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "x", "description": "x", "parameters": {"type": "object", "properties": {}}},
    }
]
_PROBE_TURNS = [{"role": role, "content": "x"} for role in ("system", "user", "assistant", "user", "assistant")]
_PROBES = (
    *((_PROBE_TURNS, True), (_PROBE_TURNS[1:], True)),
    *((_PROBE_TURNS[1:2], True), (_PROBE_TURNS[1:], False)),
)
"""Short conversations, and whether a generation prompt is added."""
_RESERVED = ("messages", "tools", "add_generation_prompt")
_TEMPLATE_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError)
"""Errors that a template expression can raise in addition to those of Jinja."""


class ChatTemplate:
    """A compiled template with its special tokens, arguments and date.

    `strftime_now` always returns midnight of `date`. Before its first rendering in this process, a template renders
    short conversations in a child process with limits on time and memory, unless it has done so before.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        name: str = "model",
        date: str = "2025-01-01",
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self.source = source
        self.date = date
        self._asks = False
        self._end = ""
        if reserved := [key for key in arguments if key in _RESERVED]:
            raise UserError(
                f"`{reserved[0]}` cannot be a template argument: the conversation uses this name",
                fix="choose another name",
            )
        self._special_tokens = dict(special_tokens)
        self._arguments = plain_data(dict(arguments))
        self._sandbox = TemplateSandbox(_midnight(date))
        try:
            constants = {**self._sandbox.globals, "documents": None, **special_tokens, **self._arguments}
            self._template = self._sandbox.compile_template(source, constants)
            parsed = self._sandbox.parse(source)
            self.uses_clock = any(name.name == "strftime_now" for name in parsed.find_all(nodes.Name))
            tracker = meta.TrackingCodeGenerator(self._sandbox)
            tracker.optimizer = None  # it would evaluate expressions
            tracker.visit(parsed)
            self.variables = frozenset(tracker.undeclared_identifiers)
            """Undeclared variables of the template: `messages`, `bos_token` and others."""
        except TemplateSyntaxError as error:
            raise TemplateFailed(f"line {error.lineno}: {error.message}") from error
        except (RecursionError, MemoryError) as error:
            raise TemplateLimit("the expressions of the template are nested too deeply") from error
        except (TemplateError, *_TEMPLATE_ERRORS, SyntaxError) as error:
            raise TemplateFailed(f"the template does not compile: {error}") from error

    @property
    def bos(self) -> str:
        """The text of the bos token, or an empty text."""
        return self._special_tokens.get("bos_token") or ""

    @cached_property
    def probe_tools(self) -> list[dict[str, Any]] | None:
        """The tools with which the template renders a question: None, or one tool if it fails without tools."""
        asked = [{"role": "user", "content": "x"}]
        needs_tools = self.try_render(asked) is None and self.try_render(asked, _PROBE_TOOLS) is not None
        return _PROBE_TOOLS if needs_tools else None

    @cached_property
    def special_variables(self) -> tuple[str, ...]:
        """The special-token variables that the template reads, whether or not the tokenizer defines them."""
        return tuple(sorted(name for name in self.variables if name.endswith("_token") or name in self._special_tokens))

    @cached_property
    def sha256(self) -> str:
        """The hash of everything that affects the rendered text, except the conversation."""
        seen = {
            "source": self.source,
            "date": self.date if self.uses_clock else None,
            "arguments": self._arguments,
            "special_tokens": {name: text for name, text in self._special_tokens.items() if name in self.variables},
        }
        seen |= {"end": self._end} if self._end else {}
        return hashlib.sha256(json.dumps(seen, sort_keys=True, default=str).encode()).hexdigest()

    def with_end(self, end: str) -> ChatTemplate:
        """Return a copy of this template that also ends the last reply of a conversation, as it ends the others."""
        template = copy.copy(self)
        template.__dict__.pop("sha256", None)
        template._end = end
        return template

    def for_prompts(self) -> ChatTemplate:
        """Return a copy of this template that always writes the header of the next reply."""
        template = copy.copy(self)
        template._asks = True
        return template

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """Return the text of a conversation; raise `TemplateFailed` if the template rejects it."""
        try:
            messages, tools, size = to_template_data(messages, tools)
            asks = add_generation_prompt or self._asks
            variables = {"messages": messages, "tools": tools, "add_generation_prompt": asks}
            self._require_harmless()
            text = self._sandbox.render(self._template, variables, max_chars=_MAX_CHARS + 4 * size)
            ends = self._end and not asks and messages[-1].get("role") == "assistant"
            return text + self._end if ends and not messages[-1].get("tool_calls") else text
        except RecursionError as error:
            raise TemplateLimit("the template or the conversation is nested too deeply") from error
        except TemplateError as error:
            raise TemplateFailed(shorten(str(error.message), _SHOWN_CHARS)) from error
        except _TEMPLATE_ERRORS as error:
            raise TemplateFailed(shorten(f"{type(error).__name__}: {error}", _SHOWN_CHARS)) from error

    def _require_harmless(self) -> None:
        """Try the template in a child process, unless it is built in; raise TemplateLimit if it exceeds the limits."""
        if self.sha256 not in _TRIED:
            is_own = self.source in map(builtin_template, BUILTIN_NAMES)
            _TRIED[self.sha256] = "" if is_own else self._find_problem()
        if problem := _TRIED[self.sha256]:
            raise TemplateLimit(f"the template cannot be used: {problem}")

    def _find_problem(self) -> str:
        request = [self.source, self._special_tokens, self._arguments]
        return find_problem(f"{__name__}:find_limit", request, doing="rendering", seconds=_TRIAL_SECONDS)

    def try_render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> str | None:
        """Return the text of a conversation, or None if the template rejects it."""
        try:
            return self.render(messages, tools, add_generation_prompt=add_generation_prompt)
        except TemplateFailed:
            return None

    def question_in(self, prompt: str) -> str:
        """Return the last message of the user in a decoded prompt.

        Some prompts have none, for example the second part of a document that was split, or a system message alone.
        Their last text is returned, without the template's marks and role names.
        """
        found = self._question_pattern and self._question_pattern.match(prompt)
        if found:
            return found[1].strip()
        texts = [_ROLE_LINE.sub("", text).strip() for text in _MARK.split(prompt)]
        return next((text for text in reversed(texts) if text), prompt.strip())

    @cached_property
    def _question_pattern(self) -> re.Pattern[str] | None:
        """Match a prompt up to its generation header; the group is the last message of the user.

        <|im_end|>\\n<|im_start|>user\\nZq2wXv<|im_end|>\\n<|im_start|>assistant\\n
                    ^^^^^^^^^^^^^^^^^^      ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
                    header                after
        """
        turns = [{"role": role, "content": f"Zq{at}wXv"} for at, role in enumerate(("user", "assistant", "user"))]
        try:
            alone = self.render(turns[:1], add_generation_prompt=True).partition("Zq0wXv")[0]
            before, _, after = self.render(turns, add_generation_prompt=True).partition("Zq1wXv")[2].partition("Zq2wXv")
        except TemplateFailed:
            return None
        same = takewhile(lambda pair: pair[0] == pair[1], zip(alone[::-1], before[::-1], strict=False))
        header = "".join(letter for letter, _ in same)[::-1]
        return re.compile(f".*{_spaced(header)}(.*?){_spaced(after)}", re.DOTALL) if after.strip() else None


def find_limit(source: str, special_tokens: dict[str, str], arguments: dict[str, Any]) -> str:
    """Render short conversations, in the child process. Return which limit the template exceeds, or an empty text."""
    template = ChatTemplate(source, special_tokens=special_tokens, arguments=arguments)
    _TRIED[template.sha256] = ""
    for (turns, asks), tools in product(_PROBES, (None, _PROBE_TOOLS)):
        try:
            template.render(turns, tools, add_generation_prompt=asks)
        except TemplateLimit as limit:
            return limit.reason
        except TemplateFailed:
            continue
    return ""


def _spaced(text: str) -> str:
    """Return a pattern for a text of the template. Decoded tokens may have more or less white space."""
    return r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", text)))


_MARK = re.compile(r"<\|[^<>|\s]*\|>|</?s>|<(?:start|end)_of_turn>|\[/?(?:INST|SYSTEM_PROMPT)\]|<</?SYS>>")
"""Marks with which chat templates begin and end messages."""
_ROLE_LINE = re.compile(r"\A\s*(?:system|user|assistant|model|tool|developer|human)\s*(?:\n|\Z)", re.IGNORECASE)


def _midnight(date: str) -> datetime:
    try:
        return datetime.strptime(date, "%Y-%m-%d")
    except ValueError as error:
        raise UserError(f"`{date}` is not a date", fix="write a date as 2025-01-31") from error


_DECLARED = re.compile(r"\A\s*\{#-?\s*markers:(.*?)-?#\}", re.DOTALL)
_MARKER = re.compile(r"<\|[^<>|\s]{1,60}\|>|<｜[^<>｜\s]{1,60}｜>|<(?:start|end)_of_[a-z]+>|</?s>|<[be]os>")
_BRACKETED = re.compile(r"\s*(<[^<>\s]{1,60}>|[\[\]{〈][^\w\s]?\S{0,58}?[\[\]}〉](?=[\s<\[]|\Z))")
_PROBE_TEXTS = ("Vq0hKz", "Vq1hKz", "Vq2hKz", "Vq3hKz")
_ROLE_HEADER = re.compile(r"<\|(?:system|user|assistant|tool|model|human|bot)\|>")


def builtin_template(name: str) -> str:
    """Return the source of a built-in template."""
    if name not in BUILTIN_NAMES:
        raise UserError(f"there is no built-in template `{name}`", fix=f"choose one of {', '.join(BUILTIN_NAMES)}")
    return (Path(__file__).parent / "builtin_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def required_markers(
    template: ChatTemplate | str, special_tokens: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Return the markers that must be single tokens for a template to work, in order of appearance.

    A comment at the start of the template, `{#- markers: <|im_start|> <|im_end|> -#}`, can declare them. Otherwise a
    short conversation is rendered and searched for `<|...|>`, `<start_of_...>`, `<s>` and similar. Headers that only
    name a role (`<|user|>`) do not count: Zephyr and TinyLlama encode them as text. The special tokens that the
    template reads from the tokenizer (`bos_token`, `eos_token`) are added; see `ChatTemplate.special_variables`. If no
    marker ends a reply, the bracketed text after it is one, of any shape: `<turn|>`, `[e~[`, or `<|user|>` in GLM.
    """
    if isinstance(template, str):
        template = ChatTemplate(template, special_tokens=special_tokens)
    tokens = [special_tokens[name] for name in template.special_variables if special_tokens.get(name)]
    if declared := _DECLARED.match(template.source):
        return list(dict.fromkeys([*declared[1].split(), *tokens]))
    text = _probe(template)
    found = [marker for marker in _MARKER.findall(text) if not _ROLE_HEADER.fullmatch(marker)]
    known = list(dict.fromkeys([*found, *(token for token in tokens if token in text)]))
    return [*known, *_unknown_end(template, known)]


def _probe(template: ChatTemplate) -> str:
    """Return renderings of short conversations, or the source of the template if it rejects all of them."""
    texts = [template.try_render(part, template.probe_tools, add_generation_prompt=asks) for part, asks in _PROBES]
    return "\n".join(text for text in texts if text is not None) or template.source


def _unknown_end(template: ChatTemplate, known: Sequence[str]) -> list[str]:
    """Return the text that ends a reply like a marker, if none of the known markers ends it."""
    roles = ("user", "assistant") * 2
    turns = [{"role": role, "content": text} for role, text in zip(roles, _PROBE_TEXTS, strict=True)]
    text = template.try_render(turns, template.probe_tools) or ""
    after_last = text.rpartition(_PROBE_TEXTS[3])[2]
    between = text.partition(_PROBE_TEXTS[1])[2].partition(_PROBE_TEXTS[2])[0]
    for after in (after_last, between):
        if any(marker in after for marker in known):
            return []
        if end := _BRACKETED.match(after):
            return [end[1]]
    return []
