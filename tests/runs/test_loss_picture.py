"""The loss curve as a picture is a picture, and shows what the numbers say."""

import io
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tunewell.core.errors import UserError
from tunewell.runs import loss_picture
from tunewell.runs.loss_picture import ceiling, draw_losses, smoothed, smoothing_window

FALLING = [(step, 2.0 - step / 100) for step in range(1, 101)]
LOOKS = [(0, 2.0), (50, 1.4), (100, 1.6)]
BLUE, ORANGE, RED = (0x1B, 0x5A, 0x9E), (0xC8, 0x54, 0x1A), (0xC2, 0x2F, 0x3D)


def drawn(tmp_path, losses, held_out) -> np.ndarray:
    draw_losses(tmp_path / "loss.png", losses=losses, held_out=held_out, title="a $model$: LoRA")
    with Image.open(tmp_path / "loss.png") as picture:
        assert picture.format == "PNG"
        return np.asarray(picture.convert("RGB")).astype(int)


def has(picture: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    """Where a picture has a colour."""
    return np.abs(picture - np.array(colour)).max(axis=2) < 12


def test_the_picture_shows_training_and_held_out_on_white(tmp_path):
    """An empty picture, or one on a transparent ground, looks fine to a program and not to a person."""
    picture = drawn(tmp_path, FALLING, LOOKS)
    height, width, _ = picture.shape
    assert width >= 800 and height >= 500 and width / height == pytest.approx(1.6)
    assert (picture[0, 0] == 255).all() and (picture == 255).all(axis=2).mean() > 0.8
    assert has(picture, BLUE).sum() > 500 and has(picture, ORANGE).sum() > 500
    assert not has(picture, RED).any()


def test_a_falling_loss_falls_in_the_picture(tmp_path):
    """An axis turned around would tell a failing run as a success."""
    down, across = np.nonzero(has(drawn(tmp_path, FALLING, []), BLUE))
    inside = across < across.max() * 0.6  # the legend stands to the right
    assert np.corrcoef(across[inside], down[inside])[0, 1] > 0.99


def test_one_spike_does_not_flatten_the_picture(tmp_path):
    """Cut, and said so in the picture."""
    losses = [(step, 1e6 if step == 70 else loss) for step, loss in FALLING]
    picture = drawn(tmp_path, losses, LOOKS)
    down, across = np.nonzero(has(picture, BLUE))
    inside = across < across.max() * 0.5
    assert down[inside].max() - down[inside].min() > 100
    assert has(picture, RED).any()


@pytest.mark.parametrize(
    ("losses", "held_out"),
    [([], []), ([(1, 2.0)], []), ([(1, math.nan), (2, math.inf)], []), ([], LOOKS), (FALLING, [(1, math.nan)])],
    ids=["none", "one step", "nothing finite", "only looks", "a look not finite"],
)
def test_odd_runs_are_drawn_too(tmp_path, losses, held_out):
    """A run of one step is how most people begin; a picture must not end it."""
    assert drawn(tmp_path, losses, held_out).shape[2] == 3


def test_drawing_leaves_no_trace_in_the_process(tmp_path):
    """A notebook that imports tunewell has a backend and settings of its own."""
    check = (
        "import sys; from matplotlib import rcParams; from pathlib import Path;"
        # Asking for the backend would choose one.
        "settings = lambda: {name: rcParams[name] for name in rcParams if name != 'backend'}; before = settings();"
        "from tunewell.workflows.loss_picture import draw_losses;"
        f"draw_losses(Path({str(tmp_path / 'a.png')!r}), losses=[(1, 1.0), (2, 0.5)], held_out=[], title='a');"
        "assert 'matplotlib.pyplot' not in sys.modules; assert settings() == before"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_without_matplotlib_it_is_said_how_to_get_it(tmp_path, monkeypatch):
    """It is an extra; whoever trains without it should not meet a traceback."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="picture of the loss") as caught:
        draw_losses(tmp_path / "loss.png", losses=FALLING, held_out=[], title="a")
    assert caught.value.fix == 'pip install "tunewell[train]"'
    assert list(tmp_path.iterdir()) == []


def test_the_average_is_numpys_over_the_same_window():
    """Checked against a plain mean; towards the ends the window narrows."""
    values = np.random.default_rng(0).normal(size=200)
    calm = smoothed(values, 11)
    for place in range(5, 195):
        assert calm[place] == pytest.approx(values[place - 5 : place + 6].mean())
    assert calm[0] == pytest.approx(values[:2].mean()) and calm[-1] == pytest.approx(values[-2:].mean())
    assert (smoothed(values, 1) == values).all()


def test_an_average_leaves_out_what_is_not_finite():
    """One nan must not spread over its neighbours, nor be covered up by them."""
    values = np.array([1.0, 2.0, math.nan, 4.0, math.inf, 6.0, 7.0])
    calm = smoothed(values, 3)
    assert np.isnan(calm[[2, 4]]).all()
    assert calm[[1, 3, 5]] == pytest.approx([1.5, 4.0, 6.5])


@given(st.integers(0, 10**6))
def test_a_window_is_odd_and_fits(num_points):
    """An even window would shift the curve by half a step."""
    window = smoothing_window(num_points)
    assert window % 2 == 1 and window <= max(num_points, 1) and window <= 501


def test_only_what_sticks_far_out_is_cut():
    """The beginning of a run is its highest part, and what people want to see."""
    assert ceiling(FALLING, LOOKS) is None
    assert ceiling([(1, 10.0), *FALLING], []) is None
    assert ceiling([(step, 1.0 if step < 50 else 8.0) for step in range(100)], []) is None
    assert ceiling([(step, 50.0 if step == 70 else 2.0) for step in range(100)], []) == pytest.approx(3.0)
    assert ceiling([], []) is None and ceiling([(1, math.nan)], []) is None


def test_a_picture_is_whole_or_absent(tmp_path, monkeypatch):
    """A killed run must not leave half a file under the name of a whole one."""
    wrote = []
    monkeypatch.setattr(loss_picture, "write_atomic", lambda path, data: wrote.append((path, data)))
    draw_losses(tmp_path / "loss.png", losses=FALLING, held_out=LOOKS, title="a")
    ((path, data),) = wrote
    assert path == tmp_path / "loss.png"
    Image.open(io.BytesIO(data)).verify()
