"""All facts about an environment, as the checks read them. Tests replay recorded ones."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from tunewell.core.child import run
from tunewell.core.errors import UserError
from tunewell.machine.nvidia_smi import Gpu, SmiState
from tunewell.model_files.checks import ModelState

_COLLECTOR_SECONDS = 60


@dataclass(frozen=True)
class Package:
    """An installed package, or what is left of one."""

    name: str
    version: str
    folder: str
    """Its metadata folder."""
    problem: str | None = None
    """Why the metadata cannot be used; None if it can."""
    requires: Sequence[str] = ()
    requires_python: str | None = None
    files: int = 0
    """Number of code files in `RECORD`."""
    missing: Sequence[str] = ()
    """Code files of `RECORD` that do not exist."""


@dataclass(frozen=True)
class Python:
    """An interpreter."""

    version: str
    executable: str
    bits: int = 64
    is_venv: bool = True
    has_pip: bool = True
    markers: Mapping[str, str] = field(default_factory=dict[str, str])
    prefix: str = ""


@dataclass(frozen=True)
class TorchBuild:
    """How torch was built, read from its files."""

    version: str
    cuda: str | None = None
    hip: str | None = None


@dataclass(frozen=True)
class ImportTrial:
    """The result of importing one package in a child process."""

    name: str
    error: str | None = None
    culprit: str | None = None
    """The package in which the import failed."""
    seconds: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Disk:
    """A file system that a run writes to."""

    purpose: str
    path: str
    free_bytes: int
    is_writable: bool = True
    free_inodes: int | None = None


@dataclass(frozen=True)
class MachineFacts:
    """The hardware and the system."""

    smi: SmiState = "not asked"
    smi_message: str = ""
    gpus: Sequence[Gpu] = ()
    kernel_driver: str | None = None
    """Version of the loaded NVIDIA kernel module."""
    num_pci_gpus: int = 0
    """NVIDIA GPUs on the PCI bus, whether a driver is installed or not."""
    is_wsl: bool = False
    memory_bytes: int | None = None
    free_memory_bytes: int | None = None
    shared_memory_bytes: int | None = None
    disks: Sequence[Disk] = ()
    variables: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Environment:
    """Everything that the checks read. `imports` is None in the fast part, which imports nothing."""

    python: Python
    packages: Sequence[Package] = ()
    leftovers: Sequence[str] = ()
    without_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """Packages of the stack whose files are there, but no metadata -> their version, or an empty text."""
    shadowed: Sequence[str] = ()
    torch: TorchBuild | None = None
    bitsandbytes: Sequence[str] | None = None
    machine: MachineFacts = MachineFacts()
    models: Sequence[ModelState] = ()
    imports: Sequence[ImportTrial] | None = None
    held_by_kernel: Sequence[tuple[str, str, str]] = ()
    """Packages that a notebook kernel holds in another version: name, held version, installed version."""
    precision: str = "auto"
    """`train.precision` of the config."""
    bytes_per_parameter: float = 4.0
    """Bytes of a frozen weight in the run: 4 in fp32, 2 in bf16, 0.5 in NF4."""
    hub_problem: str | None = None
    """Why the hub cannot be reached; None if it can, or was not asked."""
    is_training: bool = False
    """Whether `train` asks: it cannot start without torch and transformers."""

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the usable packages. The first folder of `sys.path` wins, as in an import."""
        found: dict[str, str] = {}
        for package in self.packages:
            if package.problem is None:
                found.setdefault(package.name, package.version)
        return found

    @property
    def damaged(self) -> set[str]:
        """Names of the packages without usable metadata."""
        return {package.name for package in self.packages if package.problem} | set(self.without_metadata)

    def trial(self, name: str) -> ImportTrial | None:
        """Return the import of a package, or None if it was not tried."""
        return next((trial for trial in self.imports or () if trial.name == name), None)


def public_version(version: str) -> str | None:
    """Return a version without a local part like +cpu, which is on no package index; None if it is not a version."""
    with suppress(InvalidVersion):
        return Version(version).public
    return None


def read_packages(python: str | None, *, is_fast: bool = False) -> Environment:
    """Return the packages of this interpreter, or of another one by its path."""
    if python is None:
        from tunewell.features.doctor.packages import collect_packages

        return as_environment(collect_packages(is_fast=is_fast))
    script = Path(__file__).with_name("packages.py")
    try:
        return as_environment(json.loads(run([python, str(script)], seconds=_COLLECTOR_SECONDS).out))
    except (OSError, ValueError) as error:  # TimeoutError is an OSError
        raise UserError(
            f"`{python}` is not a Python interpreter that runs: {type(error).__name__}",
            fix="give the path of an interpreter, e.g. `--python ~/venv/bin/python`",
        ) from None


def as_environment(found: dict[str, Any]) -> Environment:
    """Convert the facts of `packages.py`."""
    torch = found["torch"]
    return Environment(
        **found
        | {
            "python": Python(**found["python"]),
            "packages": [Package(**package) for package in found["packages"]],
            "torch": TorchBuild(torch["__version__"] or "unknown", torch["cuda"], torch["hip"]) if torch else None,
        }
    )
