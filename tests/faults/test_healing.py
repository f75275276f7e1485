"""What goes wrong in a run is healed, or ends it cleanly: out of memory, NaN, spikes, divergence. Rows 8 to 15.

Every fault is planted by `tunewell.training.faults` into a real run of a tiny model and held against the same run
without it. One seed is tried by default; `make faults` tries three and prints a line of JSON for each.
"""

import math
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from lessons import RandomDocuments
from tiny_runs import Remembering, make_run

from tunewell.core.errors import UserError
from tunewell.records.events import read_events
from tunewell.records.healing import HealingEntry, read_healing
from tunewell.runs.result import advice
from tunewell.training.engine import train
from tunewell.training.events import StepTaken
from tunewell.training.faults import parse_faults
from tunewell.training.run import Ending, Run, resume
from tunewell.training.step import StepHooks, StepResult

PLAN = {
    **{"num_steps": 48, "batch_documents": 4, "micro_batch_tokens": 64, "save_every": 5, "evaluate_every": 12},
    "learning_rate": 3e-3,
}
# No dropout: what is drawn depends on the cut. A larger epsilon: where a gradient is nearly nothing, Adam's default
# turns the rounding of a sum into a whole step.
CONFIG: dict[str, Any] = {
    "method": {"rank": 4, "dropout": 0.0},
    "train": {"adam_epsilon": 1e-3},
    # As in the plan. Intervals of `auto` are made longer on a slow machine.
    "evaluate": {"every_steps": 12},
    "checkpoints": {"every_steps": 5},
}
SEEDS = [0, pytest.param(1, marks=pytest.mark.faults), pytest.param(2, marks=pytest.mark.faults)]
WEIGHT = "model.layers.1.mlp.up_proj.base_layer.weight"


def run_of(folder: Path, seed: int, faults: str | None = None, **plan: Any) -> tuple[Run, Ending]:
    run = make_run(folder, config=CONFIG, plan=PLAN | plan, faults=faults, seed=seed)
    return run, train(run)


@cache
def undisturbed(seed: int) -> Run:
    return run_of(Path(mkdtemp(prefix="tunewell-undisturbed-")) / "run", seed)[0]


def treated(folder: Path) -> list[HealingEntry]:
    """What was done about something; notes, of a busy machine say, aside."""
    return [entry for entry in read_healing(folder) if entry.severity != "note"]


def losses(run: Run) -> list[float]:
    assert isinstance(run.listener, Remembering)
    return [event.loss for event in run.listener.steps]


def apart(run: Run, seed: int) -> float:
    """The largest relative difference to the losses of the undisturbed run."""
    pairs = zip(losses(run), losses(undisturbed(seed)), strict=True)
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


def end_apart(run: Run, seed: int) -> float:
    """The difference of the mean of the last losses, each the mean over an epoch's documents."""
    ours, theirs = (sum(losses(own)[-6:]) / 6 for own in (run, undisturbed(seed)))
    return abs(ours - theirs) / theirs


def assert_sound(run: Run) -> None:
    """Whatever happened, nothing that is not finite is in the model or in any checkpoint."""
    assert all(bool(torch.isfinite(parameter).all()) for parameter in run.learner.model.parameters())
    for name, tensor in run.checkpoints.load(run.checkpoints.newest()).tensors.items():  # type: ignore[arg-type]
        assert all(bool(torch.isfinite(own).all()) for own in tensor.values()), name


