"""Encode ASCII text with a cache of words, which is faster than byte-level BPE on a few cores.

A tokenizer splits a text into words and each word into tokens, independently of other words. Therefore each word has to
be encoded only once. This module supports the split patterns of the GPT-2, Llama 3 and Qwen families for ASCII text,
for which Python's `re` and the tokenizer's regular expressions agree. The tokenizer encodes all other text.
"""

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any

import orjson
import tokenizers

_MAX_WORD_CHARS = 64
_MAX_WORDS = 400_000
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# If digits are split off first, a run of spaces before a digit is one piece, so no space is joined with the digit.
_GPT2_WITHOUT_DIGITS = r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"  # fmt: skip
_DIGITS: tuple[dict[str, Any], ...] = (
    {"type": "Digits", "individual_digits": True},
    {"type": "Split", "pattern": {"Regex": r"\p{N}"}, "behavior": "Isolated", "invert": False},
)
# Matches escapes, negated classes, capturing groups (`findall` would return the group), and single characters.
_PARTS = re.compile(r"\\[pP]\{\^?\w+\}|\\.|\[\^?|&&|\(\?|.", re.DOTALL)
_SAME_IN_PYTHON = {r"\s", r"\S", r"\r", r"\n", r"\t", r"\/", r"\-", r"\.", r"\'"}
_ASCII_CLASSES = {r"\p{L}": "A-Za-z", r"\p{N}": "0-9"}


class WordTable(dict[str, list[int]]):
    """The token ids of all words seen so far."""

    def __init__(self, pattern: re.Pattern[str], backend: tokenizers.Tokenizer) -> None:
        """Create a table from the pattern that splits ASCII text and a tokenizer that does not split text."""
        self._pattern = pattern
        self._backend = backend

    def encode(self, texts: Sequence[str]) -> list[list[int] | None]:
        """Return the ids of ASCII texts, with None for each text that the pattern does not cover."""
        findall, ids_of = self._pattern.findall, self.__getitem__
        ids: list[list[int] | None] = []
        for text in texts:
            words = findall(text)
            covers = sum(map(len, words)) == len(text)
            ids.append(list(chain.from_iterable(map(ids_of, words))) if covers else None)
        return ids

    def __missing__(self, word: str) -> list[int]:
        [encoding] = self._backend.encode_batch_fast([word], add_special_tokens=False)
        ids = encoding.ids
        if len(word) <= _MAX_WORD_CHARS:
            if len(self) >= _MAX_WORDS:
                self.clear()
            self[word] = ids
        return ids


def build_word_table(config: dict[str, Any]) -> WordTable | None:
    """Return the word table of a tokenizer configuration, or None if its split pattern is not supported."""
    if config["added_tokens"] or config["model"]["type"] != "BPE" or config["model"].get("dropout"):
        return None
    pattern = _split_pattern(config["pre_tokenizer"])
    if pattern is None:
        return None
    whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    backend = tokenizers.Tokenizer.from_str(orjson.dumps(config | {"pre_tokenizer": whole}).decode())
    return WordTable(pattern, backend)


def _split_pattern(step: dict[str, Any] | None) -> re.Pattern[str] | None:
    steps = [] if step is None else step["pretokenizers"] if step["type"] == "Sequence" else [step]
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    *before, last = steps
    if last["use_regex"] and not before:
        return _to_ascii_pattern(_GPT2)
    if last["use_regex"] and len(before) == 1 and before[0] in _DIGITS:
        return _to_ascii_pattern(_GPT2_WITHOUT_DIGITS)
    if not last["use_regex"] and len(before) == 1 and before[0]["type"] == "Split":
        [split] = before
        if split["behavior"] == "Isolated" and not split["invert"] and "Regex" in split["pattern"]:
            return _to_ascii_pattern(split["pattern"]["Regex"])
    return None


def _to_ascii_pattern(pattern: str) -> re.Pattern[str] | None:
    """Translate a regular expression of the tokenizer to Python's `re` for ASCII, or return None if not possible."""
    parts: list[str] = []
    in_class = False
    for part in _PARTS.findall(pattern):
        if part in _ASCII_CLASSES:
            part = _ASCII_CLASSES[part] if in_class else f"[{_ASCII_CLASSES[part]}]"
        elif part[0] == "\\" and part not in _SAME_IN_PYTHON:
            return None
        elif part[0] == "[":
            if in_class:
                return None
            in_class = True
        elif part == "]":
            in_class = False
        elif part == "&&" or part == "(":
            return None
        parts.append(part)
    return re.compile("".join(parts), re.ASCII)
