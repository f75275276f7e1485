"""Our adapters are PEFT's: the same numbers, the same files, both ways."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from lessons import RandomDocuments, distance, tiny_llama
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tunewell.config.schema import MethodSettings, Train
from tunewell.core.errors import UserError
from tunewell.methods.base import load_adapter, trainable_parameters
from tunewell.methods.lora import Lora
from tunewell.models.attention import stock_attention
from tunewell.records.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tunewell.training.step import TrainableModel

IDS = torch.randint(0, 100, (2, 17), generator=torch.Generator().manual_seed(0))
METHODS = {
    "all linears": MethodSettings(rank=4, alpha=8),
    "rslora": MethodSettings(rank=8, alpha=4, rslora=True),
    "some linears in some layers": MethodSettings(rank=3, targets=("q_proj", "down_proj"), layers=(1,)),
    "a whole head and embedding": MethodSettings(rank=2, modules_to_save=("lm_head", "embed_tokens")),
}


def _randomised(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def _write(adapter: Lora, folder: Path) -> Path:
    folder.mkdir()
    adapter.files("base").write(folder)
    return folder


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_our_adapter_loads_in_peft_with_the_same_logits(tmp_path: Path, name: str, is_tied: bool) -> None:
    model = tiny_llama(tie_word_embeddings=is_tied)
    base = copy.deepcopy(model)
    adapter = Lora.apply(model, METHODS[name], seed=3)
    _randomised(model)
    folder = _write(adapter, tmp_path / "adapter")
    base.set_attn_implementation("sdpa")
    before = _logits(base)
    theirs = PeftModel.from_pretrained(base, folder)
    with stock_attention(model):
        ours = _logits(model)
    torch.testing.assert_close(_logits(theirs), ours, rtol=1e-5, atol=1e-5)
    assert distance(ours, before) > 1e-2, "an adapter that changes nothing proves nothing"


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear", r".*\.(q|k)_proj"])
@pytest.mark.parametrize(
    "more", [{}, {"use_rslora": True}, {"layers_to_transform": [0]}, {"modules_to_save": ["lm_head"]}]
)
def test_an_adapter_of_peft_loads_in_ours_with_the_same_logits(tmp_path: Path, targets: object, more: dict) -> None:
    if isinstance(targets, str) and "layers_to_transform" in more:
        more = {}  # PEFT itself refuses layers beside an expression
    model = tiny_llama()
    base = copy.deepcopy(model)
    base.set_attn_implementation("sdpa")
    config = LoraConfig(
        r=4, lora_alpha=12, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False, **more
    )
    theirs = get_peft_model(base, config)
    with torch.no_grad():
        for _, parameter in theirs.named_parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    theirs.save_pretrained(tmp_path)
    load_adapter(model, tmp_path)
    with stock_attention(model):
        torch.testing.assert_close(_logits(model), _logits(theirs), rtol=1e-5, atol=1e-5)


def test_training_agrees_with_a_peft_loop_over_twenty_steps() -> None:
    """The same batches through PEFT's layers, torch's clipping and torch's AdamW, document by document."""
    documents = RandomDocuments()
    model = tiny_llama()
    base = copy.deepcopy(model)
    base.set_attn_implementation("sdpa")
    adapter = Lora.apply(model, MethodSettings(rank=4, alpha=8), seed=3)
    config = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=adapter.config["target_modules"], task_type="CAUSAL_LM"
    )
    theirs = get_peft_model(base, config)
    begun = {name.replace(".weight", ".default.weight"): t for name, t in adapter.tensors().items()}
    assert not theirs.load_state_dict(begun, strict=False).unexpected_keys
    learner = TrainableModel(model, "fp32", 40, settings=Train(weight_decay=0.01))
    own = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=1e-3, weight_decay=0.01)
    for number in range(20):
        chosen = np.random.default_rng(number).choice(len(documents), 6, replace=False)
        loss, norm, *_ = learner.take_step(documents.batches(chosen, 70), number=number, rate=1e-3).read()
        total, count = torch.zeros(()), 0
        for document in chosen:
            ids, labels = (torch.tensor(row)[None].long() for row in documents.arrays(int(document)))
            supervised = int((labels[:, 1:] != -100).sum())
            total = total + theirs(input_ids=ids, labels=labels).loss * supervised
            count += supervised
        (total / count).backward()
        their_norm = torch.nn.utils.clip_grad_norm_(own, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert loss == pytest.approx(float(total.detach()) / count, rel=1e-4)
        assert norm == pytest.approx(float(their_norm), rel=1e-3)
    ended = theirs.state_dict()
    for name, tensor in adapter.tensors().items():
        assert distance(tensor, ended[name.replace(".weight", ".default.weight")]) < 1e-3, name


def test_a_fresh_adapter_changes_nothing() -> None:
    model = tiny_llama()
    with stock_attention(model):
        before = _logits(model)
        Lora.apply(model, MethodSettings(rank=4), seed=3)
        assert torch.equal(_logits(model), before)


def test_fresh_matrices_are_as_large_as_those_of_peft() -> None:
    model, base = tiny_llama(hidden_size=256, intermediate_size=256), tiny_llama(hidden_size=256, intermediate_size=256)
    Lora.apply(model, MethodSettings(rank=16, targets=("q_proj",)), seed=3)
    theirs = get_peft_model(base, LoraConfig(r=16, target_modules=["q_proj"]))
    ours = torch.cat([p.flatten() for n, p in trainable_parameters(model).items() if "lora_A" in n])
    other = torch.cat([p.flatten() for n, p in theirs.named_parameters() if "lora_A" in n])
    assert ours.std().item() == pytest.approx(other.std().item(), rel=0.05)
    assert ours.abs().max().item() == pytest.approx(other.abs().max().item(), rel=0.05)


def test_a_tied_head_and_embedding_stay_one_when_trained() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    Lora.apply(model, MethodSettings(rank=2, modules_to_save=("embed_tokens",)), seed=0)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert sum("lora" not in name for name in trainable_parameters(model)) == 1


@pytest.mark.parametrize("names", [("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")])
def test_a_tied_head_and_embedding_are_trained_in_fp32_beside_a_16_bit_model(names: tuple[str, ...]) -> None:
    model = tiny_llama(tie_word_embeddings=True).to(torch.bfloat16)
    Lora.apply(model, MethodSettings(rank=2, modules_to_save=names), seed=0)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    with stock_attention(model):
        assert _logits(model).dtype == torch.bfloat16


def test_a_layer_that_is_trained_as_a_whole_gets_no_matrices_and_others_are_refused_in_16_bit() -> None:
    model = tiny_llama()
    Lora.apply(model, MethodSettings(rank=2, modules_to_save=("mlp",)), seed=0)
    names = [name for name in trainable_parameters(model) if ".mlp." in name]
    assert names and not any("lora" in name for name in names)
    with pytest.raises(UserError, match="16-bit"):
        Lora.apply(tiny_llama().bfloat16(), MethodSettings(rank=2, modules_to_save=("mlp",)), seed=0)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_whole_modules_are_trained_in_fp32_beside_a_16_bit_model(kind: torch.dtype) -> None:
    model = tiny_llama().to(kind)
    Lora.apply(model, MethodSettings(rank=2, modules_to_save=("embed_tokens", "lm_head")), seed=0)
    assert all(parameter.dtype == torch.float32 for parameter in trainable_parameters(model).values())
    with stock_attention(model):
        assert model.model(input_ids=IDS).last_hidden_state.dtype == kind
        assert _logits(model).dtype == kind


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bias": "all"}, "bias"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"peft_type": "IA3"}, "IA3"),
    ],
)
def test_adapters_that_compute_something_else_are_refused_by_name(tmp_path: Path, change: dict, words: str) -> None:
    model = tiny_llama()
    adapter = Lora.apply(model, METHODS["all linears"], seed=0)
    folder = _write(adapter, tmp_path / "adapter")
    config = json.loads((folder / ADAPTER_CONFIG).read_text()) | change
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
    with pytest.raises(UserError, match=words):
        load_adapter(tiny_llama(), folder)


