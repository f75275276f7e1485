"""Reading a run folder: missing values are unknown, not errors."""

from pathlib import Path

from tunewell.runs.state import StoredRun, value_in


def test_values_of_a_damaged_file_are_unknown(tmp_path: Path) -> None:
    """Files of a run that is being written can hold anything."""
    assert value_in({"a": {"b": "nan"}}, "a", "b") != value_in({"a": {"b": "nan"}}, "a", "b")
    assert value_in({"a": {"b": "text"}}, "a", "b") is None and value_in([], "a") is None
    assert StoredRun(tmp_path / "nothing").status == "unreadable"
