"""Convert a tokenizer to GGUF metadata: tokens, types, scores or merges, pre-tokenizer and special ids."""

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import orjson
from tokenizers import Tokenizer

from tunewell.core.errors import UserError
from tunewell.core.model_files import SENTENCEPIECE_FILE
from tunewell.data.masking.reply_frame import probe_reply_frame
from tunewell.data.templates.chat_template import ChatTemplate, TemplateFailed
from tunewell.data.tokenizers.load import LoadedTokenizer, load_tokenizer
from tunewell.data.tokenizers.parts import load_table
from tunewell.data.tokenizers.sentencepiece import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePieceModel,
    read_model,
)

# SentencePiece vocabularies: a score for each piece, and the treatment of spaces.

_SPACE = "▁"
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_PREPEND = {"type": "Prepend", "prepend": _SPACE}
# Cuts that change no id: nothing crosses them, or spaces are gone when they look for one.
_HARMLESS_CUT = f"{_SPACE}*[^{_SPACE}]+|{_SPACE}+"
_FIRST_TEXT_ONLY = (
    "llama.cpp adds a space to the text after every special token, the tokenizer before the first text only"
)


def space_prefix(pipeline: dict[str, Any]) -> tuple[bool, list[str]]:
    """Return whether text gets a leading space, and notes on what llama.cpp does differently."""
    steps = _steps(pipeline["normalizer"], "normalizers")
    cuts = [step for step in _steps(pipeline["pre_tokenizer"], "pretokenizers") if not _is_harmless(step)]
    if not cuts and steps == [_PREPEND, _REPLACE]:
        return True, []
    if not cuts and steps == [_REPLACE]:
        return False, []
    if not cuts and len(steps) == 2 and steps[1] == _REPLACE and (mark := _dummy_space(steps[0])):
        return True, [] if "behind markers" in mark else [_FIRST_TEXT_ONLY]
    if not steps and len(cuts) == 1 and cuts[0]["type"] == "Metaspace" and cuts[0]["replacement"] == _SPACE:
        scheme = cuts[0].get("prepend_scheme", "always")
        return scheme != "never", [_FIRST_TEXT_ONLY] if scheme == "first" else []
    shown = ", ".join(step["type"] for step in [*steps, *cuts]) or "nothing"
    raise UserError(
        f"llama.cpp would treat spaces differently from this tokenizer ({shown})",
        where="tokenizer.json",
        fix="export the model as `adapter` or `merged`",
    )


def scores_of(vocabulary: dict[str, int], merges: list[tuple[str, str]], types: list[int]) -> dict[str, float]:
    """Return scores with which llama.cpp joins pieces in the order of the merges.

    It joins any two pieces that make a third, the best score first. So every way to make a piece has to be among the
    merges: UserError where one is not. Symbols that the model's author defined are found in text before any joining,
    and merges that build on them are passed over.
    """
    listed = set(merges)
    joined = {piece for piece, number in vocabulary.items() if types[number] == NORMAL}
    for piece in joined:
        pairs = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        missing = next((p for p in pairs if p[0] in joined and p[1] in joined and p not in listed), None)
        if missing is not None:
            raise UserError(
                f"the merges are not those of a SentencePiece model: llama.cpp would merge {missing[0]!r} and "
                f"{missing[1]!r}, the tokenizer does not",
                where="tokenizer.json",
                fix="export the model as `adapter` or `merged`",
            )
    spans: dict[str, list[int]] = {}
    for rank, (left, right) in enumerate(merges):
        if left in joined and right in joined:
            spans.setdefault(left + right, []).append(rank)
    scores: dict[str, float] = {}
    end, group = -1, 0
    for piece, ranks in sorted(spans.items(), key=lambda item: item[1][0]):
        # Merges that lie between each other belong to pieces of one score.
        group += ranks[0] > end
        end = max(end, ranks[-1])
        scores[piece] = float(1 - group)
    return {piece: scores.get(piece, float(-group)) for piece in vocabulary}


def _is_harmless(step: dict[str, Any]) -> bool:
    if step["type"] != "Split":
        return False
    return step["pattern"] == {"String": " "} or step["pattern"] == {"Regex": _HARMLESS_CUT}


def _dummy_space(step: dict[str, Any]) -> str | None:
    pattern = step.get("pattern", {}).get("Regex", "") if step["type"] == "Replace" else ""
    found = re.match(r"\(\?#(dummy space[^)]*)\)", pattern)
    return found[1] if found and step["content"] == _SPACE else None


