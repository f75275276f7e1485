"""HealthCallback in other people's trainers: what is broken is stopped and named, what is healthy is left alone."""

import json
import math
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from forked import in_child
from tunewell import HealthCallback, UserError
from tunewell.features.diagnose.readers import read_log, read_run
from tunewell.features.hf_callback.callback import HealthStop, TrainedLoss, advice
from tunewell.features.hf_callback.signals import SignalRecorder, locate_fault
from tunewell.records.events import read_events
from tunewell.records.healing import read_healing

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS, BAD = 8, 5
LAYER = "model.layers.1.mlp.down_proj.weight"
SILENT = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "bf16": False}
CPU = "use_cpu=True, bf16=False, report_to=[], save_strategy='no', disable_tqdm=True"
GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "health-callback.md"
# Models this small gain nothing from a second thread, and wait for it on a busy machine.
torch.set_num_threads(1)

Make = Callable[..., Trainer]
Plant = Callable[[Trainer, nn.Module], None]


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def rows(number: int = 64) -> Dataset:
    """Documents of many lengths; the first three tokens of each are given."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for at in range(number):
        ids = torch.randint(10, 500, (6 + at % 7,), generator=draw).tolist()
        found.append({"input_ids": ids, "labels": [-100] * 3 + ids[3:]})
    return Dataset.from_list(found)


def padded(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in batch)
    fill = {"input_ids": 0, "labels": -100}
    return {
        name: torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in batch])
        for name, value in fill.items()
    } | {"attention_mask": torch.tensor([[at < len(row["labels"]) for at in range(longest)] for row in batch]).long()}


@pytest.fixture(params=["Trainer", pytest.param("SFTTrainer", marks=pytest.mark.slow)])
def make(request, tiny_model, tmp_path) -> Make:
    """Make a trainer of one kind with a fresh model, the same each time."""

    def trainer(*callbacks: TrainerCallback, model: nn.Module | None = None, **settings: Any) -> Trainer:
        model = model or small_model()
        common = {"output_dir": str(tmp_path / "out"), "per_device_train_batch_size": 2, "max_steps": STEPS}
        common |= {"logging_steps": 1, "learning_rate": 1e-3, "seed": 7, **SILENT, **settings}
        if request.param == "Trainer":
            args = TrainingArguments(**common)
            return Trainer(model, args, padded, rows(), rows(6), callbacks=list(callbacks))
        args = SFTConfig(**common, max_length=None, dataset_kwargs={"skip_prepare_dataset": True})
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        return SFTTrainer(
            model,
            args=args,
            train_dataset=rows(),
            eval_dataset=rows(6),
            processing_class=tokenizer,
            callbacks=list(callbacks),
        )

    return trainer


class At(TrainerCallback):
    """Does something to the model when step 5 begins."""

    def __init__(self, act: Callable[[nn.Module], Any]) -> None:
        self._act = act

    def on_step_begin(self, args, state, control, *, model=None, **others):
        if state.global_step == BAD - 1:
            self._act(model)


def spoil_gradient(trainer: Trainer, model: nn.Module) -> None:
    """Multiply one gradient of step 5 by NaN."""

    def spoil(gradient: Tensor) -> Tensor:
        return gradient * math.nan if trainer.state.global_step == BAD - 1 else gradient

    model.get_parameter(LAYER).register_hook(spoil)


def spoil_weight(trainer: Trainer, model: nn.Module) -> None:
    """Put a NaN into one weight when step 5 begins."""

    def spoil(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter(LAYER)[3, 4] = math.nan

    trainer.callback_handler.callbacks.insert(0, At(spoil))


def spoil_output(trainer: Trainer, model: nn.Module) -> None:
    """Let a layer give infinities from step 5 on."""

    def spoil(model: nn.Module) -> None:
        model.get_submodule("model.layers.1.mlp").register_forward_hook(lambda module, inputs, output: output / 0)

    trainer.callback_handler.callbacks.insert(0, At(spoil))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def are_finite(model: nn.Module) -> bool:
    return all(bool(torch.isfinite(weight).all()) for weight in model.parameters())


def num_hooks(model: nn.Module) -> int:
    return len(model._forward_hooks) + len(model._forward_pre_hooks)


def losses_after(trainer: Trainer, step: int) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line and line["step"] > step]


@pytest.mark.parametrize(
    "plant", [pytest.param(spoil_gradient, marks=pytest.mark.slow), spoil_weight], ids=["gradient", "weight"]
)
def test_a_nan_at_step_5_ends_training_there_and_is_named(make, plant, tmp_path, capsys):
    """Side by side: alone the trainer logs a loss of 0 or NaN, finishes and keeps a broken model; watched it stops."""
    alone = make()
    plant(alone, alone.model)
    alone.train()
    assert alone.state.global_step == STEPS
    assert not are_finite(alone.model)
    assert all(loss == 0.0 or math.isnan(loss) for loss in losses_after(alone, BAD))

    four = make()
    four.add_callback(StopAfter(BAD - 1))
    four.train()

    watched = make(HealthCallback())
    plant(watched, watched.model)
    before = num_hooks(watched.model)
    with pytest.raises(HealthStop) as stopped:
        watched.train()
    what = "weight" if plant is spoil_weight else "gradient of"
    assert stopped.value.step == BAD
    assert stopped.value.place == f"{what} `{LAYER}`"
    for told in ("step 5", "not finite", LAYER, str(tmp_path / "out" / "healing.jsonl"), "fix:"):
        assert told in str(stopped.value)
    assert watched.state.global_step == BAD - 1
    after = weights(watched.model)
    same = [name for name, weight in weights(four.model).items() if torch.equal(weight, after[name])]
    assert set(after) - set(same) == ({LAYER} if plant is spoil_weight else set())
    assert num_hooks(watched.model) == before
    assert watched.args.logging_nan_inf_filter
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tunewell:")]
    assert len(said) == 2 and "logging_nan_inf_filter" in said[0] and said[1].startswith("tunewell: step 5: ")
    entry = read_healing(tmp_path / "out")[-1]
    assert (entry.step, entry.severity, entry.action, entry.place) == (BAD, "fault", "stop", stopped.value.place)
    event = read_events(tmp_path / "out" / "events.jsonl")[-1]
    assert (event["step"], event["was_skipped"]) == (BAD, True)


class StopAfter(TrainerCallback):
    """Ends training after some steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_step_end(self, args, state, control, **others):
        control.should_training_stop = control.should_training_stop or state.global_step >= self._steps
        return control


