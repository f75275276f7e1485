"""Check the keys of a config against the releases that know them: `config_versions.toml`.

    SFTConfig(max_seq_length=1024)  with trl==0.24      removed after 0.19; use max_length
    LoraConfig(lora_rnak=8)         no release of PEFT knows it

Releases are stated in the text (`trl==0.12.1`, the output of `pip list`), in another file, or by `--with`. Without a
release, only keys that no release knows are reported; the others become notes. An `adapter_config.json` may hold keys
of a fork, so there an unknown key is reported only if it is close to a known one; a Python call refuses any other.
"""

import difflib
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Release = tuple[int, ...]
Versions = Mapping[str, Release]
_STATED = re.compile(
    r"(?<![\w./-])[`'\"]?(transformers|trl|peft)[`'\"]?"
    r"(?:\s{0,2}==\s{0,2}|\s{0,2}[Vv]ersion:?\s{0,2}|[ \t]{1,60})v?(\d{1,2}\.\d{1,3})(?:\.\d{1,4})?(?![\w.]*[-\w]/)"
)
_CALL = re.compile(
    r"\b(?:Seq2Seq)?(TrainingArguments|(?:SFT|DPO|GRPO|KTO|Reward|Lora)Config|(?<!Seq2Seq)(?:SFT|DPO|GRPO)?Trainer)\("
)
_IN_CALL = re.compile(r"(['\"])(?:\\[\s\S]|(?!\1)[^\\])*\1?|#.*|(\w+)\s*=(?!=)|[()\[\]{},]|[^\s'\"#()\[\]{},]+?")
"""Matches a string, a comment, the name of a keyword argument, a bracket or a comma, or another character."""
_ADAPTER = re.compile(r"""(?m)^(?:  )?["']?peft_type["']?\s*:\s*["']?LORA\b""")
_TOP_KEY = re.compile(r"(?m)^(?:  )?[\"']?([A-Za-z_]\w*)[\"']?\s*:")
_LONGEST_CALL = 20_000
_TYPO = 0.88
"""Similarity of a misspelt key."""
_RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "max_seq_length": "max_length",
    "max_prompt_length": "max_length",
    "tokenizer": "processing_class",
    "dataset_text_field": "args=SFTConfig(dataset_text_field=...)",
    "packing": "args=SFTConfig(packing=...)",
    "no_cuda": "use_cpu",
    "warmup_ratio": "warmup_steps",
    "group_by_length": "train_sampling_strategy",
}
"""What to write instead, if the name alone does not lead there."""


@dataclass(frozen=True)
class KeyTable:
    """The keys of one config, each with its first and its last release."""

    library: str
    first: Release
    last: Release
    keys: dict[str, tuple[Release, Release]]

    def has(self, key: str, release: Release | None) -> bool:
        """Return whether a release knows a key; without a release, whether any does."""
        first, last = self.keys.get(key, (self.last, self.first))
        return first <= (min(max(release, self.first), self.last) if release else first) <= last


@dataclass(frozen=True)
class UsedKey:
    """A key in a text, with the configs to which it may belong."""

    name: str
    line: int
    tables: list[KeyTable]
    is_argument: bool
    """Whether it is an argument of a Python call."""

    def known(self, versions: Versions) -> list[str]:
        """Return the keys that the releases know."""
        return [key for table in self.tables for key in table.keys if table.has(key, versions.get(table.library))]

    def instead(self, versions: Versions, *, cutoff: float = 0.8) -> str | None:
        """Return the known key that is closest to this one, if there is any close one."""
        return next(iter(difflib.get_close_matches(self.name, self.known(versions), n=1, cutoff=cutoff)), None)


@dataclass(frozen=True)
class WrongKey:
    """A key that a release does not know. `note` says where it is known, and what is close to it."""

    key: str
    line: int
    note: str
    fact: str
    """The name of the fact that signatures refer to."""


