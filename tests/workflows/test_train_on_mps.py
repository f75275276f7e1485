"""Whole runs on a simulated Apple GPU (`mps_on_cpu`), compared with the CPU; real hardware is not tested."""

from pathlib import Path
from typing import Any

import pytest
from lessons import tiny_llama
from tiny import write_tiny_model

import tunewell
from corpora import write_sums
from mps_on_cpu import mps_on_cpu
from tunewell.records.plan import read_plan
from tunewell.runs.result import TrainResult
from tunewell.workflows.export import export

SETTINGS = [
    "train.max_steps=3",
    "train.batch_documents=4",
    "train.threads=1",
    "evaluate.every_steps=2",
    "evaluate.samples=2",
    "evaluate.sample_tokens=4",
    "checkpoints.every_steps=2",
    "data.held_out=0.2",
]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model = write_tiny_model(tmp_path / "model")
    tiny_llama(vocab_size=512, max_position_embeddings=256).save_pretrained(model)
    write_sums(tmp_path, model, model=str(model), num_rows=30)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _train(device: str, *sets: str, **options: Any) -> TrainResult:
    return tunewell.train("tunewell.yaml", sets=[*SETTINGS, f"device={device}", f"run={device}", *sets], **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sets",
    [
        ("method.kind=lora",),
        ("method.kind=lora", "method.modules_to_save=[embed_tokens]", "train.recompute=on"),
        ("method.kind=dora",),
        ("method.kind=lora", "method.quantize=int8"),
        ("method.kind=full", "train.recompute=offload"),
    ],
    ids=" ".join,
)
def test_a_run_on_mps_is_the_run_on_a_cpu(project: Path, sets: tuple[str, ...]) -> None:
    """The verdict of every run on a Mac was missing: the losses of held-out rows were made float64 on the device."""
    alone = _train("cpu", "method.dropout=0", *sets)
    with mps_on_cpu():
        found = _train("mps", "method.dropout=0", *sets)
        exported = export("mps", to=["merged"])
    assert found.losses == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in alone.losses]
    assert [loss for _, loss in found.held_out] == pytest.approx([loss for _, loss in alone.held_out], rel=1e-5)
    assert found.validation is not None and alone.validation is not None, found.notes
    assert found.validation.report.verdict == alone.validation.report.verdict
    assert found.validation.report.machine["device"] == "Apple GPU"
    assert any("micro-batch on mps differ" in note for note in found.notes) and not found.healing
    assert exported.exit_code == 0


@pytest.mark.slow
def test_a_run_on_a_wrong_device_ends_on_the_cpu(project: Path) -> None:
    """The verdict is also computed on the CPU: the wrong device would have answered the questions."""

    def wrong(name: str, out: Any) -> Any:
        return out * 1.01 if name == "aten::mm" else out

    alone = _train("cpu")
    with mps_on_cpu(wrong):
        found = _train("mps")
    assert found.losses == alone.losses
    [entry] = found.healing
    assert entry.name == "wrong-device" and read_plan(project / "mps").device.because == entry.words
    assert found.validation is not None and found.validation.report.machine["device"] != "Apple GPU"
