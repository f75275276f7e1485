"""What the rules see in plain numbers, and what they must not see."""

import math
import random

import pytest

from tunewell.training.health import HealthFinding, HealthMonitor, RunContext, StepMetrics, norm_limit
from tunewell.training.log_rules import replay, verdict

ABOUT = RunContext(vocab_size=50_000, precision="fp32", device="cpu", max_grad_norm=1.0)


def healthy(number: int, *, first: float = 2.5, norm: float = 0.8) -> list[StepMetrics]:
    """A loss that falls with noise, and norms that vary by a factor of two."""
    return [
        StepMetrics(
            step + 1,
            loss=first * math.exp(-step / number) + 0.1 * math.sin(step * 7.3),
            grad_norm=norm * (1 + 0.4 * math.sin(step * 3.7)),
            learning_rate=2e-4,
            seconds=1.0 + 0.1 * math.sin(step),
            tokens=512,
            supervised_tokens=300,
        )
        for step in range(number)
    ]


def names(findings: list[HealthFinding]) -> list[str]:
    return [finding.name for finding in findings]


@pytest.mark.parametrize("number", [3, 12, 60, 400])
def test_a_healthy_run_raises_nothing(number: int) -> None:
    assert replay(healthy(number), ABOUT) == []


@pytest.mark.parametrize(
    ("change", "about", "expected"),
    [
        ({"loss": math.nan}, ABOUT, ("nan-gradients", "fault")),
        ({"grad_norm": math.inf}, ABOUT, ("nan-gradients", "fault")),
        ({"grad_norm": math.nan, "scale": 65536.0}, RunContext(precision="fp16"), ("fp16-scaler-skip-benign", "note")),
        ({"loss": math.nan, "scale": 65536.0}, RunContext(precision="fp16"), ("nan-gradients", "fault")),
        ({"grad_norm": math.nan}, RunContext(precision="fp16", device="mps"), ("mps-nan-fp16", "fault")),
        ({"loss": 0.0, "grad_norm": math.nan}, RunContext(is_raw=False), ("loss-zero-collapse", "fault")),
        ({"loss": 0.0, "grad_norm": 1.0}, RunContext(is_raw=False), ("loss-zero-collapse", "fault")),
    ],
)
def test_a_bad_step_is_called_by_its_name(change: dict, about: RunContext, expected: tuple[str, str]) -> None:
    monitor = HealthMonitor(about)
    steps = healthy(20)
    assert [finding for reading in steps for finding in monitor.observe(reading)] == []
    [finding] = monitor.observe(StepMetrics(**{**steps[-1].__dict__, "step": 21, **change}))
    assert (finding.name, finding.severity, finding.step) == (*expected, 21)


def test_overflows_that_do_not_end_are_a_fault() -> None:
    monitor = HealthMonitor(RunContext(precision="fp16"))
    found = [
        monitor.observe(StepMetrics(step, loss=2.0, grad_norm=math.inf, scale=1.0))[0].name for step in range(1, 10)
    ]
    assert found[:7] == ["fp16-scaler-skip-benign"] * 7 and found[7] == "loss-scale-exhausted"


def test_few_tokens_known_by_heart_may_come_to_exactly_nothing() -> None:
    """In fp32 the loss of a single well-known token is 0.0; three whole steps of that are not learning."""
    monitor = HealthMonitor(ABOUT)
    for reading in healthy(20, first=0.6):
        monitor.observe(reading)
    lone = [monitor.observe(StepMetrics(step, loss=0.0, grad_norm=0.1, supervised_tokens=2)) for step in (21, 22)]
    assert lone == [[], []]
    assert names(monitor.observe(StepMetrics(23, loss=0.0, grad_norm=0.1, supervised_tokens=2))) == [
        "loss-zero-collapse"
    ]


@pytest.mark.parametrize(
    ("loss", "about", "expected"),
    [
        (10.9, ABOUT, "healthy"),
        (12.5, ABOUT, "note"),
        (22.0, ABOUT, "warning"),
        (64.0, RunContext(is_from_scratch=True), "note"),
        (14577.0, RunContext(), "warning"),
    ],
)
def test_the_first_loss_is_held_against_guessing(loss: float, about: RunContext, expected: str) -> None:
    found = HealthMonitor(about).observe(StepMetrics(1, loss=loss, grad_norm=1.0))
    assert ([finding.severity for finding in found] or ["healthy"]) == [expected]


def test_no_gradient_at_all_is_a_fault_after_three_steps() -> None:
    monitor = HealthMonitor(ABOUT)
    found = [
        names(monitor.observe(StepMetrics(step, loss=2.0, grad_norm=0.0, supervised_tokens=9))) for step in range(1, 6)
    ]
    assert found == [[], [], ["zero-grad-no-learning"], [], []]
    # A step whose documents were all left out has no gradient, and that is no fault.
    assert HealthMonitor(ABOUT).observe(StepMetrics(1, loss=0.0, grad_norm=0.0, supervised_tokens=0)) == []


