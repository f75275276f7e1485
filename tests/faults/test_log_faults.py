"""A full disk costs a log nothing: its lines wait, are told of once, and are written when there is room."""

import pytest
from write_faults import disk_with

from tunewell.records.events import EventLog, read_events


@pytest.mark.parametrize("room", [0, 1, 12, 13, 30])
def test_lines_that_find_no_room_wait_and_are_written_in_order_when_there_is_some(tmp_path, room):
    """Half a line must not stay, no line may be lost, and no line may come twice."""
    path, told = tmp_path / "events.jsonl", []
    log = EventLog(path, on_trouble=told.append)
    with disk_with(room):
        for step in range(1, 6):
            log.append({"step": step})
        log.sync()
    assert [event["step"] for event in read_events(path)] == list(range(1, 1 + room // len('{"step": 1}\n')))
    assert path.read_bytes().count(b"\n") == room // len('{"step": 1}\n')
    assert told == ["`events.jsonl` cannot be written (No space left on device); its lines are buffered"]
    log.append({"step": 6})
    assert [event["step"] for event in read_events(path)] == [1, 2, 3, 4, 5, 6]


def test_lines_that_wait_are_cut_off_by_a_rewind_like_those_on_disk(tmp_path):
    """Otherwise steps that were undone would turn up later."""
    log = EventLog(tmp_path / "events.jsonl", on_trouble=lambda message: None)
    log.append({"step": 1})
    with disk_with(0):
        log.append({"step": 2})
        log.append({"step": 3})
    assert log.truncate_to(2) == 1
    log.append({"step": 3, "again": True})
    assert read_events(log.path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]


def test_without_anyone_to_tell_a_full_disk_is_an_error_and_leaves_no_half_line(tmp_path):
    """Nothing is lost silently."""
    log = EventLog(tmp_path / "events.jsonl")
    with disk_with(5), pytest.raises(OSError, match="No space left"):
        log.append({"step": 1})
    assert log.path.read_bytes() == b""
