"""The manifest: read as it was written, and never taken for what it is not."""

import json

import pytest

from tunewell.core.errors import UserError
from tunewell.core.files import sha256_text, stable_json
from tunewell.records.manifest import (
    MANIFEST,
    DamagedManifest,
    LengthRecord,
    Manifest,
    PackingRecord,
    TokenCounts,
    TokenizerRecord,
    read_manifest,
    write_manifest,
)


@pytest.fixture
def manifest() -> Manifest:
    return Manifest(
        made_by="tunewell 1.2.3",
        inputs_sha256="1" * 64,
        corpus_sha256="2" * 64,
        rows_read=3,
        rows_in=3,
        documents=2,
        held_out=0,
        pieces=0,
        repeats=0,
        dropped={"unparsable": 1},
        notes={},
        boundary_tokens=0,
        tokens=TokenCounts(total=8, supervised=3, context=4, padding=1),
        packing=PackingRecord(
            context_length=8, because="set in the config", sequences=1, efficiency=0.875, documents_per_sequence=2.0
        ),
        lengths=LengthRecord(
            mean=3.5, median=3.5, p95=4.0, p99=4.0, max=4, padding_waste=0.5, histogram=[(0, 4, 1), (4, 8, 1)]
        ),
        sources=[],
        tokenizer=TokenizerRecord(
            source="model", kind="gguf", sha256="3" * 64, vocab_size=9, special_tokens={}, added_by_us=[]
        ),
        templates=[],
        config={"seed": 0},
        splits={},
        files={},
    )


def test_a_manifest_is_read_as_it_was_written(manifest, tmp_path):
    """Written twice it has the same bytes, and nothing is lost on the way."""
    write_manifest(tmp_path, manifest)
    first = (tmp_path / MANIFEST).read_bytes()
    write_manifest(tmp_path, read_manifest(tmp_path))
    assert (tmp_path / MANIFEST).read_bytes() == first
    assert read_manifest(tmp_path) == manifest


def test_a_key_of_a_later_tunewell_is_passed_over(manifest, tmp_path):
    """A newer minor version may note more; the format number says when that breaks."""
    raw = manifest.model_dump(mode="json") | {"weather": "fine"}
    (tmp_path / MANIFEST).write_text(json.dumps(raw | {"sha256": sha256_text(stable_json(raw))}))
    assert read_manifest(tmp_path) == manifest


@pytest.mark.parametrize("text", ["", "{", "[1, 2", "\x00\x00", '{"format": "tunewell-corpus"}'])
def test_a_damaged_manifest_is_an_error_that_names_the_file(tmp_path, text):
    """Cut off by a full disk, or edited by hand."""
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(DamagedManifest) as caught:
        read_manifest(tmp_path)
    assert str(tmp_path / MANIFEST) in (caught.value.where or "")


@pytest.mark.parametrize("version", [None, "two", [1]])
def test_a_format_version_that_is_no_number_is_damage(manifest, tmp_path, version):
    """Comparing it must not end in a traceback."""
    raw = manifest.model_dump(mode="json") | {"format_version": version}
    (tmp_path / MANIFEST).write_text(json.dumps(raw))
    with pytest.raises(DamagedManifest):
        read_manifest(tmp_path)


def test_bytes_that_are_no_text_are_damage(tmp_path):
    """A disk that returns noise."""
    (tmp_path / MANIFEST).write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(DamagedManifest):
        read_manifest(tmp_path)


@pytest.mark.parametrize("raw", [{"name": "an extension"}, [], 5, {"format": "other", "format_version": 1}])
def test_somebody_elses_manifest_is_not_ours(tmp_path, raw):
    """`manifest.json` is a common name."""
    (tmp_path / MANIFEST).write_text(json.dumps(raw))
    with pytest.raises(UserError, match="is not a tunewell manifest") as caught:
        read_manifest(tmp_path)
    assert not isinstance(caught.value, DamagedManifest)


def test_a_manifest_of_a_newer_format_asks_for_a_newer_tunewell(manifest, tmp_path):
    """Reading it by the old rules would be guessing."""
    (tmp_path / MANIFEST).write_text(json.dumps(manifest.model_dump(mode="json") | {"format_version": 2}))
    with pytest.raises(UserError, match="newer version of tunewell") as caught:
        read_manifest(tmp_path)
    assert not isinstance(caught.value, DamagedManifest)
    assert caught.value.fix == "pip install --upgrade tunewell"


def test_the_share_of_rows_with_other_ids_counts_every_row_that_was_encoded(manifest):
    """Older corpora did not count them, which is not the same as none."""
    counted = {"notes": {"other_ids_as_a_whole": 1}, "dropped": {"unparsable": 1, "exact_duplicate": 2}}
    assert manifest.model_copy(update=counted).other_ids_share is None
    assert manifest.model_copy(update={**counted, "encoding_version": 2}).other_ids_share == 0.25
