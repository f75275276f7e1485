"""The choice of a micro-batch from measured speeds."""

from workloads import workload

from tunewell.planning.forecast import MeasuredRun, predict
from tunewell.planning.speed import MeasuredSpeed
from tunewell.runs.probe import ProbeResult, Size, sweep_sizes


def _result(**rates: float) -> ProbeResult:
    measured = MeasuredRun(1, 1, 1, False, MeasuredSpeed(), "")
    return ProbeResult(measured, [Size(int(name[1:]), rate, 1.0, 1) for name, rate in rates.items()])


def test_the_smallest_size_within_three_percent_of_the_fastest_is_chosen():
    """The fastest alone would take twice the memory for a percent."""
    knee = _result(t1024=900.0, t2048=975.0, t4096=1000.0).knee
    assert knee is not None and knee.tokens == 2048
    assert _result(t2048=975.0).knee is None


def test_a_short_run_keeps_the_constant():
    """Measuring for longer than 5% of the run costs more than it saves."""
    assert sweep_sizes(predict(workload("1.1b", tokens=32_768, compiling="off", num_steps=20))) == []


def test_a_long_run_is_measured_around_the_constant():
    """Sizes never exceed the step, and a size that the user set is not measured."""
    work = workload("1.1b", tokens=32_768, compiling="off", num_steps=50_000).with_micro_tokens(16_384)
    sizes = sweep_sizes(predict(work))
    assert 16_384 in sizes and len(sizes) >= 3
    assert max(sizes) == 32_768, "not the largest of the sampled steps: others would need a second micro-batch"
    fixed = workload("1.1b", compiling="off", num_steps=50_000, train={"micro_batch_tokens": 4096})
    assert sweep_sizes(predict(fixed)) == []
