"""The loss curve in the terminal shows what the numbers say."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tunewell.runs.loss_curve import Line, curves_svg, draw_curve, draw_curves

FALLING = [(step, 2.0 - step / 100) for step in range(1, 101)]
LOOKS = [(0, 2.0), (50, 1.4), (100, 1.6)]
POINTS = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=80).map(lambda v: list(enumerate(v, 1)))


def cells(curve: str, height: int = 10) -> list[str]:
    """What is inside the axes."""
    return [line.partition("┤" if "┤" in line else "│")[2] for line in curve.splitlines()[:height]]


def dots(curve: str) -> dict[int, float]:
    """Read the braille dots back: for each column the mean row, counted from the top."""
    rows: dict[int, list[int]] = {}
    bits = [
        (0x01, 0, 0),
        (0x02, 1, 0),
        (0x04, 2, 0),
        (0x40, 3, 0),
        (0x08, 0, 1),
        (0x10, 1, 1),
        (0x20, 2, 1),
        (0x80, 3, 1),
    ]
    for row, line in enumerate(cells(curve)):
        for column, character in enumerate(line):
            if 0x2800 < ord(character) < 0x2900:
                for bit, down, across in bits:
                    if (ord(character) - 0x2800) & bit:
                        rows.setdefault(2 * column + across, []).append(4 * row + down)
    return {column: sum(found) / len(found) for column, found in rows.items()}


def test_a_curve_of_sixty_by_ten():
    """The whole drawing, character by character."""
    assert draw_curve(FALLING, LOOKS).splitlines() == [
        "2.00 ┤o⠒⠢⠤⣀⡀",
        "     │     ⠈⠉⠒⠒⠤⣀⣀",
        "     │            ⠉⠒⠒⠤⣀⣀",
        "1.67 ┤                  ⠉⠑⠢⠤⢄⡀",
        "     │                       ⠈⠉⠑⠢⠤⢄⡀                             o",
        "     │                             ⠈*⠑⠒⠤⢄⣀",
        "1.33 ┤                                    ⠉⠑⠒⠤⢄⣀",
        "     │                                          ⠉⠉⠒⠤⠤⣀",
        "     │                                                ⠉⠉⠒⠤⠤⣀⡀",
        "1.00 ┤                                                      ⠈⠉⠒⠢⠤⣀",
        "     └────────────────────────────────────────────────────────────",
        "      0                           50                           100 step",
        "line: training loss, mean of 5 steps",
        "o held-out loss, * its lowest",
    ]


def test_the_dots_lie_where_the_losses_are():
    """Read back from the characters, a straight line is straight: from the top left to the bottom right."""
    found = dots(draw_curve(FALLING, []))
    assert sorted(found) == list(range(120))
    for column, row in found.items():
        assert row == pytest.approx(39 * column / 119, abs=1.0)


def test_the_axes_carry_the_numbers_of_the_ends():
    """A curve without numbers says only that something fell."""
    lines = draw_curve(FALLING, LOOKS).splitlines()
    assert lines[0].startswith("2.00 ┤") and lines[9].startswith("1.00 ┤")
    assert lines[11].split() == ["0", "50", "100", "step"]
    assert draw_curve([(step, 12_345.0 + step) for step in range(1, 4000, 9)], []).splitlines()[0].startswith("16,3")


def test_what_is_not_finite_leaves_a_gap_and_is_told():
    """A line drawn across a gap would hide what a person should look into."""
    losses = [(step, math.nan if 40 <= step < 60 else loss) for step, loss in FALLING]
    curve = draw_curve(losses, [])
    found = dots(curve)
    assert not any(50 < column < 69 for column in found) and 40 in found and 80 in found
    assert "left out: 20 values that are not finite" in curve


def test_one_spike_does_not_flatten_the_curve():
    """A single step at a million would leave one dot at the top and a line at the bottom."""
    losses = [(step, 1e6 if step == 70 else loss) for step, loss in FALLING]
    curve = draw_curve(losses, [])
    assert len({round(row) for row in dots(curve).values()}) > 10
    assert curve.splitlines()[-1] == "cut at 2.985; the highest value is 1e+06"


def test_smoothing_is_said_and_only_done_where_there_is_much():
    """A number on a screen that was averaged without a word is a lie."""
    assert "mean of 5 steps" in draw_curve(FALLING, [])
    assert "mean" not in draw_curve(FALLING[:10], [])


def test_held_out_looks_are_marked_and_the_lowest_differently():
    """The lowest is the checkpoint that will be used."""
    rows = cells(draw_curve(FALLING, LOOKS))
    assert rows[0][0] == "o" and sum(row.count("o") for row in rows) == 2
    (best,) = [row for row in rows if "*" in row]
    assert best.index("*") == 30 and rows.index(best) == 5


def test_ascii_uses_nothing_else():
    """Where stdout is not UTF-8, every other character would be spelled out and the picture lost."""
    curve = draw_curve(FALLING, LOOKS, is_ascii=True)
    assert curve.isascii() and "o" in curve and len(curve.splitlines()) == 14
    assert max(map(len, curve.splitlines()[:11])) <= 66


def test_without_a_finite_loss_there_is_no_curve():
    """Axes around nothing would look like a loss of zero."""
    assert draw_curve([], []) == ""
    assert draw_curve([(1, math.nan), (2, math.inf)], [(1, math.nan)]) == ""


@example([(1, 1e308), (2, -1e308)], [], 60, 10, False)
@example([(step, 1.7e308) for step in range(60)], [], 60, 10, False)
@example([(1, 5e-324), (2, 0.0)], [], 60, 10, True)
@given(POINTS, POINTS, st.integers(1, 100), st.integers(1, 30), st.booleans())
def test_no_losses_are_too_odd_to_be_drawn(losses, held_out, width, height, is_ascii):
    """The report comes after hours of training; a drawing must not end it."""
    curve = draw_curve(losses, held_out, width=width, height=height, is_ascii=is_ascii)
    if curve:
        axis = [line for line in curve.splitlines() if line.endswith(("-" if is_ascii else "─") * width)]
        assert axis and all(len(line) <= len(axis[0]) for line in curve.splitlines()[:height])


def test_nothing_to_compare_draws_nothing() -> None:
    """A comparison of models without runs has no curves; it must not fail for that."""
    assert draw_curves([]) == "" and draw_curves([Line("empty")]) == ""
    assert "no finite loss" in curves_svg([], title="losses")
