"""On CUDA: flash and SDPA, eager and compiled, are what plain transformers computes in fp32, to bf16's rounding."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lessons import RandomDocuments, gradients
from tiny_runs import make_plan, make_run
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from tunewell.config.schema import MethodSettings, Train
from tunewell.core.errors import UserError
from tunewell.data.batches import DataOrder, make_batch
from tunewell.methods.base import trainable_parameters
from tunewell.methods.full import Full
from tunewell.methods.lora import Lora
from tunewell.models import attention
from tunewell.training import compile as compiling
from tunewell.training.compile import Compiler
from tunewell.training.engine import train
from tunewell.training.leak_probe import probe_leaks
from tunewell.training.optimizers.adamw8bit import AdamW8bit
from tunewell.training.optimizers.base import Scaler
from tunewell.training.run import resume
from tunewell.training.step import TrainableModel

pytestmark = pytest.mark.gpu
NUMBER = 50
SHAPES: dict[str, Any] = {
    # SmolLM2-135M's, with weights drawn at random.
    "135m": lambda: LlamaForCausalLM(
        LlamaConfig(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=49152,
            tie_word_embeddings=True,
        )
    ),
    "windows": lambda: MistralForCausalLM(
        MistralConfig(
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=1000,
            sliding_window=64,
        )
    ),
}


@pytest.mark.parametrize(("heads", "groups", "size"), [(8, 2, 64), (4, 4, 128), (6, 1, 64)])
def test_triton_attention_is_that_of_each_document_alone(heads: int, groups: int, size: int) -> None:
    """Lengths beside the block size of 64, documents of one token, and empty ones as a compiled shape has."""
    from tunewell.models.triton_attention import attend_in_documents

    lengths = [1, 63, 64, 65, 300, 1, 0, 129, 0]
    ends = torch.tensor(lengths).cumsum(0)
    spans = [x.repeat_interleave(torch.tensor(lengths)).int().cuda() for x in (ends - torch.tensor(lengths), ends)]
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(sum(lengths), n, size, device="cuda").bfloat16() for n in (heads, groups, groups, heads)
    )
    ours = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend_in_documents(*ours, starts_T=spans[0], ends_T=spans[1], scale=None)
    out.backward(grad)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    parts = []
    for at, length in zip((ends - torch.tensor(lengths)).tolist(), lengths, strict=True):
        own = [x[at : at + length].transpose(0, 1) for x in exact]
        parts.append(F.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True).transpose(0, 1))
    expected = torch.cat(parts)
    expected.backward(grad.double())
    pairs = [(out, expected), *((mine.grad, true.grad) for mine, true in zip(ours, exact, strict=True))]
    assert [float((a.double() - b).norm() / b.norm()) < 5e-3 for a, b in pairs] == [True] * 4


def _documents() -> RandomDocuments:
    return RandomDocuments(NUMBER, longest=400)


def _learner(shape: str, *, way: str, dtype: torch.dtype) -> TrainableModel:
    attention.register()
    torch.manual_seed(0)
    model = SHAPES[shape]().to("cuda", dtype)
    model.set_attn_implementation(way)
    Lora.apply(model, MethodSettings(rank=16), seed=1)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in trainable_parameters(model).items():
            if name.endswith("lora_B"):
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.02)
    return TrainableModel(model, "fp32" if dtype == torch.float32 else "bf16", 400, settings=Train())


def _reference(shape: str, documents: RandomDocuments) -> tuple[float, dict[str, torch.Tensor]]:
    """Plain transformers in fp32, document by document."""
    learner = _learner(shape, way=attention.SDPA, dtype=torch.float32)
    total = torch.zeros((), device="cuda")
    with attention.stock_attention(learner.model):
        for document in range(len(documents)):
            ids, labels = (torch.tensor(row, device="cuda")[None].long() for row in documents.arrays(document))
            loss = learner.model(input_ids=ids, labels=labels).loss * int((labels[:, 1:] != -100).sum())
            loss.backward()
            total += loss.detach()
    return total.item(), gradients(learner)


def _compare(learner: TrainableModel, documents: RandomDocuments, reference: Any) -> None:
    wanted_loss, wanted = reference
    loss = learner.loss_sum(make_batch(documents, range(len(documents))))
    loss.backward()
    assert loss.item() == pytest.approx(wanted_loss, rel=2e-2)
    for name, gradient in gradients(learner).items():
        cosine = torch.nn.functional.cosine_similarity(gradient.flatten(), wanted[name].flatten(), 0)
        assert cosine >= 0.999, (name, cosine.item())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", [attention.SDPA, attention.FLASH])
def test_a_packed_step_in_bf16_is_the_fp32_step_of_transformers(shape: str, way: str) -> None:
    documents = _documents()
    _compare(_learner(shape, way=way, dtype=torch.bfloat16), documents, _reference(shape, documents))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_compiled_step_is_the_fp32_step_of_transformers(shape: str) -> None:
    documents = _documents()
    learner = _learner(shape, way=attention.FLASH, dtype=torch.bfloat16)
    order = DataOrder(documents.index["length"], 0, "x", batch_documents=NUMBER)
    Compiler("on", 100).run(learner, order, budget=int(documents.index["length"].sum()) + 300)
    assert learner.shape is not None and learner.shape.tokens > documents.index["length"].sum()
    _compare(learner, documents, _reference(shape, documents))


def _compiled(
    shape: str, *, uses_graphs: bool, monkeypatch: pytest.MonkeyPatch, method: str = "lora"
) -> tuple[TrainableModel, RandomDocuments]:
    monkeypatch.setattr(compiling, "can_use_graphs", lambda learner, layers: uses_graphs)
    documents = _documents()
    learner = _learner(shape, way=attention.FLASH, dtype=torch.bfloat16)
    if method == "full":
        torch.manual_seed(0)
        model = SHAPES[shape]().to("cuda")
        model.set_attn_implementation(attention.FLASH)
        learner = TrainableModel(model, "bf16", 400, settings=Train())
    order = DataOrder(documents.index["length"], 0, "x", batch_documents=NUMBER)
    Compiler("on", 100).run(learner, order, budget=3000)
    assert learner.uses_graphs is uses_graphs
    return learner, documents


@pytest.mark.parametrize(("method", "rate"), [("lora", 1e-2), ("full", 1e-4)])
def test_steps_in_graphs_are_those_without(monkeypatch: pytest.MonkeyPatch, method: str, rate: float) -> None:
    """In one part and in several, with looks between them, and with a batch that does not fit the compiled shape."""
    found = []
    for uses_graphs in (False, True):
        learner, documents = _compiled("windows", uses_graphs=uses_graphs, monkeypatch=monkeypatch, method=method)
        numbers = []
        for number, (chosen, budget) in enumerate([(range(10), 3000), (range(10, 40), 2000), (range(40), 5000)] * 3):
            taken = learner.take_step(documents.batches(chosen, budget), number=number, rate=rate).read()
            learner.model.eval()
            with torch.no_grad():
                look = float(learner.loss_sum(make_batch(documents, range(40, 48))))
            numbers.append((taken[0], taken[1], look))
        found.append((numbers, {name: own.detach().clone() for name, own in learner.parameters.items()}))
        learner.uncompile()
    (plain, weights), (graphed, others) = found
    for one, other in zip(plain, graphed, strict=True):
        assert other == pytest.approx(one, rel=2e-2)
    for name, own in weights.items():
        cosine = torch.nn.functional.cosine_similarity(own.flatten(), others[name].flatten(), 0)
        assert cosine >= 0.99, (name, cosine.item())


def test_graphs_give_their_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, documents = _compiled("windows", uses_graphs=True, monkeypatch=monkeypatch)
    for number in range(4):
        learner.take_step(documents.batches(range(10), 3000), number=number, rate=1e-3).read()
    torch.cuda.empty_cache()
    kept = torch.cuda.memory_reserved()
    learner.uncompile()
    gc.collect()
    torch.cuda.empty_cache()
    given_back = kept - torch.cuda.memory_reserved()
    assert given_back > 3000 * 256 * 2 * 4  # four layers' inputs at the very least
    assert learner.take_step(documents.batches(range(10), 3000), number=9, rate=1e-3).read()[0] > 0


@pytest.mark.parametrize("way", [attention.SDPA, attention.FLASH])
def test_the_probe_passes_in_bf16_and_sees_a_planted_leak(way: str) -> None:
    learner = _learner("windows", way=way, dtype=torch.bfloat16)
    documents = _documents()
    assert probe_leaks(learner, documents).longest > 64
    honest = learner.hidden
    learner.hidden = lambda batch: honest(replace(batch, lengths=(sum(batch.lengths),)))  # pyright: ignore
    learner.longest = 4000
    with pytest.raises(UserError, match="influence each other"):
        probe_leaks(learner, documents)


def test_a_run_resumed_on_cuda_goes_on_where_it_was(tmp_path: Path) -> None:
    """Flash's backward adds in any order, so the numbers are near, not equal."""

    def run(name: str, steps: int) -> Any:
        made = make_run(tmp_path / name, config={"method": {"rank": 4}}, plan={"num_steps": 12, "device": "cuda:0"})
        model = made.learner.model.to("cuda", torch.bfloat16)
        for parameter in trainable_parameters(model).values():
            parameter.data = parameter.data.float()
        model.set_attn_implementation(attention.FLASH)
        made.learner = TrainableModel(model, "bf16", 40, settings=made.config.train)
        made.plan = make_plan(num_steps=steps, device="cuda:0")
        return made

    straight = run("straight", 12)
    train(straight)
    train(run("broken", 4))
    resumed = run("broken", 12)
    resume(resumed, resumed.checkpoints.load(resumed.checkpoints.newest()))
    train(resumed)
    losses = [[event.loss for event in made.listener.steps] for made in (straight, resumed)]
    assert losses[0][4:] == pytest.approx(losses[1], rel=3e-2)


