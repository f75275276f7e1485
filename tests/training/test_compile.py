"""The shape that layers are compiled for, and when they are, is a matter of numbers alone."""

import json
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import make_plan
from transformers import CONFIG_MAPPING, Gemma3TextConfig

from tunewell.config.schema import Config
from tunewell.data.batches import DataOrder, FixedShape
from tunewell.records.plan import Plan
from tunewell.training.compile import (
    CompileCache,
    Compiler,
    CompileTimes,
    can_use_graphs,
    describe_for_ahead,
    fixed_shape,
    read_measured,
)
from tunewell.training.distributed import World
from tunewell.training.evaluate import _answers
from tunewell.training.step import PhaseClock


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
    return SimpleNamespace(**known | {"phases": PhaseClock()} | values)


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
    assert not any(_steps(compiler, learner, 8, seconds=9.0))
    assert compiler.budget(learner, 4096) == 4096


def _steps(compiler: Compiler, learner: Any, number: int, *, seconds: float) -> list[bool]:
    """Take uncompiled steps of equal length, and return after which of them it is time to compile."""
    found = []
    for step in range(1, number + 1):
        compiler.on_step(learner, SimpleNamespace(seconds=seconds))  # pyright: ignore[reportArgumentType]
        found.append(compiler.is_due(learner, step=step))
    return found


@pytest.mark.parametrize(("num_steps", "is_worth_it"), [(100, False), (10_000, True)])
def test_after_a_few_timed_steps_where_the_rest_saves_more_than_it_costs(num_steps: int, is_worth_it: bool) -> None:
    compiler, learner = Compiler("auto", num_steps), _learner()
    assert compiler.budget(learner, 4096) == 2048, "the first steps do not decide how much memory a run needs"
    assert _steps(compiler, learner, 5, seconds=0.5) == [False, False, is_worth_it, is_worth_it, is_worth_it]
    assert compiler.budget(learner, 4096) == 4096


class _Cache:
    """Stands for torch's cache and the process that fills it, which takes two steps."""

    def __init__(self, measured: CompileTimes | None = None) -> None:
        self.measured, self.saved, self.polls = measured, list[CompileTimes](), 0
        self.is_compiling = False

    def is_filled(self, *, wants: bool) -> bool:
        self.is_compiling = wants or self.is_compiling
        self.polls += self.is_compiling
        if self.polls == 3:
            self.is_compiling = False
        return self.polls == 3

    def save(self, measured: CompileTimes) -> None:
        self.saved.append(measured)


def _cached(num_steps: int, measured: CompileTimes | None = None) -> tuple[Compiler, Any, Any]:
    cache: Any = _Cache(measured)
    return Compiler("auto", num_steps, cache), _learner(), cache


def test_code_that_is_not_cached_is_compiled_by_another_process_while_training_goes_on() -> None:
    compiler, learner, cache = _cached(100)
    assert _steps(compiler, learner, 4, seconds=0.5) == [False] * 4
    assert cache.is_compiling
    assert compiler.budget(learner, 4096) == 2048, "memory stays low until the layers are compiled"
    assert _steps(compiler, learner, 1, seconds=0.5) == [True]


def test_a_short_run_starts_no_other_process() -> None:
    compiler, learner, cache = _cached(20)
    assert not any(_steps(compiler, learner, 8, seconds=0.1))
    assert not cache.is_compiling
    assert compiler.budget(learner, 4096) == 4096


@pytest.mark.parametrize(("measured", "is_worth_it"), [(CompileTimes(3.0, 0.3), True), (CompileTimes(9.0, 0.1), False)])
def test_an_earlier_run_has_measured_what_compiling_costs_and_saves(measured: CompileTimes, is_worth_it: bool) -> None:
    compiler, learner, cache = _cached(100, measured)
    assert _steps(compiler, learner, 3, seconds=0.3) == [False, False, is_worth_it]
    assert not cache.is_compiling


def test_a_run_saves_what_compiling_cost_and_saved() -> None:
    compiler, learner, cache = _cached(100)
    _steps(compiler, learner, 3, seconds=0.4)
    learner.shape = object()
    for seconds in (3.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3):
        compiler.on_step(learner, SimpleNamespace(seconds=seconds))  # pyright: ignore[reportArgumentType]
    assert cache.saved == [CompileTimes(pytest.approx(3.0), pytest.approx(0.25))]  # pyright: ignore[reportArgumentType]


def test_what_another_process_would_build_has_the_first_layers_of_the_model() -> None:
    config = Gemma3TextConfig(num_hidden_layers=26, layer_types=["sliding_attention"] * 5 + ["full_attention"] * 21)
    train = Config.model_validate({"method": {"rank": 8}})
    values = {"model": SimpleNamespace(config=config, dtype=torch.bfloat16, modules=list), "may_use_graphs": True}
    plan = make_plan(method="lora", precision="bf16")
    run: Any = SimpleNamespace(learner=_learner(**values), config=train, plan=plan)
    found = describe_for_ahead(run, FixedShape(128, 32, 100))
    assert found is not None
    built = CONFIG_MAPPING[found["model"]["model_type"]].from_dict(json.loads(json.dumps(found))["model"])
    assert built.num_hidden_layers == 7, "one layer of each kind, and one more"
    assert built.layer_types[-2:] == ["full_attention"] * 2
    assert Config.model_validate(found["config"]) == train
    assert Plan.model_validate(found["plan"]) == plan


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

    def broadcast(self, value: Any) -> Any:
        return value


def test_all_processes_compile_together() -> None:
    """Each went by its own clock, and one that had compiled cut its steps otherwise than the rest."""
    compiler, learner = Compiler("auto", 100), _learner(world=_Another(1, 2))
    assert _steps(compiler, learner, 3, seconds=0.0) == [False, False, True]


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


@pytest.mark.parametrize(
    "content", ["[]", "null", '{"a": 1}', '{"a": {"seconds": "x"}}', '{"a": {"other": 1}}', "{", ""]
)
def test_a_damaged_file_of_measurements_is_no_measurement(content, tmp_path, monkeypatch) -> None:
    """Guards a run from a cache that another version or a full disk left behind."""
    monkeypatch.setenv("TUNEWELL_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "compiled").mkdir()
    (tmp_path / "compiled" / "measured.json").write_text(content, encoding="utf-8")
    run: Any = None
    cache = CompileCache(run)
    cache.__dict__["_signature"] = "a"
    assert cache.measured is None
    cache.save(CompileTimes(3.0, 0.3))
    assert read_measured()["a"] == {"saved_share": 0.3, "seconds": 3.0}
