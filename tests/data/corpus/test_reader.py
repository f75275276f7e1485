"""A corpus as a library sees it: documents by number or one after another, and a dataset of packed sequences."""

import shutil
import sys
from itertools import chain

import datasets
import numpy as np
import pytest

from corpora import prepare_in, row, rows_file, write_rows
from tunewell import open_corpus
from tunewell.core.errors import UserError
from tunewell.data.corpus import writer as shards
from tunewell.data.corpus.reader import Corpus


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    """A corpus of 300 rows in many small shards of several batches each."""
    place = tmp_path_factory.mktemp("reader")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shards, "_BATCH_TOKENS", 1_000)
        data = rows_file(place / "rows.jsonl", 300)
        sets = ("packing.context_length=256", "packing.shard_tokens=3000", "data.held_out=0.1")
        return prepare_in(place, tiny_model, data, *sets).corpus


@pytest.fixture
def corpus(folder) -> Corpus:
    return open_corpus(folder)


def test_there_are_several_shards_and_batches(corpus):
    """Otherwise the tests below would prove little."""
    shards = corpus.manifest.splits["train"].shards
    assert len(shards) > 4
    assert sum(shard.sequences for shard in shards) == corpus.manifest.packing.sequences
    assert len(corpus._batches[1]) > len(shards)


def test_documents_are_the_same_however_they_are_cut_into_shards(corpus, tiny_model, tmp_path):
    """The index must find each document's place over all borders."""
    data = rows_file(tmp_path / "rows.jsonl", 300)
    sets = ("packing.context_length=256", "data.held_out=0.1")
    other = open_corpus(prepare_in(tmp_path, tiny_model, data, *sets).corpus)
    assert len(other.manifest.splits["train"].shards) == 1
    assert list(corpus) == list(other)
    assert list(corpus.held_out) == list(other.held_out)


def test_documents_come_in_the_order_of_their_rows(corpus):
    """Packing decides where a document lies, not which number it has."""
    rows = [document.row for document in corpus]
    assert rows == sorted(rows)
    assert sorted([*rows, *(document.row for document in corpus.held_out)]) == list(range(1, 301))


def test_a_document_has_its_fields_as_attributes_and_by_name(corpus):
    """Some treat it as an object, others as a row of a dataset."""
    document = corpus[0]
    assert document.input_ids == document["input_ids"]
    assert document.labels == document["labels"]
    assert (document.source, document["row"]) == ("rows.jsonl", document.row)
    assert set(dict(document)) == {"input_ids", "labels", "source", "row"}
    assert [type(document.input_ids[0]), type(document.row)] == [int, int]
    with pytest.raises(KeyError, match="attention_mask"):
        _ = document["attention_mask"]


def test_labels_are_unshifted_and_the_first_is_never_learned(corpus):
    """Whoever shifts them once more, or not at all, must know which."""
    for document in corpus:
        assert len(document.labels) == len(document.input_ids)
        assert document.labels[0] == -100
        assert all(label in (-100, token) for token, label in zip(document.input_ids, document.labels, strict=True))
        assert any(label != -100 for label in document.labels)


def test_documents_have_numbers_from_both_ends(corpus):
    """Like any sequence: the last is -1, and beyond the end is an error that stops a for loop."""
    assert corpus[-1] == corpus[len(corpus) - 1]
    assert corpus[np.int64(3)] == corpus[3]
    for index in (len(corpus), -len(corpus) - 1):
        with pytest.raises(IndexError):
            _ = corpus[index]
    with pytest.raises(TypeError):
        _ = corpus["0"]


def test_arrays_are_views_of_the_mapped_files(corpus):
    """Reading a corpus of a hundred gigabytes must not need a hundred gigabytes."""
    ids, labels = corpus.arrays(0)
    assert not ids.flags.owndata
    assert not ids.flags.writeable
    assert (ids.tolist(), labels.tolist()) == (corpus[0].input_ids, corpus[0].labels)
    assert not corpus.index["row"].flags.owndata


def test_the_index_says_where_each_document_lies(corpus):
    """The engine draws documents by it, and `inspect` counts by it."""
    dataset = corpus.as_dataset()
    for number, document in enumerate(corpus):
        at = {name: int(column[number]) for name, column in corpus.index.items()}
        sequence = dataset[at["sequence"]]
        place = slice(at["start"], at["start"] + at["length"])
        assert sequence["input_ids"][place] == document.input_ids
        assert sequence["labels"][place] == document.labels
        assert at["supervised"] == sum(label != -100 for label in document.labels)
        assert at["piece_start"] == 0


def test_a_dataset_holds_the_packed_sequences(corpus):
    """What TRL trains on: every token of every document, and where the documents end."""
    for split in (corpus, corpus.held_out):
        dataset = split.as_dataset()
        assert dataset.column_names == ["input_ids", "labels", "seq_lengths"]
        for sequence in dataset:
            assert sum(sequence["seq_lengths"]) == len(sequence["input_ids"]) == len(sequence["labels"]) <= 256
        tokens = sorted(chain.from_iterable(document.input_ids for document in split))
        assert sorted(chain.from_iterable(dataset["input_ids"])) == tokens
        assert sum(len(lengths) for lengths in dataset["seq_lengths"]) == len(split)


