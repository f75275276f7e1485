"""Bottlenecks from recorded profiles: each planted one is named first, and its gain is what was then measured.

`benchmarks/bottlenecks.py --record tests/runs/profiles` planted them in real runs on two cores, and recorded what
`tunewell profile --apply --json` printed.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tunewell.features.profile.bottlenecks import ProfileResult, covered_share, find_bottlenecks, time_by_part, verdict
from tunewell.features.profile.records import Kernels, Profile, Rare, ReadTimes, TriedSetting
from tunewell.features.profile.screen import profile_screen

RECORDED = Path(__file__).parent / "profiles"
KEYS = {
    "checkpoint": "checkpoints.every_steps",
    "data": "train.read_ahead",
    "evaluation": "evaluate.every_steps",
    "micro-batch": "train.micro_batch_tokens",
    "threads": "train.threads",
}


def _recorded(name: str) -> dict[str, Any]:
    return json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", KEYS)
def test_a_planted_bottleneck_is_named_first(name: str) -> None:
    found = find_bottlenecks(Profile.model_validate(_recorded(name)["profile"]))
    assert (found[0].name, found[0].key) == (name, KEYS[name])
    assert f"`{KEYS[name]}:" in found[0].sentence and "times as fast" in found[0].sentence


@pytest.mark.parametrize("name", KEYS)
def test_the_predicted_gain_is_the_measured_one(name: str) -> None:
    """A prediction that is far off sends people after the wrong setting."""
    told = _recorded(name)
    best = find_bottlenecks(Profile.model_validate(told["profile"]))[0]
    assert best.gain == pytest.approx(told["applied"]["gain_measured"], rel=0.25)


@pytest.mark.parametrize("name", KEYS)
def test_the_parts_add_up_and_nearly_all_of_them_have_a_name(name: str) -> None:
    profile = Profile.model_validate(_recorded(name)["profile"])
    assert sum(time_by_part(profile).values()) == pytest.approx(profile.total_seconds)
    covered = covered_share(profile)
    assert covered is not None and covered >= 0.97


def _profile(**values: Any) -> Profile:
    usual: dict[str, Any] = {
        "made_by": "test",
        "source": "steps",
        "model": "tiny",
        "method": "lora",
        "device": "a CPU",
        "is_gpu": False,
        "precision": "fp32",
        "threads": 2,
        "micro_batch_tokens": 2048,
        "num_steps": 100,
        "num_measured": 20,
        "tokens": 1000.0,
        "phases": {"data": 0.001, "forward": 0.03, "backward": 0.06, "optimizer": 0.008, "other": 0.001},
        "seconds": 0.1,
        "settings": {"train.read_ahead": "false", "train.compile": "off"},
    }
    return Profile.model_validate(usual | values)


def test_a_run_without_a_bottleneck_says_so() -> None:
    told = verdict(_profile(trials=[_trial("train.threads", 1, 1.8)]))
    assert told == "No setting that was tried makes this run 5% faster: 60% of the time is the backward pass."


def _trial(key: str, value: int, ratio: float) -> TriedSetting:
    return TriedSetting(key=key, value=value, seconds=0.1 * ratio, present_seconds=0.1)


def test_the_smallest_value_near_the_best_is_recommended() -> None:
    """Noise of a percent must not choose a micro-batch that needs four times the memory."""
    tried = {512: 0.9, 1024: 0.51, 2048: 0.5}
    trials = [_trial("train.micro_batch_tokens", size, ratio) for size, ratio in tried.items()]
    [found] = find_bottlenecks(_profile(trials=trials))
    assert (found.value, found.after_seconds) == (1024, pytest.approx(0.1 - 0.09 * 0.49))


def test_rare_evaluations_are_spread_over_the_run() -> None:
    profile = _profile(evaluation=Rare(seconds=2.0, number=11, every=10))
    assert profile.evaluation_seconds == pytest.approx(0.22)
    [found] = find_bottlenecks(profile)
    # Two seconds in 5% of the time would be every 400 steps; the run has 100: one before it and one at its end.
    assert (found.key, found.value) == ("evaluate.every_steps", 100)
    assert found.after_seconds == pytest.approx(0.1 + 2 * 2.0 / 100)


def test_several_readers_hide_behind_the_rest_of_a_step() -> None:
    profile = _profile(phases={"data": 0.2, "forward": 0.1}, seconds=0.3, reading=ReadTimes(ahead_seconds=0.05))
    [found] = find_bottlenecks(profile)
    assert (found.key, found.after_seconds) == ("train.read_ahead", pytest.approx(0.1))
    assert find_bottlenecks(_profile(phases={"data": 0.2, "forward": 0.1}, seconds=0.3)) == []


def test_the_kernels_of_a_gpu_and_its_idle_time_add_up() -> None:
    kinds = {"matmul": 0.03, "attention": 0.01, "optimizer": 0.02}
    kernels = Kernels(seconds=kinds, busy_seconds=0.06)
    profile = _profile(is_gpu=True, device="a GPU", kernels=kernels, compile="off")
    parts = time_by_part(profile)
    assert parts["idle"] == pytest.approx(0.04) and parts["matmul"] == pytest.approx(0.03)
    assert sum(parts.values()) == pytest.approx(profile.total_seconds)
    assert find_bottlenecks(profile)[0].key == "train.compile"


@pytest.mark.parametrize("source", ["steps", "run"])
def test_the_phases_of_a_gpu_without_a_trace_add_up(source: str) -> None:
    """A finished run has no trace: its passes are the time of launching kernels."""
    profile = _profile(is_gpu=True, source=source, seconds=0.1)
    assert time_by_part(profile)["launch"] == pytest.approx(0.09)
    assert sum(time_by_part(profile).values()) == pytest.approx(profile.total_seconds)
    old = _profile(is_gpu=True, source=source, phases={})
    assert time_by_part(old) == {"steps": 0.1}


@pytest.mark.parametrize("columns", [60, 120])
@pytest.mark.parametrize("name", KEYS)
def test_the_screen_fits_its_width(name: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    profile = Profile.model_validate(_recorded(name)["profile"])
    lines = profile_screen(ProfileResult(profile, find_bottlenecks(profile), profile)).splitlines()
    assert max(map(len, lines)) <= columns
    assert any(line.startswith("tried `") for line in lines)
