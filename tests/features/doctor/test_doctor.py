"""`tunewell doctor` from the command line, the fast part before training, and the library function."""

import json
import stat
import sys

import pytest

import tunewell
from tunewell.cli.main import main
from tunewell.config.load import load_config
from tunewell.core import optional
from tunewell.core.errors import UserError
from tunewell.features.doctor import imports, workflow
from tunewell.features.doctor.facts import Environment, Package, Python
from tunewell.features.doctor.findings import EnvironmentProblem, EnvironmentReport


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder with an empty hub cache, without nvidia-smi and without slow imports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(imports, "TRIALS", {"orjson": "import orjson"})
    return tmp_path


def run(capsys, *arguments):
    code = main(["doctor", *arguments])
    return code, capsys.readouterr().out


def test_the_packages_of_the_tests_are_sound(place, capsys):
    """The tests themselves run with sound packages, whatever the machine; the versions are those that are shown."""
    _, out = run(capsys, "--json")
    found = json.loads(out)
    assert [one for one in found["findings"] if one["group"] in ("python", "packages", "versions", "config")] == []
    assert found["facts"]["python"].startswith(sys.version.split()[0])


def test_json_and_the_screen_agree_on_a_gpu_that_torch_cannot_use(place, capsys, monkeypatch):
    """The first finding has its id, level and command in both."""
    build = {"__version__": "2.13.0+cpu", "cuda": None, "hip": None}
    monkeypatch.setattr("tunewell.features.doctor.packages._torch_build", lambda _: build)
    (place / "bin").mkdir()
    program = place / "bin" / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, Tesla T4, 15360, 14900, 7.5, 580.65.06, 0'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    code, out = run(capsys, "--json")
    found = json.loads(out)
    assert (code, found["exit_code"], found["status"]) == (4, 4, "broken")
    assert [one["id"] for one in found["findings"] if one["group"] == "gpu"] == ["torch-cpu-build", "bf16-emulated"]
    code, out = run(capsys)
    assert code == 4 and "broken  torch-cpu-build:" in out and "1 broken;" in out


def test_fix_prints_one_script_and_runs_nothing(place, capsys):
    """A user reads a script before it changes the environment."""
    (place / "datasets.py").write_text("")
    code, out = run(capsys, "--fast", "--fix")
    assert code == 3 and out.startswith("#!/bin/sh\n")
    assert "mv datasets.py my_datasets.py" in out
    assert (place / "datasets.py").exists()


def test_a_config_with_errors_is_a_finding(place, capsys):
    """The doctor must not stop at the first mistake of the user."""
    (place / "tunewell.yaml").write_text("modle: x\n")
    code, out = run(capsys, "--fast", "--json")
    assert code == 3
    assert json.loads(out)["findings"][0]["id"] == "config-invalid"


