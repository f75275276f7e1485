"""Everything a run needs to go on, and a copy of it that training no longer touches."""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from tunewell.core.errors import UserError
from tunewell.core.units import count
from tunewell.records.checkpoint import (
    CheckpointManifest,
    DamagedCheckpoint,
    checkpoint_name,
    checkpoint_step,
    is_inside,
    read_file,
    read_manifest,
    verify,
)
from tunewell.records.events import plain, with_numbers


@dataclass
class State:
    """Everything a run needs to go on.

    A checkpoint writes down no secrets: they are taken out of `texts`, `progress` and `identity`.
    """

    step: int
    """Finished optimizer steps."""
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """File name ending in `.safetensors`, with `/` for folders -> name -> tensor."""
    texts: dict[str, str] = field(default_factory=dict)
    """Further files, for example `adapter_config.json`."""
    progress: dict[str, Any] = field(default_factory=dict)
    """JSON: best loss and step, looks without gain, quarantine, scaler."""
    identity: dict[str, Any] = field(default_factory=dict)
    """JSON: what must be the same on resume."""


class Snapshot:
    """A state in memory of its own. Copies from a GPU are only ordered here: they are there when `wait` returns."""

    def __init__(self, state: State) -> None:
        for name in (*state.tensors, *state.texts):
            if not is_inside(name) or name.endswith(".safetensors") != (name in state.tensors):
                raise ValueError(f"{name!r} cannot be the name of a file in a checkpoint")
        devices = {tensor.device for tensors in state.tensors.values() for tensor in tensors.values()}
        self.step = state.step
        self.texts = dict(state.texts)
        # Through JSON at once: what it cannot hold fails here, and not in the thread that writes.
        self.progress = json.loads(json.dumps(plain(state.progress)))
        self.identity = json.loads(json.dumps(plain(state.identity)))
        self.tensors = {
            file: {name: _host_copy(tensor) for name, tensor in tensors.items()}
            for file, tensors in state.tensors.items()
        }
        self._largest = {file: _host_copy(_largest(tensors.values())) for file, tensors in state.tensors.items()}
        self._arrivals = [torch.cuda.current_stream(place).record_event() for place in devices if place.type == "cuda"]

    def wait(self) -> None:
        """Wait until every copy has arrived."""
        for arrival in self._arrivals:
            arrival.synchronize()

    def not_finite(self) -> str | None:
        """Name a tensor that holds a NaN or an infinity, or give None."""
        for file, largest in self._largest.items():
            if not math.isfinite(largest.item()):
                names = [name for name, tensor in self.tensors[file].items() if not _is_finite(tensor)]
                return f"`{names[0]}` in `{file}`" if names else f"`{file}`"
        return None


def _host_copy(tensor: Tensor) -> Tensor:
    source = tensor.detach()
    if source.device.type != "cuda":
        return source.to("cpu", copy=True, memory_format=torch.contiguous_format)
    # Later steps change the original only after this copy: both wait in the same stream.
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source, non_blocking=True)


def _largest(tensors: Iterable[Tensor]) -> Tensor:
    """Find the largest magnitude where the tensors lie; a NaN or an infinity anywhere comes out.

    `aminmax` reads memory as fast as a sum, six times as fast as the norm (48 matrices of 4 MiB on a CPU, one thread).
    """
    extremes = [
        torch.stack(torch.aminmax(tensor.detach())).abs().float()
        for tensor in tensors
        if tensor.is_floating_point() and tensor.numel()
    ]
    return torch.cat([pair.to(extremes[0].device) for pair in extremes]).max() if extremes else torch.zeros(())


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


# Checkpoints that lie on disk: find the newest and the best whole one, read it, hold it against the run that asks.

