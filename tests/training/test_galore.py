"""GaLore: its bases, its size, and forty steps of galore-torch."""

from collections import Counter
from importlib import import_module

import pytest
import torch
from lessons import RandomDocuments, tiny_llama
from original_galore import OriginalGaLore
from test_adamw8bit import relative_difference, state_bytes, steps_like
from torch import nn

from tunewell.config.schema import MethodSettings, Train
from tunewell.methods.full import Full
from tunewell.training.optimizers.base import Scaler
from tunewell.training.optimizers.galore import GaLore
from tunewell.training.step import TrainableModel

SETTINGS = Train(optimizer="galore", galore_rank=8, galore_every=20)


def _learner(settings: Train = SETTINGS) -> TrainableModel:
    model = tiny_llama()
    Full.apply(model, MethodSettings(kind="full"))
    return TrainableModel(model, "fp32", 40, settings=settings)


def _galore(learner: TrainableModel) -> GaLore:
    assert isinstance(learner.optimizer, GaLore)
    return learner.optimizer


@pytest.mark.parametrize(("is_8bit", "share"), [(False, 0.25), (True, 0.07)])
def test_states_of_rank_128_take_at_most_a_quarter_of_adamws(is_8bit: bool, share: float) -> None:
    assert state_bytes(Train(optimizer="galore", galore_8bit=is_8bit)) < share * state_bytes(Train())


def test_the_matrices_of_the_layers_are_projected_and_nothing_else() -> None:
    optimizer = _galore(_learner())
    kinds = {name.split(".")[-2] for name in optimizer.projected}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(optimizer.projected) == 14
    assert _galore(_learner(Train(optimizer="galore", galore_rank=16))).projected.keys() == {
        name for name in optimizer.projected if ".k_proj" not in name and ".v_proj" not in name
    }


def test_forty_steps_are_those_of_galore_torch() -> None:
    """With its exact SVD, its moments kept over a refresh, and all refreshes in one step; step 20 is a refresh.

    It decays a weight after the update, and adds epsilon before the bias correction; torch's AdamW and ours do not.
    With a weight decay of 0.1 or an epsilon of 1e-8, the difference is 2e-5.
    """
    galore_torch = import_module("galore_torch")
    settings = SETTINGS.model_copy(update={"max_grad_norm": None, "weight_decay": 0.01, "adam_epsilon": 1e-12})
    ours, other = _learner(Train(max_grad_norm=None)), _learner(Train())
    ours.optimizer = OriginalGaLore(ours.parameters, settings)
    start = {name: nn.Parameter(own.detach().clone()) for name, own in ours.parameters.items()}
    projected = _galore(ours).projected
    low = {"rank": 8, "update_proj_gap": 20, "scale": 0.25, "proj_type": "std", "weight_decay": 0.01}
    groups = [
        {"params": [own for name, own in other.parameters.items() if name in projected], **low},
        {
            "params": [own for name, own in other.parameters.items() if name not in projected and own.ndim == 2],
            "weight_decay": 0.01,
        },
        {"params": [own for own in other.parameters.values() if own.ndim == 1], "weight_decay": 0.0},
    ]
    theirs = galore_torch.GaLoreAdamW(groups, lr=1e-3, eps=1e-12, no_deprecation_warning=True)
    steps_like(ours, other, theirs, rate=1e-3)
    assert relative_difference(ours.parameters, other.parameters) < 1e-5
    assert relative_difference(ours.parameters, start) > 1e-2


def test_every_matrix_is_due_once_in_each_round_and_few_at_a_time() -> None:
    optimizer = GaLore({f"h.{at}.w": nn.Parameter(torch.zeros(9, 9)) for at in range(154)}, Train(galore_rank=8))

    def due(numbers: range) -> list[set[str]]:
        found = []
        for number in numbers:
            optimizer.start(number)
            found.append(set(optimizer._due))
        return found

    first, later = due(range(16)), due(range(400, 600))
    for steps in (first, later):
        assert Counter(name for names in steps for name in names) == dict.fromkeys(optimizer.projected, 1)
    assert max(map(len, first)) == 10 and max(map(len, later)) == 1


def test_a_gradient_is_projected_and_freed_during_the_backward_pass() -> None:
    """Only gradients that give a new basis stay whole, until `prepare`."""
    learner = _learner()
    optimizer = _galore(learner)
    optimizer.start(3)
    [batch] = RandomDocuments().batches(range(8), 10_000)
    learner.loss_sum(batch).backward()
    whole = {name for name, own in learner.parameters.items() if own.grad is not None}
    assert whole == learner.parameters.keys() - (optimizer.projected.keys() - optimizer._due)
    assert len(optimizer._due) == 1
    optimizer.prepare()
    gradients = optimizer.gradients()
    assert gradients.keys() == learner.parameters.keys()
    assert all(8 in gradients[name].shape for name in optimizer.projected)


