"""Load the config: the file, then named flags, then `--set`; validate it and record the origin of each value.

Loading is pure: it reads no hardware and no environment variables, and writes nothing.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from tunewell.config.extensions import METHODS
from tunewell.config.fields import Section
from tunewell.config.keys import (
    Key,
    alias_paths,
    all_keys,
    dotted_name,
    format_key,
    nearest_keys,
    parse_key,
    resolve_alias,
)
from tunewell.config.schema import ALIASES, Config, as_sources
from tunewell.config.yaml_reader import (
    MAX_BYTES,
    MAX_DEPTH,
    KeyPath,
    Problem,
    parse_scalar,
    raise_problems,
    read_value,
    read_yaml,
)
from tunewell.core.errors import UserError, did_you_mean
from tunewell.core.files import hub_address, is_url, open_file, short_path
from tunewell.core.text import shorten
from tunewell.core.units import count

# Set values from the command line in the config tree and rebase relative paths.

_ALWAYS_PATHS = (
    "corpus",
    "run",
    "data.sources.path",
    "data.sources.map",
    "data.held_out",
    "data.index",
    "verdict.metrics",
)


def set_value(tree: dict[str, Any], key_path: KeyPath, value: Any) -> None:
    """Set the value at a key path and create missing sections; raise UserError if the path is invalid."""
    here: Any = tree
    for number, step in enumerate(key_path):
        _check_step(here, step, key_path[:number])
        if number == len(key_path) - 1:
            here[step] = value
        else:
            here = here.setdefault(step, {}) if isinstance(step, str) else here[step]


def _check_step(here: object, step: str | int, parent: KeyPath) -> None:
    name = format_key(parent)
    if isinstance(here, dict) and isinstance(step, str):
        return
    if not isinstance(here, list):
        raise UserError(f"`{name}` has no key `{step}`", fix=f"`tunewell explain {dotted_name(parent)}`")
    if isinstance(step, str):
        raise UserError(f"`{name}` is a list", fix=f"name the entry: `{name}[0].{step}`")
    if step >= (length := len(cast(list[object], here))):
        num_entries = count(length, "entry", "entries")
        raise UserError(f"`{name}[{step}]` does not exist: `{name}` has {num_entries}, counted from 0")


def respell_paths(name: str, value: object, respell: Callable[[str], str], *, base: Path = Path()) -> Any:
    """Return the value of a key, "" for a whole config, with each path that is relative to `base` respelled."""
    if isinstance(value, dict):
        section = cast(dict[str, object], value)
        names = {key: f"{name}.{key}".removeprefix(".") for key in section}
        return {key: respell_paths(names[key], inner, respell, base=base) for key, inner in section.items()}
    if isinstance(value, list):
        return [respell_paths(name, inner, respell, base=base) for inner in cast(list[object], value)]
    return respell(value) if isinstance(value, str) and _is_path(name, value, base) else value


def _is_path(name: str, value: str, base: Path) -> bool:
    if not value or is_url(value) or value.startswith("~") or Path(value).is_absolute():
        return False
    if name in ("model", "tokenizer", "method.adapter"):
        return value.endswith((".gguf", ".model")) or (base / value).exists()
    if name in ("template.name", "data.sources.template"):
        return value.endswith(".jinja")
    if name == "data.sources.path" and is_url(hub_address(value, base)):
        return False
    if name == "verdict.task":
        return ":" in value
    return name in _ALWAYS_PATHS and (name, value) != ("data.held_out", "auto")


def relative_path(value: str | Path, base: Path) -> str:
    """Return a path relative to a folder, or an absolute path if they are on different drives."""
    try:
        return os.path.relpath(value, base)
    except ValueError:  # a different drive on Windows
        return str(Path(value).absolute())


MAPPING_ORIGIN = "the config"
"""The origin of every value of a config that a program passes as a mapping."""


def _plain(value: object, key_path: KeyPath, origins: dict[KeyPath, str]) -> Any:
    """Return a value as plain dictionaries and lists, and add its origins; raise UserError if a key is not text."""
    if len(key_path) > MAX_DEPTH:
        raise UserError(f"the config is nested more than {MAX_DEPTH} deep", where=f"`{format_key(key_path[:3])}`")
    origins[key_path] = MAPPING_ORIGIN
    if isinstance(value, Mapping):
        section = cast(Mapping[Any, object], value)
        for key in section:
            if not isinstance(key, str):
                where = f"`{format_key(key_path)}`" if key_path else MAPPING_ORIGIN
                raise UserError(f"the key {key!r} is not text", where=where)
        return {key: _plain(entry, (*key_path, key), origins) for key, entry in section.items()}
    if isinstance(value, list | tuple):
        entries = cast(Sequence[object], value)
        return [_plain(entry, (*key_path, number), origins) for number, entry in enumerate(entries)]
    return str(value) if isinstance(value, Path) else value


FILE_NAME = "tunewell.yaml"
FLAGS = {"model": "model", "data": "data.sources", "out": "corpus", "seed": "seed"}
"""Flags and the keys that they set. Every other key is set with `--set`."""


@dataclass(frozen=True)
class LoadedConfig:
    """A config with its file and the origin of each value."""

    config: Config
    base: Path
    """The folder from which relative paths in the config are resolved."""
    file: Path | None
    origins: Mapping[str, str]
    """Dotted key -> `tunewell.yaml line 3`, `--model` or `--set KEY=VALUE`. Keys with their default are absent."""
    notes: tuple[str, ...] = ()
    """What differs from another trainer whose settings were converted."""
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    """Dotted key -> why its value was recommended, for keys that were `auto`."""

    def origin(self, key: str) -> str:
        """Return where a key or the section that contains it was set, or `default`."""
        key_path = parse_key(key)
        keys = (format_key(key_path[:length]) for length in range(len(key_path), 0, -1))
        return next((self.origins[name] for name in keys if name in self.origins), "default")

    def path(self, text: str) -> Path:
        """Resolve a local path of the config relative to `base`; `~` is the home folder."""
        path = self.base / Path(text).expanduser()
        return short_path(path) if ".." in path.parts else path

    def seen(self, name: str) -> str:
        """Return the resolved path of a local model; return any other name unchanged."""
        path = self.path(name)
        return str(short_path(path)) if path.exists() else name


def with_changes(config: Any, changes: Mapping[str, Any]) -> Any:
    """Return a config section with dotted keys changed."""
    for key, value in changes.items():
        head, _, rest = key.partition(".")
        inner = with_changes(getattr(config, head), {rest: value}) if rest else value
        config = config.model_copy(update={head: inner})
    return config


def as_request(loaded: LoadedConfig) -> dict[str, Any]:
    """Return a config as JSON values for a child process."""
    config = loaded.config.model_dump(mode="json", exclude_unset=True)
    return {"config": config, "base": str(loaded.base.resolve()), "origins": dict(loaded.origins)}


def from_request(request: Mapping[str, Any]) -> LoadedConfig:
    """Return the config of `as_request`, in the child process."""
    return LoadedConfig(Config.model_validate(request["config"]), Path(request["base"]), None, request["origins"])


def as_sets(**values: str | Path | None) -> list[str]:
    """Return values as `KEY="VALUE"` for `--set`, quoted so that YAML reads spaces, colons and `5` as text."""
    given = {key: str(value) for key, value in values.items() if value is not None}
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items()]


ConfigLike = LoadedConfig | Mapping[str, Any] | str | Path | None
"""The forms in which a program may pass a config."""


def to_loaded_config(config: ConfigLike, sets: Sequence[str] = (), **flags: Any) -> LoadedConfig:
    """Load a config from a file, a mapping or `tunewell.yaml` in the current folder; return a loaded one unchanged."""
    if isinstance(config, LoadedConfig):
        return config
    if isinstance(config, str):
        config = Path(config) if config else None
    if not isinstance(cast(object, config), Path | Mapping | None):  # callers may pass other types
        raise UserError(f"a config is a file or a mapping, not {type(config).__name__}", fix="pass a path or a dict")
    return load_config(config, sets, **flags)


_FOLDERS = ("model", "tokenizer", "corpus", "run")
"""Keys whose value in `--set` is a text also if it looks like a number: `--set run=007` is the folder `007`."""


def load_config(
    path: Path | Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    *,
    model: str | None = None,
    data: str | Sequence[str | Path] | None = None,
    out: str | Path | None = None,
    seed: int | None = None,
    has_file: bool = True,
    text: str | None = None,
) -> LoadedConfig:
    """Load `path`, or `tunewell.yaml` in the current folder if it exists, and apply flags and `--set`.

    A mapping is treated like a file in the current folder. If `has_file` is False, no file is read. With `text`, it is
    read in place of that of the file. The last `--set` of a key takes precedence. Paths in the file are relative to the
    file, other paths to the current folder. Raises UserError with all problems.
    """
    file = _find(path) if has_file and not isinstance(path, Mapping) else None
    draft = _Draft(base=file.parent if file else Path())
    if isinstance(path, Mapping):
        draft.tree = _plain(path, (), draft.origins)
    elif file:
        _read_file(draft, file, text)
    _expand(draft)
    _rename_aliases(draft)
    flags = {"model": model, "data": data, "out": out, "seed": seed}
    for flag, value in flags.items():
        if value not in (None, (), []):
            _override(draft, FLAGS[flag], _plain(value, (), {}), f"--{flag}")
    for text in [sets] if isinstance(sets, str) else sets:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(
                f"`--set {text}` has no value", fix="write `--set KEY=VALUE`, like `--set packing.context_length=512`"
            )
        given = read_value(value, f"--set {text}")
        is_folder = key.strip() in _FOLDERS and type(given) in (int, float)
        _override(draft, key.strip(), value.strip() if is_folder else given, f"--set {text}")
    _translate_foreign(draft)
    config = Config()
    try:
        config = Config.model_validate(draft.tree)
    except ValidationError as error:
        draft.problems += _problems(error, draft)
    ranks = _ranks(draft)
    raise_problems(sorted(draft.problems, key=lambda problem: ranks.get(problem.where, 0)))
    origins = {format_key(key_path): origin for key_path, origin in draft.origins.items() if key_path}
    return LoadedConfig(config, draft.base, file, origins, tuple(draft.notes))


@dataclass
class _Draft:
    """A config that is being loaded."""

    base: Path
    tree: dict[str, Any] = field(default_factory=dict[str, Any])
    origins: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    problems: list[Problem] = field(default_factory=list[Problem])
    notes: list[str] = field(default_factory=list[str])

    def origin(self, key_path: KeyPath) -> str:
        """Return where a key path was set: the key itself, the first value inside it, or the section around it."""
        inside = (inner for inner in self.origins if inner[: len(key_path)] == key_path)
        around = (key_path[:length] for length in range(len(key_path) - 1, -1, -1))
        paths = (key_path, *inside, *around)
        return next((self.origins[path] for path in paths if path in self.origins), MAPPING_ORIGIN)

    def has(self, key_path: KeyPath) -> bool:
        """Return True if a key is set."""
        return key_path[-1] in _section(self.tree, key_path[:-1])

    def get(self, key_path: KeyPath, default: Any = None) -> Any:
        """Return the value of a key, or `default` if it is not set."""
        return _section(self.tree, key_path[:-1]).get(key_path[-1], default)

    def pop(self, key_path: KeyPath) -> Any:
        """Remove a key that is set, and return its value."""
        return _section(self.tree, key_path[:-1]).pop(key_path[-1])

    def set(self, key_path: KeyPath, value: Any, origin: str) -> None:
        """Set a key and its origin."""
        set_value(self.tree, key_path, value)
        self.origins[key_path] = origin


def _find(path: Path | None) -> Path | None:
    if path is None:
        if Path(FILE_NAME).exists():
            return Path(FILE_NAME)
        other = Path("tunewell.yml") if Path("tunewell.yml").exists() else Path("config.yaml")
        is_of_run = Path("plan.json").exists()  # a run folder has a `config.yaml` too
        if other.name == "tunewell.yml" or (other.is_file() and not is_of_run and _is_our_config(other)):
            fix = f"rename the file, or use `--config {other}`"
            raise UserError(f"there is a `{other}` here, but no `{FILE_NAME}`", fix=fix)
        return None
    if path.is_dir():
        raise UserError("the config is a folder", where=str(path), fix=f"name the file: `--config {path / FILE_NAME}`")
    if not path.exists():
        raise UserError(
            "the config file does not exist",
            where=str(path),
            fix="create one with `tunewell init FILE`, where FILE has your rows",
        )
    return path


def other_configs(folder: Path) -> list[Path]:
    """Return the files in a folder that are configs under another name, as a fix for "no model is set"."""
    files = [file for file in sorted(folder.glob("*.y*ml")) if file.name != FILE_NAME and file.is_file()]
    return [file for file in files if _is_our_config(file)]


def _is_our_config(file: Path) -> bool:
    """Return True if a file has `model` and `data`, or only keys of a tunewell config."""
    with open_file(file, "r", encoding="utf-8", errors="replace") as opened:
        keys = re.findall(r"^(\w+):", opened.read(MAX_BYTES), flags=re.MULTILINE)
    return {"model", "data"} <= {*keys} or bool(
        keys and all(key in Config.model_fields or key in ALIASES for key in keys)
    )


def _read_file(draft: _Draft, file: Path, instead: str | None) -> None:
    try:
        with open_file(file) as opened:
            raw = opened.read(MAX_BYTES + 1) if instead is None else instead.encode()
        if len(raw) > MAX_BYTES:
            raise UserError(f"the config has over {count(MAX_BYTES)} bytes; usually it has hundreds", where=str(file))
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError("the config is not UTF-8 text", where=f"{file} line {line}", fix="save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"the config cannot be read: {error.strerror}", where=str(file)) from None
    document = read_yaml(text, str(file))
    if not document.is_complete:
        raise_problems(document.problems)
    value: object = document.value
    if not isinstance(value, dict | None):
        raise UserError("the config has no keys", where=f"{file} line 1", fix="write lines like `seed: 0`")
    draft.problems += document.problems
    draft.tree = cast(dict[str, Any], value or {})
    draft.origins = {key_path: f"{file} line {line}" for key_path, line in document.lines.items()}


_NOT_SET = (None, -1)
"""Values that stand for the default in other trainers, as in `max_steps: -1`."""


def _rename_aliases(draft: _Draft) -> None:
    for key in dict.fromkeys(ALIASES.values()):
        ours = tuple(key.split("."))
        names = [alias for alias, owner in ALIASES.items() if owner == key]
        paths = [path for name in names for path in sorted(alias_paths(name)) if path != ours]
        for path in paths:
            if draft.get(path, 0) in _NOT_SET:
                draft.pop(path)
        aliases = [path for path in paths if draft.has(path)]
        for path in list(aliases):  # `warmup_steps: 0` beside `warmup_ratio`
            if len(aliases) > 1 and type(value := draft.get(path)) in (int, float) and not value:
                draft.pop(path)
                aliases.remove(path)
        found = [ours, *aliases] if draft.has(ours) else aliases
        if len(found) > 1:
            names = " and ".join(f"`{format_key(key_path)}` ({draft.origin(key_path)})" for key_path in found)
            draft.problems.append(Problem(f"{names} are the same key", draft.origin(found[-1]), f"keep `{key}`"))
        values = [draft.pop(key_path) for key_path in found]
        if found:
            draft.set(ours, values[0], draft.origin(found[0]))


def _translate_foreign(draft: _Draft) -> None:
    """Convert the keys of other trainers that are not aliases, at the top level and in sections."""
    sections: list[KeyPath] = [(), *((name,) for name in Config.model_fields)]
    keys = [(*path, key) for path in sections for key in _section(draft.tree, path)]
    unknown = {str(key[-1]): key for key in keys if dotted_name(key) not in all_keys()}
    if draft.get(kind := ("method", "kind"), METHODS.names()[0]) not in METHODS.names():
        unknown["kind"] = kind
    if not unknown:
        return
    from tunewell.config.foreign import table, translate  # only for configs with unknown keys

    given = {name: draft.get(path) for name, path in unknown.items()}
    length = draft.get(("packing", "context_length"))
    found, ranks = translate(given, context_length=length), _ranks(draft)
    shown = {name: f"`{name}`" for name in unknown} | {"kind": f"`method.kind: {given.get('kind')}`"}
    for name in found.used:
        draft.pop(unknown[name])
    for name, reason in found.refused.items():
        what = f"{shown[name]} is not a tunewell setting"
        draft.problems.append(Problem(what, draft.origin(unknown[name]), reason))
    for key in dict.fromkeys(setting[0] for setting in found.settings):
        ours = tuple(key.split("."))
        claims = [(draft.origin(ours), draft.get(ours), key)] if draft.has(ours) else []
        for _, value, names in [setting for setting in found.settings if setting[0] == key]:
            origin = max((draft.origin(unknown[name]) for name in names), key=lambda text: ranks.get(text, 0))
            claims.append((origin, value, names[0]))
        claims.sort(key=lambda claim: (claim[0].startswith("--"), ranks.get(claim[0], 0)))  # the last one wins
        origin, value, name = claims[-1]
        others = [claim for claim in claims if claim[1] != value and not origin.startswith("--")]
        if not others:
            draft.set(ours, value, origin)
            continue
        at, earlier, other = others[-1]
        both = f"{shown.get(other, f'`{other}`')} ({at}) and {shown.get(name, f'`{name}`')} ({origin})"
        what = f"{both} are the same setting"
        fix = f"remove `{key}`" if "kind" in (name, other) else f"keep `{key}`"
        if key not in (name, other):
            what = f"{both} both set `{key}`, to {_shown(earlier)} and {_shown(value)}"
            fixes = (table().get(claim[2], {}).get("instead", "") for claim in claims)
            fix = next((fix for fix in fixes if f"`{key}" in fix), "keep one of them")
        draft.problems.append(Problem(what, origin, fix))
    for text, wanted in found.notes:
        forced = [key for key, value in wanted.items() if draft.get(tuple(key.split("."))) == value]
        settings = ", ".join(f"`{key}: {json.dumps(wanted[key])}`" for key in forced).replace('"', "")
        if forced or not wanted:
            draft.notes.append(text.replace("{}", settings))


def _section(tree: object, key_path: KeyPath) -> dict[Any, Any]:
    for step in key_path:
        tree = cast(dict[Any, object], tree).get(step) if isinstance(tree, dict) else None
    return cast(dict[Any, Any], tree) if isinstance(tree, dict) else {}


def _meanings(section: type[Section], value: object) -> list[str]:
    """Return the keys that a value in place of a section can mean: `kind` for `method: lora`."""
    if _is_switch(section, value):
        return []
    return [name for name, types in section.single.items() if type(value) in types]


def _is_switch(section: type[Section], value: object) -> bool:
    return bool(section.switch) and str(value).lower() in ("true", "false", "yes", "no", "on", "off")


def _not_a_section(key: Key, section: type[Section], value: object, where: str) -> Problem:
    """Return the problem of a value in place of a section."""
    fix = f"its keys are {', '.join(child.rpartition('.')[2] for child in key.children)}"
    if _is_switch(section, value):
        fix = section.switch
    elif isinstance(value, str) and _meanings(section, parse_scalar(value)):
        fix = "remove the quotes"
    elif meanings := _meanings(section, value):
        valid: list[str] = []
        for name in meanings:
            with suppress(ValidationError):
                section.model_validate({name: value})
                valid.append(name)
        fix = f"write {' or '.join(f'`{key.name}: {{{name}: {value}}}`' for name in valid)}"
        if not valid:
            takes = (f"`{key.name}.{name}` to {all_keys()[f'{key.name}.{name}'].takes}" for name in meanings)
            fix = f"set {'; or '.join(takes)}"
    return Problem(f"`{key.name}` is a section, not {_shown(value)}", where, fix)


def _expand(draft: _Draft) -> None:
    """Remove empty sections and expand short forms, so that aliases and `--set` can address the keys of sections.

    A value that cannot stand for a section is removed, and reported once.
    """
    for key in all_keys().values():
        key_path = tuple(key.name.split("."))
        if key.section is None or not key.is_section or isinstance(draft.get(key_path, {}), dict):
            continue
        value = draft.pop(key_path)
        if len(meanings := _meanings(key.section, value)) == 1:
            draft.set((*key_path, meanings[0]), value, draft.origin(key_path))
        elif value is not None:
            draft.problems.append(_not_a_section(key, key.section, value, draft.origin(key_path)))
    data = _section(draft.tree, ("data",))
    if "sources" in data:
        data["sources"] = as_sources(data["sources"])
        for source in cast(list[Any], data["sources"]) if isinstance(data["sources"], list) else ():
            if isinstance(path := _section(source, ()).get("path"), str):
                source["path"] = hub_address(path, draft.base)


def _override(draft: _Draft, key: str, value: Any, origin: str) -> None:
    key_path = resolve_alias(parse_key(key))
    if key_path[:2] == ("data", "sources") and any(isinstance(step, str) for step in key_path[2:3]):
        sources = draft.get(("data", "sources"))
        if isinstance(sources, list) and len(cast(list[object], sources)) == 1:
            key_path = (*key_path[:2], 0, *key_path[2:])  # there is one source, so it needs no number
    owner = all_keys().get(dotted_name(key_path))
    if owner and owner.is_section and owner.section and len(meanings := _meanings(owner.section, value)) == 1:
        key_path = (*key_path, meanings[0])
    if key_path == ("data", "sources"):
        value = as_sources(value)
    sections = tuple(f"`{format_key(key_path[:length])}` is a section" for length in range(1, len(key_path) + 1))
    draft.problems = [problem for problem in draft.problems if not problem.what.startswith(sections)]
    try:
        if draft.base != Path():
            value = respell_paths(dotted_name(key_path), value, lambda path: relative_path(path, draft.base))
        set_value(draft.tree, key_path, value)
    except UserError as error:
        raise UserError(error.what, where=origin, fix=error.fix) from None
    others = {path: text for path, text in draft.origins.items() if path[: len(key_path)] != key_path}
    draft.origins = others | {key_path: origin}
    _expand(draft)


def _problems(error: ValidationError, draft: _Draft) -> list[Problem]:
    found: dict[KeyPath, Problem] = {}
    for detail in error.errors(include_url=False):
        key_path = _known_part(detail["loc"], is_unknown=detail["type"] == "extra_forbidden")
        if isinstance(key_path[-1], int) and isinstance(draft.get(key_path[:-1]), str):
            key_path = key_path[:-1]  # `report_to: all` is read as a list with one entry
        found.setdefault(key_path, _problem(key_path, detail, draft.origin(key_path)))
    return list(found.values())


def _ranks(draft: _Draft) -> dict[str, int]:
    """Return the position of each origin: in the file, then on the command line."""
    return {origin: rank for rank, origin in enumerate(dict.fromkeys(draft.origins.values()))}


def _known_part(location: KeyPath, *, is_unknown: bool) -> KeyPath:
    """Remove the parts that pydantic appends to a key path, like the union member that it tried."""
    if is_unknown:
        return location
    while location and dotted_name(location) not in all_keys():
        location = location[:-1]
    return location


def _problem(key_path: KeyPath, detail: Any, where: str) -> Problem:
    name = format_key(key_path)
    if detail["type"] == "extra_forbidden":
        if dotted_name(key_path) in all_keys():  # the file contains a dotted key
            outer, _, inner = name.rpartition(".")
            return Problem(f"unknown key `{name}`", where, f"write `{inner}` inside `{outer}`")
        otherwise = "`tunewell explain` lists every key"
        if {*ALIASES, *Config.model_fields} & {*_section(detail["input"], ())}:
            otherwise = "move its keys to the top level of the file"
        from tunewell.config.releases import owner_of  # only for configs with unknown keys

        if owner := owner_of(str(key_path[-1])):
            return Problem(f"unknown key `{name}`", where, f"tunewell has nothing like this setting of {owner}")
        fix = did_you_mean(nearest_keys(dotted_name(key_path)), otherwise)
        return Problem(f"unknown key `{name}`", where, fix)
    if detail["type"] == "missing":
        return Problem(f"`{name}` is missing", where, f"set it to {all_keys()[dotted_name(key_path)].takes}")
    if detail["type"] == "value_error":
        return Problem(f"`{name}` {detail['ctx']['error']}", where)
    value = detail["input"]
    key = all_keys()[dotted_name(key_path)]
    is_quoted_number = isinstance(value, str) and isinstance(parse_scalar(value), int | float)
    takes = key.takes.removeprefix("a list of ") if isinstance(key_path[-1], int) else key.takes
    fix = "remove the quotes" if is_quoted_number else None
    return Problem(f"`{name}` must be {takes}, not {_shown(value)}", where, fix)


def _shown(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, dict | list):
        return "a list" if isinstance(value, list) else "a section"
    if isinstance(value, bool):
        return "true" if value else "false"
    return shorten(repr(value), 59)