def told(row: int, fault: str, seed: int, run: Run, ending: Ending, **figures: Any) -> dict[str, Any]:
    actions = [entry.action for entry in run.healing.entries if entry.severity != "note"]
    rewound = sum(entry.step - (entry.rewound_to or 0) for entry in run.healing.entries if entry.action == "rewind")
    return {
        "row": row,
        "fault": fault,
        "seed": seed,
        "ended": ending.status,
        "steps_lost": rewound,
        "actions": actions[:8],
        **figures,
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (8, "oom@forward:tokens=40"),
        pytest.param(9, "oom@forward:step=20,tokens=40", marks=pytest.mark.faults),
        (10, "oom@backward:step=9"),
        pytest.param(10, "oom@optimizer:step=0", marks=pytest.mark.faults),
        (10, "oom@optimizer:step=9"),
        (11, "oom@held_out:tokens=40"),
    ],
)
def test_out_of_memory_changes_nothing_but_the_cut(
    tmp_path: Path, record_property: Any, row: int, fault: str, seed: int
) -> None:
    run, ending = run_of(tmp_path / "run", seed, fault)
    record_property("fault", told(row, fault, seed, run, ending, apart=apart(run, seed)))
    assert ending.status == "finished" and apart(run, seed) < 1e-6
    assert {entry.action for entry in treated(tmp_path / "run")} == {"split"}
    # One long step does not slow the rest; what never fits is cut for good.
    assert (run.healing.limits.micro_batch_tokens is None) == (row != 8)
    looks = [(look.step, look.loss) for look in run.listener.looks]  # type: ignore[attr-defined]
    expected = [(look.step, look.loss) for look in undisturbed(seed).listener.looks]  # type: ignore[attr-defined]
    assert looks == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in expected]
    assert_sound(run)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_document_that_fits_only_with_its_layers_computed_twice(
    tmp_path: Path, record_property: Any, seed: int
) -> None:
    """Every document alone: nothing can be cut, and once the layers are computed again on the way back it goes."""
    run, ending = run_of(tmp_path / "run", seed, "oom@backward:step=9", micro_batch_tokens=1)
    record_property("fault", told(9, "oom with nothing to cut", seed, run, ending, apart=apart(run, seed)))
    assert [entry.action for entry in treated(tmp_path / "run")] == ["recompute"] and apart(run, seed) < 1e-6
    assert not run.learner.model.is_gradient_checkpointing, "the next steps do without"


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_out_of_memory_within_a_layer_that_is_computed_twice(tmp_path: Path, record_property: Any, seed: int) -> None:
    """What the half-finished layer has set up must not meet the next try; torch 2.11 keeps it while the error lives."""
    config = CONFIG | {"train": CONFIG["train"] | {"recompute": True}}
    run = make_run(tmp_path / "run", config=config, plan=PLAN, seed=seed)
    run.learner.recompute("on")
    failures, kept = [5, 9, 10], []

    def fail(*_: Any) -> None:
        if failures and run.progress.step == failures[0] and run.learner.model.training:
            failures.pop(0)
            kept.append(torch.OutOfMemoryError("CUDA out of memory"))
            raise kept[-1]

    run.learner.model.get_submodule("model.layers.1.mlp").register_forward_pre_hook(fail)
    ending = train(run)
    record_property("fault", told(9, "oom in a layer computed twice", seed, run, ending, apart=apart(run, seed)))
    assert ending.status == "finished" and not failures and apart(run, seed) < 1e-6
    assert {entry.action for entry in treated(tmp_path / "run")} == {"split"}


@pytest.mark.parametrize("seed", SEEDS)
def test_what_never_fits_ends_the_run_with_what_would(tmp_path: Path, record_property: Any, seed: int) -> None:
    run, ending = run_of(tmp_path / "run", seed, "oom@forward:step=6,tokens=0,times=1000")
    record_property("fault", told(8, "oom for ever", seed, run, ending))
    assert (ending.status, ending.exit_code) == ("stopped", 4) and "does not fit" in ending.reason
    assert ending.advice and "packing.long_documents" in ending.advice
    assert run.checkpoints.newest().step == 5  # type: ignore[union-attr]
    assert_sound(run)


@pytest.mark.parametrize("seed", SEEDS)
def test_answers_that_do_not_fit_are_asked_fewer_at_once(tmp_path: Path, record_property: Any, seed: int) -> None:
    run = make_run(tmp_path / "run", config=CONFIG, plan=PLAN, seed=seed)
    asked = []

    def ask(step: int, batch_tokens: int) -> list[Any]:
        asked.append((step, batch_tokens))
        if batch_tokens > 1024:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return []

    run.ask = ask
    ending = train(run)
    record_property("fault", told(11, "oom in generation", seed, run, ending, apart=apart(run, seed)))
    assert asked == [(0, 8192), (0, 1024), (12, 1024), (24, 1024), (36, 1024), (48, 1024)]
    assert ending.status == "finished" and apart(run, seed) == 0.0


