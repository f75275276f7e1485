"""The weight files of a model, read without torch: which ones, their tensors, their fingerprint, and key maps."""

import hashlib
import operator
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import open_file, parse_json, read_text
from tunewell.model_files.files import WEIGHT_SUFFIXES, ModelFiles, locate
from tunewell.model_files.presets import is_preset

# A key map is a small JSON file next to a checkpoint of other training code. It renames the weights.

_KEYS = ("model", "weights", "rename", "drop", "interleaved_rotary")


@dataclass(frozen=True)
class KeyMap:
    """A mapping from the names in a checkpoint to transformers' names."""

    model: str | None = None
    weights: str | None = None
    rename: tuple[tuple[str, str], ...] = ()
    drop: tuple[str, ...] = ()
    interleaved_rotary: bool = False

    def name_of(self, key: str) -> str | None:
        """Return the new name of an entry, or None if the entry is dropped."""
        if any(re.search(pattern, key) for pattern in self.drop):
            return None
        for pattern, replacement in self.rename:
            key = re.sub(pattern, replacement, key)
        return key


def key_map_path(checkpoint: Path) -> Path:
    """Return the path of a checkpoint's key map: `model.keys.json` for `model.pt`."""
    return checkpoint.with_name(f"{checkpoint.stem}.keys.json")


def find_key_map(checkpoint: Path) -> KeyMap:
    """Read the key map of a checkpoint. Return an empty key map if the file does not exist."""
    path = key_map_path(checkpoint)
    if not path.is_file():
        return KeyMap()
    try:
        return _key_map(parse_json(read_text(path)))
    except OSError as error:
        raise UserError(f"the key map cannot be read: {error.strerror}", where=str(path)) from None
    except (ValueError, RecursionError, re.error) as error:
        raise UserError(f"the key map is not valid: {error}", where=str(path), fix=_FIX) from None


_FIX = f"a key map is a JSON object with some of {', '.join(f'`{key}`' for key in _KEYS)}"


def _key_map(raw: Any) -> KeyMap:
    if not isinstance(raw, dict):
        raise ValueError("the file is not a JSON object")
    if unknown := sorted(raw.keys() - set(_KEYS)):
        raise ValueError(f"unknown key `{unknown[0]}`")
    rename, drop = raw.get("rename", {}), raw.get("drop", [])
    texts = [raw.get("model") or "", raw.get("weights") or "", *drop]
    if not isinstance(rename, dict) or not isinstance(drop, list):
        raise ValueError("`rename` must be an object and `drop` a list")
    texts += [*rename, *rename.values()]
    if not all(isinstance(text, str) for text in texts) or type(raw.get("interleaved_rotary", False)) is not bool:
        raise ValueError("names and patterns must be strings, and `interleaved_rotary` true or false")
    for pattern in [*rename, *drop]:
        re.compile(pattern)
    if raw.get("model") and not is_preset(raw["model"]):
        raise ValueError(
            "`model` must be a preset, like `preset:tiny-23m`; for another shape, put a config.json in this folder"
        )
    return KeyMap(
        raw.get("model"), raw.get("weights"), tuple(rename.items()), tuple(drop), raw.get("interleaved_rotary", False)
    )


_WHOLE_BYTES = 16 << 20
"""Files up to this size are hashed completely."""
_NUM_BLOCKS = 1024
_BLOCK_BYTES = 4096
"""A 5 GB file has one block every 5 MB, so every matrix of the model contains a block."""


def fingerprint_weights(model: str) -> str | None:
    """Return a hash of a model's weight files, or None for a preset, which has no weight files.

    It covers file sizes and evenly spread blocks, not names, folders or times, so a copy has the same fingerprint. It
    reads the same files as `load_model`, which must be on this machine.
    """
    files = [] if is_preset(model) else weight_files(model)
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        _hash_file(digest, file)
    return digest.hexdigest()


def weight_files(model: str, files: ModelFiles | None = None) -> list[Path]:
    """Return the weight files of a model, which may not be on this machine."""
    files, path = files or locate(model), Path(model).expanduser()
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
            parts = parse_json(read_text(index))["weight_map"].values()
            return [folder / part for part in sorted(set(parts))]
    kinds = ("*.safetensors", "*.bin", "*.gguf")
    return next((found for kind in kinds if (found := sorted(folder.glob(kind)))), [])


def _hash_file(digest: "hashlib._Hash", file: Path) -> None:
    size = file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with open_file(file) as opened:
        if size <= _WHOLE_BYTES:
            digest.update(opened.read())
            return
        for number in range(_NUM_BLOCKS):
            opened.seek((size - _BLOCK_BYTES) * number // (_NUM_BLOCKS - 1))
            digest.update(opened.read(_BLOCK_BYTES))


_MAX_HEADER_BYTES = 100 << 20
"""The limit of the safetensors library."""


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a safetensors file; raise OSError or ValueError if it cannot be read."""
    with open_file(path) as opened:
        size = header_size(opened.read(8))
        entries = parse_json(opened.read(size))
    try:
        return {name: tuple(map(operator.index, entries[name]["shape"])) for name in entries if name != "__metadata__"}
    except (LookupError, TypeError) as error:
        raise ValueError("the header is damaged") from error


def header_size(head: bytes) -> int:
    """Return the size of the header of a safetensors file by the first bytes of the file; 0 if it is damaged."""
    size = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else 0
    return size if size <= _MAX_HEADER_BYTES else 0
