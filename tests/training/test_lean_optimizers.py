"""Optimizers with small states keep the engine's invariants: any cut into micro-batches, NaN, resume."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lessons import RandomDocuments, lora_learner, tiny_llama
from tiny_runs import make_run

import tunewell
from corpora import row
from tunewell.config.schema import MethodSettings, Train
from tunewell.methods.full import Full
from tunewell.records.checkpoint import verify
from tunewell.training.engine import train
from tunewell.training.find_checkpoints import Saved
from tunewell.training.run import Run, resume, rewind
from tunewell.training.step import TrainableModel

GALORE: dict[str, Any] = {"optimizer": "galore", "galore_rank": 8, "galore_every": 5}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw8bit": {"optimizer": "adamw8bit"},
    "galore": GALORE,
    "galore 8-bit": GALORE | {"galore_8bit": True},
}
CHOSEN = list(range(11))


def _learner(kind: str, name: str, **settings: Any) -> TrainableModel:
    """A learner with parameters on both sides of the limit of 4,096 elements."""
    own = Train(**OPTIMIZERS[name] | settings)
    if kind == "lora":
        return lora_learner(tiny_llama(hidden_size=512), train=own, method=MethodSettings(rank=8, alpha=16))
    model = tiny_llama(hidden_size=64)
    Full.apply(model, MethodSettings(kind="full"))
    return TrainableModel(model, "fp32", 40, settings=own)


def _state(learner: TrainableModel) -> dict[str, torch.Tensor]:
    weights = {name: own.detach().clone() for name, own in learner.parameters.items()}
    return weights | {name: own.clone() for name, own in learner.optimizer.state_tensors().items()}


@pytest.mark.parametrize(
    ("kind", "name", "first"),
    [
        ("lora", "adamw8bit", 0),
        ("full", "adamw8bit", 0),
        ("full", "galore", 0),
        ("full", "galore", 101),
        ("full", "galore 8-bit", 0),
    ],
)
def test_any_cut_into_micro_batches_makes_the_same_step(kind: str, name: str, first: int) -> None:
    """Gradients are summed in projected form. A basis comes from the gradient of the whole step, not of a part."""
    documents, weights = RandomDocuments(), {}
    for budget in (10_000, 60, 1):  # a budget of 1: one document at a time, not packed
        # With 200 steps between refreshes, none of the 14 matrices is due in steps 101 to 103: the bases are fixed.
        settings = {"galore_every": 200} if first else {}
        learner = _learner(kind, name, adam_epsilon=1e-4, **settings)
        for number, chosen in enumerate([CHOSEN, list(range(11, 22)), [22, 23]]):
            learner.take_step(documents.batches(chosen, budget), number=first + number, rate=1e-3)
        weights[budget] = torch.cat([own.detach().view(-1) for own in learner.parameters.values()])
    tolerance = 1e-4 if "8" in name else 1e-5 if first == 0 else 1e-6
    for budget in (60, 1):
        torch.testing.assert_close(weights[budget], weights[10_000], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("spoil", ["gradient", "norm"])
@pytest.mark.parametrize(("kind", "name"), [("lora", "adamw8bit"), *(("full", name) for name in OPTIMIZERS)])
def test_a_bad_step_changes_nothing(kind: str, name: str, spoil: str) -> None:
    """Weights, codes, scales, step counts and bases stay to the last bit, also in a step that refreshes a basis."""
    learner, batches = _learner(kind, name, weight_decay=0.1), RandomDocuments().batches(CHOSEN, 64)
    for number in range(6):
        learner.take_step(batches, number=number, rate=1e-3)
    before = _state(learner)
    assert any(own.dtype == torch.uint8 for own in before.values()) == (name != "galore")
    for number in range(6, 11):  # every matrix is due once
        handle = None
        if spoil == "gradient":
            at = list(learner.parameters)[number]
            handle = learner.parameters[at].register_hook(lambda gradient: gradient * float("nan"))
        limit = 1e-9 if spoil == "norm" else float("inf")
        result = learner.take_step(batches, number=number, rate=1e-3, norm_limit=limit)
        assert result.read()[2]
        after = _state(learner)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[part], before[part]) for part in before)
        if handle is not None:
            handle.remove()
    assert not learner.take_step(batches, number=11, rate=1e-3).read()[2]
    after = _state(learner)
    assert all(not torch.equal(after[own], before[own]) for own in learner.parameters)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clipping_and_the_fp16_scale_cancel_out(name: str) -> None:
    """The norm is that of the projected gradients; the loss scale is divided out of it and of the update."""
    documents, found = RandomDocuments(), []
    for scale in (1.0, 1024.0):
        learner = _learner("full", name, max_grad_norm=0.1, adam_epsilon=1e-4)
        learner.scaler.scale.fill_(scale)
        numbers = [learner.take_step(documents.batches(CHOSEN, 64), number=n, rate=1e-3).read() for n in range(3)]
        found.append(
            (np.array(numbers)[:, :2], torch.cat([own.detach().view(-1) for own in learner.parameters.values()]))
        )
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-4)
    assert (found[0][0][:, 1] > 0.1).all(), "the gradients are clipped"
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-5)


def _run(folder: Path, name: str, faults: str | None = None, **settings: Any) -> Run:
    own = OPTIMIZERS[name] | settings
    plan = {"method": "full", "precision": own.get("masters", "fp32")}
    return make_run(folder, config={"train": own, "method": {"kind": "full"}}, plan=plan, faults=faults)


def _tensors(run: Run) -> dict[str, torch.Tensor]:
    return _state(run.learner)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "masters"), [(name, "fp32") for name in OPTIMIZERS] + [("galore 8-bit", "bf16")])
def test_a_resumed_run_is_the_run_never_stopped(tmp_path: Path, name: str, masters: str) -> None:
    straight = _run(tmp_path / "run", name, masters=masters)
    assert train(straight).status == "finished"
    resumed = _run(tmp_path / "run", name, masters=masters)
    saved = resumed.checkpoints.folder / "step-000008"
    resume(resumed, resumed.checkpoints.load(Saved(saved, verify(saved))))
    assert train(resumed).status == "finished"
    found, expected = _tensors(resumed), _tensors(straight)
    assert found.keys() == expected.keys() and all(torch.equal(found[part], expected[part]) for part in expected)
    losses = [taken.loss for taken in straight.listener.steps]  # type: ignore[attr-defined]
    assert np.mean(losses[-4:]) < np.mean(losses[:4])


def test_states_of_another_optimizer_are_not_loaded(tmp_path: Path) -> None:
    """`--allow-change optimizer` goes on with fresh states: 8-bit codes read as numbers would ruin the weights."""
    first = _run(tmp_path / "run", "adamw8bit")
    first.identity["optimizer"] = "adamw8bit"
    assert train(first).status == "finished"
    other = make_run(tmp_path / "run", config={"method": {"kind": "full"}}, plan={"method": "full", "num_steps": 14})
    other.identity["optimizer"] = "adamw"
    resume(other, other.checkpoints.load(Saved(saved := other.checkpoints.folder / "step-000012", verify(saved))))
    assert other.progress.step == 12 and other.learner.optimizer.state_tensors() == {}
    assert train(other).status == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_ran_out_of_memory_is_repeated_and_a_nan_is_skipped(tmp_path: Path, name: str) -> None:
    """Gradients of the failed attempt, projected or whole, and bases found from them are dropped."""
    plain = _run(tmp_path / "plain", name)
    assert train(plain).status == "finished"
    faults = "oom@backward:step=3;oom@optimizer:step=7"
    short = _run(tmp_path / "short", name, faults=faults)
    assert train(short).status == "finished"
    assert [entry.action for entry in short.listener.healing] == ["split", "split"]  # type: ignore[attr-defined]
    tolerance = 1e-3 if "8" in name else 1e-4
    for part, own in short.learner.parameters.items():
        torch.testing.assert_close(own, plain.learner.parameters[part], rtol=tolerance, atol=tolerance)
    spoiled = _run(tmp_path / "spoiled", name, faults="nan@gradients:step=6")
    assert train(spoiled).status == "finished"
    assert [entry.action for entry in spoiled.listener.healing] == ["skip"]  # type: ignore[attr-defined]


def test_a_run_from_the_library_is_not_resumed_with_another_rank(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moments of another rank do not fit; if the change is allowed, they start from zero, with a note."""
    monkeypatch.chdir(tmp_path)
    train = {"max_steps": 3, "batch_documents": 4, "optimizer": "galore", "galore_rank": 16, "learning_rate": 3e-3}
    settings: dict[str, Any] = {
        **{"model": "preset:tiny-1m", "tokenizer": str(tiny_model), "device": "cpu", "method": {"kind": "full"}},
        **{"evaluate": {"samples": 0}, "verdict": {"after_training": False}, "train": train},
    }
    rows = [row(number) for number in range(30)]
    result = tunewell.train(settings, data=rows, out="run", progress=False)
    assert result.status == "finished" and result.losses[-1][1] < result.losses[0][1]
    settings["train"] = train | {"max_steps": 4, "galore_rank": 8}
    resumed = {"data": rows, "out": "run", "resume": True, "progress": False}
    with pytest.raises(tunewell.UserError, match="galore_rank: 16 in the checkpoint, 8 now"):
        tunewell.train(settings, **resumed, allow_changes=["num_steps"])
    more = tunewell.train(settings, **resumed, allow_changes=["num_steps", "galore_rank"])
    assert more.steps == 4 and any("optimizer states start from zero" in note for note in more.notes)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_healing_rewinds_bf16_masters_and_may_go_on_in_fp32(tmp_path: Path, name: str) -> None:
    """Bases and full moments follow the dtype of their weights; codes and scales do not."""
    run = _run(tmp_path / "run", name, masters="bf16")
    assert train(run).status == "finished"
    assert rewind(run, not_after=8, or_later=False, are_weights_bad=True) == 8
    run.learner.change(precision="fp32", device=None)
    assert train(run).status == "finished" and run.progress.step == 12
    kinds = {own.dtype for own in _tensors(run).values()}
    assert kinds == ({torch.float32} if name == "galore" else {torch.float32, torch.uint8})