@pytest.mark.parametrize("seed", SEEDS)
def test_one_gradient_that_is_not_finite_is_left_out(tmp_path: Path, record_property: Any, seed: int) -> None:
    run, ending = run_of(tmp_path / "run", seed, "nan@gradients:step=9")
    record_property("fault", told(12, "one NaN", seed, run, ending, end_apart=end_apart(run, seed)))
    assert ending.status == "finished" and end_apart(run, seed) < 0.01
    [entry] = treated(tmp_path / "run")
    assert (entry.step, entry.name, entry.action, entry.documents) == (10, "nan-gradients", "skip", [])
    assert "it was finite when computed again" in entry.words
    assert_sound(run)


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_that_stay_bad_for_some_steps_send_the_run_back(
    tmp_path: Path, record_property: Any, seed: int
) -> None:
    run, ending = run_of(tmp_path / "run", seed, "nan@gradients:step=9,times=2")
    record_property("fault", told(12, "NaN twice in a row", seed, run, ending, apart=apart(run, seed)))
    first, second = treated(tmp_path / "run")
    assert (first.step, first.action, second.step, second.action, second.rewound_to) == (10, "skip", 11, "rewind", 5)
    # Back to before the first of them, and no document is blamed for what did not happen again.
    assert ending.status == "finished" and losses(run) == losses(undisturbed(seed)) and not run.healing.quarantine
    assert_sound(run)


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_that_stay_bad_for_ever_end_the_run_soon_and_save_nothing(
    tmp_path: Path, record_property: Any, seed: int
) -> None:
    run, ending = run_of(tmp_path / "run", seed, "nan@gradients:step=9,times=100000")
    record_property("fault", told(12, "NaN for ever", seed, run, ending))
    assert (ending.status, ending.exit_code) == ("stopped", 4)
    entries = treated(tmp_path / "run")
    assert [entry.action for entry in entries] == ["skip", "rewind", "rewind", "stop"]
    assert max(entry.step for entry in entries) <= 9 + 10 and entries[2].rate_share == 0.5
    assert run.checkpoints.newest().step <= 15  # type: ignore[union-attr]
    assert_sound(run)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_document_that_spoils_a_layer_is_found_and_left_out(tmp_path: Path, record_property: Any, seed: int) -> None:
    layer = "model.layers.1.mlp.down_proj"
    run, ending = run_of(tmp_path / "run", seed, f"nan@document:document=3,name={layer}")
    record_property("fault", told(12, "a bad document", seed, run, ending, end_apart=end_apart(run, seed)))
    [entry] = treated(tmp_path / "run")
    at = next(step for step in range(48) if 3 in run.order.step(step).documents)
    assert (entry.step, entry.documents, entry.place) == (at + 1, [3], f"output of `{layer}`")
    assert ending.status == "finished" and run.healing.quarantine == {3: at + 1}
    steps = {
        event["step"]: event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "step"
    }
    again = next(step for step in range(at + 1, 48) if 3 in run.order.step(step).documents)
    kept = [d for d in run.order.step(again).documents if d != 3]
    assert steps[again + 1]["tokens"] == int(run.order.lengths[kept].sum()) and not steps[again + 1]["was_skipped"]
    assert_sound(run)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.faults), 17])
