"""Filters and tests of templates, each asking the meter before it does something large."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jinja2.filters import FILTERS
from jinja2.runtime import Context
from jinja2.tests import TESTS
from jinja2.utils import pass_context

from tunewell.data.templates.jinja_limits import SMALL, Meter, TemplateFailed, TemplateLimit
from tunewell.data.templates.jinja_operations import (
    LINE_ENDS,
    Args,
    Kwargs,
    argument,
    ask_percent,
    ask_replace,
    ask_steps,
)

MAX_COUNT = 100_000
"""The sandbox's own limit for `range`, used wherever else a filter takes a count."""

_FREE = frozenset(("count", "d", "default", "first", "last", "length"))
_LAZY = frozenset(("batch", "items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice"))
"""These hand items on, and neither compare nor print them."""
_LARGEST = {
    **dict.fromkeys(("int", "float", "urlize"), 2_000),
    **dict.fromkeys(("pprint", "striptags", "wordwrap", "xmlattr"), 50_000),
    **dict.fromkeys(("title", "urlencode", "wordcount"), 1_000_000),
}
"""Characters that these may be given: they are slow, some quadratic, and nothing can stop them half-way."""


def bounded_filters(meter: Meter) -> dict[str, Callable[..., Any]]:
    """Give the template language's filters, bounded by a meter, with `tojson` as transformers has it."""
    filters = {name: _bounded_filter(meter, name, function) for name, function in FILTERS.items()}
    return filters | {"tojson": _tojson(meter), "random": _random}


def bounded_tests(meter: Meter) -> dict[str, Callable[..., Any]]:
    """Give the template language's tests, bounded by a meter."""
    compare = (
        "eq",
        "==",
        "equalto",
        "ne",
        "!=",
        "gt",
        ">",
        "greaterthan",
        "ge",
        ">=",
        "lt",
        "<",
        "lessthan",
        "le",
        "<=",
    )
    tests: dict[str, Callable[..., Any]] = dict(TESTS)
    for name in compare:
        tests[name] = _compared(meter, tests[name])
    for name in ("odd", "even", "divisibleby"):
        tests[name] = _computed(meter, tests[name])
    for name in ("lower", "upper"):
        tests[name] = _printed(meter, tests[name])
    tests["in"] = lambda value, container: meter.flat(value) in meter.within(container)
    tests["filter"] = lambda value: isinstance(value, str) and value in FILTERS
    tests["test"] = lambda value: isinstance(value, str) and value in TESTS
    return tests


def _random(*_: Any, **__: Any) -> None:
    raise TemplateFailed("`random` is not available in chat templates: equal rows must give equal text")


def _compared(meter: Meter, test: Callable[..., bool]) -> Callable[..., bool]:
    def compare(value: Any, *others: Any) -> bool:
        if type(value) is str and len(value) < SMALL:
            return test(value, *map(meter.flat, others))
        return test(meter.flat(value), *map(meter.flat, others))

    return compare


def _computed(meter: Meter, test: Callable[..., bool]) -> Callable[..., bool]:
    def compute(value: Any, *others: Any) -> bool:
        if isinstance(value, str):
            raise TypeError("a text is neither odd, even nor divisible")
        return test(meter.number(value), *map(meter.number, others))

    return compute


def _printed(meter: Meter, test: Callable[..., bool]) -> Callable[..., bool]:
    return lambda value: test(meter.printable(value))


