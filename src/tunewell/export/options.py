"""The options of `tunewell export`, checked before torch is imported."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, get_args

from tunewell.config.extensions import EXPORT_TARGETS, GgufFormat, MergedPrecision
from tunewell.core.errors import UserError
from tunewell.core.options import Option, WeightsOptions
from tunewell.model_files.presets import is_preset

if TYPE_CHECKING:
    from tunewell.inference.model_ref import ModelRef

_OLLAMA_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:/-]*")
_NOT_IN_OLLAMA_NAME = re.compile(r"[^a-z0-9._-]+")


def _names(values: Sequence[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)


@dataclass(frozen=True)
class ExportOptions(WeightsOptions):
    """The options of an export. Names may be a list, or separated by commas."""

    to: Annotated[
        Sequence[str] | str | None,
        Option(f"Export targets, separated by commas: {_names(EXPORT_TARGETS.names())}.", "TARGETS", kind=str),
    ] = None
    """Default: `export.to` of the config. If that is empty: `gguf` if `gguf` is set, otherwise `adapter`, or `merged`
    for a model without an adapter."""
    gguf: Annotated[
        Sequence[str] | str | None,
        Option(f"GGUF types, separated by commas: {_names(get_args(GgufFormat))}.", "TYPES", kind=str),
    ] = None
    precision: Annotated[str | None, Option(f"Precision of merged weights: {_names(get_args(MergedPrecision))}.")] = (
        None
    )
    out: Annotated[str | Path | None, Option("Folder to write. Default: `export` in the run's folder.", kind=Path)] = (
        None
    )
    checkpoint: Annotated[str | int, Option("`best` on the selection slice, `last`, or a step.", kind=str)] = "best"
    base: Annotated[str | Path | None, Option("The base model, if the adapter does not name it.", kind=str)] = None
    name: Annotated[str | None, Option("Name of the model in Ollama. Default: that of the rows.")] = None
    sets: Sequence[str] | str = ()
    """Config values, as `KEY=VALUE`."""
    creates: bool = True
    """Whether to call `ollama create` if the program is installed."""

    def checked(self) -> "ExportOptions":
        """Return the options in canonical form; raise UserError for unknown names."""
        if self.name is not None and not is_ollama_name(self.name):
            raise UserError(
                f"`{self.name}` is not a valid Ollama model name",
                where="--name",
                fix=f"`--name {ollama_name(self.name)}`",
            )
        if self.precision is not None:
            _require_known([self.precision], get_args(MergedPrecision), "--precision")
        return replace(
            self,
            to=_as_list(self.to, EXPORT_TARGETS.names(), "--to"),
            gguf=_as_list(self.gguf, get_args(GgufFormat), "--gguf"),
            out=None if self.out is None else Path(self.out),
            checkpoint=str(self.checkpoint),
            base=None if self.base is None else str(self.base),
            sets=[self.sets] if isinstance(self.sets, str) else self.sets,
        )

    def find_model(self, place: "str | PathLike[str] | ModelRef | None") -> "ModelRef":
        """Return the model to export; raise UserError if it is not found."""
        from tunewell.runs.resolve import resolve_model

        base = None if self.base is None else str(self.base)
        return resolve_model(place, checkpoint=str(self.checkpoint), base=base, sets=self.sets)

    def resolved(self, ref: "ModelRef") -> "ExportOptions":
        """Return the options with the defaults of the model and its config filled in."""
        settings = ref.loaded.config.export
        has_usable_adapter = ref.adapter is not None and not (ref.base and is_preset(ref.base))
        default = ("gguf",) if self.gguf else ("adapter",) if has_usable_adapter else ("merged",)
        to = list(dict.fromkeys(self.to or settings.to or default))
        if self.gguf and not {"gguf", "ollama"} & set(to):
            to.append("gguf")
        out = Path(self.out or (ref.path or Path.cwd()) / "export").expanduser().resolve()
        return replace(
            self,
            to=to,
            out=out,
            name=self.name or ollama_name(_usual_name(ref) or (ref.path or out).resolve().name),
            gguf=list(dict.fromkeys(self.gguf or settings.gguf)),
            precision=self.precision or settings.precision,
        )


def _usual_name(ref: "ModelRef") -> str:
    """Return the name of the rows of a run, because many runs are in a folder named `run`; otherwise an empty text."""
    sources = ref.loaded.config.data.sources if ref.kind == "run" else ()
    return PurePath(sources[0].path.partition("#")[0]).stem if sources else ""


def is_ollama_name(name: str) -> bool:
    """Return True if Ollama accepts the name, with namespace and tag, and a shell needs no quotes around it."""
    return _OLLAMA_NAME.fullmatch(name) is not None


def ollama_name(text: str) -> str:
    """Convert any text to a valid Ollama model name: `Mein Lauf ü#1` becomes `mein-lauf-u-1`."""
    ascii_text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return _NOT_IN_OLLAMA_NAME.sub("-", ascii_text).strip("-._")[:60] or "model"


def _as_list(value: Sequence[str] | str | None, known: Sequence[str], flag: str) -> list[str]:
    if value is None:
        return []
    names = [part.strip().lower() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if isinstance(value, str) and not names:
        raise UserError(f"`{flag}` is empty", fix=f"see `tunewell export --help`, or leave `{flag}` out")
    _require_known(names, known, flag)
    return list(names)


def _require_known(names: Sequence[str], known: Sequence[str], flag: str) -> None:
    for name in names:
        if name not in known:
            raise UserError(f"`{name}` is not a value of `{flag}`", where=flag, fix=f"use one of: {', '.join(known)}")