@pytest.mark.parametrize("name", [WEIGHT, "model.layers.0.self_attn.q_proj.lora_A"])
def test_a_weight_that_goes_bad_is_named_and_read_again(
    tmp_path: Path, record_property: Any, name: str, step: int, seed: int
) -> None:
    """Frozen or trained: the run goes back, and ends bit for bit as if nothing had been."""
    run, ending = run_of(tmp_path / "run", seed, f"nan@weights:step={step},name={name}")
    record_property("fault", told(13, f"NaN in {name}", seed, run, ending, apart=apart(run, seed)))
    [entry] = treated(tmp_path / "run")
    assert (entry.step, entry.action, entry.place) == (step + 1, "rewind", f"weight `{name}`")
    assert entry.rewound_to == step // 5 * 5 and not entry.documents
    assert ending.status == "finished" and losses(run) == losses(undisturbed(seed))
    assert_sound(run)


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_without_anything_to_learn_are_no_fault(tmp_path: Path, record_property: Any, seed: int) -> None:
    """Nothing is divided by nothing where no token of a step is learned."""
    run = make_run(tmp_path / "run", config=CONFIG, plan=PLAN, seed=seed)
    for document in run.order.step(7).documents:
        run.documents.arrays(int(document))[1][:] = -100
    ending = train(run)
    record_property("fault", told(13, "nothing to learn", seed, run, ending))
    assert ending.status == "finished" and treated(tmp_path / "run") == []
    assert losses(run)[7] == 0.0 and all(math.isfinite(loss) for loss in losses(run))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_spike_of_three_steps_is_left_out(tmp_path: Path, record_property: Any, seed: int) -> None:
    run, ending = run_of(tmp_path / "run", seed, "scale@loss:step=36,times=3,factor=1000")
    record_property("fault", told(14, "norm x1000 for 3 steps", seed, run, ending, end_apart=end_apart(run, seed)))
    entries = treated(tmp_path / "run")
    assert [(e.step, e.name, e.action) for e in entries] == [(s, "loss-spike", "skip") for s in (37, 38, 39)]
    assert ending.status == "finished" and end_apart(run, seed) < 0.02


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rate_that_is_far_too_high_is_lowered_or_ends_the_run(
    tmp_path: Path, record_property: Any, seed: int
) -> None:
    """On a model that knows something: one that knows nothing has nothing to lose, and only stays where it is."""
    plan = PLAN | {"learning_rate": 10.0, "schedule": "constant", "num_steps": 200, "evaluate_every": 50}
    run = make_run(tmp_path / "run", config=CONFIG, plan=plan, seed=seed, is_learned=True)
    ending = train(run)
    record_property("fault", told(15, "rate 10", seed, run, ending, last=losses(run)[-1]))
    entries = [entry for entry in treated(tmp_path / "run") if entry.action != "none"]
    assert entries and entries[0].step < 60, "before the loss was high for 50 steps"
    if ending.status == "stopped":
        assert ending.exit_code == 4 and ending.advice and "train.learning_rate" in ending.advice
    else:
        assert losses(run)[-1] < 2 * min(losses(run))
    assert_sound(run)


@pytest.mark.parametrize(
    "rate", [pytest.param(3e-5, marks=pytest.mark.faults), 1e-4, pytest.param(1e-3, marks=pytest.mark.faults)]
)
def test_a_healthy_run_raises_nothing(tmp_path: Path, rate: float) -> None:
    """Dropout on, several epochs, from hardly learning to learning by heart: nothing is changed, and only a run that
    hardly learns has a warning, that its loss is flat."""
    config = {"method": {"rank": 4, "dropout": 0.2}}
    run = make_run(tmp_path / "run", config=config, plan=PLAN | {"learning_rate": rate, "num_steps": 100})
    assert train(run).status == "finished"
    found = [entry for entry in run.healing.entries if entry.severity != "note" or entry.action != "none"]
    assert {(entry.name, entry.action) for entry in found} <= ({("flat-loss", "none")} if rate < 1e-4 else set())


