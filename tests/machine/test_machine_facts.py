"""What machine this is, against psutil."""

import subprocess
import sys

import numpy as np
import psutil
import pytest
import torch

from tunewell.machine import facts
from tunewell.machine.facts import (
    cpu_facts,
    has_real_bf16,
    installed_versions,
    physical_cores,
    usable_cores,
)

ZEN_3 = "flags\t\t: fpu sse2 avx avx2 fma f16c\n"
ICE_LAKE = "flags\t\t: fpu avx2 avx512f avx512bw avx512_vnni\n"
COOPER_LAKE = "flags\t\t: fpu avx2 avx512f avx512_vnni avx512_bf16\n"
SAPPHIRE_RAPIDS = "processor\t: 0\nflags\t\t: fpu avx2 avx512f amx_bf16 amx_tile amx_int8\n"


def test_the_machine_is_the_one_psutil_sees():
    """Guards the figures a plan is made from."""
    device = cpu_facts()
    assert usable_cores() <= psutil.cpu_count()
    assert device.memory_bytes is not None and device.memory_bytes <= psutil.virtual_memory().total
    assert device.free_bytes is not None and 0 < device.free_bytes <= device.memory_bytes
    assert installed_versions(["torch", "not-installed"]) == {"torch": torch.__version__}
    assert len(device.label) > 2


@pytest.mark.parametrize(
    ("cpuinfo", "is_real"),
    [(ZEN_3, False), (ICE_LAKE, False), (COOPER_LAKE, True), (SAPPHIRE_RAPIDS, True), ("", False)],
)
def test_only_units_for_bf16_make_bf16_real(cpuinfo, is_real):
    """Guards against bf16 that torch computes by emulation, 50 times slower: AVX-512 alone is not enough."""
    assert has_real_bf16(cpuinfo) is is_real


def test_the_cpu_is_a_device_without_a_flash_kernel():
    """Guards the plan of a run on the CPU."""
    device = cpu_facts()
    assert (device.kind, device.name, device.has_flash) == ("cpu", "cpu", False)


@pytest.mark.parametrize(
    ("quota", "most"), [("100000 100000", 1), ("150000 100000", 2), ("max 100000", 10**6), ("", 10**6)]
)
def test_a_containers_share_of_the_cores_counts(tmp_path, monkeypatch, quota, most):
    """Guards containers on large machines: a process limited to one core must not start one thread for each of 64."""
    monkeypatch.setattr(facts, "num_cores", lambda: 64)
    (tmp_path / "cpu.max").write_text(quota + "\n", encoding="utf-8")
    assert usable_cores(str(tmp_path)) == min(64, most)


def test_a_containers_memory_is_all_there_is(tmp_path):
    """Guards containers on large machines: their limit kills, whatever the machine has left."""
    (tmp_path / "memory.max").write_text("1073741824\n", encoding="utf-8")
    (tmp_path / "memory.current").write_text("805306368\n", encoding="utf-8")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 268435456\n", encoding="utf-8")
    assert facts.main_memory(cgroup=str(tmp_path)) == (2**30, 2**29, 2**30)


def test_second_threads_are_not_cores():
    """Guards the candidates for the number of threads."""
    four_threads = "".join(
        f"processor\t: {n}\nphysical id\t: 0\ncore id\t\t: {core}\n\n" for n, core in enumerate((0, 1, 0, 1))
    )
    assert physical_cores(four_threads) == 2
    assert physical_cores("") is None
    assert physical_cores() == psutil.cpu_count(logical=False)


def test_the_peak_of_memory_is_at_least_what_is_held_and_grows():
    """Guards the memory figure of a run on the CPU."""
    check = "from tunewell.machine.facts import peak_memory_bytes as peak; before = peak()"
    check += "; held = bytearray(b'x') * 2**28; del held; print(before, peak())"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    before, after = (int(word) for word in done.stdout.split())
    assert before + 2**27 < after < before + 2**29


def test_a_small_child_of_a_large_parent_has_a_small_peak():
    """Guards against the parent's peak, which getrusage hands down to a child."""
    held = np.ones(2**28, dtype=np.uint8)
    check = "from tunewell.machine.facts import peak_memory_bytes; print(peak_memory_bytes())"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) < held.nbytes
