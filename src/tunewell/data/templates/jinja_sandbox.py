"""The template language as transformers 5.22 sets it up, with limits on time, size and depth that hold on any thread.

Same dialect: immutable sandbox, trimmed blocks, loop controls, `{% generation %}`, its `tojson`, `raise_exception`,
`strftime_now`, guarded `dict` and `namespace`. What transformers renders is rendered equally, or refused: `random`,
`lipsum`, bytes and `{% autoescape %}` are, because they cannot be repeated or bounded and no chat template needs them.

The limits work by asking first. The parsed template is rewritten so that every loop round, macro and comparison
passes by the meter; operators, calls, filters and tests are intercepted where the sandbox allows it:

    {% for m in messages %}...          {% for m in messages %}(spend)...
    {{ m.content }}               ->    {{ m.content |(printable) }}
    {{ a ~ b }}                         {{ (a, b) |(concat) }}
    {% if m == last %}                  {% if m|(flat) == last|(flat) %}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from types import BuiltinMethodType, CodeType, MethodType
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context, pass_eval_context
from markupsafe import Markup

from tunewell.data.templates.jinja_filters import bounded_filters, bounded_tests
from tunewell.data.templates.jinja_limits import MAX_CALLS_DEEP, SCALARS, SMALL, Meter, TemplateFailed, TemplateLimit
from tunewell.data.templates.jinja_operations import BoundedEscapeFormatter, BoundedFormatter, ask_method, binop
from tunewell.data.templates.jinja_rewrite import rewrite

MAX_NODES = 20_000
"""A template of 4,000 characters has about 700; this many take about two seconds to compile."""
_DICT_ATTRIBUTES = frozenset(dir(dict))
_PUBLIC = {
    str: frozenset(name for name in dir(str) if not name.startswith(("_", "format"))),
    dict: frozenset(("get", "items", "keys", "values")),
    LoopContext: frozenset(
        ("first", "last", "index", "index0", "revindex", "revindex0", "length", "nextitem", "previtem")
    ),
}
"""Attributes that templates use all the time and that the sandbox would let pass after long thought."""


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: note where in the output the reply stands."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Turn the block into a call of `note` with its content."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("note"), [], [], body).set_lineno(line)

    @pass_eval_context
    def note(self, eval_context: nodes.EvalContext, caller: Macro) -> str:
        """Render the block and note its place, counted from what the template has put out so far."""
        text = caller()
        meter: Meter = self.environment.meter  # pyright: ignore[reportAttributeAccessIssue]
        if meter.spans is not None:
            meter.spans.append((meter.emitted, meter.emitted + len(text)))
        return text


class TemplateDict:
    """Stands in for `dict`, so that the type itself is out of reach."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class TemplateNamespace(Namespace):
    """A namespace that refuses names starting with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # without `self`, so that `namespace(self=...)` works
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: names that start with an underscore are refused")


def _raise_exception(message: Any) -> None:
    raise TemplateError(message)


def _clock(now: datetime) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:
        if len(format) > 1_000:  # C makes room for 256 times the pattern
            raise TemplateLimit("a date pattern of more than 1,000 characters")
        return now.strftime(format)

    return strftime_now


def _lipsum(*_: Any, **__: Any) -> None:
    raise TemplateFailed("`lipsum` is not available in chat templates: equal rows must give equal text")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template on one thread; its meter is started anew for each rendering."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, now: datetime) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        self.meter = meter = Meter()
        self.filters = bounded_filters(meter) | {
            "(spend)": pass_context(lambda _, value, amount: meter.spend(amount) or value),
            "(flat)": pass_context(lambda _, value: meter.flat(value)),
            "(within)": pass_context(lambda _, value: meter.within(value)),
            "(searched)": pass_context(lambda _, value: meter.searched(value)),
            "(printable)": pass_context(lambda _, value: meter.printable(value)),
            "(keep)": pass_context(lambda _, value: meter.keep(value)),
            "(concat)": pass_context(lambda _, parts: self.concat([str(meter.printable(part)) for part in parts])),
        }
        self.tests = bounded_tests(meter)
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _clock(now),
            "dict": TemplateDict(),
            "namespace": TemplateNamespace,
            "lipsum": _lipsum,
        }

    def concat(self, parts: Iterable[str]) -> str:
        """Join what a block, a macro or the whole template has put out."""
        parts = list(parts)
        self.meter.room(sum(map(len, parts)))
        return self.meter.keep("".join(parts))

    def compile_bounded(self, source: str) -> CodeType:
        """Compile a template with the meter's checks written into it; the code serves every thread's sandbox."""
        parsed = self.parse(source)
        if sum(1 for _ in parsed.find_all(nodes.Node)) > MAX_NODES:
            raise TemplateLimit(f"the template has more than {MAX_NODES:,} expressions and statements")
        return self.compile(rewrite(parsed, self))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Do an operator, the commonest one without detours."""
        if operator == "+" and type(left) is str and type(right) is str:
            size = len(left) + len(right)
            if size < SMALL:
                self.meter.spent += 64 + 4 * size  # looked at by the next loop round; straight code is short
                return left + right
        return binop(self.meter, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look an attribute up, the commonest ones without detours."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is TemplateNamespace and attribute in obj._Namespace__attrs:
            return obj._Namespace__attrs[attribute]
        if attribute in _PUBLIC.get(kind, ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look an item up, unless the key is too large to be hashed."""
        self.meter.spend(8)  # `map(attribute='a.a.a...')` comes by here for each part of each item
        kind = type(argument)
        if kind is str and type(obj) is dict and argument in obj:
            return obj[argument]
        if kind not in SCALARS:
            self.meter.weigh(argument)
        return super().getitem(obj, argument)

    def call_filter(self, name: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a filter by name for `map`; the checks are nothing a template may name."""
        if str(name).startswith("("):
            raise TemplateRuntimeError(f"No filter named {name!r}.")
        return super().call_filter(name, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Replace `str.format` by one that keeps to the sandbox and its limits."""
        if super().wrap_str_format(value) is None:
            return None
        text, name = value.__self__, value.__name__

        def wrapper(*args: Any, **kwargs: Any) -> str:
            if isinstance(text, Markup):
                formatter = BoundedEscapeFormatter(self, self.meter, escape=text.escape)
            else:
                formatter = BoundedFormatter(self, self.meter)
            if name == "format_map":
                (mapping,) = args
                return type(text)(formatter.vformat(text, (), mapping))
            return type(text)(formatter.vformat(text, args, kwargs))

        return wrapper

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, method or function, if what it is given is not too large for it."""
        # The doubled underscores keep these names free for a template's own keyword arguments.
        meter = __self.meter
        kind = type(__obj)
        if len(args) > 8 or len(kwargs) > 8:
            meter.spend(48 * len(args) + 96 * len(kwargs))  # `*range(...)` makes an integer for each
        if kind is Macro or kind is LoopContext or kind is BlockReference:
            meter.calls_deep += 1
            if meter.calls_deep > MAX_CALLS_DEEP:
                raise TemplateLimit(f"the template calls itself more than {MAX_CALLS_DEEP} times deep")
            result = super().call(__context, __obj, *args, **kwargs)
            meter.calls_deep -= 1
            return result
        if __obj is TemplateNamespace:
            meter.spend(sum(96 * len(value) for value in args if isinstance(value, list | tuple | dict)))
        else:
            args = tuple(map(meter.flat, args))
            for name, value in kwargs.items():
                if name not in ("_loop_vars", "_block_vars"):
                    kwargs[name] = meter.flat(value)
            if kind is BuiltinMethodType or kind is MethodType:
                args = ask_method(meter, __obj.__self__, __obj.__name__, args, kwargs)
                if type(__obj.__self__) is str:
                    kwargs.pop("_loop_vars", None)
                    kwargs.pop("_block_vars", None)
                    return meter.keep(__obj(*args, **kwargs))
        return meter.keep(super().call(__context, __obj, *args, **kwargs))
