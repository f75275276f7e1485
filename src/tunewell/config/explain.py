"""`tunewell explain`: meaning, type, default and origin of a key; JSON Schema of the config for editors."""

import re
from dataclasses import dataclass
from typing import Any, cast

from tunewell.config.fields import Section
from tunewell.config.keys import (
    Key,
    alias_paths,
    all_keys,
    dotted_name,
    format_key,
    nearest_keys,
    parse_key,
    plain,
    resolve_alias,
)
from tunewell.config.load import LoadedConfig
from tunewell.config.schema import ALIASES, Config
from tunewell.config.yaml_reader import KeyPath
from tunewell.core.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Explanation:
    """The description of one key or one section."""

    key: str
    type: str
    default: Any
    doc: str
    aliases: tuple[str, ...]
    allowed: tuple[str, ...]
    keys: tuple[tuple[str, str], ...]
    """For a section: its keys, each with its description."""
    value: Any = None
    """The value in the current config, if a config is loaded."""
    origin: str | None = None
    """Where the current config sets the value."""


def explain(name: str, loaded: LoadedConfig | None = None) -> Explanation:
    """Describe a key, an alias, or the only key that ends in `name`; raise UserError if no single key matches."""
    key_path = _find(name)
    key = all_keys()[dotted_name(key_path)]
    return Explanation(
        key=key.name,
        type=key.takes,
        default=key.default,
        doc=key.doc,
        aliases=key.aliases,
        allowed=key.allowed,
        keys=tuple((child, all_keys()[child].doc) for child in key.children),
        value=_value_at(loaded.config, key_path) if loaded else None,
        origin=_origin(loaded, key_path, key) if loaded else None,
    )


def explain_all() -> tuple[tuple[str, str], ...]:
    """Return every key that has a value, with its description."""
    return tuple((key.name, key.doc) for key in all_keys().values() if not key.is_section)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 7) of a config file, with a description of every key and without references."""
    raw = Config.model_json_schema()
    schema = _inlined(raw, raw.get("$defs", {}))
    sources = schema["properties"]["data"]["properties"]["sources"]
    one = {"anyOf": [{"type": "string", "minLength": 1}, sources.pop("items")]}
    sources.pop("type")
    sources["anyOf"] = [*one["anyOf"], {"type": "array", "items": one}]
    schema["properties"]["data"] |= {"type": ["object", "string", "array"], "minLength": 1, "items": one}
    for alias, key in ALIASES.items():
        for path in alias_paths(alias) - {tuple(key.split("."))}:
            properties = _section_of(schema, path)
            target = _section_of(schema, tuple(key.split(".")))[key.rpartition(".")[2]]
            same = {word: value for word, value in target.items() if word != "default"}
            properties[alias] = same | {"description": f"Alias of `{key}`. {target['description']}", "deprecated": True}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "tunewell.yaml", **schema}


def _find(name: str) -> KeyPath:
    # Accept `data.sources[].share`, a common notation for a key of every source.
    key_path = resolve_alias(parse_key(re.sub(r"\[\s*\]", "", name.strip())))
    if dotted_name(key_path) in all_keys():
        return key_path
    endings = [key for key in all_keys() if key.endswith(f".{dotted_name(key_path)}")]
    if len(endings) == 1:
        return parse_key(endings[0])
    guesses = endings or nearest_keys(dotted_name(key_path))
    fix = did_you_mean(guesses, "`tunewell explain` lists every key")
    raise UserError(f"there is no key `{name}`" if not endings else f"several keys end in `{name}`", fix=fix)


def _value_at(value: object, key_path: KeyPath) -> Any:
    if not key_path:
        return plain(value)
    step, rest = key_path[0], key_path[1:]
    if isinstance(value, tuple):
        entries = cast(tuple[object, ...], value)
        if isinstance(step, str):
            return [_value_at(entry, key_path) for entry in entries]
        return _value_at(entries[step], rest) if step < len(entries) else None
    return _value_at(getattr(value, str(step)), rest) if isinstance(value, Section) else None


def _origin(loaded: LoadedConfig, key_path: KeyPath, key: Key) -> str:
    if key.name.startswith("data.sources.") and not any(isinstance(step, int) for step in key_path):
        origins = [
            loaded.origin(format_key((*key_path[:2], number, *key_path[2:])))
            for number in range(len(loaded.config.data.sources))
        ]
        return ", ".join(dict.fromkeys(origins)) or "default"
    return loaded.origin(format_key(key_path))


def _inlined(node: object, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inlined(entry, definitions) for entry in cast(list[object], node)]
    if not isinstance(node, dict):
        return node
    own = cast(dict[str, Any], node)
    target: dict[str, Any] = definitions[own["$ref"].rpartition("/")[2]] if "$ref" in own else {}
    merged = {**target, **{word: value for word, value in own.items() if word not in ("$ref", "$defs")}}
    # Omit titles, which repeat the key, and defaults of sections, which repeat the defaults of their keys.
    dropped = {"title", "default"} if "properties" in merged else {"title"}
    if "description" in merged:
        merged["description"] = " ".join(merged["description"].split())
    return {
        word: (
            {key: _inlined(inner, definitions) for key, inner in value.items()}
            if word == "properties"
            else _inlined(value, definitions)
        )
        for word, value in merged.items()
        if word not in dropped
    }


def _section_of(schema: dict[str, Any], key_path: KeyPath) -> dict[str, Any]:
    for step in key_path[:-1]:
        schema = schema["properties"][str(step)]
    return schema["properties"]
