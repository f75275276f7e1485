"""Who may use the page, what it may open, and what it may set: attacks of foreign pages, paths, links and keys."""

import json
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from watching import TOKEN, Client, encoded, watching, write_run

from tunewell.core.errors import UserError
from tunewell.features.watch.draft import write
from tunewell.features.watch.folder import safe_name
from tunewell.features.watch.workflow import WatchOptions, open_page

_GETS = ("session", "runs", "run?id=run", "curve?id=run", "samples?id=run", "log?id=run", "report?id=run")
_MORE = ("answers?id=run", "job?id=x", "files", "export?id=run", "chat?id=run", "stream?run=run")
_POSTS = ("act", "downloads", "chat/open", "chat/close", "chat/say", "uploads?name=a.csv")
_NEW = ("new/read", "new/models", "new/draft", "new/start", "new/index")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched")
    write_run(folder / "run")
    (folder.parent / "outside.csv").write_text("secret\n")
    with watching(folder) as client:
        yield client


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "x", f"{TOKEN} {TOKEN}"])
def test_without_the_token_only_the_page_itself_is_served(page, token):
    """Guards against an endpoint that was added without the guard."""
    stranger = Client(page.url, page.root, token)
    for method, names in (("GET", _GETS + _MORE), ("POST", _POSTS + _NEW)):
        for name in names:
            status, data, _ = stranger.request(method, f"/api/v1/{name}", {} if method == "POST" else None)
            assert (status, json.loads(data)["error"]["code"]) == (401, "invalid_api_key"), name
    for path in (
        "/%61pi/v1/session",
        "/api/v1/../v1/session",
        "//api/v1/session",
        "/API/v1/session",
        "/x/../api/v1/runs",
    ):
        assert stranger.request("GET", path)[0] in (401, 404), path
    assert stranger.request("GET", "/")[0] == 200
    assert stranger.request("GET", "/api/v1/session", headers={"cookie": f"token={TOKEN}"})[0] == 401
    assert stranger.request("GET", f"/api/v1/session?token={TOKEN}")[0] == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "evil.example@127.0.0.1"},
        {"host": "evil.example", "origin": "http://evil.example"},
    ],
)
def test_foreign_pages_and_rebinding_are_refused_even_with_the_token(page, headers):
    """Guards against pages that reach the server through the browser of its user."""
    assert page.request("GET", "/api/v1/session", headers=headers)[0] == 403
    assert page.request("POST", "/api/v1/act", {"id": "run", "action": "stop"}, headers=headers)[0] == 403


def test_the_own_page_is_allowed_also_through_a_tunnel(page):
    """Guards against a page that cannot be used through `ssh -L`, where it has another port."""
    for host in ("localhost:9999", "127.0.0.1:8765", "[::1]:8765"):
        headers = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
        assert page.request("GET", "/api/v1/session", headers=headers)[0] == 200


def test_a_link_to_the_page_opens_it_but_nothing_of_the_api(page):
    """Guards against an error in the browser that the command opens: its first request comes from a file."""
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert page.request("GET", "/", headers=link)[0] == 200
    stranger = Client(page.url, page.root, "")
    assert stranger.request("GET", "/api/v1/runs", headers=link)[0] == 401
    assert page.request("GET", "/", headers=link | {"host": "evil.example"})[0] == 403
    assert page.request("POST", "/api/v1/act", {}, headers=link | {"origin": "http://evil.example"})[0] == 403


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "multipart/form-data", "text/plain", ""])
def test_forms_cannot_post(page, kind):
    """Guards against forged forms, which can send only these types."""
    for name in ("act", "new/start", "uploads?name=rows.csv"):
        assert page.request("POST", f"/api/v1/{name}", {"id": "run"}, headers={"content-type": kind})[0] == 415


def test_every_answer_forbids_what_the_page_does_not_need(page):
    """Guards against inline code, foreign requests, sniffed types and stored answers."""
    for path in ("/", "/api/v1/session", "/api/v1/nothing", "/download/x/y", "/missing.js"):
        _, _, headers = page.request("GET", path)
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none';")
        assert "unsafe" not in policy
        assert "*" not in policy
        assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")
        assert "access-control-allow-origin" not in headers


_OUTSIDE = ["..", "../outside.csv", "/etc/passwd", "run/../../outside.csv", "..\\outside.csv", "\0", "run/\0", "~/x"]


