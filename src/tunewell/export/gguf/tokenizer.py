"""Convert a tokenizer to GGUF metadata: tokens, types, scores or merges, pre-tokenizer and special ids."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from tokenizers import Tokenizer

from tunewell.core.errors import UserError
from tunewell.data.masking.turns import probe_reply_frame
from tunewell.data.templates.chat_template import ChatTemplate, TemplateFailed
from tunewell.data.tokenizers.load import LoadedTokenizer
from tunewell.data.tokenizers.parts import load_table
from tunewell.data.tokenizers.sentencepiece import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)
from tunewell.export.gguf.architecture import llama_cpp_facts

_SPECIAL_TYPES = frozenset({UNKNOWN, CONTROL, USER_DEFINED})
_NEVER_STRIPPING = frozenset({"<unk>", "<s>", "<|endoftext|>"})


@dataclass(frozen=True)
class GgufVocabulary:
    """The tokenizer metadata of a GGUF file."""

    fields: dict[str, Any]
    """Tokens with their types, merges or scores, special ids and settings, by the key in the file."""
    adds_bos: bool
    """Whether llama.cpp adds the BOS token to every text that does not begin with it."""
    strips_spaces: bool
    """Whether special tokens strip the spaces after them, as in Phi 3."""
    notes: tuple[str, ...]
    """Notes for the user on what llama.cpp does differently."""


def read_vocabulary(tokenizer: LoadedTokenizer, *, num_rows: int, config: dict[str, Any]) -> GgufVocabulary:
    """Convert the tokenizer of a model with `num_rows` embeddings; raise UserError if token ids would differ."""
    if tokenizer.vocab_size > num_rows:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size:,} tokens, but the model's embedding has only {num_rows:,} rows",
            where=tokenizer.source,
            fix="use the tokenizer of this model, or resize the embedding for the added tokens",
        )
    fields, notes = _read_tokens(tokenizer, num_rows)
    if len(set(fields["tokens"])) != len(fields["tokens"]):
        raise _not_convertible("the vocabulary contains a token twice, which llama.cpp rejects")
    strips_spaces, strip_notes = _find_space_stripping(tokenizer, fields["tokens"], fields["token_type"])
    adds_bos, bos_notes = _find_adds_bos(tokenizer)
    eos = tokenizer.backend.token_to_id(tokenizer.special_tokens.get("eos_token", ""))
    fields |= _special_ids(tokenizer, config, num_rows)
    # Both are always written, because defaults differ.
    fields |= {
        "add_bos_token": adds_bos,
        "add_eos_token": eos is not None and tokenizer.backend.encode("a").ids[-1:] == [eos],
    }
    named = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    if tokenizer.chat_template:
        named["tokenizer.chat_template"] = tokenizer.chat_template
    return GgufVocabulary(named, adds_bos, strips_spaces, (*notes, *strip_notes, *bos_notes))


def _read_tokens(tokenizer: LoadedTokenizer, num_rows: int) -> tuple[dict[str, Any], list[str]]:
    """Return the tokens by id with their types, and merges or scores, as fields; and notes."""
    pipeline = orjson.loads(tokenizer.backend.to_str())
    kind = pipeline["model"]["type"]
    if kind != "BPE":
        raise _not_convertible(f"a tokenizer of type `{kind}` cannot be written as GGUF")
    if "'type': 'ByteLevel'" in str(pipeline["pre_tokenizer"]):
        return _byte_level_tokens(tokenizer, pipeline, num_rows)
    return _sentencepiece_tokens(tokenizer, pipeline, num_rows)


def _special_ids(tokenizer: LoadedTokenizer, config: dict[str, Any], num_rows: int) -> dict[str, int]:
    """Return the fields with the ids of the special tokens, from the tokenizer or from the model's config."""
    fields = llama_cpp_facts()["special_ids"]
    found: dict[str, int] = {}
    for name in fields.keys() - {"eot"}:
        number = tokenizer.backend.token_to_id(tokenizer.special_tokens.get(f"{name}_token", ""))
        config_id = config.get(f"{name}_token_id")
        number = config_id if number is None and isinstance(config_id, int) else number
        if number is not None and 0 <= number < num_rows:
            found[name] = number
    end = _ask_template(tokenizer, lambda template: probe_reply_frame(template, tokenizer.added).end_marker)
    end_id = tokenizer.backend.token_to_id(end) if end else None
    if end_id is not None and end_id != found.get("eos"):
        found["eot"] = end_id
    return {field: found[name] for name, field in fields.items() if name in found}