def test_healing_switched_off_goes_on_and_saves_nothing_bad(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run", config=CONFIG | {"healing": {"on": False}}, plan=PLAN, faults="nan@gradients:step=9,times=3"
    )
    assert train(run).status == "finished"
    assert [(e.step, e.action) for e in treated(tmp_path / "run")] == [(10, "none"), (11, "none"), (12, "none")]
    assert_sound(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "at", [pytest.param(5, marks=pytest.mark.faults), 11, pytest.param(17, marks=pytest.mark.faults)]
)
def test_a_healed_run_that_is_resumed_ends_as_if_it_had_not_been_stopped(tmp_path: Path, at: int) -> None:
    """What was left out stays left out, from the same step on; what was halved stays halved."""

    class Leaving(Remembering):
        def __call__(self, event: Any) -> None:
            super().__call__(event)
            if isinstance(event, StepTaken) and event.step == at:
                raise KeyboardInterrupt

    fault, plan = "nan@document:document=3,name=model.layers.1.mlp.down_proj", PLAN | {"save_every": 3}
    whole, _ = run_of(tmp_path / "whole", 0, fault, save_every=3)
    assert [entry.step for entry in treated(tmp_path / "whole")] == [4], "taken again where the run was left at step 5"
    broken = make_run(tmp_path / "broken", config=CONFIG, plan=plan, faults=fault)
    broken.listener = Leaving()
    with pytest.raises(KeyboardInterrupt):
        train(broken)
    broken.checkpoints.wait()
    again = make_run(tmp_path / "broken", config=CONFIG, plan=plan, faults=fault)
    resume(again, again.checkpoints.load(again.checkpoints.newest()))  # type: ignore[arg-type]
    assert train(again).status == "finished"
    for name, parameter in again.learner.parameters.items():
        assert torch.equal(parameter, whole.learner.parameters[name]), name
    assert [e.as_json() for e in treated(tmp_path / "broken")] == [e.as_json() for e in treated(tmp_path / "whole")]


def test_faults_are_refused_unless_switched_on() -> None:
    assert type(parse_faults(None, is_allowed=False)) is StepHooks
    with pytest.raises(UserError, match="fault injection is off"):
        parse_faults("nan@gradients:step=1", is_allowed=False)
    with pytest.raises(UserError, match="unknown fault"):
        parse_faults("rain@roof:step=1", is_allowed=True)


PLAIN: dict[str, Any] = {"method": {"rank": 4, "dropout": 0.0}}


def acted(run: Run) -> list[tuple[int, str, str]]:
    return [(e.step, e.name, e.action) for e in run.healing.entries if e.severity != "note"]


def poison(*documents: int) -> str:
    return ";".join(f"nan@document:document={document},name=model.layers.1.mlp" for document in documents)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("documents", [(3, 11), (2, 5, 9, 14, 20)])
def test_several_bad_documents_are_left_out_one_by_one(tmp_path: Path, seed: int, documents: tuple[int, ...]) -> None:
    """Others of their steps are well, so nothing else needs a remedy: no rewind, the planned rate to the end."""
    run = make_run(
        tmp_path / "run", config=PLAIN, plan={"num_steps": 24, "save_every": 4}, faults=poison(*documents), seed=seed
    )
    assert train(run).status == "finished"
    assert {action for _, _, action in acted(run)} == {"skip"}
    assert set(run.healing.quarantine) == set(documents)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bad_document_among_single_ones_whose_losses_differ_is_found(tmp_path: Path, seed: int) -> None:
    """A step of one document, whose loss says little of the one before: a NaN after a high one is not the rate's."""
    plan = {"num_steps": 40, "batch_documents": 1, "save_every": 4}
    run = make_run(tmp_path / "run", config=PLAIN, plan=plan, faults=poison(7), seed=seed)
    whole = run.learner.loss_sum
    run.learner.loss_sum = lambda batch: whole(batch) * (0.15, 1.0, 0.3, 1.3)[batch.documents[0] % 4]  # type: ignore[method-assign]
    assert train(run).status == "finished"
    assert {(name, action) for _, name, action in acted(run)} == {("nan-gradients", "skip")}
    assert set(run.healing.quarantine) == {7}


@pytest.mark.slow
def test_a_loss_that_leaves_late_goes_back_to_where_it_was_low(tmp_path: Path) -> None:
    """Though two checkpoints were saved since: the one before the lowest loss is kept."""
    plan = {"num_steps": 90, "save_every": 4, "evaluate_every": 90, "learning_rate": 1e-3}
    run = make_run(tmp_path / "run", config=PLAIN, plan=plan)
    whole = run.learner.loss_sum

    def rising(batch: Any) -> Any:
        is_well = run.progress.step < 60 or run.healing.entries or not torch.is_grad_enabled()
        return whole(batch) * (1.0 if is_well else min(3.0, 1 + 0.15 * (run.progress.step - 60)))

    run.learner.loss_sum = rising  # type: ignore[method-assign]
    assert train(run).status == "finished"
    [entry] = [entry for entry in run.healing.entries if entry.severity != "note"]
    assert (entry.name, entry.action, entry.rewound_to) == ("lr-too-high", "rewind", 60)