@pytest.mark.parametrize("path", [*_OUTSIDE, "../" * 40 + "etc/passwd", "/proc/self/environ", ".tunewell/jobs"])
def test_paths_out_of_the_folder_are_refused(page, path):
    """Guards against traversal by `..`, absolute paths and the private folder of the page."""
    for name in ("run", "curve", "samples", "log", "report", "answers", "export", "chat"):
        status, error = page.error("GET", name, id=path)
        assert status in (403, 404), (name, error)
    assert page.error("GET", "stream", run=path)[0] in (403, 404)
    assert page.error("GET", "files", folder=path)[0] in (403, 404)
    assert page.error("POST", "downloads", {"path": path})[0] in (403, 404)
    kind, data = page.work("new/read", data=path)
    assert kind == "error"
    assert data["error"]["code"] in ("outside", "not_found")


def test_encoded_paths_of_static_files_are_refused(page):
    """Guards against static files from outside their folder."""
    for path in (
        "../app.py",
        "..%2fapp.py",
        encoded("../app.py"),
        "..\\app.py",
        "//etc/passwd",
        "%2e%2e/%2e%2e/app.py",
    ):
        status, data, _ = page.request("GET", f"/{path}")
        assert status == 404, path
        assert b"Starlette" not in data


def test_links_out_of_the_folder_are_refused(tmp_path):
    """Guards against a run or a file that is a link to what the page must not show."""
    secret = tmp_path / "secret"
    write_run(secret / "run")
    folder = tmp_path / "watched"
    folder.mkdir()
    (folder / "linked").symlink_to(secret / "run")
    (folder / "rows.csv").symlink_to(secret / "run" / "plan.json")
    run = write_run(folder / "run")
    (run / "crash.log").symlink_to("/etc/passwd")
    write_run(folder / "own")
    with watching(folder) as page:
        assert [row["id"] for row in page.get("runs")["runs"]] == ["own"], "of `run`, a file is a link out"
        for name in ("linked", "run"):
            assert page.error("GET", "run", id=name)[0] == 403
            assert page.error("GET", "curve", id=name)[0] == 403
        assert [own["name"] for own in page.get("files")["entries"]] == ["own", "run"]
        assert page.error("POST", "downloads", {"path": "rows.csv"})[0] == 403
        assert page.work("new/read", data="rows.csv")[1]["error"]["code"] == "outside"


def test_a_download_works_once_and_needs_no_token(page):
    """Guards against a token in an address, and against an address that works for ever."""
    url = page.post("downloads", path="run/plan.json")["url"]
    assert TOKEN not in url
    stranger = Client(page.url, page.root, "")
    status, data, headers = stranger.request("GET", url)
    assert (status, data) == (200, (page.root / "run" / "plan.json").read_bytes())
    assert (headers["content-disposition"], headers["content-type"]) == ("attachment", "application/octet-stream")
    assert stranger.request("GET", url)[0] == 404


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("../../etc/rows.csv", "rows.csv"),
        ("C:\\Users\\me\\Fragen 1.csv", "Fragen-1.csv"),
        ("<img src=x onerror=alert(1)>.jsonl", "img-src-x-onerror-alert-1.jsonl"),
        (".bashrc.csv", "bashrc.csv"),
        ("a\0b\n.csv", "a-b.csv"),
        ("x" * 500 + ".csv", "x" * 60 + ".csv"),
    ],
)
def test_uploads_get_a_safe_name_in_the_folder_of_uploads(page, name, kept):
    """Guards against an upload that replaces a file of the user, or has a name that a shell or a page reads."""
    found = page.upload(name, b"a,b\n1,2\n")
    assert found["data"] == f"uploads/{kept}"
    assert (page.root / found["data"]).read_bytes() == b"a,b\n1,2\n"
    again = page.upload(name, b"other")
    assert again["data"] != found["data"]
    assert stat.S_IMODE((page.root / "uploads").stat().st_mode) == 0o700
    assert safe_name(kept) == kept


