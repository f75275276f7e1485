"""GaLore as published by its authors, as a reference."""

import torch
from torch import Tensor

from tunewell.training.optimizers.galore import GaLore


class OriginalGaLore(GaLore):
    """Finds bases by an exact SVD, all of them in one step, and keeps the moments when a basis changes."""

    def _is_due(self, at: int, number: int) -> bool:
        return number % self._every == 0

    def _replace_basis(self, name: str, basis: Tensor, is_skipped: Tensor) -> None:
        state = self.state_of(name)
        state["basis"] = torch.where(is_skipped, state["basis"], basis)

    def _find_basis(self, name: str, gradient: Tensor) -> Tensor:
        exact = torch.linalg.svd(gradient.float(), full_matrices=False)
        return (exact.Vh.mT if self._is_tall(name) else exact.U)[..., : self._rank].to(gradient.dtype)
