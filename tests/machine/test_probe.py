"""Which device a run gets."""

import pytest
import torch

from tunewell.core.errors import UserError
from tunewell.machine.device import probe_device
from tunewell.machine.facts import peak_memory_bytes
from tunewell.training.memory import peak_memory


@pytest.fixture
def gpus(monkeypatch):
    """Let torch say that there are two GPUs of a capability."""

    def pretend(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda name: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name: f"Some GPU {name}")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda name: (10, 16))

    return pretend


def test_auto_is_what_torch_itself_prefers():
    """Guards against a GPU that stands idle."""
    preferred = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    assert probe_device("auto").kind == preferred.type


@pytest.mark.parametrize("wanted", ["cuda:99", "gpu", "CPU", "cuda:x", ""])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(wanted):
    """Guards against a run that falls back to the CPU in silence."""
    with pytest.raises(UserError) as caught:
        probe_device(wanted)
    assert "cpu" in (caught.value.where or "") and "`auto`" in (caught.value.fix or "")


def test_a_name_that_is_no_device_is_told_from_one_that_is_missing(monkeypatch):
    """Guards the message: a typing error and a missing driver need different help."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="`gpu` is not a device"):
        probe_device("gpu")
    with pytest.raises(UserError, match="no device `cuda:1`"):
        probe_device("cuda:1")


@pytest.mark.parametrize(
    ("capability", "is_modern"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 0), True)]
)
def test_bf16_and_flash_come_with_ampere(gpus, capability, is_modern):
    """Guards T4 and V100, which take bf16 and compute it by emulation."""
    gpus(capability)
    device = probe_device("auto")
    assert (device.kind, device.name) == ("cuda", "cuda:1")
    assert (device.has_bf16, device.has_flash) == (is_modern, is_modern)
    assert (device.free_bytes, device.memory_bytes) == (10, 16)


def test_cuda_is_the_device_torch_is_set_to(gpus):
    """Guards processes that a launcher has given a GPU each."""
    gpus((9, 0))
    assert probe_device("cuda").name == "cuda:1"
    assert probe_device("cuda:0").label == "Some GPU cuda:0"


def test_the_cpu_can_be_had_beside_a_gpu(gpus):
    """Guards `device: cpu`."""
    gpus((9, 0))
    assert probe_device("cpu").kind == "cpu"


def test_memory_on_the_cpu_is_the_processs_peak():
    """Guards the memory figure on screen."""
    assert peak_memory(torch.device("cpu")) == peak_memory_bytes()


@pytest.mark.gpu
def test_a_real_gpu_is_described_as_torch_describes_it():
    """Guards the calls that the pretended GPU stands in for."""
    device = probe_device("auto")
    properties = torch.cuda.get_device_properties(device.name)
    assert device.label == properties.name
    assert device.capability == (properties.major, properties.minor)
    assert device.memory_bytes == properties.total_memory
    assert device.has_bf16 == torch.cuda.is_bf16_supported(including_emulation=False)
    held = torch.ones(2**20, device=device.name)
    peak = peak_memory(torch.device(device.name))
    assert peak is not None and held.nbytes <= peak <= properties.total_memory
