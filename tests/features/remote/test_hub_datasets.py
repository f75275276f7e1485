"""Data sets of the hub, from a stand-in for it on this machine."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from corpora import row
from tunewell.config.load import load_config
from tunewell.core.errors import UserError
from tunewell.data.sources.base import find_files
from tunewell.records.manifest import Manifest, read_manifest
from tunewell.workflows.prepare import prepare

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CARD = """---
configs:
- config_name: easy
  default: true
  data_files:
  - {split: train, path: "easy/train-*.jsonl"}
  - {split: validation, path: easy/more.jsonl}
- config_name: hard
  data_files: hard/*.jsonl
---
A card.
"""


def lines(first: int, number: int) -> str:
    return "".join(json.dumps(row(index)) + "\n" for index in range(first, first + number))


REPOSITORIES = {
    "team/carded": {
        "README.md": CARD,
        "easy/train-0.jsonl": lines(0, 40),
        "easy/train-1.jsonl": lines(40, 40),
        "easy/more.jsonl": lines(80, 30),
        "hard/all.jsonl": lines(200, 50),
    },
    "team/plain": {"data/train.jsonl": lines(0, 60), "data/test.jsonl": lines(100, 20), "LICENSE": "x"},
    "team/script": {"loader.py": "print()", "README.md": "text"},
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    requests: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format, *args):
            pass

        def reply(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            requests.append(f"{self.command} {self.path}")
            path = self.path.partition("?")[0].removeprefix("/api").removeprefix("/datasets/")
            name = "/".join(path.split("/")[:2])
            files = REPOSITORIES.get(name)
            if name == "team/gated":
                return self.reply(403, b"{}", X_Error_Code="GatedRepo")
            if files is None:
                return self.reply(401, b"{}", X_Error_Code="RepoNotFound")
            kind, revision, *rest = path.split("/")[2:]
            if revision not in ("main", COMMIT):
                return self.reply(404, b"{}", X_Error_Code="RevisionNotFound")
            if kind == "revision":
                siblings = [{"rfilename": file, "size": len(text)} for file, text in files.items()]
                body = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
                return self.reply(200, json.dumps(body | {"likes": 0}).encode(), Content_Type="application/json")
            data = files["/".join(rest)].encode()
            etag = f'"{hashlib.sha1(data).hexdigest()}"'
            return self.reply(200, data, ETag=etag, X_Repo_Commit=COMMIT, Accept_Ranges="bytes")

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    # For this process, in which the hub's library has read its variables already.
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("TUNEWELL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    yield requests
    server.shutdown()
    server.server_close()


def build(folder: Path, model: Path, path: str, **source: str) -> Manifest:
    sources = [{"path": path, **source}]
    config = {"model": str(model), "data": {"sources": sources, "held_out": 0.1}, "corpus": str(folder / "corpus")}
    return prepare(config).manifest


def run(folder: Path, model: Path, path: str, *extra: str, code: int = 0) -> str:
    """Prepare in a process of its own: the hub's library reads its variables when it is imported."""
    folder.mkdir(exist_ok=True)
    config = {"model": str(model), "data": {"sources": [{"path": path}], "held_out": 0.1}}
    (folder / "tunewell.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "tunewell", "prepare", *extra]
    done = subprocess.run(command, cwd=folder, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_split_of_a_data_set_is_prepared_and_its_commit_recorded(hub, tiny_model, tmp_path):
    run(tmp_path / "a", tiny_model, "hf://datasets/team/carded")
    manifest = read_manifest(tmp_path / "a" / "corpus")
    assert [source.name for source in manifest.sources] == [
        "hf://datasets/team/carded/easy/train-0.jsonl",
        "hf://datasets/team/carded/easy/train-1.jsonl",
    ]
    assert {source.version for source in manifest.sources} == {COMMIT} and manifest.rows_in == 80
    hub.clear()
    run(tmp_path / "b", tiny_model, "hf://datasets/team/carded", "--offline")
    run(tmp_path / "c", tiny_model, f"hf://datasets/team/carded@{COMMIT}")
    assert hub == []  # offline, and a commit whose files are cached
    for name in "bc":
        assert read_manifest(tmp_path / name / "corpus").corpus_sha256 == manifest.corpus_sha256


@pytest.mark.parametrize(
    ("path", "source", "rows"),
    [
        ("hf://datasets/team/carded@main", {"config": "easy", "split": "validation"}, 30),
        ("hf://datasets/team/carded", {"config": "hard"}, 50),
        ("hf://datasets/team/plain", {}, 60),
        ("hf://datasets/team/plain", {"split": "test"}, 20),
    ],
)
def test_configurations_and_splits_are_keys_of_the_source(path, source, rows, hub, tiny_model, tmp_path):
    assert build(tmp_path, tiny_model, path, **source).rows_in == rows


@pytest.mark.parametrize(
    ("path", "source", "what"),
    [
        ("hf://datasets/team/none", {}, "there is no data set `team/none` on the hub, or it is private"),
        ("hf://datasets/team/gated", {}, "is gated"),
        ("hf://datasets/team/plain@v9", {}, "has no revision `v9`"),
        ("hf://datasets/team/script", {}, "has no file of rows"),
        ("hf://datasets/team/carded", {"config": "medium"}, "has no config `medium`"),
        ("hf://datasets/team/carded", {"split": "test"}, "has no split `test`"),
        ("hf://team/plain", {}, "is not the address of a data set"),
    ],
)
def test_problems_of_the_hub_are_named(path, source, what, hub, tiny_model, tmp_path):
    with pytest.raises(UserError, match=what):
        build(tmp_path, tiny_model, path, **source)


def test_offline_without_a_download_is_an_error(hub, tiny_model, tmp_path):
    assert "not in the hub's cache" in run(tmp_path / "a", tiny_model, "hf://datasets/team/plain", "--offline", code=2)
    assert hub == []


def test_a_part_of_a_commit_in_the_hubs_cache_is_not_taken_for_the_data_set(hub, tiny_model, tmp_path):
    """Another tool had downloaded one of two files; the rows of the other one were missing without a word."""
    folder = tmp_path / "hf" / "hub" / "datasets--team--carded" / "snapshots" / COMMIT / "easy"
    folder.mkdir(parents=True)
    (folder / "train-0.jsonl").write_text(lines(0, 40))
    assert build(tmp_path, tiny_model, f"hf://datasets/team/carded@{COMMIT}").rows_in == 80


def test_a_name_that_the_hub_does_not_allow_is_named(hub, tiny_model, tmp_path):
    with pytest.raises(UserError, match="`team/a--b` is not the name of a data set"):
        build(tmp_path, tiny_model, "hf://datasets/team/a--b")


@pytest.mark.slow
def test_a_plain_hub_id_is_understood_where_it_cannot_be_a_path(hub, tiny_model, tmp_path):
    """`--data tatsu-lab/alpaca` ended in "the folder `tatsu-lab` does not exist either"."""
    run(tmp_path / "a", tiny_model, "team/plain")
    manifest = read_manifest(tmp_path / "a" / "corpus")
    assert [source.name.rpartition("/data/")[0] for source in manifest.sources] == ["hf://datasets/team/plain"]


@pytest.mark.parametrize("path", ["team/plain", "team/OpenHermes-2.5", "team/plain#5"])
def test_a_hub_id_is_named_when_the_hub_is_out_of_reach(path, hub, tmp_path, monkeypatch):
    monkeypatch.setattr("tunewell.features.remote.hub_source.hub_is_out_of_reach", lambda: "it cannot be reached")
    loaded = load_config(data=path)
    with pytest.raises(UserError, match="of the hub cannot be downloaded") as caught:
        find_files(loaded.config.data.sources[0].path, base=tmp_path)
    assert f"hf://datasets/{path.partition('#')[0]}" in str(caught.value)


def test_a_path_is_not_taken_for_a_hub_id(tmp_path, monkeypatch):
    """A file name, or a name in a folder that exists, is a path; where it is missing, both are named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "team").mkdir()
    for path in ("team/plain", "other/rows.jsonl", "./a", "../a/b", "a/b/c", "rows"):
        [source] = load_config(data=path).config.data.sources
        assert source.path == path
    with pytest.raises(UserError, match=r"there is no file or folder `team/plain`\n.*`hf://datasets/team/plain`"):
        find_files("team/plain", base=tmp_path)


def test_a_hub_id_in_a_config_is_looked_up_beside_the_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner" / "team").mkdir(parents=True)
    (tmp_path / "inner" / "c.yaml").write_text("data: [team/rows, org/name]\n")
    loaded = load_config(Path("inner/c.yaml"))
    assert [source.path for source in loaded.config.data.sources] == ["team/rows", "hf://datasets/org/name"]
    [source] = load_config(Path("inner/c.yaml"), data="org/name").config.data.sources
    assert source.path == "hf://datasets/org/name"
