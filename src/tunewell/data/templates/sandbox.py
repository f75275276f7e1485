"""A Jinja sandbox for untrusted chat templates: transformers' dialect, with limits on time, memory and recursion.

The dialect is that of transformers 5.22: immutable sandbox, trimmed blocks, loop controls, `{% generation %}`, its
`tojson`, `raise_exception` and `strftime_now`, a guarded `dict` and `namespace`. A template renders to the same text as
in transformers, or is rejected. `random`, `lipsum`, bytes and `{% autoescape %}` are always rejected: they cannot be
reproduced or limited, and chat templates do not need them.

The limits work on any thread, without signals and without a second process. C code cannot be interrupted, so an
operation that could be large is checked before it runs:

    {% for %}, macros              a charge for each iteration or call, inserted into the parsed template
    a ~ b, a[1:], a == b, {a: 1}   a check of the operands, inserted into the parsed template
    a + b, a * 3, a % b            `call_binop`
    f(x), x.method(y)              `call`
    x|filter, x is test            a wrapper around each filter and test
    {{ x }}                        `finalize`

A check measures the operands, predicts the size of a result that can be larger than its operands, and charges the
result to the `Budget` of the rendering.
"""

# pyright: basic
# Jinja's filters, tests and globals are dicts without types, and a template can pass any value to any function.

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial, wraps
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

from tunewell.data.templates.budget import Budget, TemplateFailed, TemplateLimit, TemplateNamespace, is_iterator

MAX_SOURCE_CHARS = 256_000
"""Maximum length of a template. The longest published templates have about 30,000 characters."""
MAX_NODES = 20_000
"""Maximum number of syntax nodes: about two seconds to compile. A template of 4,000 characters has about 700."""
MAX_CALL_DEPTH = 64
"""Maximum depth of macro calls. Each takes about six Python frames, and Python's limit is 1,000."""
MAX_INT_BITS = 16_384
"""Maximum size of integers. Python prints up to 4,300 digits, and arithmetic on larger integers is slow."""
MAX_SLOW_CHARS = 10_000
"""Maximum input of filters that are slow or quadratic, such as `urlize` and `striptags`."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TEMPLATE_FUNCTIONS = frozenset((Macro, LoopContext, BlockReference))
_PUBLIC_ATTRIBUTES = {
    kind: frozenset(name for name in dir(kind) if not name.startswith(("_", "format"))) for kind in (str, LoopContext)
}
_DICT_ATTRIBUTES = frozenset(dir(dict))
_FREE_FILTERS = _names("count d default first last length")
_TEXT_FILTERS = _names(
    "abs attr capitalize center e escape forceescape format indent lower replace round safe string tojson trim "
    "truncate upper"
)
_ITEM_FILTERS = _names(
    "batch dictsort groupby items join list map max min reject rejectattr reverse select selectattr slice sort sum "
    "unique"
)
"""Filters that iterate over their input. All filters that are not in one of these sets count as slow."""
_COSTLY_TESTS = _names(
    "!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lt ne divisibleby even odd lower upper filter test"
)
_NUMERIC = frozenset(("round", "odd", "even", "divisibleby"))
_BYTES_METHODS = frozenset(("encode", "to_bytes", "from_bytes"))

_GROWING = _names("batch center expandtabs indent ljust rjust round slice translate zfill")
"""Filters and text methods whose result can be larger than all operands, by the value or the length of an argument."""


def _width(argument: Any) -> int:
    """Return the number of characters that an argument can make of one."""
    if isinstance(argument, str):
        return len(argument)
    if isinstance(argument, dict | list | tuple):
        items = argument.values() if isinstance(argument, dict) else argument
        return max((len(item) for item in items if isinstance(item, str)), default=1)
    return abs(argument) if isinstance(argument, int) else 1


def _replaced_chars(text: Any, old: Any, new: Any, count: Any = None) -> int:
    return len(str(text)) + str(text).count(str(old)) * len(str(new))


class TemplateDict:
    """The global `dict` of templates. It creates dicts but does not expose the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


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