def test_a_layer_whose_output_is_not_finite_is_named(make):
    """A loss that is not finite says nothing of where it came from."""
    trainer = make(HealthCallback(), gradient_accumulation_steps=2)
    spoil_output(trainer, trainer.model)
    with pytest.raises(HealthStop, match=r"step 5: the (loss|gradient) is not finite") as stopped:
        trainer.train()
    assert stopped.value.place == "output of `model.layers.1.mlp`"
    assert are_finite(trainer.model)


def test_what_is_finite_again_is_said_to_be(make):
    """A fault of the machine leaves no layer to name, and none may be made up."""
    trainer = make(HealthCallback())

    def spoil_once(model: nn.Module) -> None:
        def spoil(module: nn.Module, inputs: Any, output: Any) -> Any:
            handle.remove()
            return output * math.nan

        handle = model.get_submodule("model.norm").register_forward_hook(spoil)

    trainer.callback_handler.callbacks.insert(0, At(spoil_once))
    with pytest.raises(HealthStop, match="the recomputed batch was finite") as stopped:
        trainer.train()
    assert stopped.value.place is None


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_healthy_run_is_the_same_bit_for_bit(make, accumulation, tmp_path, capsys):
    """A watcher that draws a random number, or touches a gradient, is not one."""
    alone = make(gradient_accumulation_steps=accumulation)
    alone.train()
    watched = make(HealthCallback(), gradient_accumulation_steps=accumulation)
    watched.train()
    after = weights(watched.model)
    assert all(torch.equal(weight, after[name]) for name, weight in weights(alone.model).items())
    assert [line.get("loss") for line in alone.state.log_history] == [
        line.get("loss") for line in watched.state.log_history
    ]
    assert all(entry.severity == "note" for entry in read_healing(tmp_path / "out"))
    assert capsys.readouterr().err.count("tunewell:") == 1
    assert num_hooks(watched.model) == num_hooks(alone.model)


