"""A run resumed is the run never stopped; it looks, saves and ends when its plan says so."""

import errno
import os
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lessons import RandomDocuments
from tiny_runs import Remembering, make_run

from tunewell.data.batches import make_batch, micro_batches
from tunewell.records.events import read_events
from tunewell.records.plan import read_plan
from tunewell.training import checkpoints
from tunewell.training.compile import decoder_layers
from tunewell.training.engine import train
from tunewell.training.evaluate import limit_evaluations, limit_saves
from tunewell.training.events import StepTaken
from tunewell.training.run import Run, resume, state_of
from tunewell.training.slow_step import SlowStep

TIMES = ("seconds", "memory_bytes", "phases")


def _state(run: Run) -> dict[str, torch.Tensor]:
    weights = {name: parameter.detach() for name, parameter in run.learner.parameters.items()}
    return {**weights, **run.learner.optimizer.state_tensors()}


def _log(folder: Path) -> list[dict[str, Any]]:
    events = read_events(folder / "events.jsonl")
    return [{key: value for key, value in event.items() if key not in TIMES} for event in events]


class _Asking(Remembering):
    """Asks the run to stop after a step."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def __call__(self, event: Any) -> None:
        super().__call__(event)
        if isinstance(event, StepTaken) and event.step == self._at:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 4, 7, 11])
def test_a_run_that_was_asked_to_stop_and_resumed_is_the_run_never_stopped(tmp_path: Path, at: int) -> None:
    """Weights, optimizer and log, bit for bit, with dropout on and over the end of an epoch."""
    straight = make_run(tmp_path / "straight")
    assert train(straight).status == "finished"
    broken = make_run(tmp_path / "broken")
    broken.listener = _Asking(at)
    ending = train(broken)
    assert (ending.status, ending.exit_code) == ("interrupted", 143)
    resumed = make_run(tmp_path / "broken")
    saved = resumed.checkpoints.newest()
    assert saved is not None and saved.step == at
    resume(resumed, resumed.checkpoints.load(saved))
    assert train(resumed).status == "finished"
    expected = _state(straight)
    for name, tensor in _state(resumed).items():
        assert torch.equal(tensor, expected[name]), name
    assert _log(tmp_path / "broken") == _log(tmp_path / "straight")


def test_a_look_ends_when_the_run_is_asked_to_and_is_taken_when_it_goes_on(tmp_path: Path) -> None:
    """A look may take minutes, and whoever asks does not wait so long; no step is taken either."""
    straight = make_run(tmp_path / "straight")
    assert train(straight).status == "finished"
    broken = make_run(tmp_path / "broken", config={"evaluate": {"samples": 1}})

    def ask(step: int, batch_tokens: int) -> list[Any]:
        if step == 8:
            os.kill(os.getpid(), signal.SIGINT)
            broken.learner.check_interrupt()  # as between two tokens
        return []

    broken.ask = ask
    ending = train(broken)
    assert (ending.status, ending.exit_code, broken.progress.step) == ("interrupted", 130, 8)
    resumed = make_run(tmp_path / "broken")
    saved = resumed.checkpoints.newest()
    assert saved is not None and saved.step == 8
    resume(resumed, resumed.checkpoints.load(saved))
    assert resumed.progress.last_look == 4
    assert train(resumed).status == "finished"
    assert _log(tmp_path / "broken") == _log(tmp_path / "straight")


def test_asked_to_stop_during_the_first_look_a_run_takes_no_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", config={"evaluate": {"samples": 1}})
    run.ask = lambda step, batch_tokens: os.kill(os.getpid(), signal.SIGTERM) or run.learner.check_interrupt() or []
    ending = train(run)
    assert (ending.exit_code, run.progress.step, run.progress.last_look) == (143, 0, -1)


def _full(*_: Any, **__: Any) -> list[str]:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_run_whose_weights_are_not_on_disk_is_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended with exit code 0, "all steps were taken", and nothing to show for it."""
    monkeypatch.setattr(checkpoints, "write_checkpoint", _full)
    run = make_run(tmp_path / "run")
    ending = train(run)
    assert (ending.status, ending.exit_code, ending.is_resumable) == ("stopped", 4, True)
    assert ending.reason == "finished all 12 steps, but the last checkpoint was not saved: the disk is full"


