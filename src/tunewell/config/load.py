"""Read the config: the file, then named flags, then `--set`, checked together, each value with its origin.

Loading is pure: it looks at no machine, reads no environment variable and changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tunewell.config.keys import alias_paths, all_keys, dotted_name, format_key, nearest_keys, parse_key, resolve_alias
from tunewell.config.overrides import rebase_paths, set_value
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
from tunewell.core.errors import UserError
from tunewell.core.units import count

# A config that a program hands over as a mapping, made into what a file would have been read as.

MAPPING_ORIGIN = "the config"
"""The origin of every value of such a config."""


def read_mapping(given: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Copy a mapping into plain dictionaries and lists, with the origin of each value.

    Raises UserError for a key that is no text, and for what holds itself.
    """
    origins: dict[KeyPath, str] = {}
    return _plain(given, (), origins), origins


def _plain(value: Any, steps: KeyPath, origins: dict[KeyPath, str]) -> Any:
    if len(steps) > MAX_DEPTH:
        raise UserError(f"the config is nested more than {MAX_DEPTH} deep", where=f"`{format_key(steps[:3])}`")
    origins[steps] = MAPPING_ORIGIN
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                where = f"`{format_key(steps)}`" if steps else MAPPING_ORIGIN
                raise UserError(f"the key {key!r} is not text", where=where)
        return {key: _plain(entry, (*steps, key), origins) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, (*steps, number), origins) for number, entry in enumerate(value)]
    return str(value) if isinstance(value, Path) else value


FILE_NAME = "tunewell.yaml"
FLAGS = {"model": "model", "data": "data.sources", "out": "corpus", "seed": "seed"}
"""Named flags and the keys they set; every other key is set with `--set`."""


@dataclass(frozen=True)
class LoadedConfig:
    """A config, where it was found, and where each of its values was set."""

    config: Config
    base: Path
    """The folder that relative paths in the config start from."""
    file: Path | None
    origins: Mapping[str, str]
    """Dotted key to `tunewell.yaml line 3`, `--model` or `--set KEY=VALUE`; keys left at their default are absent."""

    def origin(self, key: str) -> str:
        """Say where a key's value was set: at the key itself, at a group around it, or nowhere (`default`)."""
        steps = parse_key(key)
        ways = (format_key(steps[:length]) for length in range(len(steps), 0, -1))
        return next((self.origins[way] for way in ways if way in self.origins), "default")

    def path(self, text: str) -> Path:
        """Resolve a path that the config names; `~` is the home folder."""
        return self.base / Path(text).expanduser()

    def seen(self, name: str) -> str:
        """Name a model as it can be found from here: a path where it is one, otherwise as it is."""
        path = self.path(name)
        return str(path) if path.exists() else name


ConfigLike = LoadedConfig | Mapping[str, Any] | str | Path | None
"""A config as a program may hand it over."""


def to_loaded_config(config: ConfigLike, sets: Sequence[str] = (), **flags: Any) -> LoadedConfig:
    """Take a config that was loaded, or load it from a file, a mapping, or `tunewell.yaml` of the current folder."""
    if isinstance(config, LoadedConfig):
        return config
    if isinstance(config, str):
        config = Path(config) if config else None
    if not isinstance(config, Path | Mapping | None):
        raise UserError(f"a config is a file or a mapping, not {type(config).__name__}", fix="give its path or a dict")
    return load_config(config, sets, **flags)


