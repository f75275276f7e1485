"""The version shield: read `shield.toml`, and find the entries that match the installed versions."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

Level = Literal["broken", "warning", "note"]
SHIELD = Path(__file__).with_name("shield.toml")


@dataclass(frozen=True)
class Conflict:
    """Versions that do not work together."""

    id: str
    when: Sequence[str]
    """Requirements that must all be true of the installed packages."""
    level: Level
    what: str
    why: str
    install: Sequence[str]
    """Requirements that mend it."""
    evidence: Sequence[str]
    note: str = ""
    """What else must change, e.g. the arguments of a script."""


@dataclass(frozen=True)
class CudaRelease:
    """A major release of CUDA and the oldest driver that runs it."""

    major: int
    driver: int
    evidence: str


@dataclass(frozen=True)
class TorchWheel:
    """The GPU generations for which a torch wheel has kernels."""

    torch: str
    """Versions of torch, like `>=2.11`."""
    cuda: str
    """CUDA versions, like `==12.6`."""
    index: str
    """Name of the wheel index: `cu126`."""
    oldest: str
    newest: str
    evidence: str


@dataclass(frozen=True)
class KnownGood:
    """Versions that were trained with together."""

    tool: str
    packages: Sequence[str]
    checked: str


@dataclass(frozen=True)
class Shield:
    """The content of `shield.toml`."""

    conflicts: Sequence[Conflict]
    cuda: Sequence[CudaRelease]
    wheels: Sequence[TorchWheel]
    known_good: Sequence[KnownGood]


@cache
def read_shield(path: Path = SHIELD) -> Shield:
    """Read the data file. An unknown or missing key raises TypeError."""
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    return Shield(
        conflicts=[Conflict(**entry) for entry in found["conflict"]],
        cuda=[CudaRelease(**entry) for entry in found["cuda"]],
        wheels=[TorchWheel(**entry) for entry in found["wheel"]],
        known_good=[KnownGood(**entry) for entry in found["known_good"]],
    )


def matching_conflicts(versions: Mapping[str, str], shield: Shield) -> list[Conflict]:
    """Return the conflicts whose requirements are all met by the installed versions."""
    return [entry for entry in shield.conflicts if all(is_met(text, versions) for text in entry.when)]


def known_good_sets(name: str, shield: Shield) -> list[KnownGood]:
    """Return the known-good sets of a tool. Without one, return those that contain the package."""
    own = [entry for entry in shield.known_good if entry.tool == name]
    return own or [
        entry for entry in shield.known_good if any(Requirement(text).name == name for text in entry.packages)
    ]


def is_met(requirement: str, versions: Mapping[str, str]) -> bool:
    """Return whether a package is installed in a version that meets the requirement."""
    try:
        wanted = Requirement(requirement)
        return wanted.specifier.contains(Version(versions[wanted.name]), prereleases=True)
    except (KeyError, InvalidVersion, InvalidRequirement):
        return False
