"""Gathering parts: the ledger closes, duplicates go, held-out rows stay out of training."""

import hashlib
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewell.config.schema import Clean, Data
from tunewell.data.corpus.assembly import Assembly, find_repeats
from tunewell.data.corpus.tokenized_block import TokenizedBlock


def digest(text: str) -> list[int]:
    return list(hashlib.blake2b(text.encode(), digest_size=16).digest())


def block_of(rows: list[tuple[str, str] | None], supervised: list[list[bool]] | None = None) -> TokenizedBlock:
    """One row per (question, answer); None stands for a row that was dropped before."""
    documents = [row for row in rows if row is not None]
    marks = supervised or [[False, True, True]] * len(documents)
    return TokenizedBlock(
        status=np.array([row is None for row in rows], dtype=np.uint8),
        whole=np.array([digest(question + "|" + answer) for question, answer in documents], dtype=np.uint8).reshape(
            -1, 16
        ),
        question=np.array([digest(question) for question, _ in documents], dtype=np.uint8).reshape(-1, 16),
        lengths=np.array([len(own) for own in marks], dtype=np.int64),
        boundary=np.zeros(len(documents), dtype=np.int64),
        tokens=np.arange(sum(len(own) for own in marks), dtype=np.uint32),
        supervised=np.array([mark for own in marks for mark in own], dtype=bool),
        reasons=["unparsable"],
        details=["line ends early" for row in rows if row is None],
        formats={"question_answer": len(documents)},
    )


@pytest.fixture
def assemble(tmp_path):
    made = []

    def make(*, share: float = 0.0, duplicates: bool = True, answers: bool = True) -> Assembly:
        clean = Clean(
            exact_duplicate="drop" if duplicates else "keep", answer_in_held_out="drop" if answers else "keep"
        )
        made.append(Assembly(tmp_path, Data(held_out=share, clean=clean)))
        return made[-1]

    yield make
    for assembly in made:
        assembly.close()


def dropped_lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "dropped.jsonl").read_text().splitlines()]


def test_every_row_is_a_document_or_dropped_with_its_number(assemble, tmp_path):
    """A row that is neither is a row lost."""
    assembly = assemble()
    assembly.begin_source("a.jsonl", "0" * 64, 10)
    assembly.add(block_of([("q1", "a"), None, ("q2", "a"), ("q1", "a")]), [1, 2, 5, 6])
    documents = assembly.finish()
    assembly.close()
    ledger = assembly.sources[0]
    assert ledger.is_balanced()
    assert (ledger.rows, ledger.documents, dict(ledger.dropped)) == (4, 2, {"unparsable": 1, "exact_duplicate": 1})
    assert documents.row[~documents.is_dropped].tolist() == [1, 5]
    assert dropped_lines(tmp_path) == [
        {"source": "a.jsonl", "row": 2, "reason": "unparsable", "detail": "line ends early"},
        {"source": "a.jsonl", "row": 6, "reason": "exact_duplicate"},
    ]


def test_a_part_with_too_few_rows_is_an_error(assemble):
    """A worker that returns short must never make a smaller corpus."""
    assembly = assemble()
    assembly.begin_source("a.jsonl", "0" * 64, 10)
    with pytest.raises(RuntimeError, match="3 rows, but its tokenized block has 2"):
        assembly.add(block_of([("q1", "a"), ("q2", "a")]), [1, 2, 3])


def test_a_first_token_is_never_supervised(assemble):
    """Nothing comes before it to predict it from, so a label there would be counted and never trained."""
    assembly = assemble()
    assembly.begin_source("a.txt", "0" * 64, 10)
    marks = [[True, True], [True], [True, False, True]]
    assembly.add(block_of([("x", ""), ("y", ""), ("z", "")], marks), [1, 2, 3])
    documents = assembly.finish()
    assert documents.supervised.tolist() == [False, True, False, False, True]
    assert assembly.sources[0].dropped == {"nothing_to_learn": 1}
    assert documents.begins.tolist() == [0, 2]
    assert documents.tokens.tolist() == [0, 1, 3, 4, 5]


def test_a_duplicate_in_another_source_is_one_too(assemble):
    """People merge overlapping files."""
    assembly = assemble()
    for name in ("a.jsonl", "b.jsonl"):
        assembly.begin_source(name, "0" * 64, 10)
        assembly.add(block_of([("q", "a")]), [1])
    documents = assembly.finish()
    assert assembly.sources[1].dropped == {"exact_duplicate": 1}
    assert documents.source[~documents.is_dropped].tolist() == [0]


