"""All config keys by dotted name, with a description of their type, default and allowed values."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from tunewell.config.fields import OneOf, Section
from tunewell.config.schema import ALIASES, Config
from tunewell.config.yaml_reader import KeyPath
from tunewell.core.errors import UserError, close_names


@dataclass(frozen=True)
class Key:
    """One key or one section."""

    name: str
    """The dotted name without list indices: `data.sources.share`."""
    takes: str
    """Description of the type: `a whole number (at least 1)`."""
    default: Any
    doc: str
    allowed: tuple[str, ...]
    aliases: tuple[str, ...]
    children: tuple[str, ...]
    """Names of the keys directly inside a section; empty for a value."""
    is_section: bool
    """True for a section; False for a value and for `data.sources`, a list of sections."""
    section: type[Section] | None


@cache
def all_keys() -> dict[str, Key]:
    """Return every key in schema order, with each section before its keys."""
    return {key.name: key for key in _walk(Config, "")}


def parse_key(text: str) -> KeyPath:
    """Parse a dotted key with list indices: `data.sources[0].share`."""
    if not re.fullmatch(r"\w+(\[\d{1,6}\])*(\.\w+(\[\d{1,6}\])*)*", text):
        raise UserError(
            f"`{text}` is not a key", fix="write keys like `packing.context_length` or `data.sources[0].share`"
        )
    return tuple(int(step) if step.isdigit() else step for step in re.findall(r"\w+", text))


def format_key(key_path: Iterable[str | int]) -> str:
    """Return a key path as a dotted key, the inverse of `parse_key`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in key_path).lstrip(".")


def dotted_name(key_path: Iterable[str | int]) -> str:
    """Return the dotted name without list indices, as in `all_keys`."""
    return ".".join(str(step) for step in key_path if not isinstance(step, int))


def alias_paths(alias: str) -> set[KeyPath]:
    """Return the two paths at which an alias is accepted: at the top level and in the section of its key."""
    return {(alias,), (*ALIASES[alias].split(".")[:-1], alias)}


def resolve_alias(key_path: KeyPath) -> KeyPath:
    """Replace another tool's name for a key with the tunewell name."""
    alias = str(key_path[-1])
    return tuple(ALIASES[alias].split(".")) if alias in ALIASES and key_path in alias_paths(alias) else key_path


def nearest_keys(name: str) -> list[str]:
    """Return suggestions for an unknown key: the closest key in its section, and equal names in other sections."""
    parent, _, last = name.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in all_keys() if key.rpartition(".")[0] == parent}
    siblings |= {alias: key for alias, key in ALIASES.items() if parent in ("", key.rpartition(".")[0])}
    close = [siblings[word] for word in close_names(last, siblings)]
    same_name = [key for key in all_keys() if key.rpartition(".")[2] == last]
    return list(dict.fromkeys([*close, *same_name] or close_names(name, all_keys())))


def _walk(section: type[Section], prefix: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        full = prefix + name
        annotation: Any = field.annotation
        inner = _section_in(annotation)
        yield Key(
            name=full,
            takes=_takes(annotation, field.metadata),
            default=None if field.is_required() else plain(field.default),
            doc=" ".join((field.description or (inner and inner.__doc__) or "").split()),
            allowed=tuple(_choices(annotation, field.metadata)),
            aliases=tuple(alias for alias, key in ALIASES.items() if key == full and alias != name),
            children=tuple(f"{full}.{child}" for child in inner.model_fields) if inner else (),
            is_section=inner is not None and inner is annotation,
            section=inner,
        )
        if inner:
            yield from _walk(inner, full + ".")


def plain(value: Any) -> Any:
    """Convert a config value to plain JSON types."""
    if isinstance(value, tuple):
        return [plain(entry) for entry in cast(tuple[object, ...], value)]
    return value.model_dump(mode="json") if isinstance(value, Section) else value


def _section_in(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation if issubclass(annotation, Section) else None
    return next((found for part in get_args(annotation) if (found := _section_in(part))), None)


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
    """Describe a type in words that can follow "must be"."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _takes(parts[0], [*metadata, *parts[1:]])
    if origin in (Union, UnionType):
        return ", or ".join(_takes(part, metadata) for part in parts)
    if origin is Literal or any(isinstance(marker, OneOf) for marker in metadata):
        *most, last = [f"`{name}`" for name in _choices(annotation, metadata)] or ["nothing: no feature adds a value"]
        return f"{', '.join(most)} or {last}" if most else last
    if origin is tuple:
        is_sources = _section_in(parts[0]) is not None
        return "a path, a list of paths or a list of sections" if is_sources else f"a list of {_takes(parts[0])}"
    if origin is dict:
        return "a mapping of names to text" if parts[1] is str else "a mapping of names to values"
    if annotation in (int, float):
        return ("a whole number" if annotation is int else "a number") + _bounds(metadata)
    plain = {bool: "`true` or `false`", str: "text", NoneType: "`null`"}
    return plain.get(annotation, "a section")


def _bounds(metadata: Sequence[Any]) -> str:
    names = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    flat = [item for entry in metadata for item in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
    limits = ((text, getattr(item, name, None)) for item in flat for name, text in names.items())
    found = " and ".join(f"{text} {limit:,}" for text, limit in limits if limit is not None)
    return f" ({found})" if found else ""
