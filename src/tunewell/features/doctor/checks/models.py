"""Checks of the model: damaged files, an offline hub, a model that is too large for this machine."""

import shlex
from collections.abc import Iterator

from tunewell.core.units import size_bytes
from tunewell.features.doctor.facts import Environment
from tunewell.features.doctor.findings import EnvironmentProblem
from tunewell.model_files.catalogue import catalogue
from tunewell.model_files.checks import ModelState

_SHARE = 0.5
"""A suggested model takes at most this share of the memory: gradients, activations and the system need the rest."""


def hub_access(facts: Environment) -> Iterator[EnvironmentProblem]:
    """Find a configured model that is not on this machine while the hub is offline."""
    variables = facts.machine.variables
    offline = [
        name
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        if variables.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
    ]
    missing = [model for model in facts.models if model.is_configured and model.origin == "hub" and model.path is None]
    if facts.is_training:
        return  # loading the model reports it
    if missing and offline:
        name = missing[0].name
        cached = [model.name for model in facts.models if model.origin == "hub" and model.path]
        has = f"the cache has: {', '.join(cached[:5])}" if cached else "the hub cache is empty"
        yield EnvironmentProblem(
            "hub-offline",
            "broken",
            f"`{name}` is not in the hub cache, and {offline[0]} forbids downloads",
            f"training would fail when it loads the model; {has}",
            "allow the download, or set `model:` to a folder",
            [f"unset {' '.join(offline)}", f"hf download {shlex.quote(name)}"],
            evidence=["PromtEngineer/localGPT#822"],
        )
    elif missing and facts.hub_problem:
        yield EnvironmentProblem(
            "hub-unreachable",
            "broken",
            f"`{missing[0].name}` is not in the hub cache, and the hub cannot be reached",
            facts.hub_problem,
            "check the network, a proxy (`HTTPS_PROXY`) or a mirror (`HF_ENDPOINT`); or set `model:` to a folder",
            evidence=["yuruotong1/autoMate#104"],
        )


def model_files(facts: Environment) -> Iterator[EnvironmentProblem]:
    """Find damaged weight files, of the configured model first."""
    for model in sorted(facts.models, key=lambda model: not model.is_configured):
        if model.is_configured and model.origin == "other" and not facts.is_training:
            yield EnvironmentProblem(
                "model-not-found",
                "broken",
                f"there is no model `{model.name}`",
                "it is neither a file, nor a folder, nor the name of a model on the hub",
                "correct `model:` in the config: a folder, a `.gguf` file, or `ORGANISATION/NAME`",
            )
        if model.damage:
            yield _damaged(model)
        elif model.refusal:
            yield EnvironmentProblem(
                "model-not-supported",
                "broken",
                f"`{model.name}` cannot be trained",
                model.refusal,
                "use a model that generates text; `tunewell models` lists some",
            )


def _damaged(model: ModelState) -> EnvironmentProblem:
    file, problem = model.damage[0]
    more = f", and {len(model.damage) - 1} more" if len(model.damage) > 1 else ""
    is_pointer = "LFS" in problem
    commands: list[str] = []
    fix = "copy or download the file again"
    if model.origin == "hub":
        fix, commands = "download it again", [f"hf download {shlex.quote(model.name)} --force-download"]
    elif is_pointer and model.path is not None:
        folder = model.path if model.origin == "folder" else model.path.rpartition("/")[0]
        fix, commands = "fetch the files with Git LFS", [f"git -C {shlex.quote(folder)} lfs pull"]
    return EnvironmentProblem(
        "model-lfs-pointer" if is_pointer else "model-damaged",
        "broken" if model.is_configured else "warning",
        f"`{file}` of `{model.name}` {problem}{more}",
        "the model cannot be loaded: SafetensorError, HeaderTooLarge or an incomplete tensor",
        fix,
        commands,
        evidence=[f"{name}: {what}" for name, what in model.damage[:5]] + ["OpenMotionLab/MotionGPT3#4"],
    )


def model_size(facts: Environment) -> Iterator[EnvironmentProblem]:
    """Find a configured model whose weights alone exceed the memory, and suggest a smaller one."""
    for model in facts.models:
        if not model.is_configured or not model.num_parameters:
            continue
        memory, where = _memory(facts)
        needed = int(model.num_parameters * facts.bytes_per_parameter)
        if memory is None or needed <= memory:
            continue
        smaller = suggest(model.model_type, memory, facts.bytes_per_parameter)
        names = " or ".join(f"`{name}`" for name in smaller)
        yield EnvironmentProblem(
            "model-too-large",
            "warning",
            f"`{model.name}` has {model.num_parameters / 1e9:.1f} B parameters, {size_bytes(needed)}; "
            f"{where} {size_bytes(memory)}",
            "the weights alone do not fit, before gradients and activations",
            (f"train a smaller model: {names}; " if names else "")
            + "set `method.quantize: nf4`; or train elsewhere: `tunewell notebook`",
        )


def _memory(facts: Environment) -> tuple[int | None, str]:
    gpus = [gpu for gpu in facts.machine.gpus if gpu.memory_bytes]
    if gpus and facts.torch is not None and facts.torch.cuda is not None:
        largest = max(gpus, key=lambda gpu: gpu.memory_bytes)
        return largest.memory_bytes, f"{largest.name} has"
    return facts.machine.memory_bytes, "this machine has"


def suggest(model_type: str | None, memory: int, bytes_per_parameter: float) -> list[str]:
    """Return at most two chat models that fit, the largest first, of the same family if there are any."""
    known = [model for model in catalogue() if not model.unverified]
    chat = [model for model in known if model.kind == "chat" and model.purpose == "general"]
    fitting = [model for model in chat if model.num_parameters * bytes_per_parameter <= _SHARE * memory]
    related = [model for model in fitting if model.config["model_type"] == model_type] or fitting
    return [model.name for model in sorted(related, key=lambda model: -model.num_parameters)[:2]]
