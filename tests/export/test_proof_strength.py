"""Faults too small for logits to show are caught by what they are faults of: a tensor, a field, a setting, a line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exports import exported, rehash, write_adapter, write_base
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from tunewell.cli.screens.export import parity_screen
from tunewell.core.errors import UserError
from tunewell.export.gguf.architecture import read_settings
from tunewell.export.proof.checks import check_settings, check_template
from tunewell.export.proof.gguf import check_gguf_fields, check_gguf_tensors
from tunewell.export.proof.reference import Reference, long_probe_length
from tunewell.export.targets.merged import MergedTarget
from tunewell.export.targets.ollama import check_modelfile
from tunewell.records.parity import Check, read_proof
from tunewell.workflows.verify import verify

KINDS = ("f16", "q8_0", "q4_k_m")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A proven export of everything, to be copied and spoiled."""
    folder = tmp_path_factory.mktemp("strength")
    adapter = write_adapter(folder / "adapter", write_base(folder / "base"))
    everything = ("adapter", "merged", "gguf", "ollama")
    done = exported(adapter, folder / "out", to=everything, gguf=KINDS, precision="bf16")
    assert done.parity.is_ok, done.parity
    return folder / "out"


# A GGUF file, by what it holds and says.

Change = Callable[[GGUFReader], None]


def _tensor(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    """Spoil a tensor as a whole: its numbers where they are plain, the step of each block of Q8_0 and Q5_0."""

    def spoil(reader: GGUFReader) -> None:
        tensor = next(own for own in reader.tensors if own.name == name)
        if tensor.data.dtype in (np.float16, np.float32):
            tensor.data[:] = change(tensor.data.astype(np.float32)).astype(tensor.data.dtype)
            return
        size = {"Q8_0": 34, "Q5_0": 22}[tensor.tensor_type.name]
        blocks = tensor.data.reshape(-1, size)
        steps = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        blocks[:, :2] = change(steps).astype(np.float16).view(np.uint8)

    return spoil


def _bytes(name: str, num: int) -> Change:
    def spoil(reader: GGUFReader) -> None:
        data = next(own for own in reader.tensors if own.name == name).data.reshape(-1).view(np.uint8)
        data[len(data) // 2 : len(data) // 2 + num] ^= 0xFF

    return spoil


def _field(name: str, value: float) -> Change:
    def spoil(reader: GGUFReader) -> None:
        field = reader.get_field(name)
        assert field is not None
        field.parts[-1][:] = value

    return spoil


def _word(reader: GGUFReader) -> None:
    field = reader.get_field("tokenizer.ggml.tokens")
    assert field is not None
    field.parts[field.data[300]][:1] ^= 1


UP = "blk.1.ffn_up.weight"
GGUF_DEFECTS: dict[str, tuple[Change, tuple[str, ...], str]] = {
    "a fiftieth too much": (_tensor(UP, lambda own: own * 1.02), KINDS, "tensors"),
    "a fifth too much": (_tensor(UP, lambda own: own * 1.2), KINDS, "tensors"),
    "zeroed": (_tensor("blk.1.attn_k.weight", lambda own: own * 0), KINDS, "tensors"),
    "a norm off in one number": (
        _tensor("blk.1.attn_norm.weight", lambda own: own + np.eye(64)[3] / 50),
        KINDS,
        "tensors",
    ),
    "64 bytes flipped": (_bytes("token_embd.weight", 64), KINDS, "tensors"),
    "one number flipped": (_bytes("blk.1.attn_q.weight", 2), ("f16",), "tensors"),
    "rope turns twice as slowly": (_field("llama.rope.freq_base", 20_000.0), KINDS, "settings"),
    "another epsilon": (_field("llama.attention.layer_norm_rms_epsilon", 1e-3), ("f16",), "settings"),
    "a context of 64": (_field("llama.context_length", 64), ("f16",), "settings"),
    "a context of a million": (_field("llama.context_length", 1_000_000), ("f16",), "settings"),
    "another end of a text": (_field("tokenizer.ggml.eos_token_id", 0), ("f16",), "settings"),
    "a word misspelled": (_word, ("f16",), "settings"),
}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, own in GGUF_DEFECTS.items() for kind in own[1]])
def test_a_gguf_is_held_against_the_model_tensor_by_tensor_and_field_by_field(
    whole: Path, tmp_path: Path, name: str, kind: str
) -> None:
    """Of these, f16 with another rope, flipped bytes, and q8_0 with a zeroed k once passed."""
    spoil, _, check = GGUF_DEFECTS[name]
    path = shutil.copy(next((whole / "gguf").glob(f"*{kind}.gguf")), tmp_path / "spoiled.gguf")
    assert all(own.is_ok for own in _read(whole, path).values())
    reader = GGUFReader(path, "r+")
    spoil(reader)
    reader.data.flush()
    found = _read(whole, path)
    assert [own for own, result in found.items() if not result.is_ok] == [check], found


