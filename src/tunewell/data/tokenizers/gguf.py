"""Rebuild the tokenizer of a GGUF file, with the same ids as llama.cpp."""

import re
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tunewell.core.errors import UserError
from tunewell.data.rows.conversation import is_list
from tunewell.data.tokenizers import sentencepiece
from tunewell.data.tokenizers.loaded import LoadedTokenizer
from tunewell.data.tokenizers.parts import add_tokens, load_table, prepend_bos
from tunewell.data.tokenizers.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, SentencePieceModel
from tunewell.model_files.gguf import read_metadata

_SPECIAL_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # this spelling is part of the format
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
# Default special tokens of llama.cpp for SentencePiece vocabularies that do not define them.
_LLAMA_DEFAULTS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}


def load_gguf(path: Path) -> LoadedTokenizer:
    """Read the tokenizer of a GGUF file; raise UserError for an unsupported model or pre-tokenizer."""
    metadata = read_metadata(path)
    kind = metadata.get("tokenizer.ggml.model")
    tokens, types = _vocabulary(metadata, path)
    special = _special_tokens(metadata, tokens, {} if kind != "llama" else _LLAMA_DEFAULTS)
    if kind == "gpt2":
        backend = _byte_level(metadata, tokens, types, path)
        adds_bos = _pre_tokenizer(metadata, path).get("adds_bos", False)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(metadata, tokens, types, path), True
    else:
        raise UserError(
            f"`{path.name}` has a tokenizer of type `{kind}`, which is not supported"
            if kind
            else f"`{path.name}` has no tokenizer",
            where=f"{path}: tokenizer.ggml.model",
            fix="use the folder of the model with its `tokenizer.json`",
        )
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)) and "bos_token" in special
    if adds_bos:
        prepend_bos(backend, special["bos_token"])
    template = metadata.get("tokenizer.chat_template")
    return LoadedTokenizer(backend, special, template if isinstance(template, str) and template else None, adds_bos)


def _vocabulary(metadata: dict[str, Any], path: Path) -> tuple[list[str], list[int]]:
    texts = metadata.get("tokenizer.ggml.tokens")
    if not is_list(texts) or not texts or not isinstance(texts[0], str):
        raise UserError(f"`{path.name}` has no vocabulary", where=f"{path}: tokenizer.ggml.tokens")
    tokens: list[str] = [text or f"[EMPTY_{index}]" for index, text in enumerate(texts)]
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) < len(tokens) or len(set(tokens)) != len(tokens):
        raise UserError(f"`{path.name}` has a damaged vocabulary", where=f"{path}: tokenizer.ggml.tokens")
    if re.search("[\udc80-\udcff]", "".join(tokens)):
        raise UserError(f"`{path.name}` has tokens that are not text", where=f"{path}: tokenizer.ggml.tokens")
    always = frozenset(load_table("pretokenizers")["always_control"])
    return tokens, [CONTROL if token in always else kind for token, kind in zip(tokens, types, strict=False)]


def _special_tokens(metadata: dict[str, Any], tokens: list[str], defaults: dict[str, int]) -> dict[str, str]:
    ids = {name: metadata.get(f"tokenizer.ggml.{key}", defaults.get(name)) for name, key in _SPECIAL_IDS.items()}
    known = range(len(tokens))
    return {name: tokens[number] for name, number in ids.items() if isinstance(number, int) and number in known}


def _byte_level(metadata: dict[str, Any], tokens: list[str], types: list[int], path: Path) -> Tokenizer:
    pre = _pre_tokenizer(metadata, path)
    texts: list[str] = metadata.get("tokenizer.ggml.merges") or []
    merges = [_pair(text) for text in texts]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    for left, right in merges:
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise UserError(
                f"`{path.name}` merges `{left}` and `{right}`, which are not in its vocabulary",
                where=f"{path}: tokenizer.ggml.merges",
            )
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre.get("whole_words_first", False)))
    patterns: list[str] = load_table("pretokenizers")["splits"][pre["splits"]]
    # The byte-level step has a built-in GPT-2 pattern, which splits a fifth faster.
    is_built_in = patterns[-1] == load_table("pretokenizers")["splits"]["gpt2"][0]
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns[: -1 if is_built_in else None]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=is_built_in)]
    )
    backend.decoder = decoders.ByteLevel()
    add_tokens(backend, sentencepiece.marker_tokens(tokens, types, is_normalized=False))
    return backend


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge[1:].partition(" ")
    return merge[:1] + left, right


def _pre_tokenizer(metadata: dict[str, Any], path: Path) -> dict[str, Any]:
    name = metadata.get("tokenizer.ggml.pre") or "default"
    known = load_table("pretokenizers")["names"].get(name)
    if known is None:
        raise UserError(
            f"`{path.name}` uses the pre-tokenizer `{name}`, which is not supported",
            where=f"{path}: tokenizer.ggml.pre",
            fix="use the folder of the model with its `tokenizer.json`",
        )
    return known


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], types: list[int], path: Path) -> Tokenizer:
    scores: list[float] = metadata.get("tokenizer.ggml.scores") or []
    if len(scores) < len(tokens):
        raise UserError(f"`{path.name}` lacks scores for some tokens", where=f"{path}: tokenizer.ggml.scores")
    model = SentencePieceModel(
        pieces=tokens,
        scores=[float(score) for score in scores[: len(tokens)]],
        # llama.cpp treats pieces of all other types like ordinary ones when it merges.
        types=[kind if kind in (UNKNOWN, CONTROL, USER_DEFINED, BYTE) else NORMAL for kind in types],
        is_bpe=True,
        byte_fallback=BYTE in types,
        add_dummy_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        remove_extra_whitespaces=False,
    )
    return sentencepiece.build_tokenizer(model, after_markers="space")
