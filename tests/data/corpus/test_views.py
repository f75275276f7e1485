"""The picture of the lengths: a row is one row, in however many pieces, and its mask is the corpus's."""

import json
from pathlib import Path

from tests.corpora import prepare_in

from tunewell.core.units import percent
from tunewell.data.corpus.reader import open_corpus
from tunewell.data.corpus.views import CorpusViews


def test_split_and_repeated_rows_are_counted_once(tmp_path, monkeypatch, tiny_model):
    """A piece has another length than its row; used twice, a row would seem twice as long."""
    monkeypatch.chdir(tmp_path)
    for name, number in (("few.jsonl", 8), ("many.jsonl", 40)):
        rows = [{"question": f"{name} {n}?", "answer": "word " * (3 + 9 * n)} for n in range(number)]
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = '[{"path": "few.jsonl", "share": 0.5}, {"path": "many.jsonl", "share": 0.5}]'
    sets = ("data.held_out=0", "packing.context_length=128", "packing.long_documents=split", "data.max_repeats=3")
    prepare_in(tmp_path, tiny_model, Path("few.jsonl"), f"data.sources={sources}", *sets)
    corpus = open_corpus(tmp_path / "corpus")
    manifest, index = corpus.manifest, corpus.index
    assert manifest.pieces and manifest.repeats
    chart = CorpusViews(corpus).length_chart()
    bars = [row for row in chart.rows if not row.text]
    assert sum(int(row.texts[0]) for row in bars) == manifest.documents
    assert [(row.label, row.texts[0]) for row in bars] == [
        (f"{start:,} to {end - 1:,}", str(number)) for start, end, number in manifest.lengths.histogram
    ]
    rows = {}
    for number in range(len(corpus)):
        piece = tuple(int(index[name][number]) for name in ("source", "row", "piece_start"))
        rows.setdefault(piece[:2], {})[piece[2]] = [int(index[name][number]) for name in ("length", "supervised")]
    for (start, end, number), bar in zip(manifest.lengths.histogram, bars, strict=True):
        own = [
            (sum(length for length, _ in pieces.values()) - len(pieces) + 1, sum(each for _, each in pieces.values()))
            for pieces in rows.values()
        ]
        inside = [(length, supervised) for length, supervised in own if start <= length < end]
        assert len(inside) == number
        share = sum(supervised for _, supervised in inside) / max(1, sum(length for length, _ in inside))
        assert not number or bar.texts[1] == percent(share, 0)
    (mark,) = (at for at, row in enumerate(chart.rows) if row.text)
    assert chart.rows[mark].label == "128" and manifest.lengths.histogram[mark - 1][0] < 128
