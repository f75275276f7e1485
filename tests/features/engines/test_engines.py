"""Another engine takes the steps: what it cannot do is refused or said, and the run folder is like any other."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from projects import SETTINGS, write_project

import tunewell
from tunewell import UserError
from tunewell.cli.main import main
from tunewell.features.engines import engines, worker
from tunewell.records.checkpoint import read_manifest
from tunewell.records.events import read_events
from tunewell.records.healing import read_healing
from tunewell.records.plan import read_plan
from tunewell.records.rundir import read_outcome

STAND_IN = Path(__file__).with_name("stand_in_child.py")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return write_project(tmp_path_factory.mktemp("project"))


@pytest.fixture
def project(made, tmp_path, monkeypatch) -> Path:
    for name in ("rows.jsonl", "model"):
        (tmp_path / name).symlink_to(made / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(**settings: Any) -> tunewell.TrainResult:
    resume = settings.pop("resume", False)
    return tunewell.train(
        model="model", data="rows.jsonl", settings={**SETTINGS, **settings}, resume=resume, progress=False
    )


@pytest.fixture
def play(project, monkeypatch):
    """Train with a stand-in for the child that sends these messages."""
    monkeypatch.setattr(engines, "_copy_code", lambda folder: STAND_IN)

    def run(script: str, **settings: Any) -> tunewell.TrainResult:
        monkeypatch.setenv("STAND_IN", script)
        return train(**{"train.max_steps": 2, **settings})

    return run


def test_a_run_of_another_engine_is_written_like_any_other(play, project, capsys):
    """Guards against a run folder that `runs`, `validate` and `export` cannot read, or that hides its engine."""
    result = play("started evaluated:0 step:1 step:2 evaluated:2 saved:2")
    plan, run = read_plan(project / "run"), project / "run"
    assert (result.status, result.steps, result.best_step) == ("finished", 2, 0)  # no better than the base model
    assert plan.engine is not None and plan.engine.name == "trl" and "transformers" in plan.engine.versions
    assert plan.packing is not None and plan.packing.value == "padded" and plan.prediction is None
    kinds = [event["kind"] for event in read_events(run / "events.jsonl")]
    assert kinds == ["held_out", "step", "step", "held_out"]
    manifest = read_manifest(run / "checkpoints" / "step-000002")
    assert manifest.identity["data"] == plan.corpus_sha256
    adapter = json.loads((run / "checkpoints" / "step-000002" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == plan.model
    assert sorted(path.name for path in (run / "engine").iterdir()) == ["log.txt"]
    assert any("its own checkpoint" in note for note in read_outcome(run).notes)
    assert main(["runs", "run"]) == 0
    assert "finished: all 2 steps" in capsys.readouterr().out


def test_a_fault_stops_the_run_and_is_recorded(play, project):
    """Guards against a NaN that ends in a finished run."""
    result = play("started step:1 saved:1 step:2 fault:2")
    assert (result.status, result.exit_code) == ("stopped", 4)
    (entry,) = read_healing(project / "run")
    assert (entry.action, entry.place) == ("stop", "weight `w`")


def test_a_failure_before_the_first_step_leaves_no_run(play, project):
    """Guards against a folder that the corrected command cannot use."""
    with pytest.raises(UserError, match=r"TRL could not start: ImportError") as caught:
        play("fail:ImportError")
    assert "transformers" in (caught.value.where or "")
    assert not (project / "run").exists()


@pytest.mark.parametrize("end", ["fail:OutOfMemoryError", "die"])
def test_a_failure_after_a_step_can_be_resumed(play, project, end):
    """Guards against a crash of the trainer that loses the run or looks like success."""
    result = play(f"started step:1 saved:1 {end}")
    assert (result.status, result.exit_code) == ("failed", 4)
    assert "--resume" in result.next_command
    result = play("started step:2 saved:2", resume=True)
    assert result.status == "finished" and [step for step, _ in result.losses] == [1, 2]


def test_a_finished_run_is_not_resumed_without_the_states_of_its_optimizer(play, project):
    """Guards against more steps for a finished run that begin anew, and delete its checkpoints."""
    play("started step:1 saved:1 step:2 saved:2")
    with pytest.raises(UserError, match="step 2 has no optimizer states"):
        play("started", resume=True, **{"train.max_steps": 4, "train.warmup": 0})
    assert (project / "run" / "checkpoints" / "step-000002").is_dir()


def test_what_the_trainer_prints_is_kept_without_secrets(play, project, monkeypatch):
    """Guards against a token in a log that people send to each other; a run that is killed has one too."""
    monkeypatch.setenv("HF_TOKEN", "Zx81kk20fjJq77")
    play("started print:token=Zx81kk20fjJq77 step:1 step:2 saved:2")
    log = (project / "run" / "engine" / "log.txt").read_text()
    assert "token=" in log and "Zx81kk20fjJq77" not in log


def test_the_child_ends_with_its_parent(tmp_path):
    """Guards against a trainer that nobody watches: it would hold the GPU, and write beside the resumed run."""
    engines._copy_code(tmp_path)
    program = "import worker, time; worker.Parent(); print('ready', file=sys.stderr, flush=True); time.sleep(600)"
    process = start_child(f"import sys; sys.path[0] = {str(tmp_path)!r}; {program}")
    assert process.stdin is not None and process.stderr is not None
    process.stdin.write(b"{}\n")
    process.stdin.flush()
    assert process.stderr.readline() == b"ready\n"
    process.stdin.close()  # as the kernel does when the parent is killed
    assert process.wait(20) == 1


def start_child(program: str) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=pipe)


def test_settings_without_effect_on_any_engine_are_named_too(play):
    """Guards against a rank that full fine-tuning does not read."""
    result = play("started step:1 step:2", **{"method.kind": "full"})
    assert any("`method.rank` has no effect" in note for note in result.notes)


def test_a_package_without_a_name_is_no_reason_to_refuse_an_environment(project, monkeypatch, tmp_path):
    """Guards against the rest of an interrupted `pip install`, which has no metadata."""
    (tmp_path / "site" / "left-1.0.dist-info").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    with pytest.raises(UserError, match="needs `unsloth`"):
        train(engine="unsloth")


def test_a_run_is_resumed_with_its_own_engine(play, project):
    """Guards against a run whose steps come from two engines in silence."""
    play("started step:1 saved:1 die")
    with pytest.raises(UserError, match="begun with `engine: trl`"):
        play("started", engine="native", resume=True)


def test_settings_that_an_engine_cannot_use_are_refused_together(project):
    """Guards against settings that are silently ignored, and against one error at a time."""
    with pytest.raises(UserError) as caught:
        train(
            **{"train.optimizer": "adamw8bit", "evaluate.patience": 2, "train.replay": 0.1, "train.min_rate_share": 0.1}
        )
    for key in ("train.optimizer", "evaluate.patience", "train.replay", "train.min_rate_share"):
        assert key in caught.value.what


def test_settings_without_effect_are_named(play):
    """Guards against a key that somebody set and nobody reads."""
    result = play("started step:1 step:2 saved:2", **{"train.compile": "off", "healing.max_rewinds": 2})
    note = next(note for note in result.notes if note.startswith("no effect"))
    assert "`train.compile`" in note and "`healing.max_rewinds`" in note


def test_a_missing_engine_is_named_with_the_command_that_installs_it(project):
    """Guards against a traceback where a package is missing."""
    with pytest.raises(UserError, match="needs `unsloth`") as caught:
        train(engine="unsloth")
    assert caught.value.fix == f"{shlex.quote(sys.executable)} -m pip install unsloth"


def test_a_program_that_is_no_python_is_refused(project):
    with pytest.raises(UserError, match="not a working Python program"):
        train(engine_python="rows.jsonl")


def test_commands_with_steps_on_trial_refuse_another_engine(project):
    """Guards against numbers of our own engine for a run of another one."""
    with pytest.raises(UserError, match="steps on trial"):
        main_rehearse()


def main_rehearse() -> None:
    from tunewell.config.load import load_config
    from tunewell.runs.config import RunOptions
    from tunewell.workflows.rehearse import rehearse

    sets = [f"{key}={json.dumps(value)}" for key, value in SETTINGS.items()]
    rehearse(load_config(None, [*sets, "data=rows.jsonl"], model="model"), RunOptions(), lambda event: None)


def test_arguments_are_chosen_by_the_installed_signature():
    """Guards against an argument that a version has renamed, and against one that it has no more."""

    def old(*, tokenizer: object, max_seq_length: int) -> None: ...

    wanted = {"processing_class": "t", "max_length": 9}
    assert worker.arguments(old, wanted) == {"tokenizer": "t", "max_seq_length": 9}
    with pytest.raises(TypeError, match="no argument `packing`"):
        worker.arguments(old, {"packing": False})


def test_rows_are_padded_without_being_read_or_supervised():
    batch = worker.collate([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [8, -100, -100]]


def test_unsloth_gets_arguments_that_its_signatures_have(monkeypatch):
    """Guards against guessed arguments: the stand-in has the signatures of Unsloth 2026.10.9, and takes no others."""
    calls: dict[str, dict[str, Any]] = {}

    def from_pretrained(
        model_name="",
        max_seq_length=2048,
        dtype=None,
        load_in_4bit=True,
        full_finetuning=False,
        use_gradient_checkpointing="unsloth",
        use_exact_model_name=False,
        random_state=3407,
    ):
        calls["load"] = dict(locals())
        return "model", "tokenizer"

    def get_peft_model(
        model,
        r=16,
        target_modules=("q_proj",),
        lora_alpha=16,
        lora_dropout=0.0,
        bias="none",
        layers_to_transform=None,
        use_gradient_checkpointing="unsloth",
        random_state=3407,
        max_seq_length=2048,
        use_rslora=False,
        modules_to_save=None,
    ):
        calls["adapter"] = dict(locals())
        return "adapted"

    module = ModuleType("unsloth")
    names = {"from_pretrained": from_pretrained, "get_peft_model": get_peft_model}
    module.FastLanguageModel = SimpleNamespace(**names)  # pyright: ignore
    monkeypatch.setitem(sys.modules, "unsloth", module)
    request = {
        "model": "folder",
        "dtype": "bfloat16",
        "max_length": 77,
        "recompute": "offload",
        "is_quantized": True,
        "arguments": {"seed": 3},
        "adapter": {"r": 8, "lora_alpha": 16, "bias": "none", "lora_dropout": 0.0, "target_modules": "all-linear"},
    }
    assert worker.load_unsloth(request) == ("adapted", {})
    assert calls["load"]["dtype"] == torch.bfloat16 and calls["load"]["load_in_4bit"]
    assert calls["load"]["use_exact_model_name"] and not calls["load"]["full_finetuning"]
    assert calls["adapter"]["target_modules"] == ("q_proj",)  # Unsloth's own choice: all linear layers
    assert calls["adapter"]["r"] == 8 and calls["adapter"]["use_gradient_checkpointing"] == "unsloth"


def test_what_runs_in_the_child_imports_no_tunewell_but_what_is_copied(tmp_path):
    """Guards against an import that works here and fails in an environment without tunewell."""
    import ast

    program = engines._copy_code(tmp_path)
    copied = {
        path.relative_to(tmp_path).with_suffix("").as_posix().replace("/", ".") for path in tmp_path.rglob("*.py")
    }
    allowed = {"torch", "transformers", "trl", "peft", "unsloth", "datasets", *sys.stdlib_module_names, *copied}
    for path in [program, *tmp_path.rglob("*.py")]:
        tree = ast.parse(path.read_text())
        typing_only = {id(part) for node in ast.walk(tree) if isinstance(node, ast.If) for part in ast.walk(node)}
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names if id(node) not in typing_only else []:
                assert name in allowed or name.partition(".")[0] in allowed - {"tunewell"}, (path, name)
