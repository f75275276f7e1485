"""Texts of a report made fit to be shown: what cannot be seen is made visible, numbers are written for people."""

import json
import math
import re
from typing import Any

from tunewell.core.units import count

NOTHING = "(nothing)"
FAULT_WORDS = {
    "empty": "says nothing",
    "ends_at_once": "ends at once",
    "loops": "loops",
    "echo": "echoes the question",
    "no_stop": "does not stop",
    "other_language": "other language",
    "control_tokens": "control tokens in the text",
}
_LONGEST = 20_000
"""Characters of one text on a page; a question can be a book, and a page is sent by mail."""

# The zero-width joiners (200C, 200D) belong to Persian, to Indic scripts and to emoji, so they stay as they are.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff"
    "\ufff0-\ufffb\ufffe\uffff\ufdd0-\ufdef\ud800-\udfff\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def visible(value: object) -> str:
    """Write a text so that every character of it is seen and can be encoded; at most 20,000 of them, the rest counted.

    visible("a\\x00b") = a[U+0000]b       visible("a\\u202eb") = a[U+202E]b       visible("\\ud800") = [U+D800]
    """
    text = str(value)
    shown = _UNSEEN.sub(lambda match: f"[U+{ord(match[0]):04X}]", text[:_LONGEST])
    left = len(text) - _LONGEST
    return shown if left <= 0 else f"{shown}\n[{count(left, 'more character')}]"


def on_one_line(value: object) -> str:
    """Write a text like `visible`, with its breaks and runs of white space as single spaces."""
    return " ".join(visible(value).split())


def shortened(text: str, longest: int) -> str:
    """Cut a text that is longer than `longest` characters, and show that it was cut."""
    return text if len(text) <= longest else text[: longest - 1].rstrip() + "\u2026"


def loss(value: float | None) -> str:
    """Write a loss with four digits after the point; what is not finite in words."""
    if value is None:
        return "not measured"
    return unfinite(value) or (f"{value:,.4f}" if abs(value) < 1e6 else f"{value:.3e}")


def perplexity(value: float | None) -> str:
    """Write the perplexity that a loss comes to: e to its power."""
    if value is None or not math.isfinite(value):
        return loss(value)
    power = math.exp(value) if value < 700 else math.inf
    if power < 100:
        return f"{power:.2f}"
    return f"{power:,.0f}" if power < 1e6 else f"{power:.1e}" if power < math.inf else "over 1e304"


def unfinite(value: float) -> str:
    """Give the words for a number that is not finite; an empty text for one that is."""
    if math.isnan(value):
        return "not a number"
    return "" if math.isfinite(value) else "infinite" if value > 0 else "minus infinite"


def setting(value: Any) -> str:
    """Write the value of a setting, whatever it is."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return count(value)
    if isinstance(value, float):
        return unfinite(value) or (f"{value:,.6g}" if 1e-3 <= abs(value) < 1e6 or value == 0 else f"{value:.4g}")
    if isinstance(value, list | tuple) and all(isinstance(entry, str | int | float) for entry in value):
        return ", ".join(setting(entry) for entry in value) or "none"
    if isinstance(value, dict | list | tuple):
        return visible(json.dumps(value, ensure_ascii=False, sort_keys=True, default=str))
    return visible(value)


def in_order(keys: Any, known: Any) -> list[str]:
    """Order keys as they are declared, and those that are not by name, so that equal reports give equal pages."""
    places = {name: place for place, name in enumerate(known)}
    return sorted(keys, key=lambda key: (places.get(key, len(places)), key))
