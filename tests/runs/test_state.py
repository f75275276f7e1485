"""The one reader of a run folder: it follows a log that grows, and survives one that is cut."""

import json
from pathlib import Path

from tunewell.runs.state import StoredRun, value_in


def write(path: Path, *steps: int, end: str = "\n") -> None:
    lines = [json.dumps({"kind": "step", "step": step, "loss": "nan" if step == 3 else 1.0}) for step in steps]
    path.write_text("\n".join(lines) + end)


def test_a_growing_log_is_read_once(tmp_path: Path) -> None:
    """A page that shows a run for hours must not read its whole log each second, nor half a line."""
    log = StoredRun(tmp_path).log()
    assert log.new() == []
    for wrote, end, new in (([1], "\n", [1]), ([1, 2, 3], "", [2]), ([1, 2, 3], "\n", [3]), ([1, 2, 3], "\n", [])):
        write(tmp_path / "events.jsonl", *wrote, end=end)
        assert [event["step"] for event in log.new()] == new


def test_a_log_that_a_rewind_has_cut_is_read_again(tmp_path: Path) -> None:
    """Steps of before the rewind would otherwise stay on the screen beside those that replaced them."""
    log = StoredRun(tmp_path).log()
    write(tmp_path / "events.jsonl", 1, 2, 3, 4)
    assert len(log.new()) == 4
    write(tmp_path / "events.jsonl", 1, 2)
    assert [event["step"] for event in log.new()] == [1, 2]
    write(tmp_path / "events.jsonl", 1, 7, 8, 9)
    assert [event["step"] for event in log.new()] == [1, 7, 8, 9]


def test_values_of_a_damaged_file_are_unknown(tmp_path: Path) -> None:
    """Files of a run that is being written can hold anything."""
    assert value_in({"a": {"b": "nan"}}, "a", "b") != value_in({"a": {"b": "nan"}}, "a", "b")
    assert value_in({"a": {"b": "text"}}, "a", "b") is None and value_in([], "a") is None
    assert StoredRun(tmp_path / "nothing").status == "unreadable"
