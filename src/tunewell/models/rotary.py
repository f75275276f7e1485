"""Attention with rotary positions on a CPU: queries, keys and values are read together, and turned in three passes.

    y = x cos + half(x) sin        half((a, b)) = (-b, a)

transformers makes `half(x)` by negating, joining and multiplying, and the gradient by cutting and filling with zeros.
"""

from typing import Any

import torch
from torch import Tensor

from tunewell.models.attention import SDPA, packed_sdpa
from tunewell.models.lora import read_together

# Attention that is this and nothing else, by the name of its class, with where it keeps its window.
_WINDOWS = {
    "LlamaAttention": lambda module: None,
    "MistralAttention": lambda module: getattr(module.config, "sliding_window", None),
    "Qwen2Attention": lambda module: module.sliding_window,
}


def is_rotary_attention(module: Any) -> bool:
    """Whether a module is attention of the kind that is computed here."""
    return type(module).__name__ in _WINDOWS


def forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    packed_runs: Any = None,
    **others: Any,
) -> Any:
    """Stand in for the forward of such a module, for packed documents on a CPU; a saved one finds its own by it."""
    is_packed = packed_runs is not None and self.config._attn_implementation == SDPA and past_key_values is None
    if position_embeddings is None or not is_packed or hidden_states.device.type != "cpu":
        given = {"position_embeddings": position_embeddings, "attention_mask": attention_mask}
        layout = {} if packed_runs is None else {"packed_runs": packed_runs}
        return type(self).forward(self, hidden_states, **given, past_key_values=past_key_values, **layout, **others)
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (x.view(shape) for x in read_together((self.q_proj, self.k_proj, self.v_proj), hidden_states))
    cos, sin = (x.unsqueeze(2) for x in position_embeddings)
    q, k = _Turned.apply(q, cos, sin), _Turned.apply(k, cos, sin)
    out, _ = packed_sdpa(
        self,
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attention_mask,
        scaling=self.scaling,
        dropout=self.attention_dropout if self.training else 0.0,
        packed_runs=packed_runs,
        sliding_window=_WINDOWS[type(self).__name__](self),
        **others,
    )
    return self.o_proj(out.flatten(2)), None


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        half = x.shape[-1] // 2
        y = x * cos
        y[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        y[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        [dy] = grads
        cos, sin = ctx.saved_tensors
        half = dy.shape[-1] // 2
        dx = dy * cos
        dx[..., :half].addcmul_(dy[..., half:], sin[..., half:])
        dx[..., half:].addcmul_(dy[..., :half], sin[..., :half], value=-1)
        return dx, None, None
