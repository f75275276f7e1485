"""Full fine-tuning: every weight, or every weight of some layers, is trained, in fp32 or bf16 (`train.masters`)."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tunewell.config.schema import MethodSettings
from tunewell.methods.base import Method, MethodFiles
from tunewell.methods.peft_format import layer_index
from tunewell.methods.targets import require_layers

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"


class Full(Method):
    """Full fine-tuning of every weight. A checkpoint is a complete model that transformers can load."""

    @classmethod
    def load_dtype(cls, precision: torch.dtype) -> torch.dtype:
        """Return fp32, because small updates would be lost to rounding to the nearest 16-bit weight."""
        return torch.float32

    @classmethod
    def apply(
        cls,
        model: PreTrainedModel,
        settings: MethodSettings,
        *,
        seed: int = 0,
        text_prefix: str = "",
        has_new_tokens: bool = False,
    ) -> Self:
        """Make every parameter, or those of some decoder layers, trainable in the dtype in which it was loaded."""
        parameters, layers = dict(model.named_parameters()), settings.layers
        if layers != "all":
            require_layers(parameters, layers)
        for name, parameter in parameters.items():
            parameter.requires_grad_(layers == "all" or layer_index(name) in layers)
        return cls(model, [])

    @classmethod
    def identity(cls, settings: MethodSettings) -> dict[str, Any]:
        """Return the trained layers."""
        return settings.model_dump(mode="json", include={"layers"})

    def files(self, base_model: str | None) -> MethodFiles:
        """Return the model's weights and its `config.json`."""
        return MethodFiles({_WEIGHTS: self._tensors()}, {_CONFIG: self.model.config.to_json_string(use_diff=True)})

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy the saved weights into the model."""
        for name, tensor in self._tensors().items():
            tensor.copy_(tensors[_WEIGHTS][name])

    def _tensors(self) -> dict[str, Tensor]:
        """Return every weight once, and the persistent buffers, such as the bias of a router."""
        saved = self.model.state_dict().keys()
        buffers = {name: buffer for name, buffer in self.model.named_buffers() if name in saved}
        return {name: tensor.detach() for name, tensor in [*self.model.named_parameters(), *buffers.items()]}
