"""Load the tokenizer of a model without torch or transformers, with the ids of transformers or llama.cpp."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import orjson
from tokenizers import AddedToken, Tokenizer, models

from tunewell.core.errors import UserError
from tunewell.core.files import sha256_text, stable_json, write_atomic
from tunewell.data.tokenizers import sentencepiece
from tunewell.data.tokenizers.gguf import load_gguf
from tunewell.data.tokenizers.hub import load_tokenizer_json, read_special_tokens, read_template
from tunewell.data.tokenizers.parts import TokenizerParts, byte_alphabet, prepend_bos
from tunewell.data.tokenizers.sentencepiece import read_model
from tunewell.model_files.files import ModelFiles, locate

Kind = Literal["tokenizer.json", "sentencepiece", "gguf"]

# These bytes never appear in UTF-8 text, so a vocabulary may lack them.
_NEVER_IN_TEXT = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])


_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_MAX_JOINED = 16
"""Tokens that are decoded together: each may end in the middle of a character."""


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
    source: str
    """The name of the model as given by the user."""
    kind: Kind
    special_tokens: dict[str, str]
    """The special tokens that the model defines, by their variable names in chat templates: `bos_token`, ..."""
    chat_template: str | None
    adds_bos: bool
    """Whether plain text starts with the bos token."""
    control_ids: frozenset[int]
    added: dict[str, AddedTokenInfo]
    vocab_size: int
    """The highest id plus one."""
    byte_lengths: list[int] | None
    """The number of UTF-8 bytes of each token for byte-level BPE, or None for other tokenizers.

    The sum over the ids of a text is its length in bytes after normalisation, unless the text contains a byte of
    `lost_bytes` or a token that strips the spaces around it (`lstrip`, `rstrip`).
    """
    lost_bytes: frozenset[int]
    """Bytes that a byte-level vocabulary lacks. The tokenizer silently drops them from characters."""
    sha256: str
    """Hash of everything that can change ids; the chat template is not included."""
    max_length: int | None = None
    added_by_us: tuple[str, ...] = ()

    @property
    def normalizer(self) -> str:
        """The names of the steps that change text before it is split into tokens, or an empty text."""
        if self.backend.normalizer is None:
            return ""
        state = orjson.loads(self.backend.normalizer.__getstate__())
        steps = state["normalizers"] if state["type"] == "Sequence" else [state]
        return ", ".join(dict.fromkeys(step["type"] for step in steps))

    def with_tokens(self, tokens: Sequence[str]) -> "LoadedTokenizer":
        """Return a copy with additional special tokens, with ids after the vocabulary; known tokens keep their ids."""
        backend = Tokenizer.from_str(self.backend.to_str())
        missing = [token for token in dict.fromkeys(tokens) if token and token not in self.added]
        new = [token for token in missing if backend.token_to_id(token) is None]
        if sentencepiece.is_rebuilt(backend):
            sentencepiece.add_markers(backend, [AddedToken(token, special=True, normalized=True) for token in missing])
        else:
            added = [AddedToken(token, special=True, normalized=False) for token in missing]
            backend.add_special_tokens(added)  # pyright: ignore[reportUnknownMemberType]  the stub says `list`
        parts = TokenizerParts(backend, self.special_tokens, self.chat_template, self.adds_bos, self.max_length)
        loaded = _make_tokenizer(parts, self.source, self.kind)
        return replace(loaded, added_by_us=(*self.added_by_us, *new))

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


def load_tokenizer(model: str | Path) -> LoadedTokenizer:
    """Load the tokenizer of a model (see `core.model_files.locate`); raise UserError if missing or unsupported."""
    files = locate(model)
    if "tokenizer.json" in files.small:
        return _make_tokenizer(load_tokenizer_json(files), files.source, "tokenizer.json")
    if files.sentencepiece is not None:
        return _make_tokenizer(_load_sentencepiece(files, files.sentencepiece), files.source, "sentencepiece")
    if files.gguf is not None:
        return _make_tokenizer(load_gguf(files.gguf), files.source, "gguf")
    raise UserError(
        f"`{files.source}` has no tokenizer",
        where="searched for tokenizer.json, tokenizer.model and one .gguf file",
        fix="use a folder with one of these files, or a `.gguf` file",
    )


def _load_sentencepiece(files: ModelFiles, path: Path) -> TokenizerParts:
    model = read_model(path)
    backend = sentencepiece.build_tokenizer(model)
    table = read_special_tokens(files, {})
    special = model.special_tokens() | table.special_tokens()
    contents = {token.content for token in backend.get_added_tokens_decoder().values()}
    more = [token for token in table.additions(backend) if token.content not in contents]
    # Like the markers of the file, they must match in normalised text, or the text after each would get a dummy space.
    sentencepiece.add_markers(backend, [_normalized(token) for token in more])
    adds_bos = bool(table.config.get("add_bos_token", True)) and "bos_token" in special
    if adds_bos:
        prepend_bos(backend, special["bos_token"])
    return TokenizerParts(backend, special, read_template(files, table.config), adds_bos, table.max_length())


def _normalized(token: AddedToken) -> AddedToken:
    flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
    return AddedToken(token.content, special=token.special, normalized=True, **flags)


def _make_tokenizer(parts: TokenizerParts, source: str, kind: Kind) -> LoadedTokenizer:
    backend = parts.backend
    added = {
        token.content: AddedTokenInfo(number, token.special, token.lstrip, token.rstrip, token.single_word)
        for number, token in sorted(backend.get_added_tokens_decoder().items())
    }
    vocabulary = backend.get_vocab(with_added_tokens=True)
    vocab_size = max(vocabulary.values(), default=-1) + 1
    is_byte_level = _is_byte_level(backend)
    whole = orjson.dumps(orjson.loads(backend.to_str()), option=orjson.OPT_SORT_KEYS).decode()
    return LoadedTokenizer(
        backend=backend,
        source=source,
        kind=kind,
        special_tokens=parts.special_tokens,
        chat_template=parts.chat_template,
        adds_bos=parts.adds_bos,
        control_ids=frozenset(facts.id for facts in added.values() if facts.special),
        added=added,
        vocab_size=vocab_size,
        byte_lengths=_byte_lengths(vocabulary, added, vocab_size) if is_byte_level else None,
        lost_bytes=_lost_bytes(vocabulary) if is_byte_level else frozenset(),
        sha256=sha256_text(whole, stable_json(parts.special_tokens)),
        max_length=parts.max_length,
    )


def _is_byte_level(backend: Tokenizer) -> bool:
    if not isinstance(backend.model, models.BPE) or backend.pre_tokenizer is None:
        return False
    state = orjson.loads(backend.pre_tokenizer.__getstate__())
    steps = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    byte_level = [step for step in steps if step["type"] == "ByteLevel"]
    return bool(byte_level) and not any(step["add_prefix_space"] for step in byte_level)


def _byte_lengths(vocabulary: dict[str, int], added: dict[str, AddedTokenInfo], vocab_size: int) -> list[int]:
    lengths = [0] * vocab_size
    for token, number in vocabulary.items():
        # Each character of an ordinary token is one byte; added tokens are plain text.
        lengths[number] = len(token.encode()) if token in added else len(token)
    return lengths


def _lost_bytes(vocabulary: dict[str, int]) -> frozenset[int]:
    lost = {byte for byte, character in byte_alphabet().items() if character not in vocabulary}
    return frozenset(lost - _NEVER_IN_TEXT)


def token_texts(tokenizer: LoadedTokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each token. An incomplete character is shown as its bytes, like `<E2 82>`."""
    backend = tokenizer.backend
    if tokenizer.byte_lengths is None:
        return [(backend.id_to_token(token) or "").replace("\u2581", " ") for token in ids]
    added = {facts.id: text for text, facts in tokenizer.added.items()}
    return [added[token] if token in added else _from_bytes(backend.id_to_token(token) or "") for token in ids]


