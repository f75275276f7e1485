"""The picture of the memory of a run: its parts add up, and the free memory is where it is."""

import pytest

from tunewell.planning.result import memory_chart
from tunewell.records.prediction import MemoryPrediction, Prediction, TimePrediction

GIB = 1 << 30
PARTS = {"weights": 4, "adapter": 1, "process": 1, "gradients": 2, "optimizer": 8, "activations": 6, "evaluation": 3}
PHASES = {"load": 5, "steps": 22, "evaluation": 17, "verdict": 9}


def prediction(free: float | None, *, is_measured: bool = False) -> Prediction:
    """Return a prediction in which a step needs 22 GiB."""
    memory = MemoryPrediction(
        peak_bytes=22 * GIB,
        needed_bytes=22 * GIB,
        low_bytes=20 * GIB,
        high_bytes=24 * GIB,
        free_bytes=None if free is None else int(free * GIB),
        parts={name: size * GIB for name, size in PARTS.items()},
        phases={name: size * GIB for name, size in PHASES.items()},
    )
    return Prediction(
        fits=True, is_measured=is_measured, memory=memory, seconds=TimePrediction(low=1, high=1, expected=1)
    )


def test_the_parts_of_a_phase_add_up_to_what_the_table_said() -> None:
    """A step holds weights, gradients, optimizer and activations; loading has no optimizer yet."""
    *phases, highest = memory_chart(prediction(80.0)).rows
    shown = {row.label: [size / GIB for size in row.parts] for row in phases}
    assert shown == {"load": [5, 0, 0], "steps": [6, 10, 6], "evaluation": [6, 8, 3], "verdict": [6, 0, 3]}
    assert highest.interval == (20 * GIB, 22 * GIB, 24 * GIB) and highest.label == "highest, expected"
    assert memory_chart(prediction(80.0, is_measured=True)).rows[-1].label == "highest, measured"


@pytest.mark.parametrize(
    ("free", "high", "label"), [(16, 24, "16.0 GiB free"), (30, 30, "30.0 GiB free"), (80, 36, "80.0 GiB free →")]
)
def test_the_free_memory_is_on_the_axis_if_the_bars_stay_long_enough(free: float, high: float, label: str) -> None:
    """Beyond the axis it has an arrow and no line: a line at the edge would say that so much is free."""
    chart = memory_chart(prediction(free))
    assert chart.high == high * GIB and chart.ticks[1] == (free * GIB, label)
    assert len(memory_chart(prediction(None)).ticks) == 1
