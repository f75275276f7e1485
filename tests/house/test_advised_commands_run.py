"""Every form of an advised command, filled in and run on a tiny project: it does what its sentence promises."""

import io
import json
import shlex
import shutil
from pathlib import Path

import pytest
from test_advised_commands import COMMANDS, MENTIONED, VALUE
from test_newcomer import write_weights

from corpora import row
from tunewell.cli.main import main

pytestmark = pytest.mark.slow

LEFT_OUT = {
    "demo": "it trains for two minutes; `make demo` and the tests of the demo run it",
    "track": "it needs the package of a tracker; tests/features/track runs it",
    f"runs {VALUE} --stacks": "only a running process has stacks; tests/faults/test_supervisor.py asks one",
    "sweep": "only a stopped sweep resumes; tests/features/sweep runs it",
    "launch": "Slurm refuses what this machine does not have; tests/features/launch runs it",
    "compare --record": "it needs a hosted model; tests/features/compare records one",
    f"compare {VALUE} RUN {VALUE}": "it needs recorded answers; tests/features/compare reads them",
}
"""Forms, or how they begin, with the reason."""
SHORT = ["train.max_steps=2", "verdict.questions=4", "evaluate.samples=0", "verdict.answer_tokens=8", "train.epochs=1"]
JOB = {"object": "fine_tuning.job", "id": "ftjob-1", "model": "gpt-4o-mini", "training_file": "file-1"}
PLACEHOLDERS = {
    **dict.fromkeys(("FILE", "ROWS", "YOUR_ROWS", "PATH"), "train.jsonl"),
    **{"RUN": "run", "DOCUMENTS": "docs", "INDEX": "index", "MODEL": "model", "KEY": "seed", "KIND": "base"},
    **{"JOB": "job.json", "ROWS.jsonl": "chats.jsonl"},
    **{"TERM": "packing", "LOG": "train.log", "LOGS/": "logs", "NEW": "new", "QUESTION": "When does it open?"},
}
NAMED = {
    ("plan", "NAME"): "t4",
    ("init", "NAME"): "model",
    ("index", "FOLDER"): "docs",
    ("verify", "FOLDER"): "run/export",
}
"""Placeholders that mean something else in one command."""
VALUES = {
    **dict.fromkeys(("chat", "export", "runs", "validate", "profile"), "run"),
    **{"ask": "index", "diagnose": "train.log", "explain": "packing.context_length", "glossary": "packing"},
    **{
        "index": "docs",
        "init": "train.jsonl",
        "inspect": "train.jsonl",
        "train": "train.jsonl",
        "verify": "run/export",
    },
}
"""What an f-string fills in, by command."""
SPECIAL = {
    f"init{VALUE} --model {VALUE}": "init train.jsonl --model model",
    f"init{VALUE} --model {VALUE}{VALUE}": "init train.jsonl --model model --method lora",
    f"inspect{VALUE}": "inspect --config tunewell.yaml",
    f"train{VALUE}": "train --config tunewell.yaml --out run2",
    f"train{VALUE} --out {VALUE} --resume": "train --config run/config.yaml --out run --resume",
    f"train --config {VALUE}": "train --config tunewell.yaml --out run2",
    f"plan --config {VALUE}": "plan --config tunewell.yaml",
    f"prepare --config {VALUE} --out {VALUE}": "prepare --config tunewell.yaml --out other-corpus",
    f"train --resume --out {VALUE}": "train --resume --out run",
    f"profile --steps {VALUE}": "profile --steps 5",
    f"index DOCUMENTS --out {VALUE}": "index docs --out other",
    f"validate {VALUE}{VALUE} --set verdict.questions={VALUE}": "validate run --set verdict.questions=5",
    "ask QUESTION": 'ask "When does it open?"',
    "train": "train --out run2",
    "diagnose --all ...": "diagnose --all train.log",
    "compare RUN RUN": "compare run other-run",
    "notebook": "notebook --package none",  # where the package is cannot be known of a clone: the command asks
    "compare": "compare run --index index --data test.jsonl",
    "train --index INDEX": "train --index index --out run2",
}
"""Forms that are filled in by hand: options in front of others, or what the folder would have at that point."""
IN_NEW_FOLDER = {"init", "models", "migrate"}
FIRST_RUN = {"train train.jsonl"}