def test_an_adapter_for_another_model_is_refused(tmp_path: Path) -> None:
    model = tiny_llama(num_hidden_layers=3)
    folder = _write(Lora.apply(model, METHODS["all linears"], seed=0), tmp_path / "adapter")
    with pytest.raises(UserError, match="does not fit this model"):
        load_adapter(tiny_llama(), folder)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module.model."])
def test_names_with_a_prefix_are_refused_with_the_prefix(tmp_path: Path, prefix: str) -> None:
    """Guards adapters saved from a wrapped model: the error had no fix."""
    folder = _write(Lora.apply(tiny_llama(), METHODS["all linears"], seed=0), tmp_path / "adapter")
    path = folder / ADAPTER_WEIGHTS
    save_file({prefix + name: tensor for name, tensor in load_file(path).items()}, path)
    with pytest.raises(UserError, match="does not fit this model") as refused:
        load_adapter(tiny_llama(), folder)
    assert f"`{prefix}`" in (refused.value.fix or "")


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_larger_vocabulary_is_named_as_the_cause(tmp_path: Path, is_tied: bool) -> None:
    """Guards adapters with added tokens: the error blamed tied embeddings, or a shape."""
    larger = tiny_llama(tie_word_embeddings=is_tied)
    larger.resize_token_embeddings(larger.config.vocab_size + 3)
    folder = _write(Lora.apply(larger, METHODS["a whole head and embedding"], seed=0), tmp_path / "adapter")
    small = tiny_llama(tie_word_embeddings=is_tied)
    with pytest.raises(UserError, match=f"{larger.config.vocab_size} tokens.* {small.config.vocab_size}") as refused:
        load_adapter(small, folder)
    assert "added" in (refused.value.fix or "")


@pytest.mark.parametrize(
    "method",
    [MethodSettings(targets=("q_porj",)), MethodSettings(modules_to_save=("lm_haed",)), MethodSettings(layers=(9,))],
)
def test_names_that_the_model_does_not_have_are_refused_with_those_it_has(method: MethodSettings) -> None:
    with pytest.raises(UserError) as refused:
        Lora.apply(tiny_llama(), method, seed=0)
    assert any(name in str(refused.value.fix) for name in ("_proj", "lm_head", "layers are 0 to 1"))
