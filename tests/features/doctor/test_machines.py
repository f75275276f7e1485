"""Facts of machines, replayed from files: Colab with a T4, WSL with a 4090, a Mac, an H200."""

from dataclasses import replace

import pytest
from recorded import package, sound
from recorded_system import NAMES, RecordedSystem

from tunewell.features.doctor.facts import Disk, TorchBuild
from tunewell.features.doctor.machine import read_machine
from tunewell.features.doctor.registry import run_checks

WITH_PACKAGES = [name for name in NAMES if RecordedSystem(name).doctor]


@pytest.mark.parametrize("name", WITH_PACKAGES)
def test_a_recorded_machine_has_its_findings_and_no_others(name):
    """A check that is right on one machine may be noise on another."""
    system = RecordedSystem(name)
    recorded = system.doctor
    machine = read_machine({}, system=system)
    facts = replace(
        sound(),
        packages=[package(name, version) for name, version in recorded["versions"].items()],
        torch=TorchBuild(*recorded["torch"]),
        machine=replace(machine, disks=[Disk("the run folder", "/project", recorded["disk_free_bytes"])]),
        imports=None,
    )
    assert {one.id: one.level for one in run_checks(facts)} == recorded["found"]
    if machine.kernel_driver:
        assert machine.kernel_driver == machine.gpus[0].driver


def test_four_machines_have_recorded_packages():
    assert len(WITH_PACKAGES) == 4


def test_the_fast_part_does_not_start_nvidia_smi():
    """It may hang, and `train` runs the fast part before every run."""
    machine = read_machine({}, is_fast=True, system=RecordedSystem("h200"))
    assert machine.smi == "not asked" and machine.gpus == () and machine.kernel_driver == "580.159.04"
