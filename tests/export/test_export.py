"""Exports that are what was trained are proven; whatever is not is caught, by its own name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import exported, rehash, write_adapter, write_base
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tunewell.core.errors import UserError
from tunewell.export.proof.gguf import _answer
from tunewell.inference.llama_cpp.library import find_llama
from tunewell.methods.lora import Lora, LoraLinear
from tunewell.records.parity import Parity, ProofQuestion, read_proof
from tunewell.workflows.export import export
from tunewell.workflows.verify import verify

ARCHITECTURES = [
    "llama",
    "gemma3",
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in ("llama-tied", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "phi", "stablelm")
    ),
]
EVERYTHING = {"to": ("adapter", "merged", "gguf"), "gguf": ("f16", "q8_0"), "precision": "fp32"}


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_a_healthy_export_of_every_architecture_is_proven(tmp_path: Path, case: str) -> None:
    base = write_base(tmp_path / "base", case)
    adapter = write_adapter(tmp_path / "adapter", base)
    # transformers reads every tokenizer of a Qwen 2 as Qwen's own, which the tiny one is not: the proof would say so.
    kinds = [kind for kind in EVERYTHING["to"] if (case, kind) != ("qwen2", "merged")]
    done = exported(adapter, tmp_path / "out", **EVERYTHING | {"to": kinds})
    failed = [
        (link.artefact, check.name, check.words)
        for link in done.parity.links
        for check in link.checks
        if not check.is_ok
    ]
    assert done.parity.is_ok and done.exit_code == 0, failed
    figures = {link.artefact: _logits(done.parity, link.artefact) for link in done.parity.links}
    names = ["adapter fp32", "merged fp32", "gguf f16", "gguf q8_0"]
    assert list(figures) == [name for name in names if name.partition(" ")[0] in kinds]
    assert all(found["largest"] < 1e-4 for name, found in figures.items() if "fp32" in name)
    assert figures["gguf f16"]["same_top"] >= 0.995 or figures["gguf f16"]["wrong_tops"] == 0
    beside = ("parity.json", "proof.json", "proof.safetensors", "README.md")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*kinds, *beside}


@pytest.mark.parametrize(
    ("case", "method"),
    [
        ("llama", {"rslora": True, "rank": 8, "modules_to_save": ("embed_tokens", "lm_head")}),
        ("llama-tied", {"modules_to_save": ("embed_tokens", "lm_head")}),
        pytest.param("llama-tied", {}, marks=pytest.mark.slow),
        pytest.param("llama", {"targets": ("q_proj", "down_proj"), "layers": (0, 2)}, marks=pytest.mark.slow),
    ],
)
def test_merging_changes_nothing(tmp_path: Path, case: str, method: dict[str, Any]) -> None:
    """In fp32 within 1e-4 of the adapter; in 16 bits the likeliest token stays, and KL is what rounding gives."""
    adapter = write_adapter(tmp_path / "adapter", write_base(tmp_path / "base", case), **method)
    for precision, most in (("fp32", 1e-8), ("fp16", 1e-4), ("bf16", 1e-2)):
        done = exported(adapter, tmp_path / precision, to=("adapter", "merged"), precision=precision)
        assert done.parity.is_ok, done.parity
        found = _logits(done.parity, f"merged {precision}")
        assert found["kl"] < most and (precision != "fp32" or found["largest"] < 1e-4), found
        dtypes = {tensor.dtype for tensor in load_file(tmp_path / precision / "merged" / "model.safetensors").values()}
        assert dtypes == {{"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]}


def _scaled(name: str, factor: float) -> Callable[[Any], None]:
    return lambda model: model.get_parameter(name).data.mul_(factor)


MERGE_DEFECTS: dict[str, Callable[[Any], Any]] = {
    "a whole tensor": _scaled("model.layers.1.mlp.up_proj.weight", 1.00001),
    "one row": lambda model: model.model.layers[1].self_attn.q_proj.weight.data[3].mul_(1.001),
    "a norm": _scaled("model.layers.0.input_layernorm.weight", 1.0001),
    "the embedding": _scaled("model.embed_tokens.weight", 1.00001),
    # The weights are right, but the layers compute something else.
    "the output of a layer": lambda model: model.model.layers[1].mlp.register_forward_hook(lambda *own: own[2] * 1.02),
    "the scale of attention": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.3),
    "the positions": lambda model: model.model.rotary_emb.inv_freq.mul_(1.01),
}


@pytest.mark.parametrize("name", MERGE_DEFECTS)
def test_a_defect_of_the_merge_is_caught_before_anything_is_written(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The logits of merged weights are compared on a few short texts: they must still show every kind of defect."""
    merge = Lora.merge

    def merge_badly(self: Lora) -> int:
        number = merge(self)
        MERGE_DEFECTS[name](self.model)
        return number

    monkeypatch.setattr(Lora, "merge", merge_badly)
    with pytest.raises(UserError, match="the merged weights differ from the trained model"):
        exported(whole / "adapter", tmp_path / "out", to=("merged",), precision="fp32")


