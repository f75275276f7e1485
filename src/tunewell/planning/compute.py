"""Choose device, precision, attention, threads and compilation of a run, each with its reason."""

from dataclasses import dataclass
from importlib.util import find_spec
from operator import attrgetter
from typing import Any, Literal

import numpy as np

from tunewell.config.extensions import METHODS, OPTIMIZERS
from tunewell.config.load import LoadedConfig
from tunewell.config.schema import Config
from tunewell.core.arrays import Ints
from tunewell.core.errors import UserError
from tunewell.core.optional import install_command
from tunewell.core.units import count, size_bytes
from tunewell.data.batches import micro_batches
from tunewell.machine.facts import DeviceFacts, num_cores
from tunewell.model_files.families import ATTENTION, STATES, PackingLevel
from tunewell.model_files.presets import is_preset
from tunewell.planning.recommendation import recommend_replay
from tunewell.records.manifest import Manifest, SplitRecord
from tunewell.records.plan import Chosen, QuantizedBase


@dataclass(frozen=True)
class PlanInputs:
    """The inputs of a plan: the config, the corpus, the device and the size of the model."""

    loaded: LoadedConfig
    manifest: Manifest
    device: DeviceFacts
    num_parameters: int | None
    threads: Chosen[int] | None = None
    """The measured number of threads, or None on a GPU or if `train.threads` is set."""
    launcher_precision: str | None = None
    """The value of `accelerate launch --mixed_precision`, or None."""
    saved_quantization: dict[str, Any] | None = None
    """`quantization_config` of a model that was saved quantised."""
    packing: PackingLevel = PackingLevel(ATTENTION)  # noqa: RUF009  it is immutable

    @property
    def config(self) -> Config:
        """Return the config."""
        return self.loaded.config

    @property
    def split(self) -> SplitRecord:
        """Return the record of the training documents; raise UserError if there are no training documents."""
        split = self.manifest.splits.get("train")
        if split is None or not split.documents:
            raise UserError(
                "the corpus has no training documents",
                where=f"`{self.config.corpus}`",
                fix="read the reasons in its `dropped.jsonl`, and run `tunewell prepare` on more rows",
            )
        return split

    def is_set(self, key: str) -> bool:
        """Return True if the user set this key, even to its default."""
        group, _, name = key.rpartition(".")
        # `LoadedConfig.origin` cannot be used: for a key that is not set, it returns the line of its section.
        section = getattr(self.config, group) if group else self.config
        return name in section.model_fields_set and key not in self.loaded.reasons

    def why(self, key: str) -> str:
        """Return the origin of a value: `set in tunewell.yaml line 12`, `set by --set seed=1`, or why it was chosen."""
        if key in self.loaded.reasons:
            return self.loaded.reasons[key]
        if not self.is_set(key):
            return "the default"
        origin = self.loaded.origin(key)
        if origin == "default":
            return "set in the config"
        return f"set by `{origin}`" if origin.startswith("--") else f"set in {origin}"

    def where(self, key: str) -> str:
        """Return where a key is set, for an error message."""
        return self.why(key).removeprefix("set in ").removeprefix("set by ")

    def choice(self, key: str) -> Chosen[Any]:
        """Return the value of a key, with its origin as the reason."""
        return Chosen(attrgetter(key)(self.config), because=self.why(key))

    def error(self, key: str, what: str, *, fix: str) -> UserError:
        """Return the error for a key whose value cannot be used."""
        return UserError(what, where=self.where(key), fix=fix)


Precision = Literal["fp32", "bf16", "fp16"]
Attention = Literal["sdpa", "flash"]
Compile = Literal["auto", "on", "off"]


def choose_device(inputs: PlanInputs) -> Chosen[str]:
    """Return the device with the reason for it."""
    device = inputs.device
    found = "no GPU was found:" if device.kind == "cpu" else "the first GPU found:"
    reason = found if inputs.config.device == "auto" else f"{inputs.why('device')};"
    size = f", {size_bytes(device.memory_bytes)}" if device.memory_bytes else ""
    return Chosen(device.name, because=f"{reason} {device.label}{size}")