def test_what_is_written_is_what_the_trainer_logs(make, tmp_path):
    """Losses of micro-batches add up or are averaged, and norms are taken before clipping, as in the trainer's log."""
    trainer = make(
        HealthCallback(folder=tmp_path / "health"),
        gradient_accumulation_steps=3,
        max_grad_norm=0.5,
        eval_strategy="steps",
        eval_steps=4,
    )
    trainer.train()
    events = read_events(tmp_path / "health" / "events.jsonl")
    steps = [event for event in events if event["kind"] == "step"]
    logged = [line for line in trainer.state.log_history if "loss" in line]
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    for event, line in zip(steps, logged, strict=True):
        assert event["loss"] == pytest.approx(line["loss"], abs=2e-4)
        assert event["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-4)
        assert event["grad_norm"] > 0.5
        assert event["learning_rate"] == pytest.approx(line["learning_rate"])
        assert event["tokens"] > event["supervised_tokens"] > 0 and event["seconds"] > 0
    looks = [(event["step"], event["loss"]) for event in events if event["kind"] == "held_out"]
    shown = [(line["step"], line["eval_loss"]) for line in trainer.state.log_history if "eval_loss" in line]
    assert looks == shown and [step for step, _ in looks] == [4, 8]

    (tmp_path / "health" / "plan.json").write_text("{}")
    readings = read_run(tmp_path / "health").steps
    assert [r.loss for r in readings if r.held_out_loss is None] == [event["loss"] for event in steps]
    told = read_log("\n".join(json.dumps(event) for event in steps)).steps
    assert [(r.step, r.grad_norm) for r in told] == [(event["step"], event["grad_norm"]) for event in steps]


def test_with_warn_the_run_goes_on_without_the_update(make, tmp_path, capsys):
    """Who asked for warnings gets one of a kind, a finite model, and losses that can be read to the end."""
    trainer = make(HealthCallback("warn"))
    model = trainer.model

    def spoil(gradient: Tensor) -> Tensor:
        return gradient * math.nan if trainer.state.global_step in (BAD - 1, BAD) else gradient

    model.get_parameter(LAYER).register_hook(spoil)
    seen = {}

    class Watcher(TrainerCallback):
        def on_step_end(self, args, state, control, *, model=None, **others):
            seen[state.global_step] = weights(model)

    trainer.add_callback(Watcher())
    trainer.train()
    assert trainer.state.global_step == STEPS and are_finite(model)
    assert torch.equal(seen[BAD - 1][LAYER], seen[BAD][LAYER]) and torch.equal(seen[BAD][LAYER], seen[BAD + 1][LAYER])
    assert not torch.equal(seen[BAD + 1][LAYER], seen[BAD + 2][LAYER])
    assert all(loss > 1 for loss in losses_after(trainer, 0))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tunewell:")]
    assert len(said) == 1 and f"gradient of `{LAYER}`" in said[0]
    assert [entry.step for entry in read_healing(tmp_path / "out") if entry.action == "skip"] == [BAD, BAD + 1]


def test_a_run_in_which_nothing_is_trained_is_stopped(make):
    """Gradients of exactly 0, three steps in a row, mean hours for nothing."""
    trainer = make(HealthCallback())
    for parameter in trainer.model.parameters():
        parameter.register_hook(torch.zeros_like)
    with pytest.raises(HealthStop, match="nothing is being trained; stopped after step 3") as stopped:
        trainer.train()
    assert stopped.value.step == 3


def test_a_step_without_a_token_to_learn_is_left_out_and_said(make, tmp_path, capsys):
    """Rows that were cut before their answer: their loss is 0 divided by 0, which is no fault of the model.

    TRL 1.16 divides by 1 where nothing is learned, and its step changes next to nothing; 0.26 divides by 0 too.
    """
    trainer = make(HealthCallback())
    whole = trainer.data_collator

    def masked(batch: Any) -> Any:
        made = whole(batch)
        if trainer.state.global_step == BAD - 1:
            made["labels"] = torch.full_like(made["labels"], -100)
        return made

    trainer.data_collator = masked
    trainer.train()
    assert trainer.state.global_step == STEPS and are_finite(trainer.model)
    skipped = [(entry.name, entry.severity) for entry in read_healing(tmp_path / "out") if entry.action == "skip"]
    assert skipped == [("nothing-to-learn", "warning")] or (type(trainer) is not Trainer and skipped == [])
    assert ("labels are -100" in capsys.readouterr().err) == bool(skipped)


@pytest.mark.parametrize("number", [0.0, 0.5])
def test_a_trainer_with_a_loss_of_its_own_is_judged_by_its_log(number, tmp_path, capsys):
    """A preference's loss may be 0 and its gradient too: neither may end a run, and the model's loss is not asked."""

    def nothing(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return outputs.logits.sum() * 0.0 + number

    args = TrainingArguments(output_dir=str(tmp_path), max_steps=STEPS, logging_steps=1, **SILENT)
    trainer = Trainer(small_model(), args, padded, rows(), compute_loss_func=nothing, callbacks=[HealthCallback()])
    trainer.train()
    assert trainer.state.global_step == STEPS
    assert [event["loss"] for event in read_events(tmp_path / "events.jsonl")] == [number] * STEPS
    assert ("nothing is being trained" in capsys.readouterr().err) is (number > 0)


@pytest.mark.parametrize(
    ("raw", "logged", "expected"),
    [
        ([2.0, 3.0], [None, 2.5], ([2.0, 3.0], True)),
        ([2.0], [2.05], ([2.05], True)),
        ([2.0], [2.00004], ([2.0], True)),
        ([2.0, 2.0], [0.1, 0.1], ([0.1, 0.1], False)),
        ([2.0, 2.0, 2.0], [None, 6.0, None], ([2.0, 6.0, None], False)),
        ([None, None], [None, 4.0], ([None, 4.0], True)),
        ([math.nan, 2.0], [None, math.nan], ([math.nan, 2.0], True)),
    ],
    ids=["mean", "other weights", "rounded", "another", "another, seldom logged", "none", "spoiled log"],
)
def test_the_loss_of_a_step_is_the_one_that_is_trained_on(raw, logged, expected):
    """The log is held against the model's own loss: which one is meant cannot be seen in a single line."""
    loss = TrainedLoss(finished_steps=0)
    settled = [loss.resolve(step, *pair) for step, pair in enumerate(zip(raw, logged, strict=True), start=1)]
    assert settled == pytest.approx(expected[0], nan_ok=True) if None not in settled else settled == expected[0]
    assert loss.is_own is expected[1]


def test_the_examples_of_the_guide_run_as_they_stand(tiny_model, tmp_path, monkeypatch):
    """People copy them; the one for Unsloth needs a GPU and is only read."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    ids = torch.randint(10, 500, (20, 8)).tolist()
    for name, block in zip(("Trainer", "SFTTrainer", "FastLanguageModel"), blocks, strict=True):
        assert name in block
        code = compile(block.replace("max_steps=100", f"max_steps=3, {CPU}"), name, "exec")
        if name == "FastLanguageModel":
            continue
        given = {"model": small_model(), "tokenizer": AutoTokenizer.from_pretrained(tiny_model)}
        rows = [{"input_ids": row, "labels": row} for row in ids] if name == "Trainer" else [{"text": "hello"}] * 20
        exec(code, {**given, "dataset": Dataset.from_list(rows)})  # noqa: S102
        steps = [event for event in read_events(tmp_path / "out" / "events.jsonl") if event["kind"] == "step"]
        assert [event["step"] for event in steps] == [1, 2, 3]


class Loop:
    """Calls a callback in the order in which a Trainer does, on a model of two weights."""

    def __init__(self, callback: TrainerCallback, folder: Path, *, scaler: Any = None, rank: int = 0) -> None:
        torch.manual_seed(0)
        self.model = Halves()
        self._adam = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self._optimizer = SimpleNamespace(param_groups=self._adam.param_groups, scaler=scaler)
        self._callback, self._scaler = callback, scaler
        self._state = SimpleNamespace(global_step=0, is_world_process_zero=rank == 0)
        self._args = SimpleNamespace(
            output_dir=str(folder),
            device=torch.device("cpu"),
            max_grad_norm=1.0,
            fp16=scaler is not None,
            bf16=False,
            logging_nan_inf_filter=True,
            average_tokens_across_devices=True,
        )
        self._call("on_train_begin")

    def step(self, number: float) -> None:
        """Take a step on a batch; `number` is multiplied into the gradient."""
        self._call("on_step_begin")
        loss = self.model(x=torch.ones(3), factor=number).loss
        (self._scaler.scale(loss) if self._scaler else loss).backward()
        if self._scaler:
            self._scaler.unscale_(self._adam)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._call("on_pre_optimizer_step")
        if self._scaler:
            self._scaler.step(self._adam)
            self._scaler.update()
        else:
            self._adam.step()
        self._adam.zero_grad()
        self._state.global_step += 1
        self._call("on_step_end")

    def end(self) -> None:
        self._call("on_train_end")

    def _call(self, event: str) -> None:
        act = getattr(self._callback, event)
        act(self._args, self._state, SimpleNamespace(should_log=False), model=self.model, optimizer=self._optimizer)


class Halves(nn.Module):
    """A model whose loss is finite and whose gradient is whatever is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor, factor: float) -> SimpleNamespace:
        hidden = self.first(nn.functional.dropout(x, 0.2))
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * factor)
        return SimpleNamespace(loss=self.second(hidden).sum().square() + 1)