def test_uploads_are_limited(page, monkeypatch):
    """Guards against a full disk, files that nobody reads, and half files that stay."""
    before = set(page.root.rglob("*"))
    assert page.error("POST", "uploads", b"\x7fELF", name="program.exe")[1]["code"] == "refused"
    assert page.error("POST", "uploads", b"#!/bin/sh", name="evil.py")[1]["code"] == "refused"
    monkeypatch.setattr("tunewell.features.watch.folder.MAX_UPLOAD_BYTES", 10)
    assert page.error("POST", "uploads", b"x" * 11, name="rows.csv")[0] == 413
    assert page.error("POST", "uploads", b"x", name="rows.csv", into="run")[1]["code"] == "outside"
    assert set(page.root.rglob("*")) == before


def test_read_only_refuses_everything_that_changes_something(tmp_path):
    """Guards against a page for spectators with which runs can be stopped."""
    run = write_run(tmp_path / "run")
    with watching(tmp_path, is_read_only=True) as page:
        for name in (*_POSTS, *_NEW):
            if name != "downloads":
                body = b"" if name.startswith("uploads") else {}
                status, error = page.error("POST", name.partition("?")[0], body, name="a.csv")
                assert (status, error["code"]) == (403, "read_only"), name
        assert not any(own["is_possible"] for own in page.get("run", id="run")["actions"])
        assert page.post("downloads", path="run/plan.json")["url"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [run.name]


@pytest.mark.parametrize(
    "settings",
    [
        {"data.sources[0].map": "evil.py:f"},
        {"verdict.task": "evil.py:f"},
        {"verdict.metrics": ["evil.py:f"]},
        {"run": "../elsewhere"},
        {"corpus": "/tmp/elsewhere"},
        {"data.index": "../elsewhere"},
        {"train.epochs": "3 --out ../x"},
        {"train.epochs": [1]},
        {"seed": True},
        {"packing.long_documents": "../x"},
    ],
)
def test_the_page_cannot_set_a_key_that_runs_code_or_leaves_the_folder(tmp_path, monkeypatch, settings):
    """Guards against a page that starts programs: only a few numbers can be set."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    request = {"data": "rows.jsonl", "model": "preset:tiny-1m", "name": "rows", "settings": settings}
    with pytest.raises(UserError, match="the page cannot set"):
        write(request, lambda _: None)


@pytest.mark.parametrize("model", ["/etc", "../other", "https://evil.example/x", "", "evil/model", "../../x.gguf"])
def test_only_models_of_the_list_or_of_the_folder_are_used(tmp_path, monkeypatch, model):
    """Guards against a model from anywhere, whose files could run code or be fetched."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    with pytest.raises(UserError, match="not on the list"):
        write({"data": "rows.jsonl", "model": model, "name": "rows"}, lambda _: None)


def test_another_address_needs_a_token_of_its_own(tmp_path):
    """Guards against a page for everyone on the network, like that of other tools."""
    with pytest.raises(UserError, match="read your rows"):
        open_page(tmp_path, WatchOptions(host="0.0.0.0", port=0))
    token = tmp_path / "token.txt"
    token.write_text("a-long-token-for-this-test")
    server = open_page(tmp_path, WatchOptions(host="0.0.0.0", port=0, token_file=token))
    server._listener.close()
    assert "token" not in server.info.url
    assert server.info.notes


def test_a_taken_port_and_a_missing_folder_are_told(tmp_path):
    """Guards against a traceback for the second server."""
    first = open_page(tmp_path, WatchOptions(port=0))
    port = int(first.info.listens_on.split()[-1])
    with pytest.raises(UserError, match=f"cannot listen on port {port}"):
        open_page(tmp_path, WatchOptions(port=port))
    first._listener.close()
    with pytest.raises(UserError, match="no folder"):
        open_page(tmp_path / "missing", WatchOptions(port=0))


@pytest.mark.slow
def test_no_file_that_others_can_read_has_the_token(tmp_path):
    """Guards against tokens in logs, arguments of programs and files."""
    write_run(tmp_path / "run")
    command = [sys.executable, "-m", "tunewell", "watch", str(tmp_path), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        info = json.loads(server.stdout.readline())
        token = info["url"].partition("#token=")[2]
        assert len(token) >= 32
        page = Client(info["url"].partition("#")[0], tmp_path, token)
        page.get("runs")
        page.request("GET", "/api/v1/nothing")
        for arguments in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                assert token.encode() not in arguments.read_bytes()
        server.terminate()
        _, err = server.communicate(timeout=20)
    assert token not in err
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.stat().st_mode & 0o077:
            assert token.encode() not in path.read_bytes()