def test_duplicates_stay_where_the_config_keeps_them(assemble):
    """Some data sets repeat rows on purpose."""
    assembly = assemble(duplicates=False)
    assembly.begin_source("a.jsonl", "0" * 64, 10)
    assembly.add(block_of([("q", "a"), ("q", "a")]), [1, 2])
    assembly.finish()
    assert assembly.sources[0].documents == 2


def test_the_held_out_share_is_chosen_by_the_question(assemble):
    """Rows with one question and several answers lie on one side, so no answer is known from training."""
    assembly = assemble(share=0.3)
    assembly.begin_source("a.jsonl", "0" * 64, 10)
    rows = [(f"question {number}", answer) for number in range(400) for answer in ("yes", "no")]
    assembly.add(block_of(rows), list(range(1, 801)))
    held = assembly.finish().is_held_out.reshape(400, 2)
    assert (held[:, 0] == held[:, 1]).all()
    assert 0.2 < held[:, 0].mean() < 0.4
    assert assembly.sources[0].held_out == held.sum()


def test_adding_rows_moves_no_row_across_the_line(assemble):
    """Otherwise yesterday's held-out rows are trained on today, and every figure before is worthless."""
    assembly = assemble(share=0.3)
    assembly.begin_source("a.jsonl", "0" * 64, 10)
    rows = [(f"question {number}", "a") for number in range(100)]
    assembly.add(block_of(rows), list(range(100)))
    assembly.add(block_of([("new", "a"), *((f"{q} again", a) for q, a in rows)]), list(range(101)))
    held = assembly.finish().is_held_out
    expected = [int.from_bytes(bytes(digest(q)[:8]), "little") / 2**64 < 0.3 for q, _ in rows]
    assert held[:100].tolist() == expected


def test_a_training_row_that_asks_a_held_out_question_is_dropped(assemble):
    """Its answer would be learned by heart and then counted as understood."""
    assembly = assemble()
    assembly.begin_source("held.jsonl", "0" * 64, 10)
    assembly.add(block_of([("q1", "a")]), [1], is_held_out=True)
    assembly.begin_source("train.jsonl", "0" * 64, 10)
    assembly.add(block_of([("q1", "another answer"), ("q2", "a")]), [1, 2])
    documents = assembly.finish()
    assert assembly.sources[1].dropped == {"answer_in_held_out": 1}
    assert documents.is_held_out[~documents.is_dropped].tolist() == [True, False]
    assert all(source.is_balanced() for source in assembly.sources)


def test_a_row_that_breaks_the_encoding_of_its_detail_is_still_listed(assemble, tmp_path):
    """Details quote the row, and rows hold anything."""
    assembly = assemble()
    assembly.begin_source("a.jsonl", "0" * 64, 10)
    block = block_of([None])
    block.details = ["half a pair: \ud83d"]
    assembly.add(block, [1])
    assembly.finish()
    assembly.close()
    assert "half a pair" in dropped_lines(tmp_path)[0]["detail"]


def test_memory_holds_nothing_of_a_row(assemble):
    """A few hundred bytes a row are nothing in a test and all of a laptop at a hundred million rows."""
    assembly = assemble()
    assembly.begin_source("a.jsonl", "0" * 64, 10)
    template = block_of([(f"question {number}", "a") for number in range(2_000)], [[False] + [True] * 99] * 2_000)
    random = np.random.default_rng(5)
    tracemalloc.start()
    try:
        for start in range(0, 60_000, 2_000):
            template.whole = random.integers(0, 256, (2_000, 16), dtype=np.uint8)
            assembly.add(template, range(start, start + 2_000))
        template.whole = template.whole[:0]
        assert tracemalloc.get_traced_memory()[0] / 60_000 < 10
        assert len(assembly.finish().tokens) == 6_000_000
        assert tracemalloc.get_traced_memory()[0] / 60_000 < 10, "the rest is mapped"
        assert tracemalloc.get_traced_memory()[1] / 60_000 < 80, "finding duplicates sorts the digests"
    finally:
        tracemalloc.stop()


def test_no_rows_make_no_documents(assemble):
    """An empty file is a source like any other until the end."""
    assembly = assemble(share=0.1)
    assembly.begin_source("a.jsonl", "0" * 64, 0)
    assembly.add(block_of([]), [])
    assert len(assembly.finish()) == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=40))
def test_repeats_are_all_digests_that_equal_an_earlier_one(digests):
    """A missed duplicate may cross into the held-out rows; a false one loses a row."""
    expected = [index for index, digest in enumerate(digests) if digest in digests[:index]]
    assert find_repeats(np.array(digests, dtype=np.uint64).reshape(-1, 2)).tolist() == expected