def test_full_training_in_bf16_keeps_fp32_weights_and_learns() -> None:
    attention.register()
    torch.manual_seed(0)
    model = SHAPES["windows"]().to("cuda")
    model.set_attn_implementation(attention.FLASH)
    Full.apply(model, MethodSettings(kind="full"))
    learner = TrainableModel(model, "bf16", 400, settings=Train())
    documents = _documents()
    batches = documents.batches(range(12), 4000)
    losses = [learner.take_step(batches, number=number, rate=1e-3).read()[0] for number in range(20)]
    assert losses[-1] < 0.85 * losses[0], losses
    assert all(parameter.dtype == torch.float32 for parameter in learner.parameters.values())


def test_bf16_masters_learn_in_half_the_memory_and_wait_for_nothing() -> None:
    """The compiled update is one kernel: no fp32 copy of a parameter, no sync, and a NaN changes nothing."""
    attention.register()
    torch.manual_seed(0)
    model = SHAPES["135m"]().to("cuda", torch.bfloat16)
    model.set_attn_implementation(attention.FLASH)
    Full.apply(model, MethodSettings(kind="full"))
    learner = TrainableModel(model, "bf16", 400, settings=Train(masters="bf16"))
    batches = _documents().batches(range(12), 4000)
    losses = [learner.take_step(batches, number=number, rate=3e-4).read()[0] for number in range(20)]
    assert losses[-1] < 0.85 * losses[0], losses
    assert all(own.dtype == torch.bfloat16 for name, own in _state(learner).items() if not name.endswith("/step"))
    before = {name: own.clone() for name, own in _state(learner).items()}
    torch.cuda.set_sync_debug_mode("error")
    try:
        skipped = learner.take_step(batches, number=20, rate=3e-4, norm_limit=0.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert skipped.read()[2] and all(torch.equal(own, before[name]) for name, own in _state(learner).items())
    for parameter in learner.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    learner.optimizer.update(rate=1e-4, max_norm=1.0, loss=torch.zeros((), device="cuda"), scaler=learner.scaler)
    assert torch.cuda.max_memory_allocated() - held < 1 << 20


@pytest.mark.parametrize("masters", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["adamw8bit", "galore", "galore 8-bit"])
def test_small_states_learn_and_wait_for_nothing(name: str, masters: str) -> None:
    """The compiled 8-bit update is one kernel; a NaN changes nothing, also in a step that refreshes bases."""
    attention.register()
    torch.manual_seed(0)
    model = SHAPES["135m"]().to("cuda", torch.bfloat16 if masters == "bf16" else torch.float32)
    model.set_attn_implementation(attention.FLASH)
    Full.apply(model, MethodSettings(kind="full"))
    settings = Train(masters=masters, optimizer=name.split()[0], galore_every=30, galore_8bit="8-bit" in name)
    learner = TrainableModel(model, "bf16", 400, settings=settings)
    batches = _documents().batches(range(12), 4000)
    rate = 3e-4 if name == "adamw8bit" else 3e-3
    losses = [learner.take_step(batches, number=number, rate=rate).read()[0] for number in range(30)]
    assert losses[-1] < 0.85 * losses[0], losses
    before = {part: own.clone() for part, own in _state(learner).items()}
    torch.cuda.set_sync_debug_mode("error")
    try:
        skipped = learner.take_step(batches, number=30, rate=rate, norm_limit=0.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert skipped.read()[2] and all(torch.equal(own, before[part]) for part, own in _state(learner).items())


def test_the_compiled_8bit_update_is_the_eager_one() -> None:
    """Codes may differ by one where the kernel contracts a multiplication and an addition."""
    made = []
    for device in ("cuda", "cpu"):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(300, 70).to(device))
        optimizer = AdamW8bit({"weight": weight}, Train(weight_decay=0.1))
        scaler = Scaler.make("fp32", torch.device(device))
        for number in range(20):
            weight.grad = torch.randn(300, 70, generator=torch.Generator().manual_seed(number)).to(device)
            optimizer.prepare()
            optimizer.update(rate=1e-3, max_norm=1.0, loss=torch.zeros((), device=device), scaler=scaler)
        made.append({"weight": weight.detach(), **optimizer.state_tensors()})
    torch.testing.assert_close(made[0]["weight"].cpu(), made[1]["weight"], rtol=1e-3, atol=1e-4)
    same = (made[0]["weight/exp_avg"].cpu() == made[1]["weight/exp_avg"]).float().mean()
    assert same > 0.99


def _state(learner: TrainableModel) -> dict[str, torch.Tensor]:
    return {**{name: own.detach() for name, own in learner.parameters.items()}, **learner.optimizer.state_tensors()}


def test_nothing_waits_for_the_device_within_a_step() -> None:
    """A sync would be an error in this mode; the numbers are read afterwards."""
    learner = _learner("windows", way=attention.FLASH, dtype=torch.bfloat16)
    batches = _documents().batches(range(12), 4000)
    learner.take_step(batches, number=0, rate=1e-3).read()
    torch.cuda.set_sync_debug_mode("error")
    try:
        numbers = learner.take_step(batches, number=1, rate=1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert numbers.read()[0] > 0
