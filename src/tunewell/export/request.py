"""What an export is asked for, checked before anything is loaded."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tunewell.core.errors import UserError

# Names that Ollama takes for a model.

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:/-]*")
_OTHER = re.compile(r"[^a-z0-9._-]+")


def is_ollama_name(name: str) -> bool:
    """Say whether a name, with a namespace and a tag if it has them, can be given to Ollama and to a shell as it is."""
    return _NAME.fullmatch(name) is not None


def ollama_name(text: str) -> str:
    """Make a name of any text: `Mein Lauf \u00fc#1` becomes `mein-lauf-u-1`."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return _OTHER.sub("-", plain).strip("-._")[:60] or "model"


KINDS = ("adapter", "merged", "gguf", "ollama")
GGUF_KINDS = ("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m")
PRECISIONS = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class ExportOptions:
    """What is to be made; everything has a default."""

    to: Sequence[str] | str | None = ()
    """`adapter`, `merged`, `gguf`, `ollama`, as a list or by commas; by default what the config says, else `gguf` where
    kinds of it are named, else `adapter` or `merged`."""
    out: str | Path | None = None
    """By default `export` in the run's folder."""
    precision: str | None = None
    """Of merged weights: `bf16`, `fp16` or `fp32`."""
    gguf: Sequence[str] | str | None = ()
    """`f32`, `f16`, `bf16`, `q8_0`, `q6_k`, `q5_k_m`, `q4_k_m`, as a list or by commas."""
    checkpoint: str | int = "best"
    """`best`, `last` or a step."""
    base: str | Path | None = None
    name: str | None = None
    """What Ollama is to call it."""
    sets: Sequence[str] | str = ()
    allow_pickle: bool = False
    creates: bool = True
    """Whether `ollama create` is called where the program is there."""

    def checked(self) -> "ExportOptions":
        """Give the order in one way of writing it; raises UserError for what cannot be made of anything."""
        if self.name is not None and not is_ollama_name(self.name):
            raise UserError(
                f"Ollama takes no model of the name `{self.name}`",
                where="--name",
                fix=f"`--name {ollama_name(self.name)}`",
            )
        if self.precision is not None:
            _refuse_unknown([self.precision], PRECISIONS, "--precision")
        to, gguf = _listed(self.to, KINDS, "--to"), _listed(self.gguf, GGUF_KINDS, "--gguf")
        return replace(
            self,
            to=to,
            gguf=gguf,
            out=None if self.out is None else Path(self.out),
            checkpoint=str(self.checkpoint),
            base=None if self.base is None else str(self.base),
            sets=[self.sets] if isinstance(self.sets, str) else self.sets,
        )


def _listed(given: Sequence[str] | str | None, known: Sequence[str], flag: str) -> list[str]:
    if given is None:
        return []
    if not isinstance(given, str):
        _refuse_unknown(given, known, flag)
        return list(given)
    found = [part.strip().lower() for part in given.split(",") if part.strip()]
    if not found:
        raise UserError(f"`{flag}` names nothing", fix=f"see `tunewell export --help`, or leave `{flag}` out")
    _refuse_unknown(found, known, flag)
    return found


def _refuse_unknown(words: Sequence[str], known: Sequence[str], flag: str) -> None:
    for word in words:
        if word not in known:
            raise UserError(f"`{word}` cannot be exported", where=flag, fix=f"known are {', '.join(known)}")
