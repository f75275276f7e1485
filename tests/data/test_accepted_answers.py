"""Accepted answers of rows: the columns `answers` and `value`, from the row to the corpus."""

import json

import pytest
from tiny import prepare, write_jsonl

from tunewell.data.corpus.reader import open_corpus
from tunewell.data.rows.column_names import accepted_answers
from tunewell.data.rows.formats import Converter

GIVEN = {
    "a list": ({"answers": ["15 January", "mid-January"]}, ("answers", ("15 January", "mid-January"))),
    "a value": ({"value": "31,400"}, ("value", ("31,400",))),
    "a number": ({"value": 31400.0}, ("value", ("31400",))),
    "SQuAD": ({"answers": {"text": ["Paris", "Paris"], "answer_start": [3, 3]}}, ("answers", ("Paris",))),
    "true": ({"value": True}, ("value", ("yes",))),
    "answers first": ({"answers": ["a"], "value": "b"}, ("answers", ("a",))),
    "empty answers": ({"answers": [], "value": "b"}, ("value", ("b",))),
    "objects": ({"answers": [{"id": 1}]}, ("", ())),
    "nothing": ({"value": None}, ("", ())),
}


@pytest.mark.parametrize(("row", "expected"), GIVEN.values(), ids=GIVEN)
def test_accepted_answers_are_read_in_their_usual_forms(row, expected):
    """Guards lists, numbers and SQuAD's objects; anything else is left alone."""
    assert accepted_answers(row) == expected


def test_a_column_that_is_read_is_not_reported_as_unused():
    """Guards the report on columns: `value` is used, an unreadable one and a second one are not."""
    row = {"question": "When?", "answer": "On 15 January.", "value": "15 January", "note": "x"}
    found = Converter().convert(row)[0]
    assert (found.answers, found.answers_column, found.unused) == (("15 January",), "value", ("note",))
    both = Converter().convert({"question": "When?", "answer": "Soon.", "answers": ["Soon"], "value": "x"})[0]
    assert both.unused == ("value",)
    mapped = Converter(columns={"answers": "gold"}).convert({"question": "When?", "answer": "Soon.", "gold": "Soon"})[0]
    assert mapped.answers == ("Soon",)
    turns = [{"from": "human", "value": "When?"}, {"from": "gpt", "value": "Soon."}]
    assert Converter().convert({"conversations": turns})[0].answers == ()


def test_the_corpus_lists_accepted_answers_and_trains_on_none_of_them(tmp_path, tiny_model):
    """Guards the way through the cache: the second build reads blocks from disk."""
    rows = [{"question": f"What is {n}?", "answer": f"It is {n * n}.", "value": n * n} for n in range(20)]
    plain = [{name: row[name] for name in ("question", "answer")} for row in rows]
    told = prepare(tmp_path, tiny_model, write_jsonl(tmp_path / "rows.jsonl", rows))
    listed = [json.loads(line) for line in (tmp_path / "corpus" / "answers.jsonl").read_text().splitlines()]
    assert listed[3] == {"source": "rows.jsonl", "row": 4, "column": "value", "answers": ["9"]}
    assert told["notes"]["rows_with_answers"] == 20
    corpus = open_corpus(tmp_path / "corpus", verify=True)
    assert [row.answers for row in corpus.answer_rows()] == [[str(n * n)] for n in range(20)]
    tokens = corpus.manifest.corpus_sha256
    extra = write_jsonl(tmp_path / "more.jsonl", [{"question": "Who?", "answer": "She."}])
    prepare(tmp_path, tiny_model, tmp_path / "rows.jsonl", extra)
    assert len(list(open_corpus(tmp_path / "corpus").answer_rows())) == 20
    (tmp_path / "plain").mkdir()
    prepare(tmp_path / "plain", tiny_model, write_jsonl(tmp_path / "plain" / "rows.jsonl", plain))
    bare = open_corpus(tmp_path / "plain" / "corpus")
    assert bare.manifest.corpus_sha256 == tokens and list(bare.answer_rows()) == []
