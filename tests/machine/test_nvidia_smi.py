"""nvidia-smi: its table, and programs of its name that hang, fail or print something else."""

import stat

import pytest

from tunewell.machine.machine import read_machine
from tunewell.machine.nvidia_smi import parse_gpus, query_gpus
from tunewell.machine.system import System


def test_the_table_of_nvidia_smi_is_parsed():
    """Fields that a GPU does not report are `[N/A]`; an old driver does not know the capability of a T4."""
    text = (
        "0, NVIDIA H200, 143771, 143000, 9.0, 580.159.04, 3\n"
        "1, GRID K1, [N/A], [N/A], [N/A], 367.134, [N/A]\n"
        "2, Tesla T4, 15360, 15095, [N/A], 418.67, 0\n"
    )
    answer = parse_gpus(text)
    assert answer.state == "ok" and answer.problem is None
    h200, grid, t4 = answer.gpus
    assert (h200.capability, h200.free_bytes) == ((9, 0), 143_000 << 20)
    assert grid.capability is None and grid.memory_bytes == 0
    assert t4.capability == (7, 5) and t4.driver == "418.67"
    assert parse_gpus("").state == "ok" and parse_gpus("").gpus == ()


@pytest.mark.parametrize(
    ("script", "state", "problem"),
    [
        ("echo '0, Tesla T4, 15360, 14900, 7.5, 580.65.06, 0'", "ok", None),
        ("exec sleep 30", "hangs", "did not answer: no answer within 1 s"),
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "fails", "version mismatch"),
        ("exit 9", "fails", "exit code 9"),
        ("echo 'usage: not the real one'", "unreadable", "something else than its table"),
        ("echo '0, Tesla T4, 15360, 99999, 7.5, 550.54, 0'", "unreadable", "something else than its table"),
        ("printf '\\377\\376'", "unreadable", "something else than its table"),
        ("echo '0, Tesla T4, [N/A], [N/A], 7.5, 550.54, 0'", "ok", "does not report the memory of Tesla T4"),
    ],
)
def test_a_program_that_does_not_work_is_reported(tmp_path, monkeypatch, script, state, problem):
    """The real one may hang in the kernel, fail, or be something else; it must neither hang `plan` nor end it."""
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("tunewell.machine.nvidia_smi._SECONDS", 1.0)
    assert query_gpus(System()).state == state
    machine = read_machine(System())
    assert len(machine.gpus) == (problem is None)
    assert problem is None or problem in (machine.gpu_problem or "")


def test_a_missing_nvidia_smi_is_no_error(tmp_path, monkeypatch):
    """Most machines have none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert query_gpus(System()).state == "missing"
    assert read_machine(System()).gpu_problem is None