def _short_pattern(pattern: str) -> str:
    if len(pattern) > 1_000:  # the C library allocates up to 256 times the pattern
        raise TemplateLimit("the template uses a date pattern of more than 1,000 characters")
    return pattern


def _refuse(*_: Any, **__: Any) -> None:
    raise TemplateFailed("`random` and `lipsum` are not available in chat templates: equal rows must give equal text")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The Jinja environment of one template on one thread; call `budget.start` before each rendering."""

    globals: dict[str, Any]
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, now: datetime) -> None:
        self.budget = budget = Budget()
        # The optimizer is off, because it evaluates expressions at compile time, when no budget applies.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, loopcontrols],
            optimized=False,
            finalize=self._admit_output,
        )
        self.undefined: Any = lambda *args, **kwargs: budget.charge(96, Undefined(*args, **kwargs))
        self.filters["tojson"] = self._tojson
        self.filters = {
            name: function if name in _FREE_FILTERS else self._checked(name, function)
            for name, function in self.filters.items()
        } | {
            "random": _refuse,
            "(charge)": lambda value, num_bytes: budget.charge(abs(num_bytes), value),
            "(admit)": budget.admit,
            "(items)": budget.admit_items,
            "(container)": budget.admit_container,
            "(created)": budget.created,
            "(concat)": lambda parts: self.concat([str(self._admit_output(None, part)) for part in parts]),
        }
        self.tests |= {name: self._checked(name, self.tests[name]) for name in _COSTLY_TESTS}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda format: now.strftime(_short_pattern(format)),
            "dict": TemplateDict(),
            "namespace": TemplateNamespace,
            "lipsum": _refuse,
        }

    def compile_template(self, source: str, constants: dict[str, Any]) -> Template:
        """Compile a template with its checks; `constants` are its global variables."""
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateLimit(f"the template has more than {MAX_SOURCE_CHARS:,} characters")
        parsed = self.parse(source)
        if sum(1 for _ in parsed.find_all(nodes.Node)) > MAX_NODES:
            raise TemplateLimit(f"the template has more than {MAX_NODES:,} syntax nodes")
        return Template.from_code(self, self.compile(_CheckInserter(self).visit(parsed)), constants)

    def render(self, template: Template, variables: dict[str, Any]) -> str:
        """Render a compiled template."""
        return self.concat(template.root_render_func(template.new_context(variables)))

    def concat(self, parts: Iterable[str]) -> str:
        """Join the output of a block, a macro or the template."""
        parts = list(parts)
        self.budget.require_chars(sum(map(len, parts)))
        return self.budget.created("".join(parts))

    @pass_context
    def _admit_output(self, context: Context | None, value: Any) -> Any:
        """Check that a value is small enough to print; printing an iterator does not consume it."""
        return value if type(value) is str or is_iterator(value) else self.budget.admit(value)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute or item, with a fast path for common objects."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if (kind is str or kind is LoopContext) and attribute in _PUBLIC_ATTRIBUTES[kind]:
            return self.budget.charge(64, getattr(obj, attribute))
        return self.budget.charge(64, super().getattr(obj, attribute))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an item; reject a key that is too large to hash. `map(attribute='a.b')` calls this for each part."""
        if type(argument) is str and type(obj) is dict and argument in obj:
            return obj[argument]
        return self.budget.charge(64, super().getitem(obj, self.budget.admit(argument)))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right`; raise TemplateLimit if the result would be too large."""
        if operator == "+" and type(left) is str and type(right) is str:
            return self.budget.add_texts(left, right)
        if isinstance(left, int) and isinstance(right, int):
            if (left.bit_length() * right if operator == "**" else (left | right).bit_length()) > MAX_INT_BITS:
                raise TemplateLimit(f"the template computes with integers of more than {MAX_INT_BITS:,} bits")
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            self.budget.require_chars(len(left) + len(right))
        elif operator == "*":
            items, times = (right, left) if isinstance(left, int) else (left, right)
            if isinstance(items, str | list | tuple) and isinstance(times, int):
                self.budget.require_chars(len(items) * times)
        elif operator == "%" and isinstance(left, str):
            self._require_small_format(left, right)
        return self.budget.created(self.binop_table[operator](left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, method or function; raise TemplateLimit if its arguments or result would be too large."""
        # The double underscores avoid conflicts with keyword arguments of the template.
        budget = __self.budget
        budget.charge(64 * (1 + len(args) + len(kwargs)))
        if type(__obj) in _TEMPLATE_FUNCTIONS:
            budget.depth += 1
            if budget.depth > MAX_CALL_DEPTH:
                raise TemplateLimit(f"the template calls itself more than {MAX_CALL_DEPTH} levels deep")
            result = super().call(__context, __obj, *args, **kwargs)
            budget.depth -= 1
            return result
        kwargs = {key: value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")}
        owner = getattr(__obj, "__self__", None)
        if owner is not None and __obj.__name__ in _BYTES_METHODS:
            raise TemplateFailed(f"`{__obj.__name__}` is not available in chat templates")
        if isinstance(owner, str):
            name = __obj.__name__
            if name == "join" and args:
                args = (__self._joinable(budget.admit_items(args[0]), owner), *args[1:])
            method = getattr(type(owner), name)
            return __self._apply(name, method, owner, args, kwargs, is_slow=name == "striptags")
        args = tuple(map(budget.admit, args))
        kwargs = {key: budget.admit(value) for key, value in kwargs.items()}
        format_method = getattr(__obj, "__wrapped__", None)  # Jinja wraps `str.format` and `str.format_map`
        if format_method is not None:
            __self._require_small_format(format_method.__self__, (args, kwargs))
        budget.admit(owner)
        budget.charge(4 * budget.measure((args, kwargs)))
        return budget.created(super().call(__context, __obj, *args, **kwargs))

    def _checked(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter or a test with checks of its input and its result."""
        # Jinja passes its context, or a part of it, as an additional first argument to functions with this attribute.
        first = 1 if hasattr(function, "jinja_pass_arg") else 0
        admit_value = self.budget.admit_items if name in _ITEM_FILTERS else self.budget.admit
        is_slow = name not in _ITEM_FILTERS | _TEXT_FILTERS | _COSTLY_TESTS

        @wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            value = admit_value(args[first])
            if name == "join":
                separators = map(self.budget.admit, [*args[first + 1 :], kwargs.get("d", "")])
                value = self._joinable(value, str(next(separators)))
            call = partial(function, *args[:first])
            return self._apply(name, call, value, args[first + 1 :], kwargs, is_slow=is_slow)

        return checked

    def _apply(
        self,
        name: str,
        function: Callable[..., Any],
        value: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_slow: bool,
    ) -> Any:
        """Apply a filter, a test or a text method; raise TemplateLimit if its operands or result would be too large."""
        budget = self.budget
        args = tuple(map(budget.admit, args))
        kwargs = {key: budget.admit(argument) for key, argument in kwargs.items()}
        operands = (*args, *kwargs.values())
        if name == "sum":
            value = list(value)
            if any(isinstance(start, list | tuple) for start in operands):
                budget.require_chars(budget.measure(value) * len(value))  # each addition copies the whole list
        elif name == "format":
            self._require_small_format(str(value), (args, kwargs))
        elif name == "replace":
            budget.require_chars(_replaced_chars(value, *args, **kwargs))
        elif name in _GROWING:
            width = max(map(_width, operands), default=1)
            budget.require_chars(width * (len(value) + 1 if isinstance(value, str | list | tuple) else 100))
        elif is_slow and budget.measure((value, operands)) > MAX_SLOW_CHARS:
            raise TemplateLimit(f"the template passes more than {MAX_SLOW_CHARS:,} characters to a slow filter")
        if name in _NUMERIC and not isinstance(value, int | float):
            raise TypeError(f"`{name}` needs a number")
        if isinstance(value, str):
            if name in ("split", "rsplit", "splitlines"):
                separator = next((text for text in operands if text and isinstance(text, str)), None)
                budget.charge(64 * (value.count(separator) if separator else len(value)))
            # In the worst case, methods such as `rfind` and `strip` take quadratic time.
            other = sum(len(text) for text in operands if type(text) is str)
            budget.charge(sys.getsizeof(value) + (len(value) * other >> 3))
        return budget.created(function(value, *args, **kwargs), item_bytes=128)

    def _joinable(self, items: Any, separator: str) -> list[Any]:
        items = list(items)
        self.budget.require_chars(self.budget.measure(items) + len(items) * len(separator))
        return items

    def _require_small_format(self, pattern: str, values: Any) -> None:
        """Reject `pattern % values` or `pattern.format(values)` with a large width or many large fields."""
        num_chars = len(pattern) + (pattern.count("%") + pattern.count("{")) * self.budget.measure(values)
        widths = re.findall(r"[%):.<>=^][-+ #0z]*(\d+)", pattern)
        if "*" in pattern or re.search(r"\{[^{}]*\{", pattern):  # the width can come from one or several values
            widths.append("".join(re.findall(r"\d", str(values))) or "0")
        self.budget.require_chars(num_chars + sum(int(digits[:12]) for digits in widths))

    def _tojson(
        self,
        x: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        if indent is None and separators is None:
            return json.dumps(x, ensure_ascii=ensure_ascii, sort_keys=sort_keys)
        self.budget.require_chars(_width(indent))
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        chunks, num_chars = [], 0
        for chunk in encoder.iterencode(x):
            num_chars += len(chunk)
            self.budget.require_chars(num_chars)
            chunks.append(self.budget.charge(16 + len(chunk), chunk))
        return "".join(chunks)


class _CheckInserter(NodeTransformer):
    """A transformer that inserts checks into a parsed template, as filters that no template can name: `(charge)`."""

    def __init__(self, sandbox: TemplateSandbox) -> None:
        self._sandbox = sandbox

    def _check(self, name: str, node: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
        return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno, environment=self._sandbox)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        test: Any = node.test
        if test is not None:
            node.test = self._check("(charge)", test, nodes.Const(16))
        return self.visit_Macro(node)

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock | nodes.Block | nodes.For) -> nodes.Node:
        num_bytes = 64 + sum(map(_created_bytes, node.find_all(nodes.Node)))
        charge = self._check("(charge)", nodes.Const(None, lineno=node.lineno), nodes.Const(num_bytes))
        self.generic_visit(node)
        node.body = [nodes.ExprStmt(charge, lineno=node.lineno), *node.body]
        return node

    visit_CallBlock = visit_Block = visit_Macro

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if node.value == math.inf:  # `1e400` has no literal in the compiled Python code
            return nodes.Mul(nodes.Const(1e308), nodes.Const(10), lineno=node.lineno, environment=self._sandbox)
        return node

    def visit_Call(self, node: nodes.Call | nodes.Filter | nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = self._check("(items)", node.dyn_args)
        return node

    visit_Filter = visit_Test = visit_Call

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._check("(concat)", nodes.Tuple(node.nodes, "load", lineno=node.lineno))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._check("(created)", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = self._check("(admit)", node.key)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = self._check("(admit)", node.expr)
        for operand in node.ops:
            operand.expr = self._check("(container)" if operand.op in ("in", "notin") else "(admit)", operand.expr)
        return node

    def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> nodes.Node:
        raise TemplateFailed("`{% autoescape %}` is not available in chat templates")


def _created_bytes(node: nodes.Node) -> int:
    """Estimate the bytes that a statement or literal creates; results of operators and calls are charged later."""
    if isinstance(node, nodes.Macro | nodes.CallBlock | nodes.For):
        return 512
    return 64 if isinstance(node, nodes.List | nodes.Tuple | nodes.Dict) else 8
