"""`tunewell train` from rows to an adapter, as a person runs it: a tiny model, a real tokenizer, real processes."""

import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_runs import make_plan

import tunewell
from corpora import write_sums
from forked import Command, run_command
from tunewell.config.schema import Config
from tunewell.core.errors import UserError
from tunewell.machine.facts import cpu_facts
from tunewell.records.events import read_events
from tunewell.records.plan import Chosen, read_plan
from tunewell.records.rundir import read_outcome
from tunewell.runs import outcome as train_ending
from tunewell.training.build import CHANGE_NAMES, identity_of

SETTINGS = [
    "method.rank=4",
    "train.max_steps=6",
    "train.batch_documents=4",
    "train.threads=1",
    "train.learning_rate=5e-3",
    "evaluate.every_steps=3",
    "evaluate.samples=2",
    "evaluate.sample_tokens=4",
    "checkpoints.every_steps=2",
    "data.held_out=0.2",
    "verdict.after_training=false",  # judged in test_validate
]


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path) -> Path:
    """A folder with rows and a config for a model that starts from nothing."""
    write_sums(tmp_path, tiny_model, model="preset:tiny-1m", num_rows=40)
    return tmp_path


def _arguments(*arguments: str, sets: tuple[str, ...] = ()) -> list[str]:
    return ["train", *arguments, *(part for setting in (*SETTINGS, *sets) for part in ("--set", setting))]


