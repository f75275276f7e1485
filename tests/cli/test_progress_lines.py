"""Lines about long stages: a count, and a time left that shrinks while nothing is reported."""

import subprocess
import sys
import textwrap

from tunewell.cli.progress import StageText
from tunewell.core.progress import Progress


def _text() -> tuple[StageText, list[float]]:
    now = [0.0]
    return StageText(lambda: now[0]), now


def test_a_stage_shows_its_count_and_the_time_left_of_the_command() -> None:
    text, now = _text()
    text(Progress("verifying gguf q8_0", 12, 20, "texts", seconds_left=31.0))
    assert text.text() == "verifying gguf q8_0, 12 of 20, about 31 s left"
    now[0] = 6
    assert text.text() == "verifying gguf q8_0, 12 of 20, about 25 s left", "the line is kept up to date"
    now[0] = 60
    assert text.text() == "verifying gguf q8_0, 12 of 20", "a time that has passed is not shown"


def test_without_an_expectation_the_count_predicts_the_stage() -> None:
    text, now = _text()
    text(Progress("writing", 0, 100 << 20, "bytes"))
    now[0] = 10
    text(Progress("writing", 25 << 20, 100 << 20, "bytes"))
    assert text.text() == "writing, 25 MiB of 100 MiB, about 30 s left"


def test_a_stage_without_a_count_shows_how_long_it_lasts() -> None:
    text, now = _text()
    text(Progress("merging"))
    assert text.text() == "merging"
    now[0] = 8
    assert text.text() == "merging, 8.0 s"


def test_a_silent_stage_goes_on_writing_lines() -> None:
    """Guards against minutes without a word: nothing is reported while libraries and weights are loaded."""
    script = """
        import time
        from tunewell.cli import progress
        from tunewell.core.progress import Progress
        progress._STAGE_LINE_SECONDS = 0.5
        with progress.shown_stages({"loading": 60.0}) as show:
            show(Progress("loading the model"))
            time.sleep(2.5)
        print("end")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True, timeout=120
    )
    lines = done.stderr.splitlines()
    assert len(lines) >= 2 and all(line.startswith("loading the model, about ") for line in lines)
    assert done.stdout == "end\n"
