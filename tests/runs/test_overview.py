"""`tunewell` alone: where a project stands, from its files."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tunewell.cli.main import main
from tunewell.core.files import FolderLock
from tunewell.records.rundir import LOCK
from tunewell.runs.overview import read_overview

WRITTEN = Path(__file__).parents[1] / "compat" / "written_by_0_1_0"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_config(folder: Path, text: str = "") -> None:
    (folder / "tunewell.yaml").write_text(f"model: m\ndata: {{sources: rows.csv{text}}}\nrun: run\n", encoding="utf-8")


def test_an_empty_folder_shows_the_commands_and_how_to_start(folder, capsys):
    """Guards the first minute: the file that is there is in the command."""
    (folder / "README.md").write_text("not rows", encoding="utf-8")
    (folder / "my chats.csv").write_text("question,answer\n", encoding="utf-8")
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "usage: tunewell COMMAND" in shown and "start: `tunewell train 'my chats.csv'`" in shown


def test_only_files_that_are_plainly_rows_are_offered(folder, capsys):
    """A fresh clone suggested `tunewell train constraints.txt`; a chat and a list of objects are rows."""
    (folder / "constraints.txt").write_text("torch==2.13\n", encoding="utf-8")
    (folder / "SECURITY.md").write_text("# Security\n", encoding="utf-8")
    (folder / "package.json").write_text('{"name": "x"}\n', encoding="utf-8")
    (folder / "damaged.zip").write_bytes(b"PK")
    assert main([]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "start: which file has your rows? `tunewell train FILE`" in shown and "constraints" not in shown
    (folder / "chat.txt").write_text("12/31/23, 9:05 PM - Anna: hello\n", encoding="utf-8")
    assert read_overview().next_step == "`tunewell train chat.txt`"
    (folder / "chats.json").write_text('[{"question": "a", "answer": "b"}]', encoding="utf-8")
    assert "chats.json" in read_overview().next_step and "chat.txt" in read_overview().next_step


def test_each_stage_names_the_next_command(folder, capsys):
    """Guards against two places that disagree about the next step."""
    write_config(folder)
    found = read_overview()
    assert dict(found.entries)["corpus"].startswith("not prepared yet") and found.next_step == "`tunewell train`"
    shutil.copytree(WRITTEN / "corpus", folder / "corpus")
    assert "for training" in dict(read_overview().entries)["corpus"]
    shutil.copytree(WRITTEN / "run_lora", folder / "run")
    (folder / "run" / "outcome.json").unlink(missing_ok=True)
    write_config(folder)
    assert "not finished" in dict(read_overview().entries)["run"]
    assert read_overview().next_step == "`tunewell train --resume --config run/config.yaml --out run`"
    with FolderLock.take(folder / "run" / LOCK, doing="training"):
        assert "a process is working in it" in dict(read_overview().entries)["run"]
        assert read_overview().next_step == "wait until it ends; `tunewell runs run` shows how far it is"
    shutil.rmtree(folder / "run")
    (folder / "tunewell.yaml").unlink()
    shutil.copytree(WRITTEN / "run_finished", folder / "run")
    report = json.loads((folder / "run" / "report.json").read_text(encoding="utf-8"))
    assert main(["--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["verdict"].startswith(report["verdict"]) and shown["next"].startswith(report["next"])
    (folder / "run" / "report.json").unlink()
    assert read_overview().next_step == "`tunewell validate run`"


def test_a_config_that_changed_after_the_run_is_trained_in_a_new_folder(folder):
    """Guards advice about a run that the user has already acted on."""
    shutil.copytree(WRITTEN / "run_finished", folder / "run")
    write_config(folder)
    assert read_overview().next_step == "`tunewell train --out run2` with the changed config"
    (folder / "run2").mkdir()
    assert read_overview().next_step == "`tunewell train --out run3` with the changed config"


@pytest.mark.parametrize(
    ("first", "run", "command"),
    [
        ("# tunewell train --out run2", "run2", "--resume --out run2"),
        ("# tunewell train rows.csv --model m", "run", "--resume"),
        ("# tunewell train --set seed=3", "run", "--resume --config run/config.yaml --out run"),
        ("model: m", "run", "--resume --config run/config.yaml --out run"),
    ],
)
def test_a_run_is_resumed_with_its_own_settings(folder, first, run, command):
    """A run with `--set` that was killed before its first checkpoint began anew with the settings of the config."""
    write_config(folder)
    shutil.copytree(WRITTEN / "run_lora", folder / run)
    (folder / run / "outcome.json").unlink(missing_ok=True)
    text = (folder / run / "config.yaml").read_text(encoding="utf-8")
    (folder / run / "config.yaml").write_text(f"{first}\n{text}", encoding="utf-8")
    assert read_overview().next_step == f"`tunewell train {command}`"


def test_problems_are_entries_and_not_errors(folder):
    """Guards the command for somebody who has lost the thread: it must not fail on the file that is broken."""
    write_config(folder, ", held_out: 7")
    assert "has an error" in dict(read_overview().entries)["config"]
    (folder / "tunewell.yaml").write_text(
        "model: m\ndata: {sources: {path: r.csv, assistant: '?'}}\n", encoding="utf-8"
    )
    assert "replace `?`" in read_overview().next_step
    (folder / "corpus").mkdir()
    (folder / "corpus" / "manifest.json").write_text("{", encoding="utf-8")
    (folder / "run").mkdir()
    (folder / "run" / "plan.json").write_text("{", encoding="utf-8")
    entries = dict(read_overview().entries)
    assert "damaged" in entries["corpus"] and "damaged" in entries["run"]


def test_it_imports_no_torch(folder):
    """A look at a folder takes a second, not ten."""
    shutil.copytree(WRITTEN / "run_finished", folder / "run")
    check = "assert not {'torch', 'transformers'} & set(sys.modules)"
    code = f"import sys; from tunewell.cli.main import main; main([]); {check}"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