def test_a_run_whose_best_is_on_disk_is_finished_although_its_last_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    run.checkpoints.save(state_of(run), is_best=True, wait=True)
    run.progress.best_loss, run.progress.best_step, run.progress.last_look = 0.0, 0, 0
    monkeypatch.setattr(checkpoints, "write_checkpoint", _full)
    assert train(run).status == "finished"
    assert isinstance(run.listener, Remembering)
    assert "the last checkpoint was not saved: the disk is full; the best one was" in run.listener.notes


def test_one_event_a_step_with_raw_numbers(tmp_path: Path) -> None:
    train(make_run(tmp_path / "run"))
    steps = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 13))
    for event in steps:
        wanted = {"step", "loss", "grad_norm", "learning_rate", "tokens", "supervised_tokens", "seconds"}
        assert wanted <= event.keys() and event["tokens"] > event["supervised_tokens"] > 0
    assert steps[0]["learning_rate"] == pytest.approx(5e-3) and steps[1]["learning_rate"] == pytest.approx(1e-2)


def test_the_held_out_rows_are_looked_at_before_at_intervals_and_at_the_end(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", plan={"num_steps": 10})
    train(run)
    assert isinstance(run.listener, Remembering)
    assert [look.step for look in run.listener.looks] == [0, 4, 8, 10]
    assert run.progress.best_loss == min(look.loss for look in run.listener.looks)


def test_early_stopping_counts_looks_without_gain(tmp_path: Path) -> None:
    """Random ids cannot be learned from other random ids: the held-out loss soon rises."""
    run = make_run(
        tmp_path / "run",
        config={"evaluate": {"patience": 2}},
        plan={"num_steps": 400, "evaluate_every": 2, "learning_rate": 0.05, "schedule": "constant"},
    )
    ending = train(run)
    assert ending.status == "finished" and "2 evaluations" in ending.reason
    assert run.progress.step < 400 and run.progress.looks_without_gain == 2
    saved = run.checkpoints.newest()
    assert saved is not None and saved.step == run.progress.step


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run", plan={"num_steps": 40, "evaluate_every": 4, "learning_rate": 0.05, "schedule": "constant"}
    )
    train(run)
    best, newest = run.checkpoints.best(), run.checkpoints.newest()
    assert best is not None and newest is not None
    assert newest.step == 40 and (run.progress.best_step == 0 or best.step == run.progress.best_step)


def test_a_step_that_is_not_finite_is_logged_as_it_is(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run",
        config={"healing": {"on": False}},
        plan={"num_steps": 2, "save_every": 9, "evaluate_every": 9},
    )
    run.learner.model.get_output_embeddings().weight.data[3] = float("nan")
    train(run)
    steps = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "step"]
    assert [event["loss"] for event in steps] == ["nan", "nan"]
    assert all(event["was_skipped"] for event in steps)


def test_quarantined_documents_are_left_out_and_the_steps_stay(tmp_path: Path) -> None:
    plain, without = make_run(tmp_path / "plain"), make_run(tmp_path / "without")
    left_out = int(plain.order.step(0).documents[0])
    without.healing.quarantine = {left_out: 0}
    train(plain)
    train(without)
    first, second = (read_events(tmp_path / name / "events.jsonl")[1] for name in ("plain", "without"))
    assert first["batch_sha256"] == second["batch_sha256"]
    assert first["tokens"] - second["tokens"] == int(plain.order.lengths[left_out])


GOLDEN = [5.26102, 5.44207, 5.452, 5.35504, 5.48784, 4.56553, 4.421, 4.54989, 4.52534, 4.69156, 4.1901, 4.30977]


def test_the_loss_curve_of_a_tiny_run_is_the_one_that_was_recorded(tmp_path: Path) -> None:
    """Any change to batches, order, loss, optimizer or schedule that changes results shows here first."""
    run = make_run(tmp_path / "run", config={"method": {"rank": 4}})
    train(run)
    assert isinstance(run.listener, Remembering)
    losses = [event.loss for event in run.listener.steps]
    assert losses == pytest.approx(GOLDEN, rel=1e-3)
    again = make_run(tmp_path / "again", config={"method": {"rank": 4}})
    train(again)
    assert isinstance(again.listener, Remembering)
    assert [event.loss for event in again.listener.steps] == losses