def _steps(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return [inner for own in step[name] for inner in _steps(own, name)] if step["type"] == "Sequence" else [step]


# Byte-level vocabularies: recognise the pre-tokenizer, and return its name in llama.cpp. Unknown ones are rejected.

_DIGITS = {True: r"\p{N}", False: r"\p{N}+"}
# A pattern with this end leaves no gap, so keeping its matches and keeping everything is the same.
_TAKES_THE_REST = r"\s+"


@cache
def _facts() -> dict[str, Any]:
    text = files("tunewell.export.gguf").joinpath("pretokenizers.json").read_text(encoding="utf-8")
    return json.loads(text)


def name_byte_level(pipeline: dict[str, Any], backend: Tokenizer) -> tuple[str, list[str]]:
    """Return llama.cpp's name of a byte-level pre-tokenizer, and notes on where it only comes close."""
    notes = _normalizer_notes(pipeline["normalizer"])
    patterns = [_one_spelling(pattern) for pattern in _patterns(pipeline["pre_tokenizer"])]
    splits, is_near = _splits(patterns)
    if is_near:
        notes.append("llama.cpp splits words differently at capital letters outside A to Z")
    is_whole_first = bool(pipeline["model"].get("ignore_merges"))
    for is_whole in (is_whole_first, not is_whole_first):
        name = _facts()["chosen"].get(f"{splits} whole" if is_whole else splits)
        if name is not None and (is_whole == is_whole_first or _merges_make_every_token(pipeline, backend)):
            return name, notes
    raise _refusal(f"`ignore_merges` is {'true' if is_whole_first else 'false'} with the split pattern `{splits}`")


def _normalizer_notes(normalizer: dict[str, Any] | None) -> list[str]:
    steps = _flat_steps(normalizer, "normalizers")
    strange = [step["type"] for step in steps if step["type"] != "NFC"]
    if strange:
        raise _refusal(f"it uses the normalizer `{strange[0]}`")
    return ["llama.cpp does not normalise text to NFC; the tokenizer does"] if steps else []


def _patterns(pre_tokenizer: dict[str, Any] | None) -> list[str]:
    """List the patterns that cut, one after the other."""
    *cuts, last = _flat_steps(pre_tokenizer, "pretokenizers") or [{"type": "nothing"}]
    if last["type"] != "ByteLevel":
        raise _refusal(f"its last step is `{last['type']}`")
    if last.get("add_prefix_space"):
        raise _refusal("it adds a space before the text (`add_prefix_space`)")
    patterns = [_pattern(step) for step in cuts]
    return [*patterns, load_table("pretokenizers")["splits"]["gpt2"][0]] if last.get("use_regex", True) else patterns


def _pattern(step: dict[str, Any]) -> str:
    if step["type"] == "Digits":
        return _DIGITS[step["individual_digits"]]
    if step["type"] == "Split" and "Regex" in step["pattern"]:
        pattern, behaviour = step["pattern"]["Regex"], (step["behavior"], step["invert"])
        if behaviour == ("Isolated", False):
            return pattern
        if behaviour == ("Removed", True) and pattern.endswith(_TAKES_THE_REST):
            return pattern
    raise _refusal(f"its step `{step['type']}` is not supported")


def _one_spelling(pattern: str) -> str:
    for other, own in _facts()["spelled"]:
        pattern = pattern.replace(other, own)
    return pattern


def _splits(patterns: list[str]) -> tuple[str, bool]:
    for name, known in load_table("pretokenizers")["splits"].items():
        if patterns == [_one_spelling(pattern) for pattern in known]:
            return name, False
    near = _facts()["near"].get(patterns[0]) if len(patterns) == 1 else None
    if near is None:
        shown = " then ".join(f"`{pattern[:60]}`" for pattern in patterns) or "nothing"
        raise _refusal(f"its split pattern is {shown}")
    return near, True


def _merges_make_every_token(pipeline: dict[str, Any], backend: Tokenizer) -> bool:
    """Return True if the merges produce every token, so that `ignore_merges` changes nothing."""
    model = {**pipeline["model"], "ignore_merges": False}
    bare = {**pipeline, "model": model, "normalizer": None, "pre_tokenizer": None, "added_tokens": []}
    plain = Tokenizer.from_str(json.dumps(bare | {"post_processor": None, "decoder": None}))
    added = backend.get_added_tokens_decoder()
    words = [word for word, number in model["vocab"].items() if number not in added]
    return all(len(found.ids) == 1 for found in plain.encode_batch(words, add_special_tokens=False))


def _flat_steps(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return [inner for own in step[name] for inner in _flat_steps(own, name)] if step["type"] == "Sequence" else [step]


def _refusal(why: str) -> UserError:
    return UserError(
        f"llama.cpp does not have this tokenizer's pre-tokenizer: {why}",
        where="tokenizer.json",
        fix="export the model as `adapter` or `merged`",
    )


# Tokens: text and type of each id, and how they are joined.

_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
# Some tokenizers do not call these special, and llama.cpp would let a text spell them.
_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)
# llama.cpp's own converter writes these; nothing is ever joined to such a token.
_ADDED_SCORE, _UNUSED_SCORE = -1000.0, -10000.0


@dataclass(frozen=True)
class Words:
    """The words of a vocabulary, by id, with what it takes to join them."""

    model: Literal["gpt2", "llama"]
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] | None = None
    scores: list[float] | None = None
    space_prefix: bool | None = None
    notes: tuple[str, ...] = ()


