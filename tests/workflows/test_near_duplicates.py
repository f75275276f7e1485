"""Near duplicates in `prepare` and `inspect`: counted, listed, shown, and dropped if configured."""

import json

import pytest
from tests.corpora import prepare_in, write_rows

from tunewell.cli.main import main
from tunewell.data.corpus.reader import open_corpus

SYSTEM = "You answer questions about the stock of a small shop, in one short sentence and without guessing. " * 4


def row(number: int, word: str = "so") -> dict[str, str]:
    """A row of about forty words that no other number shares, and a word to change."""
    words = [f"w{number * 7919 % 10007 + position * 31 % 997}" for position in range(40)]
    return {"question": f"{word} " + " ".join(words[:25]) + "?", "answer": " ".join(words[25:])}


@pytest.fixture
def files(tmp_path):
    """Thirty rows, two of which nearly equal an earlier one, and a held-out row with a near copy among them."""
    rows = [row(number) for number in range(30)]
    rows += [row(3, "indeed"), row(5, "really"), row(100, "too")]
    return write_rows(tmp_path / "rows.jsonl", rows), write_rows(tmp_path / "test.jsonl", [row(100), row(101)])


def test_near_duplicates_are_counted_and_listed(tmp_path, tiny_model, files):
    """Guards the count of the leak that makes every verdict too good: by default, nothing is dropped."""
    manifest = prepare_in(tmp_path, tiny_model, files[0], f"data.held_out={files[1]}").manifest
    near = manifest.near_duplicates
    assert near is not None
    assert (near.num_near_duplicates, near.num_near_held_out, near.threshold) == (2, 1, 0.8)
    assert (manifest.documents, manifest.held_out, manifest.dropped) == (33, 2, {})
    pairs = open_corpus(tmp_path / "corpus").near_pairs()
    named = [(pair.kind, pair.row, pair.similar_source, pair.similar_row) for pair in pairs]
    assert named == [
        ("near_held_out", 33, "test.jsonl", 1),
        ("near_duplicate", 31, "rows.jsonl", 4),
        ("near_duplicate", 32, "rows.jsonl", 6),
    ]
    assert all(0.8 <= pair.similarity < 1 for pair in pairs)


def test_near_duplicates_are_dropped_if_configured(tmp_path, tiny_model, files):
    """Guards the ledger: each dropped row has one reason and names the row to which it is similar."""
    sets = (f"data.held_out={files[1]}", "data.clean.near_duplicate=drop", "data.clean.near_held_out=drop")
    manifest = prepare_in(tmp_path, tiny_model, files[0], *sets).manifest
    assert manifest.dropped == {"near_duplicate": 2, "near_held_out": 1}
    assert manifest.documents + manifest.held_out + 3 == manifest.rows_in == 35
    lines = [json.loads(line) for line in (tmp_path / "corpus" / "dropped.jsonl").read_text().splitlines()]
    details = {line["row"]: line["detail"] for line in lines}
    assert details[33].endswith("similar to test.jsonl row 1")
    assert details[31].endswith("similar to rows.jsonl row 4")


def test_search_can_be_turned_off(tmp_path, tiny_model, files):
    """Guards corpora for which the time matters more."""
    sets = ("data.clean.near_duplicate=keep", "data.clean.near_held_out=keep")
    manifest = prepare_in(tmp_path, tiny_model, files[0], *sets).manifest
    assert manifest.near_duplicates is None
    assert "near_duplicates.jsonl" not in manifest.files


def test_a_shared_system_prompt_makes_no_near_duplicates(tmp_path, tiny_model):
    """Guards chat data with a long prompt: all rows would be similar to each other."""
    rows = [
        {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row(n)["question"][:60]},
                      {"role": "assistant", "content": row(n)["answer"][:40]}]}
        for n in range(40)
    ]  # fmt: skip
    near = prepare_in(tmp_path, tiny_model, write_rows(tmp_path / "rows.jsonl", rows)).manifest.near_duplicates
    assert near is not None
    assert (near.num_near_duplicates, near.num_near_held_out) == (0, 0)


def test_pairs_are_shown_where_they_differ(tmp_path, tiny_model, files, capsys, monkeypatch):
    """Guards `inspect`, by which people decide whether to drop the rows."""
    monkeypatch.chdir(tmp_path)
    prepare_in(tmp_path, tiny_model, files[0], f"data.held_out={files[1]}")
    assert main(["inspect", "corpus", "--show", "0"]) == 0
    screen = capsys.readouterr().out
    assert "near test rows" in screen
    assert "rows.jsonl row 33 and test.jsonl row 1 (for testing)" in screen
    assert "indeed" in screen
    assert main(["inspect", "corpus", "--json"]) == 0
    assert [pair["row"] for pair in json.loads(capsys.readouterr().out)["near_pairs"]] == [33, 31, 32]
