"""Commands with secrets in arguments, configs, logs and variables: none is on a screen, in JSON or in a file."""

import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tunewell.cli import main as frame
from tunewell.cli.main import main

# Made here from parts, so that no scanner takes this file for a leak.
PASSWORD, TOKEN = "Zq7vK2" + "xPw9", "hf_" + "Ab3dE6gH9jK2" + "mN5pQ8sT1vW4yZ7x"
ADDRESS, SERVER = f"https://u:{PASSWORD}@host.example/m", f"http://u:{PASSWORD}@127.0.0.1:9/v1#m"
ROWS = ["--data", "rows.jsonl"]
PREPARE = ["prepare", *ROWS, "--model", "preset:tiny-1m"]
COMMANDS = [
    ["train", "--model", ADDRESS, *ROWS, "--no-supervisor"],
    ["train", "--model", ADDRESS, *ROWS, "--no-supervisor", "--json"],
    ["train", "--model", f"{TOKEN}/m", *ROWS, "--no-supervisor"],
    ["train", f"--token={PASSWORD}"],
    ["train", "--token", PASSWORD],
    ["train", "--password", PASSWORD],
    ["plan", "--model", ADDRESS, *ROWS],
    ["models", "--model", f"{TOKEN}/m"],
    ["chat", SERVER, "--prompt", "hi"],
    ["chat", f"http://127.0.0.1:9/v1?api_key={PASSWORD}#m", "--prompt", "hi"],
    ["chat", f"http://127.0.0.1:9/v1?api_key={PASSWORD}#m", "--prompt", "hi", "--json"],
    ["chat", f"https://h:{PASSWORD}@h", "--prompt", "hi", "--json"],
    ["serve", SERVER],
    ["index", "docs", "--embedder", SERVER],
    ["index", "docs", "--embedder", SERVER, "--json"],
    ["index", "docs", "--out", f"host=h password={PASSWORD}"],
    ["index", "docs", "--out", f"Server=h;Pwd={PASSWORD}"],
    ["index", "docs", "--out", f"mysql://u:{PASSWORD}@h/d"],
    ["ask", "what fee?", "--model", SERVER],
    ["ask", "what fee?", "--index", ADDRESS],
    ["track", "run", "--to", TOKEN],
    ["track", ADDRESS, "--to", "wandb"],
    [*PREPARE, "--set", f"storage.endpoint=https://a:{PASSWORD}@h"],
    [*PREPARE, "--set", f"password={PASSWORD}"],
    [*PREPARE, "--set", f"train.password={PASSWORD}", "--json"],
    [*PREPARE, "--set", f"storage.secret_key={PASSWORD}"],
    [*PREPARE, "--set", f"storage.profile={TOKEN}"],
    [*PREPARE, "--set", f"train.precision=Bearer {PASSWORD}"],
    [*PREPARE, "--set", f"template.name={TOKEN}"],
    [*PREPARE[:1], "--model", f"{TOKEN}/m", *ROWS],
    [*PREPARE[:1], "--model", "preset:tiny-1m", "--data", ADDRESS],
    [*PREPARE[:1], "--model", "preset:tiny-1m", "--data", f"https://h/rows.jsonl?sig={PASSWORD}"],
    [*PREPARE[:1], "--model", "preset:tiny-1m", "--data", f"s3://u:{PASSWORD}@bucket/rows.jsonl"],
    [*PREPARE[:1], "--model", "preset:tiny-1m", "--data", f"{TOKEN}.jsonl"],
    ["prepare", "--config", "secret.yaml"],
    ["prepare", "--config", "secret.yaml", "--json"],
    ["prepare", "--config", "broken.yaml"],
    ["prepare", "--config", f"{TOKEN}.yaml"],
    ["train", "--config", "secret.yaml", "--no-supervisor"],
    ["push", f"run-{TOKEN}", "--to", f"hf://me/{TOKEN}"],
    ["export", ADDRESS],
    ["validate", ADDRESS],
    ["verify", ADDRESS],
    ["inspect", ADDRESS],
    ["compare", ADDRESS, "b"],
    ["runs", ADDRESS],
    ["runs", ADDRESS, "--json"],
    ["sweep", *ROWS, "--set", f"password={PASSWORD}"],
    ["profile", ADDRESS],
    ["explain", f"password={PASSWORD}"],
    ["glossary", TOKEN],
    [f"--token={PASSWORD}"],
    [TOKEN],
    ["diagnose", "run.log"],
    ["diagnose", "run.log", "--all"],
    ["diagnose", "run.log", "--json"],
    ["diagnose", "broken.yaml", "--json"],
    ["diagnose", ADDRESS],
]
LOG = f"""psql PGPASSWORD='{PASSWORD}' start --token {PASSWORD} -u admin:{PASSWORD}
Authorization: Bearer {PASSWORD}
PGPASSWORD='{PASSWORD}' https://u:{PASSWORD}@h?api_key={PASSWORD} {TOKEN} RuntimeError: CUDA out of memory.
{{"password": "{PASSWORD}", "cookie": "sid={PASSWORD}"}} loss: nan --secret {PASSWORD}
"""


