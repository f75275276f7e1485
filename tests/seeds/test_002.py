"""Seed 002: a pipeline to Ollama that showed "Training started..." for 14 hours: 97% padding, on a CPU."""

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from authors import findings, flat, outcome, questions, run, write_gemma, write_jsonl

from tunewell.cli.main import main

STUCK = """\
Process: python3 unified_finetune.py
CPU Usage: 1094.5% (maxed out)
Runtime: 887 minutes (14+ hours)
Status: STUCK at "Training started..."
"""
CONFIG = """\
model: model
data: rows.jsonl
max_seq_length: 1024
per_device_train_batch_size: 2
learning_rate: 2e-2
num_train_epochs: 20
lora_r: 8
method: {modules_to_save: [embed_tokens]}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Rows of about 50 tokens with a limit of 1,024; the author's had 34 on average."""
    write_gemma(tmp_path / "model")
    pairs = questions()
    write_jsonl(tmp_path / "rows.jsonl", [{"question": question, "answer": answer} for question, answer in pairs])
    (tmp_path / "tunewell.yaml").write_text(CONFIG, encoding="utf-8")
    return tmp_path


def test_prepare_shows_the_lengths_and_nothing_is_padded(project):
    """The lengths (34 tokens on average, at most 67) were known only after a separate script."""
    told = run(project, "prepare")
    assert "row length" in told and "median" in told and "longest 7" in told
    assert "padding" not in told.replace("no padding", "")


def test_local_rows_need_no_credentials(project, monkeypatch):
    """The pipeline asked for the keys of a bucket although all rows were local."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    run(project, "prepare")


@pytest.mark.uses("remote")
def test_a_bucket_without_keys_says_what_to_set(project, monkeypatch, capsys):
    """An identity of the machine must not be taken in place of keys."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(project / "none"))
    monkeypatch.chdir(project)
    # In this process: a fork beside the thread of a server may inherit a lock that nobody releases.
    with closed_bucket() as endpoint:
        assert main(["prepare", "--data", "s3://bucket/rows.jsonl", "--set", f"storage.endpoint={endpoint}"]) == 2
    told = flat(capsys.readouterr().err)
    assert "AWS_ACCESS_KEY_ID" in told and "AWS_SECRET_ACCESS_KEY" in told


@contextlib.contextmanager
def closed_bucket() -> Iterator[str]:
    """Yield the address of a server on this machine that refuses every request."""

    class Refuse(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_the_device_is_a_setting_that_is_used_or_refused(project):
    """The config had no `device`, and the trainer ignored it where it was set."""
    told = run(project, "train", "--device", "cuda", "--no-validate", code=2)
    assert "cuda" in told
    run(
        project,
        "train",
        "--device",
        "cpu",
        "--no-validate",
        "--set",
        "train.max_steps=1",
        "--set",
        "evaluate.samples=0",
    )
    plan = json.loads((project / "run" / "plan.json").read_text(encoding="utf-8"))
    assert "cpu" in json.dumps(plan["device"])


@pytest.mark.uses("diagnose")
def test_a_process_that_prints_nothing_for_hours_is_named():
    """Only the output of `ps` and the last line of the log were known."""
    assert findings(STUCK)[0] not in ("unknown", "oom-cuda")
    log = "max_seq_length = 1024, padding='max_length'\naverage length: 34 tokens\n" + STUCK
    assert "padding-waste" in findings(log)


@pytest.mark.slow
def test_the_pipeline_ends_with_a_verdict_and_a_model_for_ollama(project):
    """Rows, training, GGUF and a Modelfile with one command."""
    told = run(project, "train", "--set", "train.threads=1", "--set", "verdict.min_right=0", code={0, 3, 4})
    assert "checked before step 1" in told
    assert outcome(project / "run")["status"] == "finished"
    told = run(project, "export", "run", "--to", "ollama", "--gguf", "q8_0", "--no-create")
    assert "PROVEN" in told and list((project / "run").rglob("Modelfile"))