def test_a_lone_overflow_under_a_scaler_is_left_to_it(tmp_path, capsys):
    """That is how scalers find their scale: no reason to stop, and without gradients they would complain."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    loop = Loop(HealthCallback(), tmp_path, scaler=scaler)
    loop.step(1.0)
    before = weights(loop.model)
    loop.step(math.inf)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(loop.model).items())
    assert scaler.get_scale() == 512.0
    loop.step(1.0)
    loop.end()
    assert not torch.equal(loop.model.first.weight, before["first.weight"])
    assert [(entry.name, entry.severity) for entry in read_healing(tmp_path)] == [("fp16-scaler-skip-benign", "note")]
    events = read_events(tmp_path / "events.jsonl")
    assert [event["was_skipped"] for event in events] == [False, True, False]
    assert [event["scale"] for event in events] == [1024.0, 1024.0, 512.0]
    assert 0 < events[0]["grad_norm"] < 100  # of the gradient itself, not of the scaled one
    assert capsys.readouterr().err.count("tunewell:") == 1


def test_overflows_without_end_are_a_fault_under_a_scaler_too(tmp_path):
    """Eight in a row, and no scale is small enough."""
    loop = Loop(HealthCallback(), tmp_path, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(HealthStop, match="8 steps in a row") as stopped:
        for _ in range(10):
            loop.step(math.inf)
    assert stopped.value.step == 8 and stopped.value.place == "gradient of `first.bias`"
    assert "bf16" in str(stopped.value)


def test_the_device_is_waited_for_once_a_step(tmp_path, monkeypatch):
    """Each number that is read on its own makes a GPU wait for the whole queue."""
    reads = []
    for name in ("item", "tolist", "__float__", "__bool__", "__int__"):
        plain = getattr(Tensor, name)

        def counted(self: Tensor, plain: Any = plain) -> Any:
            reads.append(plain)
            return plain(self)

        monkeypatch.setattr(Tensor, name, counted)
    counts = []
    for callback in (TrainerCallback(), HealthCallback()):
        reads.clear()
        loop = Loop(callback, tmp_path)
        for _ in range(5):
            loop.step(1.0)
        loop.end()
        counts.append(len(reads))
    assert counts[1] - counts[0] == 5


def test_a_batch_is_computed_again_where_clipping_hid_the_gradient(tmp_path):
    """Clipping by a NaN spoils all gradients; and looking for the first may not draw random numbers."""
    model = Halves()
    before, weights_before = torch.get_rng_state(), weights(model)
    batches = [((), {"x": torch.ones(3), "factor": factor}) for factor in (1.0, math.nan)]
    assert locate_fault(model, batches[:1], bad_gradients=[], is_loss_bad=False).place is None
    assert locate_fault(model, batches, bad_gradients=[], is_loss_bad=False).place == "gradient of `first.bias`"
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(weight, weights_before[name]) for name, weight in weights(model).items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("losses", "learned", "expected"), [((0, 0), (0, 0), 0), ((2, 5), (1, 3), 4.25)])
def test_losses_of_micro_batches_count_by_what_is_learned(losses, learned, expected):
    """Rows without anything to learn are no fault: nothing divided by nothing would look like one."""

    class Told(nn.Linear):
        def forward(self, labels: Tensor, loss: float) -> dict[str, Tensor]:
            return {"loss": self.weight.sum() * 0 + loss}

    model = Told(1, 1)
    signals = SignalRecorder(model, torch.device("cpu"))
    for loss, number in zip(losses, learned, strict=True):
        model(labels=torch.tensor([[7] + [7] * number + [-100] * 2]), loss=loss)["loss"].backward()
    taken = signals.read(scale=None, is_stopping=False)
    assert (taken.loss, taken.supervised_tokens, taken.grad_norm) == (expected, sum(learned), 0.0)


def test_a_jump_of_the_gradient_is_said_and_does_not_end_the_run(tmp_path, capsys):
    """Clipping meets it; who reads the log wants to know."""
    loop = Loop(HealthCallback(), tmp_path)
    for step in range(60):
        loop.step(1e7 if step == 50 else 1.0)
    loop.end()
    assert [(entry.step, entry.name, entry.action) for entry in read_healing(tmp_path)] == [(51, "loss-spike", "none")]
    assert "tunewell: step 51: the gradient norm jumped" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_of_one_run_stop_together_and_the_first_writes(tmp_path):
    """One that raises while another waits for it hangs for half an hour; and two that write one file spoil it."""

    def process(rank: int) -> None:
        meeting = f"file://{tmp_path / 'meeting'}"
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
        loop = Loop(HealthCallback(), tmp_path / f"rank-{rank}", rank=rank)
        loop.step(1.0)
        try:
            loop.step(math.nan if rank == 1 else 1.0)
        except HealthStop as stop:
            (tmp_path / f"stop-{rank}").write_text(f"{stop.step} {stop.place}")

    def first() -> None:
        child = os.fork()
        process(0 if child else 1)
        if not child:
            os._exit(0)
        os.waitpid(child, 0)

    assert in_child(first) == 0
    assert [(tmp_path / f"stop-{rank}").read_text() for rank in (0, 1)] == ["2 gradient of `first.bias`"] * 2
    assert [event["step"] for event in read_events(tmp_path / "rank-0" / "events.jsonl")] == [1, 2]
    assert not (tmp_path / "rank-1").exists()


def test_a_resumed_run_continues_its_log_and_a_new_one_begins_anew(tmp_path):
    """Steps that are taken again must not be there twice, nor those of a run that was thrown away."""
    loop = Loop(HealthCallback(), tmp_path)
    for _ in range(4):
        loop.step(1.0)
    loop.end()
    again = Loop(HealthCallback(), tmp_path)
    assert read_events(tmp_path / "events.jsonl") == []
    again.step(1.0)
    again.step(1.0)
    again._call("on_train_begin")
    again.step(1.0)
    again.end()
    assert [event["step"] for event in read_events(tmp_path / "events.jsonl")] == [1, 2, 3]


def test_an_unknown_action_is_refused():
    """`HealthCallback("ignore")` would do something that nobody asked for."""
    with pytest.raises(UserError, match="ignore"):
        HealthCallback("ignore")  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_written_to_is_said_before_training(tmp_path):
    """Not after hours, when the first fault is to be written down."""
    (tmp_path / "file").write_text("")
    with warnings.catch_warnings(), pytest.raises(UserError, match="cannot write to"):
        Loop(HealthCallback(folder=tmp_path / "file" / "health"), tmp_path)


def test_a_run_in_fp32_is_not_advised_to_train_in_fp32() -> None:
    assert "fp32" in advice("not-finite", "gradient of `x`")
    assert "fp32" not in advice("not-finite", "gradient of `x`", is_fp32=True)
    assert "max_grad_norm" in advice("not-finite", "output of `x`", is_fp32=True)


@pytest.mark.slow
def test_importing_the_callback_prints_nothing() -> None:
    """transformers imports bitsandbytes, which warned of a kernel that the callback does not use."""
    code = "from tunewell import HealthCallback"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
