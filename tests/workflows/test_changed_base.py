"""A base model that changed after training is named by every command; one that only moved or was saved again is not."""

import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import write_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import tunewell
from corpora import write_rows
from tunewell.cli.main import main
from tunewell.core.errors import UserError
from tunewell.data.tokenizers.load import load_tokenizer
from tunewell.models import base_content
from tunewell.records.base_model import BASE
from tunewell.records.parity import PROOF
from tunewell.runs.resolve import resolve_model

pytestmark = pytest.mark.uses("compare", "retrieval", "serve")  # they load models too

_FAST: dict[str, Any] = {
    "device": "cpu",
    "train": {"max_steps": 1, "batch_documents": 4, "threads": 1},
    "evaluate": {"every_steps": 1, "samples": 0},
    "verdict": {"after_training": False, "questions": 2, "answer_tokens": 2},
}


def _train(out: str, model: str = "base", *, resume: bool = False, **changes: Any) -> Any:
    config = {**_FAST, "model": model, "corpus": f"corpus-{out}", "data": {"sources": "rows.jsonl"}, **changes}
    return tunewell.train(config, out=out, progress=False, resume=resume)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base model, a LoRA run, a full run, an index, and rows."""
    folder = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    num_tokens = load_tokenizer(write_tiny_model(folder / "base")).vocab_size
    config = LlamaConfig(vocab_size=num_tokens, rms_norm_eps=1e-5, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    write_rows(folder / "rows.jsonl", [{"question": f"What is {n} and {n}?", "answer": f"{2 * n}."} for n in range(24)])
    (folder / "docs").mkdir()
    (folder / "docs" / "fees.md").write_text("The fee is 12 pounds a term.\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert _train("run", method={"kind": "lora"}).exit_code == 0
        assert _train("full", method={"kind": "full"}).exit_code == 0
        assert main(["index", "docs"]) == 0
    return folder


@pytest.fixture
def project(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder, so that each test can damage it."""
    folder = Path(shutil.copytree(trained, tmp_path / "project"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    return folder


def _change_weights(base: Path) -> None:
    path = base / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4000:-2000] = b"<" * 2000  # still finite numbers
    path.write_bytes(data)


def _swap_tokens(base: Path) -> None:
    path = base / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    first, second = [word for word, number in words.items() if number in (300, 301)]
    words[first], words[second] = words[second], words[first]
    path.write_text(json.dumps(tokenizer))


def _remove_merge(base: Path) -> None:
    path = base / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["merges"].pop()
    path.write_text(json.dumps(tokenizer))


def _change_config(base: Path) -> None:
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.1}))


def _change_rope(base: Path) -> None:
    path = base / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["rope_theta"] = 5000.0
    path.write_text(json.dumps(config))


_CHANGES: list[tuple[Callable[[Path], None], str]] = [
    (_change_weights, "tensors changed: `model."),
    (_swap_tokens, "the vocabulary of `tokenizer.json`"),
    (_remove_merge, "the rules of `tokenizer.json`"),
    (_change_config, "`rms_norm_eps` in `config.json` is 0.1, not 1e-05"),
    (_change_rope, "`rope_parameters.rope_theta` in `config.json` is 5000.0, not 10000.0"),
]
_COMMANDS = [
    "validate run",
    "export run --to adapter,merged --out exported",
    "chat run",
    "serve run --port 0",
    "ask fee --model run",
    "compare run --index index",
]


@pytest.mark.parametrize(("change", "named"), _CHANGES, ids=lambda value: getattr(value, "__name__", ""))
def test_every_command_refuses_a_base_model_that_changed_after_training(
    project: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Path], None], named: str
) -> None:
    """An export on a changed base was PROVEN, and `validate` gave other figures without a warning."""
    change(project / "base")
    for command in _COMMANDS:
        assert main(command.split()) == 2, command
        shown = " ".join(capsys.readouterr().err.split())
        assert "the base model `base` has changed since `run, step 1` was trained on it" in shown and named in shown, (
            command,
            shown,
        )
        assert "fix:" in shown
    with pytest.raises(UserError, match="has changed since"):
        tunewell.load("run")
    with pytest.raises(UserError, match="has changed since"):
        _train("next", "run")
    with pytest.raises(UserError, match="has changed since"):
        _train("run", resume=True, method={"kind": "lora"})
    assert not (project / "exported").exists() and not (project / "next").exists()


