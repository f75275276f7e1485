"""What is known before a run is planned, and where each of its settings comes from."""

from dataclasses import dataclass
from typing import Literal

from tunewell.config.load import LoadedConfig
from tunewell.config.schema import Config
from tunewell.core.errors import UserError
from tunewell.core.units import count, size_bytes
from tunewell.hardware.facts import DeviceFacts, num_cores
from tunewell.records.manifest import Manifest, SplitRecord
from tunewell.records.plan import Chosen


@dataclass(frozen=True)
class PlanInputs:
    """A run to be planned: the settings, the data, the machine and the size of the model."""

    loaded: LoadedConfig
    manifest: Manifest
    device: DeviceFacts
    num_parameters: int | None
    threads: Chosen[int] | None = None
    """As measured; None where nothing was, on a GPU or where `train.threads` is set."""

    @property
    def config(self) -> Config:
        """Give the settings themselves."""
        return self.loaded.config

    @property
    def split(self) -> SplitRecord:
        """Give the training documents' record; raise UserError where there are none."""
        split = self.manifest.splits.get("train")
        if split is None or not split.documents:
            raise UserError(
                "the corpus has no training documents",
                where=f"`{self.config.corpus}`",
                fix="see why in `dropped.jsonl` there, and run `tunewell prepare` on more rows",
            )
        return split

    def is_set(self, key: str) -> bool:
        """Tell whether somebody wrote this key down, even with its default."""
        return _is_written(self.config, key)

    def why(self, key: str) -> str:
        """Say who chose a key's value: `set in tunewell.yaml line 12`, `set by --set seed=1`, or `the default`."""
        if not self.is_set(key):
            return "the default"
        origin = self.loaded.origin(key)
        if origin == "default":
            return "set in the config"
        return f"set by `{origin}`" if origin.startswith("--") else f"set in {origin}"

    def where(self, key: str) -> str:
        """Name the place of a key's value, for an error about it."""
        return self.why(key).removeprefix("set in ").removeprefix("set by ")


def _is_written(config: Config, key: str) -> bool:
    group, _, name = key.rpartition(".")
    # Not `LoadedConfig.origin`: for a key that is not written down it names the line of the group around it.
    branch = getattr(config, group) if group else config
    return name in branch.model_fields_set


# What a run computes with: device, precision, attention, threads, compilation; refused where it cannot work.

Precision = Literal["fp32", "bf16", "fp16"]
Attention = Literal["sdpa", "flash"]
Compile = Literal["auto", "on", "off"]


def choose_device(order: PlanInputs) -> Chosen[str]:
    """Say which device it is, and who wanted it."""
    device = order.device
    size = f", {size_bytes(device.memory_bytes)}" if device.memory_bytes else ""
    if order.config.device != "auto":
        return Chosen[str](value=device.name, because=f"{order.why('device')}; {device.label}{size}")
    reason = {"cuda": "the GPU torch can use", "mps": "the GPU torch can use", "cpu": "torch finds no GPU here"}
    return Chosen[str](value=device.name, because=f"{reason[device.kind]}: {device.label}{size}")


def choose_precision(order: PlanInputs) -> Chosen[Precision]:
    """Choose the numbers the model computes in; raise UserError where they would be emulated or go unchecked."""
    device, wanted = order.device, order.config.train.precision
    if wanted == "auto":
        return _automatic_precision(order)
    if wanted == "bf16" and not device.has_bf16:
        raise _refused(order, "train.precision", f"bf16 is not real on {device.label}", _WHY_NO_BF16[device.kind])
    if wanted == "fp16" and device.kind == "mps":
        raise _refused(order, "train.precision", "fp16 is not used on an Apple GPU", "losses there have become NaN")
    scaled = "; with a loss scaler, since small gradients would become zero" if wanted == "fp16" else ""
    return Chosen[Precision](value=wanted, because=order.why("train.precision") + scaled)


