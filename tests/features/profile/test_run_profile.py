"""Profiles of finished runs: read from events."""

import json
from pathlib import Path
from typing import Any

import pytest

from tunewell.core.errors import UserError
from tunewell.features.profile.bottlenecks import covered_share, find_bottlenecks, time_by_part, verdict
from tunewell.features.profile.finished import read_profile
from tunewell.records.plan import write_plan


def _write_run(folder: Path, steps: list[dict[str, Any]], **plan: Any) -> Path:
    from tiny_runs import make_plan

    folder.mkdir()
    write_plan(folder, make_plan(**plan))
    lines = [json.dumps({"tokens": 100, "seconds": 0.1, "kind": "step", **step}) + "\n" for step in steps]
    (folder / "events.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def _step(number: int, **phases: float) -> dict[str, Any]:
    usual = {"forward": 0.03, "backward": 0.05, "optimizer": 0.01, "log": 0.005, "other": 0.001}
    return {"step": number, "phases": usual | phases, "computed_tokens": 100, "micro_batches": 2}


def test_the_parts_of_a_run_add_up_to_its_time(tmp_path: Path) -> None:
    steps = [_step(number, **({"save": 0.02} if number == 3 else {})) for number in range(1, 5)]
    profile = read_profile(_write_run(tmp_path / "run", steps))
    assert profile.seconds == pytest.approx(0.096) and profile.checkpoint is not None
    assert profile.checkpoint_seconds == pytest.approx(0.005)
    assert sum(time_by_part(profile).values()) == pytest.approx(profile.total_seconds)
    assert covered_share(profile) == pytest.approx(1 - 0.001 / 0.101)
    assert find_bottlenecks(profile) == [] and "No setting of evaluations" in verdict(profile)


def test_a_run_that_waits_for_its_documents_says_so(tmp_path: Path) -> None:
    profile = read_profile(_write_run(tmp_path / "run", [_step(number, data=0.06) for number in range(1, 5)]))
    [found] = find_bottlenecks(profile)
    assert (found.name, found.key, found.value) == ("data", "train.read_ahead", "true")
    # All of the 60 ms fit behind the 96 ms of the rest.
    assert found.after_seconds == pytest.approx(0.096)
    assert "Reading documents takes 38% of the time: set `train.read_ahead: true`" in found.sentence


def test_a_run_without_a_step_is_a_plain_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no finished step"):
        read_profile(_write_run(tmp_path / "run", []))
