"""The ledger of a migration: what became of every key of the source."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from tunewell.config import foreign as foreign_keys
from tunewell.config.foreign import Translation
from tunewell.config.load import load_config
from tunewell.config.releases import owner_of
from tunewell.config.schema import ALIASES
from tunewell.config.yaml_reader import parse_scalar
from tunewell.core.errors import UserError
from tunewell.core.files import read_data
from tunewell.core.text import shorten

Status = Literal["kept", "translated", "not needed", "lost"]
STATUSES: tuple[Status, ...] = ("kept", "translated", "not needed", "lost")
_SHOWN = 44
_SWITCHES = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
_GROUPED = re.compile(r"\d{1,3}(_\d{3})+")


@dataclass(frozen=True)
class Computed:
    """A value that the source computes while it runs. It is not known, because nothing is run here."""

    text: str
    call: str = ""
    """The call in the table that makes the value."""

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Setting:
    """A key of the source with its value."""

    name: str
    value: Any
    file: str
    line: int
    call: str = ""
    """The Python call whose argument it is, or the data set or the section to which it belongs."""
    alias: str = ""
    """The key as it is in the source, if `name` is what it means for a data set."""

    @property
    def label(self) -> str:
        """The key as it is shown: `SFTConfig.learning_rate`."""
        return self.alias or (f"{self.call}.{self.name}" if self.call else self.name)


@dataclass(frozen=True)
class Entry:
    """What became of a key."""

    key: str
    value: str
    file: str
    line: int
    status: Status
    ours: str = ""
    """What is in `tunewell.yaml` for it, like `train.epochs: 3`."""
    why: str = ""


@dataclass
class ForeignConfig:
    """What was read from the files of another tool."""

    tool: str
    text: str = ""
    settings: list[Setting] = field(default_factory=list[Setting])
    data_sets: list[list[Setting]] = field(default_factory=list[list[Setting]])
    entries: list[Entry] = field(default_factory=list[Entry])
    """Keys that are dealt with."""
    sources: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Our `data.sources`."""
    own: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keys of ours that follow from the kind of the source or from its rows."""
    defaults: list[str] = field(default_factory=list[str])
    """Tables of `foreign_defaults.toml` that hold for this config."""
    processes: int | None = None
    """How many processes the source trains with, if it says so."""

    def add(self, one: Setting, status: Status, ours: str = "", why: str = "") -> None:
        """Add the entry of a setting."""
        self.entries.append(Entry(one.label, shown_value(one.value), one.file, one.line, status, ours, why))

    def join(self, other: "ForeignConfig") -> "ForeignConfig":
        """Add what another file says, and return this one. Settings of the other come later, so they win."""
        for name in ("settings", "data_sets", "entries", "defaults"):
            getattr(self, name).extend(getattr(other, name))
        self.own |= other.own
        self.text += other.text
        self.processes = other.processes or self.processes
        self.tool = other.tool if self.tool in ("", "transformers") else self.tool
        return self


@dataclass(frozen=True)
class Migration:
    """The result of a migration."""

    tool: str
    path: Path
    config: str
    """The text of `tunewell.yaml`."""
    entries: Sequence[Entry]
    defaults: Sequence[Entry]
    """Keys that the source left out, whose default there is written into the config."""
    notes: Sequence[str]
    traps: Sequence[str]
    """Known traps of the source, and what tunewell does about each."""
    batch: str

    def of(self, status: Status) -> list[Entry]:
        """Return the entries with a status."""
        return [one for one in self.entries if one.status == status]

    def as_json(self) -> dict[str, Any]:
        """Return the result for `--json`, without the text of the config."""
        counts = {status: len(self.of(status)) for status in STATUSES}
        head = {"tool": self.tool, "config": str(self.path), "keys": len(self.entries), "counts": counts}
        return {**head, **{key: value for key, value in asdict(self).items() if key not in (*head, "path")}}


def why_not(tree: dict[str, Any]) -> str:
    """Return why a config is not valid, or an empty text."""
    try:
        load_config(tree)
    except UserError as error:
        return error.what.partition("\n")[0]
    return ""


@cache
def tables() -> dict[str, Any]:
    """Return `config/foreign_rows.toml`."""
    return read_data(foreign_keys.__file__, "foreign_rows.toml")


@cache
def rows_of(tool: str) -> dict[str, dict[str, Any]]:
    """Return the rows of the keys of a tool: those of our aliases and of `foreign.json`, and what is known beyond."""
    if tool == "openai":
        return tables()["openai"]
    values = {name: row for names, row in tables()["values"].items() for name in names.split()}
    aliases = {**ALIASES, **{name: name for name in ("seed", "run", "model", "tokenizer")}}
    return {**foreign_keys.table(), **{name: {"key": key, "same": [""]} for name, key in aliases.items()}, **values}


def fate(one: Setting, found: Translation, rows: Mapping[str, dict[str, Any]]) -> tuple[Status, dict[str, Any], str]:
    """Return what became of a setting: its status, our keys, and why."""
    own = {key: value for key, value, names in found.settings if one.name in names}
    if one.name in found.refused:
        return "lost", {}, rows.get(one.name, {}).get("lost", found.refused[one.name])
    if one.name in found.unneeded:
        return "not needed", {}, found.unneeded[one.name]
    if own or one.name in found.used:
        return "translated", own, "" if own else "together with other keys of its kind"
    owner = owner_of(one.name)
    return "lost", {}, f"tunewell has nothing like this setting{f' of {owner}' if owner else ''}"


def as_dict(value: Any) -> dict[str, Any]:
    """Return a value if it is a mapping, else an empty one."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Return a value as a list: one value becomes a list of one, null an empty one."""
    return cast(list[Any], value) if isinstance(value, list) else [] if value is None else [value]


def shown_value(value: Any) -> str:
    """Return a value on one short line, as YAML writes it."""
    names = {None: "null", True: "true", False: "false"}
    text = names[value] if value is None or isinstance(value, bool) else str(value)
    return shorten(" ".join(text.split()), _SHOWN)


def scalar(value: Any) -> Any:
    """Return a text as the number or the switch that it stands for: other tools read YAML 1.1, and quoted numbers."""
    if not isinstance(value, str):
        return value
    if value.lower() in _SWITCHES:
        return _SWITCHES[value.lower()]
    return parse_scalar(value.replace("_", "") if _GROUPED.fullmatch(value) else value) if value else value
