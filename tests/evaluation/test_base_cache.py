"""The base model answers the same questions once; whatever could change its answers makes it answer again."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from sick_models import WORDINGS, colour_rows, run_of, write_base, write_jsonl, write_tokenizer

from tunewell.evaluation.base_cache import BaseCache, BaseQuestions
from tunewell.evaluation.session import EvaluationSession
from tunewell.inference.runtime import TextDocuments
from tunewell.runs.result import TrainResult
from tunewell.workflows.validate import validate

SETS = {"train.max_steps": 4, "evaluate.every_steps": 4, "verdict.after_training": False, "verdict.questions": 6}
MEASURED = ("held_out", "everyday", "base_tally", "tuned_tally", "exchanges", "change", "verdict", "by_source")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("cached")
    write_base(folder / "base", write_tokenizer(folder / "tokenizer"))
    write_jsonl(folder / "rows.jsonl", colour_rows(WORDINGS[:4]))
    write_jsonl(folder / "held.jsonl", colour_rows(WORDINGS[9:]))
    return run_of(folder, folder / "base", sets=SETS)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The models that were measured, with an empty cache."""
    monkeypatch.setenv("TUNEWELL_CACHE", str(tmp_path / "cache"))
    names: list[str] = []
    measure = EvaluationSession._measure

    def counted(self: EvaluationSession, model: Any, runtime: Any, name: str) -> Any:
        names.append(name)
        return measure(self, model, runtime, name)

    monkeypatch.setattr(EvaluationSession, "_measure", counted)
    return names


def test_the_second_evaluation_has_the_same_numbers_without_measuring_the_base(
    run: TrainResult, measured: list[str], tmp_path: Path
) -> None:
    """Guards against a cache that rounds, reorders or loses something."""
    first, second = (validate(run.run, out=tmp_path / name).report for name in ("one", "two"))
    assert measured == ["tuned", "base", "tuned"]
    assert (first.base_measured_at is None, second.base_measured_at is None) == (True, False)
    for name in MEASURED:
        assert getattr(first, name) == getattr(second, name), name
    assert first.base_tally is not None and first.held_out is not None and first.held_out.base is not None


def test_a_full_model_and_an_adapter_share_the_base(run: TrainResult, measured: list[str], tmp_path: Path) -> None:
    """A fully fine-tuned model has a separate base, which is then not even loaded."""
    validate(run.run, out=tmp_path / "one")
    folder = run.run.parent
    full = run_of(
        folder, folder / "base", out="full", sets={**SETS, "method.kind": "full", "corpus": str(folder / "run-corpus")}
    )
    again = validate(full.run, out=tmp_path / "two").report
    assert measured == ["tuned", "base", "tuned"]
    assert again.held_out is not None and again.held_out.base is not None


def test_every_input_of_an_answer_is_in_the_key(tmp_path: Path) -> None:
    """Guards against a stale answer: each change of an input alone must give another cache entry."""
    base = write_base(tmp_path / "base", write_tokenizer(tmp_path / "tokenizer"))
    model = SimpleNamespace(
        ref=SimpleNamespace(base=str(base), start=None, plan=None, added_tokens=(), loaded=None),
        tokenizer=SimpleNamespace(added_by_us=()),
        precision="fp32",
        device=SimpleNamespace(label="CPU"),
        computed_by="",
    )
    texts = TextDocuments([[1, 2, 3], [4, 5]], longest=8)
    asked = BaseQuestions(texts, None, texts, [[1, 2], [3]], [[4]], [[5]], 8, [0], 32, None)
    changes: list[dict[str, Any]] = [
        {"split": TextDocuments([[1, 2, 3], [4, 6]], longest=8)},
        {"split": None},
        {"max_documents": 1},
        {"everyday": TextDocuments([[1, 2]], longest=8)},
        {"prompts": [[1], [2, 3]]},
        {"prompts": [[1, 2]]},
        {"hinted": [[6]]},
        {"ordinary": [[6]]},
        {"num_compared": 4},
        {"stop_ids": [0, 1]},
        {"answer_tokens": 33},
        {"batch_size": 2},
    ]
    paths = [BaseCache.of(cast(Any, model), replace(asked, **change))._path for change in [{}, *changes]]
    for name, value in (("precision", "bf16"), ("device", SimpleNamespace(label="H200")), ("computed_by", "llama.cpp")):
        other = SimpleNamespace(**{**model.__dict__, name: value})
        paths.append(BaseCache.of(cast(Any, other), asked)._path)
    for file, old, new in (("config.json", "rope", "Rope"), ("model.safetensors", "", "")):
        data = (base / file).read_bytes()
        (base / file).write_bytes(data.replace(old.encode(), new.encode()) if old else data[:-1] + b"\x01")
        paths.append(BaseCache.of(cast(Any, model), asked)._path)
    assert None not in paths and len(set(paths)) == len(paths)
    assert BaseCache.of(cast(Any, model), asked)._path == paths[-1], "the same inputs have the same entry"


@pytest.mark.slow
def test_what_changes_an_answer_invalidates_the_cache(
    run: TrainResult, measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Questions, decoding settings, precision of the weights, a damaged entry, and the user's own wish."""

    def is_measured_again(**options: Any) -> bool:
        measured.clear()
        validate(run.run, out=tmp_path / "report", **options)
        return "base" in measured

    assert is_measured_again() and not is_measured_again()
    assert is_measured_again(sets=["verdict.questions=5"])
    assert is_measured_again(sets=["verdict.answer_tokens=7"])
    assert is_measured_again(sets=["verdict.max_documents=3"])
    assert is_measured_again(sets=["verdict.reuse_base=false"])
    write_jsonl(tmp_path / "other.jsonl", colour_rows(WORDINGS[8:9]))
    assert is_measured_again(data=tmp_path / "other.jsonl")
    assert not is_measured_again()
    for entry in (tmp_path / "cache" / "base").glob("*.npz"):
        entry.write_bytes(entry.read_bytes()[:100])
    assert is_measured_again() and not is_measured_again()
    monkeypatch.setattr("tunewell.evaluation.base_cache._code_stamp", lambda: "another version of the code")
    assert is_measured_again()


@pytest.mark.slow
def test_changed_weights_and_templates_invalidate_the_cache(
    run: TrainResult, measured: list[str], tmp_path: Path
) -> None:
    """The base is edited in place, once its weights and once its chat template, as a user might."""
    base, rows = tmp_path / "base", tmp_path / "rows.jsonl"
    shutil.copytree(run.run.parent / "base", base)
    adapter = run.run / "checkpoints" / "step-000004"
    write_jsonl(rows, colour_rows(WORDINGS[9:]))

    def is_measured_again() -> bool:
        measured.clear()
        validate(adapter_folder, base=str(base), data=rows, out=tmp_path / "report")
        return "base" in measured

    adapter_folder = tmp_path / "adapter"
    shutil.copytree(adapter, adapter_folder)
    assert is_measured_again() and not is_measured_again()
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] *= 1.5
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    assert is_measured_again() and not is_measured_again()
    path = base / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = "{{ 'Hello. ' }}" + config["chat_template"]
    path.write_text(json.dumps(config))
    assert is_measured_again() and not is_measured_again()
