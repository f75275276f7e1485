"""Events are with the system as soon as they are written, and a crash costs the last line at most."""

import json
import math
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewell.core.errors import UserError
from tunewell.records.events import EventLog, as_number, last_step, plain, read_events

WRITE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from tunewell.records.events import EventLog
log = EventLog(Path(sys.argv[1]))
for step in range(1, 4):
    log.append({"step": step, "loss": 1.5})
os.kill(os.getpid(), signal.SIGKILL)
"""

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def steps(path):
    return [event["step"] for event in read_events(path)]


def written(path, numbers):
    with EventLog(path) as log:
        for number in numbers:
            log.append({"step": number})
    return path


def test_an_event_is_one_line_given_away_in_one_write_at_once(path, monkeypatch):
    """A line in two writes can be torn by a kill between them; one in a buffer is lost by any kill."""
    write, lines = os.write, []
    monkeypatch.setattr(os, "write", lambda handle, data: (lines.append(bytes(data)), write(handle, data))[1])
    log = EventLog(path)
    log.append({"step": 1, "loss": 0.5, "text": "two\nlines\u2028and é"})
    assert lines == ['{"step": 1, "loss": 0.5, "text": "two\\nlines\u2028and é"}\n'.encode()]
    assert read_events(path) == [{"step": 1, "loss": 0.5, "text": "two\nlines\u2028and é"}]


def test_a_killed_process_has_written_every_event_it_appended(path):
    """The log is the evidence of what happened before the kill."""
    done = subprocess.run([sys.executable, "-c", WRITE_AND_DIE, path], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert steps(path) == [1, 2, 3]


def test_numbers_that_are_not_finite_are_strings_and_come_back_as_numbers(path):
    """`NaN` is not JSON: other programs refuse the whole line, which is the one that matters."""
    with EventLog(path) as log:
        log.append({"loss": math.nan, "norms": [math.inf, {"deep": (-math.inf, 1)}], "rate": 0.1})

    def no_constant(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    event = json.loads(path.read_text(), parse_constant=no_constant)
    assert event == {"loss": "nan", "norms": ["inf", {"deep": ["-inf", 1]}], "rate": 0.1}
    assert math.isnan(as_number(event["loss"]))
    assert as_number(event["norms"][0]) == math.inf and as_number(event["norms"][1]["deep"][0]) == -math.inf
    assert as_number(event["rate"]) == 0.1
    with pytest.raises(ValueError, match="is not a number"):
        as_number("1.5")


def test_keys_keep_the_order_they_were_given_in(path):
    """A person reads the log too: step first."""
    with EventLog(path) as log:
        log.append({"step": 1, "loss": 2.0, "a": 3})
    assert list(read_events(path)[0]) == ["step", "loss", "a"]


@given(event=st.dictionaries(st.text(), json_values, max_size=4))
def test_whatever_json_can_hold_comes_back(event, tmp_path_factory):
    """Samples carry any text a model can produce, and texts of rows any a person can."""
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    with EventLog(path) as log:
        log.append(event)
        log.append({"step": 1})
    assert read_events(path) == [plain(event), {"step": 1}]


def test_half_a_surrogate_pair_is_written_as_its_escape(path):
    """It has no UTF-8; a run must not end because of one."""
    with EventLog(path) as log:
        log.append({"text": "\ud800"})
    assert read_events(path) == [{"text": "\ud800"}]


@pytest.mark.parametrize(
    "tail", [b"{", b'{"step": 4, "lo', b'{"step": 4}', b"\0" * 5000, b'{"x": "\xc3', b"x" * 200_000]
)
def test_a_torn_last_line_is_not_read_and_not_continued(path, tail):
    """After a power cut the end may be half a line or zeros; the next event must not be glued to it."""
    written(path, [1, 2, 3])
    with path.open("ab") as file:
        file.write(tail)
    assert steps(path) == [1, 2, 3]
    written(path, [5])
    assert steps(path) == [1, 2, 3, 5]
    assert path.read_bytes().count(b"\n") == 4


def test_damage_in_the_middle_is_named_and_not_passed_over(path):
    """A step that is missing from the log silently would be missing from every judgement on the run."""
    written(path, [1, 2, 3])
    path.write_bytes(path.read_bytes().replace(b'{"step": 2}', b'{"step": ?}'))
    with pytest.raises(UserError, match=r"line 2 of `events\.jsonl` is damaged"):
        read_events(path)


def test_a_log_that_is_not_there_is_said_to_be_missing(path):
    """An empty list would say that nothing happened."""
    with pytest.raises(UserError, match=r"there is no `events\.jsonl`"):
        read_events(path)


def test_truncating_drops_every_later_step_and_the_next_event_follows(path):
    """A resumed run writes the steps after its checkpoint again: each must be there once."""
    written(path, [1, 2, 3, 4, 5])
    with path.open("ab") as file:
        file.write(b'{"step": 6, "l')
    log = EventLog(path)
    assert log.truncate_to(3) == 2
    log.append({"step": 4, "again": True})
    log.close()
    assert read_events(path) == [{"step": 1}, {"step": 2}, {"step": 3}, {"step": 4, "again": True}]


def test_truncating_reaches_steps_that_were_taken_twice(path):
    """After a rewind from 4 to 2 the log has step 3 and 4 twice; resuming from 3 keeps neither 4."""
    written(path, [1, 2, 3, 4, 3, 4])
    with EventLog(path) as log:
        assert log.truncate_to(3) == 2
    assert steps(path) == [1, 2, 3, 3]


def test_a_line_without_a_step_goes_with_the_line_before_it(path):
    """Notes belong to the step they were made at."""
    with EventLog(path) as log:
        for event in [{"note": "start"}, {"step": 1}, {"note": "one"}, {"step": 2}, {"note": "two"}]:
            log.append(event)
        log.truncate_to(1)
    assert read_events(path) == [{"note": "start"}, {"step": 1}, {"note": "one"}]


def test_truncating_tells_of_damaged_lines_and_leaves_them_out(path):
    """Blocks that a power cut lost may lie before others that it did not."""
    written(path, [1, 2, 3])
    path.write_bytes(path.read_bytes().replace(b'{"step": 2}', b"\0" * 11))
    told: list[str] = []
    with EventLog(path, on_trouble=told.append) as log:
        assert log.truncate_to(5) == 1
    assert steps(path) == [1, 3]
    assert told == ["1 damaged line of `events.jsonl` removed"]


def test_truncating_what_needs_no_cut_touches_nothing(path):
    """A rewrite costs time and can fail."""
    written(path, [1, 2])
    inode = path.stat().st_ino
    with EventLog(path) as log:
        assert log.truncate_to(2) == 0
    assert path.stat().st_ino == inode


def test_sync_flushes_to_the_disk_and_append_does_not(path, monkeypatch):
    """A flush a step would cost milliseconds; one per checkpoint is what a resume needs."""
    log, flushed = EventLog(path), []
    monkeypatch.setattr(os, "fsync", flushed.append)
    log.append({"step": 1})
    assert flushed == []
    log.sync()
    assert len(flushed) == 1


def test_closing_twice_does_nothing(path):
    """A failing run closes its log on more than one way out."""
    log = EventLog(path)
    log.close()
    log.close()


def log_of(path, lines, end="\n"):
    path.write_text("\n".join(lines) + end, encoding="utf-8")
    return path


def test_the_last_step_is_the_last_whole_line_of_kind_step(path):
    lines = ['{"kind": "step", "step": 7}', '{"step":8,"kind":"step"}', '{"kind": "held_out", "step": 9}']
    assert last_step(log_of(path, lines)) == 8


def test_the_last_step_does_not_depend_on_spaces_or_the_order_of_keys(path):
    """The supervisor once searched for `"kind": "step", "step": ` and read the number behind it."""
    assert last_step(log_of(path, ['{ "loss":1.0,"step" : 12 , "kind":"step"}'])) == 12


def test_a_text_that_quotes_a_step_is_not_a_step(path):
    quoted = json.dumps({"kind": "step", "step": 99})
    lines = [{"kind": "step", "step": 3}, {"kind": "change", "step": 3, "change": quoted}]
    lines = [json.dumps(line) for line in lines]
    assert last_step(log_of(path, lines)) == 3


@pytest.mark.parametrize("torn", ['{"kind": "step", "st', '{"kind": "step", "step": 5}'])
def test_a_last_line_without_its_end_is_not_read(path, torn):
    """A line that was cut off may show a shorter number: 5 of 50."""
    assert last_step(log_of(path, ['{"kind": "step", "step": 4}', torn], end="")) == 4


def test_damaged_lines_are_skipped(path):
    lines = ['{"kind": "step", "step": 4}', "\x00\x00", "[]", "", '{"kind": "step", "step": "x"}']
    assert last_step(log_of(path, lines)) == 4


def test_a_log_without_a_step_has_no_last_step(path):
    assert last_step(path) is None
    assert last_step(log_of(path, [], end="")) is None
    assert last_step(log_of(path, ['{"kind": "held_out", "step": 1}'])) is None


@given(st.lists(st.tuples(st.integers(1, 9999), st.integers(0, 40)), max_size=12))
def test_the_last_step_is_found_in_a_log_of_any_length(tmp_path_factory, entries):
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    lines = [json.dumps({"kind": "step", "step": step, "text": "x" * size}) for step, size in entries]
    assert last_step(log_of(path, lines)) == (entries[-1][0] if entries else None)