def test_the_same_model_elsewhere_or_saved_again_is_accepted(project: Path) -> None:
    """Paths, times, shards and keys of other library versions are not the model."""
    for path in Path("base").iterdir():
        os.utime(path)
    resolve_model("run")
    model = AutoModelForCausalLM.from_pretrained("base")
    AutoTokenizer.from_pretrained("base").save_pretrained("again")
    model.save_pretrained("again", max_shard_size="60KB")
    assert len(list(Path("again").glob("*.safetensors"))) > 1
    config = json.loads(Path("again/config.json").read_text()) | {
        "transformers_version": "4.1.0",
        "torch_dtype": "float32",
    }
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]  # as older versions wrote it
    Path("again/config.json").write_text(json.dumps(config))
    assert resolve_model("run", base="again").base == "again"
    shutil.move("base", "old")
    shutil.move("again", "base")
    resolve_model("run")
    assert main(["chat", "run"]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):  # resuming compares how the rows are tokenized
        shutil.copy(Path("old", name), Path("base", name))
    Path("base/chat_template.jinja").unlink()
    assert _train("run", resume=True, method={"kind": "lora"}).exit_code == 0


def _write_bin(base: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    torch.save(tensors | {"lm_head.copy": next(iter(tensors.values()))}, base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()


def _add_keys(base: Path) -> None:
    path = base / "config.json"
    config = json.loads(path.read_text())
    keys = {"attn_implementation": "sdpa", "_attn_implementation_autoset": True, "unsloth_version": "2025.1"}
    config |= keys | {"unsloth_fixed": True, "eos_token_id": [config.get("eos_token_id") or 2]}
    path.write_text(json.dumps(config))


def _copy_keys(base: Path) -> None:
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token_id": [1], "eos_token_id": [2]}))


@pytest.mark.parametrize("change", [_write_bin, _add_keys, _copy_keys])
def test_another_format_and_keys_without_effect_are_accepted(project: Path, change: Callable[[Path], None]) -> None:
    """The same tensors as `pytorch_model.bin` were "48 of 47 tensors changed"; keys of other tools were refused."""
    change(project / "base")
    assert not any("base" in note for note in resolve_model("run").notes)


def test_tensors_of_a_torch_file_are_compared(project: Path) -> None:
    """Another format must not hide a change."""
    _change_weights(project / "base")
    _write_bin(project / "base")
    with pytest.raises(UserError, match="has changed since") as error:
        resolve_model("run")
    assert "tensors changed: `model." in (error.value.where or "")


def test_another_dtype_is_named(project: Path) -> None:
    """Every tensor of the same model in bfloat16 counted as changed."""
    AutoModelForCausalLM.from_pretrained("base", dtype=torch.bfloat16).save_pretrained("base")
    with pytest.raises(UserError, match="has changed since") as error:
        resolve_model("run")
    assert error.value.where == "its weights are saved in bfloat16, and were in float32"


def test_weights_of_a_format_without_tensors_are_noted(project: Path) -> None:
    """A GGUF file has other blocks and names, so that each tensor counted as changed."""
    content = json.loads(Path("run", BASE).read_text())
    Path("run", BASE).write_text(json.dumps(content | {"weights": {"own.gguf": "0" * 64}}))
    assert any("another format" in note for note in resolve_model("run").notes)


def test_a_second_look_at_the_base_model_reads_its_stamps_only(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashing 16 GB at each start of `chat` would cost seconds; a change of the same size must be seen all the same."""
    monkeypatch.setenv("TUNEWELL_CACHE", str(tmp_path / "cache"))
    old = Path("base/model.safetensors").stat().st_mtime_ns
    resolve_model("run")
    with monkeypatch.context() as patch:
        patch.setattr(base_content, "_tensors", lambda path: pytest.fail(f"{path} is read again"))
        resolve_model("run")
    _change_weights(Path("base"))
    os.utime("base/model.safetensors", ns=(old, old))
    with pytest.raises(UserError, match="has changed since"):
        resolve_model("run")


def test_a_complete_model_is_used_but_not_compared_with_a_changed_base(project: Path) -> None:
    """A fully fine-tuned model does not need its base; figures of another base beside it would mislead."""
    _change_config(project / "base")
    found = resolve_model("full")
    assert found.base is None and any("`rms_norm_eps`" in note for note in found.notes), found.notes
    assert tunewell.load("full").chat("What is 1 and 1?") is not None


def test_a_run_without_the_record_is_checked_by_its_checkpoint(project: Path) -> None:
    """Runs of earlier versions recorded a hash of the weight files only."""
    Path("run", BASE).unlink()
    assert any(BASE in note for note in resolve_model("run").notes)
    _change_config(project / "base")
    assert any(BASE in note for note in resolve_model("run").notes)
    _change_weights(project / "base")
    with pytest.raises(UserError, match="its weights were"):
        resolve_model("run")


def test_another_seed_gives_a_preset_other_weights(project: Path) -> None:
    """An adapter on random weights needs the seed of these weights."""
    _train("scratch", "preset:tiny-1m", tokenizer="base", method={"kind": "lora"})
    resolve_model("scratch")
    with pytest.raises(UserError, match="has changed") as error:
        resolve_model("scratch", sets=["seed=7"])
    assert "the seed of its weights is 7, not" in (error.value.where or "")


@pytest.mark.slow
def test_an_export_is_compared_with_its_proof(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged file beside its proof was used without a warning; an adapter on another base gave other answers."""
    assert main(["export", "run", "--to", "adapter,merged,gguf", "--out", "exported"]) == 0
    (gguf,) = Path("exported").rglob("*.gguf")
    files = [Path("exported/adapter"), Path("exported/merged"), gguf]
    for path in files:
        resolve_model(path)
    _change_config(project / "base")
    capsys.readouterr()
    assert main(["chat", "exported/adapter"]) == 2
    assert "`rms_norm_eps`" in capsys.readouterr().err
    assert main(["verify", "exported"]) == 4
    shutil.copy(gguf, "own.gguf")
    _train("from-gguf", "own.gguf", method={"kind": "lora"})
    resolve_model("from-gguf")
    data = bytearray(Path("own.gguf").read_bytes())
    data[-20] ^= 1
    Path("own.gguf").write_bytes(data)
    with pytest.raises(UserError, match="has changed since") as error:
        resolve_model("from-gguf")
    assert "`own.gguf`" in (error.value.where or "")
    for path in files[1:]:
        resolve_model(path)
        weights = path if path.is_file() else path / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-20] ^= 1
        weights.write_bytes(data)
        with pytest.raises(UserError, match="has changed since it was exported"):
            resolve_model(path)
        copy = Path("elsewhere") / path.name
        copy.parent.mkdir(exist_ok=True)
        (shutil.copytree if path.is_dir() else shutil.copy)(path, copy)
        resolve_model(copy)  # without its proof there is nothing to compare
    proof = json.loads(Path("exported", PROOF).read_text())
    del proof["trained_on"]  # as earlier versions wrote it
    Path("exported", PROOF).write_text(json.dumps(proof))
    resolve_model("exported/adapter")


def test_tied_tensors_may_be_saved_once_or_twice(project: Path) -> None:
    """Older versions of transformers save the head of a model with tied embeddings, newer ones leave it out."""
    tensors = load_file("base/model.safetensors")
    before = base_content.read_content("base")
    tensors["another.name"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, "base/model.safetensors", metadata={"format": "pt"})
    assert base_content.content_changes("base", before) == []
    del tensors["model.layers.0.mlp.up_proj.weight"], tensors["another.name"]
    save_file(tensors, "base/model.safetensors", metadata={"format": "pt"})
    (line,) = base_content.content_changes("base", before)
    assert line.endswith("changed: `model.layers.0.mlp.up_proj.weight`")