def test_a_norm_is_a_spike_only_beyond_the_usual_spread() -> None:
    steady = [1.0 + 0.1 * math.sin(step) for step in range(64)]
    assert norm_limit(steady[:31], factor=10, floor=1) == math.inf
    assert 10 <= norm_limit(steady, factor=10, floor=1) < 12
    wild = [math.exp(2 * math.sin(step)) for step in range(64)]
    assert norm_limit(wild, factor=10, floor=1) > 1000
    tiny = [1e-4 * norm for norm in steady]
    assert norm_limit(tiny, factor=10, floor=1) == 1, "what is clipped anyway does no harm"


def test_blooms_first_spike_is_seen_before_the_loss_moves() -> None:
    """Norm 0.24, 0.95, 2.4, 15.9, 145, 960; the loss went from 2.20 to 5.10 a step after 145."""
    monitor = HealthMonitor(RunContext(max_grad_norm=1.0))
    for step in range(64):
        monitor.observe(StepMetrics(step, loss=2.2, grad_norm=0.14 + 0.01 * math.sin(step)))
    norms, limits = [0.24, 0.95, 2.4, 15.9, 145.0, 960.0], []
    for at, norm in enumerate(norms):
        limits.append(monitor.norm_limit())
        is_over = norm > limits[-1]
        monitor.observe(StepMetrics(64 + at, loss=2.2, grad_norm=norm, was_skipped=is_over, norm_limit=limits[-1]))
    assert [norm > limit for norm, limit in zip(norms, limits, strict=True)] == [False, False, True, True, True, True]


def test_a_loss_that_leaves_and_stays_away_has_diverged() -> None:
    monitor, found = HealthMonitor(ABOUT), []
    for reading in healthy(40):
        found += monitor.observe(reading)
    for step in range(41, 60):
        found += monitor.observe(
            StepMetrics(step, loss=min(9.0, 1 + 0.8 * (step - 40)), grad_norm=1.0, learning_rate=0.1)
        )
    assert names(found) == ["lr-too-high"] and found[0].step < 54
    assert found[0].numbers["low_step"] <= 41 and "stays there" in found[0].words
    monitor.rewind(20)
    assert monitor.recent[-1].step == 20


def test_one_hard_batch_is_no_divergence() -> None:
    steps = healthy(80)
    steps[50] = StepMetrics(**{**steps[50].__dict__, "loss": 4.0})
    assert replay(steps, ABOUT) == []


def test_over_fitting_needs_looks_that_rise_while_training_falls() -> None:
    def log(looks: list[float], losses: list[float]) -> list[StepMetrics]:
        pairs = zip(losses, looks, strict=True)
        return [
            reading
            for step, (loss, look) in enumerate(pairs, start=1)
            for reading in (
                StepMetrics(step * 10, loss=loss, grad_norm=1.0),
                StepMetrics(step * 10, held_out_loss=look),
            )
        ]

    falling = [2.0, 1.2, 0.6, 0.3, 0.1]
    assert verdict(replay(log([1.9, 1.3, 1.4, 1.6, 1.9], falling), ABOUT)) == "overfitting"
    assert verdict(replay(log([1.9, 1.3, 1.31, 1.30, 1.32], falling), ABOUT)) == "healthy"
    assert verdict(replay(log([0.5, 0.05, 0.06, 0.07, 0.08], falling), ABOUT)) == "healthy", "a tenth of little"


def test_speed_that_falls_off_a_cliff_is_noted_and_a_full_device_is_more() -> None:
    slow = [
        StepMetrics(**{**reading.__dict__, "seconds": (reading.seconds or 1) * (5 if reading.step > 60 else 1)})
        for reading in healthy(90)
    ]
    assert [(f.name, f.severity) for f in replay(slow, ABOUT)] == [("throughput-cliff", "note")]
    full = [StepMetrics(**{**reading.__dict__, "memory_bytes": 97}) for reading in slow]
    found = replay(full, RunContext(vocab_size=50_000, device="cuda", device_bytes=100))
    assert ("memory-spill", "warning") in [(f.name, f.severity) for f in found]


def test_steps_that_wait_again_and_again_are_noted() -> None:
    """Packing while training made every fiftieth step take 250 times as long."""
    cycles = [
        StepMetrics(**{**reading.__dict__, "seconds": 20.0 if reading.step % 25 == 0 else 1.0})
        for reading in healthy(200)
    ]
    assert [(f.name, f.severity) for f in replay(cycles, ABOUT)] == [("slow-fast-cycles", "note")]


