"""`loss.svg` is a whole picture, and shows what the numbers say."""

import math
import re
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewell.core.plot import ceiling, moving_average, smoothing_window
from tunewell.records.report import Curve
from tunewell.runs import loss_curve
from tunewell.runs.loss_curve import loss_svg, write_loss_svg

FALLING = [(step, 2.0 - step / 100) for step in range(1, 101)]
EVALUATIONS = [(0, 2.0), (50, 1.4), (100, 1.6)]
SVG = "{http://www.w3.org/2000/svg}"


def parsed(train, held_out, title: str = "a model: LoRA") -> ElementTree.Element:
    return ElementTree.fromstring(loss_svg(Curve(train=train, held_out=held_out), title=title))


def texts(picture: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


def line(picture: ElementTree.Element, name: str) -> list[tuple[float, float]]:
    """The points of the first path of a class that is drawn in the plot; the legend's keys come after it."""
    paths = [element for element in picture.iter(f"{SVG}path") if element.get("class") == name]
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", paths[0].get("d") or "")]


def test_the_picture_shows_training_and_held_out_on_white():
    """A picture without a background is unreadable on a dark page."""
    picture = parsed(FALLING, EVALUATIONS)
    assert picture.tag == f"{SVG}svg" and picture.get("width") == "900"
    first = next(picture.iter(f"{SVG}rect"))
    assert first.get("class") == "paper" and ".paper{fill:#fff}" in picture.findtext(f"{SVG}style", "")
    assert len(line(picture, "raw")) == 100 and len(line(picture, "smooth")) == 100
    circles = [circle for circle in picture.iter(f"{SVG}circle") if circle.get("r") == "3.6"]
    assert len(circles) == 3
    shown = texts(picture)
    for text in (
        "a model: LoRA",
        "optimizer step",
        "loss per supervised token",
        "training, mean of 5 steps",
        "held-out",
    ):
        assert text in shown
    assert "best held-out, 1.4000 at step 50" in shown


def test_a_falling_loss_falls_in_the_picture():
    """An axis turned around would show a failing run as a success."""
    points = np.array(line(parsed(FALLING, []), "smooth"))
    assert np.corrcoef(points[:, 0], points[:, 1])[0, 1] > 0.99


def test_one_spike_does_not_flatten_the_picture():
    """It is cut, and the picture says so."""
    losses = [(step, 1e6 if step == 70 else loss) for step, loss in FALLING]
    picture = parsed(losses, EVALUATIONS)
    heights = [y for x, y in line(picture, "smooth") if x < 450]
    assert max(heights) - min(heights) > 40
    assert "The curve is cut at 3: the highest loss is 1e+06 at step 70." in texts(picture)


@pytest.mark.parametrize(
    ("losses", "held_out"),
    [([], []), ([(1, 2.0)], []), ([(1, math.nan), (2, math.inf)], []), ([], EVALUATIONS), (FALLING, [(1, math.nan)])],
    ids=["none", "one step", "nothing finite", "only evaluations", "an evaluation not finite"],
)
def test_odd_runs_are_drawn_too(losses, held_out):
    """A run of one step is how most people begin; a picture must not end it."""
    picture = parsed(losses, held_out)
    has_points = any(math.isfinite(value) for _, value in (*losses, *held_out))
    assert ("no finite loss" in texts(picture)) is not has_points


@given(st.text(max_size=30))
def test_any_title_gives_a_well_formed_file(title):
    """A folder may be called `<b> & \\x00`; XML allows no control characters."""
    picture = parsed(FALLING[:3], [], title=title)
    assert len(texts(picture)[0] or "") == len(title)


def test_a_title_opens_no_element():
    """Names come from other people's configs."""
    picture = parsed(FALLING, [], title="</text><script>alert(1)</script>")
    assert texts(picture)[0] == "</text><script>alert(1)</script>"
    assert not list(picture.iter(f"{SVG}script"))


def test_drawing_needs_no_torch():
    """A curve can be drawn where nothing can be trained."""
    check = "import sys, tunewell.runs.loss_curve; assert not {'torch', 'transformers', 'rich'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_average_is_numpys_over_the_same_window():
    """Checked against a plain mean; towards the ends the window narrows."""
    values = np.random.default_rng(0).normal(size=200)
    means = moving_average(values, 11)
    for index in range(5, 195):
        assert means[index] == pytest.approx(values[index - 5 : index + 6].mean())
    assert means[0] == pytest.approx(values[:2].mean()) and means[-1] == pytest.approx(values[-2:].mean())
    assert (moving_average(values, 1) == values).all()


def test_an_average_leaves_out_what_is_not_finite():
    """One nan must not spread over its neighbours, nor be covered up by them."""
    values = np.array([1.0, 2.0, math.nan, 4.0, math.inf, 6.0, 7.0])
    means = moving_average(values, 3)
    assert np.isnan(means[[2, 4]]).all()
    assert means[[1, 3, 5]] == pytest.approx([1.5, 4.0, 6.5])


@given(st.integers(0, 10**6))
def test_a_window_is_odd_and_fits(num_points):
    """An even window would shift the curve by half a step."""
    window = smoothing_window(num_points)
    assert window % 2 == 1 and window <= max(num_points, 1) and window <= 501


def test_only_what_sticks_far_out_is_cut():
    """The beginning of a run is its highest part, and what people want to see."""
    assert ceiling(FALLING, EVALUATIONS) is None
    assert ceiling([(1, 10.0), *FALLING], []) is None
    assert ceiling([(step, 1.0 if step < 50 else 8.0) for step in range(100)], []) is None
    assert ceiling([(step, 50.0 if step == 70 else 2.0) for step in range(100)], []) == pytest.approx(3.0)
    assert ceiling([], []) is None and ceiling([(1, math.nan)], []) is None


def test_a_picture_is_whole_or_absent(tmp_path, monkeypatch):
    """A killed run must not leave half a file under the name of a whole one."""
    wrote = []
    monkeypatch.setattr(loss_curve, "write_atomic", lambda path, data: wrote.append((path, data)))
    write_loss_svg(tmp_path / "loss.svg", Curve(train=FALLING, held_out=EVALUATIONS), title="a")
    [(path, data)] = wrote
    assert path == tmp_path / "loss.svg"
    assert data.startswith("<svg") and data.endswith("</svg>\n")
