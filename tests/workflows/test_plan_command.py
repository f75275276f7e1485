"""`tunewell plan`: what it predicts, what it offers if a run does not fit, and what is left when measuring fails."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded_system import RecordedSystem

import tunewell
from corpora import tree, write_rows, write_sums
from forked import run_command
from tunewell.cli.screens.plan import plan_screen
from tunewell.config.load import load_config
from tunewell.core import child
from tunewell.core.errors import UserError
from tunewell.machine.facts import cpu_facts
from tunewell.records.plan import read_plan
from tunewell.records.rundir import read_outcome
from tunewell.runs import probe
from tunewell.workflows import plan as workflow
from tunewell.workflows import train as train_workflow
from tunewell.workflows.plan import PlanOptions

FAST = ["device=cpu", "train.threads=1", "data.held_out=0.2", "train.max_steps=6", "train.batch_documents=4"]
COMPUTED = PlanOptions(is_measuring=False)
GiB = 1 << 30


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with rows, a config, and a cache of its own."""
    write_sums(tmp_path, tiny_model, model="preset:tiny-1m", num_rows=60)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUNEWELL_CACHE", str(tmp_path / "cache"))
    return tmp_path


def _plan(*sets: str, options: PlanOptions = COMPUTED, system: Any = None) -> Any:
    return workflow.plan(load_config(None, [*FAST, *sets]), options, system=system)


def test_the_command_prints_the_promised_keys_and_imports_no_torch(project: Path) -> None:
    """Programs read these keys, and `plan` must work where torch is missing or broken."""
    script = (
        "import sys; from tunewell.cli.main import main; code = main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules; raise SystemExit(code)"
    )
    line = [sys.executable, "-c", script, "plan", "--no-measure", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=project)
    assert done.returncode == 0, done.stderr
    payload = json.loads(done.stdout)
    assert payload["fits"] is True and payload["is_measured"] is False
    memory = payload["memory"]
    assert memory["low_bytes"] < memory["peak_bytes"] < memory["high_bytes"] and memory["free_bytes"]
    assert {"weights", "adapter", "gradients", "optimizer", "activations", "head", "graphs"} <= memory["parts"].keys()
    assert payload["seconds"]["low"] < payload["seconds"]["expected"] < payload["seconds"]["high"]
    assert payload["micro_batch_tokens"] > 0 and payload["ladder"] == []


