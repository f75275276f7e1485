"""Check the keys of a config against the releases that know them: `config_versions.txt`.

    SFTConfig(max_seq_length=1024)  with trl==0.24      removed after 0.19; use max_length
    lora_rnak: 8                    in any LLaMA-Factory config: no release knows it

Releases are stated in the text (`trl==0.12.1`, the output of `pip list`), in another file, or by `--with`. Without a
release, only keys that no release knows are reported; the others become notes. YAML and JSON may hold keys of a fork
or a plug-in, so there an unknown key is reported only if it is close to a known one; a Python call refuses any other.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

Release = tuple[int, int]
Versions = Mapping[str, Release]
_FILE = Path(__file__).with_name("config_versions.txt")
_SPAN = re.compile(r"(\w+)(?: (\d+)\.(\d+) (\d+)\.(\d+))?")
_HEAD = re.compile(r"\[(\w+) (\w+) (\d+)\.(\d+) (\d+)\.(\d+)\]")
_STATED = re.compile(
    r"(?<![\w./-])[`'\"]?(transformers|trl|peft|axolotl|llamafactory)[`'\"]?"
    r"(?:\s{0,2}==\s{0,2}|\s{0,2}[Vv]ersion:?\s{0,2}|[ \t]{1,60})v?(\d{1,2})\.(\d{1,3})(?:\.\d{1,4})?(?![\w.]*[-\w]/)"
)
_CALL = re.compile(
    r"\b(?:Seq2Seq)?(TrainingArguments|(?:SFT|DPO|GRPO|KTO|Reward|Lora)Config|(?<!Seq2Seq)(?:SFT|DPO|GRPO)?Trainer)\("
)
_KEYWORD = re.compile(r"\s*(\w+)\s*=(?!=)")
_TOP_KEY = re.compile(r"(?m)^(?:  )?[\"']?([A-Za-z_]\w*)[\"']?\s*:")
_LONGEST_CALL = 20_000
_TYPO = 0.88
"""Similarity of a misspelt key. In 347 example configs of Axolotl and LLaMA-Factory, this finds typos only."""
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
        if key not in self.keys:
            return False
        first, last = self.keys[key]
        return release is None or first <= min(max(release, self.first), self.last) <= last


@dataclass(frozen=True)
class WrongKey:
    """A key that a release does not know. `note` says where it is known, and what is close to it."""

    key: str
    line: int
    note: str
    is_known: bool
    """Whether another release knows it."""
    is_certain: bool
    """Whether the release is stated; otherwise the note is only a hint."""
    is_newer: bool = False
    """Whether only later releases know it."""
    library: str = ""

    @property
    def fact(self) -> str:
        """The name of the fact that signatures refer to."""
        if self.is_newer and self.library == "peft":
            return "adapter-newer-peft"
        return "renamed-argument" if self.is_known else "unknown-key"


@lru_cache(maxsize=1)
def load_tables() -> dict[str, KeyTable]:
    """Return the table of each config: a class of transformers, TRL or PEFT, or the name of a tool."""
    tables: dict[str, KeyTable] = {}
    table: KeyTable | None = None
    for line in _FILE.read_text(encoding="utf-8").splitlines():
        if head := _HEAD.fullmatch(line):
            name, library, *numbers = head.groups()
            a, b, c, d = map(int, numbers)
            table = tables[name] = KeyTable(library, (a, b), (c, d), {})
        elif table is not None and (span := _SPAN.fullmatch(line)):
            numbers = [int(number) for number in span.groups()[1:] if number is not None]
            known = ((numbers[0], numbers[1]), (numbers[2], numbers[3])) if numbers else (table.first, table.last)
            table.keys[span[1]] = known
    return tables


def stated_versions(text: str) -> dict[str, Release]:
    """Return the releases that a text states. A library with two different ones is left out."""
    found: dict[str, set[Release]] = {}
    for name, major, minor in _STATED.findall(text[:200_000]):
        found.setdefault(name, set()).add((int(major), int(minor)))
    return {name: next(iter(releases)) for name, releases in found.items() if len(releases) == 1}


def wrong_keys(text: str, versions: Versions) -> Iterator[WrongKey]:
    """Yield the keys of all configs in a text that their release does not know."""
    for names, key, line, is_call in _keys_of(text):
        tables = [load_tables()[name] for name in names]
        if any(table.has(key, versions.get(table.library)) for table in tables):
            continue
        is_known = any(table.has(key, None) for table in tables)
        is_newer = any(versions.get(table.library, table.first) > table.last for table in tables)
        if not is_known and is_newer:
            continue  # a release after the table may have added it
        if not is_known and not is_call and _closest(key, _known(tables, versions), cutoff=_TYPO) is None:
            continue
        knowing = next((table for table in tables if key in table.keys), tables[0])
        stated = versions.get(knowing.library)
        is_later = is_known and stated is not None and knowing.keys[key][0] > stated
        note = _note(key, knowing, tables, versions)
        yield WrongKey(key, line, note, is_known, is_known and stated is not None, is_later, knowing.library)


def version_hints(text: str, versions: Versions) -> list[str]:
    """Return notes about keys that exist only in some releases of a library whose release is not stated."""
    hints: list[str] = []
    for names, key, *_ in _keys_of(text):
        tables = [load_tables()[name] for name in names]
        table = next((table for table in tables if key in table.keys), None)
        if table is None or table.library in versions:
            continue
        if table.keys[key][1] < table.last:
            hints.append(f"{_note(key, table, tables, versions)}. `--with {table.library}==VERSION` checks all keys")
    return list(dict.fromkeys(hints))


def _note(key: str, table: KeyTable, tables: list[KeyTable], versions: Versions) -> str:
    release = versions.get(table.library)
    known = _known(tables, versions)
    if key in table.keys:
        first, last = table.keys[key]
        begins = "" if first == table.first else f" from {_dotted(first)}"
        ends = "" if last == table.last else f" up to {_dotted(last)}"
        words = f"{table.library} knows `{key}`{begins}{ends} only" + (f", not {_dotted(release)}" if release else "")
        instead = _RENAMED.get(key) if key in _RENAMED else _closest(key, known)
        return f"{words}; use `{instead}`" if instead and instead != key else words
    instead = _closest(key, known)
    return f"no release of {table.library} knows `{key}`" + (f"; did you mean `{instead}`?" if instead else "")


def _known(tables: list[KeyTable], versions: Versions) -> list[str]:
    return [key for table in tables for key in table.keys if table.has(key, versions.get(table.library))]


def _closest(key: str, known: list[str], *, cutoff: float = 0.8) -> str | None:
    return next(iter(difflib.get_close_matches(key, known, n=1, cutoff=cutoff)), None)


def _dotted(release: Release) -> str:
    return f"{release[0]}.{release[1]}"


def _keys_of(text: str) -> Iterator[tuple[list[str], str, int, bool]]:
    """Yield the tables, name and line of each key, and whether it is an argument of a call: Python, YAML and JSON."""
    for call in _CALL.finditer(text):
        names = [call[1], *(["TrainingArguments"] if call[1].endswith("Config") and call[1] != "LoraConfig" else [])]
        for key, at in _keywords(text, call.end()):
            yield names, key, text.count("\n", 0, at) + 1, True
    names = _tool_of(text)
    for match in _TOP_KEY.finditer(text) if names else ():
        if names == ["LoraConfig"] or not match[0].startswith(" "):
            yield names, match[1], text.count("\n", 0, match.start(1)) + 1, False


def _tool_of(text: str) -> list[str]:
    """Return the tables of a YAML or JSON config, or an empty list if its tool is not known."""
    keys = set(_TOP_KEY.findall(text))
    if "peft_type" in keys:
        return ["LoraConfig"] if re.search(r"peft_type[\"']?\s*:\s*[\"']?LORA\b", text) else []
    if "base_model" in keys and keys & {"micro_batch_size", "datasets", "sequence_len"}:
        return ["axolotl"]
    if "finetuning_type" in keys and keys & {"model_name_or_path", "template", "cutoff_len", "dataset"}:
        return ["llamafactory", "TrainingArguments"]
    return []


def _keywords(text: str, begin: int) -> Iterator[tuple[str, int]]:
    """Yield the keyword arguments of a call and their positions. `begin` is behind its opening bracket."""
    depth, quote, is_start = 1, "", True
    at, end = begin, min(len(text), begin + _LONGEST_CALL)
    while at < end and depth:
        character = text[at]
        if quote:
            at += character == "\\"
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote, is_start = character, False
        elif character == "#":
            at = text.find("\n", at)
            if at < 0:
                return
        elif character in "([{":
            depth, is_start = depth + 1, False
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 1:
            is_start = True
        elif is_start and not character.isspace():
            if match := _KEYWORD.match(text, at):
                yield match[1], match.start(1)
            is_start = False
        at += 1
