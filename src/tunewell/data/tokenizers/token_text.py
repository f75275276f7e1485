"""Show the text of single tokens, for `tunewell inspect`."""

from collections.abc import Sequence

from tunewell.data.tokenizers.load import LoadedTokenizer
from tunewell.data.tokenizers.parts import byte_alphabet

_SPACE_MARK = "\u2581"


def token_texts(tokenizer: LoadedTokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; an incomplete character is shown as its bytes, like `<E2 82>`."""
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


_BYTE_OF = {character: byte for byte, character in byte_alphabet().items()}