def _read(whole: Path, path: Path) -> dict[str, Check]:
    proof = read_proof(whole)
    assert proof.model is not None
    reference, settings = Reference.load(whole / "proof.safetensors", proof.model), read_settings(proof.model.config)
    checks = [
        check_gguf_tensors(path, settings, reference.sketches, reference.rounded),
        check_gguf_fields(path, settings, proof.model, proof.stop_ids),
    ]
    return {check.name: check for check in checks}


# What lies beside the weights, and the whole folder.


def _json(name: str, **new: Any) -> Callable[[Path], None]:
    def spoil(out: Path) -> None:
        value = json.loads((out / name).read_text())
        (out / name).write_text(json.dumps(value | new))

    return spoil


def _line(old: str, new: str) -> Callable[[Path], None]:
    def spoil(out: Path) -> None:
        path = out / "ollama" / "Modelfile"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return spoil


def _template_of_gguf(out: Path) -> None:
    reader = GGUFReader(next((out / "gguf").glob("*f16.gguf")), "r+")
    part = reader.get_field("tokenizer.chat_template").parts[-1]  # type: ignore[union-attr]
    part[:] = np.frombuffer(bytes(part).replace(b"assistant", b"Assistent"), np.uint8)
    reader.data.flush()


def _half_adapter(out: Path) -> None:
    path = out / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "layers.2.self_attn.k_proj.lora_B" in name)
    save_file(tensors | {name: tensors[name] * 0.99}, path)


def _up(out: Path) -> None:
    path = out / "merged" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.02
    save_file(tensors, path, metadata={"format": "pt"})


def _foreign_gguf(out: Path) -> None:
    path = next((out / "ollama").glob("*.gguf"))
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data + b"\0")


