"""Attention by products is torch's own attention, both ways, whatever the blocks and whatever documents share."""

import pytest
import torch
import torch.nn.functional as F

from tunewell.models import cpu_attention
from tunewell.models.cpu_attention import Runs, causal_attention

HEADS, GROUPS, SIZE, VALUE_SIZE = 6, 2, 8, 5
SCALE = 0.3
LAYOUTS: dict[str, tuple[Runs, int]] = {
    "one document": (((1, 23),), 0),
    "one token": (((1, 1),), 0),
    "some documents": (((1, 23), (1, 7), (1, 1)), 0),
    "documents of one length": (((3, 9), (1, 4), (2, 6)), 0),
    "a prefix": (((1, 4), (1, 23), (1, 7)), 4),
    "a prefix and documents of one length": (((1, 3), (2, 9), (3, 5), (1, 1)), 3),
}


def _by_torch(q_HTD: torch.Tensor, k_GTD: torch.Tensor, v_GTD: torch.Tensor, runs: Runs, prefix: int) -> torch.Tensor:
    """Document by document, each with the prefix before it, by torch's attention in fp64."""
    parts, at = [], 0
    for number, length in runs:
        for _ in range(number):
            own = torch.arange(at, at + length)
            seen = torch.cat([torch.arange(prefix), own]) if at else own
            is_seen = seen[None, :] <= own[:, None]
            q, k, v = q_HTD[None, :, own], k_GTD[None, :, seen], v_GTD[None, :, seen]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=is_seen, scale=SCALE, enable_gqa=True)
            parts.append(out[0].transpose(0, 1))
            at += length
    return torch.cat(parts)


@pytest.mark.parametrize("block", [5, 192])
@pytest.mark.parametrize("kept", [0, 512])
@pytest.mark.parametrize("name", LAYOUTS)
def test_it_is_torch_attention_with_its_gradients(
    name: str, kept: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kept` 0 computes every share again on the way back, as it is behind a long prefix."""
    monkeypatch.setattr(cpu_attention, "_MAX_SAVED_KEYS", kept)
    monkeypatch.setattr(cpu_attention, "_BLOCK", block)
    cpu_attention._causal_mask.cache_clear()
    runs, prefix = LAYOUTS[name]
    tokens = sum(number * length for number, length in runs)
    draw = torch.Generator().manual_seed(0)
    # As models lay them out: tokens first in memory, heads first in name.
    shapes = ((HEADS, SIZE), (GROUPS, SIZE), (GROUPS, VALUE_SIZE))
    given = [torch.randn(tokens, *shape, generator=draw).requires_grad_() for shape in shapes]
    wide = [x.detach().double().requires_grad_() for x in given]
    grad = torch.randn(tokens, HEADS, VALUE_SIZE, generator=draw)
    q, k, v = (x.transpose(0, 1) for x in given)
    ours = causal_attention(q, k, v, runs=runs, prefix=prefix, scale=SCALE)
    theirs = _by_torch(*(x.transpose(0, 1) for x in wide), runs, prefix)
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-5)
    mine, wanted = torch.autograd.grad(ours, given, grad), torch.autograd.grad(theirs, wide, grad.double())
    for a, b in zip(mine, wanted, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-5)
    cpu_attention._causal_mask.cache_clear()


def test_blocks_get_smaller_where_their_scores_would_be_large() -> None:
    run = cpu_attention._Run(first_token=0, first_key=0, number=1, length=8192, num_keys=8192)
    sizes = [rows.stop - rows.start for rows, _ in run.blocks(heads=32)]
    assert max(sizes) * 32 * 8192 * 4 <= 64 * 2**20
    assert sum(sizes) == 8192
