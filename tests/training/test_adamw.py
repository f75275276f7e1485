"""Which weights decay, and updates of bf16 weights; the update in fp32 is held against torch's in `test_step.py`."""

from pathlib import Path

import pytest
import torch
from tiny_runs import make_run
from torch import nn

from tunewell.config.schema import Train
from tunewell.records.checkpoint import verify
from tunewell.training.engine import train
from tunewell.training.find_checkpoints import Saved
from tunewell.training.optimizers.adamw import AdamW, mixed, rounded
from tunewell.training.optimizers.base import Scaler
from tunewell.training.run import Run, resume, rewind


def test_norms_and_vectors_do_not_decay_whatever_their_shape() -> None:
    """Cohere's norms of queries and keys have a row for each head; by their shape alone they would be matrices."""
    layer = "model.layers.0"
    decay = {
        f"{layer}.self_attn.q_proj.weight": (8, 8),
        f"{layer}.self_attn.q_proj.lora_A": (2, 8),
        "model.normalized_embedding.weight": (8, 8),
    }
    spared = {
        f"{layer}.self_attn.q_norm.weight": (4, 8),
        f"{layer}.input_layernorm.weight": (8,),
        f"{layer}.self_attn.q_proj.bias": (8,),
        "model.norm.weight": (8,),
    }
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in (decay | spared).items()}
    groups = AdamW(parameters, Train(weight_decay=0.1)).torch_optimizer.param_groups
    names = {id(own): name for name, own in parameters.items()}
    found = {group["weight_decay"]: {names[id(own)] for own in group["params"]} for group in groups}
    assert found == {0.1: set(decay), 0.0: set(spared)}


def test_stochastic_rounding_keeps_the_mean_and_leaves_bf16_numbers_alone() -> None:
    """Rounding to nearest would make 0.3 of a step a whole step or none, always the same one."""
    noise = mixed(torch.arange(1 << 18, dtype=torch.int32))
    for bits in (noise & 0xFFFF, (noise >> 16) & 0xFFFF):
        for share in (0.01, 0.3, 0.9):
            for sign in (1, -1):
                value = torch.full((1 << 18,), sign * (1 + share * 2**-7))
                found = rounded(value, bits, torch.bfloat16).float()
                assert found.mean().item() == pytest.approx(value[0].item(), abs=4e-5)
        exact = torch.randn(1 << 18).bfloat16()
        assert torch.equal(rounded(exact.float(), bits, torch.bfloat16), exact)
    both = torch.stack([(noise & 0xFFFF).double(), ((noise >> 16) & 0xFFFF).double()])
    assert torch.corrcoef(both)[0, 1].abs() < 0.01, "weights and squares are rounded independently"


def _learn(dtype: torch.dtype, *, optimizer: str, steps: int = 1500) -> float:
    """Fit a linear map with small steps; return the final loss."""
    torch.manual_seed(0)
    inputs, right = torch.randn(256, 32), torch.randn(32, 32) * 0.3
    weight = nn.Parameter((right + 0.2 * torch.randn(32, 32)).to(dtype))
    plain = torch.optim.AdamW([weight], 1e-4, weight_decay=0.01)
    ours, scaler = AdamW({"weight": weight}, Train(weight_decay=0.01)), Scaler.make("bf16", torch.device("cpu"))
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        rows = torch.randint(0, 256, (32,), generator=draw)
        loss = (inputs[rows] @ (weight.float() - right)).square().mean()
        loss.backward()
        if optimizer == "torch":
            nn.utils.clip_grad_norm_([weight], 1.0)
            plain.step()
            plain.zero_grad()
        else:
            ours.prepare()
            ours.update(rate=1e-4, max_norm=1.0, loss=loss.detach(), scaler=scaler)
    return (inputs @ (weight.detach().float() - right)).square().mean().item()


def test_bf16_weights_learn_what_fp32_weights_learn_over_many_small_steps() -> None:
    """An update of 1e-4 is a tenth of the distance of bf16 numbers near 0.3: rounded to nearest, nothing is learned."""
    expected = _learn(torch.float32, optimizer="torch")
    assert _learn(torch.bfloat16, optimizer="ours") == pytest.approx(expected, rel=0.05)
    assert _learn(torch.bfloat16, optimizer="torch") > 1.3 * expected


@pytest.mark.parametrize("bad", ["gradient", "loss", "norm"])
def test_a_bad_update_of_bf16_weights_changes_nothing(bad: str) -> None:
    """Decided on the device: weights, moments and the step count stay, to the last bit."""
    weight = nn.Parameter(torch.randn(33, 7).bfloat16())
    optimizer, scaler = AdamW({"weight": weight}, Train()), Scaler.make("bf16", torch.device("cpu"))

    def update(value: float, loss: float, limit: float = float("inf")) -> float:
        weight.grad = torch.randn(33, 7).bfloat16()
        weight.grad[3, 3] = value
        optimizer.prepare()
        done = optimizer.update(rate=1e-2, max_norm=1.0, loss=torch.tensor(loss), scaler=scaler, norm_limit=limit)
        return done.was_skipped.item()

    assert update(1.0, 1.0) == 0
    before = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()} | {
        "own": weight.detach().clone()
    }
    values = {"gradient": (float("nan"), 1.0), "loss": (1.0, float("inf")), "norm": (1.0, 1.0, 1e-3)}[bad]
    assert update(*values) == 1
    after = {**optimizer.state_tensors(), "own": weight.detach()}
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert update(1.0, 1.0) == 0 and not torch.equal(weight.detach(), before["own"])


_NARROW = {"config": {"train": {"masters": "bf16"}, "method": {"kind": "full"}}}


def _narrow_run(folder: Path, num_steps: int = 12) -> Run:
    return make_run(folder, **_NARROW, plan={"method": "full", "precision": "bf16", "num_steps": num_steps})


def _all_tensors(run: Run) -> dict[str, torch.Tensor]:
    return {
        **{name: own.detach() for name, own in run.learner.parameters.items()},
        **run.learner.optimizer.state_tensors(),
    }


def test_a_resumed_run_with_bf16_masters_is_the_run_never_stopped(tmp_path: Path) -> None:
    """The noise of the rounding follows from the step in the checkpoint, and the checkpoint is half as large."""
    straight = _narrow_run(tmp_path / "straight")
    assert train(straight).status == "finished"
    # The checkpoint of step 8 of the same plan, so that the schedule is the same.
    resumed = _narrow_run(tmp_path / "straight")
    saved = resumed.checkpoints.folder / "step-000008"
    resume(resumed, resumed.checkpoints.load(Saved(saved, verify(saved))))
    assert train(resumed).status == "finished"
    found, expected = _all_tensors(resumed), _all_tensors(straight)
    assert all(tensor.dtype == torch.bfloat16 for name, tensor in expected.items() if not name.endswith("/step"))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    num_weights = sum(own.numel() for own in straight.learner.parameters.values())
    assert sum(file.stat().st_size for file in saved.glob("*.safetensors")) < 1.2 * 3 * 2 * num_weights


def test_healing_rewinds_bf16_masters_and_may_go_on_in_fp32(tmp_path: Path) -> None:
    """The moments follow their parameters: fp32 weights with bf16 moments would end the run in torch's kernel."""
    run = _narrow_run(tmp_path / "run")
    assert train(run).status == "finished"
    assert rewind(run, not_after=8, or_later=False, are_weights_bad=True) == 8
    run.learner.change(precision="fp32", device=None)
    assert train(run).status == "finished" and run.progress.step == 12
    assert all(tensor.dtype == torch.float32 for tensor in _all_tensors(run).values())
