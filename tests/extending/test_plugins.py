"""Extensions in another installed package, found by entry point: they train, are recorded, and break alone."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import tunewell
from corpora import row
from tunewell.config.extensions import METHODS, OPTIMIZERS
from tunewell.config.schema import Config
from tunewell.core import plugins
from tunewell.core.errors import UserError
from tunewell.core.plugins import find_plugins, used_plugins

_HERE = Path(__file__).parent
_POINTS = """
[tunewell.methods]
norms = toy_entries:NORMS
[tunewell.optimizers]
momentum = toy_entries:MOMENTUM
priceless = toy_optimizer:GradientDescent
[tunewell.sources]
memory = toy_source:MemoryFile
[tunewell.engines]
nudge = toy_engine:Nudge
[tunewell.features]
hello = toy_command:command
[tunewell.targets]
absent = no_such_module:Target
"""


def _install(folder: Path, name: str, points: str) -> None:
    information = folder / f"{name}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(points)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with a toy of several extension points, two of them broken."""
    site = tmp_path / "site"
    _install(site, "toy", _POINTS)
    for module in ("entries", "method", "optimizer", "engine", "source", "command"):
        (site / f"toy_{module}.py").write_text((_HERE / f"toy_{module}.py").read_text())
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("TUNEWELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(plugins, "_used", set())
    monkeypatch.chdir(tmp_path)
    return site


def _command(site: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), str(Path(tunewell.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    return subprocess.run(
        [sys.executable, "-m", "tunewell", *arguments], env=environment, capture_output=True, text=True
    )


def test_names_of_plugins_are_values_of_the_config(site: Path) -> None:
    assert "norms" in METHODS.names() and "momentum" in OPTIMIZERS.names()
    config = Config.model_validate({"method": {"kind": "norms"}, "train": {"optimizer": "momentum"}})
    assert config.train.optimizer == "momentum"
    assert used_plugins() == [], "listing names uses nothing"
    assert OPTIMIZERS.doc("momentum") == "of the package toy 1.0"
    assert OPTIMIZERS.entry("momentum").doc == "gradient descent with the mean of the gradients"


def test_one_variable_switches_plugins_off(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEWELL_PLUGINS", "0")
    assert find_plugins() == [] and "momentum" not in OPTIMIZERS.names()
    assert _command(site, "hello", TUNEWELL_PLUGINS="0").returncode == 2


def test_an_installed_package_is_found_though_the_scan_is_cached(
    site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A second process reads the file; a package that was installed since then changes the time of a folder."""
    monkeypatch.setattr(plugins, "_found", {})
    first = find_plugins()
    assert any((tmp_path / "cache" / "plugins").glob("*.json"))
    monkeypatch.setattr(plugins, "_found", {})
    with monkeypatch.context() as patch:
        patch.setattr(plugins, "_scan", lambda: pytest.fail("the scan is cached"))
        assert find_plugins() == first
    _install(site, "other", "[tunewell.trackers]\nnew = new:Tracker\n")
    monkeypatch.setattr(plugins, "_found", {})
    assert {plugin.name for plugin in find_plugins()} - {plugin.name for plugin in first} == {"new"}
    for cached in (tmp_path / "cache" / "plugins").glob("*.json"):
        cached.write_text('[{"group": 1}]')
    monkeypatch.setattr(plugins, "_found", {})
    assert len(find_plugins()) == len(first) + 1, "a damaged entry is found again"


@pytest.mark.uses("doctor")
def test_a_broken_plugin_is_named_and_stops_nothing_else(site: Path) -> None:
    with pytest.raises(UserError, match=r"plugin `priceless` of the package toy 1\.0 is broken.*OptimizerEntry"):
        OPTIMIZERS.entry("priceless")
    assert "priceless" not in [entry.name for entry in OPTIMIZERS.entries()]
    from tunewell.features.doctor.workflow import doctor

    found = doctor(is_fast=False)
    assert "optimizers: momentum (toy 1.0)" in found.facts["plugins"] and str(site) in found.facts["plugins"]
    broken = [finding.what for finding in found.findings if finding.id == "plugin-broken"]
    assert len(broken) == 2 and any("`absent`" in what and "no_such_module" in what for what in broken)
    shown = _command(site, "glossary", "LoRA")
    assert shown.returncode == 0 and "broken" not in shown.stderr


def test_a_feature_of_another_package_is_a_command(site: Path) -> None:
    done = _command(site, "hello", "Ada")
    assert done.stdout.strip() == "hello Ada", done.stderr
    listed = _command(site, "--help").stdout
    assert "Print a greeting." in listed


def test_an_engine_of_another_package_takes_the_steps_of_a_run(site: Path, tiny_model: Path) -> None:
    """The spine knows no engine but its own: the run folder, resuming and the verdict must not need TRL."""
    shutil.copytree(tiny_model, "model")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=512, num_hidden_layers=1, max_position_embeddings=1024, **sizes)
    LlamaForCausalLM(config).save_pretrained("model")
    settings = {
        "model": "model",
        "engine": "nudge",
        "method": {"kind": "full"},
        "device": "cpu",
        "train": {"max_steps": 2, "batch_documents": 4},
    }
    rows = [row(number) for number in range(30)]
    with pytest.raises(UserError, match="changes the model itself"):
        tunewell.train({**settings, "method": {"kind": "lora"}}, data=rows, out="run", progress=False)
    result = tunewell.train(settings, data=rows, out="run", progress=False)
    assert (result.status, result.steps) == ("finished", 2) and "nudge learns nothing" in result.notes
    assert result.validation is not None and len(result.healing) == 1
    settings["train"] = {"max_steps": 3, "batch_documents": 4}
    more = tunewell.train(settings, data=rows, out="run", resume=True, allow_changes=["num_steps"], progress=False)
    assert more.steps == 3 and [step for step, _ in more.losses] == [1, 2, 3]
    folders = (Path("model"), more.run / "checkpoints/step-000003")
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    assert torch.allclose(after["model.norm.weight"], before["model.norm.weight"] + 3)
    record = json.loads((more.run / "plan.json").read_text())
    assert record["engine"]["versions"] == {"nudge": "1.0"} and any("nudge" in one for one in record["plugins"])


def _optimizer_part(tiny_model: Path, run: str, *, method: str, train: dict[str, object]) -> tuple[float, int, Path]:
    """Train two steps; return the planned bytes of the optimizer's state and of the gradients, and the run."""
    settings = {
        "model": "preset:tiny-1m",
        "tokenizer": str(tiny_model),
        "device": "cpu",
        "method": {"kind": method},
        "train": {"max_steps": 2, "batch_documents": 4, **train},
        "evaluate": {"samples": 0},
        "verdict": {"after_training": False},
    }
    tunewell.train(settings, data=[row(number) for number in range(30)], out=run, progress=False)
    parts = json.loads(Path(run, "plan.json").read_text())["prediction"]["memory"]["parts"]
    return parts["optimizer"], parts["gradients"], Path(run)


@pytest.mark.parametrize(
    ("method", "train"),
    [
        ("full", {"optimizer": "momentum"}),
        ("full", {"optimizer": "adamw"}),
        ("full", {"optimizer": "adamw8bit"}),
        ("full", {"optimizer": "galore", "galore_rank": 8}),
        ("full", {"optimizer": "galore", "galore_rank": 8, "galore_8bit": True}),
        ("lora", {"optimizer": "momentum"}),
        ("dora", {"optimizer": "adamw"}),
        ("norms", {"optimizer": "momentum"}),
        ("norms", {"optimizer": "adamw"}),
    ],
)
def test_the_planned_state_is_that_of_the_run(site: Path, tiny_model: Path, method: str, train: dict) -> None:
    """An SGD was planned as AdamW, and a method that trains few weights as one that trains all."""
    planned, gradients, run = _optimizer_part(tiny_model, "run", method=method, train=train)
    newest = max((run / "checkpoints").glob("step-*"))
    state = load_file(newest / "optimizer.safetensors")
    assert planned == pytest.approx(sum(tensor.nbytes for tensor in state.values()), rel=0.05)
    if train["optimizer"] == "momentum":
        assert gradients == pytest.approx(sum(tensor.nbytes for tensor in state.values()), rel=0.05)
    plugins = [name for name in (method, train["optimizer"]) if name in ("norms", "momentum")]
    for record in ("plan.json", "outcome.json"):
        recorded = json.loads((run / record).read_text()).get("plugins", [])
        assert len(recorded) == len(plugins) and all(any(name in one for one in recorded) for name in plugins)
