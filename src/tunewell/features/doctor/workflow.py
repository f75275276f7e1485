"""`tunewell doctor`: collect the facts of an environment, and run the checks."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tunewell.core.errors import UserError
from tunewell.core.plugins import find_plugins
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.core.registry import REGISTRIES
from tunewell.core.units import count, size_bytes
from tunewell.features.doctor.facts import Environment, read_packages
from tunewell.features.doctor.findings import TRAINING, EnvironmentProblem, EnvironmentReport
from tunewell.features.doctor.machine import read_machine
from tunewell.features.doctor.registry import CHECKS, run_checks
from tunewell.model_files.checks import hub_cache, read_models
from tunewell.model_files.files import hub_problem

if TYPE_CHECKING:
    from tunewell.config.load import LoadedConfig


def doctor(
    *,
    config: Path | None = None,
    model: str | None = None,
    python: str | None = None,
    is_fast: bool = False,
    is_kernel: bool = False,
    progress: ProgressListener = silent,
) -> EnvironmentReport:
    """Check this environment, or the one of another interpreter `python`.

    The config of the current folder names the model and the run folder; a config with errors is a finding. `is_fast`
    imports nothing and does not start nvidia-smi. `is_kernel`: this process is the notebook's kernel.
    """
    from tunewell.features.doctor.imports import try_imports  # not needed before training, where each import counts
    from tunewell.features.doctor.kernel import held_in_this_process

    started = time.perf_counter()
    progress(Progress("reading the installed packages"))
    facts = read_packages(python, is_fast=is_fast)
    loaded, problem = _load(config)
    facts = _with_machine(facts, loaded, model=model, is_fast=is_fast)
    if is_kernel and python is None:
        facts = replace(facts, held_by_kernel=held_in_this_process(facts.versions))
    if not is_fast:
        trials = try_imports(
            facts.python.executable, list(facts.versions), progress=lambda stage: progress(Progress(stage))
        )
        facts = replace(facts, imports=trials)
    plugins, broken = _check_plugins(is_fast=is_fast) if python is None else ("", [])
    findings = [*run_checks(facts), *([problem] if problem else []), *broken]
    return EnvironmentReport(
        findings,
        facts=describe(facts) | ({"plugins": plugins} if plugins else {}),
        num_checks=len(CHECKS),
        python=facts.python.executable,
        seconds=time.perf_counter() - started,
    )


def _check_plugins(*, is_fast: bool) -> tuple[str, list[EnvironmentProblem]]:
    """Return the installed plugins with their folders, and a finding for each that cannot be imported."""
    plugins, broken = find_plugins(), list[EnvironmentProblem]()
    for plugin in [] if is_fast else plugins:
        try:
            registry = REGISTRIES.get(plugin.group)
            registry.read(plugin) if registry else plugin.load()
        except UserError as error:
            broken.append(
                EnvironmentProblem(
                    "plugin-broken", "warning", error.what, error.where or "", error.fix or "", group="plugins"
                )
            )
    return "; ".join(f"{plugin} in {plugin.folder}" for plugin in plugins), broken


def _load(config: Path | None) -> "tuple[LoadedConfig | None, EnvironmentProblem | None]":
    try:
        from tunewell.config.load import load_config

        return load_config(config), None
    except UserError as error:
        what = f"the config cannot be read: {error.what}"
        fix = error.fix or "correct it"
        return None, EnvironmentProblem("config-invalid", "warning", what, error.where or "", fix, group="config")
    except ImportError:
        return None, None  # a broken requirement of tunewell, which the checks report


def _with_machine(
    facts: Environment, loaded: "LoadedConfig | None", *, model: str | None, is_fast: bool
) -> Environment:
    name = model or (loaded.config.model if loaded is not None else None)
    folder = loaded.path(loaded.config.run) if loaded is not None else Path.cwd()
    folders = {"the run folder": folder.absolute(), "the hub cache": hub_cache()}
    models = read_models(name, base=loaded.base if loaded is not None and not model else None, is_fast=is_fast)
    needs_hub = any(state.is_configured and state.origin == "hub" and state.path is None for state in models)
    machine = read_machine(folders, is_fast=is_fast)
    precision = loaded.config.train.precision if loaded is not None else "auto"
    has_gpu = bool(machine.gpus) and facts.torch is not None and facts.torch.cuda is not None
    size = 2.0 if precision in ("bf16", "fp16") or (precision == "auto" and has_gpu) else 4.0
    if loaded is not None and loaded.config.method.quantize != "none":
        size = {"nf4": 0.5, "int8": 1.0}[loaded.config.method.quantize]
    return replace(
        facts,
        machine=machine,
        models=models,
        bytes_per_parameter=size,
        hub_problem=hub_problem() if needs_hub and not is_fast else None,
        precision=precision,
    )


_STOPPING, _NOTED = ("packages", "python", "model"), ("gpu", "versions")
"""Groups of findings that stop a run, and those that are noted. Disk and memory are in the run's own check list."""


