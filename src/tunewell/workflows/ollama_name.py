"""Names that Ollama takes for a model."""

import re
import unicodedata

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:/-]*")
_OTHER = re.compile(r"[^a-z0-9._-]+")


def is_ollama_name(name: str) -> bool:
    """Say whether a name, with a namespace and a tag if it has them, can be given to Ollama and to a shell as it is."""
    return _NAME.fullmatch(name) is not None


def ollama_name(text: str) -> str:
    """Make a name of any text: `Mein Lauf \u00fc#1` becomes `mein-lauf-u-1`."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return _OTHER.sub("-", plain).strip("-._")[:60] or "model"
