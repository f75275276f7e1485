"""Packages that a notebook kernel holds in an older version than the installed one."""

import sys
from types import ModuleType

from recorded import sound

from tunewell.features.doctor.kernel import held_in_this_process
from tunewell.features.doctor.registry import run_checks


def test_a_module_of_another_version_is_held(monkeypatch):
    """pip replaced the files; the kernel still runs the old code."""
    module = ModuleType("unsloth")
    module.__version__ = "2026.9.4"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "unsloth", module)
    assert held_in_this_process({"unsloth": "2026.10.9"}) == [("unsloth", "2026.9.4", "2026.10.9")]
    assert held_in_this_process({"unsloth": "2026.9.4+local"}) == []
    assert held_in_this_process({}) == []


def test_a_stale_kernel_is_broken_and_must_be_restarted():
    """No command can restart a kernel."""
    first = run_checks(sound(held_by_kernel=[("numpy", "1.26.4", "2.4.6")]))[0]
    assert (first.id, first.commands) == ("notebook-kernel-stale", ())
    assert "numpy 1.26.4, installed 2.4.6" in first.what