@pytest.mark.parametrize(
    ("evaluation", "steps", "every"),
    [
        (10.0, [10.0] * 4, 28),
        (10.0, [100.0] * 4, 4),
        (0.05, [0.05] * 4, 4),
        (90.0, [0.25] * 4, 100),
        (2.5, [0.25] * 4, 52),
        (0.4, [3.0, 8.0, 0.2, 0.2, 0.2], 52),
    ],
    ids=[
        "a fifth of the time",
        "a twentieth is allowed",
        "too short to matter",
        "not beyond the end",
        "one early",
        "slow first steps",
    ],
)
def test_evaluations_take_a_twentieth_of_the_training_time(
    tmp_path: Path, evaluation: float, steps: list[float], every: int
) -> None:
    """The interval follows what the evaluation at step 0 and the steps before the next one took."""
    run = make_run(tmp_path, plan={"num_steps": 100})
    limit_evaluations(run)
    assert run.plan.evaluate_every.value == 4, "nothing is measured yet"
    run.progress.step, run.seconds = 4, {"train": sum(steps), "look": evaluation, "save": 0.0}
    run.step_seconds.extend(steps)
    limit_evaluations(run)
    assert run.plan.evaluate_every.value == every
    if every != 4:
        assert "% of the training time" in run.plan.evaluate_every.because
        assert read_plan(tmp_path).evaluate_every == run.plan.evaluate_every
        assert "evaluated every" in run.listener.notes[-1]


def test_an_evaluation_after_the_first_step_waits_for_its_metrics(tmp_path: Path, monkeypatch: Any) -> None:
    """On CUDA, the time of the first step is not known when the first evaluation is due."""
    run = make_run(tmp_path, plan={"num_steps": 2, "evaluate_every": 1})
    take_step = run.learner.take_step

    def late(*args: Any, **options: Any) -> Any:
        return replace(take_step(*args, **options), arrived=SimpleNamespace(synchronize=lambda: None))

    monkeypatch.setattr(run.learner, "take_step", late)
    assert train(run).status == "finished"
    assert [event.step for event in run.listener.steps] == [1, 2]


def test_an_interval_in_the_config_is_never_changed(tmp_path: Path) -> None:
    run = make_run(tmp_path, config={"evaluate": {"every_steps": 4}}, plan={"num_steps": 100})
    run.progress.step, run.seconds = 4, {"train": 1.0, "look": 90.0, "save": 0.0}
    limit_evaluations(run)
    assert run.plan.evaluate_every.value == 4


@pytest.mark.parametrize(
    ("step", "writing", "every"),
    [(20, 20.0, 4), (20, 40.0, 50), (48, 4.0, 4)],
    ids=["in time", "longer than the rest", "too short to matter"],
)
def test_no_checkpoint_is_begun_that_would_delay_the_end(tmp_path: Path, step: int, writing: float, every: int) -> None:
    """A run ends when its last checkpoint is saved, and that save waits for one that is being written."""
    run = make_run(tmp_path, plan={"num_steps": 50})
    run.progress.step, run.checkpoints.write_seconds = step, writing
    run.step_seconds.extend([1.0] * 8)
    limit_saves(run)
    assert run.plan.evaluate_every.value == every
    if every != 4:
        assert "training had 30 s left, and writing a checkpoint takes 40 s" in run.plan.evaluate_every.because
        assert "`evaluate_every` is now 50 steps" in run.listener.notes[-1]


def test_a_slow_first_step_reports_its_progress_at_growing_intervals(tmp_path: Path, monkeypatch) -> None:
    """A first step of an hour printed one line after ten seconds, and then nothing."""
    monkeypatch.setattr("tunewell.training.slow_step._FIRST_SECONDS", 0.05)
    run = make_run(tmp_path, plan={"num_steps": 3})
    layer = decoder_layers(run.learner.model)[-1]
    forward, calls = layer.forward, []

    def wait(*args, **kwargs):
        calls.append(1)
        time.sleep(0.5 if len(calls) == 2 else 0)  # the second micro-batch
        return forward(*args, **kwargs)

    run.held_out = RandomDocuments(0)
    monkeypatch.setattr(layer, "forward", wait)
    train(run)
    notes = [note for note in run.listener.notes if "still computing" in note]
    assert 3 <= len(notes) <= 5 and all(note.startswith("step 1 is still computing after ") for note in notes)
    assert re.search(r"it has computed [1-9]\d* of \d+ tokens, \d[\d,]* tokens/s, about .* left$", notes[-1])
    assert not layer._forward_hooks, "later steps have no hooks"