@pytest.mark.slow
def test_real_steps_predict_what_the_run_then_needs(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child takes steps of the real engine, leaves nothing but the cache, and `train` uses what it measured."""
    # A run and its child both import torch, so most of the memory is equal; the steps decide the rest.
    before = set(Path(tempfile.gettempdir()).glob("tunewell-probe-*"))
    result = tunewell.plan(sets=FAST, progress=False)
    assert result.prediction.is_measured, result.notes
    assert set(Path(tempfile.gettempdir()).glob("tunewell-probe-*")) == before
    assert "fits=True" in repr(result) and "micro-batch" in result._repr_html_()
    assert not (project / "run").exists()
    monkeypatch.setattr(probe, "_run_child", lambda *args: pytest.fail("measured again"))
    again = tunewell.plan(sets=FAST, progress=False).prediction
    assert again.is_measured and again.memory.peak_bytes == result.prediction.memory.peak_bytes
    tunewell.train(sets=[*FAST, "verdict.questions=2"], progress=False)
    outcome = read_outcome(project / "run")
    assert outcome.predicted is not None and outcome.measured is not None
    assert outcome.predicted.is_measured
    assert outcome.predicted == read_plan(project / "run").prediction
    assert set(outcome.measured.phases) >= {"load", "steps", "evaluation", "verdict"}
    shown = run_command("plan", "--check", "run", cwd=project)
    assert shown.returncode == 0 and "peak memory" in shown.stdout and "verdict" in shown.stdout


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("kill -9 $$", "was killed, most likely because the machine ran out of memory"),
        ("kill -11 $$", "crashed (SIGSEGV)"),
        ("echo 'ImportError: libcudart' >&2; exit 1", "ImportError: libcudart"),
        ("""echo '{"result": {"problem": "out of memory: a step does not fit"}}'""", "a step does not fit"),
    ],
)
def test_a_measuring_process_that_dies_leaves_the_computed_plan(
    project: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    """The plan is still worth something, and says why no step was taken."""
    real = subprocess.Popen
    monkeypatch.setattr(child.subprocess, "Popen", lambda line, **options: real(["sh", "-c", script], **options))
    result = _plan(options=PlanOptions())
    assert not result.prediction.is_measured
    assert reason in result.notes[0]
    assert not [file for file in (project / "cache").rglob("*.json") if file.parent.name != "plugins"]


@pytest.mark.slow
def test_a_plan_that_is_terminated_leaves_nothing(project: Path) -> None:
    """The measuring process went on for minutes, and its folder stayed in the temporary folder."""
    script = (
        "from tunewell.cli.main import main; from tunewell.core import child; real = child.subprocess.Popen;"
        "child.subprocess.Popen = lambda line, **options: real(['sleep', '60'], **options); main(['plan'])"
    )
    temporary = project / "tmp"
    temporary.mkdir()
    options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = subprocess.Popen(
        [sys.executable, "-c", script], cwd=project, env=os.environ | {"TMPDIR": str(temporary)}, **options
    )
    while not list(temporary.glob("tunewell-probe-*")):
        assert command.poll() is None
        time.sleep(0.05)
    command.terminate()
    assert command.wait(timeout=60) == 143
    assert not list(temporary.iterdir())


def test_a_run_that_does_not_fit_gets_a_ladder_and_exit_code_2(project: Path) -> None:
    """Every rung has its numbers, and the chosen one fits."""
    sets = ["model=preset:base-277m", "train.batch_documents=null", "train.batch_tokens=4096"]
    result = _plan(*sets, options=PlanOptions(False, ram_bytes=int(3.4e9)))
    assert not result.fits and result.exit_code == 2
    names = [rung.name for rung in result.ladder]
    assert "LoRA instead of full fine-tuning" in names
    assert result.chosen is not None and result.chosen.prediction.fits
    assert all(rung.prediction.memory.peak_bytes < result.prediction.memory.peak_bytes for rung in result.ladder)
    assert "t4" in result.fitting_cards


def test_apply_writes_a_config_that_fits(project: Path) -> None:
    """The promise of the ladder: the same command with the written config says that it fits."""
    more = "train:\n  batch_tokens: 4096   # large\n  max_steps: 5\ndevice: cpu\n"
    text = (project / "tunewell.yaml").read_text().replace("preset:tiny-1m", "preset:base-277m")
    (project / "tunewell.yaml").write_text(text + more)
    line = ["plan", "--no-measure", "--ram", "3.4"]
    done = run_command(*line, "--apply", cwd=project)
    assert done.returncode == 0 and "wrote" in done.stdout, done.stderr
    assert "batch_tokens: 4096   # large" in (project / "tunewell.yaml").read_text()
    again = run_command(*line, cwd=project)
    assert again.returncode == 0 and again.stdout.startswith("FITS"), again.stdout
    done = run_command(*line, "--apply", "--json", cwd=project)
    assert json.loads(done.stdout) == {"format_version": 1, "fits": True, "changes": {}}
    few = run_command("plan", "--no-measure", "--ram", "0.5", "--apply", "--rung", "1", cwd=project)
    assert "the run still does not fit" in few.stdout, few.stdout


@pytest.mark.parametrize(
    "method", ["method: galore", "method: {kind: full}\noptim: galore_adamw", "method:\n  kind: galore"]
)
def test_apply_writes_over_every_form_that_the_config_accepts(project: Path, method: str) -> None:
    """`next:` recommended `--apply`, which answered "`method` is written on one line"."""
    text = (project / "tunewell.yaml").read_text().replace("preset:tiny-1m", "preset:base-277m")
    text = re.sub(r"(?m)^method:.*\n( .*\n)*", "", text)
    (project / "tunewell.yaml").write_text(f"{text}{method}\ntrain: {{batch_tokens: 4096}}\ndevice: cpu\n")
    line = ["plan", "--no-measure", "--ram", "1.5"]
    assert "`--apply` writes" in run_command(*line, cwd=project).stdout
    done = run_command(*line, "--apply", cwd=project)
    assert done.returncode == 0 and "wrote `method.kind: lora`" in done.stdout, done.stderr
    assert run_command(*line, cwd=project).returncode == 0


def test_apply_is_not_promised_where_it_cannot_be_kept(project: Path) -> None:
    """A mapping over several lines is not changed; the error names what to add to the command."""
    text = (project / "tunewell.yaml").read_text().replace("preset:tiny-1m", "preset:base-277m")
    text = re.sub(r"(?m)^method:.*\n( .*\n)*", "", text)
    (project / "tunewell.yaml").write_text(f"{text}method: {{kind: full,\n  rank: 8}}\ndevice: cpu\n")
    line = ["plan", "--no-measure", "--ram", "1.5"]
    assert "--apply" not in run_command(*line, cwd=project).stdout
    done = run_command(*line, "--apply", cwd=project)
    assert "add to the command: `--set method.kind=lora" in done.stderr, done.stderr
    assert run_command(*line, *re.findall(r"--set|[\w.]+=[\w.]+", done.stderr), cwd=project).returncode == 0


def test_a_smaller_micro_batch_is_chosen_if_the_constant_does_not_fit(project: Path) -> None:
    """`auto` must not plan what runs out of memory, if half of it would do."""
    sets = ["model=preset:base-277m", "method.kind=lora", "train.batch_documents=null", "train.batch_tokens=2048"]
    whole = _plan(*sets)
    small = _plan(*sets, options=PlanOptions(False, ram_bytes=int(whole.prediction.memory.peak_bytes * 0.9 / 0.9)))
    assert small.fits
    assert small.plan.micro_batch_tokens.value < whole.plan.micro_batch_tokens.value
    assert "largest that fits" in small.plan.micro_batch_tokens.because


def test_other_cards_are_compared_with_prices(project: Path) -> None:
    """One table for machines that one does not have."""
    result = _plan("plan.prices={t4: 0.5}", options=PlanOptions(False, gpus=["t4", "h200"]))
    first, second = result.cards
    assert first.prediction.fits and first.cost == pytest.approx(0.5 * first.prediction.seconds.expected / 3600)
    assert second.cost is None and result.exit_code == 0
    with pytest.raises(UserError, match="no GPU card `h2000`"):
        _plan(options=PlanOptions(False, gpus=["h2000"]))
    with pytest.raises(UserError, match="price per hour"):
        _plan("plan.prices={t4: 1e9}")


def test_a_price_is_found_by_every_name_of_a_card_and_a_typo_is_an_error(project: Path) -> None:
    """A price that no card has was ignored without a word."""
    [row] = _plan("plan.prices={RTX 4090: 0.5}", options=PlanOptions(False, gpus=["4090"])).cards
    assert row.cost is not None
    with pytest.raises(UserError, match="no GPU card `t44`") as caught:
        _plan("plan.prices={t44: 0.5}")
    assert "plan.prices" in (caught.value.where or "") and "`t4`" in (caught.value.fix or "")


def test_json_has_the_quantised_base(project: Path) -> None:
    payload = _plan("method.kind=lora", "method.quantize=int8").as_json()
    assert payload["plan"]["quantized"]["kind"] == "int8"


def test_a_gpu_option_without_a_card_is_refused(project: Path) -> None:
    done = run_command("plan", "--gpu", ",", cwd=project)
    assert done.returncode == 2 and "names no card" in done.stderr


GEMMA = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262_144,
    "tie_word_embeddings": True,
}


@pytest.fixture
def gemma(project: Path, tiny_model: Path) -> Path:
    """The project with the shape of gemma-3-1b, rows of about 1,200 tokens, and GaLore under its own name."""
    shutil.copytree(tiny_model, project / "gemma")
    (project / "gemma" / "config.json").write_text(json.dumps(GEMMA))
    rows = [{"instruction": f"What is {n}?", "output": f"{n} is {n}. " * (80 + n)} for n in range(60)]
    write_rows(project / "rows.jsonl", rows)
    config = "model: gemma\ndata: rows.jsonl\nmethod:\n  kind: galore\ntrain:\n  batch_documents: 8\n"
    (project / "tunewell.yaml").write_text(config)
    return project


@pytest.mark.parametrize("ram", [[], ["--ram", "8"]])
def test_a_card_that_is_too_small_names_what_fits_on_it(
    gemma: Path, ram: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan --gpu t4` said "no" for GaLore, listed nothing, and advised `tunewell train`, which would not fit."""
    monkeypatch.setenv("COLUMNS", "60")
    line = ["plan", "--gpu", "2080ti", *ram]
    done = run_command(*line, cwd=gemma)
    assert done.returncode == 2, done.stderr
    assert "`method.kind: galore` is `method.kind: full`" in done.stdout.replace("\n      ", " ")
    assert "recompute activations" in done.stdout and "mildest: " in done.stdout
    [command] = re.findall(r"`(tunewell train[^`]*)`", done.stdout.partition("next: ")[2])
    sets = command.removeprefix("tunewell train").split()
    assert sets and run_command(*line, *sets, cwd=gemma).returncode == 0, "the advised settings fit"
    applied = run_command(*line, "--apply", cwd=gemma)
    assert applied.returncode == 0 and "wrote" in applied.stdout, applied.stderr
    assert run_command(*line, cwd=gemma).returncode == 0


def test_no_next_line_contradicts_the_verdict(gemma: Path) -> None:
    """Below a "no", `next: tunewell train` without a change would fail."""
    for sets in (["method.kind=full"], ["method.kind=lora"], ["model=70b"]):
        config = GEMMA | {"hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80}
        (gemma / "70b").mkdir(exist_ok=True)
        for file in (gemma / "gemma").iterdir():
            shutil.copy(file, gemma / "70b")
        (gemma / "70b" / "config.json").write_text(json.dumps(config))
        result = _plan(*sets, "device=auto", "train.batch_documents=8", options=PlanOptions(False, gpus=["t4", "3080"]))
        screen = plan_screen(result)
        following = screen.partition("next: ")[2]
        fits = [row for row in result.cards if row.fits]
        ways = [row for row in result.cards if any(rung.fits for rung in row.ladder)]
        assert ("`tunewell train`" in following) is bool(fits)
        assert ("`tunewell train --set" in following) is (bool(ways) and not fits)
        assert ("choose a smaller model" in following) is not (fits or ways)


def test_a_setting_that_a_card_refuses_is_shown_with_its_way_out(gemma: Path) -> None:
    """`bf16: true` was "cannot run this config" on a T4, without the reason."""
    done = run_command("plan", "--gpu", "t4", "--set", "bf16=true", cwd=gemma)
    assert done.returncode == 2 and "bf16 cannot be used on NVIDIA Tesla T4" in done.stdout
    assert "train.precision=auto" in done.stdout


def test_what_the_engine_refuses_is_an_error_of_the_plan(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typo in `method.targets` was a note below FITS, and `train` stopped after it had loaded the model."""
    report = {"what": "the model has no linear layer `q_porj`", "where": "`method.targets`", "fix": "`q_proj`"}
    script = f"echo '{json.dumps({'error': report})}'"
    real = subprocess.Popen
    monkeypatch.setattr(child.subprocess, "Popen", lambda line, **options: real(["sh", "-c", script], **options))
    with pytest.raises(UserError, match="no linear layer `q_porj`") as caught:
        _plan(options=PlanOptions())
    assert (caught.value.where, caught.value.fix) == (report["where"], report["fix"])


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("wsl", ["WSL may use", "spills GPU memory"]),
        ("colab_t4", ["emulates it", "Drive"]),
        ("t4_busy", ["used by other processes: python (8.7 GiB)"]),
        ("mac", ["Apple GPUs share"]),
        ("container", ["the container may use 4.0 GiB", "the CPU is busy"]),
    ],
)
def test_recorded_machines_get_their_notes(project: Path, name: str, texts: list[str]) -> None:
    """Facts of WSL, Colab, T4, Mac and containers, replayed from files."""
    result = _plan("device=auto", system=RecordedSystem(name))
    notes = " ".join(result.notes)
    assert [text for text in texts if text not in notes] == []
    assert result.plan.precision.value == {"wsl": "bf16", "colab_t4": "fp16", "t4_busy": "fp16"}.get(name, "fp32")


def test_a_device_that_is_not_here_is_refused_as_in_train(project: Path) -> None:
    """A config with `device: cuda` was planned for the CPU without a word; other cards can still be compared."""
    for name in ("cuda", "mps", "tpu"):
        with pytest.raises(UserError, match=f"no device `{name}`"):
            _plan(f"device={name}")
    with pytest.raises(UserError, match="no device `cuda:7`"):
        _plan("device=cuda:7", system=RecordedSystem("t4_busy"))
    assert _plan("device=cuda", system=RecordedSystem("t4_busy")).device.kind == "cuda"
    assert _plan("device=cuda", options=PlanOptions(False, gpus=["t4"])).cards


def test_train_refuses_what_cannot_fit_before_it_loads_weights(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8B on a T4 was planned without a word, and ended minutes later out of memory."""
    small = replace(cpu_facts(), memory_bytes=GiB // 8, free_bytes=GiB // 16)
    monkeypatch.setattr(train_workflow, "probe_device", lambda name: small)
    monkeypatch.setattr(train_workflow, "build_run", lambda parts: pytest.fail("the model is being loaded"))
    with pytest.raises(UserError, match="does not fit: it needs at least"):
        tunewell.train(sets=FAST, progress=False)
    assert "run" not in {path.split("/")[0] for path in tree(project)}
    with pytest.raises(pytest.fail.Exception, match="is being loaded"):
        tunewell.train(sets=[*FAST, "plan.memory=warn"], progress=False)