def byte_level_words(tokenizer: LoadedTokenizer, pipeline: dict[str, Any], num_rows: int) -> Words:
    """List the words of a byte-level tokenizer: it joins by merges."""
    name, notes = name_byte_level(pipeline, tokenizer.backend)
    tokens, types = _tokens(tokenizer, num_rows)
    merges = [" ".join(pair) for pair in _merges(pipeline)]
    if any(merge.count(" ") != 1 for merge in merges):
        raise UserError(
            "a BPE merge contains a space, which GGUF cannot store",
            where="tokenizer.json",
            fix="export the model as `adapter` or `merged`",
        )
    return Words("gpt2", name, tokens, types, merges=merges, notes=tuple(notes))


def piece_words(
    tokenizer: LoadedTokenizer, pipeline: dict[str, Any], num_rows: int, beside: SentencePieceModel | None
) -> Words:
    """List the words of a tokenizer of SentencePiece's kind: it joins by scores.

    They are those of the `.model` file beside it, where that has the same pieces, else made from the merges.
    """
    prefix, notes = space_prefix(pipeline)
    tokens, types = _tokens(tokenizer, num_rows)
    has_bytes = bool(pipeline["model"].get("byte_fallback"))
    unknown = pipeline["model"].get("unk_token") or tokenizer.special_tokens.get("unk_token")
    types = [_piece_type(token, kind, has_bytes, unknown) for token, kind in zip(tokens, types, strict=True)]
    vocabulary = pipeline["model"]["vocab"]
    if beside is not None and all(vocabulary.get(piece) == number for number, piece in enumerate(beside.pieces)):
        known = dict(zip(beside.pieces, beside.scores, strict=True))
    else:
        known = scores_of(vocabulary, _merges(pipeline), types)
    scores = [
        _UNUSED_SCORE if kind == UNUSED else known.get(token, _ADDED_SCORE)
        for token, kind in zip(tokens, types, strict=True)
    ]
    return Words("llama", "default", tokens, types, scores=scores, space_prefix=prefix, notes=tuple(notes))


def _tokens(tokenizer: LoadedTokenizer, num_rows: int) -> tuple[list[str], list[int]]:
    """Spell every id; rows of the model's table that no token has are filled up with unused ones."""
    by_id = {number: token for token, number in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
    tokens, types = [], []
    for number in range(num_rows):
        token = by_id.get(number)
        facts = tokenizer.added.get(token) if token is not None else None
        if token is None:
            token, kind = f"[PAD{number}]", UNUSED
        elif facts is None:
            kind = NORMAL
        elif facts.special or _LOOKS_SPECIAL.fullmatch(token):
            kind = CONTROL
        else:
            # llama.cpp looks for these in text in which spaces still are spaces.
            token, kind = token.replace(_SPACE, " "), USER_DEFINED
        tokens.append(token)
        types.append(kind)
    return tokens, types


def _piece_type(token: str, kind: int, has_bytes: bool, unknown: str | None) -> int:
    if token == unknown:
        return UNKNOWN
    return BYTE if has_bytes and kind == NORMAL and _BYTE_PIECE.fullmatch(token) else kind


def _merges(pipeline: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in pipeline["model"]["merges"])
    return [(pair[0], pair[1]) for pair in pairs]


_NAMED = ("bos", "eos", "unk", "sep", "pad", "mask")
_MARKED = frozenset({UNKNOWN, CONTROL, USER_DEFINED})
_NEVER_GREEDY = frozenset({"<unk>", "<s>", "<|endoftext|>"})


@dataclass(frozen=True)
class GgufVocabulary:
    """What a GGUF file says about its tokenizer."""

    words: Words
    special_ids: dict[str, int]
    """Ids of `bos`, `eos`, `eot` and so on, if they exist."""
    adds_bos: bool
    """To every text, unless a template has written it."""
    adds_eos: bool
    swallows_spaces: bool
    """Whether special tokens strip the spaces after them, by llama.cpp's only rule for that."""
    chat_template: str | None
    notes: tuple[str, ...]
    """What llama.cpp does differently, as notes for the user."""


def read_vocabulary(folder: Path, *, num_rows: int, config: dict[str, Any]) -> GgufVocabulary:
    """Convert a folder's tokenizer for a model with `num_rows` embeddings; raise UserError if ids would differ."""
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > num_rows:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size:,} ids, but the model's embedding has only {num_rows:,} rows",
            where=str(folder),
            fix="use the tokenizer of this model, or resize the embedding for the added tokens",
        )
    words = _words(tokenizer, folder, num_rows)
    if len(set(words.tokens)) != len(words.tokens):
        raise UserError(
            "the vocabulary contains a token twice, which llama.cpp does not load",
            where=str(folder),
            fix="export the model as `adapter` or `merged`",
        )
    eos = tokenizer.backend.token_to_id(tokenizer.special_tokens.get("eos_token", ""))
    swallows, notes = _swallowing(tokenizer, words)
    adds_bos, more = _adding_bos(tokenizer)
    return GgufVocabulary(
        words=words,
        special_ids=_special_ids(tokenizer, config, num_rows),
        adds_bos=adds_bos,
        adds_eos=eos is not None and tokenizer.backend.encode("a").ids[-1:] == [eos],
        swallows_spaces=swallows,
        chat_template=tokenizer.chat_template,
        notes=(*words.notes, *notes, *more),
    )


