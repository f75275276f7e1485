"""`tunewell push`: what a reader sees at any moment, and that what is pulled back is proven."""

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from exports import exported, write_adapter, write_base
from huggingface_hub import constants
from s3_server import Fault, Request

from corpora import tree
from tunewell.cli.main import main
from tunewell.config.rules import Storage
from tunewell.core.errors import UserError
from tunewell.features.remote.address import parse_address
from tunewell.features.remote.push import pull_folder
from tunewell.features.remote.push_workflow import push
from tunewell.features.remote.store import RemoteStore
from tunewell.workflows.verify import verify

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> list[Path]:
    """Two exports of different adapters on one base."""
    folder = tmp_path_factory.mktemp("exports")
    base = write_base(folder / "base")
    found = []
    for seed in (0, 3):
        adapter = write_adapter(folder / f"adapter-{seed}", base, seed=seed)
        assert exported(adapter, folder / f"out-{seed}", to=("adapter",)).parity.is_ok
        found.append(folder / f"out-{seed}")
    return found


@pytest.fixture(autouse=True)
def bucket(cloud) -> None:
    """The server makes a bucket with its first object."""
    address = parse_address("s3://models/first")
    RemoteStore(address, Storage()).upload(b"x", address)
    cloud.requests.clear()


def pulled(address: str, folder: Path) -> dict[str, bytes]:
    pull_folder(address, folder, settings=Storage())
    return tree(folder)


def test_what_is_pulled_back_is_what_was_exported_and_verify_proves_it(exports, cloud, tmp_path, request):
    address = f"s3://models/{request.node.name}"
    result = push(exports[0], address)
    assert pulled(address, tmp_path / "back") == {name: (exports[0] / name).read_bytes() for name in result.files}
    assert verify(address).is_ok
    assert push(exports[0], address).pushed.num_uploaded == 0  # nothing changed
    card = (tmp_path / "back" / "README.md").read_text()
    assert "base_model:" in card and "parity.json" in card


_PUSH = "import sys; from tunewell.features.remote.push_workflow import push; push(sys.argv[1], sys.argv[2])"


@pytest.mark.parametrize(
    "moments", [["last"], pytest.param(["first", "middle", "all"], marks=pytest.mark.faults)], ids=["last", "all"]
)
@pytest.mark.parametrize("is_forwarded", [False, True])
def test_killed_at_any_request_a_reader_has_the_old_or_the_new_version(
    moments, is_forwarded, exports, cloud, tmp_path, request
):
    """The request may reach the server or not when the process dies: both are tried, at every request."""
    address = f"s3://models/kill-{is_forwarded}-{len(moments)}"
    push(exports[0], f"{address}-count")
    cloud.requests.clear()
    push(exports[1], f"{address}-count")
    number = len(cloud.requests)
    old = pulled(f"{address}-count", tmp_path / "new")  # the content of the second export
    chosen = range(number) if "all" in moments else [number - 1]
    for moment in chosen:
        own = f"{address}/{moment}"
        push(exports[0], own)
        before = pulled(own, tmp_path / f"before-{moment}")
        cloud.requests.clear()
        started: list[subprocess.Popen[bytes]] = []

        def kill(sent: Request, at: int = moment, started: list = started) -> Fault | None:
            if sent.number < at:
                return None
            started[0].send_signal(signal.SIGKILL)
            return None if is_forwarded and sent.number == at else Fault(503)

        cloud.decide = kill
        command = [sys.executable, "-c", _PUSH, str(exports[1]), own]
        started.append(subprocess.Popen(command, env=dict(os.environ)))
        assert started[0].wait(60) == -signal.SIGKILL
        cloud.decide = lambda sent: None
        seen = pulled(own, tmp_path / f"seen-{moment}")
        assert seen in (before, old)
        assert seen == before or (moment == number - 1 and is_forwarded)
        again = push(exports[1], own)
        assert again.pushed.num_kept >= moment - 1
        assert pulled(own, tmp_path / f"after-{moment}") == old


