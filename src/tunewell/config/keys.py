"""The tree of the schema laid flat: every key by its dotted name, with what it takes in words."""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from tunewell.config.fields import OneOf, Section
from tunewell.config.schema import ALIASES, Config
from tunewell.config.yaml_reader import KeyPath
from tunewell.core.errors import UserError


@dataclass(frozen=True)
class Key:
    """One key, or one group of keys."""

    name: str
    """Dotted, without list positions: `data.sources.share`."""
    takes: str
    default: Any
    doc: str
    allowed: tuple[str, ...]
    aliases: tuple[str, ...]
    children: tuple[str, ...]
    """Names of the keys directly inside; empty for a value."""
    is_section: bool
    """Whether it is a plain group of keys; `data.sources`, a list of them, is not."""


@cache
def all_keys() -> dict[str, Key]:
    """List every key in the order of the schema, groups before what is in them."""
    return {key.name: key for key in _walk(Config, "")}


def parse_key(text: str) -> KeyPath:
    """Read a dotted key with list positions, `data.sources[0].share`."""
    if not re.fullmatch(r"\w+(\[\d{1,6}\])*(\.\w+(\[\d{1,6}\])*)*", text):
        raise UserError(
            f"`{text}` is not a key", fix="write keys like `packing.context_length` or `data.sources[0].share`"
        )
    return tuple(int(step) if step.isdigit() else step for step in re.findall(r"\w+", text))


def format_key(steps: Iterable[str | int]) -> str:
    """Write a way as a dotted key, the reverse of `parse_key`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".")


def dotted_name(steps: Iterable[str | int]) -> str:
    """Name a key without list positions, as `all_keys` does."""
    return ".".join(str(step) for step in steps if not isinstance(step, int))


def alias_paths(alias: str) -> set[KeyPath]:
    """Say where an alias is read: at the top of the file and in its key's branch."""
    return {(alias,), (*ALIASES[alias].split(".")[:-1], alias)}


def resolve_alias(steps: KeyPath) -> KeyPath:
    """Turn another tool's name for a key into ours."""
    alias = str(steps[-1])
    return tuple(ALIASES[alias].split(".")) if alias in ALIASES and steps in alias_paths(alias) else steps


def nearest_keys(name: str) -> list[str]:
    """Find the keys a wrong name most likely meant: the nearest one beside it, and the same word elsewhere."""
    parent, _, last = name.rpartition(".")
    beside = {key.rpartition(".")[2]: key for key in all_keys() if key.rpartition(".")[0] == parent}
    beside |= {alias: key for alias, key in ALIASES.items() if parent in ("", key.rpartition(".")[0])}
    close = [beside[word] for word in difflib.get_close_matches(last, beside, n=1, cutoff=0.6)]
    same_word = [key for key in all_keys() if key.rpartition(".")[2] == last]
    anywhere = difflib.get_close_matches(name, all_keys(), n=1, cutoff=0.6)
    return list(dict.fromkeys([*close, *same_word] or anywhere))


def _walk(branch: type[Section], prefix: str) -> Iterator[Key]:
    for name, field in branch.model_fields.items():
        full = prefix + name
        inner = _branch_in(field.annotation)
        yield Key(
            name=full,
            takes=_takes(field.annotation, field.metadata),
            default=None if field.is_required() else _plain(field.default),
            doc=" ".join((field.description or "").split()),
            allowed=tuple(_choices(field.annotation, field.metadata)),
            aliases=tuple(alias for alias, key in ALIASES.items() if key == full),
            children=tuple(f"{full}.{child}" for child in inner.model_fields) if inner else (),
            is_section=inner is not None and inner is field.annotation,
        )
        if inner:
            yield from _walk(inner, full + ".")


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.model_dump()
    return list(value) if isinstance(value, tuple) else value


def _branch_in(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation if issubclass(annotation, Section) else None
    return next((found for part in get_args(annotation) if (found := _branch_in(part))), None)


def _choices(annotation: Any, metadata: Sequence[Any] = ()) -> Iterator[str]:
    for marker in metadata:
        if isinstance(marker, OneOf):
            yield from marker.registry.names()
    if get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    elif get_origin(annotation) is Annotated:
        part, *markers = get_args(annotation)
        yield from _choices(part, markers)
    elif get_origin(annotation) in (Union, UnionType, tuple):
        for part in get_args(annotation):
            yield from _choices(part)


def _takes(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Put a type into words that follow "must be"."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _takes(parts[0], [*metadata, *parts[1:]])
    if origin in (Union, UnionType):
        return ", or ".join(_takes(part, metadata) for part in parts)
    if origin is Literal or any(isinstance(marker, OneOf) for marker in metadata):
        *most, last = (f"`{name}`" for name in _choices(annotation, metadata))
        return f"{', '.join(most)} or {last}" if most else last
    if origin is tuple:
        is_sources = _branch_in(parts[0]) is not None
        return "a path, a list of paths or a list of groups of keys" if is_sources else f"a list of {_takes(parts[0])}"
    if origin is dict:
        return "names with a text each" if parts[1] is str else "names with a value each"
    if annotation in (int, float):
        return " ".join(["a whole number" if annotation is int else "a number", *_bounds(metadata)])
    plain = {bool: "`true` or `false`", str: "text", NoneType: "`null`"}
    return plain.get(annotation, "a group of keys")


def _bounds(metadata: Sequence[Any]) -> Iterator[str]:
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    flat = [item for entry in metadata for item in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
    found = [
        f"{word} {limit:,}"
        for item in flat
        for name, word in words.items()
        if (limit := getattr(item, name, None)) is not None
    ]
    if found:
        yield f"({' and '.join(found)})"
