"""Waiting for the processor: read from the system where it counts it, and zero elsewhere."""

from pathlib import Path

from tunewell.features.profile.processor import ProcessorWait


def test_the_second_number_is_the_time_in_the_run_queue(tmp_path: Path) -> None:
    file = tmp_path / "schedstat"
    file.write_text("2500000000 750000000 12\n", encoding="ascii")
    wait = ProcessorWait(file)
    assert wait.seconds() == 0.75
    file.write_text("2600000000 1750000000 13\n", encoding="ascii")
    assert wait.seconds() == 1.75
    wait.close()
    wait.close()
    assert wait.seconds() == 0.0


def test_a_system_that_does_not_count_it_gives_zero(tmp_path: Path) -> None:
    assert ProcessorWait(tmp_path / "missing").seconds() == 0.0
    (tmp_path / "empty").write_bytes(b"")
    assert ProcessorWait(tmp_path / "empty").seconds() == 0.0