def require_environment(loaded: "LoadedConfig", note: Callable[[str], None]) -> None:
    """Run the fast checks before a training run: about 30 ms.

    Raises UserError for the first problem that stops the run. Problems of packages that training does not use, like
    trl, are left to `tunewell doctor`.
    """
    facts = _with_machine(read_packages(None, is_fast=True), loaded, model=None, is_fast=True)
    for finding in run_checks(replace(facts, is_training=True)):
        is_ours = not finding.packages or not finding.packages.isdisjoint(TRAINING)
        if finding.level == "broken" and is_ours and finding.group in _STOPPING:
            raise UserError(finding.what, where=finding.why, fix="; ".join(finding.commands) or finding.fix)
        is_noted = finding.group in _NOTED and not (finding.group == "gpu" and loaded.config.device == "cpu")
        if finding.level != "note" and is_ours and is_noted:
            note(f"{finding.what}: {finding.fix}")


def describe(facts: Environment) -> dict[str, str]:
    """Return the facts that are shown above the findings."""
    machine, torch = facts.machine, facts.torch
    shown = {"python": f"{facts.python.version}, {facts.python.executable}"}
    built = "CPU only" if torch and not (torch.cuda or torch.hip) else f"CUDA {torch.cuda}" if torch else ""
    shown["torch"] = f"{torch.version}, {built}" if torch else "not installed; training needs it, `prepare` does not"
    tools = [f"{name} {facts.versions[name]}" for name in ("transformers", "trl", "peft") if name in facts.versions]
    if tools:
        shown["packages"] = ", ".join(tools)
    if machine.gpus:
        first = machine.gpus[0]
        more = f" and {len(machine.gpus) - 1} more" if len(machine.gpus) > 1 else ""
        free = f"{size_bytes(first.free_bytes)} of {size_bytes(first.memory_bytes)} free"
        shown["gpu"] = f"{first.name}{more}, {free}, driver {first.driver}"
    elif machine.smi != "not asked":
        shown["gpu"] = "none"
    if machine.free_memory_bytes is not None and machine.memory_bytes is not None:
        shown["memory"] = f"{size_bytes(machine.free_memory_bytes)} of {size_bytes(machine.memory_bytes)} free"
    for disk in machine.disks[:1]:
        shown["disk"] = f"{size_bytes(disk.free_bytes)} free in `{disk.path}`"
    if packing := next((model.packing for model in facts.models if model.packing), ""):
        shown["documents"] = packing
    cached = [model.name for model in facts.models if model.origin == "hub" and model.path]
    offline = "offline by HF_HUB_OFFLINE; " if machine.variables.get("HF_HUB_OFFLINE") else ""
    names = f": {', '.join(cached[:3])}{' ...' if len(cached) > 3 else ''}" if cached else ""
    shown["hub"] = f"{offline}{count(len(cached), 'model')} in the cache{names}"
    return shown
