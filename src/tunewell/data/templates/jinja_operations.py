"""Operators and methods of templates, each asking the meter before it does something large."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from jinja2.sandbox import SandboxedEnvironment, SandboxedFormatter
from markupsafe import EscapeFormatter

from tunewell.data.templates.jinja_limits import Meter, TemplateFailed, TemplateLimit, text_bytes

_SEARCH_STEPS = 500_000_000
"""Length times length, for the searches in C that compare every character with every other in the worst case."""
_PERCENT = re.compile(r"%(?:\([^()]*\))?[-#0 +]*(\*|\d+)?(?:\.(\*|\d+)?)?")
_NATIVE_BINOPS = SandboxedEnvironment.default_binop_table
_NUMBERS = (int, float)
_SEQUENCES = (str, list, tuple)
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def binop(meter: Meter, operator: str, left: Any, right: Any) -> Any:
    """Do `left operator right`, unless the result would be too large."""
    if isinstance(left, _NUMBERS) and isinstance(right, _NUMBERS):
        meter.number(left)
        meter.number(right)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            meter.number(1 << min(int.bit_length(left) * max(right, 0), 1_000_000))
    elif operator == "+":
        if isinstance(left, _SEQUENCES) and isinstance(right, _SEQUENCES):
            meter.room(len(left) + len(right))
    elif operator == "*":
        items, times = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(items, _SEQUENCES) and isinstance(times, int):
            meter.room(len(items) * max(times, 0))
    elif operator == "%" and isinstance(left, str):
        ask_percent(meter, left, right)
    else:
        left, right = meter.flat(left), meter.flat(right)
    return meter.keep(_NATIVE_BINOPS[operator](left, right))


def ask_percent(meter: Meter, pattern: str, values: Any) -> None:
    """Refuse `pattern % values` that would be too large: by widths, or by values that appear again and again."""
    if re.search(r"%\([^()]*\(", pattern):
        raise TemplateLimit("a `%` pattern with brackets inside brackets")
    fields = _PERCENT.findall(pattern)
    if any("*" in field for field in fields):
        raise TemplateLimit("a `%` pattern that takes its width from a value")
    widths = sum(_digits(width) + _digits(precision) for width, precision in fields)
    meter.room(len(pattern) + widths + len(fields) * meter.weigh(values))


def _digits(text: str) -> int:
    return int(text[:12]) if text else 0


class BoundedFormatter(SandboxedFormatter):
    """Format `str.format` patterns with limits on widths, nested values and the whole result."""

    def __init__(self, env: Any, meter: Meter, **kwargs: Any) -> None:
        super().__init__(env, **kwargs)
        self._meter = meter
        self._size = 0

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return super().convert_field(self._meter.printable(value), conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._meter.room(sum(_digits(number) for number in re.findall(r"\d+", format_spec)))
        text = super().format_field(self._meter.printable(value), format_spec)
        self._size += len(text)
        self._meter.room(self._size)
        self._meter.spend(64 + len(text))
        return text


class BoundedEscapeFormatter(BoundedFormatter, EscapeFormatter):
    """The same for text marked safe, whose values are escaped."""


def ask_method(meter: Meter, owner: Any, name: str, args: Args, kwargs: Kwargs) -> Args:
    """Refuse a call of `owner.name` that would be too large, and give back the arguments to call it with."""
    if name in _REFUSED_METHODS:
        raise TemplateFailed(f"`{name}` is not available in chat templates")
    if isinstance(owner, str):
        meter.spend(64 + text_bytes(owner))
        ask = _ASK_TEXT.get(name)
        return ask(meter, owner, args, kwargs) if ask else args
    meter.flat(owner)
    return args


def argument(args: Args, kwargs: Kwargs, place: int, name: str, default: Any = None) -> Any:
    """Find an argument that may have been given by place or by name."""
    return args[place] if len(args) > place else kwargs.get(name, default)


def ask_steps(meter: Meter, steps: int) -> None:
    """Refuse a search that may take this many steps in one piece."""
    if steps > _SEARCH_STEPS:
        raise TemplateLimit("the template searches a very long text for a very long one")
    meter.spend(steps >> 4)


def ask_replace(meter: Meter, text: str, old: Any, new: Any) -> None:
    """Refuse a replacement whose result would be too large."""
    if isinstance(old, str) and isinstance(new, str) and (len(text) + 1) * len(new) > meter.limit:
        meter.room(len(text) + text.count(old) * (len(new) - len(old)))


def _ask_width(meter: Meter, text: str, args: Args, kwargs: Kwargs) -> Args:
    width = argument(args, kwargs, 0, "width")
    if isinstance(width, int):
        meter.room(width)
    return args


def _ask_tabs(meter: Meter, text: str, args: Args, kwargs: Kwargs) -> Args:
    width = argument(args, kwargs, 0, "tabsize", 8)
    if isinstance(width, int):
        meter.room(len(text) + text.count("\t") * max(width, 0))
    return args


def _ask_replace(meter: Meter, text: str, args: Args, kwargs: Kwargs) -> Args:
    ask_replace(meter, text, argument(args, kwargs, 0, "old"), argument(args, kwargs, 1, "new"))
    return args


def _ask_join(meter: Meter, text: str, args: Args, kwargs: Kwargs) -> Args:
    if not args:
        return args
    items = args[0] if isinstance(args[0], _SEQUENCES) else list(meter.gather(args[0]))
    meter.spend(8 * len(items))
    meter.room(sum(len(item) for item in items if isinstance(item, str)) + len(text) * len(items))
    return (items, *args[1:])


def _ask_translate(meter: Meter, text: str, args: Args, kwargs: Kwargs) -> Args:
    table = args[0] if args else None
    values = table.values() if isinstance(table, dict) else table if isinstance(table, list | tuple) else ()
    meter.room(len(text) * max((len(value) for value in values if isinstance(value, str)), default=1))
    return args


def _ask_split(meter: Meter, text: str, args: Args, kwargs: Kwargs) -> Args:
    separator = argument(args, kwargs, 0, "sep")
    if isinstance(separator, str) and separator:
        meter.spend(64 * text.count(separator))
    else:
        _ask_splitlines(meter, text, args, kwargs)
        meter.spend(64 * (text.count(" ") + text.count("\t")))
    return args


def _ask_splitlines(meter: Meter, text: str, args: Args, kwargs: Kwargs) -> Args:
    meter.spend(64 * sum(text.count(end) for end in LINE_ENDS))
    return args


def _ask_striptags(meter: Meter, text: str, args: Args, kwargs: Kwargs) -> Args:
    ask_steps(meter, len(text) * len(text))
    return args


def _ask_rsplit(meter: Meter, text: str, args: Args, kwargs: Kwargs) -> Args:
    return _ask_split(meter, text, _ask_backwards(meter, text, args, kwargs), kwargs)


def _ask_backwards(meter: Meter, text: str, args: Args, kwargs: Kwargs) -> Args:
    wanted = argument(args, kwargs, 0, "sep")
    if isinstance(wanted, str):
        ask_steps(meter, len(text) * len(wanted))
    return args


_ASK_TEXT: dict[str, Callable[[Meter, str, Args, Kwargs], Args]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _ask_width),
    **dict.fromkeys(("rfind", "rindex", "rpartition", "strip", "lstrip", "rstrip"), _ask_backwards),
    "expandtabs": _ask_tabs,
    "replace": _ask_replace,
    "join": _ask_join,
    "translate": _ask_translate,
    "split": _ask_split,
    "rsplit": _ask_rsplit,
    "splitlines": _ask_splitlines,
    "striptags": _ask_striptags,
}
_REFUSED_METHODS = frozenset(("encode", "to_bytes", "from_bytes"))
"""Bytes have methods and codecs of their own, some quadratic; no chat template needs them."""
