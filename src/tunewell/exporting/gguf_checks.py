"""Hold what a GGUF file says and holds against the model that was trained, from the file and the proof alone."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tunewell.core.gguf import read_metadata, read_tensor_table
from tunewell.core.need import need
from tunewell.exporting.gguf_fields import fields_of, rope_tables
from tunewell.exporting.gguf_settings import Settings
from tunewell.exporting.gguf_weights import NamedTensor, WeightFiles, name_tensors
from tunewell.exporting.sketch import Rows, Sketch, changed, sketch
from tunewell.exporting.tensor_checks import Compared, check_tensors
from tunewell.exporting.vocabulary_digest import digest_of_gguf
from tunewell.records.parity import Check, ModelFacts

_HEAD = "lm_head.weight"
_SHOWN = 3
_ID_FIELDS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",
    "pad": "padding_token_id",
    "mask": "mask_token_id",
}
"""The tokens that have a name, and what GGUF calls them, its own spelling kept."""


class _Known(WeightFiles):
    """Tensors that are known by their sketches alone: names and shapes, no numbers."""

    def __init__(self, sketches: Mapping[str, Sketch], settings: Settings) -> None:
        self.sketches: dict[str, Sketch] = {}
        for name, own in sketches.items():
            for pattern, replacement in settings.part.get("names", {}).items():
                name = re.sub(pattern, replacement, name)
            if not re.search(settings.part.get("left_out", r"(?!)"), name):
                self.sketches[name] = own

    def names(self) -> set[str]:
        return set(self.sketches)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.sketches[name].shape


def check_gguf_tensors(
    path: Path, settings: Settings, sketches: Mapping[str, Sketch], rounded: Mapping[str, Rows]
) -> Check:
    """Dequantise a file tensor by tensor, with the `gguf` package's arithmetic, and compare each with the trained."""
    wanted = _wanted(settings, sketches, rounded)
    names = [entry.name for entry in read_tensor_table(path)]
    return check_tensors(
        _pairs(path, wanted),
        missing=[name for name in wanted if name not in names],
        unknown=[name for name in names if name not in wanted],
    )


def check_gguf_fields(path: Path, settings: Settings, facts: ModelFacts, stop_ids: Sequence[int]) -> Check:
    """Compare a file's settings and special tokens with the model's, one by one; what it says besides must be known."""
    found = read_metadata(path)
    wanted: dict[str, Any] = {"general.architecture": settings.gguf_name, **fields_of(settings)}
    for name, field in _ID_FIELDS.items():
        number = facts.special_ids.get(name, settings.values.get(f"{name}_token_id"))
        if isinstance(number, int):
            wanted[f"tokenizer.ggml.{field}"] = number
    wrong = [
        f"`{key}` is {_short(found.get(key))} and not {_short(value)}"
        for key, value in wanted.items()
        if not _is_same(found.get(key), value)
    ]
    own = f"{settings.gguf_name}."
    # A vocabulary's size stands in some files and is the number of rows of a tensor that is compared anyway.
    wrong += [f"`{key}` is none of the model's" for key in found if key.startswith(own) and key not in wanted]
    end = found.get("tokenizer.ggml.eot_token_id")
    if end is not None and end not in stop_ids:
        wrong.append(f"`tokenizer.ggml.eot_token_id` is {end}, at which training ends no reply")
    for what, digest in digest_of_gguf(found).items():
        if facts.vocabulary.get(what) not in (None, digest):
            wrong.append(f"its {what} are not those of the tokenizer")
    words = "; ".join(wrong[:_SHOWN]) or f"{len(wanted)} fields and the vocabulary as the model has them"
    return Check(name="settings", is_ok=not wrong, words=words, figures={"fields": len(wanted), "wrong": len(wrong)})


def unseen_window(settings: Settings) -> int | None:
    """Give how many tokens back the model sees where llama.cpp lets it see everything; None where both do the same."""
    window, kinds = settings.values.get("sliding_window"), settings.values.get("layer_types")
    is_used = window and (kinds is None or "sliding_attention" in kinds)
    return window if is_used and not settings.spec.get("windows") else None


def sources_of(settings: Settings, sketches: Mapping[str, Sketch]) -> dict[str, str]:
    """Give the trained tensor that each tensor of a file is made of, where it is a single one."""
    tensors = name_tensors(_Known(sketches, settings), settings)
    return {tensor.name: tensor.sources[0] for tensor in tensors if not tensor.is_stacked}


def _wanted(
    settings: Settings, sketches: Mapping[str, Sketch], rounded: Mapping[str, Rows]
) -> dict[str, tuple[Sketch, dict[str, Rows]]]:
    """Bring sketches into llama.cpp's names and its order of rows, tensor for tensor as the writer does.

    With each come the rows that it has in the types in which it was rounded.
    """
    known = _Known(sketches, settings)
    found: dict[str, tuple[Sketch, dict[str, Rows]]] = {
        name: (sketch(torch.from_numpy(np.asarray(table))), {}) for name, table in rope_tables(settings).items()
    }
    kinds = {key.partition("/")[0] for key in rounded}
    for tensor in name_tensors(known, settings):
        own = _as_stored([known.sketches[name] for name in tensor.sources], tensor, settings)
        turn = _turn(settings) if tensor.is_turned else _as_it_is
        rows = {
            kind: turn(rounded[f"{kind}/{tensor.sources[0]}"])
            for kind in kinds
            if f"{kind}/{tensor.sources[0]}" in rounded
        }
        found[tensor.name] = (own, rows)
    return found


def _as_stored(sources: list[Sketch], tensor: NamedTensor, settings: Settings) -> Sketch:
    own = sources[0]
    if tensor.is_stacked:
        # Norms of single heads: every number is kept, so theirs stand one behind the other.
        rows = np.concatenate([source.rows for source in sources])
        own = Sketch((len(rows),), rows, np.abs(rows[:, 0]))
    own = changed(own, _turn(settings)) if tensor.is_turned else own
    return changed(own, lambda rows: rows + 1) if tensor.is_shifted else own


def _turn(settings: Settings) -> Callable[[Rows], Rows]:
    """Make rotary pairs neighbours."""
    half = settings.values["head_dim"] // 2
    return lambda rows: rows.reshape(-1, 2, half, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _as_it_is(rows: Rows) -> Rows:
    return rows


def _pairs(path: Path, wanted: Mapping[str, tuple[Sketch, dict[str, Rows]]]) -> Iterator[Compared]:
    gguf = need("gguf", extra="export", purpose="proving a GGUF file")
    from gguf.quants import dequantize

    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name in wanted:
            numbers = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
            own, rounded = wanted[tensor.name]
            whole = torch.from_numpy(numbers.reshape(own.shape) if numbers.size == np.prod(own.shape) else numbers)
            kind = tensor.tensor_type.name
            yield Compared(tensor.name, kind, own, sketch(whole, own.direction), rounded.get(kind))


def _is_same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, float) and isinstance(found, int | float):
        return bool(np.float32(found) == np.float32(wanted))
    return type(found) is type(wanted) and found == wanted


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