_LINES_SHOWN = 5
_VALUE_CHARS = 60


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was whole when it was looked at."""

    path: Path
    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return self.manifest.step


def saved_steps(folder: Path) -> list[int]:
    """List the steps that have a checkpoint, whole or not, newest first: by number, whatever the clock said."""
    if not folder.is_dir():
        return []
    steps = (checkpoint_step(entry.name) for entry in folder.iterdir())
    return sorted((step for step in steps if step is not None), reverse=True)


def find_newest(
    folder: Path, *, on_trouble: Callable[[str], None], not_after: int | None = None, is_needed: bool = True
) -> Saved | None:
    """Give the newest whole checkpoint, of at most so many steps, every byte verified; damaged ones are passed over.

    They are told. None if there has been no checkpoint. Raises UserError if there are some and none is whole, unless
    it is not needed: starting again from nothing would look like going on.
    """
    damaged = []
    for step in saved_steps(folder):
        if not_after is not None and step > not_after:
            continue
        path = folder / checkpoint_name(step)
        try:
            return Saved(path, verify(path))
        except DamagedCheckpoint as damage:
            damaged.append(damage.what)
            on_trouble(f"{damage.what}; passed over")
    if damaged and is_needed:
        raise UserError(
            "no checkpoint is whole, so the run cannot go on",
            where="; ".join(damaged),
            fix="put the files back from a copy, or start again in another folder with `--out`",
        )
    return None


def find_best(folder: Path, *, on_trouble: Callable[[str], None]) -> Saved | None:
    """Give the checkpoint with the best held-out loss, every byte verified; a damaged one is told.

    None if none was looked at, or if the best is no longer whole.
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
                return Saved(path, verify(path))
        except DamagedCheckpoint as damage:
            on_trouble(f"{damage.what}; passed over")
    return None


def newest_best_step(folder: Path) -> int | None:
    """Say which step the newest readable manifest calls the best."""
    for step in saved_steps(folder):
        try:
            return read_manifest(folder / checkpoint_name(step)).best_step
        except DamagedCheckpoint:
            continue  # told by whoever wants to read it
    return None


def load_state(saved: Saved, *, needs: Iterable[str] = ()) -> State:
    """Read a checkpoint; raise UserError when it lacks a file of `needs`, DamagedCheckpoint when a byte has changed."""
    files = saved.manifest.files
    if missing := sorted(set(needs) - set(files)):
        raise UserError(
            f"checkpoint `{saved.path.name}` has no " + " and no ".join(f"`{name}`" for name in missing),
            where=str(saved.path),
            fix="going on without it would give another result; start again in another folder with `--out`",
        )
    state = State(saved.step, progress=with_numbers(saved.manifest.progress), identity=saved.manifest.identity)
    for name, record in files.items():
        data = read_file(saved.path, name, record)
        if name.endswith(".safetensors"):
            state.tensors[name] = safetensors.torch.load(data)
        else:
            state.texts[name] = data.decode("utf-8", "surrogatepass")
    return state


def compare_identity(saved: dict[str, Any], now: dict[str, Any], allowed: set[str]) -> list[str]:
    """List what differs between a checkpoint and the run that would go on with it, one line per difference.

    All of it is allowed, by its name or by the name of a group it is in; otherwise UserError, with the names to allow.
    """
    before, after = _flat(plain(saved)), _flat(plain(now))
    lines = {
        name: f"{name}: {_show(before, name)} in the checkpoint, {_show(after, name)} now"
        for name in before | after
        if name not in before or name not in after or before[name] != after[name]
    }
    refused = [name for name in lines if not _is_allowed(name, allowed)]
    if refused:
        shown = [f"  {lines[name]}" for name in refused[:_LINES_SHOWN]]
        if len(refused) > _LINES_SHOWN:
            shown.append(f"  and {count(len(refused) - _LINES_SHOWN)} more")
        raise UserError(
            "\n".join(["this run is not the one that was saved:", *shown]),
            fix="undo the change, or go on with it: " + " ".join(f"`--allow-change {name}`" for name in refused),
        )
    return list(lines.values())


def _flat(value: dict[str, Any], front: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, entry in value.items():
        if isinstance(entry, dict) and entry:
            flat |= _flat(entry, f"{front}{name}.")
        else:
            flat[f"{front}{name}"] = entry
    return flat


def _is_allowed(name: str, allowed: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:length]) in allowed for length in range(1, len(parts) + 1))


def _show(flat: dict[str, Any], name: str) -> str:
    if name not in flat:
        return "not there"
    text = str(flat[name])
    return text if len(text) <= _VALUE_CHARS else f"{text[:12]}..."