def choose_precision(inputs: PlanInputs) -> Chosen[Precision]:
    """Choose the precision; raise UserError if the device would have to emulate it or is not tested with it."""
    device, setting, why = inputs.device, inputs.config.train.precision, inputs.why("train.precision")
    if inputs.launcher_precision is not None:
        setting, why = _launcher_precision(inputs, inputs.launcher_precision)
    if setting == "auto":
        return _automatic_precision(inputs)
    if setting == "bf16" and not device.has_bf16:
        what = f"bf16 cannot be used on {device.label}: {_WHY_NO_BF16[device.kind]}"
        raise inputs.error("train.precision", what, fix="set `train.precision: auto`")
    if setting == "fp16" and device.kind == "mps":
        what = "fp16 cannot be used on an Apple GPU: losses became NaN there"
        raise inputs.error("train.precision", what, fix="set `train.precision: auto`")
    scaled = f"; {_SCALED}" if setting == "fp16" else ""
    return Chosen(setting, because=why + scaled)


def _launcher_precision(inputs: PlanInputs, launched: str) -> tuple[Precision, str]:
    """Return the precision that `accelerate launch` requests; raise UserError if it cannot be used."""
    setting, option = inputs.config.train.precision, f"`accelerate launch --mixed_precision {launched}`"
    if launched not in ("bf16", "fp16"):
        raise UserError(f"{option}: {launched} is not supported", fix="leave the option out, and set `train.precision`")
    if setting not in ("auto", launched):
        what = f"{option} contradicts `train.precision: {setting}`"
        raise inputs.error("train.precision", what, fix="remove the option or the setting")
    return launched, f"set by {option}"


_SCALED = "a loss scaler keeps small gradients from becoming zero"
_WHY_NO_BF16 = {
    "cpu": "this CPU has no bf16 units; emulation was measured 50 times slower than fp32",
    "cuda": "this GPU has no bf16 units, which came with the Ampere generation; it would emulate them",
    "mps": "bf16 is not tested on Apple GPUs yet",
}


def _automatic_precision(inputs: PlanInputs) -> Chosen[Precision]:
    device = inputs.device
    if device.kind == "cuda" and device.has_bf16:
        return Chosen("bf16", because=f"{device.label} supports bf16, which has the range of fp32 in half the memory")
    if device.kind == "cuda":
        because = f"{device.label} has fp16 units and no bf16 ones; {_SCALED}, and a run that overflows goes on in fp32"
        return Chosen("fp16", because=because)
    because = _WHY_NO_BF16["mps"]
    if device.kind == "cpu":
        because = "this CPU has no bf16 units, and emulation was measured 50 times slower"
        if device.has_bf16:
            because = "the safest choice on a CPU; this one also supports `train.precision: bf16`"
    return Chosen("fp32", because=because)


def require_masters(inputs: PlanInputs, precision: Precision) -> None:
    """Raise UserError if `train.masters: bf16` is set and the run cannot use it."""
    method = inputs.config.method.kind
    reason = f"the run computes in {precision}; only bf16 is supported"
    if method != "full":
        reason = f"the method is `{method}`, whose few trainable parameters are always in fp32"
    if inputs.config.train.masters != "fp32" and (method, precision) != ("full", "bf16"):
        raise inputs.error(
            "train.masters",
            f"trainable parameters cannot be stored in bf16: {reason}",
            fix="set `train.masters: fp32`, or set `method.kind: full` and `train.precision: bf16`",
        )