LOG = RunContext(is_raw=False)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        # The first update destroyed what the model knew: only one loss was measured before it.
        ([1.4, *[6.4, 6.7, 6.2, 6.5] * 6], ["lr-too-high"]),
        # The first documents were easy, the others are not.
        ([0.4, *[2.6, 2.9, 2.4, 2.7] * 6], []),
        # A model that starts from nothing guesses at first.
        ([10.9, *[9.4, 9.0, 8.8, 8.5] * 6], []),
    ],
)
def test_a_model_that_lost_what_it_knew_at_once_is_seen_by_its_first_loss(
    losses: list[float], expected: list[str]
) -> None:
    monitor = HealthMonitor(ABOUT)
    steps = [StepMetrics(step, loss=loss, grad_norm=0.5) for step, loss in enumerate(losses, 1)]
    assert names([finding for reading in steps for finding in monitor.observe(reading)]) == expected


def judged(losses: list[float], norms: list[float] | None = None, about: RunContext = LOG) -> str:
    told = norms or [None] * len(losses)
    pairs = zip(losses, told, strict=True)
    return verdict(
        replay([StepMetrics(at + 1, loss=loss, grad_norm=norm) for at, (loss, norm) in enumerate(pairs)], about)
    )


@pytest.mark.parametrize("about", [LOG, ABOUT])
@pytest.mark.parametrize(
    "losses",
    [
        [2.1, 0.9, 0.2, 0.05, 0.011, 0.003, 0.0007, 0.0001, 0.0, 0.0, 0.0, 0.0],
        [2.1, 0.9, 0.2, 0.05, 0.01, 0.0, 0.0, 0.0, 0.0],
    ],
)
def test_rows_learned_by_heart_come_to_nothing_in_a_rounded_log(losses: list[float], about: RunContext) -> None:
    assert judged(losses, [max(loss, 1e-4) for loss in losses], about) == "healthy"


def test_a_log_without_readings_is_not_healthy() -> None:
    assert verdict(replay([], LOG)) == "nothing-read"


@pytest.mark.parametrize(
    ("losses", "norms", "expected"),
    [
        # A small jump is one where the gradient jumps; a hard batch among few rows doubles it.
        ([0.9, 0.8, 0.75, 0.7, 1.9, 0.8, 0.7, 0.65], [0.5, 0.5, 0.5, 0.4, 65.0, 1.0, 0.5, 0.4], "loss-spike"),
        ([0.9, 0.8, 0.75, 0.7, 1.9, 0.8, 0.7, 0.65], [0.5, 0.5, 0.5, 0.4, 1.0, 0.6, 0.5, 0.4], "healthy"),
        ([0.9, 0.8, 0.75, 0.7, 2.4, 0.8, 0.7, 0.65], [0.5, 0.5, 0.5, 0.4, 1.0, 0.6, 0.5, 0.4], "healthy"),
        # A smaller rise that stays, in few lines or in many.
        ([1.2, 1.0, 0.9, 1.3, 1.9, 2.2, 2.3, 2.25, 2.3, 2.28, 2.3], None, "lr-too-high"),
        ([1.0, 1.02, 0.98, 1.01] * 10 + [1.9, 1.95, 1.88, 1.92] * 10, None, "lr-too-high"),
        ([2.6, 1.4, 1.0, 0.9, 1.3, 1.5, 1.7, 1.6, 1.7], None, "healthy"),
        # Hard batches that come again and again among many lines.
        (([0.4, 0.5, 0.3, 0.45] * 8 + [3.6]) * 5, None, "healthy"),
        ([1.0, 1.05, 0.95] * 20 + [6.0, 4.0, 2.0] + [1.1, 1.0] * 15, None, "loss-spike"),
        # Nothing moves.
        ([11.76] * 20, None, "zero-grad-no-learning"),
        ([0.118] * 20, None, "healthy"),
        ([0.6931] * 20, None, "healthy"),
        ([2.31, 2.29, 2.33, 2.3], [1e-9] * 4, "zero-grad-no-learning"),
        ([18.2, 15.0, 12.0, 9.0, 7.0], None, "initial-loss-implausible"),
    ],
)
def test_a_log_of_others_is_judged_by_its_proportions(
    losses: list[float], norms: list[float] | None, expected: str
) -> None:
    assert judged(losses, norms) == expected


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ([math.nan] * 7, "nan-gradients"),
        ([math.nan] * 2, "nan-gradients"),
        ([0.2, 0.3, math.nan, math.nan, math.nan], "nan-gradients"),
        ([math.nan, math.nan, 0.3, math.nan, 0.2], "healthy"),
        ([0.2, math.nan], "healthy"),
    ],
)
def test_overflows_that_never_end_are_no_scaler_at_work(norms: list[float], expected: str) -> None:
    assert (
        judged([1.0 + 0.01 * at for at in range(len(norms))], norms, RunContext(precision="fp16", is_raw=False))
        == expected
    )


