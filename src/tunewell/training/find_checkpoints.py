"""Find the newest and the best checkpoint of a run on disk. This module does not import torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.core.units import percent
from tunewell.records.checkpoint import (
    CheckpointManifest,
    DamagedCheckpoint,
    checkpoint_name,
    read_manifest,
    saved_steps,
    verify,
)

OPTIMIZER = "optimizer.safetensors"
"""The file with the optimizer's state."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was undamaged when it was verified."""

    path: Path
    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        """Number of finished optimizer steps."""
        return self.manifest.step

    @property
    def why_best(self) -> str:
        """By what this checkpoint is the best of its run."""
        progress = self.manifest.progress
        if "best_share" not in progress:  # written by an older version
            return "the best by held-out loss"
        share, most = progress["best_share"], progress.get("most_right")
        measure = "lowest loss" if share is None else f"most right answers, {percent(share, 0)}"
        if share is not None and most is not None and share < most:
            measure = f"the newest with {percent(share, 0)} right answers, fewer than {percent(most, 0)} only by chance"
        return f"the best on the selection slice: {measure}"


def find_newest(
    folder: Path,
    *,
    on_trouble: Callable[[str], None],
    not_after: int | None = None,
    is_needed: bool = True,
    unread: Callable[[int, str], bool] = lambda step, file: False,
) -> Saved | None:
    """Return the newest undamaged checkpoint at or before step `not_after`, with every byte verified.

    Only the size of a file is verified if `unread` returns True for its step and name. Damaged checkpoints are reported
    and skipped. Returns None if no checkpoint is found. Raises UserError if all are damaged and `is_needed` is set,
    because a silent start from scratch would look like a resume.
    """
    damaged = []
    for step in saved_steps(folder):
        if not_after is not None and step > not_after:
            continue
        path = folder / checkpoint_name(step)
        try:
            return Saved(path, verify(path, unread=partial(unread, step)))
        except DamagedCheckpoint as damage:
            damaged.append(damage.what)
            on_trouble(f"{damage.what}; skipped")
    if damaged and is_needed:
        raise UserError(
            "all checkpoints are damaged, so the run cannot be resumed",
            where="; ".join(damaged),
            fix="restore the files from a backup, or start a new run with `--out NEW_FOLDER`",
        )
    return None


def find_best(
    folder: Path,
    *,
    on_trouble: Callable[[str], None],
    unread: Callable[[int, str], bool] = lambda step, file: False,
) -> Saved | None:
    """Return the best checkpoint, verified, or None if it is missing or damaged, or none was compared.

    Only the size of a file is verified if `unread` returns True for its step and name.
    """
    tried: set[int] = set()
    for step in saved_steps(folder):
        try:
            best = read_manifest(folder / checkpoint_name(step)).best_step
            if best is None:
                return None
            if best not in tried:
                tried.add(best)
                path = folder / checkpoint_name(best)
                return Saved(path, verify(path, unread=partial(unread, best)))
        except DamagedCheckpoint as damage:
            on_trouble(f"{damage.what}; skipped")
    return None


def newest_best_step(folder: Path) -> int | None:
    """Return the best step according to the newest readable manifest."""
    for step in saved_steps(folder):
        try:
            return read_manifest(folder / checkpoint_name(step)).best_step
        except DamagedCheckpoint:
            continue  # reported when it is loaded
    return None
