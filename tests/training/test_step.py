"""A step is its documents: no cut into micro-batches, no packing and no number of processes changes it."""

import numpy as np
import pytest
import torch
from lessons import RandomDocuments, distance, gradients, lora_learner, tiny_llama

from tunewell.config.schema import MethodSettings, Train
from tunewell.data.batches import FixedShape, make_batch
from tunewell.methods.full import Full
from tunewell.models.attention import stock_attention
from tunewell.training.step import TrainableModel

CHOSEN = list(range(11))
METHODS = {
    "lora": MethodSettings(rank=4, alpha=8),
    "nf4": MethodSettings(rank=4, alpha=8, quantize="nf4"),
    "int8": MethodSettings(rank=4, alpha=8, quantize="int8"),
    "dora": MethodSettings(kind="dora", rank=4, alpha=8),
    "dora on nf4": MethodSettings(kind="dora", rank=4, alpha=8, quantize="nf4"),
}
# Adam divides a gradient by its own size: with the usual 1e-8 here, rounding of one that is nearly zero becomes a step.
TRAIN = Train(adam_epsilon=1e-4)


def _loss_alone(learner: TrainableModel, documents: RandomDocuments, chosen: list[int]) -> torch.Tensor:
    """The sum of the loss that plain transformers gives document by document."""
    total = torch.zeros(())
    with stock_attention(learner.model):
        for document in chosen:
            ids, labels = (torch.tensor(row)[None].long() for row in documents.arrays(document))
            number = int((labels[:, 1:] != -100).sum())
            total = total + learner.model(input_ids=ids, labels=labels).loss * number
    return total


@pytest.mark.parametrize("kind", METHODS)
def test_a_packed_step_is_what_transformers_gives_document_by_document(kind: str) -> None:
    learner, documents = lora_learner(method=METHODS[kind]), RandomDocuments()
    theirs = _loss_alone(learner, documents, CHOSEN)
    theirs.backward()
    wanted = gradients(learner)
    ours = learner.loss_sum(make_batch(documents, CHOSEN))
    ours.backward()
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)
    for name, gradient in gradients(learner).items():
        assert distance(gradient, wanted[name]) < 1e-4, name