def test_a_dry_run_writes_the_folder_and_sends_nothing(exports, cloud, tmp_path, capsys):
    main(["push", str(exports[0]), "--to", "s3://models/dry", "--dry-run", "--out", str(tmp_path / "dry")])
    assert cloud.requests == []
    manifest = json.loads((tmp_path / "dry" / "push.json").read_text())
    assert set(manifest["files"]) | {"push.json"} == set(tree(tmp_path / "dry"))
    assert "nothing was uploaded" in " ".join(capsys.readouterr().out.split())


def test_what_cannot_be_pushed_is_named(exports, cloud, tmp_path):
    with pytest.raises(UserError, match="neither a run nor an export"):
        push(tmp_path, "s3://models/x")
    with pytest.raises(UserError, match="cannot push to"):
        push(exports[0], "ftp://models/x")
    with pytest.raises(UserError, match="is not a model repository"):
        push(exports[0], "hf://name")
    with pytest.raises(UserError, match="there is no pushed folder"):
        pull_folder("s3://models/nothing-here", tmp_path, settings=Storage())
    changed = tmp_path / "changed"
    shutil.copytree(exports[0], changed)
    (changed / "README.md").write_text("other")
    with pytest.raises(UserError, match="was changed after the export"):
        push(changed, "s3://models/x")


def test_a_run_without_an_export_is_pushed_as_its_report(cloud, tmp_path, request):
    run = tmp_path / "run"
    run.mkdir()
    (run / "plan.json").write_text("{}")
    with pytest.raises(UserError, match="no export and no report"):
        push(run, "s3://models/x")
    (run / "report.json").write_text("{}")
    result = push(run, f"s3://models/{request.node.name}")
    assert set(result.files) == {"plan.json", "report.json"} and "only the report is pushed" in result.notes[0]


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the hub that keeps the files of a commit; small files only, which are sent in the commit."""
    commits: list[dict[str, bytes]] = []
    seen: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format, *args):
            pass

        def reply(self, status: int, value: dict) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.reply(200, {"id": "me/model", "sha": "0" * 40, "siblings": [], "tags": [], "private": True})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            seen.append(self.path)
            if self.headers.get("Authorization") != "Bearer hf_" + "a" * 20:
                return self.reply(401, {"error": "Invalid username or password."})
            if "/preupload/" in self.path:
                files = json.loads(body)["files"]
                modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
                return self.reply(200, {"files": modes})
            if "/commit/" in self.path:
                lines = [json.loads(line) for line in body.splitlines() if line]
                files = [line["value"] for line in lines if line["key"] == "file"]
                commits.append({file["path"]: base64.b64decode(file["content"]) for file in files})
                url = "http://127.0.0.1/me/model/commit/" + "c" * 40
                return self.reply(200, {"commitOid": "c" * 40, "commitUrl": url})
            return self.reply(200, {"url": "http://127.0.0.1/me/model", "warnings": [], "errors": []})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 20)
    yield commits
    server.shutdown()
    server.server_close()


def test_the_hub_gets_all_files_in_one_commit(exports, hub):
    """Two commits would leave a model without its proof between them."""
    result = push(exports[0], "hf://me/model")
    (commit,) = hub
    assert {name: commit[name] for name in result.files} == {
        name: (exports[0] / name).read_bytes() for name in result.files
    }
    assert set(json.loads(commit["push.json"])["files"]) == set(result.files)
    assert result.pushed.address == f"hf://me/model@{'c' * 40}"


def test_a_token_that_may_not_write_is_named_without_it(exports, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "b" * 20)
    with pytest.raises(UserError, match=r"refuses to write `me/model` \(status 401\)") as caught:
        push(exports[0], "hf://me/model")
    assert "b" * 20 not in str(caught.value) and hub == []