def test_a_held_out_loss_that_is_no_number_is_said_and_ends_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", config={"evaluate": {"patience": 2}})
    whole = run.learner.loss_sum
    run.learner.loss_sum = lambda batch: whole(batch) * (1.0 if torch.is_grad_enabled() else math.nan)  # type: ignore[method-assign]
    assert train(run).reason == "finished all 12 steps"
    assert acted(run) == [(0, "nan-gradients", "none")] and "held-out" in run.healing.entries[0].words


def test_a_resumed_run_knows_what_is_usual(tmp_path: Path) -> None:
    """A gradient a thousand times too long is left out six steps after a resume as in the run that was not broken."""
    plan = {"num_steps": 60, "save_every": 10, "evaluate_every": 30}
    fault = "scale@loss:step=45,times=1,factor=1000"
    whole = make_run(tmp_path / "whole", config=PLAIN, plan=plan, faults=fault)
    train(whole)
    broken = make_run(tmp_path / "run", config=PLAIN, plan=plan | {"num_steps": 40})
    train(broken)
    broken.events.close()
    resumed = make_run(tmp_path / "run", config=PLAIN, plan=plan, faults=fault)
    resume(resumed, resumed.checkpoints.load(resumed.checkpoints.newest()))  # type: ignore[arg-type]
    train(resumed)
    assert acted(resumed) == acted(whole) == [(46, "loss-spike", "skip")]


class Arrived:
    """An event on a device that is far ahead."""

    def synchronize(self) -> None:
        pass


def test_two_bad_steps_that_are_read_together_are_both_treated(tmp_path: Path) -> None:
    """On a GPU a step is read when the next is under way, and before a save both are."""
    fault = "nan@gradients:step=2,times=2"
    at_once = make_run(tmp_path / "at-once", config=PLAIN, plan={"save_every": 4}, faults=fault)
    late = make_run(tmp_path / "late", config=PLAIN, plan={"save_every": 4}, faults=fault)
    late.learner._send = lambda values: StepResult(values.clone(), Arrived())  # type: ignore[method-assign]
    train(at_once)
    train(late)
    assert acted(late) == acted(at_once) == [(3, "nan-gradients", "skip"), (4, "nan-gradients", "rewind")]


def test_a_loss_of_nothing_goes_back_once_and_ends_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", config=PLAIN, plan={"num_steps": 30})
    whole = run.learner.loss_sum

    def nothing(batch: Any) -> Any:
        return whole(batch) * (0.0 if run.progress.step >= 6 and torch.is_grad_enabled() else 1.0)

    run.learner.loss_sum = nothing  # type: ignore[method-assign]
    ending = train(run)
    assert (ending.status, ending.exit_code) == ("stopped", 4) and "supervised tokens" in (ending.advice or "")
    assert [action for _, _, action in acted(run)] == ["rewind", "stop"] and not run.healing.quarantine
    assert not any("left out" in entry.words for entry in run.healing.entries)


def test_what_only_16_bits_could_not_hold_is_learned_again_in_fp32(tmp_path: Path) -> None:
    """Neither the documents nor the rate were at fault."""
    plan = {"num_steps": 30, "precision": "bf16", "batch_documents": 2}
    run = make_run(tmp_path / "run", config=PLAIN, plan=plan)
    run.learner.precision = "bf16"
    whole = run.learner.loss_sum

    def overflowing(batch: Any) -> Any:
        is_well = run.learner.precision == "fp32" or not torch.is_grad_enabled()
        return whole(batch) * (1.0 if is_well else math.nan)

    run.learner.loss_sum = overflowing  # type: ignore[method-assign]
    assert train(run).status == "finished"
    last = run.healing.entries[-1]
    assert (last.precision, last.rate_share) == ("fp32", 1.0) and not run.healing.quarantine


