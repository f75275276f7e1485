"""Words looked up in a table give the ids that the tokenizer gives to the whole text."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tunewell.data.encoding.text_backends import WordTable, build_word_table

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_GPT2_WORDS = {**_BYTE_LEVEL, "use_regex": True}
_NO_WORDS = {**_BYTE_LEVEL, "use_regex": False}


def _split(pattern: str, **changed: object) -> dict[str, object]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False, **changed}


def _in_turn(*steps: dict[str, object]) -> dict[str, object]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


KNOWN = {
    "gpt2": _GPT2_WORDS,
    "smollm": _in_turn({"type": "Digits", "individual_digits": True}, _GPT2_WORDS),
    "digits by expression": _in_turn(_split(r"\p{N}"), _GPT2_WORDS),
    "llama3": _in_turn(_split(_LLAMA3), _NO_WORDS),
    "qwen2": _in_turn(_split(_LLAMA3.replace("{1,3}", "")), _NO_WORDS),
}
UNKNOWN = {
    "digits in threes": _in_turn({"type": "Digits", "individual_digits": False}, _GPT2_WORDS),
    "a space before": {**_GPT2_WORDS, "add_prefix_space": True},
    "other classes": _in_turn(_split(r"\p{Lu}?\p{Ll}+|."), _NO_WORDS),
    "classes in classes": _in_turn(_split(r"[\p{L}&&[a-z]]+|."), _NO_WORDS),
    "groups": _in_turn(_split(r"(a|b)+|\s+"), _NO_WORDS),
    "removed words": _in_turn(_split(r"\s+", behavior="Removed"), _NO_WORDS),
    "white space": {"type": "Whitespace"},
}


@pytest.fixture(scope="module")
def model() -> dict[str, object]:
    """A byte-level vocabulary with some merges in it, spaces and line ends among them."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["it's 12 o'clock,  she'll   say;\n\n\n  we've 3,456 left...\t\tDON'T"] * 9, trainer)
    return json.loads(tokenizer.to_str())


def _with(model: dict[str, object], pre_tokenizer: object, **more: object) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps({**model, "pre_tokenizer": pre_tokenizer, **more}))


@pytest.mark.parametrize("name", KNOWN)
@given(text=st.text(st.characters(max_codepoint=127), max_size=60) | st.text("a1 '\n\tsS.,", max_size=40))
def test_words_from_the_table_are_the_tokenizers_ids(model: dict[str, object], name: str, text: str) -> None:
    backend = _with(model, KNOWN[name])
    table = build_word_table(backend)
    assert table is not None
    whole = backend.encode(text, add_special_tokens=False).ids
    assert table.encode([text, text]) == [whole, whole]


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_tokenizer_that_cuts_otherwise_has_no_table(model: dict[str, object], name: str) -> None:
    assert build_word_table(_with(model, UNKNOWN[name])) is None


def test_a_tokenizer_with_tokens_of_its_own_in_text_has_no_table(model: dict[str, object]) -> None:
    added = {"id": 5, "content": "it's", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    assert build_word_table(_with(model, _GPT2_WORDS, added_tokens=[{**added, "special": False}])) is None


def test_a_text_that_the_pattern_leaves_gaps_in_is_not_encoded(model: dict[str, object]) -> None:
    table = build_word_table(_with(model, _in_turn(_split(r"\p{L}+"), _NO_WORDS)))
    assert table is not None
    assert table.encode(["abc", "abc!"]) == [table.encode(["abc"])[0], None]


def test_the_table_forgets_before_it_fills_the_memory(
    model: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunewell.data.encoding.text_backends._MAX_WORDS", 3)
    table = build_word_table(_with(model, _GPT2_WORDS))
    assert isinstance(table, WordTable)
    texts = [f" word{letter}" for letter in "abcdefgh"] + [" " + "x" * 100]
    assert table.encode(texts) == [table.encode([text])[0] for text in texts]
    assert len(table) <= 3
