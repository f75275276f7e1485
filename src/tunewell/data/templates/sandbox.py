"""A Jinja sandbox for chat templates in the dialect of transformers 5.22, from which they cannot reach the machine.

The dialect: immutable sandbox, trimmed blocks, loop controls, `{% generation %}`, its `tojson`, `raise_exception` and
`strftime_now`. A template renders to the same text as in transformers, or is rejected. `random` and `lipsum` are always
rejected: equal rows must give equal text. `chat_template.py` limits what a template takes.
"""

# pyright: basic
# Jinja's filters, tests and globals are dicts without types, and a template can pass any value to any function.

import json
import math
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context

MAX_SOURCE_CHARS = 256_000
"""Maximum length of a template. The longest published templates have about 30,000 characters."""
MAX_NODES = 20_000
"""Maximum number of syntax nodes: about two seconds to compile. A template of 4,000 characters has about 700."""


class TemplateFailed(Exception):
    """Raised if a template rejects its input or cannot be rendered; `reason` describes the cause."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class TemplateLimit(TemplateFailed):
    """Raised if a template exceeds its time, memory, size or recursion limit."""


_DICT_ATTRIBUTES = frozenset(dir(dict))


class _Infinity(float):
    """A number that has a literal in the compiled Python code."""

    def __repr__(self) -> str:
        return "1e999"


class Generation(Extension):
    """The tag `{% generation %}...{% endgeneration %}`, which renders its body."""

    tags = {"generation"}  # noqa: RUF012  declared like this in the base class

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block as a call with a body, like transformers, so that variable scopes are the same."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("render"), [], [], body).set_lineno(line)

    def render(self, caller: Macro) -> str:
        """Render the body."""
        return caller()


def _raise_exception(message: Any) -> None:
    raise TemplateError(message)


def _refuse(*_: Any, **__: Any) -> None:
    raise TemplateFailed("`random` and `lipsum` are not available in chat templates: equal rows must give equal text")


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The Jinja environment of one template."""

    globals: dict[str, Any]

    def __init__(self, now: datetime) -> None:
        # Nothing is evaluated at compile time, before the template was tried: there is no optimizer, and Jinja cannot
        # know what a function that gets the context makes of a constant.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, loopcontrols],
            optimized=False,
            finalize=pass_context(lambda _, value: value),
        )
        self.filters |= {"tojson": _tojson, "random": _refuse}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": now.strftime, "lipsum": _refuse}

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute or item, with a fast path for messages."""
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def compile_template(self, source: str, constants: dict[str, Any]) -> Template:
        """Compile a template; `constants` are its global variables."""
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateLimit(f"the template has more than {MAX_SOURCE_CHARS:,} characters")
        parsed = self.parse(source)
        if sum(1 for _ in parsed.find_all(nodes.Node)) > MAX_NODES:
            raise TemplateLimit(f"the template has more than {MAX_NODES:,} syntax nodes")
        for node in parsed.find_all(nodes.Const):
            if node.value == math.inf:  # `1e400`
                node.value = _Infinity(node.value)
        return Template.from_code(self, self.compile(parsed), constants)

    def render(self, template: Template, variables: dict[str, Any], *, max_chars: int) -> str:
        """Render a compiled template; raise TemplateLimit for a text of more than `max_chars` characters."""
        parts, num_chars = list[str](), 0
        for part in template.root_render_func(template.new_context(variables)):
            num_chars += len(part)
            if num_chars > max_chars:
                raise TemplateLimit(f"the template creates a text of more than {max_chars:,} characters")
            parts.append(part)
        return "".join(parts)