def knowing_run(folder: Path, **config: Any) -> Run:
    """A run of eight steps at a rate that is far too high, on a model that knows its held-out documents."""
    plan = {"learning_rate": 10.0, "schedule": "constant", "num_steps": 8, "evaluate_every": 3, "warmup_steps": 1}
    run = make_run(folder, config=CONFIG | config, plan=PLAN | plan, is_learned=True)
    run.held_out = run.documents
    return run


def test_a_rate_that_destroys_the_model_in_its_first_steps_is_named(tmp_path: Path) -> None:
    """Eight steps are too few for the rule of steps, and no loss but that at step 0 shows what the model knew."""
    run = knowing_run(tmp_path / "run", healing={"max_rewinds": 0})
    ending = train(run)
    assert ending.status == "stopped" and ending.exit_code == 4 and "train.learning_rate" in (ending.advice or "")
    [entry] = treated(tmp_path / "run")
    assert (entry.step, entry.name, entry.action) == (6, "lr-too-high", "stop"), "at the second evaluation"
    assert "the held-out loss rose from" in entry.words
    # Without a remedy the run ends, but its reason says that it is worse.
    run = knowing_run(tmp_path / "off", healing={"on": False})
    assert train(run).reason == "finished all 8 steps, but the held-out loss rose"
    assert [(e.step, e.name, e.action) for e in treated(tmp_path / "off")] == [(6, "lr-too-high", "none")]


def test_an_evaluation_that_shows_divergence_rewinds_even_after_the_last_step(tmp_path: Path) -> None:
    run = knowing_run(tmp_path / "run")
    run.plan = run.plan.model_copy(update={"evaluate_every": run.plan.num_steps})
    ending = train(run)
    rewinds = [entry for entry in treated(tmp_path / "run") if entry.action == "rewind"]
    assert (rewinds[0].step, rewinds[0].rewound_to, rewinds[0].rate_share) == (8, 0, 0.5)
    assert ending.exit_code == 4 or losses(run)[-1] < losses(run)[0] + 1


def test_memorised_rows_are_overfitting_and_not_divergence(tmp_path: Path) -> None:
    """Both raise the held-out loss, but only divergence raises the training loss too."""
    plan = PLAN | {"learning_rate": 2e-2, "num_steps": 120, "evaluate_every": 20, "method": "full"}
    run = make_run(tmp_path / "run", config={"train": CONFIG["train"]}, plan=plan)
    assert train(run).status == "finished"
    looks = [look.loss for look in run.listener.looks]  # type: ignore[attr-defined]
    assert looks[-1] > looks[0] + 1 and losses(run)[-1] < 1
    assert {entry.name for entry in treated(tmp_path / "run")} == {"overfitting"}


@pytest.mark.slow
@pytest.mark.parametrize(("has_held_out", "every", "named_at"), [(True, 12, 36), (True, 6, 24), (False, 6, 18)])
def test_a_loss_that_stays_flat_is_named_as_soon_as_it_is_clear(
    tmp_path: Path, has_held_out: bool, every: int, named_at: int
) -> None:
    """A warning after the last step comes too late for a run of hours."""
    plan = PLAN | {"learning_rate": 1e-9, "batch_documents": 23, "num_steps": 36, "evaluate_every": every}
    run = make_run(tmp_path / "run", config=CONFIG | {"evaluate": {"every_steps": every}}, plan=plan)
    if not has_held_out:
        run.held_out = RandomDocuments(0)
    ending = train(run)
    kind = "held-out" if has_held_out else "training"
    assert ending.status == "finished" and ending.reason == f"finished all 36 steps, but the {kind} loss did not fall"
    [entry] = treated(tmp_path / "run")
    assert (entry.step, entry.name, entry.severity) == (named_at, "flat-loss", "warning")
    assert "`--set train.learning_rate=1e-08`" in entry.words
    assert "learning rate is too low" in entry.words and "train.learning_rate" in advice(run.healing.entries)[0]
