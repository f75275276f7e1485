"""Random-sign sketches: a few numbers for each row of a tensor that measure how far any other tensor is from it.

The product of a difference d with a vector of random signs has mean 0 and variance |d|^2. So a few products per row
measure |d| without a second copy of the weights:

    tensor [R, C] @ signs [C, 4]  ->  rows [R, 4]        (row - other row) . sign  ~  |row - other row|
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tunewell.methods.base import AdapterLayer, adapter_layers

Rows = npt.NDArray[np.float64]
Rounding = Callable[[Tensor], Tensor]
"""Stores rows in a file's format and reads them back."""
NUM_SIGNS = 4
_SEED = 20_261_115
_NUMBERS_AT_ONCE = 1 << 22
_ROWS, _LENGTHS, _CHANGE, _DIRECTION = "rows/", "lengths/", "change/", "direction/"


@dataclass(frozen=True)
class Sketch:
    """The sketch of one tensor. In a tensor of one dimension every number is a row."""

    shape: tuple[int, ...]
    rows: Rows
    """[R, signs], plus one column if there is a direction. [R, 1] with the values themselves for one dimension."""
    lengths: Rows
    """Euclidean norm of each row: [R]."""
    direction: Rows | None = None
    """The direction in which training changed the rows most, with the norm of a sign vector: [C]."""
    change: Rows | None = None
    """What training added to the last column of `rows`: [R, 1]."""

    def map_rows(self, change: Callable[[Rows], Rows]) -> "Sketch":
        """Return the sketch after a permutation of the rows, or an operation on the values of one dimension."""
        rows = change(self.rows)
        lengths = np.abs(rows[:, 0]) if len(self.shape) < 2 else change(self.lengths[:, None])[:, 0]
        added = None if self.change is None else change(self.change)
        return Sketch(self.shape, rows, lengths, self.direction, added)


def sketch(tensor: Tensor, direction: Rows | None = None, *, rounding: Rounding | None = None) -> Sketch:
    """Sketch a tensor in fp64, some rows at a time; with `rounding`, sketch the rounded tensor."""
    shape = tuple(tensor.shape)
    rows = tensor.detach().reshape(-1, shape[-1] if len(shape) > 1 else 1)
    if len(shape) < 2:
        values = rows.double().numpy(force=True)
        return Sketch(shape, values, np.abs(values[:, 0]))
    vectors = torch.from_numpy(_sign_vectors(shape[-1]))
    if direction is not None and len(direction) == shape[-1]:
        vectors = torch.cat([vectors, torch.from_numpy(direction)[:, None]], dim=1)
    step = max(1, _NUMBERS_AT_ONCE // max(1, rows.shape[1]))
    products, lengths = [], []
    for start in range(0, len(rows), step):
        part = rows[start : start + step].cpu()
        part = (part if rounding is None else rounding(part)).double()
        products.append((part @ vectors).numpy())
        lengths.append(part.norm(dim=1).numpy())
    return Sketch(shape, np.concatenate(products), np.concatenate(lengths))


@torch.no_grad()
def sketch_model(model: PreTrainedModel) -> tuple[dict[str, Sketch], dict[str, str]]:
    """Sketch every weight as it will be after the merge; also return the other names of tied weights.

    The sketch of an adapter is added to the sketch of its layer. The weights are not merged, so that a bug in merging
    cannot hide here.
    """
    adapted = {f"{name}.weight": layer for name, layer in adapter_layers(model).items()}
    sketches: dict[str, Sketch] = {}
    first_names: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, weight in _named_weights(model):
        if id(weight) in first_names:
            tied[name] = first_names[id(weight)]
            continue
        first_names[id(weight)] = name
        sketches[name] = _sketch_merged(weight, adapted[name]) if name in adapted else sketch(weight)
    return sketches, tied


def as_arrays(sketches: Mapping[str, Sketch]) -> dict[str, npt.NDArray[np.float32]]:
    """Return the numbers of sketches under the names they have in a safetensors file."""
    arrays = {}
    for name, own in sketches.items():
        arrays[_ROWS + name] = own.rows.astype(np.float32)
        if len(own.shape) > 1:
            arrays[_LENGTHS + name] = own.lengths.astype(np.float32)
        if own.change is not None and own.direction is not None:
            arrays[_CHANGE + name] = own.change.astype(np.float32)
            arrays[_DIRECTION + name] = own.direction.astype(np.float32)
    return arrays


def from_arrays(arrays: Mapping[str, npt.NDArray[np.float32]], shapes: Mapping[str, list[int]]) -> dict[str, Sketch]:
    """Return the sketches in the arrays of a file; raise KeyError if one is missing."""
    sketches = {}
    for name, shape in shapes.items():
        rows = arrays[_ROWS + name].astype(np.float64)
        lengths = arrays[_LENGTHS + name].astype(np.float64) if len(shape) > 1 else np.abs(rows[:, 0])
        direction, change = (
            arrays[part + name].astype(np.float64) if part + name in arrays else None for part in (_DIRECTION, _CHANGE)
        )
        sketches[name] = Sketch(tuple(shape), rows, lengths, direction, change)
    return sketches


def _sketch_merged(weight: Tensor, layer: AdapterLayer) -> Sketch:
    """Sketch the merged weight: the products of the frozen weight plus those of its change; norms of the sums."""
    direction = _largest_direction(layer)
    base = sketch(weight, direction)
    signs = _sign_vectors(base.shape[-1])
    vectors = torch.from_numpy(signs if direction is None else np.c_[signs, direction])
    step = max(1, _NUMBERS_AT_ONCE // base.shape[-1])
    products, lengths = [], []
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        change = layer.weight_change(rows)
        products.append(change @ vectors)
        lengths.append((weight[rows].cpu().double() + change).norm(dim=1))
    added = torch.cat(products).numpy()
    along_direction = None if direction is None else added[:, -1:]
    return Sketch(base.shape, base.rows + added, torch.cat(lengths).numpy(), direction, along_direction)


def _largest_direction(layer: AdapterLayer) -> Rows | None:
    """Return the input that merging changes most, with the norm of a sign vector; None if nothing changes.

    It is rounded to fp32, as the file stores it, so that later products are the same.
    """
    direction = layer.change_direction()
    return None if direction is None else (direction * len(direction) ** 0.5).float().double().numpy()


def _named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight under its name after the merge; tied weights come under each of their names."""
    for name, weight in model.named_parameters(remove_duplicate=False):
        if name.endswith((".lora_A", ".lora_B")):
            continue
        yield name.replace(".base_layer.", "."), weight


@cache
def _sign_vectors(width: int) -> Rows:
    """Draw the sign vectors. They never change: PCG64 guarantees its stream of raw bits."""
    words = np.random.PCG64([_SEED, width]).random_raw(-(-width * NUM_SIGNS // 64))
    bits = np.unpackbits(np.asarray(words, "<u8").view(np.uint8))[: width * NUM_SIGNS]
    return (bits.reshape(width, NUM_SIGNS) * 2.0 - 1.0).astype(np.float64)
