"""The shape that layers are compiled for, and when they are, is a matter of numbers alone."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tunewell.data.batches import DataOrder, FixedShape
from tunewell.training.compile import Compiler, can_use_graphs, fixed_shape
from tunewell.training.distributed import World
from tunewell.training.evaluate import _answers


def _order(lengths: list[int]) -> DataOrder:
    return DataOrder(np.array(lengths), 0, "x", batch_tokens=4096)


def test_the_shape_holds_every_micro_batch_within_the_budget() -> None:
    shape = fixed_shape(_order([100] * 400), budget=2048, longest=100)
    assert (shape.tokens, shape.longest) == (2048, 100)
    assert shape.documents >= 20 + 21  # documents, and those that filling makes


def test_one_long_document_does_not_make_all_others_be_filled_up_to_it() -> None:
    assert fixed_shape(_order([100] * 400 + [9000]), budget=2048, longest=9000).tokens == 2048


def test_where_most_documents_are_longer_than_the_budget_they_make_the_shape() -> None:
    assert fixed_shape(_order([100] * 10 + [9000] * 40), budget=2048, longest=9000).tokens == 9088


def _learner(**values: Any) -> Any:
    known = {"device": torch.device("cuda"), "shape": None, "may_compile": True, "longest": 100, "world": World()}
    return SimpleNamespace(**known | values)


@pytest.mark.parametrize(
    ("wish", "values"),
    [
        ("off", {}),
        ("on", {"device": torch.device("cpu")}),
        ("on", {"shape": object()}),
        ("on", {"may_compile": False}),
    ],
)
def test_never_where_it_is_not_wanted_or_cannot_be(wish: str, values: Any) -> None:
    compiler, learner = Compiler(wish, 1_000_000), _learner(**values)
    assert not any(compiler.is_due(learner, step=step, seconds=9.0) for step in range(1, 9))
    assert compiler.budget(learner, 4096) == 4096


@pytest.mark.parametrize(("num_steps", "is_worth_it"), [(100, False), (10_000, True)])
def test_after_a_few_timed_steps_where_the_rest_saves_more_than_it_costs(num_steps: int, is_worth_it: bool) -> None:
    compiler, learner = Compiler("auto", num_steps), _learner()
    assert compiler.budget(learner, 4096) == 1024, "the first steps do not decide how much memory a run needs"
    found = [compiler.is_due(learner, step=step, seconds=0.5) for step in range(1, 6)]
    assert found == [False, False, False, is_worth_it, is_worth_it]
    assert compiler.budget(learner, 4096) == 4096


def _recorded(*, tokens: int = 16_384, is_recomputing: bool = False, **values: Any) -> bool:
    known = {"shape": FixedShape(tokens, 64, 400), "may_use_graphs": True, "has_dropout": False}
    model = SimpleNamespace(is_gradient_checkpointing=is_recomputing)
    return can_use_graphs(_learner(model=model, **known | values), [torch.nn.Linear(1024, 1024, bias=False)] * 4)


def test_launches_are_recorded_where_they_take_the_time_and_nothing_speaks_against_it() -> None:
    assert _recorded()
    assert not _recorded(tokens=1 << 20), "so many tokens keep the device busy"
    assert not _recorded(has_dropout=True), "dropout would be drawn as it was recorded"
    assert not _recorded(may_use_graphs=False), "memory was short beside graphs"
    assert not _recorded(is_recomputing=True)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(_recorded()))
    thread.start()
    thread.join()
    assert found == [False], "torch 2.11 has graphs in the main thread alone"


class _Another(World):
    """The second of two processes; the first says yes to whatever is asked."""

    def any(self, flag: bool) -> bool:
        return True


def test_all_processes_compile_together() -> None:
    """Each went by its own clock, and one that had compiled cut its steps otherwise than the rest."""
    compiler, learner = Compiler("auto", 100), _learner(world=_Another(1, 2))
    assert [compiler.is_due(learner, step=step, seconds=0.0) for step in range(1, 5)] == [False, False, False, True]


@pytest.mark.parametrize("rank", [0, 1])
def test_graphs_that_one_process_gives_up_for_its_answers_are_given_up_by_all(rank: int) -> None:
    """The first alone answers: it compiled anew, and cut a step otherwise, whose documents were not the step's."""
    given_up: list[bool] = []
    learner = _learner(world=_Another(rank, 2), may_use_graphs=rank == 1, drop_graphs=lambda: given_up.append(True))
    run: Any = SimpleNamespace(
        learner=learner,
        config=SimpleNamespace(evaluate=SimpleNamespace(samples=2)),
        healing=SimpleNamespace(limits=SimpleNamespace(answer_tokens=None)),
        progress=SimpleNamespace(step=4),
        ask=lambda step, tokens: [],
    )
    assert _answers(run, SimpleNamespace(memory_reporter=lambda step: None)) == []  # pyright: ignore[reportArgumentType]
    assert given_up == [True]