def _find_adds_bos(tokenizer: LoadedTokenizer) -> tuple[bool, list[str]]:
    """Return whether llama.cpp must add the BOS token, with notes. It must if conversations begin with it.

    The tokenizer's setting applies to plain text only. llama.cpp has one setting for plain text and conversations. If
    the chat template omits the token, the model was trained without it.
    """
    bos = tokenizer.special_tokens.get("bos_token")
    if not tokenizer.adds_bos or not bos:
        return tokenizer.adds_bos, []
    if (_ask_template(tokenizer, _render_hello) or bos).startswith(bos):
        return True, []
    return False, [f"the chat template begins without `{bos}`, so llama.cpp will not add it, not even to plain text"]


def _ask_template(tokenizer: LoadedTokenizer, ask: Callable[[ChatTemplate], str | None]) -> str | None:
    """Return the answer of a chat template, or None if there is no template, or none that renders a conversation."""
    try:
        source = tokenizer.chat_template
        return None if source is None else ask(ChatTemplate(source, special_tokens=tokenizer.special_tokens))
    except (UserError, TemplateFailed):
        return None  # the model may not be a chat model; it is exported anyway


def _render_hello(template: ChatTemplate) -> str:
    return template.render([{"role": "user", "content": "Hello"}], add_generation_prompt=True)


def _find_space_stripping(tokenizer: LoadedTokenizer, texts: list[str], types: list[int]) -> tuple[bool, list[str]]:
    """Return whether special tokens strip the spaces after them as in Phi 3, the only case that llama.cpp supports."""
    stripping = {text for text, facts in tokenizer.added.items() if facts.rstrip}
    special = {text for text, kind in zip(texts, types, strict=True) if kind in _SPECIAL_TYPES}
    if stripping and stripping == (special | {"</s>"}) - _NEVER_STRIPPING and set(texts) >= _NEVER_STRIPPING:
        return True, []
    unsupported = sorted(stripping | {text for text, facts in tokenizer.added.items() if facts.lstrip})
    return False, [f"`{unsupported[0]}` strips the spaces around it, but not in llama.cpp"] if unsupported else []


# Tokens: text and type of each id, with merges or scores.

_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
# Some tokenizers do not declare these tokens as special. llama.cpp would then parse them in user text.
_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL)
# Scores that llama.cpp's converter uses for tokens that no merge produces.
_ADDED_SCORE, _UNUSED_SCORE = -1000.0, -10000.0


