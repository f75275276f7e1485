"""Checks of the GPU: driver, nvidia-smi, torch's wheel against driver and GPU generation, bf16, bitsandbytes."""

import re
from collections.abc import Iterator

from packaging.specifiers import SpecifierSet

from tunewell.core.units import size_bytes
from tunewell.features.doctor.facts import Environment, public_version
from tunewell.features.doctor.findings import EnvironmentProblem, pip_install
from tunewell.machine.nvidia_smi import Gpu
from tunewell.machine.shield import TorchWheel, read_shield

_AMPERE = (8, 0)
_FULL_SHARE = 0.2
"""A GPU with less of its memory free is reported: other programs use it."""
_INDEX = "https://download.pytorch.org/whl/"


def driver(facts: Environment) -> Iterator[EnvironmentProblem]:
    """Find a GPU that nvidia-smi does not report, and an nvidia-smi that hangs, fails or prints something else."""
    machine = facts.machine
    num_known = machine.num_pci_gpus or (1 if machine.kernel_driver else 0)
    message = machine.smi_message
    if machine.smi == "missing" and machine.num_pci_gpus and not machine.kernel_driver:
        yield EnvironmentProblem(
            "gpu-no-driver",
            "broken",
            "this machine has an NVIDIA GPU, but no driver",
            "neither nvidia-smi nor the kernel module is there; torch can use only the CPU",
            "install the NVIDIA driver; in a container, start it with `--gpus all`",
        )
    elif machine.smi == "hangs":
        yield EnvironmentProblem(
            "nvidia-smi-hangs",
            "broken",
            f"nvidia-smi hangs: {message}",
            "the driver or a GPU is blocked; a training process would hang in the same way",
            "restart the machine; `sudo dmesg | grep -i xid` shows the driver's errors",
        )
    elif machine.smi == "fails" and "version mismatch" in message.lower():
        yield EnvironmentProblem(
            "gpu-driver-mismatch",
            "broken",
            "the NVIDIA driver was updated, but the old kernel module is still loaded",
            f"no program can use the GPU: {message}",
            "restart the machine",
        )
    elif machine.smi in ("fails", "unreadable") and (num_known or machine.smi == "fails"):
        yield EnvironmentProblem(
            "nvidia-smi-fails",
            "broken" if num_known else "warning",
            f"nvidia-smi does not list the GPUs: {message}",
            "torch will probably not find a GPU either"
            if num_known
            else "the tool is installed, but no driver answers",
            "reinstall the NVIDIA driver; in a container, start it with `--gpus all`",
        )
    elif machine.smi == "unreadable":
        yield EnvironmentProblem(
            "nvidia-smi-unreadable",
            "warning",
            f"nvidia-smi printed no table: `{message}`",
            "the GPUs of this machine are not known, so they were not checked",
            "run `nvidia-smi` by hand; another program of this name may be on the PATH",
        )


def torch_build(facts: Environment) -> Iterator[EnvironmentProblem]:
    """Find a torch without CUDA beside a GPU, and a wheel that the driver or the GPU does not support."""
    torch, gpus = facts.torch, facts.machine.gpus
    if torch is None or torch.hip or facts.machine.variables.get("CUDA_VISIBLE_DEVICES") == "-1":
        return
    if gpus:
        gpu = gpus[0]
    elif (found := facts.machine.kernel_driver) is not None:
        gpu = Gpu("NVIDIA GPU", found, 0, 0, None)  # the fast part knows the driver only
    else:
        return
    has, names = f"torch {torch.version}", frozenset({"torch"})
    if torch.cuda is None:
        yield EnvironmentProblem(
            "torch-cpu-build",
            "broken",
            f"{has} has no CUDA, but this machine has a {gpu.name}",
            "training would run on the CPU, tens of times slower",
            *_cuda_wheel(facts, gpu),
            names,
            [f"{gpu.name}, driver {gpu.driver}", "unslothai/unsloth#2024"],
        )
        return
    release = next((entry for entry in read_shield().cuda if entry.major == _major(torch.cuda)), None)
    if release is not None and _major(gpu.driver) < release.driver:
        fix, commands = _cuda_wheel(facts, gpu)
        yield EnvironmentProblem(
            "driver-too-old",
            "broken",
            f"the NVIDIA driver {gpu.driver} is too old for {has}, built for CUDA {torch.cuda}",
            f"CUDA {torch.cuda} needs driver {release.driver} or later; torch reports no GPU",
            f"update the driver to {release.driver} or later; or {fix}",
            commands,
            names,
            [release.evidence],
        )
        return
    for gpu in gpus:
        if gpu.capability is not None and not _has_kernels(facts, gpu.capability):
            capability = ".".join(map(str, gpu.capability))
            yield EnvironmentProblem(
                "gpu-generation",
                "broken",
                f"{has} (CUDA {torch.cuda}) has no kernels for {gpu.name}, compute capability {capability}",
                "the first operation fails: no kernel image is available for execution on the device",
                *_cuda_wheel(facts, gpu),
                names,
                ["pytorch/pytorch#150733", "pytorch/pytorch#172352"],
            )
            return


