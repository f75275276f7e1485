"""Bad input of the page: each gets its message and what to do, never a blank page or a traceback."""

import errno
import json
import os
import random
import socket

import pytest
from watching import pretend_running, watching, write_run

from tunewell.features.watch import views
from tunewell.features.watch.draft import read

_HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\u202e\ud800 ${7*7} {{7*7}} '\"`;rm -rf /"


def _recognised(folder, name, data, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / name).write_bytes(data)
    return read({"data": name, "answers": []}, lambda _: None)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("rows.csv", random.Random(0).randbytes(100_000)),
        ("rows.jsonl", random.Random(1).randbytes(100_000)),
        ("rows.xlsx", b"PK\x03\x04" + random.Random(2).randbytes(1000)),
        ("rows.json", b"{" * 100_000),
        ("rows.jsonl", json.dumps({"question": "x" * 10_000_000}).encode()),
        ("rows.csv", b""),
        ("rows.parquet", b"PAR1"),
    ],
    ids=["binary csv", "binary jsonl", "broken Excel", "deep JSON", "a line of 10 MB", "empty", "broken Parquet"],
)
def test_files_that_are_no_rows_are_refused_with_a_sentence(tmp_path, monkeypatch, name, data):
    """Guards against a crash of the reader, or a page that waits for it."""
    try:
        found = _recognised(tmp_path, name, data, monkeypatch)
    except Exception as error:  # noqa: BLE001
        assert type(error).__name__ in ("UserError", "IrregularFile"), error
        assert getattr(error, "what", "")
        return
    asked = found["question"]
    assert asked or found["rows"]["problem"]["what"] or found["rows"]["rows"] or found["number"] == 0


def test_hostile_text_passes_as_text(tmp_path, monkeypatch):
    """Guards against markup in rows that reaches the page as anything but a JSON string."""
    rows = "".join(json.dumps({"question": _HOSTILE, "answer": _HOSTILE}) + "\n" for _ in range(5))
    found = _recognised(tmp_path, "rows.jsonl", rows.encode(), monkeypatch)
    assert "<script>" in found["rows"]["rows"][0][0]
    run = write_run(tmp_path / "<img src=x onerror=alert(1)>")
    plan = json.loads((run / "plan.json").read_text()) | {"model": _HOSTILE}
    (run / "plan.json").write_text(json.dumps(plan))
    (run / "crash.log").write_text("<script>alert(1)</script>")
    with watching(tmp_path) as page:
        for name, query in (("runs", {}), ("run", {"id": run.name})):
            status, data, headers = page.request("GET", f"/api/v1/{name}?id={query.get('id', '').replace(' ', '%20')}")
            assert (status, headers["content-type"]) == (200, "application/json")
            assert json.loads(data)
        assert page.get("run", id=run.name)["crash"] == "<script>alert(1)</script>"
        found = page.error("GET", "run", id="<script>alert(1)</script>")
        assert found[0] == 404


