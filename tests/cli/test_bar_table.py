"""Charts of bars and intervals fit the terminal, also where it has only ASCII."""

import pytest

from tunewell.cli.render import bar_table, cell_width
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


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("chart", [MEMORY, RIGHT])
def test_a_chart_fits_the_terminal_with_names_of_any_length(chart, columns, monkeypatch) -> None:
    """A picture that wraps is no picture."""
    monkeypatch.setenv("COLUMNS", str(columns))
    long = [BarRow("名" * 90, row.texts, row.parts, row.interval) for row in chart.rows]
    for rows in (chart.rows, long):
        shown = bar_table(BarChart(chart.title, chart.heads, rows, chart.high, chart.legend, chart.ticks))
        assert max(map(cell_width, shown.splitlines())) <= columns, shown
        assert all(text in shown for row in rows for text in row.texts)


def test_where_stdout_is_not_utf8_the_chart_is_ascii(monkeypatch) -> None:
    """Every other character would be spelled out, and the picture lost."""
    monkeypatch.setattr("tunewell.cli.render.is_utf8", lambda: False)
    shown = bar_table(RIGHT) + bar_table(MEMORY)
    assert shown.isascii() and "* recommended" in shown and "# weights, = optimizer, . activations" in shown
