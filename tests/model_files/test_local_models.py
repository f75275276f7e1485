"""Models that are on the disk already: found where other tools keep them, under names that `--model` accepts."""

import json
from pathlib import Path

import pytest
from llama_cpp_tiny import tiny_llama, write_tiny_gguf
from model_folders import add_to_hub_cache, add_to_lm_studio, add_to_ollama

from tunewell.core.errors import UserError
from tunewell.data.tokenizers.load import load_tokenizer
from tunewell.model_files.facts import read_facts
from tunewell.model_files.files import locate
from tunewell.model_files.local import find_local_models
from tunewell.model_files.ollama import find_ollama, list_ollama
from tunewell.model_files.shape import read_shape


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny-q8_0.gguf", tiny_llama(tiny_model), tiny_model)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder, without installed packages of models."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tunewell.model_files.ollama._SYSTEM_FOLDER", tmp_path / "none")
    monkeypatch.setattr("tunewell.model_files.local._in_packages", lambda: iter(()))
    return tmp_path


def test_a_model_of_ollama_is_read_from_its_blob(home: Path, gguf: Path):
    """Its blob has no suffix, so only the manifest tells that it is a GGUF file, and its name."""
    blob = add_to_ollama(home / ".ollama/models", "registry.ollama.ai/library/tiny/latest", gguf)
    for name in ("ollama:tiny", "ollama:tiny:latest", "ollama:Tiny"):
        assert locate(name).gguf == blob
    assert read_facts("ollama:tiny").name == "tiny"
    assert read_shape("ollama:tiny", vocab_size=0).num_layers == 3
    assert load_tokenizer("ollama:tiny").vocab_size == 500


def test_names_are_those_of_ollama_list(home: Path, gguf: Path):
    models = home / ".ollama/models"
    for path in ("registry.ollama.ai/library/tiny/1b", "registry.ollama.ai/ada/own/latest", "hf.co/org/Tiny-GGUF/Q8_0"):
        add_to_ollama(models, path, gguf)
    assert [model.name for model in list_ollama()] == ["ada/own:latest", "hf.co/org/Tiny-GGUF:Q8_0", "tiny:1b"]
    assert find_ollama("ollama:hf.co/org/Tiny-GGUF:Q8_0").blob is not None
    assert find_ollama("ada/own").blob is not None


def test_a_missing_tag_names_those_that_exist(home: Path, gguf: Path):
    add_to_ollama(home / ".ollama/models", "registry.ollama.ai/library/tiny/1b", gguf)
    with pytest.raises(UserError) as caught:
        locate("ollama:tiny")
    assert "`ollama:tiny:1b`" in str(caught.value.fix)
    with pytest.raises(UserError) as caught:
        locate("ollama:other")
    assert caught.value.fix == "`ollama pull other`" and "tiny:1b" in str(caught.value.where)


def test_without_ollama_the_error_says_where_was_searched(home: Path):
    with pytest.raises(UserError, match="Ollama has no models on this machine"):
        locate("ollama:tiny")


@pytest.mark.parametrize("damage", ["no blob", "short blob", "damaged manifest", "cloud", "adapter"])
def test_what_cannot_be_used_is_said(home: Path, gguf: Path, damage: str):
    """A half download must not end in a parser's error, and an adapter must not be dropped silently."""
    name = "registry.ollama.ai/library/tiny/latest"
    blob = add_to_ollama(home / ".ollama/models", name, gguf, size=10**9 if damage == "short blob" else None)
    manifest = home / ".ollama/models/manifests" / name
    content = json.loads(manifest.read_text())
    if damage == "no blob":
        blob.unlink()
    elif damage == "damaged manifest":
        manifest.write_text("{")
    elif damage == "cloud":
        content["layers"] = []
        manifest.write_text(json.dumps(content))
    elif damage == "adapter":
        content["layers"].append(content["layers"][1] | {"mediaType": "application/vnd.ollama.image.adapter"})
        manifest.write_text(json.dumps(content))
    expected = {
        "no blob": "its file is missing",
        "short blob": "its file is incomplete",
        "damaged manifest": "its manifest is damaged",
        "cloud": "it has no GGUF file",
        "adapter": "it has an adapter",
    }[damage]
    with pytest.raises(UserError, match=expected):
        locate("ollama:tiny")
    [found] = find_local_models(home)
    assert expected in found.problem


def test_another_folder_of_ollama_is_used(home: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "elsewhere"))
    add_to_ollama(home / "elsewhere", "registry.ollama.ai/library/tiny/latest", gguf)
    assert [model.name for model in find_local_models(home)] == ["ollama:tiny"]


def test_models_of_all_tools_are_found(home: Path, gguf: Path, tiny_model: Path):
    """Each name must work with `--model`; projectors, parts and embedding models are no models to train."""
    add_to_ollama(home / ".ollama/models", "registry.ollama.ai/library/tiny/latest", gguf)
    add_to_lm_studio(home / ".lmstudio", "org", "Tiny-GGUF", gguf)
    projector = home / "mmproj-tiny.gguf"
    projector.write_bytes(gguf.read_bytes())
    add_to_lm_studio(home / ".lmstudio", "org", "Seeing-GGUF", projector)
    projector.unlink()
    folder = home / "made" / "model"
    tiny_llama(tiny_model).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_model / name).read_bytes())
    add_to_hub_cache(home / ".cache/huggingface/hub", "org/tiny", folder)
    embedding = home / "made" / "embedding"
    embedding.mkdir()
    (embedding / "config.json").write_text('{"architectures": ["BertModel"], "model_type": "bert"}')
    (embedding / "model.safetensors").write_bytes(b"\0" * 64)
    add_to_hub_cache(home / ".cache/huggingface/hub", "org/embedding", embedding)
    project = home / "project"
    project.mkdir()
    (project / "own.gguf").write_bytes(gguf.read_bytes())
    found = {model.name: model for model in find_local_models(project)}
    assert {name: model.where for name, model in found.items()} == {
        "own.gguf": "this folder",
        "org/tiny": "hub cache",
        "ollama:tiny": "Ollama",
        "~/.lmstudio/models/org/Tiny-GGUF/tiny-q8_0.gguf": "LM Studio",
    }
    assert all(model.num_bytes > 100_000 and not model.problem for model in found.values())
    assert read_shape("~/.lmstudio/models/org/Tiny-GGUF/tiny-q8_0.gguf", vocab_size=0).num_layers == 3


def test_the_chosen_folder_of_lm_studio_is_used(home: Path, gguf: Path):
    """LM Studio writes the folder into a file of its own when the user moves it."""
    (home / ".lmstudio-home-pointer").write_text(str(home / "big-disk"))
    add_to_lm_studio(home / "big-disk", "org", "Tiny-GGUF", gguf)
    assert [model.where for model in find_local_models(home / "none")] == ["LM Studio"]


def test_a_half_download_of_the_hub_is_marked(home: Path, tiny_model: Path):
    folder = home / "made"
    tiny_llama(tiny_model).save_pretrained(folder)
    snapshot = add_to_hub_cache(home / ".cache/huggingface/hub", "org/tiny", folder)
    (snapshot / "model.safetensors").resolve().unlink()
    [found] = find_local_models(home / "none")
    assert found.problem == "`model.safetensors` is a link to a file that does not exist"
