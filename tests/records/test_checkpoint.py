"""A checkpoint's manifest says what every file must be, and is itself what was written or nothing."""

import hashlib
import json
import math

import pytest

from tunewell.core.errors import UserError
from tunewell.records.checkpoint import (
    CheckpointManifest,
    DamagedCheckpoint,
    FileRecord,
    checkpoint_name,
    checkpoint_step,
    read_manifest,
    verify,
    write_manifest,
)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "step-000012"
    path.mkdir()
    (path / "a.bin").write_bytes(b"abc")
    return path


def manifest_of(**changes):
    record = FileRecord(bytes=3, sha256=hashlib.sha256(b"abc").hexdigest())
    values = {
        "made_by": "tunewell 0.1.0",
        "step": 12,
        "best_step": None,
        "files": {"a.bin": record},
        "identity": {},
        "progress": {},
        "versions": {"torch": "2.13.0"},
    }
    return CheckpointManifest.model_validate(values | changes)


def test_a_manifest_comes_back_as_it_was(folder):
    """Floats too, to the last bit."""
    manifest = manifest_of(progress={"best_loss": 0.1 + 0.2, "rows": [1, 2], "name": "é"}, best_step=3)
    write_manifest(folder, manifest)
    assert read_manifest(folder) == verify(folder) == manifest


def test_numbers_that_are_not_finite_and_odd_keys_are_written_as_texts(folder):
    """The file is JSON for everyone, and its hash must hold after a trip through JSON."""
    write_manifest(folder, manifest_of(progress={"loss": math.inf, "rows": {10: "a", 9: "b"}, "text": "\ud800"}))
    assert read_manifest(folder).progress == {"loss": "inf", "rows": {"10": "a", "9": "b"}, "text": "\ud800"}


def test_hashes_and_versions_survive_a_secret_that_looks_like_them(folder, monkeypatch):
    """Redacting a hash would make the checkpoint worthless."""
    digest = hashlib.sha256(b"abc").hexdigest()
    monkeypatch.setenv("SOME_TOKEN", digest[:20])
    write_manifest(folder, manifest_of(progress={"note": digest[:20]}))
    assert verify(folder).progress == {"note": "[redacted]"}


def test_an_edited_manifest_is_found_out_even_when_it_still_parses(folder):
    """A flipped bit in a number is a number."""
    write_manifest(folder, manifest_of(progress={"best_loss": 1.25}))
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace("1.25", "1.35"))
    with pytest.raises(DamagedCheckpoint, match=r"`manifest\.json` has changed"):
        read_manifest(folder)


def test_a_manifest_that_points_out_of_its_folder_is_not_followed(folder):
    """A checkpoint may come from a stranger."""
    (folder.parent / "b.bin").write_bytes(b"abc")
    record = FileRecord(bytes=3, sha256=hashlib.sha256(b"abc").hexdigest())
    write_manifest(folder, manifest_of(files={"../b.bin": record}))
    with pytest.raises(DamagedCheckpoint, match=r"`\.\./b\.bin` is missing"):
        verify(folder)


def test_a_checkpoint_of_a_newer_version_is_not_called_damaged(folder):
    """The fix is another one."""
    (folder / "manifest.json").write_text(
        json.dumps({"format": "tunewell-checkpoint", "format_version": 9, "sha256": ""})
    )
    with pytest.raises(UserError, match="newer version of tunewell") as caught:
        read_manifest(folder)
    assert not isinstance(caught.value, DamagedCheckpoint)


@pytest.mark.parametrize(("step", "name"), [(0, "step-000000"), (123, "step-000123"), (12_345_678, "step-12345678")])
def test_the_name_says_the_step_and_the_step_the_name(step, name):
    """Order comes from it."""
    assert checkpoint_name(step) == name
    assert checkpoint_step(name) == step


@pytest.mark.parametrize("name", ["step-12", "step-000012.tmp", "step-", "Step-000012", "step-00001²", "step-000012\n"])
def test_other_names_are_no_checkpoints(name):
    """Staged and foreign folders are passed over."""
    assert checkpoint_step(name) is None
