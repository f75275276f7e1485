"""Choose device, precision, attention, threads and compilation of a run, each with its reason."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from tunewell.config.extensions import METHODS, OPTIMIZERS
from tunewell.config.load import LoadedConfig
from tunewell.config.schema import Config
from tunewell.core.errors import UserError
from tunewell.core.optional import install_command
from tunewell.core.units import count, size_bytes
from tunewell.machine.facts import DeviceFacts, num_cores
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
        return name in section.model_fields_set

    def why(self, key: str) -> str:
        """Return the origin of a value: `set in tunewell.yaml line 12`, `set by --set seed=1` or `the default`."""
        if not self.is_set(key):
            return "the default"
        origin = self.loaded.origin(key)
        if origin == "default":
            return "set in the config"
        return f"set by `{origin}`" if origin.startswith("--") else f"set in {origin}"

    def where(self, key: str) -> str:
        """Return where a key is set, for an error message."""
        return self.why(key).removeprefix("set in ").removeprefix("set by ")


Precision = Literal["fp32", "bf16", "fp16"]
Attention = Literal["sdpa", "flash"]
Compile = Literal["auto", "on", "off"]


def choose_device(inputs: PlanInputs) -> Chosen[str]:
    """Return the device with the reason for it."""
    device = inputs.device
    size = f", {size_bytes(device.memory_bytes)}" if device.memory_bytes else ""
    if inputs.config.device != "auto":
        return Chosen[str](value=device.name, because=f"{inputs.why('device')}; {device.label}{size}")
    reason = {"cuda": "the first GPU found", "mps": "the first GPU found", "cpu": "no GPU was found"}
    return Chosen[str](value=device.name, because=f"{reason[device.kind]}: {device.label}{size}")


def choose_precision(inputs: PlanInputs) -> Chosen[Precision]:
    """Choose the precision; raise UserError if the device would have to emulate it or is not tested with it."""
    device, setting, why = inputs.device, inputs.config.train.precision, inputs.why("train.precision")
    if inputs.launcher_precision is not None:
        setting, why = _launcher_precision(inputs, inputs.launcher_precision)
    if setting == "auto":
        return _automatic_precision(inputs)
    if setting == "bf16" and not device.has_bf16:
        raise _error(inputs, "train.precision", f"bf16 cannot be used on {device.label}", _WHY_NO_BF16[device.kind])
    if setting == "fp16" and device.kind == "mps":
        raise _error(inputs, "train.precision", "fp16 cannot be used on an Apple GPU", "losses became NaN there")
    scaled = f"; {_SCALED}" if setting == "fp16" else ""
    return Chosen[Precision](value=setting, because=why + scaled)


def _launcher_precision(inputs: PlanInputs, launched: str) -> tuple[Precision, str]:
    """Return the precision that `accelerate launch` requests; raise UserError if it cannot be used."""
    setting, option = inputs.config.train.precision, f"`accelerate launch --mixed_precision {launched}`"
    if launched not in ("bf16", "fp16"):
        raise UserError(f"{option}: {launched} is not supported", fix="leave the option out, and set `train.precision`")
    if setting not in ("auto", launched):
        raise UserError(
            f"{option} contradicts `train.precision: {setting}`",
            where=inputs.where("train.precision"),
            fix="remove the option or the setting",
        )
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
        return Chosen[Precision](
            value="bf16", because=f"{device.label} supports bf16, which has the range of fp32 in half the memory"
        )
    if device.kind == "cuda":
        because = f"{device.label} has fp16 units and no bf16 ones; {_SCALED}, and a run that overflows goes on in fp32"
        return Chosen[Precision](value="fp16", because=because)
    reasons = {
        "mps": "bf16 is not tested on Apple GPUs yet",
        "cpu": "the safest choice on a CPU; this one also supports `train.precision: bf16`"
        if device.has_bf16
        else "this CPU has no bf16 units, and emulation was measured 50 times slower",
    }
    return Chosen[Precision](value="fp32", because=reasons[device.kind])


def require_masters(inputs: PlanInputs, precision: Precision) -> None:
    """Raise UserError if `train.masters: bf16` is set and the run cannot use it."""
    if inputs.config.train.masters == "fp32":
        return
    reason = None
    if inputs.config.method.kind != "full":
        reason = f"the method is `{inputs.config.method.kind}`, whose few trainable parameters are always in fp32"
    elif precision != "bf16":
        reason = f"the run computes in {precision}; only bf16 is supported"
    if reason is not None:
        raise UserError(
            f"trainable parameters cannot be stored in bf16: {reason}",
            where=inputs.where("train.masters"),
            fix="set `train.masters: fp32`, or set `method.kind: full` and `train.precision: bf16`",
        )


def require_optimizer(inputs: PlanInputs) -> None:
    """Raise UserError if the optimizer cannot be used with this method or device, or if its settings have no effect."""
    name, method, where = inputs.config.train.optimizer, inputs.config.method.kind, inputs.where("train.optimizer")
    entry = OPTIMIZERS.entry(name)
    if not entry.trains_adapters and METHODS.entry(method).is_adapter:
        raise UserError(
            f"the optimizer `{name}` cannot be used with `method.kind: {method}`: an adapter has small "
            "gradients, so projecting them saves nothing",
            where=where,
            fix="set `train.optimizer: adamw`, or set `method.kind: full`",
        )
    if not entry.runs_on_mps and inputs.device.kind == "mps":
        raise UserError(
            f"the optimizer `{name}` cannot be used on an Apple GPU: it is not tested there",
            where=where,
            fix="set `train.optimizer: adamw`; to save memory, set `method.kind: lora` or `device: cpu`, or train on a "
            "machine with an NVIDIA GPU: `tunewell notebook`",
        )
    for key, field in type(inputs.config.train).model_fields.items():
        prefix = key.partition("_")[0]
        is_changed = getattr(inputs.config.train, key) != field.default
        if prefix in OPTIMIZERS.names() and prefix != name and is_changed:
            raise UserError(
                f"`train.{key}` has no effect: the optimizer is `{name}`",
                where=inputs.where(f"train.{key}"),
                fix=f"remove it, or set `train.optimizer: {prefix}`",
            )


def choose_quantization(inputs: PlanInputs) -> QuantizedBase | None:
    """Return how the base model is quantised, or None; raise UserError if that cannot be trained here."""
    setting, saved = inputs.config.method.quantize, inputs.saved_quantization
    if setting == "none" and saved is None:
        _require_no_keep(inputs)
        return None
    kind: Literal["nf4", "int8"] = "int8" if setting == "int8" else "nf4"
    if saved is not None:
        # Folders of 2023 have no `quant_method`.
        is_old = bool(saved.get("load_in_4bit") or saved.get("load_in_8bit"))
        if (method_name := saved.get("quant_method", "bitsandbytes" if is_old else "unknown")) != "bitsandbytes":
            raise UserError(
                f"the model was saved quantised with {method_name}, which cannot be trained",
                where="`quantization_config` in its `config.json`",
                fix="use the unquantised model; `method.quantize: nf4` makes it as small",
            )
        kind = "int8" if saved.get("load_in_8bit") else "nf4"
        if setting not in ("none", kind):
            raise UserError(
                f"the model was saved in {kind}, and `method.quantize` is `{setting}`",
                where=inputs.where("method.quantize"),
                fix="remove the setting, or use the unquantised model",
            )
    method = METHODS.entry(inputs.config.method.kind)
    if not method.is_adapter:
        fix = "set `method.kind: lora`, or use `method.quantize: none`"
        fix = fix if saved is None else "set `method.kind: lora`, or use the unquantised model"
        raise UserError(
            f"a quantised model cannot be trained by {method.title}: its weights cannot change",
            where=inputs.where("method.quantize" if saved is None else "method.kind"),
            fix=fix,
        )
    if kind == "nf4" and inputs.device.kind == "mps":
        raise UserError(
            "nf4 is not tested on Apple GPUs",
            where=inputs.where("method.quantize"),
            fix="set `method.quantize: int8`, or train on a machine with an NVIDIA GPU: `tunewell notebook`",
        )
    if (kind == "nf4" or saved is not None) and inputs.device.is_here and find_spec("bitsandbytes") is None:
        raise UserError(
            f"{kind} on {inputs.device.label} needs `bitsandbytes`, which is not installed",
            where=inputs.where("method.quantize") if saved is None else "`quantization_config` in its `config.json`",
            fix=install_command("qlora")
            + ("" if saved else "; or set `method.quantize: int8`, which needs no other package"),
        )
    if saved is not None:
        if inputs.config.method.keep:
            raise UserError(
                "`method.keep` has no effect: the model was saved quantised",
                where=inputs.where("method.keep"),
                fix="remove the setting, or use the unquantised model",
            )
        keep: list[str] = saved.get("llm_int8_skip_modules") or []
        return QuantizedBase(kind=kind, keep=keep, because="the model was saved quantised", is_saved=True)
    chosen = inputs.config.method.keep
    keep = [] if chosen == "auto" else list(chosen)
    return QuantizedBase(kind=kind, keep=keep, because=inputs.why("method.quantize"))


def _require_no_keep(inputs: PlanInputs) -> None:
    if inputs.config.method.keep:
        raise UserError(
            "`method.keep` is set, but the base model is not quantised",
            where=inputs.where("method.keep"),
            fix="set `method.quantize: nf4` or `int8`, or remove `method.keep`",
        )


def choose_attention(inputs: PlanInputs, precision: Precision) -> Chosen[Attention]:
    """Choose the attention kernel; raise UserError if `flash` is requested and cannot run."""
    device, setting = inputs.device, inputs.config.train.attention
    if device.kind != "cuda":
        obstacle = f"the flash kernel runs on CUDA only, and this is {device.label}"
    elif not device.has_flash:
        obstacle = f"the flash kernel needs an NVIDIA GPU of the Ampere generation or later, and this is {device.label}"
    elif precision == "fp32":
        obstacle = "the flash kernel computes in bf16 or fp16, not in fp32"
    else:
        obstacle = None
    if setting == "flash" and obstacle:
        raise _error(inputs, "train.attention", "flash attention cannot be used", obstacle)
    if setting != "auto":
        return Chosen[Attention](value=setting, because=inputs.why("train.attention"))
    if obstacle:
        return Chosen[Attention](value="sdpa", because=obstacle)
    return Chosen[Attention](value="flash", because="the fastest on this GPU; it keeps packed documents apart")


def choose_threads(inputs: PlanInputs) -> Chosen[int]:
    """Return the configured or measured number of threads, or all cores if the run uses a GPU."""
    setting, cores = inputs.config.train.threads, num_cores()
    if setting != "auto":
        return Chosen[int](value=setting, because=f"{inputs.why('train.threads')}; {count(cores, 'core')} available")
    if inputs.threads is not None:
        return inputs.threads
    return Chosen[int](value=cores, because=f"{count(cores, 'core')} available; not measured")


def choose_compile(inputs: PlanInputs, attention: Attention) -> Chosen[Compile]:
    """Choose whether to compile the layers; raise UserError if compilation is requested and not possible."""
    setting, obstacle = inputs.config.train.compile, None
    if inputs.device.kind != "cuda":
        obstacle = f"layers are compiled for CUDA only, and this run is on {inputs.device.label}"
    elif attention == "sdpa":
        obstacle = "`sdpa` attention has a different shape in each micro-batch"
    if obstacle and setting == "on":
        raise _error(inputs, "train.compile", "layers cannot be compiled", obstacle)
    if setting != "auto":
        return Chosen[Compile](value=setting, because=inputs.why("train.compile"))
    if obstacle:
        return Chosen[Compile](value="off", because=obstacle)
    return Chosen[Compile](value="auto", because="training starts uncompiled; layers are compiled once that saves time")


def _error(inputs: PlanInputs, key: str, what: str, reason: str) -> UserError:
    return UserError(f"{what}: {reason}", where=inputs.where(key), fix=f"set `{key}: auto`")
