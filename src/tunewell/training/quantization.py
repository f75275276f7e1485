"""Quantise the base model of a run, and measure before the first step how much its loss rises.

The weights stay in main memory in 16 bits while this is measured, and each is copied to the device when it is used. So
the device never has to hold the whole model in 16 bits.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from tunewell.core.errors import UserError
from tunewell.core.progress import Progress
from tunewell.data.batches import TokenizedDocuments
from tunewell.inference.runtime import measure_losses
from tunewell.model_files.files import locate
from tunewell.models.gguf import quantization_of
from tunewell.models.load import LoadedModel, LoadOptions, load_model
from tunewell.models.packed_forward import PackedModel
from tunewell.models.quantized import QuantizedLinear, is_kept, quantized_names
from tunewell.models.support import head_shape
from tunewell.records.plan import QuantizedBase
from tunewell.training.distributed import World
from tunewell.training.events import Note

if TYPE_CHECKING:
    from tunewell.training.build import RunInputs

_MEASURED_TOKENS = {"cuda": 65_536, "cpu": 4_096}
_BATCH_TOKENS = 4_096
_KEPT_COST = 0.5
"""`method.keep: auto` keeps layers until the cost is at most this share of the cost without them."""
_COSTLY = 0.02
_NEGLIGIBLE = 0.005
"""Below this relative cost, `method.keep: auto` keeps nothing."""


def load_quantized(options: LoadOptions, base: QuantizedBase, parts: "RunInputs") -> tuple[LoadedModel, QuantizedBase]:
    """Load the model of a run on the CPU, quantise it on the device, and return the record with the measured cost."""
    found = load_model(replace(options, device=torch.device("cpu")))
    require_known_layers(found.model, base.keep)
    quantizer = BaseQuantizer(found.model, base.kind, options.device, partial(_measure, found.model, parts))
    parts.listener(Progress("measuring what the quantised weights cost"))
    base = quantizer.quantize(base, is_automatic=parts.config.method.keep == "auto", world=parts.world)
    parts.listener(Note(describe_cost(base, parts.plan.precision.value)))
    if (path := locate(options.model).gguf) and (name := quantization_of(path)):
        parts.listener(
            Note(f"`{path.name}` was already rounded to {name}; the cost above is that of the second rounding alone")
        )
    return found, base


def describe_cost(base: QuantizedBase, precision: str) -> str:
    """Return the cost of the quantised weights as a sentence."""
    assert base.loss is not None and base.quantized_loss is not None and base.cost is not None
    kept = f", with {', '.join(f'`{name}`' for name in base.keep)} in {precision}" if base.keep else ""
    cost = f"{base.cost:+.1%}" if abs(base.cost) >= 0.0005 else "no difference"
    is_costly = not base.keep and base.cost > _COSTLY
    advice = "; `method.keep: auto` keeps the layers in 16 bits that cost most" if is_costly else ""
    return (
        f"the base model in {base.kind}{kept}: loss {base.quantized_loss:.4f}, in {precision} {base.loss:.4f} ({cost})"
        f"{advice}"
    )


def require_known_layers(model: PreTrainedModel, keep: Iterable[str]) -> None:
    """Raise UserError if a name in `method.keep` is no linear layer of the model."""
    names = quantized_names(model)
    for kept in keep:
        if not any(is_kept(name, [kept]) for name in names):
            raise UserError(
                f"the model has no linear layer `{kept}`",
                where="`method.keep`",
                fix=f"the model has: {', '.join(sorted({_kind(name) for name in names}))}",
            )


def _measure(model: PreTrainedModel, parts: "RunInputs") -> float:
    """Return the mean loss of the model on documents of the selection slice, or on training documents without one."""
    selection = parts.corpus.selection
    documents: TokenizedDocuments = selection if len(selection) else parts.corpus
    lengths = np.asarray(documents.index["length"], dtype=np.int64)
    number = max(1, int(_MEASURED_TOKENS.get(parts.plan.device.value.partition(":")[0], 4_096) / lengths.mean()))
    packed = PackedModel(
        model, parts.plan.precision.value, int(lengths.max()), head=head_shape(model), heartbeat=parts.heartbeat
    )
    # Not more at once than in a step: an adapter on a quantised base often has just enough memory for its steps.
    batch_tokens = min(_BATCH_TOKENS, parts.plan.micro_batch_tokens.value)
    return measure_losses(packed, documents, most=number, batch_tokens=batch_tokens).mean()


@dataclass
class BaseQuantizer:
    """Quantises the linear layers of a model that was loaded on the CPU, all or some of them at a time."""

    model: PreTrainedModel
    kind: str
    device: torch.device
    measure: Callable[[], float]
    """Returns the loss of the model as it is."""

    def __post_init__(self) -> None:
        self._linears: dict[str, Any] = {name: self.model.get_submodule(name) for name in quantized_names(self.model)}
        for name, linear in self._linears.items():
            self.model.set_submodule(name, _Streamed(linear))
        nn.Module.to(self.model, self.device)

    def quantize(self, base: QuantizedBase, *, is_automatic: bool, world: World) -> QuantizedBase:
        """Quantise the layers for good. Return the record with the measured losses and, if automatic, what is kept."""
        loss = self.measure()
        if is_automatic:
            base = world.broadcast(self._choose(base, loss))
        quantized = [name for name in self._linears if not is_kept(name, base.keep)]
        self._set(quantized)
        for name in self._linears.keys() - set(quantized):
            self.model.set_submodule(name, self._linears[name].to(self.device))
        return base.model_copy(update={"loss": loss, "quantized_loss": self.measure()})

    def _choose(self, base: QuantizedBase, loss: float) -> QuantizedBase:
        """Choose the layers to keep in 16 bits: those with the highest cost per byte, by kind (`down_proj`)."""
        groups = {kind: [name for name in self._linears if kind == _kind(name)] for kind in map(_kind, self._linears)}
        cost = self._cost(self._linears, loss)
        if cost <= _NEGLIGIBLE * loss:
            return base.model_copy(update={"because": f"{base.because}; all layers, because the cost is small"})
        costs = {kind: self._cost(names, loss) for kind, names in groups.items()}
        sizes = {kind: sum(self._linears[name].weight.numel() for name in names) for kind, names in groups.items()}
        keep: list[str] = []
        left = cost
        for kind in sorted(groups, key=lambda kind: costs[kind] / sizes[kind], reverse=True):
            if left <= _KEPT_COST * cost:
                break
            keep.append(kind)
            left = self._cost([name for name in self._linears if not is_kept(name, keep)], loss)
        because = (
            f"{base.because}; `method.keep: auto`: in 16 bits, {', '.join(f'`{kind}`' for kind in keep)} "
            f"take {sum(sizes[kind] for kind in keep) / sum(sizes.values()):.0%} of the weights and save "
            f"{1 - left / cost:.0%} of the cost"
        )
        return base.model_copy(update={"keep": keep, "because": because})

    def _cost(self, names: Iterable[str], loss: float) -> float:
        """Return the increase of the loss if only these layers are quantised."""
        names = list(names)
        self._set(names)
        cost = self.measure() - loss
        for name in names:
            self.model.set_submodule(name, _Streamed(self._linears[name]))
        return cost

    def _set(self, names: Iterable[str]) -> None:
        for name in names:
            layer = QuantizedLinear.quantize(self._linears[name], self.kind, self.device)
            self.model.set_submodule(name, layer)


def _kind(name: str) -> str:
    """Return the last part of a layer's path: `down_proj`."""
    return name.rpartition(".")[2]


class _Streamed(nn.Module):
    """A linear layer with weights in main memory, which are copied to the device of the input for each use."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._hidden = (linear,)  # in a tuple, so that `model.to` does not move it

    def forward(self, x: Tensor) -> Tensor:
        [linear] = self._hidden
        bias = None if linear.bias is None else linear.bias.to(x.device)
        return F.linear(x, linear.weight.to(x.device), bias)