def test_the_model_of_the_config_is_checked(place, capsys):
    """A pointer instead of weights is found before anything is loaded."""
    (place / "model").mkdir()
    (place / "model" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    (place / "tunewell.yaml").write_text("model: model\n")
    code, out = run(capsys, "--fast")
    assert code == 4 and "model-lfs-pointer" in out
    code, out = run(capsys, "--fast", "--model", "modle")
    assert code == 4 and "model-not-found" in out


def test_another_interpreter_is_checked(place, capsys):
    """A user of trl need not install tunewell into the broken environment."""
    _, out = run(capsys, "--python", sys.executable, "--json")
    assert json.loads(out)["python"] == sys.executable
    assert main(["doctor", "--python", "/no/such/python"]) == 2
    assert "is not a Python interpreter" in capsys.readouterr().err


def test_known_good_versions_are_printed(place, capsys):
    """The list is a requirements file."""
    code, out = run(capsys, "--known-good", "trl")
    assert code == 0 and "trl==" in out and "transformers==" in out
    assert main(["doctor", "--known-good", "nothing"]) == 2


def test_the_script_lists_manual_steps_as_comments():
    """Not everything can be fixed by a command; a command of two findings is run once."""
    manual = EnvironmentProblem("disk-full", "broken", "the disk is full", "why", "delete files")
    first = EnvironmentProblem("a", "broken", "x", "why", "fix", ["pip install y"])
    script = EnvironmentReport(
        [manual, first, first, EnvironmentProblem("n", "note", "z", "why", "fix", ["never"])]
    ).fix_script()
    assert "# by hand: delete files" in script
    assert script.count("pip install y") == 1 and "never" not in script
    assert EnvironmentReport([]).fix_script().endswith("# nothing to fix")


def environment(*names):
    packages = [Package(name, "1.0", f"/site/{name}-1.0.dist-info") for name in names]
    return Environment(Python("3.11.7", "/venv/bin/python"), packages)


def test_training_without_torch_is_refused_with_the_command(place, monkeypatch):
    """A missing torch was reported as a bug in tunewell."""
    monkeypatch.setattr(workflow, "read_packages", lambda *_, **__: environment("numpy"))
    monkeypatch.setattr(optional, "direct_url", lambda: None)
    with pytest.raises(UserError, match="training needs torch, transformers, safetensors: not installed") as caught:
        workflow.require_environment(load_config(None), lambda _: None)
    assert caught.value.fix == '/venv/bin/python -m pip install "tunewell[train]"'
    monkeypatch.setattr(optional, "direct_url", lambda: {"url": "file:///clone", "dir_info": {"editable": True}})
    with pytest.raises(UserError) as caught:
        workflow.require_environment(load_config(None), lambda _: None)
    assert caught.value.fix == '/venv/bin/python -m pip install -e "/clone[train]"'


def test_a_broken_package_that_training_does_not_use_is_ignored(place, monkeypatch):
    """trl is not imported by tunewell's training; torch is."""
    sound = environment("torch", "transformers", "safetensors")
    broken = Package("trl", "1.0", "/site/trl-1.0.dist-info", problem="no `METADATA`")
    facts = Environment(sound.python, [*sound.packages, broken])
    monkeypatch.setattr(workflow, "read_packages", lambda *_, **__: facts)
    notes = []
    workflow.require_environment(load_config(None), notes.append)
    damaged = Package("torch", "2.13.0", "/site/torch-2.13.0.dist-info", problem="no `METADATA`")
    facts = Environment(sound.python, [damaged, *sound.packages[1:]])
    with pytest.raises(UserError, match="the metadata of torch"):
        workflow.require_environment(load_config(None), notes.append)


def test_training_refuses_damaged_weights_before_torch_is_imported(place):
    """Loading them fails a minute later with HeaderTooLarge."""
    (place / "model").mkdir()
    (place / "model" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match="Git LFS pointer"):
        workflow.require_environment(load_config(None, ["model=model"]), lambda _: None)


def test_the_library_finds_what_the_kernel_still_holds(place, monkeypatch):
    """Only the kernel's own process knows the versions that it imported."""
    monkeypatch.setattr("numpy.__version__", "1.26.4")
    found = tunewell.doctor(progress=False)
    assert found.findings[0].id == "notebook-kernel-stale" and found.exit_code == 4
    assert "notebook-kernel-stale" in repr(found) and "restart the kernel" in found._repr_html_()


def test_the_doctor_runs_if_the_command_line_itself_is_broken(place, capsys, monkeypatch):
    """typer parses options with pydantic, whose compiled part is the first to break."""

    def broken(name, arguments):
        raise ImportError("cannot import name 'ArgsKwargs' from 'pydantic_core'")

    monkeypatch.setattr("tunewell.cli.main._run_command", broken)
    assert main(["doctor", "--json"]) in (0, 3)
    out, err = capsys.readouterr()
    assert json.loads(out)["num_checks"] > 10 and "because a package is broken" in err
