"""The check before step 1 refuses every planted leak, in both passes, and lets every right model through."""

from collections.abc import Callable
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from family_configs import VOCABULARY, build
from lessons import RandomDocuments
from tiny_runs import make_run
from torch import Tensor
from transformers import PreTrainedModel

from tunewell.config.schema import Train
from tunewell.model_files.families import DOCUMENTS
from tunewell.models import attention
from tunewell.models.states import prepare_packing, stateful_mixers
from tunewell.records.plan import read_plan
from tunewell.training.build import check_packing
from tunewell.training.distributed import World
from tunewell.training.leak_probe import PackingFault, probe_leaks
from tunewell.training.step import TrainableModel


def _learner(kind: str, precision: str) -> TrainableModel:
    attention.register()
    model = build(kind)
    model.set_attn_implementation(attention.SDPA)
    prepare_packing(model)
    model = model.to(torch.bfloat16) if precision == "bf16" else model
    return TrainableModel(model, precision, 40, settings=Train())


def _ignore_boundaries(model: PreTrainedModel) -> None:
    """Call the mixers as transformers does: with the whole row."""
    for mixer in stateful_mixers(model):
        mixer.forward = MethodType(_with_whole_row, mixer)


def _with_whole_row(mixer: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    kept = {name: value for name, value in kwargs.items() if name not in attention.LAYOUT_KEYS}
    return type(mixer).forward(mixer, hidden_states, **kept)


def _shift(by: int) -> Callable[[PreTrainedModel], None]:
    """Let every document begin some tokens late: its first tokens belong to the one before."""

    def plant(model: PreTrainedModel) -> None:
        for mixer in stateful_mixers(model):
            right = mixer.forward

            def shifted(*args: Any, right: Any = right, mixer: Any = mixer, **kwargs: Any) -> Any:
                lengths = [length for number, length in mixer.packed_layout["packed_runs"] for _ in range(number)]
                lengths = [lengths[0] + by, *lengths[1:-1], lengths[-1] - by]
                layout = {"packed_runs": attention.runs_of([length for length in lengths if length > 0])}
                mixer.__dict__["packed_layout"] = layout
                return right(*args, **{name: v for name, v in kwargs.items() if name not in attention.LAYOUT_KEYS})

            mixer.forward = shifted

    return plant


class _Crossing(torch.autograd.Function):
    """Right in the forward pass; the gradient of each token is added to that of the token before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lag: int) -> Tensor:
        ctx.lag = lag
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] + 0.1 * torch.roll(grads[0], -ctx.lag, dims=1), None


def _wrong_backward(lag: int) -> Callable[[PreTrainedModel], None]:
    def plant(model: PreTrainedModel) -> None:
        layer: Any = model.get_submodule("model.layers.1")
        layer.register_forward_hook(lambda module, args, out: _Crossing.apply(out, lag))

    return plant


def _carry_one_token(model: PreTrainedModel) -> None:
    """Add a little of the token before, also over a boundary, as a state does that is cleared one token late."""
    layer: Any = model.get_submodule("model.layers.0")
    layer.register_forward_hook(lambda module, args, out: out + 0.01 * torch.roll(out.detach() * 0 + out, 1, dims=1))


def _join_documents(model: PreTrainedModel) -> None:
    """Lay all documents down as one for the attention."""
    layer: Any = next(module for name, module in model.named_modules() if name.endswith("self_attn"))
    right = layer.forward

    def joined(*args: Any, **kwargs: Any) -> Any:
        if "packed_runs" not in kwargs:
            return right(*args, **kwargs)
        length = sum(number * length for number, length in kwargs["packed_runs"])
        kwargs = {**kwargs, "packed_runs": ((1, length),)} | ({"packed_prefix": 0} if "packed_prefix" in kwargs else {})
        return right(*args, **kwargs)

    layer.forward = joined


FAULTS: dict[str, tuple[str, Callable[[PreTrainedModel], None]]] = {
    "the gated delta rule ignores boundaries": ("qwen3_5_text", _ignore_boundaries),
    "the gated delta rule with experts ignores boundaries": ("qwen3_next", _ignore_boundaries),
    "short convolutions ignore boundaries": ("lfm2", _ignore_boundaries),
    "Mamba2 ignores boundaries": ("bamba", _ignore_boundaries),
    "Mamba2 beside attention ignores boundaries": ("falcon_h1", _ignore_boundaries),
    "attention ignores boundaries in one layer": ("llama", _join_documents),
    "attention of a hybrid ignores boundaries": ("qwen3_5_text", _join_documents),
    "boundaries of convolutions are one token late": ("lfm2", _shift(1)),
    "boundaries of the delta rule are one token late": ("qwen3_5_text", _shift(1)),
    "a state is carried by one token": ("llama", _carry_one_token),
    "the backward pass crosses by one token": ("llama", _wrong_backward(1)),
    "the backward pass of a hybrid crosses by three tokens": ("qwen3_5_text", _wrong_backward(3)),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", FAULTS)
def test_every_planted_leak_is_refused_before_step_one(name: str, precision: str) -> None:
    kind, plant = FAULTS[name]
    learner = _learner(kind, precision)
    plant(learner.model)
    with pytest.raises(PackingFault):
        probe_leaks(learner, RandomDocuments(longest=30))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_5_text", "qwen3_next", "lfm2", "bamba", "falcon_h1"])
def test_a_right_model_has_exactly_zero_crossing(kind: str, precision: str) -> None:
    """No false refusal: without a fault, not even rounding crosses where no experts are routed."""
    found = probe_leaks(_learner(kind, precision), RandomDocuments(longest=30))
    assert found.gradient == 0
    assert found.exchange == 0 or kind == "qwen3_next"


def test_documents_one_by_one_need_no_packing_at_all() -> None:
    attention.register()
    model = build("bloom")
    found = probe_leaks(TrainableModel(model, "fp32", 40, settings=Train()), RandomDocuments())
    assert found.exchange == found.packed_from_alone == found.alone_from_stock == 0
    assert model.config.vocab_size == VOCABULARY


def test_a_leak_lowers_the_level_visibly_and_the_run_goes_on(tmp_path: Path) -> None:
    """The plan records it, because evaluation must compute the documents of this run in the same way."""
    run = make_run(tmp_path / "run")
    _carry_one_token_when_packed(run.learner.model)
    parts: Any = SimpleNamespace(listener=run.listener, plan=run.plan, world=World(), folder=tmp_path / "run")
    state = run.learner.optimizer
    check_packing(parts, run)
    assert not attention.is_packed(run.learner.model)
    assert run.learner.optimizer is state, "a resumed run keeps its optimizer"
    saved = read_plan(tmp_path / "run").packing
    assert saved is not None and saved.value == DOCUMENTS and "gradient crosses" in saved.because
    assert run.plan.packing == saved
    first, second = run.listener.notes
    assert first.startswith("documents in training from here on: document by document (packed rows influence")
    assert second == "check passed: 6 documents, one by one, as transformers computes them"


def _carry_one_token_when_packed(model: PreTrainedModel) -> None:
    layer: Any = model.get_submodule("model.layers.0")

    def leak(module: Any, args: Any, kwargs: dict[str, Any], out: Tensor) -> Tensor:
        return out + 0.01 * torch.roll(out, 1, dims=1) if "packed_runs" in kwargs else out

    layer.register_forward_hook(leak, with_kwargs=True)
