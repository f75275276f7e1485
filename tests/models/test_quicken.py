"""Parts computed in fewer passes give what transformers gives, both ways; what is another thing is left alone."""

import io
from typing import Any

import pytest
import torch
from lessons import VOCABULARY, RandomDocuments, distance, gradients, lora_learner, tiny_llama
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tunewell.config.schema import Method, Train
from tunewell.models import adapters, attention, norms, rotary
from tunewell.models.lora import LoraLinear, read_together
from tunewell.models.quicken import quicken, stock_modules
from tunewell.training.batches import lay_out
from tunewell.training.step import Learner

_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.3,
}
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "llama with biases": lambda: LlamaConfig(**_SHAPE, attention_bias=True),
    "windows": lambda: MistralConfig(**_SHAPE, sliding_window=7),
    "qwen2": lambda: Qwen2Config(**_SHAPE),
    "windows in some layers": lambda: Qwen2Config(
        **_SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "norms of queries and keys": lambda: Qwen3Config(**_SHAPE, head_dim=8),
}


def _forwards(model: torch.nn.Module) -> list[Any]:
    return [vars(m)["forward"].__func__ for m in model.modules() if "forward" in vars(m)]


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_a_quickened_model_gives_the_losses_and_gradients_of_the_stock_one(name: str, method: str) -> None:
    attention.register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name](), attn_implementation=attention.SDPA)
    if method == "lora":
        learner = lora_learner(model, method=Method(rank=4, alpha=8, dropout=0.0))
    else:
        adapters.train_everything(model)
        learner = Learner(model, "fp32", 40, settings=Train())
    assert norms.forward in _forwards(model)
    batch = lay_out(RandomDocuments(), list(range(7)))
    ours = learner.loss_sum(batch)
    ours.backward()
    mine = gradients(learner)
    with stock_modules(model):
        assert not _forwards(model)
        theirs = learner.loss_sum(batch)
        theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    for parameter, wanted in gradients(learner).items():
        assert distance(mine[parameter], wanted) < 1e-5, parameter


def test_attention_of_the_known_kinds_is_quickened_and_others_keep_their_own() -> None:
    attention.register()
    found = {}
    for name, config in MODELS.items():
        model = AutoModelForCausalLM.from_config(config(), attn_implementation=attention.SDPA)
        quicken(model)
        found[name] = _forwards(model).count(rotary.forward)
    assert found == {**dict.fromkeys(MODELS, 2), "norms of queries and keys": 0}


def test_a_norm_of_another_kind_is_left_alone() -> None:
    """Gemma's adds one to its weight."""
    config = Gemma2Config(**_SHAPE, head_dim=8)
    model = AutoModelForCausalLM.from_config(config)
    quicken(model)
    assert norms.forward not in _forwards(model)


def test_quickening_twice_does_no_harm_and_other_precisions_keep_their_own_way() -> None:
    norm = LlamaRMSNorm(16)
    assert quicken(norm) == quicken(norm) == 1
    rows = torch.randn(3, 16).bfloat16()
    assert torch.equal(norm(rows), LlamaRMSNorm(16)(rows))


def test_a_quickened_model_writes_text_as_before() -> None:
    """With a cache of keys, its attention is transformers' own."""
    model = tiny_llama()
    ids = torch.arange(9)[None]
    with attention.stock_attention(model):
        wanted = model.generate(ids, max_new_tokens=8, do_sample=False)
        quicken(model)
        assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), wanted)


def test_a_quickened_model_that_is_saved_whole_is_a_stock_one_when_it_is_read() -> None:
    model = tiny_llama()
    quicken(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    with attention.stock_attention(model), attention.stock_attention(read):
        ids = torch.arange(9)[None]
        torch.testing.assert_close(read(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


def test_linears_that_someone_watches_are_called_one_by_one() -> None:
    linears, seen = [_lora(8, rank=4, scale=2.0), _lora(5, rank=2, scale=0.5)], []
    linears[1].register_forward_hook(lambda module, given, made: seen.append(module))
    read_together(linears, torch.randn(3, 12))
    assert seen == [linears[1]]


def _lora(outputs: int, *, rank: int, scale: float, bias: bool = False) -> LoraLinear:
    base = torch.nn.Linear(12, outputs, bias=bias)
    base.requires_grad_(False)
    made = LoraLinear(base, rank=rank, scale=scale, dropout=0.0)
    torch.nn.init.normal_(made.lora_A)
    torch.nn.init.normal_(made.lora_B)
    return made


def test_linears_read_together_are_what_they_are_alone() -> None:
    """Of several ranks, scales and widths, with and without a bias."""
    torch.manual_seed(0)
    linears = [_lora(8, rank=4, scale=2.0), _lora(5, rank=2, scale=0.5, bias=True), _lora(7, rank=1, scale=1.0)]
    x = torch.randn(2, 9, 12, requires_grad=True)
    slopes = [torch.randn(2, 9, linear.out_features) for linear in linears]
    wanted_of = [x, *(p for linear in linears for p in (linear.lora_A, linear.lora_B))]
    plain = [torch.nn.functional.linear(x, m.weight + m.scale * m.lora_B @ m.lora_A, m.bias) for m in linears]
    for made in (read_together(linears, x), [linear(x) for linear in linears]):
        for a, b in zip(made, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        mine = torch.autograd.grad(made, wanted_of, slopes, retain_graph=True)
        wanted = torch.autograd.grad(plain, wanted_of, slopes, retain_graph=True)
        for a, b in zip(mine, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_linears_of_which_one_has_no_adapter_are_read_one_by_one() -> None:
    torch.manual_seed(0)
    linears = [_lora(8, rank=4, scale=2.0), torch.nn.Linear(12, 5)]
    x = torch.randn(3, 12)
    for a, linear in zip(read_together(linears, x), linears, strict=True):
        assert torch.equal(a, linear(x))
    switched_off = _lora(8, rank=4, scale=2.0)
    switched_off.is_on = False
    [made] = read_together([switched_off], x)
    assert torch.equal(made, switched_off.base_layer(x))
