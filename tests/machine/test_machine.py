"""The facts of machines that are not here, replayed from recorded files."""

import pytest
from recorded_system import RecordedSystem

from tunewell.core.errors import UserError
from tunewell.machine.cards import find_card, known_cards, match_card
from tunewell.machine.machine import read_machine

GiB = 1 << 30


def test_wsl_is_seen_with_its_gpu():
    """WSL halves the memory and slows Windows drives; a plan that takes it for Linux says nothing of both."""
    machine = read_machine(RecordedSystem("wsl"))
    assert machine.is_wsl and not machine.is_colab
    device = machine.device("auto")
    assert (device.kind, device.label, device.has_bf16) == ("cuda", "NVIDIA GeForce RTX 3060", True)
    assert device.free_bytes == 10_950 << 20
    assert machine.gpus[0].users == ()  # WSL does not tell which processes use the GPU


def test_a_colab_t4_has_no_bf16():
    """torch calls bf16 supported on a T4 and emulates it."""
    machine = read_machine(RecordedSystem("colab_t4"))
    assert machine.is_colab
    device = machine.device("auto")
    assert (device.kind, device.has_bf16, device.has_flash) == ("cuda", False, False)


def test_other_users_of_a_gpu_are_named():
    """A GPU that is half full is the most frequent reason for an unexpected out of memory."""
    machine = read_machine(RecordedSystem("t4_busy"))
    assert machine.gpus[0].users == ("python (8.7 GiB)",)
    assert machine.device("cuda").free_bytes == 6_204 << 20


def test_a_mac_shares_its_memory_with_the_gpu():
    """Metal recommends two thirds of 16 GB; the rest belongs to other programs."""
    machine = read_machine(RecordedSystem("mac"))
    device = machine.device("auto")
    assert machine.is_mac and machine.cpu.label == "Apple M2 Pro"
    assert device.kind == "mps" and device.memory_bytes == int(16 * GiB * 2 / 3)
    assert machine.cpu.free_bytes == (61_734 + 312_990 + 5_138 + 2_410) * 16_384


def test_a_container_limits_the_memory():
    """The machine has 63 GiB, but the container is killed at 4 GiB."""
    machine = read_machine(RecordedSystem("container"))
    assert machine.container_bytes == machine.cpu.memory_bytes == 4 * GiB
    assert machine.cpu.free_bytes == 3 * GiB + 100 * (1 << 20)
    assert machine.device("cuda").kind == "cpu"


def test_hidden_gpus_are_not_planned_for(monkeypatch):
    """`CUDA_VISIBLE_DEVICES=` hides all GPUs from torch."""
    system = RecordedSystem("wsl")
    system._facts["variables"]["CUDA_VISIBLE_DEVICES"] = ""
    assert read_machine(system).gpus == ()


def test_cards_are_found_by_their_names_and_labels():
    """`A100-SXM4-80GB` must not become the card with 40 GB."""
    labels = {
        "NVIDIA A100-SXM4-80GB": "a100-80",
        "NVIDIA A100-PCIE-40GB": "a100-40",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA GeForce RTX 4070 Ti": "4070ti",
        "Tesla T4": "t4",
    }
    assert {label: (card.name if (card := match_card(label)) else None) for label in labels} == labels
    assert match_card("NVIDIA GeForce RTX 3080 Ti") is None
    assert find_card("RTX 4090").name == "4090"
    with pytest.raises(UserError) as error:
        find_card("t5")
    assert "`t4`" in (error.value.fix or "")


def test_tensor_rates_are_multiples_of_the_fp32_rate():
    """A figure from another column (fp16 accumulation, sparsity, another card) breaks the ratio of its generation."""
    for card in known_cards().values():
        ratio = card.fp16 / card.fp32
        if card.capability in ((8, 6), (8, 9), (12, 0)):
            is_half = "GeForce" in card.label or card.name == "a10g"
            assert ratio == pytest.approx(2 if is_half else 4, rel=0.02), card.name
        elif card.capability[0] == 7:  # V100 and T4: 8 times; the 2080 Ti has half of that
            assert ratio == pytest.approx(4 if "GeForce" in card.label else 8, rel=0.02), card.name
        else:
            assert 14 < ratio < 31, card.name


def test_every_card_has_a_source_and_plausible_figures():
    """A rate in the wrong unit would be off by a thousand."""
    for card in known_cards().values():
        assert card.source
        assert 8 * GiB < card.memory_bytes < 300 * GiB
        assert 1e11 < card.bytes_per_second < 2e13
        assert 5e12 < card.fp32 < card.fp16 <= 3e15
        assert (card.bf16 is None) == (card.capability < (8, 0))