def require_optimizer(inputs: PlanInputs) -> None:
    """Raise UserError if the optimizer cannot be used with this method or device, or if its settings have no effect."""
    train, method = inputs.config.train, inputs.config.method.kind
    name, entry = train.optimizer, OPTIMIZERS.entry(train.optimizer)
    if not entry.trains_adapters and METHODS.entry(method).is_adapter:
        raise inputs.error(
            "train.optimizer",
            f"the optimizer `{name}` cannot be used with `method.kind: {method}`: an adapter has small "
            "gradients, so projecting them saves nothing",
            fix="set `train.optimizer: adamw`, or set `method.kind: full`",
        )
    if not entry.runs_on_mps and inputs.device.kind == "mps":
        raise inputs.error(
            "train.optimizer",
            f"the optimizer `{name}` cannot be used on an Apple GPU: it is not tested there",
            fix="set `train.optimizer: adamw`; to save memory, set `method.kind: lora` or `device: cpu`, or train on a "
            "machine with an NVIDIA GPU: `tunewell notebook`",
        )
    for key, field in type(train).model_fields.items():
        prefix = key.partition("_")[0]
        if prefix in OPTIMIZERS.names() and prefix != name and getattr(train, key) != field.default:
            what = f"`train.{key}` has no effect: the optimizer is `{name}`"
            raise inputs.error(f"train.{key}", what, fix=f"remove it, or set `train.optimizer: {prefix}`")


_IN_MODEL = "`quantization_config` in its `config.json`"


def choose_quantization(inputs: PlanInputs) -> QuantizedBase | None:
    """Return how the base model is quantised, or None; raise UserError if that cannot be trained here."""
    settings, saved = inputs.config.method, inputs.saved_quantization
    kind = settings.quantize if saved is None else _saved_kind(inputs, saved)
    if kind == "none":
        if settings.keep:
            what = "`method.keep` is set, but the base model is not quantised"
            fix = "set `method.quantize: nf4` or `int8`, or remove `method.keep`"
            raise inputs.error("method.keep", what, fix=fix)
        return None
    method = METHODS.entry(settings.kind)
    if not method.is_adapter:
        instead = "use `method.quantize: none`" if saved is None else "use the unquantised model"
        raise inputs.error(
            "method.quantize" if saved is None else "method.kind",
            f"a quantised model cannot be trained by {method.title}: its weights cannot change",
            fix=f"set `method.kind: lora`, or {instead}",
        )
    if kind == "nf4" and inputs.device.kind == "mps":
        fix = "set `method.quantize: int8`, or train on a machine with an NVIDIA GPU: `tunewell notebook`"
        raise inputs.error("method.quantize", "nf4 is not tested on Apple GPUs", fix=fix)
    if (kind == "nf4" or saved is not None) and inputs.device.is_here and find_spec("bitsandbytes") is None:
        or_int8 = "" if saved else "; or set `method.quantize: int8`, which needs no other package"
        raise UserError(
            f"{kind} on {inputs.device.label} needs `bitsandbytes`, which is not installed",
            where=inputs.where("method.quantize") if saved is None else _IN_MODEL,
            fix=install_command("qlora") + or_int8,
        )
    if saved is None:
        keep = [] if settings.keep == "auto" else list(settings.keep)
        return QuantizedBase(kind=kind, keep=keep, because=inputs.why("method.quantize"))
    if settings.keep:
        what = "`method.keep` has no effect: the model was saved quantised"
        raise inputs.error("method.keep", what, fix="remove the setting, or use the unquantised model")
    keep: list[str] = saved.get("llm_int8_skip_modules") or []
    return QuantizedBase(kind=kind, keep=keep, because="the model was saved quantised", is_saved=True)


def _saved_kind(inputs: PlanInputs, saved: dict[str, Any]) -> Literal["nf4", "int8"]:
    """Return how a model was saved quantised; raise UserError if it cannot be trained, or not with the setting."""
    # Folders of 2023 have no `quant_method`.
    is_old = saved.get("load_in_4bit") or saved.get("load_in_8bit")
    if (tool := saved.get("quant_method", "bitsandbytes" if is_old else "unknown")) != "bitsandbytes":
        raise UserError(
            f"the model was saved quantised with {tool}, which cannot be trained",
            where=_IN_MODEL,
            fix="use the unquantised model; `method.quantize: nf4` makes it as small",
        )
    kind, setting = "int8" if saved.get("load_in_8bit") else "nf4", inputs.config.method.quantize
    if setting not in ("none", kind):
        what = f"the model was saved in {kind}, and `method.quantize` is `{setting}`"
        raise inputs.error("method.quantize", what, fix="remove the setting, or use the unquantised model")
    return kind


