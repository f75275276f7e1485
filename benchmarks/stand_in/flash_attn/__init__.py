"""Stand in for flash-attn over torch's own flash kernel, so that peers run without padding where it is not built.

The kernel is the one that tunewell calls, so the comparison is of engines and not of kernels. Never on tunewell's path.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

__version__ = "2.8.3"


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **others: Any,
) -> Any:
    """Attend within documents laid end to end."""
    window = (window_size[0], 0) if causal else tuple(window_size)
    return varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        cu_seqlens_q,
        cu_seqlens_k,
        int(max_seqlen_q),
        int(max_seqlen_k),
        scale=softmax_scale,
        window_size=window,
    )


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **others: Any,
) -> torch.Tensor:
    """Attend within rows of equal length."""
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[2] != k.shape[2]
    out = F.scaled_dot_product_attention(*heads_first, scale=softmax_scale, is_causal=causal, enable_gqa=grouped)
    return out.transpose(1, 2)


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> None:
    """Refuse: nothing is generated in a benchmark."""
    raise NotImplementedError
