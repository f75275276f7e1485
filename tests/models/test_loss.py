"""The loss of learned rows is cross-entropy, value and gradients, whatever the chunk."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lessons import RandomDocuments, distance, lora_learner

from tunewell.data.batches import make_batch
from tunewell.models import loss
from tunewell.models.loss import HeadShape, supervised_loss


def _reference(hidden, targets, weight, bias, head):
    logits = F.linear(hidden, weight, bias) * head.scale
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    return F.cross_entropy(logits, targets, reduction="sum")


@pytest.mark.parametrize("num_rows", [1, 63, 64, 200])
@pytest.mark.parametrize("head", [HeadShape(), HeadShape(softcap=5.0), HeadShape(scale=0.3), HeadShape(5.0, 0.3)])
def test_it_is_torch_cross_entropy_with_the_gradients_of_autograd(num_rows: int, head: HeadShape) -> None:
    torch.manual_seed(num_rows)
    tensors = [
        torch.randn(num_rows, 16, dtype=torch.float64),
        torch.randn(37, 16, dtype=torch.float64),
        torch.randn(37),
    ]
    tensors[2] = tensors[2].double()
    targets = torch.randint(0, 37, (num_rows,))
    targets[0] = -100
    ours = [tensor.clone().requires_grad_() for tensor in tensors]
    theirs = [tensor.clone().requires_grad_() for tensor in tensors]
    mine = supervised_loss(ours[0], targets, weight_VH=ours[1], bias_V=ours[2], head=head)
    other = _reference(theirs[0], targets, theirs[1], theirs[2], head)
    (mine * 0.7).backward()
    (other * 0.7).backward()
    assert float(mine) == pytest.approx(float(other), rel=1e-5)
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None and b.grad is not None
        assert distance(a.grad, b.grad) < 1e-5 or float(b.grad.norm()) < 1e-9


def test_chunks_do_not_change_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(300, 16), torch.randn(50, 16), torch.randint(0, 50, (300,))
    whole = supervised_loss(hidden, targets, weight_VH=weight)
    monkeypatch.setattr(loss, "_CPU_BYTES", 4 * 50 * 64)
    assert loss.chunk_rows(50, torch.device("cpu")) == 64
    torch.testing.assert_close(supervised_loss(hidden, targets, weight_VH=weight), whole, rtol=1e-6, atol=0)
    torch.testing.assert_close(supervised_loss(hidden, targets, weight_VH=weight, rows=7), whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_run_that_saves_memory_computes_few_logits_at_once(monkeypatch: pytest.MonkeyPatch, is_fused: bool) -> None:
    """Guards the peak of QLoRA with `recompute: offload`, where whole logits take more than the adapter."""
    learner, sizes = lora_learner(), []
    batch = make_batch(RandomDocuments(), range(8))
    whole = float(learner.loss_sum(batch))
    learner.recompute("offload")
    assert learner.loss_rows == loss.LEAN_ROWS
    learner.loss_rows = 8
    form = loss.loss_and_grad_fused if is_fused else loss.loss_and_grad

    def counted(logits: torch.Tensor, *others: Any) -> Any:
        sizes.append(len(logits))
        return form(logits, *others)

    monkeypatch.setattr(loss, "loss_and_grad", counted)
    learner.fused_loss = counted if is_fused else None
    assert float(learner.loss_sum(batch)) == pytest.approx(whole, rel=1e-6)
    assert max(sizes) == 8 and len(sizes) == -(-len(batch.rows) // 8)
    learner.recompute("off")
    assert learner.loss_rows is None


def test_a_frozen_head_costs_no_gradient() -> None:
    hidden = torch.randn(5, 8, requires_grad=True)
    weight = torch.randn(11, 8)
    supervised_loss(hidden, torch.arange(5), weight_VH=weight).backward()
    assert hidden.grad is not None and weight.grad is None


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_the_form_for_the_compiler_computes_the_same(softcap: float | None) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(40, 30) * 3, torch.randint(0, 30, (40,))
    targets[7] = -100
    for ours, theirs in zip(
        loss.loss_and_grad_fused(logits, targets, softcap),
        loss.loss_and_grad(logits.clone(), targets, softcap),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