_WHY_NO_BF16 = {
    "cpu": "this CPU has no units for it and emulates them, measured 50 times slower than fp32",
    "cuda": "this GPU has no units for it and emulates them; they came with the Ampere generation",
    "mps": "it has not been compared with fp32 on Apple GPUs",
}


def _automatic_precision(order: PlanInputs) -> Chosen[Precision]:
    device = order.device
    if device.kind == "cuda" and device.has_bf16:
        return Chosen[Precision](
            value="bf16", because=f"{device.label} computes in bf16, with the range of fp32 in half the bytes"
        )
    reasons = {
        "cuda": f"{device.label} has no real bf16; `train.precision: fp16` is faster there, and less forgiving",
        "mps": "bf16 has not been compared with fp32 on Apple GPUs",
        "cpu": "the safest on a CPU; this one has bf16 too, which `train.precision: bf16` uses"
        if device.has_bf16
        else "this CPU has no bf16 of its own, and emulating it was measured 50 times slower",
    }
    return Chosen[Precision](value="fp32", because=reasons[device.kind])


def choose_attention(order: PlanInputs, precision: Precision) -> Chosen[Attention]:
    """Choose how documents are kept apart; raise UserError where the flash kernel was asked for and cannot run."""
    device, wanted = order.device, order.config.train.attention
    if device.kind != "cuda":
        obstacle = f"the flash kernel runs on CUDA only, and this is {device.label}"
    elif not device.has_flash:
        obstacle = f"the flash kernel needs an NVIDIA GPU of the Ampere generation or later, unlike {device.label}"
    elif precision == "fp32":
        obstacle = "the flash kernel computes in bf16 or fp16, not in fp32"
    else:
        obstacle = None
    if wanted == "flash" and obstacle:
        raise _refused(order, "train.attention", "flash attention cannot be used", obstacle)
    if wanted != "auto":
        return Chosen[Attention](value=wanted, because=order.why("train.attention"))
    if obstacle:
        return Chosen[Attention](value="sdpa", because=f"document by document: {obstacle}")
    return Chosen[Attention](
        value="flash", because="one kernel for documents of all lengths, which never looks across them"
    )


def choose_threads(order: PlanInputs) -> Chosen[int]:
    """Take the number that is set, or was measured; on a GPU every core may help, since little is computed on them."""
    wanted, cores = order.config.train.threads, num_cores()
    if wanted != "auto":
        return Chosen[int](value=wanted, because=f"{order.why('train.threads')}; {count(cores, 'core')} can be used")
    if order.threads is not None:
        return order.threads
    return Chosen[int](value=cores, because=f"{count(cores, 'core')} can be used; not measured")


def choose_compile(order: PlanInputs, attention: Attention) -> Chosen[Compile]:
    """Say whether layers are compiled; raise UserError where that was asked for and cannot be."""
    wanted, is_cuda = order.config.train.compile, order.device.kind == "cuda"
    if is_cuda and attention == "sdpa":
        obstacle = "attention document by document has another shape in each micro-batch"
        if wanted == "on":
            raise _refused(order, "train.compile", "layers cannot be compiled here", obstacle)
        return Chosen[Compile](value="off", because=obstacle)
    if wanted == "on" and not is_cuda:
        raise _refused(
            order, "train.compile", "layers are compiled for CUDA only", f"this run is on {order.device.label}"
        )
    if wanted != "auto":
        return Chosen[Compile](value=wanted, because=order.why("train.compile"))
    if not is_cuda:
        return Chosen[Compile](value="off", because="layers are compiled for CUDA only")
    return Chosen[Compile](
        value="auto", because="the first steps run at once; compiled when the steps left are worth the wait"
    )


def _refused(order: PlanInputs, key: str, what: str, reason: str) -> UserError:
    return UserError(f"{what}: {reason}", where=order.where(key), fix=f"leave `{key}: auto`")
