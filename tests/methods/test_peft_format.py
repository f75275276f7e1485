"""What we write is what PEFT loads, for models whose layers it would otherwise miss or mistake; and the other way."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lessons import distance, tiny_llama
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import VOCABULARY, order, tiny, tiny_config
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma4Config, PreTrainedModel

from tunewell.config.schema import MethodSettings
from tunewell.core.errors import UserError
from tunewell.methods.base import load_adapter, trainable_parameters
from tunewell.methods.lora import Lora
from tunewell.models.attention import stock_attention
from tunewell.models.load import load_model
from tunewell.models.support import text_weights
from tunewell.records.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS

IDS = torch.randint(0, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(0))
# Dense layers and shared experts beside the routed ones, under the names that PEFT takes for experts.
MIXTURES: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
    },
    "deepseek_v3": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    "qwen2_moe": {},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "mixtral": {},
    "olmoe": {},
    # Its router is an `nn.Linear` that answers with more than one tensor, and was wrapped like any other.
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def _trained(model: PreTrainedModel, method: MethodSettings, folder: Path, *, text_prefix: str = "") -> torch.Tensor:
    """Put an adapter that changes something on a model, write it, and give the logits."""
    adapter = Lora.apply(model, method, seed=3, text_prefix=text_prefix)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.05)
    folder.mkdir(exist_ok=True)
    adapter.files("base").write(folder)
    return _logits(model)


def _agrees(base: PreTrainedModel, method: MethodSettings, folder: Path) -> None:
    """Train an adapter with ours, and compare with PEFT and with ours reading it again."""
    again, ours = copy.deepcopy(base), copy.deepcopy(base)
    before = _logits(base)
    wanted = _trained(ours, method, folder)
    assert distance(wanted, before) > 1e-3, "an adapter that changes nothing proves nothing"
    load_adapter(again, folder)
    assert distance(_logits(again), wanted) < 1e-6
    assert distance(_logits(PeftModel.from_pretrained(base, folder)), wanted) < 1e-5


@pytest.mark.parametrize("layers", ["all", (0, 1)])
@pytest.mark.parametrize("kind", MIXTURES)
def test_peft_takes_dense_layers_and_shared_experts_for_what_they_are(tmp_path: Path, kind: str, layers: Any) -> None:
    """PEFT fused `gate_proj` and its kin into the routed experts, and dropped the matrices that were trained."""
    model = tiny(kind, **MIXTURES[kind])
    _agrees(model, MethodSettings(rank=3, alpha=6, dropout=0.1, layers=layers), tmp_path)


def test_what_targets_only_such_layers_is_loaded_too(tmp_path: Path) -> None:
    model = tiny("deepseek_v3", **MIXTURES["deepseek_v3"])
    _agrees(model, MethodSettings(rank=3, alpha=6, targets=("down_proj",)), tmp_path)


@pytest.mark.parametrize(
    ("is_tied", "saved"),
    [
        (True, ("embed_tokens",)),
        (True, ("lm_head",)),
        (False, ("embed_tokens",)),
        (False, ("norm",)),
        (False, ("norm", "lm_head")),
        (False, ("1.mlp",)),
        (False, ("mlp", "down_proj")),
    ],
)
def test_peft_takes_the_same_modules_as_a_whole(tmp_path: Path, is_tied: bool, saved: tuple[str, ...]) -> None:
    """PEFT asked for a tied head that was not there, and took `input_layernorm` for `norm`."""
    model = tiny_llama(tie_word_embeddings=is_tied, num_hidden_layers=12 if saved == ("1.mlp",) else 2)
    with stock_attention(model):
        _agrees(model, MethodSettings(rank=2, modules_to_save=saved), tmp_path)


def test_a_tied_head_is_loaded_where_peft_does_not_know_the_embeddings_name(tmp_path: Path) -> None:
    model = tiny("gpt_neox", tie_word_embeddings=True)
    _agrees(model, MethodSettings(rank=2, modules_to_save=("embed_in",)), tmp_path)


def _whole(kind: str, folder: Path, tokenizer: Path) -> Path:
    """Write a tiny model that also sees."""
    sight: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    sight |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    size = len(json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]) + 20
    text = tiny_config(
        f"{kind}_text", vocab_size=size, **({"vocab_size_per_layer_input": size} if kind == "gemma4" else {})
    )
    if kind == "gemma3":
        marks = {"image_token_index": size - 1, "boi_token_index": size - 2, "eoi_token_index": size - 3}
        config: Any = Gemma3Config(text_config=text, vision_config=sight, mm_tokens_per_image=4, **marks)
    else:
        config = Gemma4Config(text_config=text, vision_config=sight | {"head_dim": 8, "num_key_value_heads": 2})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "method", [MethodSettings(rank=3, layers=(1, 2)), MethodSettings(rank=3, modules_to_save=("embed_tokens", "norm"))]
)
@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_the_adapter_of_a_text_part_works_on_the_whole_model(
    tmp_path: Path, tiny_model: Path, kind: str, method: MethodSettings
) -> None:
    """It was written for the text part alone, and PEFT gave the figures of the base with a warning."""
    base = _whole(kind, tmp_path / "base", tiny_model)
    found = load_model(order(base, tiny_model))
    before = _logits(found.model)
    wanted = _trained(found.model, method, tmp_path / "adapter", text_prefix=found.text_prefix)
    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    assert type(theirs) is not type(found.model)
    assert distance(_logits(theirs), before) < 1e-5
    assert distance(_logits(PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()), wanted) < 1e-5
    assert distance(wanted, before) > 1e-3
    again = load_model(order(base, tiny_model)).model
    load_adapter(again, tmp_path / "adapter")
    assert distance(_logits(again), wanted) < 1e-6


def test_an_adapter_that_peft_trained_on_the_whole_model_is_read(tmp_path: Path, tiny_model: Path) -> None:
    base = _whole("gemma3", tmp_path / "base", tiny_model)
    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    targets = r"model\.language_model\..*\.(q|v)_proj"
    theirs = get_peft_model(theirs, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    theirs.save_pretrained(tmp_path / "adapter")
    ours = load_model(order(base, tiny_model)).model
    load_adapter(ours, tmp_path / "adapter")
    assert distance(_logits(ours), _logits(theirs.eval())) < 1e-5


def test_a_model_is_given_whole_where_that_is_wanted(tmp_path: Path, tiny_model: Path) -> None:
    """The proof of an adapter loaded the text part alone, on which names that nobody else can use are right."""
    base = _whole("gemma3", tmp_path / "base", tiny_model)
    part = load_model(order(base, tiny_model)).model
    whole = load_model(order(base, tiny_model, is_packed=False, is_whole=True)).model
    assert type(whole) is type(AutoModelForCausalLM.from_pretrained(base))
    own, found = dict(part.named_parameters(remove_duplicate=False)), text_weights(whole)
    assert own.keys() == found.keys() and all(torch.equal(own[name], found[name]) for name in own)


def _plain(**changes: Any) -> PreTrainedModel:
    base = tiny_llama(**changes)
    base.set_attn_implementation("sdpa")
    return base


def _by_peft(folder: Path, *, tie: bool, saved: list[str], equal: bool = False) -> torch.Tensor:
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=saved, ensure_weight_tying=tie)
    theirs = get_peft_model(_plain(tie_word_embeddings=True), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.requires_grad and ("lora" in name or not equal):
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    theirs.save_pretrained(folder)
    return _logits(theirs)


@pytest.mark.parametrize("saved", [["embed_tokens", "lm_head"], ["embed_tokens"], ["lm_head"]])
def test_a_head_that_peft_trained_apart_from_its_embedding_is_refused(tmp_path: Path, saved: list[str]) -> None:
    """One of the two was taken for both, without a word."""
    _by_peft(tmp_path, tie=False, saved=saved)
    with pytest.raises(UserError, match="differ") as refused:
        load_adapter(tiny_llama(tie_word_embeddings=True), tmp_path)
    assert "ensure_weight_tying" in str(refused.value.fix)


@pytest.mark.parametrize(
    ("tie", "saved", "equal"),
    [
        (True, ["embed_tokens", "lm_head"], False),
        (True, ["embed_tokens"], False),
        (False, ["embed_tokens", "lm_head"], True),
        (False, ["lm_head"], True),
    ],
)
def test_a_head_that_is_the_embedding_is_read(tmp_path: Path, tie: bool, saved: list[str], equal: bool) -> None:
    wanted = _by_peft(tmp_path, tie=tie, saved=saved, equal=equal)
    ours = tiny_llama(tie_word_embeddings=True)
    load_adapter(ours, tmp_path)
    with stock_attention(ours):
        assert distance(_logits(ours), wanted) < 1e-5


@pytest.mark.parametrize("is_tied", [True, False])
def test_tables_that_peft_saves_without_saying_so_are_read(tmp_path: Path, is_tied: bool) -> None:
    """PEFT adds them once the vocabulary was lengthened; of a tied model they were left out without a word."""
    theirs = get_peft_model(_plain(tie_word_embeddings=is_tied), LoraConfig(r=2, target_modules=["q_proj"]))
    with torch.no_grad():
        theirs.get_input_embeddings().weight.mul_(1.5)
    theirs.save_pretrained(tmp_path, save_embedding_layers=True)
    assert json.loads((tmp_path / ADAPTER_CONFIG).read_text())["modules_to_save"] is None
    ours = tiny_llama(tie_word_embeddings=is_tied)
    adapter = load_adapter(ours, tmp_path)
    with stock_attention(ours):
        assert distance(_logits(ours), _logits(theirs)) < 1e-5
    assert isinstance(adapter, Lora)
    assert set(adapter.config["modules_to_save"]) == {"embed_tokens", "lm_head"}


def test_tables_of_a_vocabulary_that_was_lengthened_do_not_fit_the_one_that_was_not(tmp_path: Path) -> None:
    base = _plain(tie_word_embeddings=True)
    base.resize_token_embeddings(VOCABULARY + 8, mean_resizing=False)
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(
        tmp_path, save_embedding_layers=True
    )
    with pytest.raises(UserError, match="does not fit"):
        load_adapter(tiny_llama(tie_word_embeddings=True), tmp_path)


def test_an_earlier_adapter_with_the_tied_table_once_is_read(tmp_path: Path) -> None:
    model = tiny_llama(tie_word_embeddings=True)
    with stock_attention(model):
        wanted = _trained(model, MethodSettings(rank=2, modules_to_save=("embed_tokens",)), tmp_path)
    tensors = load_file(tmp_path / ADAPTER_WEIGHTS)
    del tensors["base_model.model.lm_head.weight"]
    save_file(tensors, tmp_path / ADAPTER_WEIGHTS)
    config = json.loads((tmp_path / ADAPTER_CONFIG).read_text()) | {"modules_to_save": ["embed_tokens"]}
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(config))
    again = tiny_llama(tie_word_embeddings=True)
    load_adapter(again, tmp_path)
    with stock_attention(again):
        assert distance(_logits(again), wanted) < 1e-6


@pytest.mark.parametrize(
    "more",
    [
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
        {"alora_invocation_tokens": [5, 6]},
        {"layer_replication": [[0, 2], [1, 2]]},
    ],
)
def test_adapters_of_peft_that_ours_would_compute_otherwise_are_refused_by_name(tmp_path: Path, more: dict) -> None:
    base = tiny_llama()
    base.set_attn_implementation("sdpa")
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **more)).save_pretrained(
        tmp_path
    )
    with pytest.raises(UserError, match=next(iter(more))):
        load_adapter(tiny_llama(), tmp_path)


def test_matrices_beside_stacked_experts_are_refused_by_name(tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    get_peft_model(tiny("mixtral"), config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"target_parameters: experts\.down_proj"):
        load_adapter(tiny("mixtral"), tmp_path)


@pytest.mark.parametrize("init", ["gaussian", "orthogonal", True])
def test_other_beginnings_of_peft_are_read(tmp_path: Path, init: Any) -> None:
    theirs = get_peft_model(_plain(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=init))
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    theirs.save_pretrained(tmp_path)
    ours = tiny_llama()
    load_adapter(ours, tmp_path)
    with stock_attention(ours):
        assert distance(_logits(ours), _logits(PeftModel.from_pretrained(_plain(), tmp_path))) < 1e-5
