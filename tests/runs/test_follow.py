"""Reading a log in parts: nothing is missing, doubled or half a line, and a log that was cut is noticed."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewell.core.errors import UserError
from tunewell.records.rundir import STOP
from tunewell.runs.follow import START, LogPosition, LogReplaced, StepIndex, end_of, read_new
from tunewell.runs.status import stop_run


@given(parts=st.lists(st.binary(max_size=40), max_size=8))
def test_lines_are_read_once_however_the_log_grows(parts, tmp_path_factory):
    """Guards against torn lines, and lines that are read twice or never."""
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    position, seen = START, b""
    for part in parts:
        with path.open("ab") as file:
            file.write(part)
        data, position = read_new(path, position)
        seen += data
    whole = b"".join(parts)
    assert seen == whole[: whole.rfind(b"\n") + 1]
    assert position == LogPosition.parse(str(position))
    if seen:
        assert position == end_of(path)


def test_a_log_with_the_same_inode_and_other_lines_is_replaced(tmp_path):
    """Guards against a file system that gives the inode of the old log to the new one."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"step": 1}\n')
    _, position = read_new(path)
    path.write_bytes(b'{"step": 9}\n{"step": 2}\n')
    with pytest.raises(LogReplaced):
        read_new(path, position)
    path.unlink()
    with pytest.raises(LogReplaced):
        read_new(path, position)


def test_an_index_follows_a_log_that_is_cut(tmp_path):
    """Guards against offsets of lines that are no longer there."""
    index = StepIndex(tmp_path / "events.jsonl")
    index.update()
    for steps in (range(1, 9), range(1, 4), range(1, 12)):
        lines = [json.dumps({"kind": "step", "step": step, "loss": step / 10}) for step in steps]
        staged = tmp_path / "staged"
        staged.write_text("\n".join([*lines, ""]))
        staged.replace(index.path)
        index.update()
        assert [event["step"] for event in index.events(index.chosen(100))] == list(steps)


def test_a_lock_of_a_process_that_has_ended_is_not_signalled(tmp_path):
    """Guards against a stop that ends another program, which got the number of the run's process."""
    (tmp_path / "plan.json").write_text("{}")
    owner = {"pid": os.getppid(), "host": os.uname().nodename, "since": "2026-11-19 12:00:00+00:00"}
    (tmp_path / ".lock").write_text(json.dumps(owner))
    with pytest.raises(UserError, match="is not running"):
        stop_run(tmp_path)
    assert not (tmp_path / STOP).exists()


def test_a_run_of_another_host_is_not_stopped_here(tmp_path: Path):
    """Guards against a signal to whatever has this number here."""
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / ".lock").write_text(json.dumps({"pid": os.getpid(), "host": "elsewhere", "since": "x"}))
    with pytest.raises(UserError, match="runs on `elsewhere`"):
        stop_run(tmp_path)
