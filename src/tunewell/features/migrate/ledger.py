"""The ledger of a migration: what became of every key of the source."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from tunewell.core.text import shorten

Status = Literal["kept", "translated", "not needed", "lost"]
STATUSES: tuple[Status, ...] = ("kept", "translated", "not needed", "lost")
_SHOWN = 44


@dataclass(frozen=True)
class Setting:
    """A key of the source with its value."""

    name: str
    value: Any
    file: str
    line: int
    call: str = ""
    """The Python call whose keyword it is, or the section of a file."""

    @property
    def label(self) -> str:
        """The key as it is shown: `SFTConfig.learning_rate`."""
        return f"{self.call}.{self.name}" if self.call else self.name


@dataclass(frozen=True)
class Computed:
    """A value that the source computes while it runs. It is not known, because nothing is run here."""

    text: str

    def __repr__(self) -> str:
        return self.text


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


def as_dict(value: Any) -> dict[str, Any]:
    """Return a value if it is a mapping, else an empty one."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Return a value as a list: one value becomes a list of one, null an empty one."""
    return cast(list[Any], value) if isinstance(value, list) else [] if value is None else [value]


def entry(setting: Setting, status: Status, ours: str = "", why: str = "") -> Entry:
    """Return the entry of a setting."""
    value = shown_value(setting.value)
    return Entry(setting.label, value, setting.file, setting.line, status, ours, why)


def shown_value(value: Any) -> str:
    """Return a value on one short line, as YAML writes it."""
    names = {None: "null", True: "true", False: "false"}
    text = names[value] if value is None or isinstance(value, bool) else str(value)
    return shorten(" ".join(text.split()), _SHOWN)


@dataclass
class ForeignConfig:
    """What was read from the files of another tool."""

    tool: str
    settings: list[Setting] = field(default_factory=list[Setting])
    entries: list[Entry] = field(default_factory=list[Entry])
    """Keys that the reader has dealt with: those of the rows."""
    sources: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Our `data.sources`."""
    own: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keys of ours that follow from the rows, like `data.held_out`."""
    defaults: list[str] = field(default_factory=list[str])
    """Tables of `foreign_defaults.toml` that hold for this config."""
    words: set[str] = field(default_factory=set[str])
    """Names of calls and flags that occur, for the known traps."""
    text: str = ""
    processes: int | None = None
    """How many processes the source trains with, if it says so."""


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
        """Return the result for `--json`."""
        counts = {status: len(self.of(status)) for status in STATUSES}
        listed = {
            "entries": [asdict(one) for one in self.entries],
            "defaults": [asdict(one) for one in self.defaults],
        }
        head = {"tool": self.tool, "config": str(self.path), "keys": len(self.entries), "counts": counts}
        return {**head, **listed, "batch": self.batch, "notes": list(self.notes), "traps": list(self.traps)}