def joined_texts(tokenizer: LoadedTokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each token. If tokens share a character, the first gets it and the others an empty text."""
    texts, pieces = token_texts(tokenizer, ids), [_bytes_of(tokenizer, token) for token in ids]
    at = 0
    while at < len(ids):
        data = b""
        for end in range(at, min(at + _MAX_JOINED, len(ids))):
            piece = pieces[end]
            if piece is None:
                break
            data += piece
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError:
                continue
            texts[at : end + 1] = [text, *[""] * (end - at)]
            at = end
            break
        at += 1
    return texts


def _bytes_of(tokenizer: LoadedTokenizer, token: int) -> bytes | None:
    """Return the bytes of a token of a byte-level vocabulary or of byte fallback (`<0x0A>`), or None."""
    name = tokenizer.backend.id_to_token(token) or ""
    if tokenizer.byte_lengths is None:
        found = _BYTE_TOKEN.fullmatch(name)
        return bytes.fromhex(found[1]) if found else None
    return None if name in tokenizer.added else _bytes(name)


def _bytes(name: str) -> bytes:
    return bytes(_BYTE_OF[character] for character in name if character in _BYTE_OF)


def _from_bytes(name: str) -> str:
    data = _bytes(name)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return f"<{data.hex(' ').upper()}>"


_BYTE_OF = {character: byte for byte, character in byte_alphabet().items()}
