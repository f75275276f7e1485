"""Which checkpoint is the best: by right answers where the task has a measure, else by the loss, on the slice alone."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import make_run

from tunewell.records.checkpoint import checkpoint_name, read_manifest
from tunewell.records.events import read_events
from tunewell.training import evaluate as module
from tunewell.training.engine import train
from tunewell.training.evaluate import HeldOutLoss
from tunewell.training.events import Sample
from tunewell.training.find_checkpoints import OPTIMIZER, find_best
from tunewell.training.run import Run, resume, rewind


def _answers(number: int, total: int = 100) -> list[Sample]:
    return [Sample(0, index, "", f"q{index}", "yes", "yes", ended=True, right=index < number) for index in range(total)]


def _scripted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, losses: Sequence[float], right: Sequence[int | None], **more: Any
) -> Run:
    """A run of four steps whose evaluations have these losses and right answers, that before step 1 first."""
    options = {"num_steps": len(losses) - 1, "evaluate_every": 1, "save_every": 1, "warmup_steps": 0}
    run = make_run(folder, plan=options | more.pop("plan", {}), config={"checkpoints": {"keep": 9}, **more})
    monkeypatch.setattr(module, "held_out_loss", lambda *_, **__: HeldOutLoss(losses[run.progress.step], 9, 5))
    if any(number is not None for number in right):
        run.num_answers = 100
    run.ask = lambda step, _: [] if (number := right[step]) is None else _answers(number)
    return run


def _best(folder: Path) -> int | None:
    found = find_best(folder / "checkpoints", on_trouble=print)
    return found and found.step


def test_right_answers_choose_the_checkpoint_against_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,500 rows with labels: the loss was lowest after the first of five epochs, and the last one had more right."""
    run = _scripted(tmp_path, monkeypatch, [2.0, 0.7, 0.9, 1.2, 1.4], [0, 50, 70, 90, 80])
    assert train(run).status == "finished"
    assert run.progress.best_step == 3 and run.progress.best_share == 0.9 and run.progress.best_loss == 1.2
    assert _best(tmp_path) == 3
    assert [look.right for look in run.listener.looks] == [0, 50, 70, 90, 80]
    assert "most right answers, 90%" in find_best(tmp_path / "checkpoints", on_trouble=print).why_best
    logged = [event for event in read_events(tmp_path / "events.jsonl") if event["kind"] == "held_out"]
    assert [(event["right"], event["judged"], event["is_best"]) for event in logged][3:] == [
        (90, 100, True),
        (80, 100, False),
    ]


@pytest.mark.parametrize(
    ("losses", "right", "best"),
    [
        ([2.0, 0.9, 0.7, 0.8, 1.0], [None] * 5, 2),
        ([2.0, math.nan, 0.9, 1.0, 1.1], [0, 90, 50, 30, 30], 2),
        ([0.5, 0.9, 0.7, 0.8, 1.0], [60, 20, 30, 10, 0], None),
        ([2.0, 0.9, 0.7, 0.8, 1.0], [0, 80, None, 60, 60], 1),
    ],
    ids=["no measure", "not finite", "the base model is better", "answers did not fit once"],
)
def test_the_loss_decides_where_answers_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: list[float], right: list[int | None], best: int | None
) -> None:
    train(_scripted(tmp_path, monkeypatch, losses, right))
    assert _best(tmp_path) == best


@pytest.mark.parametrize(
    ("right", "best", "why"),
    [
        ([0, 1, 0, 0, 0], 4, "0% right answers, fewer than 1% only by chance"),
        ([0, 80, 80, 80, 80], 4, "most right answers, 80%"),
        ([0, 60, 90, 85, 50], 3, "85% right answers, fewer than 90% only by chance"),
        ([0, 96, 92, 88, 84], 2, "92% right answers, fewer than 96% only by chance"),
    ],
    ids=["one of a hundred", "equal", "the last is worse", "many small losses add up"],
)
def test_a_lead_by_chance_chooses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: list[int], best: int, why: str
) -> None:
    """Guards an early checkpoint that was taken for one lucky answer, and a slow decline that is never noticed."""
    train(_scripted(tmp_path, monkeypatch, [2.0, 0.7, 0.9, 1.2, 1.4], right))
    assert _best(tmp_path) == best
    assert why in find_best(tmp_path / "checkpoints", on_trouble=print).why_best


def test_without_a_slice_the_last_checkpoint_is_used_and_patience_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: held-out rows that get worse at once. They must change neither checkpoint nor length."""
    run = _scripted(tmp_path, monkeypatch, [1.0, 1.1, 1.2, 1.3, 1.4], [9, 5, 3, 2, 1], evaluate={"patience": 1})
    run.is_selecting = False
    assert train(run).status == "finished" and run.progress.step == 4
    assert run.progress.best_step is None and _best(tmp_path) is None
    assert [look.is_best for look in run.listener.looks] == [False] * 5


def test_training_ends_early_by_right_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss still falls, but two evaluations in a row have no more right answers."""
    run = _scripted(tmp_path, monkeypatch, [2.0, 1.0, 0.9, 0.8, 0.7], [0, 80, 60, 50, 90], evaluate={"patience": 2})
    ending = train(run)
    assert run.progress.step == 3 and "no better checkpoint in 2 evaluations" in ending.reason
    assert _best(tmp_path) == 1


def test_a_resumed_run_compares_with_the_best_share_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share is in the checkpoint; without it, any later answer would win."""
    losses, right = [2.0, 0.7, 0.9, 1.2, 1.4], [0, 80, 60, 50, 40]
    first = _scripted(tmp_path, monkeypatch, losses, right)
    first.plan = first.plan.model_copy(
        update={"num_steps": make_run(tmp_path / "x", plan={"num_steps": 2}).plan.num_steps}
    )
    train(first)
    first.close()
    again = _scripted(tmp_path, monkeypatch, losses, right)
    resume(again, again.checkpoints.load(again.checkpoints.newest(), needs=[OPTIMIZER]))
    assert again.progress.best_share == 0.8
    train(again)
    assert again.progress.best_step == 1 and _best(tmp_path) == 1


def test_a_rewind_to_the_start_knows_the_share_of_the_base_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _scripted(tmp_path, monkeypatch, [2.0, 0.7, 0.9, 1.2, 1.4], [30, 80, 60, 50, 40], plan={"save_every": 99})
    train(run)
    run.checkpoints.remove_after(0)
    assert rewind(run, not_after=0, or_later=False, are_weights_bad=False) == 0
    assert run.progress.best_share == 0.3 and run.progress.best_step == 0 and run.progress.last_look == 0


def test_a_resumed_run_of_an_older_version_forgets_what_held_out_rows_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no slice, so its last checkpoint is used, not the one that held-out rows had chosen."""
    losses, right = [2.0, 0.7, 0.9, 1.2, 1.4], [None] * 5
    old = _scripted(tmp_path, monkeypatch, losses, right)
    train(old)
    assert _best(tmp_path) == 1
    old.close()
    new = _scripted(tmp_path, monkeypatch, [*losses, 1.5], [*right, None])
    new.is_selecting = False
    resume(new, new.checkpoints.load(new.checkpoints.newest(), needs=[OPTIMIZER]))
    assert new.progress.best_step is None
    train(new)
    assert read_manifest(tmp_path / "checkpoints" / checkpoint_name(5)).best_step is None and _best(tmp_path) is None
