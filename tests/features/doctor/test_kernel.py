"""Packages that a notebook kernel holds in an older version than the installed one."""

import os
import sys
from types import ModuleType

import pytest
from recorded import sound

from tunewell.features.doctor.kernel import held_by_parent_kernel, held_in_this_process
from tunewell.features.doctor.registry import run_checks


def test_a_module_of_another_version_is_held(monkeypatch):
    """pip replaced the files; the kernel still runs the old code."""
    module = ModuleType("unsloth")
    module.__version__ = "2026.9.4"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "unsloth", module)
    assert held_in_this_process({"unsloth": "2026.10.9"}) == [("unsloth", "2026.9.4", "2026.10.9")]
    assert held_in_this_process({"unsloth": "2026.9.4+local"}) == []
    assert held_in_this_process({}) == []


@pytest.mark.parametrize("is_deleted", [True, False])
def test_replaced_libraries_of_the_parent_kernel_are_seen(tmp_path, is_deleted):
    """`!tunewell doctor` runs beside the kernel; the kernel's maps list a replaced library as deleted."""
    shell, kernel = tmp_path / str(os.getppid()), tmp_path / "4242"
    for folder, command, parent in ((shell, "sh -c", 4242), (kernel, "python -m ipykernel_launcher", 1)):
        folder.mkdir()
        (folder / "cmdline").write_text(command)
        (folder / "status").write_text(f"Name:\tx\nPPid:\t{parent}\n")
    end = " (deleted)" if is_deleted else ""
    path = "/usr/lib/python3/dist-packages/numpy/_core/_multiarray_umath.cpython-311.so"
    (kernel / "maps").write_text(f"7f00-7f01 r-xp 00000000 08:01 123 {path}{end}\n7f02-7f03 rw-p 0 00:00 0\n")
    held = held_by_parent_kernel({"numpy": "2.4.6"}, proc=tmp_path)
    assert held == ([("numpy", "an older version", "2.4.6")] if is_deleted else [])


def test_outside_of_a_notebook_nothing_is_held(tmp_path):
    """A shell is not a kernel."""
    assert held_by_parent_kernel({"numpy": "2.4.6"}, proc=tmp_path) == []


def test_a_stale_kernel_is_broken_and_must_be_restarted():
    """No command can restart a kernel."""
    first = run_checks(sound(held_by_kernel=[("numpy", "1.26.4", "2.4.6")]))[0]
    assert (first.id, first.commands) == ("notebook-kernel-stale", ())
    assert "numpy 1.26.4, installed 2.4.6" in first.what