def _train(project: Path, *arguments: str, sets: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return run_command(*_arguments(*arguments, sets=sets), cwd=project)


def test_a_run_leaves_behind_what_it_promises(project: Path) -> None:
    done = _train(project, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["steps"] == told["num_steps"] == 6 and told["status"] == "finished"
    assert told["last_loss"] < told["first_loss"] and told["held_out"]["best"] <= told["held_out"]["first"]
    run = project / "run"
    names = {"plan.json", "config.yaml", "events.jsonl", "samples.jsonl", "outcome.json", "README.md", "loss.svg"}
    assert names <= {path.name for path in run.iterdir()}
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000004", "step-000006"]
    assert all(
        value["because"] for value in json.loads((run / "plan.json").read_text()).values() if "because" in str(value)
    )
    steps = [event for event in read_events(run / "events.jsonl") if event["kind"] == "step"]
    assert [event["step"] for event in steps] == [1, 2, 3, 4, 5, 6]
    samples = read_events(run / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [0, 0, 3, 3, 6, 6]
    assert all(sample["question"] in sample["prompt"] and sample["reference"] for sample in samples)
    assert all(re.fullmatch(r"What is \d+ plus \d+\?", sample["question"]) for sample in samples)
    assert "first step" not in done.stdout and "step 1/6" in done.stderr.replace("  ", " ")


@pytest.mark.slow
def test_a_rate_that_makes_the_model_worse_does_not_end_as_if_all_were_well(project: Path) -> None:
    """Six steps at a rate of 1.0 raised the held-out loss from 6.2 to 12.5, and the run called that memorising."""
    sets = ("train.learning_rate=1.0", "evaluate.every_steps=1")
    done = _train(project, "--json", sets=sets)
    names = [(entry["name"], entry["action"]) for entry in json.loads(done.stdout)["healing"]]
    assert ("lr-too-high", "rewind") in names and ("overfitting", "none") not in names
    done = _train(project, "--out", "off", sets=(*sets, "healing.on=false"))
    assert "finished all 6 steps, but the held-out loss rose" in " ".join(done.stdout.split())
    outcome = json.loads((project / "off" / "outcome.json").read_text())
    assert outcome["reason"].endswith("rose") and "lower `train.learning_rate`" in outcome["advice"][0]
    assert "warning" in done.stdout
    done = _train(project, "--out", "off2", "--json", sets=(*sets, "healing.max_rewinds=0"))
    told = json.loads(done.stdout)
    words = "tunewell train --config off2/config.yaml --out off3 --set train.learning_rate="
    assert told["status"] == "stopped" and told["next"].startswith(words), "its advice is a command"
    assert run_command(*told["next"].split()[1:], cwd=project).returncode in (0, 3, 4)
    assert (project / "off3" / "outcome.json").is_file()


def test_the_config_in_the_run_folder_repeats_the_run(project: Path) -> None:
    assert _train(project).returncode == 0
    done = run_command("train", "--config", "run/config.yaml", "--out", "again", cwd=project)
    assert done.returncode == 0, done.stderr
    assert _losses(project / "again") == _losses(project / "run")


def test_a_full_model_loads_in_transformers_as_it_was_saved(project: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert _train(project).returncode == 0
    folder = project / "run" / "checkpoints" / "step-000006"
    loaded = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == loaded.keys() and len(saved) > 10
    assert all(torch.equal(saved[name], parameter) for name, parameter in loaded.items())


def test_what_a_model_keeps_beside_its_weights_is_saved_with_them_and_read_again(
    project: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router of DeepSeek's experts has a bias that is no parameter; without it the saved model was another."""
    from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

    size: dict[str, Any] = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"), 8)
    size |= dict.fromkeys(("n_routed_experts", "num_attention_heads", "num_key_value_heads"), 4)
    size |= {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    size |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2, "v_head_dim": 8}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(vocab_size=512, **size))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = model.get_buffer(name).normal_()
    model.save_pretrained(project / "experts")
    monkeypatch.chdir(project)
    sets = [*SETTINGS, "model=experts", "device=cpu", "train.max_steps=3"]
    result = tunewell.train(sets=sets)
    folder = project / "run" / "checkpoints" / "step-000003"
    assert result.status == "finished" and torch.equal(load_file(folder / "model.safetensors")[name], bias)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(folder).get_buffer(name), bias)
    longer = tunewell.train(sets=[*sets, "train.max_steps=4"], resume=True, allow_changes="num_steps")
    assert longer.steps == 4


def test_a_resume_without_the_log_does_not_invent_a_first_loss(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the report: with `events.jsonl` deleted, the loss of the step after the resume was called the first."""
    monkeypatch.chdir(project)
    sets = [*SETTINGS, "device=cpu", "train.max_steps=3"]
    tunewell.train(sets=sets)
    (project / "run" / "events.jsonl").unlink()
    longer = tunewell.train(sets=[*sets, "train.max_steps=4"], resume=True, allow_changes="num_steps")
    assert longer.first_loss is None
    assert any("`events.jsonl` lacks 3 of 3 steps" in note for note in longer.notes)


@pytest.mark.parametrize(
    "change",
    [lambda log: log.replace(b'"loss": ', b'"loss": 1', 1), lambda log: log.replace(b"documents", b"Documents", 1)],
    ids=["a digit", "a letter"],
)
def test_a_resume_with_an_edited_log_says_so(project: Path, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Guards the report: an edited loss was shown as the loss of the run."""
    monkeypatch.chdir(project)
    sets = [*SETTINGS, "device=cpu", "train.max_steps=2"]
    tunewell.train(sets=sets)
    log = project / "run" / "events.jsonl"
    more = [*sets, "train.max_steps=3"]
    unchanged = log.read_bytes()
    log.write_bytes(change(unchanged))
    assert log.read_bytes() != unchanged
    resumed = tunewell.train(sets=more, resume=True, allow_changes="num_steps")
    assert any("`events.jsonl` was changed after step 2" in note for note in resumed.notes), resumed.notes
    again = tunewell.train(sets=[*more, "train.max_steps=4"], resume=True, allow_changes="num_steps")
    assert not any("was changed" in note for note in again.notes), again.notes


def test_a_disk_that_is_full_at_the_end_is_no_bug(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was trained is saved; the words about it are not."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.chdir(project)
    monkeypatch.setattr(train_ending, "write_outcome", full)
    result = tunewell.train(sets=[*SETTINGS, "train.max_steps=2", "device=cpu"])
    assert (result.status, result.exit_code) == ("finished", 0)
    assert "README.md`: No space left on device" in result.notes[-1]


def test_a_run_whose_config_went_away_is_finished_all_the_same(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its page is made from it: the run, trained and saved, ended as one that was refused."""
    monkeypatch.chdir(project)
    write = train_ending.write_outcome

    def without(run: Path, outcome: Any) -> None:
        (run / "config.yaml").unlink()
        write(run, outcome)

    monkeypatch.setattr(train_ending, "write_outcome", without)
    result = tunewell.train(sets=[*SETTINGS, "train.max_steps=2", "device=cpu"])
    assert (result.status, result.exit_code) == ("finished", 0)
    assert "README.md`: the config file does not exist" in result.notes[-1]


def test_an_adapter_on_a_folder_loads_in_peft(project: Path) -> None:
    """The first run makes a model; the second puts an adapter on it."""
    from transformers import AutoModelForCausalLM

    assert _train(project).returncode == 0
    base = project / "run" / "checkpoints" / "step-000006"
    done = _train(project, "--model", str(base), "--out", "second", sets=("method.kind=lora",))
    assert done.returncode == 0, done.stderr
    tuned = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), project / "second" / "checkpoints" / "step-000006"
    )
    assert any("lora_A" in name for name, _ in tuned.named_parameters())


def test_a_folder_that_holds_a_run_is_refused_and_resume_goes_on(project: Path) -> None:
    assert _train(project).returncode == 0
    again = _train(project)
    assert again.returncode == 2 and "--resume" in again.stderr
    resumed = _train(project, "--resume", "--json")
    assert resumed.returncode == 0 and json.loads(resumed.stdout)["steps"] == 6
    nothing = _train(project, "--resume", "--out", "elsewhere")
    assert nothing.returncode == 2 and "no run" in nothing.stderr


def test_a_refused_command_does_not_cost_the_folder(project: Path) -> None:
    """The model is loaded before a wrong layer is known; the corrected command has the same `--out`."""
    refused = _train(project, sets=("method.kind=lora", "method.targets=[q_projj]"))
    assert refused.returncode == 2 and "q_projj" in refused.stderr
    assert not (project / "run").exists()
    done = _train(project, sets=("method.kind=lora", "method.targets=[q_proj]", "train.max_steps=2"))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "name"),
    [("train.learning_rate=1e-3", "learning_rate"), ("seed=5", "seed"), ("train.batch_documents=3", "batch_documents")],
)
def test_a_resume_with_other_settings_is_refused_with_the_difference(project: Path, change: str, name: str) -> None:
    assert _train(project, sets=("train.max_steps=4",)).returncode == 0
    refused = _train(project, "--resume", sets=("train.max_steps=4", change))
    assert refused.returncode == 2 and name in refused.stderr and "--allow-change" in refused.stderr
    if name == "learning_rate":
        allowed = _train(project, "--resume", "--allow-change", name, sets=("train.max_steps=4", change))
        assert allowed.returncode == 0, allowed.stderr


def test_a_resume_on_other_rows_is_refused_and_they_are_named(project: Path) -> None:
    assert _train(project).returncode == 0
    with (project / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"instruction": "One more?", "output": "One more."}) + "\n")
    refused = _train(project, "--resume")
    assert refused.returncode == 2 and "1 added, 0 removed, 0 changed" in refused.stderr
    assert "rows.jsonl row 41" in refused.stderr


@pytest.mark.slow
def test_a_resume_on_other_weights_is_refused_and_on_the_same_ones_elsewhere_goes_on(project: Path) -> None:
    """An adapter is worth nothing on weights it was not trained on; a path alone does not tell."""
    assert _train(project, "--out", "first", sets=("train.max_steps=2",)).returncode == 0
    shutil.copytree(project / "first" / "checkpoints" / "step-000002", project / "base")
    lora = ("method.kind=lora", "train.max_steps=2")
    assert _train(project, "--model", "base", sets=lora).returncode == 0
    (project / "base").rename(project / "moved")
    moved = _train(project, "--resume", "--model", "moved", sets=lora)
    assert moved.returncode == 0 and "base in the checkpoint, moved now" in moved.stderr, moved.stderr
    assert read_plan(project / "run").model == "moved"
    (project / "moved").rename(project / "base")
    other = load_file(project / "base" / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in other.items()}, project / "base" / "model.safetensors")
    refused = _train(project, "--resume", "--model", "base", sets=lora)
    assert refused.returncode == 2 and "`--allow-change weights`" in refused.stderr, refused.stderr
    allowed = _train(project, "--resume", "--model", "base", "--allow-change", "weights", sets=lora)
    assert allowed.returncode == 0, allowed.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), pytest.param(signal.SIGUSR1, 143, marks=pytest.mark.slow)],
)
def test_a_signal_saves_within_a_step_and_resume_ends_as_if_there_had_been_none(
    project: Path, number: signal.Signals, code: int
) -> None:
    longer = ("train.max_steps=40", "evaluate.every_steps=1000", "checkpoints.every_steps=1000", "evaluate.samples=0")
    assert _train(project, "--out", "whole", sets=longer).returncode == 0
    process = Command(*_arguments(sets=longer), cwd=project)
    log = project / "run" / "events.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (log.is_file() and len(log.read_bytes().splitlines()) > 8):
        time.sleep(0.01)
    process.send_signal(number)
    done = process.wait(60)
    assert done.returncode == code
    assert "tunewell train --resume" in done.stdout
    assert _train(project, "--resume", sets=longer).returncode == 0
    assert _losses(project / "run") == _losses(project / "whole")


def _losses(run: Path) -> list[Any]:
    return [(event["step"], event["loss"]) for event in read_events(run / "events.jsonl") if event["kind"] == "step"]


def test_the_library_does_the_same(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    result = tunewell.train(sets=[*SETTINGS, "train.max_steps=2", "device=cpu"])
    assert result.status == "finished" and result.steps == 2
    assert read_plan(project / "run").num_steps.value == 2


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts the open files of Linux")
def test_the_library_leaves_no_file_or_thread_open(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards sweeps and notebooks: each run left `samples.jsonl` and a thread open."""
    monkeypatch.chdir(project)
    before = set(threading.enumerate())
    for name in ("one", "two"):
        tunewell.train(sets=[*SETTINGS, "device=cpu", "train.max_steps=2", f"run={name}"], progress=False)
    targets = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    assert not [target for target in targets if target.startswith(str(project))]
    assert not [thread.name for thread in set(threading.enumerate()) - before if "checkpoints" in thread.name]


def test_the_library_leaves_threads_signals_and_the_allocator_alone(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook shares its process with other work: only the command line may change it."""
    seen: list[Any] = []
    monkeypatch.chdir(project)
    monkeypatch.setattr("tunewell.workflows.train.keep_freed_memory", seen.append)
    monkeypatch.setattr("tunewell.runs.heartbeat.faulthandler.register", lambda *_, **__: seen.append("faulthandler"))
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [torch.get_num_threads(), *map(signal.getsignal, numbers)]
    during: list[Any] = []
    tunewell.train(
        sets=[*SETTINGS, "train.max_steps=2", "device=cpu", "train.threads=2"],
        on_step=lambda _: during.append(list(map(signal.getsignal, numbers))),
    )
    assert during == [before[1:], before[1:]] and not seen
    assert [torch.get_num_threads(), *map(signal.getsignal, numbers)] == before


def test_the_library_takes_a_mapping_and_its_run_can_be_gone_on_with(
    project: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings of a notebook are a dictionary; the run folder has them for the command line."""
    monkeypatch.chdir(project)
    config = {"model": "preset:tiny-1m", "tokenizer": tiny_model, "data": {"sources": "rows.jsonl"}, "run": "mine"}
    sets = [*SETTINGS, "train.max_steps=2", "method.kind=full", "device=cpu"]
    assert tunewell.train(config, sets=sets).run == Path("mine")
    resumed = run_command("train", "--resume", "--config", "mine/config.yaml", "--out", "mine", cwd=project)
    assert resumed.returncode == 0 and "resumed after step 2" in resumed.stderr, resumed.stderr


@pytest.mark.slow
def test_a_run_without_a_config_goes_on_by_its_own(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was said by flags the first time need not be said again: the run has it."""
    (project / "tunewell.yaml").rename(project / "aside.yaml")
    nothing = run_command("train", "--resume", cwd=project)
    assert nothing.returncode == 2 and "there is no run `run`" in nothing.stderr, nothing.stderr
    flags = ("--config", "aside.yaml", "--seed", "5", "--out", "mine", "--set", "device=cpu")
    first = _train(project, *flags, sets=("train.max_steps=2",))
    assert first.returncode == 0, first.stderr
    (project / "aside.yaml").unlink()
    made = (project / "corpus" / "manifest.json").stat()
    again = run_command("train", "--resume", "--out", "mine", cwd=project)
    assert again.returncode == 0 and "resumed after step 2" in again.stderr, again.stderr
    assert "changed on resume" not in again.stderr
    assert (project / "corpus" / "manifest.json").stat() == made
    (project / "mine" / "config.yaml").rename(project / "kept.yaml")
    empty = run_command("train", "--resume", "--out", "mine", cwd=project)
    assert empty.returncode == 2 and "repeat the command that started the run" in empty.stderr, empty.stderr
    (project / "kept.yaml").rename(project / "mine" / "config.yaml")
    refused = run_command("train", "--resume", "--out", "mine", "--seed", "6", cwd=project)
    assert refused.returncode == 2 and "seed" in refused.stderr, refused.stderr
    monkeypatch.chdir(project)
    result = tunewell.train(sets="run=mine", resume=True)
    assert result.status == "finished" and result.steps == 2


def test_a_change_of_something_that_is_not_there_cannot_be_allowed(project: Path) -> None:
    """A misspelt name would be believed to have been allowed; every name that a refusal gives is known."""
    assert set(_lora_identity()) <= CHANGE_NAMES
    idle = _train(project, "--allow-change", "seed")
    assert idle.returncode == 2 and "add `--resume`" in idle.stderr, idle.stderr
    refused = _train(project, "--allow-change", "learning-rate")
    assert refused.returncode == 2 and "did you mean `learning_rate`" in refused.stderr and "seed" in refused.stderr
    assert not (project / "run").exists()


@pytest.mark.slow
@pytest.mark.skipif(not cpu_facts().has_bf16, reason="bf16 is refused on a CPU without bf16 units")
def test_full_training_with_bf16_masters_from_the_command_line(project: Path) -> None:
    """Checkpoints are half as large, load as a model, and are not resumed with other masters."""
    narrow = ("method.kind=full", "train.precision=bf16", "train.masters=bf16")
    done = _train(project, sets=narrow)
    assert done.returncode == 0, done.stderr
    checkpoint = project / "run" / "checkpoints" / "step-000006"
    for name in ("model.safetensors", "optimizer.safetensors"):
        tensors = load_file(checkpoint / name)
        assert {own.dtype for key, own in tensors.items() if not key.endswith("/step")} == {torch.bfloat16}
    wider = ("method.kind=full", "train.precision=bf16", "train.max_steps=8")
    refused = _train(project, "--resume", "--allow-change", "num_steps", sets=wider)
    assert refused.returncode == 2 and "masters: bf16 in the checkpoint, fp32 now" in refused.stderr, refused.stderr
    more = ("--resume", "--allow-change", "num_steps", "--allow-change", "masters", "--allow-change", "warmup_steps")
    allowed = _train(project, *more, sets=wider)
    assert allowed.returncode == 0, allowed.stderr
    wide = load_file(project / "run" / "checkpoints" / "step-000008" / "optimizer.safetensors")
    assert {own.dtype for own in wide.values()} == {torch.float32}


def _lora_identity() -> dict[str, Any]:
    plan = make_plan()
    return identity_of(plan.model_copy(update={"method": Chosen(value="lora", because="a test")}), Config(), "weights")


@pytest.mark.slow
def test_two_processes_train_one_run(project: Path) -> None:
    """As `torchrun` starts them: the same losses as one process has, and one run folder."""
    assert _train(project, "--out", "alone").returncode == 0
    arguments = _arguments("--out", "together", sets=("train.micro_batch_tokens=40",))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    started = [Command(*arguments, cwd=project, env=meeting | {"RANK": str(rank)}) for rank in range(2)]
    assert [process.wait().returncode for process in started] == [0, 0]
    assert _losses(project / "together") == [
        (step, pytest.approx(loss, rel=1e-4)) for step, loss in _losses(project / "alone")
    ]
    assert len(list((project / "together" / "checkpoints").iterdir())) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "fault", "flags", "status", "code"),
    [
        (1, "", [], "finished", 0),
        (2, "", [], "finished", 0),
        (2, "kill@step:step=3,marker=marker", [], "finished", 0),
        (2, "", ["--strict"], "finished", 1),
        (2, "nan@gradients:step=1,times=99", ["--set", "healing.max_rewinds=0"], "stopped", 1),
    ],
    ids=["alone", "ends", "killed", "strict", "stopped"],
)
def test_torchrun_restarts_only_what_can_go_on(
    project: Path, size: int, fault: str, flags: list[str], status: str, code: int
) -> None:
    """A FAIL verdict made torchrun restart the finished run, whose processes then waited for addresses of dead ones."""
    sets = ("verdict.after_training=true", "train.learning_rate=1e-6", "healing.restarts=0")
    command = ["-m", "torch.distributed.run", f"--nproc-per-node={size}", "--max-restarts=1", "-m", "tunewell"]
    arguments = [*_arguments(*flags, sets=sets), "--enable-fault-injection"]
    done = subprocess.run(
        [sys.executable, *command, *arguments],
        cwd=project,
        env=os.environ | {"TUNEWELL_FAULTS": fault},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, "FAILED" in done.stderr) == (code, code == 1), done.stderr
    outcome = read_outcome(project / "run")
    assert (outcome.status, outcome.verdict) == (status, "FAIL" if status == "finished" else None)
    assert done.stdout.count("has already ended") == (code == 1)
    if fault.startswith("kill"):
        assert "resumed after step 2" in done.stderr
        assert [step for step, _ in _losses(project / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("sets", [("corpus=ABSOLUTE",), ()], ids=["corpus elsewhere", "corpus beside"])
def test_a_run_and_its_corpus_resume_on_another_machine(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, sets: tuple[str, ...]
) -> None:
    """The rows of the first machine were asked for, although the corpus has them."""
    corpus = project / ("prepared/corpus" if sets else "corpus")
    done = _train(project, sets=tuple(text.replace("ABSOLUTE", str(corpus)) for text in sets))
    assert done.returncode == 0, done.stderr
    losses = _losses(project / "run")
    other = tmp_path_factory.mktemp("other")
    shutil.copytree(project / "run", other / "run")
    shutil.copytree(corpus, other / "corpus")
    shutil.rmtree(other / "run" / "checkpoints" / "step-000006")
    project.rename(tmp_path_factory.mktemp("gone") / "project")
    monkeypatch.chdir(other)
    done = run_command("train", "--resume", cwd=other)
    assert done.returncode == 0, done.stderr
    assert _losses(other / "run") == losses
    assert "the run continues with its corpus, which has these rows" in done.stderr
    shutil.rmtree(other / "corpus")  # without it, the rows are needed
    done = run_command("train", "--resume", cwd=other)
    assert done.returncode == 2 and "rows.jsonl" in done.stderr


def test_what_two_processes_are_refused_is_told_once(project: Path) -> None:
    """The first one prepares; what it cannot prepare is no bug of the second."""
    unreadable = "data.sources=[{path: rows.jsonl, format: sharegpt}]"
    first, second = _train_two(project, [unreadable], [unreadable])
    assert "error: " in first.stderr and "fix: " in first.stderr and "bug" not in first.stderr
    assert second.stdout == second.stderr == ""
    assert not (project / "run").exists()


def test_two_processes_with_other_settings_are_refused(project: Path) -> None:
    """Two machines with two copies of a config would train on other documents from other weights, and call it good."""
    first, second = _train_two(project, [], ["train.max_steps=5"])
    assert "error: rank 1 of 2: `train.max_steps` is 5 on this rank and 6 on rank 0" in first.stderr
    assert second.stderr == ""
    assert not (project / "run").exists()


def _train_two(project: Path, *sets: list[str]) -> list["subprocess.CompletedProcess[str]"]:
    """Start two processes that are refused, each with settings of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    started = [
        Command(
            *_arguments("--out", "run", sets=tuple(own)),
            cwd=project,
            env=meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank, own in enumerate(sets)
    ]
    ended = [process.wait() for process in started]
    assert [process.returncode for process in ended] == [2, 2], [process.stderr for process in ended]
    return ended


def test_what_cannot_work_is_said_before_anything_is_loaded(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    with pytest.raises(UserError, match="no device"):
        tunewell.train(sets=["device=cuda:7"])
    assert not (project / "run" / "plan.json").exists()


@pytest.mark.parametrize(
    ("name", "what"), [("adapter_config.json", "has no `adapter_model.safetensors`"), ("plan.json", "did not finish")]
)
def test_an_adapter_or_run_that_cannot_go_on_is_refused_before_rows_are_read(
    project: Path, monkeypatch: pytest.MonkeyPatch, name: str, what: str
) -> None:
    """`has no tokenizer` was said of it, after the rows had been read."""
    (project / "my adapter").mkdir()
    (project / "my adapter" / name).write_text("{}")
    monkeypatch.chdir(project)
    with pytest.raises(UserError, match=f"`my adapter` {what}"):
        tunewell.train(sets=["model=my adapter"])
    assert not (project / "run").exists() and not (project / "corpus").exists()


def test_nothing_to_train_on_is_said_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no training data") as refused:
        tunewell.train()
    assert "tunewell train FILE" in str(refused.value.fix) and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_runs_in_one_folder_are_kept_apart(project: Path) -> None:
    longer = ("train.max_steps=40", "evaluate.samples=0")
    first = Command(*_arguments(sets=longer), cwd=project)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (project / "run" / "plan.json").is_file():
            time.sleep(0.05)
        first.send_signal(signal.SIGSTOP)  # alive, and not done before the second is there
        second = _train(project, "--resume", sets=longer)
        assert second.returncode == 2 and str(first.pid) in second.stderr
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    taken_over = _train(project, "--resume", sets=(*longer, "checkpoints.keep=2"))
    assert taken_over.returncode == 0, taken_over.stderr


def test_secrets_do_not_reach_any_file_of_a_run(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hf_" + "Abc123xYz" * 4
    (project / "rows.jsonl").write_text(
        "".join(
            json.dumps({"instruction": f"token {n} {secret}", "output": f"kept {secret} {n}"}) + "\n" for n in range(30)
        )
    )
    assert _train(project).returncode == 0
    for path in (project / "run").rglob("*"):
        if path.is_file() and path.suffix not in (".safetensors", ".png"):
            assert secret not in path.read_text(encoding="utf-8"), path


@pytest.mark.slow
def test_a_model_in_a_folder_that_is_called_like_a_secret_is_trained_judged_and_gone_on_with(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is taken out of files is not taken out of what the program works with."""
    monkeypatch.chdir(project)
    sets = [*SETTINGS, "device=cpu", "train.max_steps=2"]
    assert tunewell.train(sets=[*sets, "run=first"]).status == "finished"
    base = project / "s3cr3t-b0x" / "base"
    shutil.copytree(project / "first" / "checkpoints" / "step-000002", base)
    sets += [f"model={base}", "method.kind=lora", "verdict.questions=0"]
    monkeypatch.setenv("DB_PASSWORD", "s3cr3t-b0x")
    assert tunewell.train(sets=[*sets, "verdict.after_training=true"]).validation is not None
    for path in (project / "run").rglob("*"):
        assert path.is_dir() or path.suffix == ".png" or b"s3cr3t-b0x" not in path.read_bytes(), path
    assert "resumed after step 2" in tunewell.train(sets=sets, resume=True).notes
    monkeypatch.delenv("DB_PASSWORD")
    assert "resumed after step 2" in tunewell.train(sets=sets, resume=True).notes
