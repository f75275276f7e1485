"""The check list before the first step: device, precision, memory, disk, data, template and time of a run.

`memory` and `time` show the prediction of the plan; without one, what is free, and that the time is not known.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from tunewell.config.load import LoadedConfig
from tunewell.config.schema import MethodSettings
from tunewell.core.units import count, duration, size_bytes
from tunewell.machine.facts import DeviceFacts
from tunewell.records.manifest import Manifest
from tunewell.records.plan import Plan
from tunewell.records.prediction import Prediction
from tunewell.training.checkpoints import checkpoints_at_once, disk_space_warning
from tunewell.training.events import CheckedItem

_LITTLE_SHARE = 0.1
_ADAPTER_SETTINGS = ("rank", "alpha", "dropout", "rslora", "targets", "modules_to_save")


def checklist(
    plan: Plan,
    manifest: Manifest,
    device: DeviceFacts,
    *,
    folder: Path,
    checkpoint_bytes: int,
    keep: int,
) -> list[CheckedItem]:
    """Return the items, in the order in which they are shown. `device` has the memory that was free at the start."""
    templates = dict.fromkeys(record.name for record in manifest.templates)
    return [
        CheckedItem("device", f"{plan.device.value}: {plan.device.because}"),
        CheckedItem("precision", f"{plan.precision.value}: {plan.precision.because}"),
        *([CheckedItem("documents", f"{plan.packing.value}: {plan.packing.because}")] if plan.packing else []),
        _memory(device, plan.prediction),
        _disk(folder, checkpoint_bytes, keep),
        _data(plan, manifest),
        CheckedItem("template", ", ".join(templates) or "none: the rows are plain text"),
        _time(plan),
    ]


def _memory(device: DeviceFacts, prediction: Prediction | None) -> CheckedItem:
    if device.free_bytes is None or not device.memory_bytes:
        return CheckedItem("memory", "the system does not report it", state="unknown")
    free = f"{size_bytes(device.free_bytes)} of {size_bytes(device.memory_bytes)} were free at the start"
    if prediction is not None:
        expected = f"about {size_bytes(prediction.memory.peak_bytes)} expected"
        return CheckedItem("memory", f"{expected}; {free}", state="ok" if prediction.fits else "warn")
    is_little = device.free_bytes < _LITTLE_SHARE * device.memory_bytes
    return CheckedItem("memory", free, state="warn" if is_little else "ok")


def _disk(folder: Path, checkpoint_bytes: int, keep: int) -> CheckedItem:
    if warning := disk_space_warning(folder, checkpoint_bytes=checkpoint_bytes, keep=keep):
        return CheckedItem("disk", warning.removeprefix("disk space: "), state="warn")
    needed, free = checkpoints_at_once(keep) * checkpoint_bytes, shutil.disk_usage(folder).free
    return CheckedItem("disk", f"checkpoints need about {size_bytes(needed)}, {size_bytes(free)} are free")


def _data(plan: Plan, manifest: Manifest) -> CheckedItem:
    split = manifest.splits["train"]
    dropped = sum(manifest.dropped.values())
    parts = [
        f"{count(split.documents, 'document')} ({count(split.supervised)} of {count(split.tokens)} tokens trained on)",
        *([f"{count(manifest.selected)} for choosing"] if manifest.selected else []),
        f"{count(manifest.held_out)} held out",
        *([f"{count(dropped, 'row')} dropped"] if dropped else []),
        f"{plan.epochs.value:.3g} epochs",
    ]
    return CheckedItem("data", ", ".join(parts), state="ok" if manifest.held_out else "warn")


def _time(plan: Plan) -> CheckedItem:
    steps = plan.updates
    if plan.prediction is None:
        return CheckedItem("time", f"{steps}; known after the first steps", state="unknown")
    seconds = plan.prediction.seconds
    return CheckedItem("time", f"{duration(seconds.low)} to {duration(seconds.high)} in all; {steps}")


def settings_without_effect(loaded: LoadedConfig, manifest: Manifest, *, is_selecting: bool) -> Iterator[str]:
    """Yield notes about settings that have no effect on this run."""
    config = loaded.config
    if config.evaluate.patience is not None and not is_selecting:
        why = "answers take too long" if manifest.selected else manifest.selected_because or "there is no slice"
        yield f"`evaluate.patience` has no effect, because checkpoints are not compared (`data.selection`): {why}"
    default = MethodSettings()
    for name in _ADAPTER_SETTINGS if config.method.kind == "full" else ():
        if f"method.{name}" not in loaded.reasons and getattr(config.method, name) != getattr(default, name):
            yield f"`method.{name}` has no effect: full fine-tuning has no adapter"


def warnings(items: Sequence[CheckedItem]) -> Iterator[str]:
    """Yield a note if memory or disk space is short. Notes stay in the run's log. The corpus has its own notes."""
    for item in items:
        if item.state == "warn" and item.name in ("memory", "disk"):
            yield f"{item.name} space: {item.value}" if item.name == "disk" else f"{item.name}: {item.value}"