def load_config(
    path: Path | Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    *,
    model: str | None = None,
    data: str | Sequence[str | Path] | None = None,
    out: str | Path | None = None,
    seed: int | None = None,
    has_file: bool = True,
) -> LoadedConfig:
    """Load `path`, or `tunewell.yaml` of the current folder where there is one, and put flags and `--set` over it.

    A mapping is read as a file of the current folder would be. Without `has_file` no file is looked for: flags and
    `--set` are all there is.

    Of two `--set` for one key the later counts. Relative paths in the file start from the file's folder, those in flags
    and `--set` from the current folder. Raises UserError with every problem found.
    """
    file = _find(path) if has_file and not isinstance(path, Mapping) else None
    draft = _Draft(base=file.parent if file else Path())
    if isinstance(path, Mapping):
        draft.tree, draft.origins = read_mapping(path)
        _rename_aliases(draft)
        _spell_out(draft.tree)
    elif file:
        _read_file(draft, file)
    flags = {"model": model, "data": data, "out": out, "seed": seed}
    for flag, value in flags.items():
        if value is not None and value != () and value != []:
            _override(draft, FLAGS[flag], _as_plain(value), f"--{flag}")
    for text in [sets] if isinstance(sets, str) else sets:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(
                f"`--set {text}` has no value", fix="write `--set KEY=VALUE`, like `--set packing.context_length=512`"
            )
        _override(draft, key.strip(), read_value(value, f"--set {text}"), f"--set {text}")
    try:
        config = Config.model_validate(draft.tree)
    except ValidationError as error:
        raise_problems(_in_file_order([*draft.problems, *_problems(error, draft)], draft))
        raise
    raise_problems(draft.problems)
    return LoadedConfig(
        config, draft.base, file, {format_key(steps): origin for steps, origin in draft.origins.items() if steps}
    )


@dataclass
class _Draft:
    """A config being put together."""

    base: Path
    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def origin(self, steps: KeyPath) -> str:
        """Say where `steps` were set: there, else by the first value inside, else by a group around them."""
        inside = (inner for inner in self.origins if inner[: len(steps)] == steps)
        around = (steps[:length] for length in range(len(steps) - 1, -1, -1))
        ways = (steps, *inside, *around)
        return next((self.origins[way] for way in ways if way in self.origins), MAPPING_ORIGIN)


def _find(path: Path | None) -> Path | None:
    if path is None:
        other = Path("tunewell.yml")
        if Path(FILE_NAME).exists():
            return Path(FILE_NAME)
        if other.exists():
            raise UserError(
                f"there is a `{other}` here, but no `{FILE_NAME}`", fix=f"rename it, or use `--config {other}`"
            )
        return None
    if path.is_dir():
        raise UserError("the config is a folder", where=str(path), fix=f"name the file: `--config {path / FILE_NAME}`")
    if not path.exists():
        raise UserError(
            "the config file does not exist", where=str(path), fix="make one with `tunewell init DATA --model MODEL`"
        )
    return path


