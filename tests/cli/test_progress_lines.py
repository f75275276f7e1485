"""Lines about long stages: a count, and a time left that shrinks while nothing is reported."""

import subprocess
import sys
import textwrap

from tunewell.cli.progress import StageText
from tunewell.core.progress import Progress


def _text() -> tuple[StageText, list[float]]:
    now = [0.0]
    return StageText(lambda: now[0]), now


def test_a_stage_shows_its_count_and_the_time_left_at_its_rate() -> None:
    text, now = _text()
    text(Progress("verifying gguf q8_0", 0, 20, "texts"))
    now[0] = 15
    text(Progress("verifying gguf q8_0", 5, 20, "texts"))
    assert text.text() == "verifying gguf q8_0, 5 of 20, about 45 s left"
    now[0] = 21
    assert text.text() == "verifying gguf q8_0, 5 of 20, about 39 s left", "the line is kept up to date"
    now[0] = 61
    assert text.text() == "verifying gguf q8_0, 5 of 20", "a time that has passed is not shown"


def test_a_second_count_in_a_stage_has_its_own_rate() -> None:
    """Guards against the time of the tensors as the time of the texts that are counted after them."""
    text, now = _text()
    text(Progress("verifying", 0, 200, "tensors"))
    now[0] = 100
    text(Progress("verifying", 200, 200, "tensors"))
    text(Progress("verifying", 0, 20, "texts"))
    assert text.text() == "verifying, 0 of 20"
    now[0] = 104
    text(Progress("verifying", 5, 20, "texts"))
    assert text.text() == "verifying, 5 of 20, about 12 s left"


def test_what_was_there_before_does_not_count_as_speed() -> None:
    """Guards against a download that is resumed at 90% and is expected to end at once."""
    text, now = _text()
    text(Progress("downloading", 90 << 20, 100 << 20, "bytes"))
    now[0] = 30
    text(Progress("downloading", 95 << 20, 100 << 20, "bytes"))
    assert text.text() == "downloading, 95 MiB of 100 MiB, about 30 s left"


def test_bytes_are_shown_in_mebibytes() -> None:
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
        progress._STAGE_LINE_SECONDS = progress._LINE_SECONDS = 0.5
        with progress.shown_stages() as show:
            show(Progress("loading the model"))
            time.sleep(2.5)
        print("end")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True, timeout=120
    )
    lines = done.stderr.splitlines()
    assert len(lines) >= 2 and lines[0] == "loading the model"
    assert all(line.startswith("loading the model, ") and line.endswith(" s") for line in lines[1:])
    assert done.stdout == "end\n"
