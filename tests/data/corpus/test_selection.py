"""The selection slice: rows taken out of the training rows, on which checkpoints are chosen."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from corpora import prepare_in, row, write_rows
from tunewell.core.errors import UserError
from tunewell.core.files import sha256_text, stable_json
from tunewell.data.corpus.held_out import choose_selected, num_selected
from tunewell.data.corpus.reader import Split, open_corpus
from tunewell.records.manifest import read_manifest


def _hashes(number: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**63, number, dtype=np.uint64) * np.uint64(2)


@pytest.mark.parametrize(
    ("setting", "num_rows", "number", "words"),
    [
        ("auto", 389, 0, "fewer than 20"),
        ("auto", 400, 20, "5% of 400 rows"),
        ("auto", 1500, 75, "5% of 1,500 rows"),
        ("auto", 9000, 200, "at most 200"),
        (0.0, 9000, 0, "the last checkpoint is used"),
        (0.1, 50, 5, "set by `data.selection`"),
        (30.0, 9000, 30, "set by `data.selection`"),
        (30.0, 10, 5, "set by `data.selection`"),
    ],
)
def test_the_size_follows_from_the_rows_and_has_a_reason(
    setting: float | str, num_rows: int, number: int, words: str
) -> None:
    """A slice of few rows cannot compare checkpoints, and the rows are worth more in training."""
    found = num_selected(setting, num_rows)
    assert found.value == number and words in found.because


def test_every_label_keeps_its_share() -> None:
    """A slice without a rare label, or with too many rows of one, would choose the wrong checkpoint."""
    labels = np.repeat(_hashes(8, seed=1), [800, 400, 200, 200, 160, 120, 80, 40])
    chosen = choose_selected(_hashes(2000), labels, 100)
    assert chosen.sum() == 100
    shares = Counter(labels[chosen].tolist())
    for label, number in Counter(labels.tolist()).items():
        assert abs(shares[label] - number / 20) <= 1


def test_rows_of_one_question_are_taken_together_and_fill_no_slice() -> None:
    """A question in training and in the slice would be answered from memory; a greeting would be most of the slice."""
    questions = np.concatenate([np.repeat(_hashes(300), 3), np.repeat(_hashes(1, seed=5), 500)])
    chosen = choose_selected(questions, _hashes(1400, seed=2), 60)
    assert 58 <= chosen.sum() <= 60
    assert not set(questions[chosen].tolist()) & set(questions[~chosen].tolist())
    assert not chosen[-500:].any()


def _questions(corpus: Path, split: Split) -> set[int]:
    return set(split.digests[:, 2].tolist())


def test_prepare_takes_the_slice_out_of_the_training_rows_and_counts_it(tiny_model: Path, tmp_path: Path) -> None:
    """The slice is in neither other split, in the ledger of each source, and on the data card."""
    files = [
        write_rows(tmp_path / name, map(row, rows))
        for name, rows in (("a.jsonl", range(300)), ("b.jsonl", range(300, 600)))
    ]
    manifest = prepare_in(tmp_path, tiny_model, files).manifest
    corpus = open_corpus(tmp_path / "corpus", verify=True)
    parts = [_questions(tmp_path, split) for split in (corpus, corpus.selection, corpus.held_out)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 600
    assert manifest.selected == len(corpus.selection) == round(0.05 * (600 - manifest.held_out))
    assert "5% of" in manifest.selected_because
    for source in manifest.sources:
        assert source.selected and source.rows == source.documents + source.selected + source.held_out
    assert "for choosing checkpoints" in (tmp_path / "corpus" / "README.md").read_text()
    assert corpus.selection[0].source in ("a.jsonl", "b.jsonl") and corpus.evaluated is corpus.selection


def test_few_rows_give_no_slice_and_their_held_out_rows_are_watched(tiny_model: Path, tmp_path: Path) -> None:
    """On 100 rows, five would decide; all are trained on, and the reason is recorded."""
    manifest = prepare_in(tmp_path, tiny_model, write_rows(tmp_path / "rows.jsonl", map(row, range(100)))).manifest
    corpus = open_corpus(tmp_path / "corpus")
    assert manifest.selected == 0 and "the last one is used" in manifest.selected_because
    assert len(corpus.selection) == 0 and corpus.evaluated is corpus.held_out and "selection" not in manifest.splits


def test_held_out_rows_do_not_depend_on_the_slice_and_added_rows_keep_them_apart(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Rows on which a checkpoint was chosen must never become rows of a verdict."""
    rows = list(map(row, range(900)))
    file = write_rows(tmp_path / "rows.jsonl", rows[:500])
    held_out, selected = list[set[int]](), list[set[int]]()
    for number, sets in ((500, ["data.selection=0"]), (500, []), (900, [])):
        write_rows(file, rows[:number])
        prepare_in(tmp_path, tiny_model, file, *sets)
        corpus = open_corpus(tmp_path / "corpus")
        held_out.append(_questions(tmp_path, corpus.held_out))
        selected.append(_questions(tmp_path, corpus.selection) if len(corpus.selection) else set())
    assert held_out[0] == held_out[1] and not selected[0] and selected[1]
    assert not selected[1] & held_out[2]


def test_the_same_rows_give_the_same_slice_in_any_order(tiny_model: Path, tmp_path: Path) -> None:
    """Chosen by hashes, so that the order of a file changes nothing."""
    found = []
    for name, rows in (("one", range(500)), ("two", reversed(range(500)))):
        prepare_in(tmp_path / name, tiny_model, write_rows(tmp_path / name / "rows.jsonl", map(row, rows)))
        found.append(_questions(tmp_path, open_corpus(tmp_path / name / "corpus").selection))
    assert found[0] == found[1]


def test_a_corpus_with_a_slice_is_a_source_with_all_its_rows(tiny_model: Path, tmp_path: Path) -> None:
    """Rows of the slice were lost when a corpus was mixed into another."""
    prepare_in(tmp_path / "first", tiny_model, write_rows(tmp_path / "rows.jsonl", map(row, range(500))))
    manifest = prepare_in(tmp_path / "second", tiny_model, tmp_path / "first" / "corpus").manifest
    assert manifest.rows_in == 500


def test_a_corpus_of_an_older_version_has_no_slice(tiny_model: Path, tmp_path: Path) -> None:
    """Its manifest does not name the slice at all."""
    prepare_in(tmp_path, tiny_model, write_rows(tmp_path / "rows.jsonl", map(row, range(60))))
    path = tmp_path / "corpus" / "manifest.json"
    record = json.loads(path.read_text())
    for name in ("selected", "selected_because", "sha256"):
        record.pop(name, None)
    for source in record["sources"]:
        source.pop("selected")
    path.write_text(stable_json(record | {"sha256": sha256_text(stable_json(record))}))
    assert read_manifest(path.parent).selected == 0 and len(open_corpus(path.parent).selection) == 0


def test_a_wrong_size_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """`data.selection: -1` means nothing."""
    with pytest.raises(UserError, match=r"data\.selection"):
        prepare_in(tmp_path, tiny_model, write_rows(tmp_path / "rows.jsonl", map(row, range(60))), "data.selection=-1")