def _logits(parity: Parity, name: str) -> dict[str, Any]:
    link = next(link for link in parity.links if link.artefact == name)
    return next(check.figures for check in link.checks if check.name == "logits")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A proven export of everything, to be copied and spoiled; its base lies beside it."""
    folder = tmp_path_factory.mktemp("whole")
    adapter = write_adapter(folder / "adapter", write_base(folder / "base"))
    write_base(folder / "other", seed=5)
    done = exported(
        adapter, folder / "out", to=("adapter", "merged", "gguf", "ollama"), gguf=("f16",), precision="fp32"
    )
    assert done.parity.is_ok, done.parity
    return folder


Spoil = Callable[[Path, Path], None]


def _tensor(name: str, change: Callable[[dict[str, torch.Tensor]], None], folder: str = "merged") -> Spoil:
    def spoil(out: Path, whole: Path) -> None:
        path = out / folder / name
        tensors = load_file(path)
        change(tensors)
        save_file({key: value.contiguous() for key, value in tensors.items()}, path, metadata={"format": "pt"})

    return spoil


def _json(name: str, change: Callable[[Any], None]) -> Spoil:
    def spoil(out: Path, whole: Path) -> None:
        value = json.loads((out / name).read_text())
        change(value)
        (out / name).write_text(json.dumps(value))

    return spoil


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")


def _without_adapter(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        if "lora_B" in name:
            tensors[name].zero_()


def _base_weights(out: Path, whole: Path) -> None:
    shutil.copy(whole / "base" / "model.safetensors", out / "merged" / "model.safetensors")


def _other_weights(out: Path, whole: Path) -> None:
    """What a merge onto another base than trained on gives: its weights and the right difference."""
    merged, base, other = (
        load_file(path / "model.safetensors") for path in (out / "merged", whole / "base", whole / "other")
    )
    tensors = {name: other[name] + (merged[name] - base[name]) for name in merged}
    save_file(tensors, out / "merged" / "model.safetensors", metadata={"format": "pt"})


def _lost_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def _lost_token(value: Any) -> None:
    value["added_tokens"] = [token for token in value["added_tokens"] if token["content"] != "<|im_start|>"]


def _other_template(out: Path, whole: Path) -> None:
    path = out / "merged" / "chat_template.jinja"
    path.write_text(path.read_text().replace("assistant", "Assistant"))


def _no_stop(out: Path, whole: Path) -> None:
    for name in ("generation_config.json", "config.json"):
        value = json.loads((out / "merged" / name).read_text())
        value["eos_token_id"] = 77
        (out / "merged" / name).write_text(json.dumps(value))


def _double_bos(out: Path, whole: Path) -> None:
    path = out / "merged" / "chat_template.jinja"
    path.write_text("<|endoftext|>" + path.read_text())


def _gguf(out: Path) -> Path:
    return next((out / "gguf").glob("*.gguf"))


def _cut(out: Path, whole: Path) -> None:
    path = _gguf(out)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def _field(name: str, value: bytes | int) -> Spoil:
    def spoil(out: Path, whole: Path) -> None:
        reader = GGUFReader(_gguf(out), "r+")
        part = reader.get_field(name).parts[-1]  # type: ignore[union-attr]
        assert isinstance(value, int) or len(part) == len(value)
        part[:] = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value
        reader.data.flush()

    return spoil


def _rope(out: Path, whole: Path) -> None:
    """Rows of q as transformers has them, where llama.cpp wants pairs side by side."""
    reader = GGUFReader(_gguf(out), "r+")
    for tensor in reader.tensors:
        if tensor.name.endswith("attn_q.weight"):
            rows = tensor.data.copy()
            half = rows.reshape(4, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
            tensor.data[:] = half
    reader.data.flush()


DEFECTS: dict[str, tuple[Spoil, str, str]] = {
    "a tensor holds a NaN": (_tensor("model.safetensors", _nan), "merged fp32", "finite"),
    "the adapter changes nothing": (
        _tensor("adapter_model.safetensors", _without_adapter, "adapter"),
        "adapter fp32",
        "logits",
    ),
    "the adapter was never merged": (_base_weights, "merged fp32", "logits"),
    "the adapter names another base": (
        lambda out, whole: _json(
            "adapter/adapter_config.json", lambda v: v.update(base_model_name_or_path=str(whole / "other"))
        )(out, whole),
        "adapter fp32",
        "logits",
    ),
    "merged onto other weights than trained on": (_other_weights, "merged fp32", "logits"),
    "the head is the embedding's": (_tensor("model.safetensors", _lost_head), "merged fp32", "logits"),
    "an added token is lost": (_json("merged/tokenizer.json", _lost_token), "merged fp32", "token ids"),
    "another template": (_other_template, "merged fp32", "token ids"),
    "the stop is missing": (_no_stop, "merged fp32", "stop"),
    "a first token too many": (_double_bos, "merged fp32", "token ids"),
    "a file is cut short": (_cut, "gguf f16", "files"),
    "rotary halves in another order": (_rope, "gguf f16", "logits"),
    "another pre-tokenizer": (_field("tokenizer.ggml.pre", b"qwen2"), "gguf f16", "token ids"),
    "a first token added to a GGUF": (_field("tokenizer.ggml.add_bos_token", 1), "gguf f16", "token ids"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_caught_by_its_own_check(whole: Path, tmp_path: Path, name: str) -> None:
    spoil, artefact, check = DEFECTS[name]
    out = tmp_path / "out"
    shutil.copytree(whole / "out", out)
    spoil(out, whole)
    rehash(out, only=artefact)
    parity = verify(out)
    broken = {link.artefact: [check.name for check in link.checks if not check.is_ok] for link in parity.links}
    assert not parity.is_ok and check in broken[artefact], (broken, parity)


def test_a_changed_byte_is_caught_without_loading_anything(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "out", tmp_path / "out")
    path = tmp_path / "out" / "ollama" / "Modelfile"
    path.write_text(path.read_text() + "\n")
    proof = json.loads((tmp_path / "out" / "proof.json").read_text())
    proof["artefacts"] = [own for own in proof["artefacts"] if own["kind"] == "ollama"]
    (tmp_path / "out" / "proof.json").write_text(json.dumps(proof))
    [link] = verify(tmp_path / "out").links
    assert not link.is_ok and [check.name for check in link.checks] == ["files"]
    assert "was changed" in link.checks[0].words


def test_a_modelfile_with_another_template_or_stop_is_caught(whole: Path, tmp_path: Path) -> None:
    for number, (old, new) in enumerate([("<|im_start|>user", "<|im_start|>human"), ('stop "<|im_end|>"', 'stop "x"')]):
        out = tmp_path / str(number)
        shutil.copytree(whole / "out", out)
        path = out / "ollama" / "Modelfile"
        path.write_text(path.read_text().replace(old, new))
        rehash(out, only="ollama")
        [link] = [link for link in verify(out).links if not link.is_ok]
        assert link.artefact == "ollama" and not link.checks[-1].is_ok


def test_an_export_that_is_not_proven_leaves_nothing_that_looks_finished(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the merge forgets the adapter, and nobody looks before the files are written."""
    monkeypatch.setattr(LoraLinear, "merged", lambda self: self.base_layer)
    with pytest.raises(UserError, match="differ from the trained model"):
        exported(whole / "adapter", tmp_path / "out", to=("gguf",), gguf=("q8_0",))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("tunewell.workflows.export.check_merge", lambda *_, **__: None)
    done = exported(whole / "adapter", tmp_path / "out", to=("merged",))
    assert done.exit_code == 4 and not done.parity.is_ok
    assert [path.name for path in tmp_path.iterdir()] == ["out-failed.json"]
    assert "removed" in done.notes[-1]


