"""What the page shows of runs is what their records say, also while they grow, are cut, damaged or deleted."""

import json
import math
import shutil
import time

import pytest
from watching import (
    append_lines,
    held_out,
    pretend_running,
    step,
    watching,
    write_lines,
    write_run,
)

from tunewell.features.watch import actions
from tunewell.runs.state import StoredRun


def test_a_list_has_each_run_with_its_status(tmp_path):
    """Guards against runs that vanish from the list because one of them is damaged."""
    write_run(tmp_path / "one" / "run")
    write_run(tmp_path / "two", status=None)
    write_run(tmp_path / "three", status="stopped")
    (write_run(tmp_path / "four", status=None) / "plan.json").write_text("{")
    with watching(tmp_path) as page:
        found = page.get("runs", sort="run")
        assert {row["id"]: row["status"] for row in found["runs"]} == {
            "one/run": "finished",
            "two": "killed",
            "three": "stopped",
            "four": "unreadable",
        }
        assert [row["id"] for row in page.get("runs", search="THREE")["runs"]] == ["three"]
        assert page.get("runs", status="killed")["found"] == 1
        assert page.get("run", id="four")["problems"] == ["`plan.json` is damaged"]
        assert page.error("GET", "runs", sort="size")[1]["code"] == "refused"


def test_numbers_that_are_not_finite_stay_words(tmp_path):
    """Guards against a NaN that is drawn as 0 or left out, and against means in the place of real steps."""
    run = write_run(tmp_path / "run", 0)
    losses = [3.0, "nan", 2.0, "inf", 1.0]
    events = [step(number, loss) for number, loss in enumerate(losses, 1)]
    write_lines(run / "events.jsonl", [*events, held_out(5, 1.25)])
    with watching(tmp_path) as page:
        curve = page.get("curve", id="run")
        assert curve["columns"]["loss"] == losses
        assert curve["columns"]["tokens_per_second"] == [400.0] * 5
        assert [event["loss"] for event in curve["held_out"]] == [1.25]


def test_a_long_curve_keeps_its_extremes_and_its_faults(tmp_path):
    """Guards against a thinned curve without the spike, or with values that no step had."""
    run = write_run(tmp_path / "run", 0)
    losses = [2 + math.sin(number / 50) for number in range(1, 5001)]
    losses[3210] = 99.5
    events = [step(number, loss) for number, loss in enumerate(losses, 1)]
    events[1234]["loss"] = "nan"
    write_lines(run / "events.jsonl", events)
    with watching(tmp_path) as page:
        curve = page.get("curve", id="run", points=400)
        shown = dict(zip(curve["columns"]["step"], curve["columns"]["loss"], strict=True))
        assert len(shown) < 600
        assert curve["num_steps"] == 5000
        assert shown[1235] == "nan"
        assert shown[3211] == 99.5
        assert all(events[number - 1]["loss"] == loss for number, loss in shown.items())


def test_a_stream_goes_on_after_the_curve_without_a_gap(tmp_path):
    """Guards against steps that are missing or doubled when a stream is cut and opened again."""
    run = write_run(tmp_path / "run", 3, status=None)
    pretend_running(run)
    with watching(tmp_path) as page:
        cursor = page.get("curve", id="run")["cursor"]
        append_lines(run / "events.jsonl", step(4), held_out(4, 1.5))
        with page.stream(run="run", after=cursor) as stream:
            assert [row["step"] for row in stream.until("steps")["rows"]] == [4]
            append_lines(run / "events.jsonl", step(5, "nan"))
            assert stream.until("steps")["rows"][0]["loss"] == "nan"
            seen = stream.last_id
        with (run / "events.jsonl").open("a") as file:
            file.write(json.dumps(step(6))[:20])  # a line in the making
        append_lines(run / "healing.jsonl", {"step": 5, "name": "nan-loss", "action": "skip", "words": "skipped"})
        with page.stream(last_id=seen, run="run") as stream:
            assert stream.until("healing")["rows"][0]["words"] == "skipped"
            with (run / "events.jsonl").open("a") as file:
                file.write(json.dumps(step(6))[20:] + "\n")
            assert [row["step"] for row in stream.until("steps")["rows"]] == [6]


