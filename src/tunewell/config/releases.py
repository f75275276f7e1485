"""Which release of transformers, TRL and PEFT knows which key: `foreign_releases.toml`, written by a script in `docs`.

`diagnose` checks the keys of a config against it, `migrate` chooses the defaults of a release, and the config loader
names the owner of a key that tunewell does not have.
"""

import re
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Release = tuple[int, ...]
Versions = Mapping[str, Release]
_STATED = re.compile(
    r"(?<![\w./-])[`'\"]?(transformers|trl|peft)[`'\"]?"
    r"(?:\s{0,2}==\s{0,2}|\s{0,2}[Vv]ersion:?\s{0,2}|[ \t]{1,60})v?(\d{1,2}\.\d{1,3})(?:\.\d{1,4})?(?![\w.]*[-\w]/)"
)


@dataclass(frozen=True)
class KeyTable:
    """The keys of one config, each with its first and its last release."""

    library: str
    first: Release
    last: Release
    keys: dict[str, tuple[Release, Release]]

    def known(self, release: Release | None) -> list[str]:
        """Return the keys that a release knows; without a release, all."""
        if release is None:
            return list(self.keys)
        at = min(max(release, self.first), self.last)
        return [key for key, (first, last) in self.keys.items() if first <= at <= last]


@cache
def load_tables() -> dict[str, KeyTable]:
    """Return the table of each config, a class of transformers, TRL or PEFT."""
    tables: dict[str, KeyTable] = {}
    raw = tomllib.loads(Path(__file__).with_name("foreign_releases.toml").read_text(encoding="utf-8"))
    for name, entry in raw.items():
        library, releases = entry.pop("library"), entry.pop("releases")
        spans = {keys: _span(releases if span == "all" else span) for span, keys in entry.items()}
        keys = {key: span for keys, span in spans.items() for key in keys.split()}
        tables[name] = KeyTable(library, *_span(releases), keys)
    return tables


def owner_of(key: str) -> str | None:
    """Return the first config that has a key, like `TrainingArguments (transformers)`."""
    return next((f"{name} ({table.library})" for name, table in load_tables().items() if key in table.keys), None)


def _span(text: str) -> tuple[Release, Release]:
    first, last = (parse_release(part) for part in text.split())
    return first, last


def parse_release(text: str) -> Release:
    """Return the release of a text like `4.36`."""
    return tuple(map(int, text.split(".")))


def stated_versions(text: str) -> dict[str, Release]:
    """Return the releases that a text states. A library with two different ones is left out."""
    found: dict[str, set[Release]] = defaultdict(set)
    for name, release in _STATED.findall(text[:200_000]):
        found[name].add(parse_release(release))
    return {name: releases.pop() for name, releases in found.items() if len(releases) == 1}
