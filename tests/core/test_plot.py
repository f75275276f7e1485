"""Rows of bars and intervals in the terminal show what the numbers say."""

from hypothesis import given
from hypothesis import strategies as st

from tunewell.core.plot import BarChart, BarRow

MEMORY = BarChart(
    "memory by phase",
    [""],
    [BarRow("load", ["2 GiB"], (2, 0, 0)), BarRow("steps", ["5 GiB"], (2, 2, 1)), BarRow("idle", ["0 GiB"], (0, 0, 0))],
    8,
    {0: "weights", 1: "optimizer", 2: "activations"},
    [(0, "0"), (6, "6 GiB free")],
)
RIGHT = BarChart(
    "right answers",
    ["right", "95% interval"],
    [
        BarRow("base", ("1 of 20", "0-25%"), interval=(0.0, 0.05, 0.25)),
        BarRow("run", ("20 of 20", "75-100%"), interval=(0.75, 1.0, 1.0), is_marked=True),
    ],
    1.0,
    ticks=((0.0, "0%"), (1.0, "100%")),
    marked="recommended",
)


def test_parts_follow_each_other_and_the_limit_crosses_them() -> None:
    """The whole drawing, character by character."""
    assert MEMORY.text(25) == [
        "│██████           │",
        "│██████▒▒▒▒▒▒░░░  │",
        "│                 │",
        "0            6 GiB free",
    ]


def test_a_dot_lies_in_its_interval_and_the_marked_one_differs() -> None:
    """In a terminal without colour, only the character can say which one is recommended."""
    assert RIGHT.text(21) == ["├●───┤              │", "│              ├────◆", "0%               100%"]


def test_a_value_beyond_the_axis_has_no_line() -> None:
    """A line at the edge would say that so much is free."""
    chart = BarChart("", [""], [BarRow("a", [""], (4,))], 4, {0: "used"}, [(90, "90 free →")])
    assert chart.text(12) == ["│███████████", "   90 free →"]
    half = BarChart("", [""], [BarRow("a", [""], (0.001, 0.001))], 4, {0: "dark", 2: "light"})
    assert half.text(12) == ["│█"], "what is not empty is seen"


@given(st.lists(st.lists(st.integers(0, 10**6), min_size=2, max_size=3), min_size=1, max_size=6), st.integers(2, 100))
def test_no_bar_leaves_its_axis(parts, width) -> None:
    """Sizes are from 0 bytes to many terabytes, and parts add up to the end of the axis."""
    high = max(map(sum, parts)) or 1.0
    chart = BarChart("", [], [BarRow("", [], own) for own in parts], high, {0: "a", 1: "b", 2: "c"})
    lines = chart.text(width)
    assert all(len(line) <= width for line in lines)
    for line, own in zip(lines, parts, strict=True):
        assert bool({*line} & {*"█▒░"}) == (sum(own) > 0), (line, own)
