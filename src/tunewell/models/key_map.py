"""How the weights of other code are called: a small file beside the checkpoint that renames them.

{
  "model": "preset:tiny-23m",                  the shape, where no config.json lies beside the checkpoint
  "weights": "model_state_dict",               the entry that holds the weights, where there are several
  "rename": {"^blocks\\\\.(\\\\d+)\\\\.": "model.layers.\\\\1."},      regular expressions, applied in this order
  "drop": ["\\\\.causal_mask$"],                 entries that are no weights
  "interleaved_rotary": false                  true where rotary pairs are neighbours, as in Meta's own code
}
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError

_KEYS = ("model", "weights", "rename", "drop", "interleaved_rotary")


@dataclass(frozen=True)
class KeyMap:
    """What turns the entries of a checkpoint into the names transformers uses."""

    model: str | None = None
    weights: str | None = None
    rename: tuple[tuple[str, str], ...] = ()
    drop: tuple[str, ...] = ()
    interleaved_rotary: bool = False

    def name_of(self, key: str) -> str | None:
        """Rename one entry; None for one that is dropped."""
        if any(re.search(pattern, key) for pattern in self.drop):
            return None
        for pattern, replacement in self.rename:
            key = re.sub(pattern, replacement, key)
        return key


def key_map_path(checkpoint: Path) -> Path:
    """Say where the key map of a checkpoint lies: `model.pt` has `model.keys.json`."""
    return checkpoint.with_name(f"{checkpoint.stem}.keys.json")


def find_key_map(checkpoint: Path, given: Path | None = None) -> KeyMap:
    """Read the given key map or the one beside the checkpoint; an empty one where there is none."""
    path = given or key_map_path(checkpoint)
    if given is None and not path.is_file():
        return KeyMap()
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return _key_map(raw)
    except OSError as error:
        raise UserError(f"the key map cannot be read: {error.strerror}", where=str(path)) from None
    except (ValueError, RecursionError, re.error) as error:
        raise UserError(f"the key map cannot be used: {error}", where=str(path), fix=_FIX) from None


_FIX = f"a key map is a JSON object with some of {', '.join(f'`{key}`' for key in _KEYS)}"


def _key_map(raw: Any) -> KeyMap:
    if not isinstance(raw, dict):
        raise ValueError("it holds no JSON object")
    if unknown := sorted(raw.keys() - set(_KEYS)):
        raise ValueError(f"it has the unknown key `{unknown[0]}`")
    rename, drop = raw.get("rename", {}), raw.get("drop", [])
    texts = [raw.get("model") or "", raw.get("weights") or "", *drop]
    if not isinstance(rename, dict) or not isinstance(drop, list):
        raise ValueError("`rename` is an object and `drop` a list")
    texts += [*rename, *rename.values()]
    if not all(isinstance(text, str) for text in texts) or type(raw.get("interleaved_rotary", False)) is not bool:
        raise ValueError("names and patterns are texts, and `interleaved_rotary` is true or false")
    for pattern in [*rename, *drop]:
        re.compile(pattern)
    return KeyMap(
        raw.get("model"), raw.get("weights"), tuple(rename.items()), tuple(drop), raw.get("interleaved_rotary", False)
    )