@pytest.mark.parametrize("kind", ["rewound", "shorter in place", "same inode"])
def test_a_log_that_was_cut_resets_the_page_within_a_second(tmp_path, kind):
    """Guards against steps on the page that no longer exist, because a resume or a rewind has undone them."""
    run = write_run(tmp_path / "run", 8, status=None)
    with watching(tmp_path) as page:
        cursor = page.get("curve", id="run")["cursor"]
        with page.stream(run="run", after=cursor) as stream:
            stream.until("run")
            started = time.monotonic()
            if kind == "rewound":
                write_lines(run / "events.jsonl", [step(number) for number in range(1, 5)])
            else:
                lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
                kept = lines[:4] if kind == "shorter in place" else [*lines[:4], *(b"{}\n" + own for own in lines[4:])]
                (run / "events.jsonl").write_bytes(b"".join(kept))
            assert stream.until("reset") == {"file": "events.jsonl", "last_step": 4 if kind != "same inode" else 8}
            assert time.monotonic() - started < 3
            assert list(stream.events()) == []  # the stream ends
        if kind != "same inode":
            assert page.get("curve", id="run")["columns"]["step"] == [1, 2, 3, 4]
        with page.stream(last_id=cursor, run="run") as stream:
            assert stream.until("reset")


def test_damaged_lines_are_counted_and_left_out(tmp_path):
    """Guards against a page that is empty because of one torn line."""
    run = write_run(tmp_path / "run", 2)
    (run / "events.jsonl").write_bytes(
        json.dumps(step(1)).encode() + b'\n{"kind": "st\n\0\0\0\n[1]\n' + json.dumps(step(2)).encode() + b"\n"
    )
    with watching(tmp_path) as page:
        curve = page.get("curve", id="run")
        assert curve["columns"]["step"] == [1, 2]
        assert curve["num_damaged"] == 3


def test_a_run_that_is_deleted_while_it_is_shown_is_gone_with_a_sentence(tmp_path):
    """Guards against a blank page, and against a stream that never ends."""
    run = write_run(tmp_path / "run", 2)
    with watching(tmp_path) as page:
        with page.stream(run="run") as stream:
            stream.until("run")
            shutil.rmtree(run)
            kinds = dict(stream.events())
        assert kinds.keys() & {"gone", "reset"}
        status, error = page.error("GET", "run", id="run")
        assert (status, error["code"]) == (404, "not_found")


def test_new_runs_and_those_that_vanish_are_told(tmp_path):
    """Guards against a list that must be reloaded by hand."""
    write_run(tmp_path / "one")
    with watching(tmp_path) as page, page.stream(runs="1") as stream:
        time.sleep(1)
        write_run(tmp_path / "two")
        shutil.rmtree(tmp_path / "one")
        gone, rows = set(), set()
        for kind, data in stream.events():
            if kind == "runs":
                gone |= set(data["gone"])
                rows |= {row["id"] for row in data["rows"]}
            if gone and rows:
                break
        assert (gone, rows) == ({"one"}, {"two"})


def test_a_run_of_another_machine_can_only_be_read(tmp_path):
    """Guards against signals to a process here that has the number of one elsewhere."""
    run = write_run(tmp_path / "run", status=None)
    (run / ".lock").write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "2026-11-19 12:00"}))
    with watching(tmp_path) as page:
        found = page.get("run", id="run")
        assert "elsewhere" in found["access_words"]
        assert not any(own["is_possible"] for own in found["actions"])
        assert page.error("POST", "act", {"id": "run", "action": "stop"})[1]["what"]


def test_a_run_of_another_user_can_only_be_read(tmp_path, monkeypatch):
    """Guards against buttons that fail, and against this note at a run that has no folder yet."""
    run = write_run(tmp_path / "run")
    monkeypatch.setattr(actions.os, "access", lambda path, _: path != run)
    with watching(tmp_path) as page:
        found = page.get("run", id="run")
        assert "another user" in found["access_words"]
        assert not any(own["is_possible"] for own in found["actions"])
        assert (
            "another user" in page.error("POST", "act", {"id": "run", "action": "export", "to": ["adapter"]})[1]["what"]
        )
    assert actions.obstacle(StoredRun(tmp_path / "not-yet")) is None
