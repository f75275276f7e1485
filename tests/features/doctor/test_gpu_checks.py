"""GPU checks on recorded facts: driver, nvidia-smi, torch's wheel, GPU generation, bf16, bitsandbytes."""

from dataclasses import replace

import pytest
from recorded import GIB, H200, RTX_5090, T4, V100, sound, with_gpu

from tunewell.features.doctor.facts import ImportTrial, TorchBuild
from tunewell.features.doctor.registry import run_checks


def ids(facts):
    return [finding.id for finding in run_checks(facts)]


def test_a_sound_gpu_has_no_findings():
    """H200 with CUDA 13, and a machine without any GPU."""
    assert ids(with_gpu(H200)) == []
    assert ids(sound()) == []


def test_a_cpu_torch_beside_a_gpu_is_broken_and_gets_a_cuda_wheel():
    """pip installs a CPU build on Windows and with some indexes; training is then tens of times slower."""
    found = run_checks(with_gpu(H200, cuda=None))[0]
    assert (found.id, found.level) == ("torch-cpu-build", "broken")
    assert found.commands[0].endswith('"torch==2.13.0" --index-url https://download.pytorch.org/whl/cu130')


@pytest.mark.parametrize(
    ("cuda", "driver", "is_old"),
    [
        ("13.0", "580.65.06", False),
        ("13.0", "575.57.08", True),
        ("12.8", "525.60.13", False),
        ("12.8", "470.86", True),
        ("11.8", "450.80.02", False),
        ("99.0", "580.65.06", False),
    ],
)
def test_each_cuda_needs_its_driver(cuda, driver, is_old):
    """CUDA 13 needs driver 580, 12 needs 525, 11 needs 450."""
    assert ("driver-too-old" in ids(with_gpu(replace(T4, driver=driver), cuda=cuda))) is is_old


def test_an_old_driver_gets_a_wheel_that_it_runs():
    """Driver 535 runs CUDA 12 only; no wheel runs on driver 400."""
    found = run_checks(with_gpu(replace(H200, driver="535.104.05")))[0]
    assert found.commands[0].endswith("/cu126")
    found = run_checks(with_gpu(replace(H200, driver="400.1")))[0]
    assert found.commands == [] and "no torch wheel" in found.fix


def test_the_driver_is_known_without_nvidia_smi():
    """The fast part does not start nvidia-smi; the kernel module states its version."""
    facts = sound(torch=TorchBuild("2.13.0+cu130", "13.0"))
    facts = replace(facts, machine=replace(facts.machine, smi="not asked", kernel_driver="535.104.05"))
    assert ids(facts) == ["driver-too-old"]


@pytest.mark.parametrize(
    ("gpu", "torch", "cuda", "is_known"),
    [
        (V100, "2.13.0", "13.0", False),
        (V100, "2.13.0", "12.6", True),
        (V100, "2.9.0", "12.8", True),
        (V100, "2.11.0", "12.8", False),
        (RTX_5090, "2.6.0", "12.4", False),
        (RTX_5090, "2.13.0", "13.0", True),
        (RTX_5090, "2.13.0", "12.6", False),
        (T4, "2.13.0", "13.0", True),
    ],
)
def test_each_wheel_has_kernels_for_some_generations(gpu, torch, cuda, is_known):
    """cu130 dropped the V100 (ComfyUI 16438); cu124 does not know the RTX 5090 (pytorch 150733)."""
    assert ("gpu-generation" not in ids(with_gpu(gpu, torch=torch, cuda=cuda))) is is_known


def test_the_list_of_torch_itself_is_preferred():
    """A wheel built by someone else has other kernels than the table says; sm_80 kernels run on 8.6."""
    own = ImportTrial("torch", facts={"arches": ["sm_70", "sm_80"], "cuda_available": True})
    assert ids(replace(with_gpu(V100), imports=[own])) == ["bf16-emulated"]
    assert ids(replace(with_gpu(replace(T4, capability=(8, 6))), imports=[own])) == []
    assert "gpu-generation" in ids(replace(with_gpu(H200), imports=[own]))
    with_ptx = replace(own, facts={"arches": ["sm_80", "compute_90"], "cuda_available": True})
    assert ids(replace(with_gpu(RTX_5090), imports=[with_ptx])) == []


def test_emulated_bf16_is_a_note_unless_the_config_asks_for_it():
    """torch calls bf16 supported on a T4, where it is emulated."""
    facts = with_gpu(T4)
    assert [(one.id, one.level) for one in run_checks(facts)] == [("bf16-emulated", "note")]
    assert run_checks(replace(facts, precision="bf16"))[0].level == "warning"


def test_a_full_gpu_is_a_warning():
    """Another user's process holds the memory."""
    assert ids(with_gpu(replace(H200, free_bytes=5 * GIB))) == ["gpu-busy"]


@pytest.mark.parametrize(
    ("state", "finding"),
    [
        ({"smi": "hangs", "smi_message": "no answer within 10 s"}, "nvidia-smi-hangs"),
        ({"smi": "fails", "smi_message": "couldn't communicate", "num_pci_gpus": 1}, "nvidia-smi-fails"),
        ({"smi": "fails", "smi_message": "Driver/library version mismatch"}, "gpu-driver-mismatch"),
        ({"smi": "unreadable", "smi_message": "hello"}, "nvidia-smi-unreadable"),
        ({"smi": "missing", "num_pci_gpus": 1}, "gpu-no-driver"),
    ],
)
def test_an_nvidia_smi_that_is_missing_hanging_or_wrong_is_named(state, finding):
    """Each has another cause: no driver, a blocked driver, an update without a restart, another program."""
    facts = sound()
    assert ids(replace(facts, machine=replace(facts.machine, **state))) == [finding]


def test_bitsandbytes_needs_a_library_of_torchs_cuda():
    """Quantised loading fails long after the start if there is none; another minor version is accepted."""
    facts = with_gpu(H200)
    assert ids(replace(facts, bitsandbytes=["cpu", "cuda121", "cuda128"])) == ["bitsandbytes-binary"]
    assert ids(replace(facts, bitsandbytes=["cpu", "cuda132"])) == []
    machine = replace(facts.machine, variables={"BNB_CUDA_VERSION": "124"})
    assert ids(replace(facts, machine=machine, bitsandbytes=["cuda130"])) == ["bitsandbytes-override"]


def test_a_gpu_that_torch_does_not_find_is_named():
    """CUDA_VISIBLE_DEVICES hides it, or CUDA cannot start."""
    blind = [ImportTrial("torch", facts={"cuda_available": False, "arches": []})]
    facts = replace(with_gpu(H200), imports=blind)
    assert ids(facts) == ["gpu-not-found"]
    old = replace(with_gpu(replace(H200, driver="535.104.05")), imports=blind)
    assert ids(old) == ["driver-too-old"]  # the reason is known
    machine = replace(facts.machine, variables={"CUDA_VISIBLE_DEVICES": "7"})
    assert ids(replace(facts, machine=machine)) == ["gpu-not-visible"]