def _tojson(meter: Meter) -> Callable[..., str]:
    @pass_context
    def tojson(
        context: Context,
        x: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        size = meter.weigh(x)
        if indent:
            width = indent if isinstance(indent, int) else len(indent)
            meter.room(width)
            meter.spend(32 * size)  # with an indent, JSON is written by Python code, item by item
            if size * width > meter.limit:
                meter.room(size + width * _num_indents(x))
        if separators and (marks := sum(len(mark) for mark in separators)) > 16:
            meter.room(size * marks)
        return meter.keep(
            json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        )

    return tojson


def _num_indents(value: Any) -> int:
    """Count how often `json.dumps` writes its indent: each item on a line of its own, once per level around it."""
    total, depth, level = 0, 1, [value]
    while level:
        containers = [item for item in level if isinstance(item, list | tuple | dict)]
        level = [part for item in containers for part in (item.values() if isinstance(item, dict) else item)]
        total += depth * (len(level) + len(containers))
        depth += 1
    return total


def _bounded_filter(meter: Meter, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if name in _FREE:
        return function
    ask = _ASK.get(name)
    largest = _LARGEST.get(name)
    is_lazy = name in _LAZY
    given = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    def bounded(context: Context, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not is_lazy:
            value = meter.flat(value)
        if args:
            args = tuple(map(meter.flat, args))
        if kwargs:
            kwargs = {key: meter.flat(item) for key, item in kwargs.items()}
        if largest and (meter.weigh(value) + meter.weigh(args) + meter.weigh(kwargs)) > largest:
            raise TemplateLimit(f"`{name}` takes at most {largest:,} characters in chat templates")
        if ask:
            value = ask(meter, value, args, kwargs)
        if given is None:
            return meter.keep(function(value, *args, **kwargs))
        first = context if given == "context" else context.eval_ctx if given == "eval_context" else context.environment
        return meter.keep(function(first, value, *args, **kwargs))

    return bounded


def _ask_count(meter: Meter, value: Any, args: Args, kwargs: Kwargs) -> Any:
    for number in (*args, *kwargs.values()):
        if isinstance(number, int) and abs(number) > MAX_COUNT:
            raise TemplateLimit(f"a filter that counts to more than {MAX_COUNT:,}")
    return value


def _ask_indent(meter: Meter, value: Any, args: Args, kwargs: Kwargs) -> Any:
    width = argument(args, kwargs, 0, "width", 4)
    width = width if isinstance(width, int) else len(str(width))
    text = str(value)
    if (len(text) + 1) * max(width, 1) > meter.limit:
        meter.room(len(text) + (1 + sum(text.count(end) for end in LINE_ENDS)) * width)
    return value


def _ask_wordwrap(meter: Meter, value: Any, args: Args, kwargs: Kwargs) -> Any:
    meter.room((len(str(value)) + 1) * (1 + len(str(argument(args, kwargs, 2, "wrapstring", "")))))
    return _ask_count(meter, value, args, kwargs)


def _ask_replace(meter: Meter, value: Any, args: Args, kwargs: Kwargs) -> Any:
    text = str(value)
    ask_replace(meter, text, str(argument(args, kwargs, 0, "old")), str(argument(args, kwargs, 1, "new")))
    meter.spend(len(text))
    return value


def _ask_join(meter: Meter, value: Any, args: Args, kwargs: Kwargs) -> Any:
    items = meter.gather(value)
    num_items = len(items) if hasattr(items, "__len__") else 0
    meter.spend(8 * num_items)
    meter.room(meter.weigh(items) + num_items * len(str(argument(args, kwargs, 0, "d", ""))))
    return items


def _ask_format(meter: Meter, value: Any, args: Args, kwargs: Kwargs) -> Any:
    ask_percent(meter, str(value), kwargs or args)
    return value


def _ask_trim(meter: Meter, value: Any, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(value, str) and isinstance(chars := argument(args, kwargs, 0, "chars"), str):
        ask_steps(meter, len(value) * len(chars))
    return value


def _ask_round(meter: Meter, value: Any, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(value, str | list | tuple):
        raise TypeError("only numbers can be rounded")
    if isinstance(precision := argument(args, kwargs, 0, "precision", 0), int) and abs(precision) > 300:
        raise TemplateLimit("a number rounded to more than 300 digits")
    return meter.number(value)


def _ask_order(meter: Meter, value: Any, args: Args, kwargs: Kwargs) -> Any:
    items = meter.gather(value)
    num_items = len(items) if hasattr(items, "__len__") else 0
    meter.spend(meter.weigh(items) + 256 * num_items)
    return items


def _ask_sum(meter: Meter, value: Any, args: Args, kwargs: Kwargs) -> Any:
    items = meter.gather(value)
    if not isinstance(argument(args, kwargs, 1, "start", 0), int | float):
        meter.room(meter.weigh(items) * len(items))
    return items


def _ask_list(meter: Meter, value: Any, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(value, str | range):
        meter.spend((80 if isinstance(value, str) else 48) * len(value))
    return _ask_count(meter, value, args, kwargs)


_ASK: dict[str, Callable[[Meter, Any, Args, Kwargs], Any]] = {
    **dict.fromkeys(("center", "truncate"), _ask_count),
    **dict.fromkeys(("batch", "list", "slice"), _ask_list),
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort", "unique"), _ask_order),
    "format": _ask_format,
    "indent": _ask_indent,
    "join": _ask_join,
    "replace": _ask_replace,
    "round": _ask_round,
    "sum": _ask_sum,
    "trim": _ask_trim,
    "wordwrap": _ask_wordwrap,
}