def _read_file(draft: _Draft, file: Path) -> None:
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise UserError(f"the config has over {count(MAX_BYTES)} bytes; one has a few hundred", where=str(file))
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError("the config is not UTF-8 text", where=f"{file} line {line}", fix="save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"the config cannot be read: {error.strerror}", where=str(file)) from None
    reading = read_yaml(text, str(file))
    if not reading.is_complete:
        raise_problems(reading.problems)
    if not isinstance(reading.value, dict | None):
        raise UserError("the config is not a group of keys", where=f"{file} line 1", fix="write lines like `seed: 0`")
    draft.problems += reading.problems
    draft.tree = reading.value or {}
    draft.origins = {steps: f"{file} line {line}" for steps, line in reading.lines.items()}
    _rename_aliases(draft)
    _spell_out(draft.tree)


def _rename_aliases(draft: _Draft) -> None:
    for key in dict.fromkeys(ALIASES.values()):
        ours = tuple(key.split("."))
        places = [
            ours,
            *(steps for alias, owner in ALIASES.items() if owner == key for steps in sorted(alias_paths(alias))),
        ]
        found = [steps for steps in dict.fromkeys(places) if steps[-1] in _group(draft.tree, steps[:-1])]
        if len(found) > 1:
            names = " and ".join(f"`{format_key(steps)}` ({draft.origin(steps)})" for steps in found)
            draft.problems.append(Problem(f"{names} are one key", draft.origin(found[-1]), f"keep `{key}`"))
        for steps in found:
            value = _group(draft.tree, steps[:-1]).pop(steps[-1])
            if steps == found[0]:
                set_value(draft.tree, ours, value)
                draft.origins[ours] = draft.origins[steps]


def _group(tree: Any, steps: KeyPath) -> dict[Any, Any]:
    for step in steps:
        tree = tree.get(step) if isinstance(tree, dict) else None
    return tree if isinstance(tree, dict) else {}


def _spell_out(tree: dict[str, Any]) -> None:
    """Turn groups left empty into absent ones, and short sources into long ones, so that `--set` can reach inside."""
    for name in [key.name for key in all_keys().values() if key.is_section]:
        *parents, last = name.split(".")
        group = _group(tree, tuple(parents))
        if last in group and group[last] is None:
            del group[last]
    data = _group(tree, ("data",))
    if "sources" in data:
        data["sources"] = as_sources(data["sources"])


def _override(draft: _Draft, key: str, value: Any, origin: str) -> None:
    steps = resolve_alias(parse_key(key))
    if steps == ("data", "sources"):
        value = as_sources(value)
    try:
        set_value(draft.tree, steps, rebase_paths(draft.base, dotted_name(steps), value))
    except UserError as error:
        raise UserError(error.what, where=origin, fix=error.fix) from None
    draft.origins = {old: text for old, text in draft.origins.items() if old[: len(steps)] != steps} | {steps: origin}
    _spell_out(draft.tree)


def _as_plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def _problems(error: ValidationError, draft: _Draft) -> list[Problem]:
    found: dict[KeyPath, Problem] = {}
    for detail in error.errors(include_url=False):
        steps = _known_part(detail["loc"], is_unknown=detail["type"] == "extra_forbidden")
        found.setdefault(steps, _problem(steps, detail, draft.origin(steps)))
    return list(found.values())


def _in_file_order(problems: list[Problem], draft: _Draft) -> list[Problem]:
    ranks: dict[str, int] = {}
    for rank, origin in enumerate(draft.origins.values()):
        ranks.setdefault(origin, rank)
    return sorted(problems, key=lambda problem: ranks.get(problem.where, 0))


def _known_part(location: KeyPath, *, is_unknown: bool) -> KeyPath:
    """Cut off what the validator appended to a key, like the branch of a union it tried."""
    if is_unknown:
        return location
    while location and dotted_name(location) not in all_keys():
        location = location[:-1]
    return location


def _problem(steps: KeyPath, detail: Any, where: str) -> Problem:
    name = format_key(steps)
    if detail["type"] == "extra_forbidden":
        if dotted_name(steps) in all_keys():  # a key with dots, as flags have them
            outer, _, inner = name.rpartition(".")
            return Problem(f"unknown key `{name}`", where, f"write `{inner}` inside `{outer}`")
        guesses = " or ".join(f"`{guess}`" for guess in nearest_keys(dotted_name(steps)))
        return Problem(
            f"unknown key `{name}`",
            where,
            f"did you mean {guesses}?" if guesses else "`tunewell explain` lists every key",
        )
    if detail["type"] == "missing":
        return Problem(f"`{name}` is missing", where, f"it takes {all_keys()[dotted_name(steps)].takes}")
    if detail["type"] == "value_error":
        return Problem(f"`{name}` {detail['ctx']['error']}", where)
    value = detail["input"]
    key = all_keys()[dotted_name(steps)]
    if key.children and not isinstance(value, dict | list):
        inside = ", ".join(child.rpartition(".")[2] for child in key.children)
        return Problem(f"`{name}` holds keys, not {_shown(value)}", where, f"its keys are {inside}")
    is_quoted_number = isinstance(value, str) and isinstance(parse_scalar(value), int | float)
    return Problem(
        f"`{name}` must be {key.takes}, not {_shown(value)}", where, "take off the quotes" if is_quoted_number else None
    )


def _shown(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, dict | list):
        return "a list" if isinstance(value, list) else "a group of keys"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if len(repr(value)) < 60 else repr(value)[:56] + "..."