@pytest.fixture
def leaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[], list[str]]:
    """Fill a project with secrets; return a function that lists where one of them turned up."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    row = {"messages": [{"role": "user", "content": "Which fee?"}, {"role": "assistant", "content": "12 pounds."}]}
    Path("rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    Path("run.log").write_text(LOG)
    Path("secret.yaml").write_text(f"model: preset:tiny-1m\ndata: rows.jsonl\nstorage:\n  password: {PASSWORD}\n")
    Path("broken.yaml").write_text(f"model: preset:tiny-1m\napi_key: '{PASSWORD}'\ntoken: {TOKEN}\n  train: [\n")
    Path("docs").mkdir()
    Path("docs/fees.txt").write_text("The fee is 12 pounds.\n")
    planted = set(Path().rglob("*"))

    def found() -> list[str]:
        captured = capsys.readouterr()
        texts = {"stdout": captured.out, "stderr": captured.err}
        for path in set(Path().rglob("*")) - planted:
            texts[f"file {path}"] = path.read_bytes().decode(errors="replace") if path.is_file() else str(path)
        return [name for name, text in texts.items() if PASSWORD in text or TOKEN in text or TOKEN in name]

    return found


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command)[:60])
def test_no_command_repeats_a_secret(command: list[str], leaks: Callable[[], list[str]]) -> None:
    """People paste screens and JSON into public issues; errors repeated addresses, settings and names."""
    assert main(command) != frame.EXIT_BUG
    assert leaks() == []


def test_a_crash_and_a_warning_show_no_secret(
    monkeypatch: pytest.MonkeyPatch, leaks: Callable[[], list[str]], tmp_path: Path
) -> None:
    """The saved traceback of a bug has the arguments, and other libraries write to stderr by themselves."""

    def crash(arguments: object) -> int:
        warnings.warn(f"cannot open {ADDRESS}", stacklevel=1)
        print(f"curl -u admin:{PASSWORD}", file=sys.stderr)  # noqa: T201
        raise RuntimeError(f"connection to {ADDRESS} with password={PASSWORD} failed for {arguments}")

    monkeypatch.setattr(frame, "_dispatch", crash)
    for command in (["chat", SERVER, "--token", PASSWORD], ["chat", SERVER, "--password", PASSWORD, "--json"]):
        assert main(command) == frame.EXIT_BUG
    assert len(list(tmp_path.glob("tunewell-crash-*.log"))) == 2
    assert leaks() == []


def test_the_value_of_a_secret_variable_is_on_no_screen(
    monkeypatch: pytest.MonkeyPatch, leaks: Callable[[], list[str]]
) -> None:
    """Keys of trackers have no format of their own."""
    monkeypatch.setenv("WANDB_API_KEY", PASSWORD)
    for command in (["diagnose", f"key {PASSWORD} was refused: 401"], ["runs", PASSWORD], ["explain", PASSWORD]):
        main(command)
        assert leaks() == []


@pytest.mark.uses("diagnose")
def test_a_secret_at_the_edge_of_a_shortened_line_is_replaced() -> None:
    """A long line is cut around the match; half of a password has no name before it."""
    from tunewell.features.diagnose.diagnose import diagnose

    for gap in range(40, 110):
        text = f"{'x ' * 900}PGPASSWORD='{PASSWORD * 3}' {'y' * gap} CUDA out of memory {'z ' * 900}"
        assert PASSWORD[:4] not in str(diagnose(text)[0])


def test_a_connection_string_is_not_the_name_of_a_folder(leaks: Callable[[], list[str]]) -> None:
    """`index --out "host=h password=PW"` made a folder of that name."""
    assert main(["index", "docs", "--out", "host=h dbname=d"]) == frame.EXIT_USER
    assert not Path("host=h dbname=d").exists()
    assert leaks() == []


@pytest.mark.slow
def test_a_run_leaves_no_secret_in_its_files(
    monkeypatch: pytest.MonkeyPatch, leaks: Callable[[], list[str]], tiny_model: Path
) -> None:
    """Reports, events, plans and pages of a run are shared; only the corpus has the rows as they are."""
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    turns = [{"role": "user", "content": f"Which key {number}?"} for number in range(24)]
    answer = {"role": "assistant", "content": f"Use {TOKEN} with password={PASSWORD}."}
    Path("rows.jsonl").write_text("".join(f"{json.dumps({'messages': [turn, answer]})}\n" for turn in turns))
    settings = ["train.max_steps=2", "packing.context_length=128", "evaluate.samples=2"]
    command = ["train", *ROWS, "--model", "preset:tiny-1m", "--set", f"tokenizer={tiny_model}", "--out", "run"]
    command += ["--no-supervisor"]
    assert main([*command, *(word for setting in settings for word in ("--set", setting))]) in (0, 3, 4)
    leaked = [name for name in leaks() if "corpus" not in name and ".tunewell" not in name]
    assert leaked == []