@pytest.mark.parametrize("shape", [(60, 40), (40, 60), (3, 60, 40)])
def test_a_basis_holds_nearly_what_the_best_one_holds(shape: tuple[int, ...]) -> None:
    """The singular values of gradients fall slowly; without power iterations a fifth of the energy is lost."""
    torch.manual_seed(0)
    decay = torch.diag(torch.arange(1, 41) ** -0.7)
    tall = torch.linalg.qr(torch.randn(*shape[:-2], 60, 40)).Q @ decay @ torch.linalg.qr(torch.randn(40, 40)).Q
    gradient = 1e-9 * (tall if shape[-2] == 60 else tall.mT)
    parameters = {"h.0.w": nn.Parameter(torch.zeros(shape))}
    energy = []
    for kind in (GaLore, OriginalGaLore):
        optimizer = kind(parameters, Train(galore_rank=8))
        basis = optimizer._find_basis("h.0.w", gradient)
        assert basis.shape == (*shape[:-2], 40, 8)
        torch.testing.assert_close(basis.mT @ basis, torch.eye(8).expand(*shape[:-2], 8, 8), atol=1e-5, rtol=0)
        energy.append(float(optimizer._project("h.0.w", gradient, basis).norm()))
    assert 0.98 * energy[1] < energy[0] <= 1.0001 * energy[1]


@pytest.mark.parametrize("is_8bit", [False, True])
@pytest.mark.parametrize("shape", [(60, 40), (40, 60)])
def test_moments_keep_their_meaning_in_a_new_basis(shape: tuple[int, int], is_8bit: bool) -> None:
    """The mean is the same direction in the full space; the mean of the squares keeps its size in new directions."""
    torch.manual_seed(0)
    optimizer = GaLore({"h.0.w": nn.Parameter(torch.zeros(shape))}, Train(galore_rank=8, galore_8bit=is_8bit))
    optimizer.min_size = 0 if is_8bit else optimizer.min_size
    old = torch.linalg.qr(torch.randn(40, 8)).Q
    state = optimizer.state_of("h.0.w")
    state |= {"basis": old, **optimizer.new_moments(optimizer._project("h.0.w", torch.zeros(shape), old))}
    mean, square = torch.randn_like(state["exp_avg"], dtype=torch.float32), torch.ones(state["exp_avg"].shape)
    for part, value in {"exp_avg": mean, "exp_avg_sq": square}.items():
        state |= optimizer.moment_parts("h.0.w", part, value)
    tolerance = 0.05 if is_8bit else 1e-5

    def full(mean: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
        return mean @ basis.mT if shape[0] > shape[1] else basis @ mean

    turned = old @ torch.linalg.qr(torch.randn(8, 8)).Q
    optimizer._number = 1000
    optimizer._replace_basis("h.0.w", turned, torch.tensor(False))
    found = full(optimizer.read_moment("h.0.w", "exp_avg"), turned)
    assert (found - full(mean, old)).norm() < tolerance * mean.norm()
    other = torch.linalg.qr(torch.randn(40, 8)).Q
    optimizer._replace_basis("h.0.w", other, torch.tensor(False))
    torch.testing.assert_close(optimizer.read_moment("h.0.w", "exp_avg_sq"), square, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_learns_a_change_of_low_rank(dtype: torch.dtype) -> None:
    """A rank of 8 is enough for a change of rank 4, also with weights in bf16."""
    torch.manual_seed(0)
    inputs, change = torch.randn(256, 40), torch.randn(40, 4) @ torch.randn(4, 60) * 0.1
    weight = nn.Parameter(torch.zeros(60, 40, dtype=dtype))
    optimizer = GaLore({"h.0.w": weight}, Train(galore_rank=8, galore_every=50))
    scaler = Scaler.make("bf16", torch.device("cpu"))

    def loss() -> torch.Tensor:
        return (inputs @ (weight.float().mT - change)).square().mean()

    before = float(loss())
    for number in range(300):
        optimizer.start(number)
        value = loss()
        value.backward()
        optimizer.prepare()
        optimizer.update(rate=2e-2, max_norm=None, loss=value.detach(), scaler=scaler)
    assert float(loss()) < 0.02 * before