@pytest.mark.parametrize("recompute", ["off", "on"])
def test_the_progress_of_a_step_counts_layers_and_micro_batches(tmp_path: Path, recompute) -> None:
    """With one micro-batch, only the layers show that a step goes on."""
    now = 0.0
    run = make_run(tmp_path, plan={"num_steps": 2})
    run.learner.recompute(recompute)
    slow_step, layers = SlowStep(run, clock=lambda: now), decoder_layers(run.learner.model)
    step = run.order.step(0)
    groups = micro_batches(step.documents, run.order.lengths, 64)
    slow_step.start()

    def tell(*_) -> None:
        nonlocal now
        now += 10
        slow_step.announce()

    handles = [layer.register_forward_hook(tell) for layer in layers]
    run.learner.take_step([make_batch(run.documents, group) for group in groups], number=0, rate=1e-3)
    slow_step.announce()
    slow_step.stop()
    for handle in handles:
        handle.remove()
    found = [re.search(r"after (.*): it has computed ([\d,]+) of (\d+) tokens(.*)", n) for n in run.listener.notes]
    done = [int(match[2]) for match in found]
    assert len(groups) > 1 and len(done) == len(groups) * len(layers) + 1
    assert done == sorted(done) and 0 < done[0] < done[-1] == int(found[0][3]) == int(
        run.order.lengths[step.documents].sum()
    )
    assert found[0][1] == "10 s" and "tokens/s, about " in found[0][4]
    assert not any(layer._forward_hooks for layer in layers)


def test_progress_of_a_step_does_not_change_it(tmp_path: Path) -> None:
    """Hooks on layers must not change a gradient."""
    norms = []
    for name in ("a", "b"):
        run = make_run(tmp_path / name)
        slow_step, groups = SlowStep(run), micro_batches(run.order.step(0).documents, run.order.lengths, 64)
        if name == "b":
            slow_step.start()
        done = run.learner.take_step([make_batch(run.documents, group) for group in groups], number=0, rate=1e-3)
        slow_step.stop()
        norms.append(done.values.tolist())
    assert norms[0] == norms[1]


def test_compiling_is_named(tmp_path: Path, monkeypatch) -> None:
    """The first compiled step takes minutes, and its layers have no hooks."""
    run = make_run(tmp_path, plan={"num_steps": 4})
    started = []
    monkeypatch.setattr(SlowStep, "start", lambda self, activity="computing": started.append(activity))

    class FakeCompiler:
        def is_due(self, learner, *, step):
            return step == 2

        def run(self, learner, order, *, budget):
            return "compiling 2 layers"

        def budget(self, learner, planned):
            return planned

        def on_step(self, learner, event):
            pass

    monkeypatch.setattr("tunewell.training.engine.make_compiler", lambda run: FakeCompiler())
    train(run)
    assert started == ["computing", "compiling"] and "compiling 2 layers" in run.listener.notes


def test_a_disk_that_cannot_keep_up_makes_saves_rarer_and_does_not_stop_the_training(tmp_path, monkeypatch):
    """Full fine-tuning wrote 13 GB every ten steps: most of the run was waiting for the disk."""
    monkeypatch.setattr(checkpoints, "_LARGE_BYTES", 0)
    may_write, write = threading.Event(), checkpoints.write_synced
    monkeypatch.setattr(checkpoints, "write_synced", lambda *a: (may_write.wait(10), write(*a)))
    run = make_run(tmp_path, plan={"evaluate_every": 2, "save_every": 2})
    listener, steps = cast(Remembering, run.listener), []

    def listen(event):
        listener(event)
        if isinstance(event, StepTaken):
            steps.append(event.step)
            if event.step == 7:
                may_write.set()
                run.checkpoints.wait()

    run.listener = listen
    assert train(run).status == "finished"
    assert steps == list(range(1, 13))
    # Saved at 2; still being written at 4 (next at 6) and at 6 (next at 12).
    assert [look.step for look in listener.looks] == [0, 2, 12]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000002", "step-000012"]
    assert (run.plan.evaluate_every.value, run.plan.save_every.value) == (12, 12)
    assert "still being written" in run.plan.save_every.because
