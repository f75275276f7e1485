"""Show tokens as a person reads them, one by one."""

from collections.abc import Sequence

from tunewell.data.tokenizers.load import LoadedTokenizer

_SPACE_MARK = "\u2581"


def token_texts(tokenizer: LoadedTokenizer, ids: Sequence[int]) -> list[str]:
    """Give the text of each token; a token that is only part of a character is shown by its bytes, like `<E2 82>`."""
    backend = tokenizer.backend
    if tokenizer.byte_lengths is None:
        names = [backend.id_to_token(token) or "" for token in ids]
        return [name.replace(_SPACE_MARK, " ") for name in names]
    added = {facts.id: text for text, facts in tokenizer.added.items()}
    return [added[token] if token in added else _from_bytes(backend.id_to_token(token) or "") for token in ids]


def _from_bytes(name: str) -> str:
    data = bytes(_BYTE_OF[character] for character in name if character in _BYTE_OF)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return f"<{data.hex(' ').upper()}>"


def _byte_alphabet() -> dict[str, int]:
    """Map the characters that byte-level tokenizers write for bytes back to the bytes.

    Printable bytes stand for themselves; the others were moved, in order, to code points from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(moved)}


_BYTE_OF = _byte_alphabet()