def _beginning_alike(size: int = 12, own: list[int] | None = None) -> RandomDocuments:
    """Documents with the same opening, half of which is learned, of given lengths beyond it."""
    documents = RandomDocuments()
    if own is not None:
        draw = np.random.default_rng(1)
        ids = [draw.integers(0, 131, length).astype(np.int32) for length in own]
        documents.rows = [(row, row) for row in ids]
    opening = np.arange(3, 3 + size, dtype=np.int32)
    labels = np.where(np.arange(size) < size // 2, -100, opening)
    documents.rows = [(np.r_[opening, ids], np.r_[labels, own]) for ids, own in documents.rows]
    documents.index = {"length": np.array([len(ids) for ids, _ in documents.rows])}
    return documents


@pytest.mark.parametrize("own", [None, [12, 8, 3], [12, 12, 12], [5, 12, 5]])
def test_an_opening_that_documents_share_is_computed_once_and_learned_as_often_as_it_is_there(
    own: list[int] | None,
) -> None:
    """Also where documents are as long as the opening itself."""
    learner, documents = lora_learner(), _beginning_alike(12, own)
    chosen = CHOSEN if own is None else list(range(len(own)))
    batch = make_batch(documents, chosen)
    seen: list[int] = []
    learner.body.register_forward_pre_hook(
        lambda module, given, named: seen.append(named["input_ids"].numel()), with_kwargs=True
    )
    theirs = _loss_alone(learner, documents, chosen)
    theirs.backward()
    wanted = gradients(learner)
    seen.clear()
    ours = learner.loss_sum(batch)
    ours.backward()
    assert seen == [batch.num_tokens - 12 * (len(chosen) - 1)]
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    for name, gradient in gradients(learner).items():
        assert distance(gradient, wanted[name]) < 1e-4, name
    rows = learner.token_losses(batch)
    assert rows.sum() == pytest.approx(ours.item(), rel=1e-5)


@pytest.mark.parametrize("size", [0, 12])
def test_a_whole_model_trained_in_bf16_on_a_cpu_takes_the_step_of_fp32_within_rounding(size: int) -> None:
    """Casting as it goes, it rotates queries and keys in fp32 and reads values in bf16."""
    made = {}
    for precision in ("fp32", "bf16"):
        model = tiny_llama()
        Full.apply(model, MethodSettings(kind="full"))
        learner = TrainableModel(model, precision, 40, settings=Train())
        documents = _beginning_alike(size) if size else RandomDocuments()
        loss = learner.loss_sum(make_batch(documents, CHOSEN))
        loss.backward()
        made[precision] = loss.item(), gradients(learner)
    assert made["bf16"][0] == pytest.approx(made["fp32"][0], rel=2e-2)
    for name, gradient in made["bf16"][1].items():
        assert distance(gradient.float(), made["fp32"][1][name]) < 0.1, name


def test_a_rate_that_only_the_config_knows_counts_as_drawing() -> None:
    """Some models drop by a function, not by a module."""
    model = tiny_llama()
    assert not TrainableModel(model, "fp32", 40).has_dropout
    model.config.residual_dropout = 0.1
    assert TrainableModel(model, "fp32", 40).has_dropout


def test_where_something_is_drawn_every_document_draws_its_own_opening() -> None:
    learner = lora_learner(method=MethodSettings(rank=4, alpha=8, dropout=0.1))
    batch, seen = make_batch(_beginning_alike(), CHOSEN), []
    learner.body.register_forward_pre_hook(
        lambda module, given, named: seen.append(named["input_ids"].numel()), with_kwargs=True
    )
    learner.model.train()
    learner.hidden(batch)
    learner.model.eval()
    learner.hidden(batch)
    assert seen == [batch.num_tokens, batch.num_tokens - 12 * (len(CHOSEN) - 1)]


@pytest.mark.parametrize("kind", ["full", *METHODS])
@pytest.mark.parametrize("budget", [1, 40, 97, 10_000])
def test_any_cut_into_micro_batches_makes_the_same_step(kind: str, budget: int) -> None:
    """1 means one document at a time: packed equals not packed, and the last short micro-batch weighs what it holds."""
    documents = RandomDocuments()

    def after(budget: int) -> tuple[tuple, dict[str, torch.Tensor]]:
        if kind != "full":
            learner = lora_learner(train=TRAIN, method=METHODS[kind])
        else:
            model = tiny_llama()
            Full.apply(model, MethodSettings(kind="full"))
            learner = TrainableModel(model, "fp32", 40, settings=TRAIN)
        numbers = [
            learner.take_step(documents.batches(chosen, budget), number=number, rate=1e-3).read()
            for number, chosen in enumerate([CHOSEN, list(range(11, 22)), [22, 23]])
        ]
        return numbers, {name: p.detach().clone() for name, p in learner.parameters.items()}

    numbers, weights = after(budget)
    wanted_numbers, wanted = after(400)
    np.testing.assert_allclose(numbers, wanted_numbers, rtol=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-6, atol=1e-6)


def test_filling_up_to_a_fixed_shape_changes_nothing() -> None:
    learner, documents = lora_learner(), RandomDocuments()
    plain = learner.loss_sum(make_batch(documents, CHOSEN))
    plain.backward()
    wanted = gradients(learner)
    learner.shape = FixedShape(640, 64, 40)
    filled = learner.loss_sum(make_batch(documents, CHOSEN))
    filled.backward()
    assert float(filled) == pytest.approx(float(plain), rel=1e-6)
    for name, gradient in gradients(learner).items():
        assert distance(gradient, wanted[name]) < 1e-5, name


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("spoil", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing_at_all(kind: str, spoil: str) -> None:
    """Planted NaN: the update must be a no-op, the optimizer's count of steps included."""
    learner, documents = lora_learner(method=METHODS[kind]), RandomDocuments()
    learner.take_step(documents.batches(CHOSEN, 64), number=0, rate=1e-3)
    weights = {name: p.detach().clone() for name, p in learner.parameters.items()}
    memory = {name: t.clone() for name, t in learner.optimizer.state_tensors().items()}
    if spoil == "loss":
        head = learner.model.get_output_embeddings()
        kept = head.weight.detach().clone()
        head.weight.data[5] = float("nan")
    else:
        first = next(iter(learner.parameters.values()))
        handle = first.register_hook(lambda gradient: gradient * float("inf"))
    loss, norm, was_skipped, _ = learner.take_step(documents.batches(CHOSEN, 64), number=1, rate=1e-3).read()
    assert was_skipped and not (np.isfinite(loss) and np.isfinite(norm))
    for name, weight in weights.items():
        assert torch.equal(learner.parameters[name], weight), name
    for name, tensor in learner.optimizer.state_tensors().items():
        assert torch.equal(tensor, memory[name]), name
    if spoil == "loss":
        head.weight.data.copy_(kept)
    else:
        handle.remove()
    assert not learner.take_step(documents.batches(CHOSEN, 64), number=2, rate=1e-3).read()[2]


def test_clipping_is_torch_clipping() -> None:
    documents = RandomDocuments()
    ours, theirs = lora_learner(train=Train(max_grad_norm=0.5, adam_epsilon=1e-4)), lora_learner()
    ours.take_step(documents.batches(CHOSEN, 100), number=0, rate=1e-2)
    optimizer = torch.optim.AdamW(theirs.parameters.values(), lr=1e-2, weight_decay=0.0, eps=1e-4)
    batch = make_batch(documents, CHOSEN)
    (theirs.loss_sum(batch) / len(batch.rows)).backward()
    torch.nn.utils.clip_grad_norm_(theirs.parameters.values(), 0.5)
    optimizer.step()
    for name, parameter in ours.parameters.items():
        torch.testing.assert_close(parameter, theirs.parameters[name], rtol=1e-5, atol=1e-6)


def test_what_a_step_draws_depends_on_its_number_only() -> None:
    """Dropout after a resume must be that of the unbroken run."""
    documents = RandomDocuments()

    def learner() -> TrainableModel:
        return lora_learner(method=MethodSettings(rank=4, dropout=0.3))

    straight, resumed = learner(), learner()
    batches = documents.batches(CHOSEN, 64)
    straight.take_step(batches, number=0, rate=1e-3)
    torch.manual_seed(999)
    for name, parameter in resumed.parameters.items():
        parameter.data.copy_(straight.parameters[name])
    resumed.optimizer.load_state(straight.optimizer.state_tensors())
    second = straight.take_step(batches, number=1, rate=1e-3).read()
    assert resumed.take_step(batches, number=1, rate=1e-3).read() == second
    assert resumed.take_step(batches, number=1, rate=1e-3).read() != second
    for name, parameter in resumed.parameters.items():
        assert parameter.shape == straight.parameters[name].shape


def test_under_fp16_an_overflow_halves_the_scale_and_skips_the_step() -> None:
    model = tiny_llama().half()
    learner = lora_learner(model)
    learner.precision = "fp16"
    learner = TrainableModel(model, "fp16", 40, settings=Train())
    documents = RandomDocuments()
    first = learner.scaler.scale.item()
    learner.scaler.scale.fill_(2.0**60)
    *_, was_skipped, scale = learner.take_step(documents.batches(CHOSEN, 100), number=0, rate=1e-3).read()
    assert was_skipped and scale == 2.0**59
    learner.scaler.scale.fill_(first)
    loss, norm, was_skipped, scale = learner.take_step(documents.batches(CHOSEN, 100), number=1, rate=1e-3).read()
    assert not was_skipped and np.isfinite([loss, norm]).all() and scale == first


@pytest.mark.parametrize("mode", ["on", "offload"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["lora", "nf4", "dora", "full"])
def test_recomputed_layers_make_the_same_step(mode: str, dropout: float, kind: str) -> None:
    """Also with dropout, whose mask must be the one of the first forward pass, and after a step that failed midway."""
    documents = RandomDocuments()

    def after(mode: str) -> dict[str, torch.Tensor]:
        if kind == "full":
            Full.apply(model := tiny_llama(attention_dropout=dropout), MethodSettings(kind="full"))
            learner = TrainableModel(model, "fp32", 40, settings=TRAIN)
        else:
            learner = lora_learner(train=TRAIN, method=METHODS[kind].model_copy(update={"dropout": dropout}))
        learner.recompute(mode)  # type: ignore[arg-type]
        learner.model.train()
        learner.loss_sum(make_batch(documents, CHOSEN))  # no backward pass follows
        for number, chosen in enumerate([CHOSEN, list(range(11, 22))]):
            learner.take_step(documents.batches(chosen, 97), number=number, rate=1e-3)
        return {name: p.detach().clone() for name, p in learner.parameters.items()}

    wanted = after("off")
    for name, weight in after(mode).items():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-6, atol=1e-6)


def test_full_fine_tuning_of_some_layers_freezes_the_rest_and_stops_below() -> None:
    """Guards the memory that `method.layers` saves: nothing below the lowest trained layer has a gradient."""
    Full.apply(model := tiny_llama(num_hidden_layers=3), MethodSettings(kind="full", layers=(1,)))
    learner, documents = TrainableModel(model, "fp32", 40, settings=TRAIN), RandomDocuments()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    seen: list[bool] = []
    model.model.layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].requires_grad))
    learner.take_step(documents.batches(CHOSEN, 400), number=0, rate=1e-2)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert seen == [False] and changed == {name for name in before if ".layers.1." in name} == set(learner.parameters)