def choose_attention(inputs: PlanInputs, precision: Precision) -> Chosen[Attention]:
    """Choose the attention kernel; raise UserError if `flash` is requested and cannot run."""
    device, setting, obstacle = inputs.device, inputs.config.train.attention, ""
    if device.kind != "cuda":
        obstacle = f"the flash kernel runs on CUDA only, and this is {device.label}"
    elif not device.has_flash:
        obstacle = f"the flash kernel needs an NVIDIA GPU of the Ampere generation or later, and this is {device.label}"
    elif precision == "fp32":
        obstacle = "the flash kernel computes in bf16 or fp16, not in fp32"
    elif inputs.packing.no_flash:
        obstacle = inputs.packing.no_flash
    if setting == "flash" and obstacle:
        what = f"flash attention cannot be used: {obstacle}"
        raise inputs.error("train.attention", what, fix="set `train.attention: auto`")
    if setting != "auto":
        return inputs.choice("train.attention")
    if obstacle:
        return Chosen("sdpa", because=obstacle)
    return Chosen("flash", because="the fastest on this GPU; it keeps packed documents apart")


def choose_threads(inputs: PlanInputs) -> Chosen[int]:
    """Return the configured or measured number of threads, or all cores if the run uses a GPU."""
    setting, cores = inputs.config.train.threads, num_cores()
    if setting != "auto":
        return Chosen(setting, because=f"{inputs.why('train.threads')}; {count(cores, 'core')} available")
    return inputs.threads or Chosen(cores, because=f"{count(cores, 'core')} available; not measured")


def choose_packing(inputs: PlanInputs, lengths: Ints, micro_tokens: int) -> Chosen[str]:
    """Return how documents are computed, and what it costs if they are not packed."""
    packing = inputs.packing
    if packing.level == ATTENTION:
        return Chosen(packing.level, because="attention stays within each document")
    if packing.level == STATES:
        return Chosen(packing.level, because="layers that carry a state start anew at each document")
    groups = micro_batches(np.arange(len(lengths)), lengths, micro_tokens)
    passes = sum(len(np.unique(lengths[group])) for group in groups)
    cost = f"{count(passes, 'forward pass', 'forward passes')} in an epoch instead of {count(len(groups))}"
    return Chosen(packing.level, because=f"{packing.because}; {cost}")


def choose_compile(inputs: PlanInputs, attention: Attention) -> Chosen[Compile]:
    """Choose whether to compile the layers; raise UserError if compilation is requested and not possible."""
    setting, obstacle = inputs.config.train.compile, ""
    if inputs.device.kind != "cuda":
        obstacle = f"layers are compiled for CUDA only, and this run is on {inputs.device.label}"
    elif inputs.packing.level != ATTENTION:
        obstacle = f"the layers of this model are computed {inputs.packing.level}"
    elif attention == "sdpa":
        obstacle = "`sdpa` attention has a different shape in each micro-batch"
    if obstacle and setting == "on":
        what = f"layers cannot be compiled: {obstacle}"
        raise inputs.error("train.compile", what, fix="set `train.compile: auto`")
    if setting != "auto":
        return inputs.choice("train.compile")
    if obstacle:
        return Chosen("off", because=obstacle)
    return Chosen("auto", because="training starts uncompiled; layers are compiled once that saves time")


def choose_replay(inputs: PlanInputs) -> Chosen[float]:
    """Choose the share of the tokens of an epoch that are everyday prompts with answers of the base model."""
    config, setting = inputs.config, inputs.config.train.replay
    because = ""
    if is_preset(config.model or ""):
        because = "a new model has nothing to forget"
    elif config.method.adapter:
        because = "training goes on from an adapter, without which the base model would have to answer"
    elif "the model's own" not in {record.name for record in inputs.manifest.templates}:
        because = "the model has no chat template, or the rows do not use it"
    if because:
        return Chosen(0.0, because=because)
    return recommend_replay(config, inputs.manifest.rows) if setting == "auto" else inputs.choice("train.replay")
