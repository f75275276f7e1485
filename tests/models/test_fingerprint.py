"""Other weights have another fingerprint; the same weights elsewhere have the same."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tunewell.model_files import weights as fingerprint
from tunewell.model_files.weights import fingerprint_weights

MANY_BYTES = (16 << 20) + 12_345


def _model(folder: Path, **files: bytes) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name, data in files.items():
        (folder / name.replace("_of", ".")).write_bytes(data)
    return folder


def test_a_copy_has_the_same_fingerprint_and_a_changed_byte_another(tmp_path):
    """A run goes on where its model was moved, and not where another was saved over it."""
    model = _model(tmp_path / "model", model_ofsafetensors=b"weights" * 100)
    first = fingerprint_weights(str(model))
    copy = shutil.copytree(model, tmp_path / "copy")
    os.utime(copy / "model.safetensors", (1, 1))
    (copy / "README.md").write_text("beside the weights")
    assert first and fingerprint_weights(str(copy)) == first
    (copy / "model.safetensors").write_bytes(b"weights" * 99 + b"Weights")
    assert fingerprint_weights(str(copy)) != first


@pytest.mark.parametrize("at", [0, 5_000, MANY_BYTES // 2, MANY_BYTES - 1])
def test_a_large_file_is_read_in_blocks_from_its_first_byte_to_its_last(tmp_path, at):
    """Sixteen gigabytes take a minute to hash, and a change of many weights is seen in samples too."""
    model = _model(tmp_path / "model", model_ofsafetensors=bytes(MANY_BYTES))
    first = fingerprint_weights(str(model))
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(at)
        file.write(b"x" * min(20_000, MANY_BYTES - at))
    assert fingerprint_weights(str(model)) != first
    read = fingerprint._NUM_BLOCKS * fingerprint._BLOCK_BYTES
    assert read < MANY_BYTES / 2


def test_every_part_of_a_model_in_parts_counts_and_nothing_else_does(tmp_path):
    """An index names the parts; a second set of weights beside them is not what is loaded."""
    model = _model(tmp_path / "model", a_ofsafetensors=b"one", b_ofsafetensors=b"two", other_ofsafetensors=b"three")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "b.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    first = fingerprint_weights(str(model))
    (model / "other.safetensors").write_bytes(b"four")
    assert fingerprint_weights(str(model)) == first
    (model / "b.safetensors").write_bytes(b"TWO")
    assert fingerprint_weights(str(model)) != first


@pytest.mark.parametrize("name", ["model.gguf", "model.pt"])
def test_a_single_file_is_its_own_fingerprint(tmp_path, name):
    """With the key map of other code's weights, which says what is what in them."""
    path = tmp_path / name
    path.write_bytes(b"weights")
    first = fingerprint_weights(str(path))
    path.with_name("model.keys.json").write_text("{}")
    assert (fingerprint_weights(str(path)) == first) == (name == "model.gguf")
    path.write_bytes(b"Weights")
    assert fingerprint_weights(str(path)) != first


def test_what_starts_from_nothing_has_none():
    """Its seed says which weights it has."""
    assert fingerprint_weights("preset:tiny-1m") is None
