"""Prepared corpora as sources: mixed again, they equal the corpus of all rows."""

import json

import numpy as np
import pytest

from corpora import prepare_in, row, rows_file, tree, write_rows
from tunewell import open_corpus
from tunewell.core.errors import UserError
from tunewell.workflows.prepare import prepare

SHARES = (0.5, 0.3, 0.2)
HELD_OUT = "data.held_out=0.1"


def mix(folder, model, paths, *sets, shares=SHARES):
    sources = [{"path": str(path), "share": share} for path, share in zip(paths, shares, strict=True)]
    return prepare({"model": str(model), "data": {"sources": sources}, "corpus": str(folder / "corpus")}, sets=sets)


@pytest.fixture(scope="module")
def parts(tiny_model, tmp_path_factory):
    """Three files of rows with some rows in common, and a corpus of each."""
    folder = tmp_path_factory.mktemp("parts")
    files = []
    for number, (first, count) in enumerate([(0, 300), (250, 200), (440, 90)]):
        files.append(rows_file(folder / f"rows-{number}.jsonl", count, first=first))
    corpora = [prepare_in(folder / file.stem, tiny_model, file, HELD_OUT).corpus for file in files]
    return files, corpora


def test_three_corpora_mixed_equal_the_corpus_of_their_rows(parts, tiny_model, tmp_path):
    """Documents, order, duplicates, shares, held-out rows and packing: every shard has the same bytes."""
    files, corpora = parts
    together = mix(tmp_path / "rows", tiny_model, files, HELD_OUT)
    mixed = mix(tmp_path / "corpora", tiny_model, corpora, HELD_OUT)
    assert mixed.manifest.corpus_sha256 == together.manifest.corpus_sha256
    assert mixed.manifest.dropped == together.manifest.dropped and together.manifest.dropped["exact_duplicate"] == 60
    assert mixed.manifest.mix != [] and mixed.manifest.repeats == together.manifest.repeats > 0
    assert mixed.manifest.boundary_tokens == together.manifest.boundary_tokens
    same = {name for name in tree(together.corpus) if name.startswith(("train/", "held_out/"))}
    assert {name: tree(mixed.corpus)[name] for name in same} == {name: tree(together.corpus)[name] for name in same}
    assert mix(tmp_path / "corpora", tiny_model, corpora, HELD_OUT).was_up_to_date


def test_a_mixed_corpus_can_be_mixed_again(parts, tiny_model, tmp_path):
    """Copies that reached a share count once, or the second mix would be of copies of copies."""
    first = mix(tmp_path / "one", tiny_model, parts[1], HELD_OUT)
    again = prepare_in(tmp_path / "two", tiny_model, first.corpus, HELD_OUT).manifest
    assert first.manifest.repeats > 0 and again.repeats == 0
    assert again.documents == first.manifest.documents and again.held_out == first.manifest.held_out


def test_held_out_rows_stay_held_out_and_rows_may_be_added(parts, tiny_model, tmp_path):
    """A test question of an earlier corpus that became a training row would make every score too good."""
    _, corpora = parts
    more = rows_file(tmp_path / "more.jsonl", 50, first=2000)
    manifest = prepare_in(tmp_path, tiny_model, [corpora[0], more], "data.held_out=auto").corpus
    corpus, before = open_corpus(manifest), open_corpus(corpora[0])
    held_out = {tuple(document.input_ids) for document in corpus.held_out}
    assert {tuple(document.input_ids) for document in before.held_out} <= held_out
    assert not held_out & {tuple(document.input_ids) for document in corpus}
    assert [source.name for source in corpus.manifest.sources] == ["corpus", "more.jsonl"]


def test_pieces_of_long_documents_and_accepted_answers_are_kept(tiny_model, tmp_path):
    rows = [row(number, words=60) for number in range(40)]
    rows[3] = {"question": "What is asked?", "answer": "Four. #### 4", "answers": ["4"]}
    file = write_rows(tmp_path / "rows.jsonl", rows)
    sets = ("packing.context_length=64", "packing.long_documents=split", "data.held_out=0.0")
    first = open_corpus(prepare_in(tmp_path / "one", tiny_model, file, *sets).corpus)
    again = open_corpus(prepare_in(tmp_path / "two", tiny_model, first.path, *sets).corpus)
    assert first.manifest.pieces > 0
    assert [document.labels for document in again] == [document.labels for document in first]
    assert [(kept.row, kept.answers) for kept in again.answer_rows()] == [
        (kept.row, kept.answers) for kept in first.answer_rows()
    ]


@pytest.mark.parametrize(
    ("source", "what"),
    [({"map": "rows.py:convert"}, "`map` cannot apply"), ({"columns": {"question": "q"}}, "`columns` cannot apply")],
)
def test_settings_for_rows_are_refused(source, what, parts, tiny_model, tmp_path):
    config = {"model": str(tiny_model), "data": {"sources": [{"path": str(parts[1][0]), **source}]}}
    with pytest.raises(UserError, match=what):
        prepare({**config, "corpus": str(tmp_path / "corpus")})


def test_corpora_of_another_tokenizer_or_template_are_refused(parts, tiny_model, tmp_path):
    from tiny import write_tiny_model

    other = write_tiny_model(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    last = next(token for token in reversed(tokenizer["added_tokens"]))
    tokenizer["added_tokens"].append({**last, "id": last["id"] + 1, "content": "<|more|>"})
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="was prepared with another tokenizer"):
        prepare_in(tmp_path, other, parts[1][0])
    with pytest.raises(UserError, match="was prepared with the chat template") as caught:
        prepare_in(tmp_path, tiny_model, parts[1][0], "template.name=alpaca")
    assert "set `template`" in str(caught.value.fix)


def test_padded_rows_have_each_document_once_with_a_mask(parts):
    corpus = open_corpus(parts[1][2])
    dataset = corpus.as_dataset(padded=True)
    assert len(dataset) == len(corpus) and set(dataset.column_names) == {"input_ids", "attention_mask", "labels"}
    longest = max(len(document.input_ids) for document in corpus)
    for index, rows in enumerate(dataset):
        own, size = corpus[index], len(corpus[index].input_ids)
        assert rows["input_ids"][:size] == own.input_ids and rows["labels"][:size] == own.labels
        assert rows["attention_mask"] == [1] * size + [0] * (longest - size)
        assert set(rows["labels"][size:]) <= {-100} and len(rows["labels"]) == longest
    assert len(corpus.held_out.as_dataset(padded=True)) == len(corpus.held_out)


def test_a_shard_has_the_tokens_that_are_set(parts, tiny_model, tmp_path):
    sets = ("packing.shard_tokens=4096", "packing.context_length=1024", HELD_OUT)
    manifest = prepare_in(tmp_path, tiny_model, parts[0][0], *sets).manifest
    shards = manifest.splits["train"].shards
    assert len(shards) > 2 and all(shard.sequences == 4 for shard in shards[:-1])
    in_memory = open_corpus(tmp_path / "corpus", in_memory=True)
    assert np.array_equal(in_memory.arrays(5)[0], open_corpus(tmp_path / "corpus").arrays(5)[0])
