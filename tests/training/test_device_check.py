"""An Apple GPU is compared with the CPU before the first step; `mps_on_cpu` simulates one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import Remembering, make_run

from mps_on_cpu import mps_on_cpu
from tunewell.machine.facts import DeviceFacts, cpu_facts
from tunewell.records.healing import read_healing
from tunewell.records.plan import read_plan
from tunewell.training import device_check
from tunewell.training.device_check import check_device
from tunewell.training.distributed import World
from tunewell.training.engine import train
from tunewell.training.run import Run

APPLE = DeviceFacts("mps", "mps", "Apple GPU", 16 << 30, 16 << 30, has_bf16=False, has_flash=False)


def _checked(folder: Path, change: Callable[[str, Any], Any] | None = None, **config: Any) -> tuple[Run, str]:
    """Build a run, check its device, and take two of its steps there. Return the run and the device of the check."""
    run = make_run(folder, plan={"device": "mps", "num_steps": 2}, config=config)
    run.about = replace(run.about, device="mps")
    with mps_on_cpu(change):
        run.learner.change(precision=None, device="mps")
        parts: Any = SimpleNamespace(plan=run.plan, folder=folder, world=World())
        found = check_device(parts, run, APPLE)
        assert run.learner.device.type == found.kind
        if change is None:
            assert train(run, handle_signals=False).status == "finished"
    run.close()
    return run, found.kind


def _notes(run: Run) -> str:
    assert isinstance(run.listener, Remembering)
    return "\n".join(run.listener.notes)


@pytest.mark.parametrize("config", [{}, {"method": {"rank": 4, "dropout": 0.5}}], ids=["plain", "dropout"])
def test_a_device_that_computes_the_same_is_used(tmp_path: Path, config: dict[str, Any]) -> None:
    """Dropout draws other numbers on a GPU, which is not a difference between the devices."""
    run, kind = _checked(tmp_path, **config)
    assert kind == "mps" and "check passed: the loss and the gradient norms of a micro-batch on mps" in _notes(run)
    alone = make_run(tmp_path / "cpu", plan={"num_steps": 2}, config=config)
    train(alone, handle_signals=False)
    assert isinstance(run.listener, Remembering) and isinstance(alone.listener, Remembering)
    assert [step.loss for step in run.listener.steps] == pytest.approx([step.loss for step in alone.listener.steps])
    alone.close()


def _scaled(kernel: str) -> Callable[[str, Any], Any]:
    return lambda name, out: out * 1.01 if name == kernel else out


def _unsupported(name: str, out: Any) -> Any:
    if name == "aten::embedding":
        raise NotImplementedError(
            "The operator 'aten::embedding' is not currently implemented for the MPS device.\nSee"
        )
    return out


def _broken(name: str, out: Any) -> Any:
    return out * torch.nan if name == "aten::embedding" else out


def _backward_only(name: str, out: Any) -> Any:
    """Return the wrong result of a kernel that only the backward pass uses."""
    return out * 0 if name == "aten::silu_backward" else out


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_scaled("aten::mm"), "rounding explains at most 1e-03"),
        (_scaled("aten::embedding"), "rounding explains at most 1e-03"),
        (_backward_only, "by 0e+00 and"),
        (_broken, "by nan and nan"),
        (_unsupported, "mps cannot compute a step: The operator 'aten::embedding' is not currently implemented"),
    ],
)
def test_a_device_whose_results_differ_is_not_used(
    tmp_path: Path, change: Callable[[str, Any], Any], reason: str
) -> None:
    """A wrong kernel shows only as a loss that does not fall, after hours."""
    run, kind = _checked(tmp_path, change)
    assert kind == "cpu" and run.about.device == "cpu"
    [entry] = read_healing(tmp_path)
    assert isinstance(run.listener, Remembering)
    assert [entry] == run.listener.healing and entry.severity == "fault" and reason in entry.words
    device = read_plan(tmp_path).device
    assert device == run.plan.device and device.value == "cpu" and device.because == entry.words
    assert all(parameter.grad is None for parameter in run.learner.parameters.values())


def test_a_model_that_does_not_fit_twice_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An Apple GPU shares the main memory: a second copy for the CPU would have used swap."""
    monkeypatch.setattr(device_check, "cpu_facts", lambda: replace(cpu_facts(), free_bytes=1000))
    run, kind = _checked(tmp_path)
    assert kind == "mps" and "a second copy of the model needs" in _notes(run) and "1,000 bytes are free" in _notes(run)


def test_a_check_that_is_out_of_memory_leaves_the_run_to_its_own_remedies(tmp_path: Path) -> None:
    def full(name: str, out: Any) -> Any:
        if name == "aten::embedding":
            raise RuntimeError("MPS backend out of memory (MPS allocated: 17 GB). Tried to allocate 1 GB")
        return out

    run, kind = _checked(tmp_path, full)
    assert kind == "mps" and "the GPU (mps) was not checked against the CPU: out of memory" in _notes(run)


def test_the_simulated_gpu_refuses_what_an_apple_gpu_refuses() -> None:
    """A simulated GPU that allows more than a Mac makes its tests worthless."""
    with mps_on_cpu():
        one, here = torch.ones(3, device="mps"), torch.ones(3)
        layer = torch.nn.Linear(3, 3).to("mps")
        layer(one[None]).sum().backward()
        for tensor in (one + 1, one[1:], torch.zeros_like(one), layer.weight.grad, here.to("mps"), here.to(one)):
            assert tensor is not None and str(tensor.device) == "mps:0"
        assert str(one.cpu().device) == str(one.to("cpu").double().device) == "cpu"
        for refused in (
            one.double,
            lambda: one.to(torch.float64),
            lambda: here.double().to("mps"),
            lambda: torch.zeros(1, dtype=torch.float64, device="mps"),
            one.numpy,
        ):
            with pytest.raises(TypeError):
                refused()
        for refused in (lambda: one + here, one.pin_memory, lambda: torch.compile(layer)):
            with pytest.raises(RuntimeError):
                refused()
    assert str(one.device) == "cpu"
