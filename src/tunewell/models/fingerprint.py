"""Tell the weights of one model from those of another, without reading sixteen gigabytes: no torch."""

import hashlib
import json
from pathlib import Path

from tunewell.core.model_files import WEIGHT_SUFFIXES, locate
from tunewell.models.key_map import key_map_path
from tunewell.models.presets import is_preset

_WHOLE_BYTES = 16 << 20
"""A file of at most so many bytes is read from end to end."""
_NUM_BLOCKS = 1024
_BLOCK_BYTES = 4096
"""In a file of 5 GB a block every 5 MB: no matrix of such a model lies between two of them."""


def fingerprint_weights(model: str) -> str | None:
    """Hash what lies in a model's weight files; None for a preset, which has none.

    Sizes and blocks spread evenly from the first byte to the last count; names, folders and times do not, so a copy has
    the same fingerprint. The files are those that `load_model` reads, which must be on this machine by now.
    """
    files = [] if is_preset(model) else _weight_files(model)
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        _add(digest, file)
    return digest.hexdigest()


def _weight_files(model: str) -> list[Path]:
    files, path = locate(model), Path(model).expanduser()
    if files.origin == "file" and path.suffix in WEIGHT_SUFFIXES:
        return [path, *(other for other in [key_map_path(path)] if other.is_file())]
    if files.gguf is not None:
        return [files.gguf]
    folder = next((file.parent for file in files.small.values()), path)
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            parts = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return [folder / part for part in sorted(set(parts))]
    kinds = ("*.safetensors", "*.bin", "*.gguf")
    return next((found for kind in kinds if (found := sorted(folder.glob(kind)))), [])


def _add(digest: "hashlib._Hash", file: Path) -> None:
    size = file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with file.open("rb") as opened:
        if size <= _WHOLE_BYTES:
            digest.update(opened.read())
            return
        for number in range(_NUM_BLOCKS):
            opened.seek((size - _BLOCK_BYTES) * number // (_NUM_BLOCKS - 1))
            digest.update(opened.read(_BLOCK_BYTES))
