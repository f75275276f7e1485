"""Estimate the size of an export before it is written, and require that much free disk space."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.core.units import size_bytes
from tunewell.export.targets.base import ExportContext, ExportTarget

_OTHER_FILES_BYTES = 64 << 20
"""Tokenizers, model cards and the reference of the proof."""


@dataclass(frozen=True)
class DiskSpace:
    """The bytes an export needs, and the bytes that are free."""

    written: dict[str, int]
    """By artefact name."""
    temporary_bytes: int
    free_bytes: int

    @property
    def needed_bytes(self) -> int:
        """The most bytes that exist at once."""
        return sum(self.written.values()) + self.temporary_bytes + _OTHER_FILES_BYTES

    def __str__(self) -> str:
        artefacts = ", ".join(f"{name} {size_bytes(size)}" for name, size in self.written.items())
        temporary = f", and {size_bytes(self.temporary_bytes)} temporarily" if self.temporary_bytes else ""
        return f"will write about {artefacts}{temporary}; {size_bytes(self.free_bytes)} free"


def estimate_disk_space(targets: Iterable[ExportTarget], context: ExportContext) -> DiskSpace:
    """Add up what the targets will write."""
    uses = [target.disk_use(context) for target in targets]
    written = {name: size for use in uses for name, size in use.written.items()}
    temporary = max((use.temporary_bytes for use in uses), default=0)
    return DiskSpace(written, temporary, shutil.disk_usage(context.staging_dir).free)


def require_disk_space(space: DiskSpace, out: Path) -> None:
    """Raise UserError if there is less free space than the export needs."""
    if space.free_bytes < space.needed_bytes:
        raise UserError(
            f"not enough disk space: {size_bytes(space.needed_bytes - space.free_bytes)} short",
            where=f"`{out}`; {space}",
            fix="free some space, choose another disk with `--out`, or fewer targets with `--to` and `--gguf`",
        )
