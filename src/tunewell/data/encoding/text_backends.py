"""Copies of a tokenizer for plain text, and a cache of words that is faster than byte-level BPE on a few cores.

A tokenizer splits a text into words and each word into tokens, independently of other words. Therefore each word has to
be encoded only once. The cache supports the split patterns of the GPT-2, Llama 3 and Qwen families for ASCII text,
for which Python's `re` and the tokenizer's regular expressions agree. A copy of the tokenizer encodes all other text.
"""

import re
from collections.abc import Sequence
from itertools import chain, product
from typing import Any, Literal, get_args

import orjson
from tokenizers import Tokenizer, models, pre_tokenizers

from tunewell.data.encoding.segments import Position

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

    def __init__(self, pattern: re.Pattern[str], backend: Tokenizer) -> None:
        """Create a table from the pattern that splits ASCII text and a tokenizer that does not split text."""
        self._pattern = pattern
        self._backend = backend

    def encode(self, texts: Sequence[str]) -> list[list[int] | None]:
        """Return the ids of texts, with None for each text that is not ASCII or that the pattern does not cover."""
        findall, ids_of = self._pattern.findall, self.__getitem__
        ids: list[list[int] | None] = []
        for text in texts:
            words = findall(text) if text.isascii() else []
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


def build_word_table(backend: Tokenizer) -> WordTable | None:
    """Return the word table of a tokenizer, or None if its split pattern is not supported."""
    if backend.get_added_tokens_decoder() or not isinstance(backend.model, models.BPE) or backend.model.dropout:
        return None
    pattern = _split_pattern(_state(backend.pre_tokenizer))
    if pattern is None:
        return None
    whole = Tokenizer(backend.model)
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return WordTable(pattern, whole)


def _split_pattern(step: dict[str, Any] | None) -> re.Pattern[str] | None:
    steps = step["pretokenizers"] if step and step["type"] == "Sequence" else [step]
    match steps:
        case [{"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}]:
            return _to_ascii_pattern(_GPT2)
        case [first, {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}] if first in _DIGITS:
            return _to_ascii_pattern(_GPT2_WITHOUT_DIGITS)
        case [
            {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": str(pattern)}},
            {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
        ]:
            return _to_ascii_pattern(pattern)
        case _:
            return None


def _to_ascii_pattern(pattern: str) -> re.Pattern[str] | None:
    """Translate a regular expression of the tokenizer to Python's `re` for ASCII, or return None if not possible."""
    parts: list[str] = []
    in_class = False
    for part in _PARTS.findall(pattern):
        letters = _ASCII_CLASSES.get(part)
        is_unknown = part[0] == "\\" and letters is None and part not in _SAME_IN_PYTHON
        if is_unknown or part in ("&&", "(") or (part[0] == "[" and in_class):
            return None
        if part[0] in "[]":
            in_class = part[0] == "["
        parts.append(part if letters is None else letters if in_class else f"[{letters}]")
    return re.compile("".join(parts), re.ASCII)


Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
_WITHOUT_VOCABULARY: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
}


class TextBackends:
    """Copies of a tokenizer, by position, that never encode text as special tokens. Equal copies are shared."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        # Copies never match special tokens. Other added tokens are copied with their ids.
        self._has_text_tokens = any(not token.special for token in backend.get_added_tokens_decoder().values())
        normalizer, pre_tokenizer = _state(backend.normalizer), _state(backend.pre_tokenizer)
        self.keeps_text = normalizer is None or normalizer.get("normalizers") == []
        """Whether text is encoded without normalisation."""
        kind: Any = normalizer["type"] if normalizer else None
        self.form: Form | None = kind if kind in get_args(Form) else None
        """The Unicode normalisation form, if the tokenizer does no other normalisation."""
        self.unknown_id: int | None = _unknown_id(backend.model)
        self._parts: dict[Position, bytes] = {}
        for position in (Position(*flags) for flags in product((True, False), repeat=3)):
            steps = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}
            parts = {name: _for_position(position, step) for name, step in steps.items()}
            self._parts[position] = orjson.dumps(parts)
        self._copies: dict[bytes, Tokenizer] = {}
        is_one = len(set(self._parts.values())) == 1 and (self.keeps_text or self.form is not None)
        self.word_table = build_word_table(self[Position(True, True)]) if is_one else None
        """A faster encoder for ASCII text, if available; Unicode normalisation does not change ASCII."""

    def __getitem__(self, position: Position) -> Tokenizer:
        parts = self._parts[position]
        if parts not in self._copies:
            self._copies[parts] = self._copy(orjson.loads(parts))
        return self._copies[parts]

    def _copy(self, parts: dict[str, Any]) -> Tokenizer:
        """Return a copy without a post-processor, which would exclude spaces from the offsets of a token."""
        if self._has_text_tokens:
            config = orjson.loads(self._backend.to_str()) | {"truncation": None, "padding": None}
            copy = Tokenizer.from_str(orjson.dumps(config | {"post_processor": None} | parts).decode())
        else:
            # The copy shares the vocabulary. Parsing a vocabulary of 49,000 tokens again takes 90 ms.
            copy = Tokenizer(self._backend.model)
            steps = Tokenizer.from_str(orjson.dumps(_WITHOUT_VOCABULARY | parts).decode())
            if steps.normalizer is not None:
                copy.normalizer = steps.normalizer
            if steps.pre_tokenizer is not None:
                copy.pre_tokenizer = steps.pre_tokenizer
        copy.encode_special_tokens = True
        return copy


def _state(step: Any) -> dict[str, Any] | None:
    """Return a normalizer or a pre-tokenizer as JSON, or None."""
    return None if step is None else orjson.loads(step.__getstate__())


def _unknown_id(model: Any) -> int | None:
    if isinstance(model, models.Unigram):
        return orjson.loads(model.__getstate__()).get("unk_id")
    return None if model.unk_token is None else model.token_to_id(model.unk_token)


def _for_position(position: Position, step: dict[str, Any] | None) -> dict[str, Any] | None:
    """Remove the steps for the start or end of a text if a segment is not at the start or end."""
    match step:
        case {"type": "Sequence"}:
            name = next(key for key in ("normalizers", "pretokenizers") if key in step)
            steps = (_for_position(position, part) for part in step[name])
            return {**step, name: [part for part in steps if part is not None]}
        case {"type": "Metaspace"} if position.is_continued or (
            step.get("prepend_scheme") == "first" and not position.is_first
        ):
            return {**step, "prepend_scheme": "never"}
        case {"type": "Prepend"} if position.is_continued:
            return None
        case {"type": "ByteLevel"} if position.is_continued:
            return {**step, "add_prefix_space": False}
        case {"type": "Replace", "pattern": {"Regex": str(pattern)}}:
            is_at_start, is_at_end = pattern.removeprefix("(?#dummy space)").startswith(r"\A"), pattern.endswith(r"\z")
            return None if (is_at_start and not position.is_first) or (is_at_end and not position.is_last) else step
        case _:
            return step
