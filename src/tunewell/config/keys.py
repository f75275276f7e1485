"""All config keys by dotted name, with a description of their type, default and allowed values."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, cast, get_args, get_origin

from tunewell.config.fields import Section
from tunewell.config.schema import ALIASES, Config
from tunewell.config.yaml_reader import KeyPath
from tunewell.core.errors import UserError, close_names


@dataclass(frozen=True)
class Key:
    """One key or one section."""

    name: str
    """The dotted name without list indices: `data.sources.share`."""
    default: Any
    doc: str
    aliases: tuple[str, ...]
    children: tuple[str, ...]
    """Names of the keys directly inside a section; empty for a value."""
    is_section: bool
    """True for a section; False for a value and for `data.sources`, a list of sections."""
    section: type[Section] | None
    owner: type[Section]
    """The section that contains the key."""

    @property
    def takes(self) -> str:
        """Description of the type: `a whole number (at least 1)`."""
        return _takes(self._node)

    @property
    def allowed(self) -> tuple[str, ...]:
        """The names that are allowed, if there are only some."""
        return tuple(_choices(self._node))

    @property
    def _node(self) -> dict[str, Any]:
        owner = _schema() if self.owner is Config else _schema()["$defs"][self.owner.__name__]
        return owner["properties"][self.name.rpartition(".")[2]]


@cache
def _schema() -> dict[str, Any]:
    """Return the JSON Schema of the config. It takes 15 ms, and most commands do not need it."""
    return Config.model_json_schema()


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
        annotation: Any = field.annotation
        full, inner = prefix + name, _section_in(annotation)
        yield Key(
            name=full,
            default=None if field.is_required() else plain(field.default),
            doc=" ".join((field.description or (inner and inner.__doc__) or "").split()),
            aliases=tuple(alias for alias, key in ALIASES.items() if key == full and alias != name),
            children=tuple(f"{full}.{child}" for child in inner.model_fields) if inner else (),
            is_section=inner is not None and inner is annotation,
            section=inner,
            owner=section,
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


def _choices(node: dict[str, Any]) -> Iterator[str]:
    """Yield the names that a node of the JSON Schema allows."""
    yield from map(str, node.get("enum", [node["const"]] if "const" in node else []))
    for part in node.get("anyOf", [node["items"]] if "items" in node else []):
        yield from _choices(part)


def _takes(node: dict[str, Any]) -> str:
    """Describe the type of a node of the JSON Schema in words that can follow "must be"."""
    kind, inner = node.get("type"), node.get("items", {})
    if "anyOf" in node:
        return ", or ".join(map(_takes, node["anyOf"]))
    if "enum" in node or "const" in node:
        *most, last = [f"`{name}`" for name in _choices(node)] or ["nothing: no feature adds a value"]
        return f"{', '.join(most)} or {last}" if most else last
    if kind == "array":
        return "a path, a list of paths or a list of sections" if "$ref" in inner else f"a list of {_takes(inner)}"
    if kind == "object":
        return f"a mapping of names to {'text' if node['additionalProperties'] == {'type': 'string'} else 'values'}"
    if kind in ("integer", "number"):
        limits = " and ".join(f"{text} {node[name]:,}" for name, text in _LIMITS.items() if name in node)
        return ("a whole number" if kind == "integer" else "a number") + (f" ({limits})" if limits else "")
    return {"boolean": "`true` or `false`", "string": "text", "null": "`null`"}.get(str(kind), "a section")


_LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