def test_a_held_out_loss_that_is_no_number_is_not_over_fitting() -> None:
    looks = [StepMetrics(step, held_out_loss=math.nan) for step in (2, 4)]
    losses = [StepMetrics(step, loss=2.0 - 0.4 * step) for step in (1, 3)]
    found = replay([losses[0], looks[0], losses[1], looks[1]], LOG)
    assert names(found) == ["nan-gradients"] and "held-out loss" in found[0].words


def noisy(losses: list[float], *, noise: float = 0.02, seed: int = 0, every: int = 1) -> list[StepMetrics]:
    """A log with a warm-up of a twentieth, then a falling rate, and noise in proportion to the loss."""
    draw, number = random.Random(seed), len(losses)
    return [
        StepMetrics(
            (at + 1) * every,
            loss=loss * (1 + draw.gauss(0, noise)),
            grad_norm=draw.uniform(1.0, 1.2),
            learning_rate=2e-4 * min(1.0, 20 * (at + 1) / number) * (1 - at / number),
        )
        for at, loss in enumerate(losses)
    ]


@pytest.mark.parametrize(("number", "noise"), [(32, 0.002), (100, 0.02), (299, 0.005), (299, 0.03), (2000, 0.08)])
def test_a_loss_that_never_falls_is_called_flat(number: int, noise: float) -> None:
    """299 readings around 2.3 were called healthy. A beginning may differ by chance."""
    logs = [noisy([2.3] * number, noise=noise, seed=seed) for seed in range(20)]
    assert [verdict(replay(log, RunContext(is_raw=False))) for log in logs].count("flat-loss") >= 14


FALLS = {
    "slowly": [2.0 * (1 - 0.2 * at / 299) for at in range(299)],
    "early": [0.85 + 0.15 * math.exp(-at / 8) for at in range(299)],
    "in epochs": [2.0 - 0.3 * (at // 100) for at in range(299)],
    "late": [10.0 if at < 200 else 7.0 for at in range(299)],
    "is low": [0.2] * 299,
    "rises a little": [2.0 * (1 + 0.05 * at / 299) for at in range(299)],
    "is short": [2.3] * 12,
}


@pytest.mark.parametrize("name", FALLS)
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.2])
def test_a_loss_that_fell_or_is_too_noisy_is_not_called_flat(name: str, noise: float) -> None:
    """A converged run is flat too, after its first steps; a small batch hides a fall."""
    for seed in range(5):
        assert "flat-loss" not in names(replay(noisy(FALLS[name], noise=noise, seed=seed), RunContext(is_raw=False)))


@pytest.mark.parametrize(("every", "number"), [(10, 100), (20, 60), (50, 30), (50, 60)])
@pytest.mark.parametrize("noise", [0.1, 0.25])
def test_a_loss_that_fell_before_the_first_line_is_seldom_called_flat(every: int, number: int, noise: float) -> None:
    """A line is the mean of many steps: the fall is in the first one alone, and up to half of such logs were flat."""
    called = 0
    for seed in range(20):
        draw, log = random.Random(seed), list[StepMetrics]()
        for last in range(every, every * (number + 1), every):
            steps = range(last - every + 1, last + 1)
            falls = [1.1 + 0.6 * math.exp(-at / 3) - 0.02 * at / (every * number) for at in steps]
            log.append(StepMetrics(last, loss=math.fsum(falls) / every + draw.gauss(0, noise / math.sqrt(every))))
        called += "flat-loss" in names(replay(log, RunContext(is_raw=False)))
    assert called <= 3


def test_a_flat_log_without_step_numbers_is_told_in_lines() -> None:
    """A line of another trainer was called a step."""
    lines, steps = ([StepMetrics(at * every, loss=2.3 + 0.001 * (at % 3)) for at in range(1, 41)] for every in (1, 10))
    assert replay(lines, RunContext(is_raw=False))[0].words.endswith("for 40 lines")
    assert replay(steps, RunContext(is_raw=False))[0].words.endswith("for 400 steps")


def test_a_piece_of_a_log_and_a_warm_up_are_not_called_flat() -> None:
    """The end of a long run is flat, and so is a loss while the rate still rises."""
    late = [StepMetrics(r.step + 5000, loss=r.loss) for r in noisy([2.3] * 100)]
    warming = [StepMetrics(r.step, loss=r.loss, learning_rate=1e-6 * r.step) for r in noisy([2.3] * 100)]
    fallen = [*noisy([2.3] * 100), StepMetrics(1, held_out_loss=2.4), StepMetrics(100, held_out_loss=2.2)]
    for log in (late, warming, fallen):
        assert "flat-loss" not in names(replay(log, RunContext(is_raw=False)))
