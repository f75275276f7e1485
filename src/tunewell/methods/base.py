"""The `Method` interface: how a training method selects, saves, restores and merges parameters.

To add a method, write a class in a module of this package and add one line to `config/extensions.py`:

    method = METHODS.load("lora").apply(model, settings, seed=0)     # wraps layers, marks parameters as trainable
    tensors, texts = method.files(base_model="...")                  # written to every checkpoint
    method.restore(tensors)                                          # read from a checkpoint
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tunewell.config.extensions import METHODS
from tunewell.config.schema import MethodSettings
from tunewell.core.errors import UserError
from tunewell.machine.device import probe_device
from tunewell.models.fp32_modules import compute_dtype
from tunewell.models.load import not_finite_names
from tunewell.records.adapter import ADAPTER_CONFIG, read_adapter_config


class MethodFiles(NamedTuple):
    """The files in which a method saves its trained weights."""

    tensors: dict[str, dict[str, Tensor]]
    """File name -> tensor name -> tensor, saved as safetensors."""
    texts: dict[str, str]

    @property
    def num_bytes(self) -> int:
        """The total size of the tensors in bytes."""
        return sum(tensor.nbytes for tensors in self.tensors.values() for tensor in tensors.values())

    def write(self, folder: Path) -> None:
        """Write the files to an existing folder."""
        for name, tensors in self.tensors.items():
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name)
        for name, text in self.texts.items():
            (folder / name).write_text(text, encoding="utf-8")


class Method(ABC):
    """A training method, applied to a model."""

    def __init__(self, model: PreTrainedModel, notes: list[str]) -> None:
        self.model = model
        self.notes = notes
        """Notes for the user, for example about layers that stay frozen."""

    @classmethod
    @abstractmethod
    def load_dtype(cls, precision: torch.dtype) -> torch.dtype:
        """Return the dtype in which to load the model for a run in `precision`."""

    @classmethod
    @abstractmethod
    def apply(
        cls,
        model: PreTrainedModel,
        settings: MethodSettings,
        *,
        seed: int,
        text_prefix: str = "",
        has_new_tokens: bool = False,
    ) -> Self:
        """Prepare a loaded model for training: mark the trainable parameters, and create new ones in fp32.

        `text_prefix` is the path of the text part within a multimodal model. `has_new_tokens` means that the embedding
        has rows that were never trained. Raises UserError if the settings do not fit the model.
        """

    @classmethod
    def identity(cls, settings: MethodSettings) -> dict[str, Any]:
        """Return the settings that must not change on resume."""
        return {}

    @abstractmethod
    def files(self, base_model: str | None) -> MethodFiles:
        """Return the trained weights and their settings. `base_model` is the name of the base model."""

    @abstractmethod
    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore the model from the tensors of `files`. Raise UserError if they do not fit."""

    @torch.no_grad()
    def reset(self, weights: Mapping[str, Tensor]) -> None:
        """Reset the model to its state before the first step. `weights` are the initial weights by name."""
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            initial = weights.get(name.replace(".base_layer.", "."))
            if initial is not None:
                tensor.copy_(initial)


class AdapterLayer(nn.Module, ABC):
    """A frozen layer with additional trained weights. Subclasses store the frozen layer in `base_layer`."""

    base_layer: Any
    is_enabled = True
    """Whether the forward pass uses the trained weights."""

    def cast(self, dtype: torch.dtype | None) -> None:
        """Cache the trained weights in a dtype, so that decoding does not convert them for each token.

        None clears the cache. The weights must not change while they are cached. The default does nothing.
        """

    @abstractmethod
    def merged(self) -> nn.Module:
        """Return an equivalent plain layer. The weight of the frozen layer is changed in place, in fp32."""

    @abstractmethod
    def weight_change(self, rows: slice) -> Tensor:
        """Return the change that merging makes to these rows of the weight, in float64 on the CPU.

        It is used to verify `merged`, so it must not share code with it.
        """

    @abstractmethod
    def change_direction(self) -> Tensor | None:
        """Return the unit input vector (float64, CPU) with the largest change in output, or None if nothing changes."""


class AdapterMethod(Method):
    """A method that trains an adapter for a frozen model, made of `AdapterLayer` modules."""

    @classmethod
    @abstractmethod
    def reads(cls, config: Mapping[str, Any]) -> bool:
        """Return True if `load` supports adapters with this `adapter_config.json`."""

    @classmethod
    @abstractmethod
    def load(
        cls, model: PreTrainedModel, folder: Path, *, text_prefix: str = "", settings: MethodSettings | None = None
    ) -> Self:
        """Load a saved adapter into a model. Raise UserError if it does not fit.

        `settings` are those of a run that goes on training the adapter.
        """

    @property
    def has_base(self) -> bool:
        """Whether disabling the adapter gives exactly the base model."""
        return True

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable the adapter inside a `with` block."""
        layers = list(adapter_layers(self.model).values())
        for layer in layers:
            layer.is_enabled = False
        try:
            yield
        finally:
            for layer in layers:
                layer.is_enabled = True

    @torch.no_grad()
    def merge(self) -> int:
        """Merge the adapter into the model's weights, which must be in fp32. Return the number of merged layers."""
        layers = adapter_layers(self.model)
        for name, layer in layers.items():
            self.model.set_submodule(name, layer.merged())
        self.model.requires_grad_(False)
        if broken := not_finite_names(self.model):
            raise UserError(
                f"{len(broken)} weights of the merged model are not finite; the first is `{broken[0]}`",
                fix="check the run: `tunewell validate RUN`",
            )
        return len(layers)


def adapter_layers(model: nn.Module) -> dict[str, AdapterLayer]:
    """Return the adapter layers of a model by path."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AdapterLayer)}


@contextmanager
def weights_cast(model: PreTrainedModel) -> Iterator[None]:
    """Cache the adapters' weights in the model's dtype inside a `with` block, and dequantised weights.

    Those are cached if they take at most half of the free memory.
    """
    layers = adapter_layers(model).values()
    quantized: list[Any] = [module for module in model.modules() if getattr(module, "is_matrix", False)]
    for layer in layers:
        layer.cast(compute_dtype(model))
    if quantized:
        num_bytes = sum(layer.in_features * layer.out_features for layer in quantized) * compute_dtype(model).itemsize
        free = probe_device(str(model.device)).free_bytes
        for layer in quantized if free is not None and 2 * num_bytes <= free else ():
            layer.cached = layer.weight
    try:
        yield
    finally:
        for layer in layers:
            layer.cast(None)
        for layer in quantized:
            layer.cached = None


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name. A tied parameter is listed once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_adapter(model: PreTrainedModel, folder: Path, *, text_prefix: str = "") -> AdapterMethod:
    """Load a saved adapter into a model. Raise UserError if no method supports its type."""
    name = adapter_method(folder)
    if name is None:
        raise UserError(
            f"adapters of PEFT's type {read_adapter_config(folder).get('peft_type')} are not supported",
            where=str(folder / ADAPTER_CONFIG),
            fix=f"use an adapter of one of these methods: {', '.join(_adapter_methods())}",
        )
    return METHODS.load(name).load(model, folder, text_prefix=text_prefix)


def adapter_method(folder: Path) -> str | None:
    """Return the name of the method that supports an adapter, or None."""
    config = read_adapter_config(folder)
    return next((name for name in _adapter_methods() if METHODS.load(name).reads(config)), None)


def _adapter_methods() -> list[str]:
    return [entry.name for entry in METHODS.entries() if entry.is_adapter]