@cache
def load_tables() -> dict[str, KeyTable]:
    """Return the table of each config, a class of transformers, TRL or PEFT."""
    tables: dict[str, KeyTable] = {}
    raw = tomllib.loads(Path(__file__).with_name("config_versions.toml").read_text(encoding="utf-8"))
    for name, entry in raw.items():
        library, releases = entry.pop("library"), entry.pop("releases")
        spans = {keys: parse_span(releases if span == "all" else span) for span, keys in entry.items()}
        keys = {key: span for keys, span in spans.items() for key in keys.split()}
        tables[name] = KeyTable(library, *parse_span(releases), keys)
    return tables


def parse_span(text: str) -> tuple[Release, Release]:
    """Return the first and the last release of a text like `4.36 5.23`."""
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


def wrong_keys(text: str, versions: Versions) -> Iterator[WrongKey]:
    """Yield the keys of all configs in a text that their release does not know."""
    for key in _keys_of(text):
        if any(table.has(key.name, versions.get(table.library)) for table in key.tables):
            continue
        knowing = next((table for table in key.tables if key.name in table.keys), None)
        if knowing is not None:
            is_newer = knowing.library == "peft" and knowing.keys[key.name][0] > versions["peft"]
            fact = "adapter-newer-peft" if is_newer else "renamed-argument"
            yield WrongKey(key.name, key.line, _known_elsewhere(key, knowing, versions), fact)
            continue
        if any(versions.get(table.library, table.first) > table.last for table in key.tables):
            continue  # a release after the table may have added it
        if key.is_argument or key.instead(versions, cutoff=_TYPO) is not None:
            note, close = f"no release of {key.tables[0].library} knows `{key.name}`", key.instead(versions)
            yield WrongKey(key.name, key.line, note + (f"; did you mean `{close}`?" if close else ""), "unknown-key")


def version_hints(text: str, versions: Versions) -> list[str]:
    """Return notes about keys that exist only in some releases of a library whose release is not stated."""
    hints: dict[str, None] = {}
    for key in _keys_of(text):
        table = next((table for table in key.tables if key.name in table.keys), None)
        if table is not None and table.library not in versions and table.keys[key.name][1] < table.last:
            note = _known_elsewhere(key, table, versions)
            hints[f"{note}. `--with {table.library}==VERSION` checks all keys"] = None
    return list(hints)


def _known_elsewhere(key: UsedKey, table: KeyTable, versions: Versions) -> str:
    """Return the releases that know a key, and what to write instead."""
    release = versions.get(table.library)
    first, last = table.keys[key.name]
    begins = "" if first == table.first else f" from {_dotted(first)}"
    ends = "" if last == table.last else f" up to {_dotted(last)}"
    words = f"{table.library} knows `{key.name}`{begins}{ends} only" + (f", not {_dotted(release)}" if release else "")
    instead = _RENAMED.get(key.name) or key.instead(versions)
    return f"{words}; use `{instead}`" if instead and instead != key.name else words


def _dotted(release: Release) -> str:
    return ".".join(map(str, release))


def _keys_of(text: str) -> Iterator[UsedKey]:
    """Yield the keys of Python calls, and of an `adapter_config.json`."""
    for call in _CALL.finditer(text):
        names = [call[1], *(["TrainingArguments"] if call[1].endswith("Config") and call[1] != "LoraConfig" else [])]
        for key in _keywords(text, call.end()):
            yield _used_key(text, key, 2, names, is_argument=True)
    if _ADAPTER.search(text):
        for key in _TOP_KEY.finditer(text):
            yield _used_key(text, key, 1, ["LoraConfig"], is_argument=False)


def _used_key(text: str, found: re.Match[str], group: int, names: list[str], *, is_argument: bool) -> UsedKey:
    line = text.count("\n", 0, found.start(group)) + 1
    return UsedKey(found[group], line, [load_tables()[name] for name in names], is_argument)


def _keywords(text: str, begin: int) -> Iterator[re.Match[str]]:
    """Yield the keyword arguments of a call. `begin` is behind its opening bracket."""
    depth, is_start = 1, True
    for found in _IN_CALL.finditer(text, begin, begin + _LONGEST_CALL):
        if found[2] and is_start:
            yield found
        depth += (found[0] in "([{") - (found[0] in ")]}")
        if not depth:
            return
        is_start = (depth == 1 and found[0] == ",") or (is_start and found[0].startswith("#"))
