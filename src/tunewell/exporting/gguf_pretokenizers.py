"""Recognise how a tokenizer cuts text, step by step, and name it as llama.cpp does; what is not known is refused."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from tokenizers import Tokenizer

from tunewell.core.errors import UserError
from tunewell.data.tokenizer_files.parts import table

_DIGITS = {True: r"\p{N}", False: r"\p{N}+"}
# A pattern with this end leaves no gap, so keeping its matches and keeping everything is the same.
_TAKES_THE_REST = r"\s+"


@cache
def _facts() -> dict[str, Any]:
    text = files("tunewell.exporting").joinpath("gguf_pretokenizers.json").read_text(encoding="utf-8")
    return json.loads(text)


def name_byte_level(pipeline: dict[str, Any], backend: Tokenizer) -> tuple[str, list[str]]:
    """Give llama.cpp's name for the cuts of a byte-level tokenizer, and notes on where it comes only near to them."""
    notes = _normalizer_notes(pipeline["normalizer"])
    patterns = [_one_spelling(pattern) for pattern in _patterns(pipeline["pre_tokenizer"])]
    splits, is_near = _splits(patterns)
    if is_near:
        notes.append("llama.cpp cuts words at capital letters beyond A to Z in another way")
    is_whole_first = bool(pipeline["model"].get("ignore_merges"))
    for is_whole in (is_whole_first, not is_whole_first):
        name = _facts()["chosen"].get(f"{splits} whole" if is_whole else splits)
        if name is not None and (is_whole == is_whole_first or _merges_make_every_token(pipeline, backend)):
            return name, notes
    raise _refusal(f"it takes whole words {'' if is_whole_first else 'not '}before merges, with cuts `{splits}`")


def _normalizer_notes(normalizer: dict[str, Any] | None) -> list[str]:
    steps = _steps(normalizer, "normalizers")
    strange = [step["type"] for step in steps if step["type"] != "NFC"]
    if strange:
        raise _refusal(f"it changes text before it cuts it (`{strange[0]}`)")
    return ["llama.cpp does not bring text into the form NFC first, as the tokenizer does"] if steps else []


def _patterns(pre_tokenizer: dict[str, Any] | None) -> list[str]:
    """List the patterns that cut, one after the other."""
    *cuts, last = _steps(pre_tokenizer, "pretokenizers") or [{"type": "nothing"}]
    if last["type"] != "ByteLevel":
        raise _refusal(f"its last step is `{last['type']}`")
    if last.get("add_prefix_space"):
        raise _refusal("it puts a space in front of text")
    patterns = [_pattern(step) for step in cuts]
    return [*patterns, table("pretokenizers")["splits"]["gpt2"][0]] if last.get("use_regex", True) else patterns


def _pattern(step: dict[str, Any]) -> str:
    if step["type"] == "Digits":
        return _DIGITS[step["individual_digits"]]
    if step["type"] == "Split" and "Regex" in step["pattern"]:
        pattern, behaviour = step["pattern"]["Regex"], (step["behavior"], step["invert"])
        if behaviour == ("Isolated", False):
            return pattern
        if behaviour == ("Removed", True) and pattern.endswith(_TAKES_THE_REST):
            return pattern
    raise _refusal(f"its step `{step['type']}` is not known here")


def _one_spelling(pattern: str) -> str:
    for other, own in _facts()["spelled"]:
        pattern = pattern.replace(other, own)
    return pattern


def _splits(patterns: list[str]) -> tuple[str, bool]:
    for name, known in table("pretokenizers")["splits"].items():
        if patterns == [_one_spelling(pattern) for pattern in known]:
            return name, False
    near = _facts()["near"].get(patterns[0]) if len(patterns) == 1 else None
    if near is None:
        shown = " then ".join(f"`{pattern[:60]}`" for pattern in patterns) or "nothing"
        raise _refusal(f"it cuts text by {shown}")
    return near, True


def _merges_make_every_token(pipeline: dict[str, Any], backend: Tokenizer) -> bool:
    """Tell whether merges alone give every word of the vocabulary, so that taking it whole changes nothing."""
    model = {**pipeline["model"], "ignore_merges": False}
    bare = {**pipeline, "model": model, "normalizer": None, "pre_tokenizer": None, "added_tokens": []}
    plain = Tokenizer.from_str(json.dumps(bare | {"post_processor": None, "decoder": None}))
    added = backend.get_added_tokens_decoder()
    words = [word for word, number in model["vocab"].items() if number not in added]
    return all(len(found.ids) == 1 for found in plain.encode_batch(words, add_special_tokens=False))


def _steps(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return [inner for own in step[name] for inner in _steps(own, name)] if step["type"] == "Sequence" else [step]


def _refusal(why: str) -> UserError:
    return UserError(
        f"llama.cpp does not know how this tokenizer cuts text: {why}",
        where="tokenizer.json",
        fix="export the model as `adapter` or `merged`",
    )
