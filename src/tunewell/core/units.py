"""Format numbers for people: thousands separators, percentages, sizes, durations."""

import math
from collections.abc import Sequence
from datetime import datetime

_BINARY = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def count(number: int, noun: str | None = None, plural: str | None = None) -> str:
    """Return an integer with thousands separators and an optional noun: `1,234 rows`, `1 row`."""
    if noun is None:
        return f"{number:,}"
    return f"{number:,} {noun if abs(number) == 1 else plural or noun + 's'}"


def listed(parts: Sequence[str], most: int = 5, *, noun: str = "") -> str:
    """Return the first parts separated by commas, and the number of the others: `a, b and 3 more files`."""
    rest = len(parts) - most
    more = f" and {count(rest, f'more {noun}') if noun else f'{count(rest)} more'}" if rest > 0 else ""
    return ", ".join(parts[:most]) + more


def percent(share: float, digits: int = 1) -> str:
    """Return a fraction as a percentage. 0% and 100% are returned only if the fraction is exactly 0 or 1.

    percent(0.413) = 41.3%     percent(0.99999) = 99.9%     percent(0.00001) = under 0.1%
    """
    if not math.isfinite(share):
        return "unknown"
    step = 10.0**-digits
    value = round(share * 100, digits)
    if share < 1 and value >= 100:
        value = 100 - step
    if share > 0 and value < step:
        return f"under {step:.{digits}f}%"
    return f"{value:,.{digits}f}%"


def size_bytes(number: int) -> str:
    """Return a size in binary units: `4.0 MiB`."""
    value = float(number)
    for unit in _BINARY:
        # 1,023.95 would be rounded up to 1,024.0; it is printed as 1.0 of the next unit.
        if abs(value) < 1023.95 or unit == _BINARY[-1]:
            return count(number, "byte") if unit == "bytes" else f"{value:,.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable: the last unit has no upper limit")


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: `12 ms`, `3.4 s`, `1 m 15 s`, `1 h 50 m`, `2 d 3 h`."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 0:
        return "-" + duration(-seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} m"
    hours = round(seconds / 3600)
    return f"{hours // 24:,} d {hours % 24} h"


def date(text: str) -> str:
    """Return a date in ISO format for people: `18 November 2026, 18:14 UTC`. Another text is returned unchanged."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{when.day} {when:%B %Y, %H:%M %Z}".strip()
