"""The word lists of scoring, such as the names of months and units: `words.txt`."""

from functools import cache
from importlib.resources import files


def read_lines(name: str) -> list[str]:
    """Return the lines of a data file of this package, without comments."""
    text = files("tunewell.scoring").joinpath(name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if not line.startswith("#")]


@cache
def word_lists() -> dict[str, list[str]]:
    """Return the words of each list."""
    parts = [line.partition(": ") for line in read_lines("words.txt")]
    return {name: words.split() for name, _, words in parts}


def word_set(name: str) -> frozenset[str]:
    """Return the words of one list."""
    return frozenset(word_lists()[name])