def _has_kernels(facts: Environment, capability: tuple[int, int]) -> bool:
    """Return whether this torch has kernels for a GPU. Its own list is used if it could be imported."""
    trial = facts.trial("torch")
    arches = trial.facts.get("arches") if trial is not None else None
    if arches:
        return _runs_on(arches, capability)
    wheel = next((wheel for wheel in read_shield().wheels if _is_wheel(wheel, facts)), None)
    return wheel is None or _suits(wheel, capability)


def _runs_on(arches: list[str], capability: tuple[int, int]) -> bool:
    """Return whether a kernel runs: compiled for this generation and at most this revision, or as PTX for any later."""
    for arch in arches:
        kind, _, digits = arch.partition("_")
        number = re.match(r"\d+", digits)
        if number is None:
            continue
        own = (int(number[0][:-1]), int(number[0][-1]))
        if (kind == "compute" and own <= capability) or (own[0] == capability[0] and own[1] <= capability[1]):
            return True
    return False


def _is_wheel(wheel: TorchWheel, facts: Environment) -> bool:
    assert facts.torch is not None and facts.torch.cuda is not None
    return _fits(facts.torch.cuda, wheel.cuda) and _fits(facts.torch.version, wheel.torch)


def _fits(version: str, specifier: str) -> bool:
    public = public_version(version)
    return public is not None and public in SpecifierSet(specifier)


def _suits(wheel: TorchWheel, capability: tuple[int, int] | None) -> bool:
    return capability is None or _tuple(wheel.oldest) <= capability <= _tuple(wheel.newest)


def _cuda_wheel(facts: Environment, gpu: Gpu) -> tuple[str, list[str]]:
    """Return the fix that installs a torch wheel for this driver and GPU, and its command."""
    shield = read_shield()
    for wheel in shield.wheels:
        # The table begins with the newest wheels.
        cuda = re.sub(r"[^\d.].*$", "", wheel.cuda.lstrip("=<>~"))
        oldest_driver = next((entry.driver for entry in shield.cuda if entry.major == _major(cuda)), 0)
        if _major(gpu.driver) >= oldest_driver and _suits(wheel, gpu.capability):
            torch = facts.torch
            is_same = torch is not None and _fits(torch.version, wheel.torch)
            wanted = f"torch=={public_version(torch.version)}" if torch and is_same else f"torch{wheel.torch}"
            command = pip_install(facts.python, "--force-reinstall", wanted, "--index-url", _INDEX + wheel.index)
            return f"install torch for CUDA {cuda}", [command]
    return "update the driver; no torch wheel supports this one", []


def emulated_bf16(facts: Environment) -> Iterator[EnvironmentProblem]:
    """Find a GPU that emulates bf16, although torch calls it supported."""
    old = [gpu for gpu in facts.machine.gpus if gpu.capability is not None and gpu.capability < _AMPERE]
    if old:
        is_set = facts.precision == "bf16"
        yield EnvironmentProblem(
            "bf16-emulated",
            "warning" if is_set else "note",
            f"{old[0].name} has no bf16 units and emulates bf16",
            "torch.cuda.is_bf16_supported() is true all the same; bf16 came with the Ampere generation",
            "set `train.precision: fp16` or `auto`",
            evidence=["gensyn-ai/rl-swarm#285"],
        )


