"""Facts of machines, replayed from files: Colab with a T4, WSL with a 4090, a Mac, an H200."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from recorded import package, sound

from tunewell.environment.facts import Disk, Machine, TorchBuild
from tunewell.environment.machine import _kernel_driver, parse_gpus
from tunewell.environment.registry import run_checks

FILES = sorted((Path(__file__).parent / "machines").glob("*.json"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recorded_machine_has_its_findings_and_no_others(file):
    """A check that is right on one machine may be noise on another."""
    text = json.loads(file.read_text(encoding="utf-8"))
    state, message, gpus = parse_gpus(text["nvidia_smi"]) if text["nvidia_smi"] else ("missing", "", [])
    machine = Machine(
        smi=state,
        smi_message=message,
        gpus=gpus,
        kernel_driver=_kernel_driver(text["kernel_module"]),
        is_wsl=text.get("is_wsl", False),
        memory_bytes=text["memory_bytes"],
        free_memory_bytes=text["free_memory_bytes"],
        shared_memory_bytes=text["shared_memory_bytes"],
        disks=[Disk("the run folder", "/project", text["disk_free_bytes"])],
    )
    facts = replace(
        sound(),
        packages=[package(name, version) for name, version in text["versions"].items()],
        torch=TorchBuild(*text["torch"]),
        machine=machine,
        imports=None,
    )
    assert {one.id: one.level for one in run_checks(facts)} == text["found"]
    if text["kernel_module"]:
        assert machine.kernel_driver == gpus[0].driver
