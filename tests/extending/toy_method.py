"""A toy training method: only the norms are trained."""

from typing import Self

from transformers import PreTrainedModel

from tunewell.config.schema import MethodSettings
from tunewell.methods.full import Full


class NormsOnly(Full):
    """Trains the weights of norms; a checkpoint is a whole model, as in full fine-tuning."""

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
        """Freeze everything but the norms."""
        model.float()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
        return cls(model, ["only norms are trained"])
