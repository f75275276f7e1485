"""Key maps: a small JSON file beside a checkpoint from other code that renames its weights.

{
  "model": "preset:tiny-23m",                  a preset with the shape, if there is no config.json beside it
  "weights": "model_state_dict",               the entry that holds the weights, if there are several
  "rename": {"^blocks\\\\.(\\\\d+)\\\\.": "model.layers.\\\\1."},      regular expressions, applied in this order
  "drop": ["\\\\.causal_mask$"],                 entries that are not weights
  "interleaved_rotary": false                  true if rotary pairs are neighbours, as in Meta's code
}
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.presets import is_preset

_KEYS = ("model", "weights", "rename", "drop", "interleaved_rotary")


@dataclass(frozen=True)
class KeyMap:
    """Renames the entries of a checkpoint to the names transformers uses."""

    model: str | None = None
    weights: str | None = None
    rename: tuple[tuple[str, str], ...] = ()
    drop: tuple[str, ...] = ()
    interleaved_rotary: bool = False

    def name_of(self, key: str) -> str | None:
        """Return the new name of an entry; None if it is dropped."""
        if any(re.search(pattern, key) for pattern in self.drop):
            return None
        for pattern, replacement in self.rename:
            key = re.sub(pattern, replacement, key)
        return key


def key_map_path(checkpoint: Path) -> Path:
    """Return the path of a checkpoint's key map: `model.keys.json` for `model.pt`."""
    return checkpoint.with_name(f"{checkpoint.stem}.keys.json")


def find_key_map(checkpoint: Path, path: Path | None = None) -> KeyMap:
    """Read a key map, by default the one beside the checkpoint; return an empty one if there is none."""
    if path is None:
        path = key_map_path(checkpoint)
        if not path.is_file():
            return KeyMap()
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return _key_map(raw)
    except OSError as error:
        raise UserError(f"the key map cannot be read: {error.strerror}", where=str(path)) from None
    except (ValueError, RecursionError, re.error) as error:
        raise UserError(f"the key map is not valid: {error}", where=str(path), fix=_FIX) from None


_FIX = f"a key map is a JSON object with some of {', '.join(f'`{key}`' for key in _KEYS)}"


def _key_map(raw: Any) -> KeyMap:
    if not isinstance(raw, dict):
        raise ValueError("it is not a JSON object")
    if unknown := sorted(raw.keys() - set(_KEYS)):
        raise ValueError(f"it has the unknown key `{unknown[0]}`")
    rename, drop = raw.get("rename", {}), raw.get("drop", [])
    texts = [raw.get("model") or "", raw.get("weights") or "", *drop]
    if not isinstance(rename, dict) or not isinstance(drop, list):
        raise ValueError("`rename` is an object and `drop` a list")
    texts += [*rename, *rename.values()]
    if not all(isinstance(text, str) for text in texts) or type(raw.get("interleaved_rotary", False)) is not bool:
        raise ValueError("names and patterns are strings, and `interleaved_rotary` is true or false")
    for pattern in [*rename, *drop]:
        re.compile(pattern)
    if raw.get("model") and not is_preset(raw["model"]):
        raise ValueError(
            "`model` must be a preset, like `preset:tiny-23m`; for another shape, put a config.json beside it"
        )
    return KeyMap(
        raw.get("model"), raw.get("weights"), tuple(rename.items()), tuple(drop), raw.get("interleaved_rotary", False)
    )
