"""A loaded tokenizer with everything that a corpus needs, computed from its `tokenizers.Tokenizer` when it is used."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import orjson
from tokenizers import AddedToken, Tokenizer, models

from tunewell.core.files import sha256_text, stable_json, write_atomic
from tunewell.data.tokenizers import sentencepiece
from tunewell.data.tokenizers.parts import add_tokens, byte_alphabet, steps_of

Kind = Literal["tokenizer.json", "sentencepiece", "gguf"]

# These bytes never appear in UTF-8 text, so a vocabulary may lack them.
_NEVER_IN_TEXT = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])


@dataclass(frozen=True)
class AddedTokenInfo:
    """The id of an added token, and how it is matched in text."""

    id: int
    special: bool
    lstrip: bool
    rstrip: bool
    single_word: bool


@dataclass(frozen=True, eq=False)
class LoadedTokenizer:
    """A tokenizer with all properties that are needed to prepare a corpus."""

    backend: Tokenizer
    """The tokenizer without truncation and padding. It encodes the text of a special token as that token."""
    special_tokens: dict[str, str]
    """The special tokens that the model defines, by their variable names in chat templates: `bos_token`, ..."""
    chat_template: str | None
    adds_bos: bool
    """Whether plain text starts with the bos token."""
    max_length: int | None = None
    """The `model_max_length` of the files, or None if its value is the huge number that means "no limit"."""
    source: str = ""
    """The name of the model as given by the user."""
    kind: Kind = "tokenizer.json"
    added_by_us: tuple[str, ...] = ()

    @cached_property
    def added(self) -> dict[str, AddedTokenInfo]:
        """The added tokens by their text."""
        return {
            token.content: AddedTokenInfo(number, token.special, token.lstrip, token.rstrip, token.single_word)
            for number, token in sorted(self.backend.get_added_tokens_decoder().items())
        }

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """The ids of the special tokens."""
        return frozenset(facts.id for facts in self.added.values() if facts.special)

    @cached_property
    def vocab_size(self) -> int:
        """The highest id plus one."""
        return max(self.backend.get_vocab().values(), default=-1) + 1

    @cached_property
    def byte_lengths(self) -> list[int] | None:
        """The number of UTF-8 bytes of each token for byte-level BPE, or None for other tokenizers.

        The sum over the ids of a text is its length in bytes after normalisation, unless the text contains a byte of
        `lost_bytes` or a token that strips the spaces around it (`lstrip`, `rstrip`).
        """
        if not _is_byte_level(self.backend):
            return None
        lengths = [0] * self.vocab_size
        for token, number in self.backend.get_vocab().items():
            # Each character of an ordinary token is one byte; added tokens are plain text.
            lengths[number] = len(token.encode()) if token in self.added else len(token)
        return lengths

    @cached_property
    def lost_bytes(self) -> frozenset[int]:
        """Bytes that a byte-level vocabulary lacks. The tokenizer silently drops them from characters."""
        if self.byte_lengths is None:
            return frozenset()
        known = self.backend.token_to_id
        lost = {byte for byte, character in byte_alphabet().items() if known(character) is None}
        return frozenset(lost - _NEVER_IN_TEXT)

    @cached_property
    def sha256(self) -> str:
        """Hash of everything that can change ids; the chat template is not included."""
        whole = orjson.dumps(orjson.loads(self.backend.to_str()), option=orjson.OPT_SORT_KEYS).decode()
        return sha256_text(whole, stable_json(self.special_tokens))

    @property
    def normalizer(self) -> str:
        """The names of the steps that change text before it is split into tokens, or an empty text."""
        return ", ".join(dict.fromkeys(step["type"] for step in steps_of(self.backend.normalizer)))

    def with_tokens(self, tokens: Sequence[str]) -> "LoadedTokenizer":
        """Return a copy with additional special tokens, with ids after the vocabulary; known tokens keep their ids."""
        backend = Tokenizer.from_str(self.backend.to_str())
        missing = [token for token in dict.fromkeys(tokens) if token and token not in self.added]
        new = [token for token in missing if backend.token_to_id(token) is None]
        is_rebuilt = sentencepiece.is_rebuilt(backend)
        add = sentencepiece.add_markers if is_rebuilt else add_tokens
        add(backend, [AddedToken(token, special=True, normalized=is_rebuilt) for token in missing])
        return replace(self, backend=backend, added_by_us=(*self.added_by_us, *new))

    def save(self, folder: Path, chat_template: str | None) -> None:
        """Write files that old and new versions of transformers load with the same ids. The output is deterministic."""
        folder.mkdir(parents=True, exist_ok=True)
        config: dict[str, object] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.special_tokens,
        }
        if self.max_length is not None:
            config["model_max_length"] = self.max_length
        write_atomic(folder / "tokenizer.json", self.backend.to_str(pretty=True) + "\n")
        write_atomic(folder / "tokenizer_config.json", stable_json(config))
        template = folder / "chat_template.jinja"
        if chat_template is not None:
            write_atomic(template, chat_template)
        else:
            template.unlink(missing_ok=True)


def _is_byte_level(backend: Tokenizer) -> bool:
    steps = steps_of(backend.pre_tokenizer) if isinstance(backend.model, models.BPE) else []
    prefixes = [step["add_prefix_space"] for step in steps if step["type"] == "ByteLevel"]
    return bool(prefixes) and not any(prefixes)