def _words(tokenizer: LoadedTokenizer, folder: Path, num_rows: int) -> Words:
    pipeline = orjson.loads(tokenizer.backend.to_str())
    kind = pipeline["model"]["type"]
    if kind == "BPE" and "'type': 'ByteLevel'" in str(pipeline["pre_tokenizer"]):
        return byte_level_words(tokenizer, pipeline, num_rows)
    if kind == "BPE":
        path = folder / SENTENCEPIECE_FILE
        return piece_words(tokenizer, pipeline, num_rows, read_model(path) if path.is_file() else None)
    raise UserError(
        f"a tokenizer of type `{kind}` cannot be written as GGUF",
        where=str(folder),
        fix="export the model as `adapter` or `merged`",
    )


def _special_ids(tokenizer: LoadedTokenizer, config: dict[str, Any], num_rows: int) -> dict[str, int]:
    """Return the ids of special tokens, from the tokenizer or else from the model's config."""
    found: dict[str, int] = {}
    for name in _NAMED:
        number = tokenizer.backend.token_to_id(tokenizer.special_tokens.get(f"{name}_token", ""))
        given = config.get(f"{name}_token_id")
        number = given if number is None and isinstance(given, int) else number
        if number is not None and 0 <= number < num_rows:
            found[name] = number
    end = _end_of_turn(tokenizer)
    return found if end is None or end == found.get("eos") else found | {"eot": end}


def _end_of_turn(tokenizer: LoadedTokenizer) -> int | None:
    """Return the id that ends a reply in the chat template; None without a template or such a token."""
    if tokenizer.chat_template is None:
        return None
    try:
        template = ChatTemplate(tokenizer.chat_template, special_tokens=tokenizer.special_tokens)
        return tokenizer.backend.token_to_id(probe_reply_frame(template, tokenizer.added).end_marker)
    except (UserError, TemplateFailed):
        # Such a model is exported all the same: it may be no chat model at all.
        return None


def _adding_bos(tokenizer: LoadedTokenizer) -> tuple[bool, list[str]]:
    """Return whether llama.cpp must add the BOS token: only if conversations begin with it.

    The tokenizer's own rule is for plain text. llama.cpp has one rule for both, and a model whose template leaves the
    token out was trained without it.
    """
    bos = tokenizer.special_tokens.get("bos_token")
    if not tokenizer.adds_bos or not bos or tokenizer.chat_template is None:
        return tokenizer.adds_bos, []
    try:
        template = ChatTemplate(tokenizer.chat_template, special_tokens=tokenizer.special_tokens)
        text = template.render([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    except (UserError, TemplateFailed):
        return True, []
    if text.startswith(bos):
        return True, []
    return False, [f"the chat template begins without `{bos}`, so llama.cpp will not add it, not even to plain text"]


def _swallowing(tokenizer: LoadedTokenizer, words: Words) -> tuple[bool, list[str]]:
    """Return whether special tokens strip the spaces after them as in Phi 3, the only case llama.cpp has."""
    greedy = {text for text, facts in tokenizer.added.items() if facts.rstrip}
    marked = {token for token, kind in zip(words.tokens, words.types, strict=True) if kind in _MARKED}
    if greedy and greedy == (marked | {"</s>"}) - _NEVER_GREEDY and set(words.tokens) >= _NEVER_GREEDY:
        return True, []
    strange = sorted(greedy | {text for text, facts in tokenizer.added.items() if facts.lstrip})
    return False, [f"`{strange[0]}` strips the spaces around it; in llama.cpp it does not"] if strange else []