def _byte_level_tokens(
    tokenizer: LoadedTokenizer, pipeline: dict[str, Any], num_rows: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the tokens of a byte-level tokenizer, with its merges."""
    name, notes = _find_pre_tokenizer(pipeline, tokenizer.backend)
    texts, types = _texts_and_types(tokenizer, num_rows)
    merges = [" ".join(pair) for pair in pipeline["model"]["merges"]]
    if any(merge.count(" ") != 1 for merge in merges):
        raise _not_convertible("a BPE merge contains a space, which GGUF cannot store")
    return {"model": "gpt2", "pre": name, "tokens": texts, "token_type": types, "merges": merges}, notes


def _sentencepiece_tokens(
    tokenizer: LoadedTokenizer, pipeline: dict[str, Any], num_rows: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the tokens of a SentencePiece tokenizer, with a score for each that is derived from the merges."""
    prefix, notes = _find_space_prefix(pipeline)
    if _FIRST_TEXT_ONLY in notes and (_ask_template(tokenizer, _render_hello) or "").startswith(tuple(tokenizer.added)):
        # All text of a conversation is behind a special token.
        prefix, notes = False, [f"{_FIRST_TEXT_ONLY}. So the file adds none, not even to plain text"]
    texts, types = _texts_and_types(tokenizer, num_rows)
    has_bytes = bool(pipeline["model"].get("byte_fallback"))
    unknown = pipeline["model"].get("unk_token") or tokenizer.special_tokens.get("unk_token")
    types = [_piece_type(text, kind, has_bytes, unknown) for text, kind in zip(texts, types, strict=True)]
    known = _derive_scores(pipeline["model"], types)
    scores = [
        _UNUSED_SCORE if kind == UNUSED else known.get(text, _ADDED_SCORE)
        for text, kind in zip(texts, types, strict=True)
    ]
    fields = {"model": "llama", "pre": "default", "tokens": texts, "token_type": types, "scores": scores}
    return fields | {"add_space_prefix": prefix}, notes


def _texts_and_types(tokenizer: LoadedTokenizer, num_rows: int) -> tuple[list[str], list[int]]:
    """Return the text and type of every id; embedding rows without a token get an unused token."""
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
            # llama.cpp searches for these tokens before it replaces spaces.
            token, kind = token.replace(_SPACE, " "), USER_DEFINED
        tokens.append(token)
        types.append(kind)
    return tokens, types


def _piece_type(token: str, kind: int, has_bytes: bool, unknown: str | None) -> int:
    if token == unknown:
        return UNKNOWN
    return BYTE if has_bytes and kind == NORMAL and _BYTE_PIECE.fullmatch(token) else kind


# Byte-level vocabularies: llama.cpp has a fixed list of pre-tokenizers. Tokenizers with other ones are rejected.

_DIGITS = {True: r"\p{N}", False: r"\p{N}+"}
# A pattern with this ending matches the whole text without gaps, so removing the text between matches removes nothing.
_GAPLESS_ENDING = r"\s+"


def _facts() -> dict[str, Any]:
    return llama_cpp_facts()["pretokenizers"]


def _find_pre_tokenizer(pipeline: dict[str, Any], backend: Tokenizer) -> tuple[str, list[str]]:
    """Return llama.cpp's name of a pre-tokenizer, and notes on differences from the tokenizer."""
    notes = _normalizer_notes(pipeline["normalizer"])
    patterns = [_normalize_spelling(pattern) for pattern in _patterns(pipeline["pre_tokenizer"])]
    splits, is_approximate = _find_splits(patterns)
    if is_approximate:
        notes.append("llama.cpp splits words differently at capital letters outside A to Z")
    ignores_merges = bool(pipeline["model"].get("ignore_merges"))
    for is_whole in (ignores_merges, not ignores_merges):
        name = _facts()["names"].get(f"{splits} whole" if is_whole else splits)
        if name is not None and (is_whole == ignores_merges or _merges_make_every_token(pipeline, backend)):
            return name, notes
    raise _unsupported(f"`ignore_merges` is {str(ignores_merges).lower()} with the split pattern `{splits}`")


def _normalizer_notes(normalizer: dict[str, Any] | None) -> list[str]:
    steps = _steps(normalizer, "normalizers")
    others = [step["type"] for step in steps if step["type"] != "NFC"]
    if others:
        raise _unsupported(f"the normalizer `{others[0]}` is not supported")
    return ["llama.cpp does not normalise text to NFC; the tokenizer does"] if steps else []


def _patterns(pre_tokenizer: dict[str, Any] | None) -> list[str]:
    """Return the split patterns in the order they are applied."""
    *splits, last = _steps(pre_tokenizer, "pretokenizers") or [{"type": "nothing"}]
    if last["type"] != "ByteLevel":
        raise _unsupported(f"the last step is `{last['type']}`, not `ByteLevel`")
    if last.get("add_prefix_space"):
        raise _unsupported("a space is added before the text (`add_prefix_space`)")
    patterns = [_pattern(step) for step in splits]
    return [*patterns, load_table("pretokenizers")["splits"]["gpt2"][0]] if last.get("use_regex", True) else patterns


def _pattern(step: dict[str, Any]) -> str:
    if step["type"] == "Digits":
        return _DIGITS[step["individual_digits"]]
    if step["type"] == "Split" and "Regex" in step["pattern"]:
        pattern, behaviour = step["pattern"]["Regex"], (step["behavior"], step["invert"])
        if behaviour == ("Isolated", False):
            return pattern
        if behaviour == ("Removed", True) and pattern.endswith(_GAPLESS_ENDING):
            return pattern
    raise _unsupported(f"the step `{step['type']}` is not supported")


def _normalize_spelling(pattern: str) -> str:
    for spelling, normal in _facts()["spellings"]:
        pattern = pattern.replace(spelling, normal)
    return pattern


def _find_splits(patterns: list[str]) -> tuple[str, bool]:
    for name, known in load_table("pretokenizers")["splits"].items():
        if patterns == [_normalize_spelling(pattern) for pattern in known]:
            return name, False
    approximate = _facts()["approximate"].get(patterns[0]) if len(patterns) == 1 else None
    if approximate is None:
        shown = " then ".join(f"`{pattern[:60]}`" for pattern in patterns) or "empty"
        raise _unsupported(f"the split pattern is {shown}")
    return approximate, True


def _merges_make_every_token(pipeline: dict[str, Any], backend: Tokenizer) -> bool:
    """Return True if the merges produce every token, so that `ignore_merges` changes nothing."""
    model = {**pipeline["model"], "ignore_merges": False}
    bare = {**pipeline, "model": model, "normalizer": None, "pre_tokenizer": None, "added_tokens": []}
    plain = Tokenizer.from_str(json.dumps(bare | {"post_processor": None, "decoder": None}))
    added = backend.get_added_tokens_decoder()
    texts = [text for text, number in model["vocab"].items() if number not in added]
    return all(len(encoded.ids) == 1 for encoded in plain.encode_batch(texts, add_special_tokens=False))


def _unsupported(why: str) -> UserError:
    return _not_convertible(f"llama.cpp does not support this tokenizer's pre-tokenizer: {why}")


def _not_convertible(what: str) -> UserError:
    return UserError(what, where="tokenizer.json", fix="export the model as `adapter` or `merged`")


# SentencePiece vocabularies: a score for each piece, and the handling of spaces.

_SPACE = "▁"
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_PREPEND = {"type": "Prepend", "prepend": _SPACE}
# A split that does not change the token ids, because no token crosses it.
_HARMLESS_SPLIT = f"{_SPACE}*[^{_SPACE}]+|{_SPACE}+"
_FIRST_TEXT_ONLY = (
    "llama.cpp adds a space to the text after every special token; the tokenizer adds it to the first text only"
)


def _find_space_prefix(pipeline: dict[str, Any]) -> tuple[bool, list[str]]:
    """Return whether a leading space is added to text, and notes on what llama.cpp does differently."""
    steps = _steps(pipeline["normalizer"], "normalizers")
    splits = [step for step in _steps(pipeline["pre_tokenizer"], "pretokenizers") if not _is_harmless(step)]
    if not splits and steps == [_PREPEND, _REPLACE]:
        return True, []
    if not splits and steps == [_REPLACE]:
        return False, []
    if not splits and len(steps) == 2 and steps[1] == _REPLACE and (label := _dummy_space(steps[0])):
        return True, [] if "behind markers" in label else [_FIRST_TEXT_ONLY]
    if not steps and len(splits) == 1 and splits[0]["type"] == "Metaspace" and splits[0]["replacement"] == _SPACE:
        scheme = splits[0].get("prepend_scheme", "always")
        return scheme != "never", [_FIRST_TEXT_ONLY] if scheme == "first" else []
    shown = ", ".join(step["type"] for step in [*steps, *splits]) or "nothing"
    raise _not_convertible(f"llama.cpp would treat spaces differently from this tokenizer ({shown})")


def _derive_scores(model: dict[str, Any], types: list[int]) -> dict[str, float]:
    """Return scores that make llama.cpp merge pieces in the order of the merges.

    llama.cpp merges any two pieces that form a third, the best score first. So every split of a piece into two pieces
    must be among the merges; raise UserError otherwise. User-defined symbols are found before any merge, so their
    merges are ignored.
    """
    vocabulary, merges = model["vocab"], [(left, right) for left, right in model["merges"]]
    known_merges = set(merges)
    pieces = {piece for piece, number in vocabulary.items() if types[number] == NORMAL}
    for piece in pieces:
        pairs = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        missing = next((p for p in pairs if p[0] in pieces and p[1] in pieces and p not in known_merges), None)
        if missing is not None:
            raise _not_convertible(
                f"the merges are not those of a SentencePiece model: llama.cpp would merge {missing[0]!r} and "
                f"{missing[1]!r}, but the tokenizer does not"
            )
    ranks_of: dict[str, list[int]] = {}
    for rank, (left, right) in enumerate(merges):
        if left in pieces and right in pieces:
            ranks_of.setdefault(left + right, []).append(rank)
    scores: dict[str, float] = {}
    end, group = -1, 0
    for piece, ranks in sorted(ranks_of.items(), key=lambda item: item[1][0]):
        # Pieces with overlapping merge ranks share a score.
        group += ranks[0] > end
        end = max(end, ranks[-1])
        scores[piece] = float(1 - group)
    return {piece: scores.get(piece, float(-group)) for piece in vocabulary}


def _is_harmless(step: dict[str, Any]) -> bool:
    if step["type"] != "Split":
        return False
    return step["pattern"] == {"String": " "} or step["pattern"] == {"Regex": _HARMLESS_SPLIT}


def _dummy_space(step: dict[str, Any]) -> str | None:
    pattern = step.get("pattern", {}).get("Regex", "") if step["type"] == "Replace" else ""
    found = re.match(r"\(\?#(dummy space[^)]*)\)", pattern)
    return found[1] if found and step["content"] == _SPACE else None


def _steps(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return the steps of a nested sequence as one list."""
    if step is None:
        return []
    return [inner for outer in step[name] for inner in _steps(outer, name)] if step["type"] == "Sequence" else [step]
