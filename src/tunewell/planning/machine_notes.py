"""Notes about the machine as it is: WSL, Colab, containers, Macs, T4, other users of the GPU, a busy CPU."""

from pathlib import Path

from tunewell.core.launcher import world_size
from tunewell.core.units import count, duration, size_bytes
from tunewell.machine.machine import Machine
from tunewell.planning.forecast import Outlook
from tunewell.records.plan import Plan

_SMALL_SHARED_MEMORY = 1 << 30
_COLAB_SECONDS = 12 * 3600.0
"""Colab ends a free session after at most 12 hours, and earlier if it is idle."""
_BUSY = 1.5
"""Load per core above which the CPU counts as busy."""


def machine_notes(machine: Machine, plan: Plan, outlook: Outlook, *, corpus: Path, run: Path) -> list[str]:
    """Return what is special about this machine and what follows for the run."""
    device, prediction = outlook.work.device, outlook.prediction
    seconds = prediction.seconds
    notes: list[str] = []
    if machine.gpu_problem:
        notes.append(f"GPUs are not known: {machine.gpu_problem}; the run is planned for the CPU")
    if machine.gpus and not machine.has_cuda_torch:
        notes.append(
            f"{machine.gpus[0].name} cannot be used: torch {machine.torch} is a build without CUDA; `tunewell doctor`"
        )
    if device.kind == "cuda" and device.memory_bytes and device.free_bytes is not None:
        used = device.memory_bytes - device.free_bytes
        gpu = next((gpu for gpu in machine.gpus if gpu.facts().name == device.name), None)
        if gpu is not None and used > 0.1 * device.memory_bytes:
            users = f": {', '.join(gpu.users[:3])}" if gpu.users else ""
            notes.append(f"{size_bytes(used)} of {device.label} are used by other processes{users}")
    if device.kind == "cuda" and not device.has_bf16:
        notes.append(
            f"{device.label} has no bf16 units: torch accepts bf16 there and emulates it slowly; this run uses "
            f"{plan.precision.value}"
        )
    if machine.is_wsl:
        notes += _wsl_notes(machine, corpus, run, is_gpu=device.kind == "cuda")
    if machine.is_colab or machine.is_kaggle:
        notes += _colab_notes(machine, plan, outlook, run)
    if device.kind == "mps":
        notes.append("Apple GPUs share their memory with all programs: close large ones; speed is not measured here")
    if machine.container_bytes is not None:
        notes.append(f"the container may use {size_bytes(machine.container_bytes)} of memory; beyond that it is killed")
    shared = machine.shared_memory_bytes
    if shared is not None and shared < _SMALL_SHARED_MEMORY and world_size() > 1:
        notes.append(
            f"/dev/shm has only {size_bytes(shared)}: NCCL needs more; start the container with `--shm-size=8g`"
        )
    if device.kind == "cpu" and machine.load is not None and machine.load > _BUSY * machine.cores:
        notes.append(
            f"the CPU is busy: {machine.load:.1f} processes wait for {count(machine.cores, 'core')}, so the run takes "
            "longer than alone"
        )
    host = prediction.memory.host_bytes
    if host is not None and machine.cpu.free_bytes is not None and host > machine.cpu.free_bytes:
        notes.append(
            f"main memory: {size_bytes(host)} are needed beside the GPU, {size_bytes(machine.cpu.free_bytes)} are free"
        )
    disk = prediction.disk
    if disk is not None and disk.free_bytes is not None:
        needed = disk.checkpoints_bytes + disk.export_bytes
        if needed > disk.free_bytes:
            notes.append(f"disk: {size_bytes(needed)} are needed and {size_bytes(disk.free_bytes)} are free")
    if seconds.expected > 86_400 and device.kind == "cpu":
        notes.append(f"the run takes about {duration(seconds.expected)} on a CPU: `tunewell plan --gpu t4,l4,4090`")
    return notes


def _wsl_notes(machine: Machine, corpus: Path, run: Path, *, is_gpu: bool) -> list[str]:
    total = size_bytes(machine.cpu.memory_bytes or 0)
    notes = [f"WSL may use {total} of memory, by default half of the machine's; `.wslconfig` sets another limit"]
    slow = [str(path) for path in (corpus, run) if str(path.absolute()).startswith("/mnt/")]
    if slow:
        notes.append(
            f"`{slow[0]}` is on a Windows drive, which is slow from WSL: move the project to the Linux file system; "
            "the corpus is read into memory"
        )
    if is_gpu:
        notes.append(
            "Windows spills GPU memory into main memory instead of failing: a step then takes many times longer"
        )
    return notes


def _colab_notes(machine: Machine, plan: Plan, outlook: Outlook, run: Path) -> list[str]:
    seconds, name = outlook.prediction.seconds, "Colab" if machine.is_colab else "Kaggle"
    notes: list[str] = []
    if seconds.high > _COLAB_SECONDS:
        notes.append(
            f"{name} ends a session after {duration(_COLAB_SECONDS)} at most, and the run takes "
            f"{duration(seconds.low)} to {duration(seconds.high)}: resume it with `tunewell train --resume`"
        )
    if machine.is_colab and not str(run.absolute()).startswith("/content/drive"):
        interval = plan.save_every.value * outlook.speed.step_seconds
        notes.append(
            f"the run is lost with the session: write it to Drive with `--out /content/drive/MyDrive/{run.name}`; "
            f"a checkpoint is saved about every {duration(interval)}"
        )
    return notes
