"""What new users stumbled over in their first hour: each of these tests failed before."""

from pathlib import Path

import pytest

from tunewell.cli.main import main
from tunewell.cli.screens.models import models_screen
from tunewell.core.errors import UserError
from tunewell.data.row_statistics import RowStatistics
from tunewell.machine.machine import read_machine
from tunewell.model_files.catalogue import catalogue
from tunewell.planning.model_choice import ModelNeeds
from tunewell.runs.folder import require_known_changes
from tunewell.workflows.models import ModelsResult


def models_at(columns: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    problems = ["not trained on German", "does not fit: it needs 3 GiB, and 2 GiB are free", ""]
    models = [
        ModelNeeds(entry.name, 10**8, 10**9, None, entry, problem=problem)
        for entry, problem in zip(catalogue()[:3], problems, strict=True)
    ]
    rows = RowStatistics(9, (10,) * 9, 0.5, language="de")
    machine = read_machine(asks_gpus=False)
    return models_screen(ModelsResult(rows, None, machine, models, [], recommended=None, because=""))


def test_models_has_a_letter_for_each_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `x`, which meant both "does not fit" and "not trained on German"."""
    lines = models_at(100, monkeypatch).splitlines()
    marks = {line.split()[1]: line.split()[0] for line in lines if line[:2] in ("x ", "a ") and "/" in line}
    assert marks == {catalogue()[0].name: "a", catalogue()[1].name: "x"}
    assert "x   does not fit" in lines and "a   not trained on German" in lines


def test_models_names_the_columns_that_a_narrow_terminal_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the licence with its login, which vanished without a word."""
    assert "licence (a wider terminal, or `--json`)" in " ".join(models_at(60, monkeypatch).split())
    assert "not shown here" not in models_at(120, monkeypatch)


def test_ask_without_an_index_says_so_before_torch_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards 26 seconds of "opening the index and the model" for an index that does not exist."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "tunewell.features.retrieval.ask_workflow", None)
    assert main(["ask", "When does it open?"]) == 2
    assert "there is no index in `index`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "advised"),
    [("max_steps", "num_steps"), ("train.max_steps", "num_steps"), ("train.learning_rate", "learning_rate")],
)
def test_a_key_of_the_config_is_translated_for_a_resumed_run(name: str, advised: str) -> None:
    """Guards against a guess of a name that is not the one in the config, without saying which key it is."""
    with pytest.raises(UserError) as raised:
        require_known_changes([name], is_resuming=True)
    assert raised.value.fix == f"write `--allow-change {advised}`"