def _tokenizer(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Change `tokenizer.json` so that no test conversation gets other ids."""

    def spoil(out: Path) -> None:
        path = out / "merged" / "tokenizer.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return spoil


def _add_end(content: dict[str, Any]) -> None:
    end = content["added_tokens"][-1]
    special = {"id": end["content"], "ids": [end["id"]], "tokens": [end["content"]]}
    text, last = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": end["content"], "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing", "single": [text, last], "pair": [text, last],
        "special_tokens": {end["content"]: special},
    }  # fmt: skip


def _template_text(out: Path) -> None:
    path = out / "merged" / "chat_template.jinja"
    path.write_text(path.read_text() + "{% if tools %}{{ tools }}{% endif %}")


MERGED, TEMPERATURE = "merged bf16", "PARAMETER temperature"
FOLDER_DEFECTS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "another template in a GGUF": (_template_of_gguf, "gguf f16", "template"),
    "a tensor a fiftieth too large": (_up, MERGED, "tensors"),
    "a hundredth of one matrix of the adapter": (_half_adapter, "adapter fp32", "tensors"),
    "one stop of two": (_json("merged/generation_config.json", eos_token_id=4), MERGED, "settings"),
    "wild answers": (_json("merged/generation_config.json", do_sample=True, temperature=5.0), MERGED, "settings"),
    "answers of one token": (_json("merged/generation_config.json", max_new_tokens=1), MERGED, "settings"),
    "other special ids": (_json("merged/config.json", eos_token_id=7, pad_token_id=3), MERGED, "settings"),
    "another length": (_json("merged/config.json", max_position_embeddings=2048), MERGED, "settings"),
    "another end in the tokenizer": (
        _json("merged/tokenizer_config.json", eos_token="<|im_start|>"),
        MERGED,
        "settings",
    ),
    "another padding": (_json("merged/tokenizer_config.json", pad_token="<|im_start|>"), MERGED, "settings"),
    "texts of 16 tokens": (_json("merged/tokenizer_config.json", model_max_length=16), MERGED, "settings"),
    "a second template": (_json("merged/tokenizer_config.json", chat_template="{{ messages }}"), MERGED, "settings"),
    "a merge too few": (_tokenizer(lambda content: content["model"]["merges"].pop()), MERGED, "settings"),
    "an end after every text": (_tokenizer(_add_end), MERGED, "settings"),
    "texts in lower case": (_tokenizer(lambda own: own.update(normalizer={"type": "Lowercase"})), MERGED, "settings"),
    "a template with another branch": (_template_text, MERGED, "settings"),
    "another model": (_line("FROM ./adapter-q4_k_m.gguf", "FROM llama3.2"), "ollama", "template"),
    "a file that is not there": (_line("FROM ./adapter-q4_k_m.gguf", "FROM ./nope.gguf"), "ollama", "template"),
    "a shorter context": (_line("num_ctx 1024", "num_ctx 64"), "ollama", "template"),
    "no context": (_line("PARAMETER num_ctx 1024\n", ""), "ollama", "template"),
    "a pirate": (_line(TEMPERATURE, f'SYSTEM """You are a pirate."""\n{TEMPERATURE}'), "ollama", "template"),
    "another adapter": (_line(TEMPERATURE, f"ADAPTER ./x.gguf\n{TEMPERATURE}"), "ollama", "template"),
    "a second template for Ollama": (_line(TEMPERATURE, f"TEMPLATE hello\n{TEMPERATURE}"), "ollama", "template"),
    "a stop within another": (_line('stop "<|im_end|>"', 'stop "x<|im_end|>y"'), "ollama", "template"),
    "a stop too many": (_line(TEMPERATURE, f'PARAMETER stop "the"\n{TEMPERATURE}'), "ollama", "template"),
    "wild answers of Ollama": (_line("temperature 0.0", "temperature 5.0"), "ollama", "template"),
    "a GGUF that was never proven": (_foreign_gguf, "ollama", "template"),
}


@pytest.mark.parametrize("name", FOLDER_DEFECTS)
def test_what_lies_beside_the_weights_is_held_against_the_model_too(whole: Path, tmp_path: Path, name: str) -> None:
    """All of these once passed, with hashes as a wrong writer would have them."""
    spoil, artefact, check = FOLDER_DEFECTS[name]
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    spoil(out)
    rehash(out, only=artefact)
    if artefact == "ollama" or check == "settings":
        found = [_modelfile(out) if artefact == "ollama" else _settings(out)]
    else:
        found = [own for link in verify(out).links for own in link.checks]
    assert check in [own.name for own in found if not own.is_ok], found


def test_healthy_settings_and_a_healthy_modelfile_pass(whole: Path) -> None:
    assert _settings(whole).is_ok and _modelfile(whole).is_ok


def _settings(out: Path) -> Check:
    path, facts = out / "merged", read_proof(out).model
    assert facts is not None
    config, generation = AutoConfig.from_pretrained(path), GenerationConfig.from_pretrained(path)
    return check_settings(path, AutoTokenizer.from_pretrained(path), facts, config=config, generation=generation)


def _modelfile(out: Path) -> Check:
    proof = read_proof(out)
    return check_modelfile(out, proof.artefacts[-1], proof)


def _whole(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def spoil(out: Path) -> None:
        value = json.loads((out / "proof.json").read_text())
        value[name] = change(value[name])
        (out / "proof.json").write_text(json.dumps(value))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_whole("artefacts", lambda _: []), "no artefacts"),
        (_whole("questions", lambda _: []), "no questions"),
        (_whole("probes", lambda own: own[:-1]), "expected 20"),
        (lambda out: (out / "README.md").unlink(), "`README.md` is missing"),
        (lambda out: (out / "merged" / "special_tokens_map.json").write_text("{}"), "does not belong"),
        (lambda out: (out / "merged" / "model.safetensors.index.json").write_text("{}"), "does not belong"),
    ],
)
def test_a_folder_that_lacks_something_to_prove_is_not_proven(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None], words: str
) -> None:
    """`verify` once said PROVEN of an export without artefacts, and of one with a stranger's file in it."""
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    rehash(out, only="merged bf16")
    spoil(out)
    # The rest of the proof is not asked here.
    monkeypatch.setattr(MergedTarget, "prove", lambda *_: [])
    parity = verify(out)
    assert not parity.is_ok
    assert any(words in check.words for link in parity.links for check in link.checks if not check.is_ok), parity


def test_an_adapter_that_names_another_base_is_proven_with_a_warning(whole: Path, tmp_path: Path) -> None:
    """With `--base` the right model was loaded, and nobody was told that other programs would load another."""
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    config = out / "adapter" / "adapter_config.json"
    written = json.loads(config.read_text())
    base = written["base_model_name_or_path"]
    rehash(out, only="adapter fp32")
    assert not [check for link in verify(out, base=base).links for check in link.checks if check.is_warning]
    config.write_text(json.dumps(written | {"base_model_name_or_path": "evil/other-base"}))
    rehash(out, only="adapter fp32")
    parity = verify(out, base=base)
    (warning,) = [check for link in parity.links for check in link.checks if check.is_warning]
    assert parity.is_ok and warning.name == "base" and "evil/other-base" in warning.words
    assert "WARNING" in parity_screen(parity) and "evil/other-base" in parity_screen(parity)


def test_a_damaged_reference_is_said_to_be_so(whole: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    path = out / "proof.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="is damaged"):
        verify(out)


def test_the_templates_clock_stands_at_the_day_of_training(whole: Path) -> None:
    proof = read_proof(whole)
    source = "{{ strftime_now('%d %b %Y') }}"
    probe = proof.probes[0].model_copy(update={"text": "05 Mar 2024"})
    model = proof.model.model_copy(update={"template_sha256": None})
    dated = proof.model_copy(update={"date": "2024-03-05", "probes": [probe], "model": model})
    assert check_template(dated, source, {}).is_ok
    assert not check_template(dated.model_copy(update={"date": None}), source, {}).is_ok


@pytest.mark.slow
def test_there_is_a_text_longer_than_any_window(tmp_path: Path) -> None:
    """Windows and stretched positions do nothing within 76 tokens, which was the longest probe."""
    base = write_base(tmp_path / "base", "gemma3", sliding_window=600, max_position_embeddings=1024)
    done = exported(base, tmp_path / "out", to=("gguf",), gguf=("f16",))
    assert done.parity.is_ok, done.parity
    *_, last = read_proof(tmp_path / "out").probes
    assert last.is_long and 600 < len(last.ids) <= 664


def test_what_no_probe_reaches_is_said() -> None:
    length, note = long_probe_length(
        AutoConfig.for_model("mistral", sliding_window=4096, max_position_embeddings=32768)
    )
    assert length == 2560 and note is not None and "4,096" in note