def test_ten_thousand_folders_are_listed(tmp_path):
    """Guards against a list that reads everything in each folder."""
    for number in range(2000):
        (tmp_path / f"folder{number // 100}" / f"{number}").mkdir(parents=True)
    write_run(tmp_path / "folder3" / "run")
    with watching(tmp_path) as page:
        assert page.get("runs")["total"] == 1
        assert len(page.get("files")["entries"]) == 20


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    """Guards against an upload or a start that seems to work on a full disk."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_run(tmp_path / "run", status="interrupted")
    with watching(tmp_path) as page:
        monkeypatch.setattr("tunewell.features.watch.jobs.write_atomic", full)
        status, error = page.error("POST", "act", {"id": "run", "action": "diagnose"})
        assert (status, error["code"]) == (507, "disk_full")


def test_a_bug_is_told_and_the_server_goes_on(tmp_path, monkeypatch, capfd):
    """Guards against one screen that ends the server."""
    run = write_run(tmp_path / "run")

    def broken(*_):
        raise KeyError("x")

    with watching(tmp_path) as page:
        monkeypatch.setattr(views, "row_of", broken)
        assert page.error("GET", "run", id="run")[0] == 500
        assert "in broken" in capfd.readouterr().err, "the message names the terminal"
        monkeypatch.undo()
        assert page.get("run", id="run")["id"] == run.name


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"x"', b"{" * 2000, b"x" * (2 << 20)])
def test_requests_that_are_no_objects_are_refused(tmp_path, body):
    """Guards against a request that ends the server, or fills its memory."""
    with watching(tmp_path) as page:
        headers = {"content-type": "application/json"}
        status, data, _ = page.request("POST", "/api/v1/act", body, headers=headers)
        assert status in (400, 413)
        assert json.loads(data)["error"]["what"]


def test_requests_of_wrong_types_are_refused(tmp_path):
    """Guards against a traceback for a request that another program sent."""
    run = write_run(tmp_path / "run")
    pretend_running(run)
    odd = [None, 1, [], {}, "", "x" * 10_000, True]
    with watching(tmp_path) as page:
        for name in ("act", "downloads", "chat/open", "chat/close"):
            for value in odd:
                body = {"id": value, "action": value, "to": value, "path": value, "sides": value}
                status, data, _ = page.request("POST", f"/api/v1/{name}", body)
                assert status in (400, 403, 404, 409), (name, value, data)
            for wanted in ({"to": value}, {"to": ["gguf"], "gguf": value or "x"}):
                body = {"id": "run", "action": "export"} | wanted
                assert page.error("POST", "act", body)[1]["code"] in ("refused", "busy"), wanted
        for name in ("new/read", "new/draft", "new/start", "new/index", "chat/say"):
            for value in odd:
                body = {"id": value, "data": value, "answers": value, "name": value, "settings": value}
                kind, data = page.work(name, **body)
                assert kind == "error", (name, value)
                assert data["error"]["code"] != "failed", (name, value, data)
        for query in ("points=x", "points=-1", "points=1e9", "points=99999999999999999999"):
            status = page.request("GET", f"/api/v1/curve?id=run&{query}")[0]
            assert status in (200, 400), query
        for after in ("x", "1.2", "1.2.3.4", "-1.0.0", "zz.zz.zz", "1.2.3_x"):
            assert page.request("GET", f"/api/v1/stream?run=run&after={after}")[0] == 400, after


def test_a_damaged_job_breaks_no_screen(tmp_path):
    """Guards against a list of runs that fails for ever, because a job was killed while it was written."""
    write_run(tmp_path / "run")
    owner = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": "2026-11-19 12:00"})
    for number, text in enumerate(["{}", "", '{"kind": "train", "run": "../outside"}', '{"kind": "train"}']):
        job = tmp_path / ".tunewell" / "jobs" / f"20250101-000000-{number}"
        job.mkdir(parents=True)
        (job / "job.json").write_text(text)
        (job / "lock").write_text(owner)
    with watching(tmp_path) as page:
        assert [row["id"] for row in page.get("runs")["runs"]] == ["run"]
        assert page.get("run", id="run")["job"] is None


def test_names_that_look_like_options_stay_names(tmp_path):
    """Guards against a folder whose name becomes an option of the commands on the screen."""
    write_run(tmp_path / "--help")
    (tmp_path / "-r.csv").write_text("question,answer\n1,2\n")
    with watching(tmp_path) as page:
        name = page.get("runs")["runs"][0]["id"]
        for action in page.get("run", id=name)["actions"]:
            assert "./--help" in action["command"]
        assert {own["path"] for own in page.get("files")["entries"]} == {"./--help", "./-r.csv"}
        assert page.work("new/read", data="-r.csv")[1]["command"].startswith("tunewell init ./-r.csv")
        error = page.work("new/draft", data="./-r.csv", name="--help2", model="preset:tiny-1m")[1]["error"]
        assert "cannot be the name" in error["what"]