@pytest.mark.slow
def test_the_proof_is_made_in_a_process_of_its_own_and_can_be_repeated(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = export(whole / "adapter", to=("adapter",), out=out)
    assert done.parity.is_ok and (out / "parity.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(out / "adapter")
    assert tokenizer.chat_template and AutoModelForCausalLM.from_pretrained(whole / "base")
    assert verify(out).is_ok
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(UserError, match="not an export"):
        export(whole / "adapter", to=("adapter",), out=tmp_path / "mine")


def test_what_cannot_be_exported_is_said_first(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no adapter"):
        export(whole / "base", to=("adapter",), out=tmp_path / "out")
    with pytest.raises(UserError, match="is not an export"):
        verify(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_drafted_answer_is_the_answer_that_llama_cpp_writes_alone(whole: Path) -> None:
    """The proof drafts llama.cpp's answer with that of the trained model, which must not change it."""
    (file,) = (whole / "out" / "gguf").glob("*.gguf")
    ids = read_proof(whole / "out").questions[0].ids
    with find_llama().open(file, context=200, threads=1) as model:
        own = list(model.generate(ids, max_new_tokens=12, stop_ids=()))
        other = (own[5] + 1) % model.vocab_size
        drafts = [own, own[:7], [], [other], [*own[:5], other, *own[6:]], [*own[:11], other]]
        for stops in ((), {own[8]}, {other}):
            expected = model.generate(ids, max_new_tokens=12, stop_ids=stops)
            found = [
                _answer(model, ProofQuestion(ids=ids, answer=draft, ended=False, text=""), 12, stops)
                for draft in drafts
            ]
            assert {tuple(answer.ids) for answer in found} == {tuple(expected)}
            assert {answer.ended for answer in found} == {expected.ended == "end"}