def _is_run(command: str) -> bool:
    name = command.split()[0]
    is_text = "(" in command or command in MENTIONED or VALUE in name or name.startswith("-") or name == "COMMAND"
    return not is_text and not command.startswith(tuple(LEFT_OUT))


def filled(command: str) -> list[str]:
    """Return the words that a person would paste: placeholders stand for files of the project."""
    if command in SPECIAL:
        return shlex.split(SPECIAL[command])
    text = command.partition(" > ")[0].replace("{run}", "run").replace("{data}", "docs").replace("{}", "run")
    name = text.split()[0]
    words = shlex.split(text.replace(VALUE, VALUES.get(name, "run")))
    return [NAMED.get((name, word), PLACEHOLDERS.get(word, word)) for word in words]


FORMS = sorted({shlex.join(filled(command)): command for command in COMMANDS if _is_run(command)}.items())


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder after a first run: rows, documents with an index, a model, a run, its export, and logs of others."""
    folder = tmp_path_factory.mktemp("advised") / "project"
    (folder / "docs").mkdir(parents=True)
    settings = write_weights(tiny_model, folder / "model") / "config.json"
    longer = json.loads(settings.read_text()) | {"max_position_embeddings": 2048}  # a byte is a token, also of passages
    settings.write_text(json.dumps(longer))
    (folder / "config.yaml").write_text("base_model: model\nsequence_len: 512\n")
    (folder / "job.json").write_text(json.dumps(JOB))
    texts = [json.dumps(row(number)) for number in range(48)]
    for name, part in (("train.jsonl", texts[:40]), ("chats.jsonl", texts[:40]), ("test.jsonl", texts[40:])):
        (folder / name).write_text("\n".join(part) + "\n")
    (folder / "docs" / "hours.md").write_text("# Hours\n\nThe library opens at ten.\n\nIt closes at six.\n")
    for first in range(0, 40, 8):  # `train --index` holds out a quarter of the documents
        parts = [f"# Part {number}\n\n{row(number)['answer']}\n" for number in range(first, first + 8)]
        (folder / "docs" / f"answers-{first}.md").write_text("\n".join(parts))
    (folder / "train.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    (folder / "logs").mkdir()
    shutil.copy(folder / "train.log", folder / "logs" / "rank0.log")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        sets = [part for text in SHORT for part in ("--set", text)]
        assert main(["init", "train.jsonl", "--model", "model", *sets]) == 0
        assert main(["train"]) in (0, 3, 4)
        shutil.copytree("run", "other-run")
        assert main(["export", "--to", "merged"]) == 0
        assert main(["index", "docs"]) == 0
    return folder


def test_nearly_all_commands_are_run():
    """Guards the selection: a mistake in it would leave an empty list."""
    assert len(FORMS) > 60
    assert all(LEFT_OUT.values())


@pytest.mark.parametrize(("typed", "command"), FORMS)
def test_an_advised_command_works_as_pasted(
    typed: str,
    command: str,
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Guards advice that is refused: exit code 2 is an error of the user, 1 a bug."""
    folder = tmp_path / "project"
    shutil.copytree(project, folder)
    words = shlex.split(typed)
    if words[0] in IN_NEW_FOLDER and "--force" not in words:
        (folder / "tunewell.yaml").unlink()
    if typed in FIRST_RUN:
        shutil.rmtree(folder / "run")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"CUDA out of memory\n")))
    code = main(words)
    printed = capfd.readouterr()  # of child processes too
    assert code in (0, 3, 4), (typed, COMMANDS[command], printed.err[-2000:])
    assert "error:" not in printed.err, (typed, printed.err[-2000:])
