"""What a config wants exported and cannot be made is said before anything is trained, or a folder made."""

import importlib
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny import CHATML
from tokenizers import Tokenizer, models

from corpora import rows_file
from tunewell import train
from tunewell.config.load import load_config
from tunewell.core.errors import UserError
from tunewell.export.preflight import require_exportable

EVERYTHING = "export.to=[adapter, merged, gguf, ollama]"
LLAMA = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}


@pytest.fixture
def model(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder with nothing but the small files, in a working directory without a corpus."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    _write(folder / "config.json", LLAMA)
    (folder / "model.safetensors").touch()
    rows_file(tmp_path / "rows.jsonl", 8)
    return folder


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def _wish(model: Path | str, *sets: str) -> None:
    require_exportable(load_config(None, [EVERYTHING, *sets], model=str(model), has_file=False))


def _speaks(model: Path, template: str | None) -> None:
    (model / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((model / "tokenizer_config.json").read_text())
    _write(model / "tokenizer_config.json", config | {"chat_template": template})


def test_what_can_be_made_is_not_refused(model: Path, tiny_model: Path) -> None:
    _wish(model)
    _wish("preset:tiny-1m", f"tokenizer={tiny_model}")
    _wish(model, "template.date=2024-03-31", "template.arguments={enable_thinking: false}")
    _write(model / "config.json", {"model_type": "unheard"})
    _wish(model, "export.to=[adapter, merged]")
    _wish(model / "nowhere", "export.to=[]")


def _other_architecture(model: Path) -> None:
    _write(model / "config.json", LLAMA | {"model_type": "gpt2"})


def _other_tokenizer(model: Path) -> None:
    words = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab(with_added_tokens=False)
    pieces = [(word, -float(number)) for word, number in sorted(words.items(), key=lambda pair: pair[1])]
    value = json.loads((model / "tokenizer.json").read_text())
    value["model"] = json.loads(Tokenizer(models.Unigram(pieces, unk_id=0)).to_str())["model"]
    _write(model / "tokenizer.json", value)


def _unopened(model: Path) -> None:
    _speaks(model, CHATML.partition("{% if add_generation_prompt")[0])


@pytest.mark.parametrize(
    ("spoil", "said", "left"),
    [
        (_other_architecture, "type `gpt2` cannot be written as GGUF", "[adapter, merged]"),
        (_other_tokenizer, "type `Unigram` cannot be written", "[adapter, merged]"),
        (_unopened, "has no generation prompt", "[adapter, merged, gguf]"),
        (lambda model: _speaks(model, None), "no chat template", "[]"),
    ],
)
def test_what_the_model_does_not_allow_is_refused(model: Path, spoil: Any, said: str, left: str) -> None:
    spoil(model)
    with pytest.raises(UserError, match=said):
        _wish(model)
    _wish(model, f"export.to={left}")


def test_a_template_that_ollama_cannot_have_is_refused(model: Path) -> None:
    odd = "{% for m in messages %}{{ m.content | length }}{% endfor %}"
    _speaks(model, CHATML + "{% if messages | length > 2 %}" + odd + "{% endif %}")
    with pytest.raises(UserError, match="cannot be converted exactly for Ollama"):
        _wish(model)
    _wish(model, "export.to=[gguf]")


@pytest.mark.parametrize(("package", "left"), [("peft", "[merged, gguf]"), ("gguf", "[adapter, merged]")])
def test_a_package_that_is_missing_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, package: str, left: str
) -> None:
    found = importlib.import_module

    def without(name: str, *more: Any) -> ModuleType:
        if name == package:
            raise ModuleNotFoundError(name=name)
        return found(name, *more)

    monkeypatch.setattr("tunewell.core.optional.importlib.import_module", without)
    with pytest.raises(UserError, match=f"needs `{package}`") as caught:
        _wish(model)
    assert "[export]" in str(caught.value.fix)
    _wish(model, f"export.to={left}")


def test_no_folder_is_made_for_a_run_whose_export_cannot_be_had(model: Path, tmp_path: Path) -> None:
    """It was, and stood in the way when the config had been mended."""
    before = sorted(tmp_path.iterdir())
    flags = [f"data.sources={tmp_path / 'rows.jsonl'}", f"run={tmp_path / 'run'}", f"corpus={tmp_path / 'corpus'}"]
    for sets, said in ((["method.kind=full"], "trains no adapter"), (["template.name=nowhere"], "no template")):
        loaded = load_config(None, [EVERYTHING, *flags, *sets], model=str(model), has_file=False)
        with pytest.raises(UserError, match=said):
            train(loaded)
        assert sorted(tmp_path.iterdir()) == before