def test_datasets_opens_the_folder_without_us(folder, corpus):
    """`load_from_disk` is all another tool needs."""
    loaded = datasets.load_from_disk(str(folder))
    assert isinstance(loaded, datasets.DatasetDict)
    assert set(loaded) == {"train", "held_out"}
    assert str(loaded["train"].split) == "train"
    assert loaded["train"][:] == corpus.as_dataset()[:]
    assert loaded["held_out"].num_rows == corpus.manifest.splits["held_out"].sequences


def test_a_corpus_without_held_out_rows_has_an_empty_split(tiny_model, tmp_path):
    """Small data and `data.held_out: 0` must not need an `if` everywhere."""
    corpus = open_corpus(
        prepare_in(tmp_path, tiny_model, rows_file(tmp_path / "rows.jsonl", 9), "data.held_out=0").corpus
    )
    assert len(corpus.held_out) == 0
    assert list(corpus.held_out) == []
    empty = corpus.held_out.as_dataset()
    assert (empty.num_rows, empty.features) == (0, corpus.as_dataset().features)
    with pytest.raises(IndexError):
        _ = corpus.held_out[0]
    assert set(datasets.load_from_disk(str(corpus.path))) == {"train"}


def test_rows_are_known_by_their_line_in_their_file(tiny_model, tmp_path):
    """A finding in training leads back to the line in the user's own file."""
    first = tmp_path / "a.jsonl"
    write_rows(first, [row(1), row(2)])
    first.write_text("\n" + first.read_text().replace("\n", "\n\n"))
    second = write_rows(tmp_path / "b.jsonl", [row(3)])
    corpus = open_corpus(prepare_in(tmp_path, tiny_model, [first, second], "data.held_out=0").corpus)
    assert [(document.source, document.row) for document in corpus] == [("a.jsonl", 2), ("a.jsonl", 4), ("b.jsonl", 1)]


def test_a_corpus_can_be_moved_and_copied(corpus, folder, tmp_path):
    """It holds no paths, so it works wherever it lies."""
    copy = open_corpus(shutil.copytree(folder, tmp_path / "elsewhere"), verify=True)
    assert list(copy) == list(corpus)


def test_a_corpus_that_is_replaced_while_it_is_open_is_noticed(tiny_model, tmp_path):
    """Half of the old documents and half of the new ones would be neither."""
    data = rows_file(tmp_path / "rows.jsonl", 20)
    corpus = open_corpus(prepare_in(tmp_path, tiny_model, data).corpus)
    prepare_in(tmp_path, tiny_model, rows_file(data, 25))
    with pytest.raises(UserError, match="replaced while it was open"):
        _ = corpus[0]


def test_what_was_mapped_before_stays_readable_after_a_replacement(tiny_model, tmp_path):
    """A training that runs must not die because somebody prepares anew."""
    data = rows_file(tmp_path / "rows.jsonl", 20)
    corpus = open_corpus(prepare_in(tmp_path, tiny_model, data).corpus)
    before = list(corpus)
    prepare_in(tmp_path, tiny_model, rows_file(data, 25))
    assert list(corpus) == before


@pytest.mark.parametrize(("path", "what"), [("nothing", "there is no corpus"), (".", "is not a finished corpus")])
def test_opening_what_is_no_corpus_says_so(tmp_path, path, what):
    """Not a `FileNotFoundError` about a file nobody has heard of."""
    with pytest.raises(UserError, match=what) as caught:
        open_corpus(tmp_path / path)
    assert "manifest.json" in (caught.value.where or "")


def test_a_shard_that_breaks_after_opening_is_named(folder, tmp_path):
    """Sizes are checked on opening; a file that is cut later must not surface as an Arrow traceback."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    corpus = open_corpus(copy)
    _ = corpus.index
    shard = copy / "train" / corpus.manifest.splits["train"].shards[0].file
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(UserError, match="data-00000-of") as caught:
        list(corpus)
    assert "differs from the manifest" in caught.value.what


def test_a_dataset_without_datasets_says_what_to_install(corpus, monkeypatch):
    """The library is an extra."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError) as caught:
        corpus.as_dataset()
    assert "[datasets]" in (caught.value.fix or "")


def test_a_corpus_in_memory_is_the_same_and_needs_its_files_no_more(tiny_model, tmp_path):
    """Guards `in_memory`, which is asked for where disks are slow: a page that is still read from disk defeats it."""
    folder = prepare_in(tmp_path, tiny_model, rows_file(tmp_path / "rows.jsonl", 60)).corpus
    mapped = [(document.input_ids, document.labels) for document in open_corpus(folder)]
    held_out = [document.input_ids for document in open_corpus(folder).held_out]
    corpus = open_corpus(folder, in_memory=True)
    for path in folder.rglob("*.arrow"):
        path.write_bytes(b"")
    assert [(document.input_ids, document.labels) for document in corpus] == mapped
    assert [document.input_ids for document in corpus.held_out] == held_out
