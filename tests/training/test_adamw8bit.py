"""8-bit AdamW: its codes, its size, and forty steps of bitsandbytes' own."""

from importlib import import_module

import pytest
import torch
from lessons import RandomDocuments, tiny_llama
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from tunewell.config.schema import MethodSettings, Train
from tunewell.methods.full import Full
from tunewell.training.optimizers.adamw8bit import BLOCK, AdamW8bit, dequantised, dynamic_codes, quantised
from tunewell.training.optimizers.base import Optimizer, Scaler, build_optimizer
from tunewell.training.step import TrainableModel

CPU = torch.device("cpu")
TINYLLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
    "tie_word_embeddings": False,
}


def state_bytes(settings: Train) -> int:
    """The optimizer state of a Llama of 1.1 B parameters, counted without allocating it."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**TINYLLAMA))
    parameters = dict(model.named_parameters())
    assert sum(own.numel() for own in parameters.values()) == 1_100_048_384
    optimizer = build_optimizer(parameters, settings)
    optimizer.start(0)
    optimizer.gradients(is_complete=True)
    optimizer.prepare()
    return sum(tensor.nbytes for tensor in optimizer.state_tensors().values())


def test_states_take_at_most_27_percent_of_adamws() -> None:
    assert state_bytes(Train(optimizer="adamw8bit")) < 0.27 * state_bytes(Train())


@pytest.mark.parametrize("is_signed", [True, False])
def test_every_value_gets_the_nearest_code(is_signed: bool) -> None:
    """Except for squares, which are never rounded to zero: the update divides by their root."""
    kind = dynamic_codes(CPU, is_signed)
    assert len(kind.values) == 256 and (kind.values.diff() > 0).all()
    torch.manual_seed(0)
    blocks = torch.randn(8, BLOCK) * 10 ** torch.randn(8, BLOCK)
    blocks = blocks if is_signed else blocks.square()
    blocks[5] = 0
    codes, scale = quantised(blocks, kind)
    assert torch.equal(scale, blocks.abs().amax(1))
    around = [kind.limits[1:-1].nextafter(torch.tensor(end)) for end in (-2.0, 2.0)]  # on both sides of each limit
    for shift, values in enumerate(around):
        padded = torch.cat([values, torch.ones(BLOCK - len(values))])[None]
        assert torch.equal(quantised(padded, kind)[0][0, : len(values)].int(), torch.arange(1, 255) + shift)
    shares = blocks / scale.clamp_min(1e-30)[:, None]
    allowed = kind.values if is_signed else kind.values[1:]
    nearest = (shares[..., None] - allowed).abs().amin(-1)
    assert torch.equal((shares - kind.values[codes.int()]).abs(), nearest)
    again, _ = quantised(dequantised(codes, scale, kind), kind)
    assert torch.equal(again[:5], codes[:5]) and (dequantised(codes, scale, kind)[5] == 0).all()


@pytest.mark.parametrize("is_signed", [True, False])
def test_the_codes_are_those_of_bitsandbytes(is_signed: bool) -> None:
    theirs = import_module("bitsandbytes").functional.create_dynamic_map(signed=is_signed)
    assert torch.equal(dynamic_codes(CPU, is_signed).values, theirs)


def _full_learner(settings: Train) -> TrainableModel:
    model = tiny_llama(hidden_size=64, intermediate_size=150)
    Full.apply(model, MethodSettings(kind="full"))
    return TrainableModel(model, "fp32", 40, settings=settings)


def relative_difference(ours: dict[str, nn.Parameter], theirs: dict[str, nn.Parameter]) -> float:
    """The norm of the difference of all weights, relative to the norm of all weights."""
    with torch.no_grad():
        difference = torch.cat([(own - theirs[name]).view(-1) for name, own in ours.items()])
        return float(difference.norm() / torch.cat([other.view(-1) for other in theirs.values()]).norm())


def steps_like(learner: TrainableModel, other: TrainableModel, theirs: torch.optim.Optimizer, *, rate: float) -> None:
    """Take forty steps with a learner, and the same steps on another with an optimizer of someone else."""
    documents = RandomDocuments()
    for number in range(40):
        chosen = [(number * 7 + k) % 24 for k in range(7)]
        [batch] = documents.batches(chosen, 10_000)
        learner.take_step([batch], number=number, rate=rate)
        (other.loss_sum(batch) / len(batch.rows)).backward()
        theirs.step()
        theirs.zero_grad()


@pytest.mark.parametrize("reference", ["adamw", "bitsandbytes"])
def test_forty_steps_are_those_of_bitsandbytes_and_nearly_those_of_adamw(reference: str) -> None:
    """Full fine-tuning of a tiny Llama on the CPU in fp32, with weight decay; each side computes its own gradients.

    With squares rounded to the nearest code, zero included, the weights differ from AdamW's by 1e-2.
    """
    settings = Train(optimizer="adamw8bit", weight_decay=0.1, max_grad_norm=None)
    ours, other = _full_learner(settings), _full_learner(Train())
    start = {name: nn.Parameter(own.detach().clone()) for name, own in ours.parameters.items()}
    groups = [
        {"params": [own for own in other.parameters.values() if own.ndim == 2], "weight_decay": 0.1},
        {"params": [own for own in other.parameters.values() if own.ndim == 1], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW
    if reference == "bitsandbytes":
        theirs = import_module("bitsandbytes").optim.AdamW8bit
    steps_like(ours, other, theirs(groups, lr=1e-4), rate=1e-4)
    kinds = {tensor.dtype for name, tensor in ours.optimizer.state_tensors().items() if name.endswith("exp_avg")}
    assert kinds == {torch.uint8, torch.float32}
    assert relative_difference(ours.parameters, other.parameters) < 5e-4
    assert relative_difference(ours.parameters, start) > 5e-3


def _fit(make: type[Optimizer], settings: Train, dtype: torch.dtype, steps: int = 400) -> Tensor:
    torch.manual_seed(0)
    inputs, right = torch.randn(256, 80), torch.randn(80, 80) * 0.3
    weight = nn.Parameter((right + 0.2 * torch.randn(80, 80)).to(dtype))
    optimizer, scaler = make({"weight": weight}, settings), Scaler.make("bf16", CPU)
    draw = torch.Generator().manual_seed(1)
    for number in range(steps):
        rows = torch.randint(0, 256, (32,), generator=draw)
        optimizer.start(number)
        loss = (inputs[rows] @ (weight.float() - right)).square().mean()
        loss.backward()
        optimizer.prepare()
        optimizer.update(rate=3e-4, max_norm=1.0, loss=loss.detach(), scaler=scaler)
    return (inputs @ (weight.detach().float() - right)).square().mean()


def test_bf16_weights_learn_what_fp32_weights_learn() -> None:
    """Both with 8-bit moments; the weights are rounded stochastically."""
    narrow, wide = (_fit(AdamW8bit, Train(), dtype) for dtype in (torch.bfloat16, torch.float32))
    assert float(narrow) == pytest.approx(float(wide), rel=0.05)
    assert float(wide) < 0.6 * float(_fit(AdamW8bit, Train(), torch.float32, steps=1))
