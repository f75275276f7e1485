"""Whatever comes near a run, no file of it holds a secret."""

from pathlib import Path

from tunewell.records.events import EventLog
from tunewell.records.rundir import Outcome, RunDir, write_outcome
from tunewell.training.checkpoints import Checkpoints, State

# Put together here, so that no scanner takes this file for a leak.
PLANTED = [
    "hf_" + "aB3" * 11,
    "sk-" + "proj-" + "cD4" * 12,
    "ghp_" + "eF5" * 12,
    "AKIA" + "IOSFODNN7EXAMPLE",
    "0123456789abcdefghij",
    "plain-but-secret",
]


def test_no_file_of_a_run_holds_a_secret_that_was_in_its_way(tmp_path: Path, monkeypatch):
    """Planted in the environment, rows, config and state; then every byte of the run is searched."""
    monkeypatch.setenv("TRACKER_KEY", PLANTED[-2])
    text = " and ".join(PLANTED[:-1]) + f" at https://user:{PLANTED[-1]}@host.example"
    told: list[str] = []
    with RunDir.begin(tmp_path / "run") as run:
        for path in (run.path / f"{name}.jsonl" for name in ("events", "healing", "samples")):
            with EventLog(path) as log:
                log.append({"step": 1, "prompt": text, "nested": [{"answer": text}], text: 1})
        run.write("config.yaml", text)
        run.write("README.md", text)
        checkpoints = Checkpoints(run.path / "checkpoints", keep=2, on_trouble=told.append)
        state = State(1, texts={"state.json": text}, progress={"note": text}, identity={"note": text})
        checkpoints.save(state, wait=True)
        outcome = Outcome(made_by="t", status="failed", reason=text, steps=1, planned_steps=2, seconds=1.0, tokens=1)
        write_outcome(run.path, outcome)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) == 9
    leaked = [(path.name, secret) for path in files for secret in PLANTED if secret.encode() in path.read_bytes()]
    assert leaked == []
    assert told == ["a secret was removed from `state.json` in the checkpoints"]
