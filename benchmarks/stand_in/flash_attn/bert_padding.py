"""Take padding out of rows and put it back, by the names transformers imports."""

import torch
import torch.nn.functional as F


def index_first_axis(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Pick rows."""
    return x[index]


def unpad_input(x: torch.Tensor, mask: torch.Tensor, unused_mask: torch.Tensor | None = None) -> tuple:
    """Lay the real tokens of all rows end to end."""
    lengths = mask.sum(-1, dtype=torch.int32)
    index = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    bounds = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return x.flatten(0, 1)[index], index, bounds, int(lengths.max()), lengths


def pad_input(x: torch.Tensor, index: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Put tokens back into rows of one length."""
    out = x.new_zeros(batch * length, *x.shape[1:])
    out[index] = x
    return out.view(batch, length, *x.shape[1:])
