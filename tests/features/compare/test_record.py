"""`compare --record`: every question is asked once, whatever happens, and the file stands for the model."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from parrots import write_parrot
from tunewell.cli.main import main
from tunewell.core.errors import UserError
from tunewell.features.compare import record as recording
from tunewell.features.compare.record import plan_recording, record
from tunewell.records.answers import header_of

NUM_ROWS = 40
KEY = "sk-test-9f8e7d6c5b4a39281706f5e4d3c2b1a0"


class Host(ThreadingHTTPServer):
    """A hosted model. `answered` counts the complete answers to each question."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Reply)
        self.answered: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.seconds = 0.0
        self.says: str | None = None
        self.faults: list[tuple[int, dict[str, str], bytes]] = []
        """Status, headers and body of the next replies."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1#mine"


class Reply(BaseHTTPRequestHandler):
    server: Host

    def do_POST(self) -> None:
        host, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        host.bodies.append(body)
        host.keys.add(self.headers.get("Authorization"))
        asked, status, headers, data = body["messages"][-1]["content"], 200, {}, b""
        if host.faults:
            status, headers, data = host.faults.pop(0)
        time.sleep(host.seconds)
        said = host.says or f"It is {9000 + 17 * (int(asked.strip('R?')) // 2 * 2)}."  # right for even numbers
        if not data and status == 200:
            data = json.dumps({"choices": [{"message": {"content": said}, "finish_reason": "stop"}]}).encode()
            if body["stream"]:
                data = (
                    b"data: %s\n\ndata: [DONE]\n\n" % json.dumps({"choices": [{"delta": {"content": said}}]}).encode()
                )
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        host.answered[asked] += status == 200  # before the last byte: a client that has the answer is counted
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"R{number}?", "answer": f"It is {9000 + 17 * number}."} for number in range(NUM_ROWS)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = Host()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def answers() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()[1:]]


def plan(host: Host) -> recording.Recording:
    return plan_recording(Path("answers.jsonl"), [host.address], ["rows.jsonl"])


@pytest.mark.slow
def test_a_process_that_is_killed_at_ten_moments_asks_no_question_twice(host, tiny_model, capsys):
    """Every answer costs money, and the model may be gone before the last one is there.

    SIGKILL is sent when an answer is stored, and SIGTERM while an answer is on its way, which is still waited for.
    """
    host.seconds = 0.3
    command = [sys.executable, "-m", "tunewell", "compare", "--record", "answers.jsonl", host.address]
    command += ["--data", "rows.jsonl", "--yes"]
    lost = 0
    for moment in range(10):
        sent, stored, is_asked_to_stop = len(host.bodies), _num_lines(), moment % 2
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        if is_asked_to_stop:  # a question is on its way
            _wait(lambda sent=sent: len(host.bodies) > sent)
            process.terminate()
            assert process.wait(60) == 143
        else:  # an answer has just been stored
            _wait(lambda stored=stored: _num_lines() > stored)
            process.kill()
            process.wait(60)
        again = len(host.bodies) - _num_lines() - lost
        assert again <= (0 if is_asked_to_stop else 1), "only the question on its way at a SIGKILL is lost"
        lost += again
        assert _num_lines() < NUM_ROWS
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    assert len(answers()) == NUM_ROWS == len({line["id"] for line in answers()})
    assert len(host.bodies) == NUM_ROWS + lost
    _compares_as_live(host, tiny_model, capsys)


def _num_lines() -> int:
    return max(0, len(Path("answers.jsonl").read_bytes().splitlines()) - 1) if Path("answers.jsonl").exists() else 0


def _wait(is_done: Any) -> None:
    until = time.monotonic() + 60
    while not is_done():
        assert time.monotonic() < until
        time.sleep(0.01)


def _compares_as_live(host: Host, tiny_model: Path, capsys: Any) -> None:
    model = str(write_parrot(Path("says"), tiny_model, "9034"))
    capsys.readouterr()
    found = []
    for other in (host.address, "answers.jsonl"):
        assert main(["compare", model, other, "--data", "rows.jsonl", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    live, kept = found
    assert kept["names"] == live["names"] == ["says", "mine"] and kept["counts"][1]["right"] == NUM_ROWS // 2
    for name in ("counts", "differences", "changed", "keys", "recommendation"):
        assert kept[name] == live[name], name


def test_the_file_stands_for_the_model(host, tiny_model, capsys):
    """A later comparison must not differ from one with the model, and needs no server."""
    assert main(["compare", "--record", "answers.jsonl", host.address, "--data", "rows.jsonl", "--yes"]) == 0
    shown = capsys.readouterr()
    assert f"{NUM_ROWS} questions: about" in shown.err and "may forbid training" in shown.err
    assert f"answers {NUM_ROWS} of {NUM_ROWS} questions" in shown.out
    assert set(host.answered.values()) == {1}
    _compares_as_live(host, tiny_model, capsys)
    number = len(host.bodies)
    assert main(["compare", "--record", "answers.jsonl", host.address, "--data", "rows.jsonl"]) == 0
    assert len(host.bodies) == number, "a complete file needs no questions, and no confirmation"
    host.shutdown()
    assert main(["compare", "says", "answers.jsonl", "--data", "rows.jsonl"]) == 0
    Path("more.jsonl").write_text('{"question": "R99?", "answer": "It is 10683."}\n')
    capsys.readouterr()
    assert main(["compare", "says", "answers.jsonl", "--data", "more.jsonl"]) == 2
    assert "has no answer to 1 of 1 question" in " ".join(capsys.readouterr().err.split())


def test_a_busy_server_is_asked_again_and_a_failing_one_ends_with_what_is_there(host, monkeypatch):
    """A rate limit is no reason to stop, and a malformed reply is no reason to lose the answers before it."""
    monkeypatch.setattr(recording, "_FIRST_WAIT", 0.0)
    host.faults = [
        (429, {"Retry-After": "0"}, b"slow down"),
        (503, {}, b""),
        (429, {"Retry-After": "inf"}, b""),
        (429, {"Retry-After": "Wed, 01 Jan 2020 00:00:00 GMT"}, b""),
    ]
    assert record(plan(host)) == 0
    assert len(answers()) == NUM_ROWS and set(host.answered.values()) == {1}
    Path("answers.jsonl").unlink()
    for fault, words in (
        ((429, {"Retry-After": "7200"}, b""), "the next try is in"),
        ((200, {}, b"<html>"), "not valid JSON"),
        ((200, {}, b'{"choices": []}'), "not in the format"),
        ((200, {}, b'{"choices": [{"message": {"content": 5}}]}'), "not in the format"),
        ((401, {}, b"no key"), "status 401"),
        ((302, {"Location": "http://127.0.0.1:1/"}, b""), "redirects are not followed"),
    ):
        host.faults = [(200, {}, b""), fault]
        left = len(plan(host).open)
        with pytest.raises(UserError, match=words) as caught:
            record(plan(host))
        assert "the same command goes on" in (caught.value.fix or "")
        assert len(plan(host).open) == left - 1, "the answer before the fault is kept"
    host.faults = []
    assert record(plan(host)) == 0 and len(answers()) == NUM_ROWS
    monkeypatch.setattr(recording, "_MAX_TRIES", 2)
    Path("answers.jsonl").unlink()
    host.faults = [(503, {}, b"")] * 2
    with pytest.raises(UserError, match="status 503"):
        record(plan(host))


def test_files_of_other_models_and_other_files_are_refused(host, capsys):
    """Answers of two models in one file would be compared as those of one."""
    command = ["compare", "--record", "answers.jsonl", host.address, "--data", "rows.jsonl#3"]
    assert main(command) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "asking 3 questions costs tokens" in shown and "--yes" in shown and not host.bodies
    assert main([*command, "--yes"]) == 0
    assert main(["compare", "--record", "answers.jsonl", host.address[:-4] + "yours", "--data", "rows.jsonl"]) == 2
    assert "has the answers of" in capsys.readouterr().err
    for words in (["--record", "rows.jsonl"], ["--record", "new.jsonl", "--data", "missing.jsonl"]):
        assert main(["compare", host.address, "--data", "rows.jsonl", *words, "--yes"]) == 2, words
    assert main([*command, "--questions", "2", "--yes"]) == 2 and main([*command, "--index", "i"]) == 2
    assert main([*command, "--labels", "rows.jsonl", "--yes"]) == 2 and main([*command, "--out", "o", "--yes"]) == 2
    assert main(["compare", "--record", "new.jsonl"]) == 2 and main(["compare", "--record", "n", "a", "b"]) == 2
    capsys.readouterr()
    Path("answers.jsonl").write_text(Path("answers.jsonl").read_text() + '{"id": "cut o')
    assert main([*command[:-1], "rows.jsonl#5", "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) | {"file": ""} == {
        **{"format_version": 1, "file": "", "questions": 5, "left": 0}
    }
    assert len(answers()) == 5


def test_a_file_of_the_user_is_never_overwritten(host, capsys):
    """A JSON file without a line break was taken for a log that had not begun, and emptied."""
    Path("folder").mkdir()
    Path("mine.json").write_text('{"my": "settings"}')
    for name in ("mine.json", "folder", "rows.jsonl"):
        before = Path(name).read_bytes() if name != "folder" else b""
        assert main(["compare", "--record", name, host.address, "--data", "rows.jsonl", "--yes"]) == 2
        assert "has no recorded answers" in capsys.readouterr().err and not host.bodies
        assert name == "folder" or Path(name).read_bytes() == before
    Path("answers.jsonl").write_text('{"format": "tunewell-answers"}')
    with pytest.raises(UserError, match="no recorded answers"):
        plan(host)
    line = '{"id": "a", "answer": "b", "seconds": "soon"}\n'
    Path("answers.jsonl").write_text(json.dumps(header_of("u", "m")) + "\n" + line)
    with pytest.raises(UserError, match="is damaged"):
        plan(host)


def test_texts_with_labels_are_asked_as_in_a_comparison(host, tiny_model, capsys):
    """The rows were read without the rule for texts with labels, so they had no question."""
    rows = [{"text": f"R{n}? is the text", "label": ("even", "odd")[n % 2]} for n in range(12)]
    Path("labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    host.says = "even"
    command = ["compare", "--record", "with space.jsonl", host.address, "--data", "labels.jsonl", "--yes"]
    assert main(command) == 0 and len(host.bodies) == 12
    assert "compare 'with space.jsonl' RUN" in capsys.readouterr().out
    model = str(write_parrot(Path("says"), tiny_model, "9034"))
    assert main(["compare", model, "with space.jsonl", "--data", "labels.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"][1]["right"] == 6


def test_a_second_process_asks_only_what_the_first_has_not_asked(host):
    """Two calls that were started together asked everything twice, one after the other."""
    first, second = plan(host), plan(host)
    assert record(first) == record(second) == 0
    assert len(host.bodies) == NUM_ROWS == len(answers())


def test_the_key_is_sent_and_never_written(host, monkeypatch):
    """The file is copied and kept for long; a key in it would be too."""
    monkeypatch.setenv("TUNEWELL_MODEL_KEY", KEY)
    said = json.dumps({"choices": [{"message": {"content": f"your key is {KEY}"}}]}).encode()
    host.faults = [(200, {}, said)]
    assert record(plan(host)) == 0
    assert host.keys == {f"Bearer {KEY}"} and KEY not in Path("answers.jsonl").read_text()
    with pytest.raises(UserError, match="password"):
        plan_recording(Path("x"), [f"http://user:{KEY}@127.0.0.1/v1#mine"], ["rows.jsonl"])


def test_a_signal_between_questions_keeps_the_answer_on_its_way(host, monkeypatch):
    """Ctrl-C must not throw away the answer that was paid for."""

    class Stopped(recording.Signals):
        @property
        def exit_code(self) -> int | None:
            return 130 if len(host.bodies) >= 4 else None

    monkeypatch.setattr(recording, "Signals", Stopped)
    assert record(plan(host)) == 130
    assert len(answers()) == 4 == len(host.bodies)
