"""Describe a model folder's tokenizer in the fields from which llama.cpp rebuilds it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tunewell.core.errors import UserError
from tunewell.core.model_files import SENTENCEPIECE_FILE
from tunewell.data.templates import ChatTemplate, TemplateFailed
from tunewell.data.tokenizer import LoadedTokenizer, load_tokenizer
from tunewell.data.tokenizer_files.sentencepiece_model import CONTROL, UNKNOWN, USER_DEFINED, read_model
from tunewell.data.turn_frame import probe
from tunewell.exporting.gguf_words import Words, byte_level_words, piece_words

_NAMED = ("bos", "eos", "unk", "sep", "pad", "mask")
_MARKED = frozenset({UNKNOWN, CONTROL, USER_DEFINED})
_NEVER_GREEDY = frozenset({"<unk>", "<s>", "<|endoftext|>"})


@dataclass(frozen=True)
class GgufVocabulary:
    """What a GGUF file says about its tokenizer."""

    words: Words
    special_ids: dict[str, int]
    """`bos`, `eos`, `eot` and so on: those there are."""
    adds_bos: bool
    """To every text, unless a template has written it."""
    adds_eos: bool
    swallows_spaces: bool
    """Whether markers swallow the spaces behind them, by the one rule that llama.cpp has for that."""
    chat_template: str | None
    notes: tuple[str, ...]
    """What llama.cpp does otherwise, for people to read."""


def read_vocabulary(folder: Path, *, num_rows: int, config: dict[str, Any]) -> GgufVocabulary:
    """Read a folder's tokenizer for a model with so many rows; UserError where llama.cpp would give other ids."""
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > num_rows:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size:,} ids, but the model's table only {num_rows:,} rows",
            where=str(folder),
            fix="the tokenizer is another model's, or tokens were added without a row for each: export them together",
        )
    words = _words(tokenizer, folder, num_rows)
    if len(set(words.tokens)) != len(words.tokens):
        raise UserError("the vocabulary lists a token twice, which llama.cpp does not open", where=str(folder))
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
        f"a tokenizer of kind `{kind}` cannot be written as GGUF",
        where=str(folder),
        fix="export the model as `adapter` or `merged`",
    )


def _special_ids(tokenizer: LoadedTokenizer, config: dict[str, Any], num_rows: int) -> dict[str, int]:
    """Name the special tokens by the tokenizer, and where it is silent by the model's config."""
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
    """Find the token that ends a reply by rendering the template; None where it has no template or no such token."""
    if tokenizer.chat_template is None:
        return None
    try:
        template = ChatTemplate(tokenizer.chat_template, special_tokens=tokenizer.special_tokens)
        return tokenizer.backend.token_to_id(probe(template, tokenizer.added).end_marker)
    except (UserError, TemplateFailed):
        # Such a model is exported all the same: it may be no chat model at all.
        return None


def _adding_bos(tokenizer: LoadedTokenizer) -> tuple[bool, list[str]]:
    """Say whether llama.cpp is to put the first token in front of texts, as conversations begin with it or do not.

    The tokenizer's own rule is for plain text. llama.cpp knows one rule for both, and a template that leaves the token
    out was learned without it.
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
    return False, [f"the chat template begins without `{bos}`, so llama.cpp is told to add none, to plain text neither"]


def _swallowing(tokenizer: LoadedTokenizer, words: Words) -> tuple[bool, list[str]]:
    """Tell whether markers swallow spaces as those of Phi 3 do, which is all that llama.cpp knows about it."""
    greedy = {text for text, facts in tokenizer.added.items() if facts.rstrip}
    marked = {token for token, kind in zip(words.tokens, words.types, strict=True) if kind in _MARKED}
    if greedy and greedy == (marked | {"</s>"}) - _NEVER_GREEDY and set(words.tokens) >= _NEVER_GREEDY:
        return True, []
    strange = sorted(greedy | {text for text, facts in tokenizer.added.items() if facts.lstrip})
    return False, [f"`{strange[0]}` swallows spaces beside it, in llama.cpp it does not"] if strange else []