def busy_gpu(facts: Environment) -> Iterator[EnvironmentProblem]:
    """Find GPUs whose memory other programs hold."""
    for index, gpu in enumerate(facts.machine.gpus):
        if gpu.memory_bytes and gpu.free_bytes < _FULL_SHARE * gpu.memory_bytes:
            yield EnvironmentProblem(
                "gpu-busy",
                "warning",
                f"GPU {index} ({gpu.name}) is full: {size_bytes(gpu.free_bytes)} of "
                f"{size_bytes(gpu.memory_bytes)} are free",
                "other programs hold its memory; training would run out of memory",
                "end them: `nvidia-smi` lists their process ids; or choose another GPU with `device: cuda:1`",
            )


def bitsandbytes_binary(facts: Environment) -> Iterator[EnvironmentProblem]:
    """Find a bitsandbytes without a native library for torch's CUDA."""
    torch, binaries = facts.torch, facts.bitsandbytes
    if torch is None or torch.cuda is None or binaries is None:
        return
    wanted = torch.cuda.replace(".", "")
    version = facts.versions.get("bitsandbytes", "")
    override = facts.machine.variables.get("BNB_CUDA_VERSION")
    if override and f"cuda{override}" not in binaries:
        yield EnvironmentProblem(
            "bitsandbytes-override",
            "broken",
            f"BNB_CUDA_VERSION={override} selects a library that bitsandbytes {version} does not have",
            "loading in 4 or 8 bits fails: CUDA binary not found",
            "remove the variable",
            ["unset BNB_CUDA_VERSION"],
            frozenset({"bitsandbytes"}),
            ["bitsandbytes-foundation/bitsandbytes#1559"],
        )
    elif not override and not any(name.startswith(f"cuda{wanted[:-1]}") for name in binaries):
        # Since 0.50, a library for another minor version of the same CUDA is loaded (its `cextension.py`).
        has = ", ".join(name.removeprefix("cuda") for name in binaries if name.startswith("cuda")) or "none"
        yield EnvironmentProblem(
            "bitsandbytes-binary",
            "broken",
            f"bitsandbytes {version} has no library for CUDA {torch.cuda} (it has: {has})",
            "loading in 4 or 8 bits fails: CUDA binary not found",
            "install a newer bitsandbytes",
            [pip_install(facts.python, "--upgrade", "bitsandbytes")],
            frozenset({"bitsandbytes"}),
            ["bitsandbytes-foundation/bitsandbytes#386", "bitsandbytes-foundation/bitsandbytes#1559"],
        )


def torch_sees_gpu(facts: Environment) -> Iterator[EnvironmentProblem]:
    """Find a CUDA torch that reports no GPU, although nvidia-smi lists one."""
    trial, torch, gpus = facts.trial("torch"), facts.torch, facts.machine.gpus
    hidden = facts.machine.variables.get("CUDA_VISIBLE_DEVICES")
    if (
        torch is None
        or torch.cuda is None
        or trial is None
        or trial.facts.get("cuda_available") is not False
        or not gpus
    ):
        return
    if hidden is not None:
        yield EnvironmentProblem(
            "gpu-not-visible",
            "warning",
            f"CUDA_VISIBLE_DEVICES={hidden} hides every GPU from torch",
            "training would run on the CPU",
            "remove the variable",
            ["unset CUDA_VISIBLE_DEVICES"],
        )
    else:
        yield EnvironmentProblem(
            "gpu-not-found",
            "broken",
            f"torch {torch.version} finds no GPU, but nvidia-smi lists {gpus[0].name}",
            "CUDA cannot be initialised in this process",
            "run `python -c 'import torch; torch.zeros(1).cuda()'` for the reason; in a container, check `--gpus all`",
        )


def _major(version: str) -> int:
    found = re.match(r"\d+", version)
    return int(found[0]) if found else 0


def _tuple(dotted: str) -> tuple[int, int]:
    major, _, minor = dotted.partition(".")
    return int(major), int(minor or 0)
