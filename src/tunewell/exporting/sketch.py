"""Remember a tensor by a few numbers of each row, enough to measure how far any other tensor is from it.

Each row is multiplied by a few vectors of random signs. The same done to another tensor, the differences of the
products are drawn around 0 with the length of the difference of the rows: so the error of every row, and of the whole,
can be measured later without a second copy of the weights. A row of 4,096 numbers is kept in 20 bytes.

What training adds beside a layer is smaller than what four bits round away, and is lost among random signs. So such a
tensor is also multiplied by the one direction in which training changed it most, where it can be told from rounding.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tunewell.models.lora import LoraLinear

Rows = npt.NDArray[np.float64]
Rounding = Callable[[Tensor], Tensor]
"""Stores rows as a file does, and reads them again."""
NUM_SIGNS = 4
_SEED = 20_261_115
_NUMBERS_AT_ONCE = 1 << 22
_ROWS, _LENGTHS, _CHANGE, _DIRECTION = "rows/", "lengths/", "change/", "direction/"


@dataclass(frozen=True)
class Sketch:
    """One tensor, row by row; of a tensor of one dimension every number is a row."""

    shape: tuple[int, ...]
    rows: Rows
    """[R, signs], with one column more where there is a direction; [R, 1] with the numbers themselves where the tensor
    has one dimension."""
    lengths: Rows
    """Of each row: [R]."""
    direction: Rows | None = None
    """In which training changed the rows most, as long as a vector of signs: [C]."""
    change: Rows | None = None
    """What training put into the last column of `rows`: [R, 1]."""


def sketch(whole: Tensor, direction: Rows | None = None, *, rounding: Rounding | None = None) -> Sketch:
    """Make the sketch of a tensor, in fp64, some rows at a time; with `rounding`, of what that makes of it."""
    shape = tuple(whole.shape)
    rows = whole.detach().reshape(-1, shape[-1] if len(shape) > 1 else 1)
    if len(shape) < 2:
        values = rows.double().numpy(force=True)
        return Sketch(shape, values, np.abs(values[:, 0]))
    signs = torch.from_numpy(_signs(shape[-1]))
    if direction is not None and len(direction) == shape[-1]:
        signs = torch.cat([signs, torch.from_numpy(direction)[:, None]], dim=1)
    step = max(1, _NUMBERS_AT_ONCE // max(1, rows.shape[1]))
    products, lengths = [], []
    for start in range(0, len(rows), step):
        part = rows[start : start + step].cpu()
        part = (part if rounding is None else rounding(part)).double()
        products.append((part @ signs).numpy())
        lengths.append(part.norm(dim=1).numpy())
    return Sketch(shape, np.concatenate(products), np.concatenate(lengths))


@torch.no_grad()
def sketches_of(model: PreTrainedModel) -> tuple[dict[str, Sketch], dict[str, str]]:
    """Sketch every weight of a model as it will be once merged; also give second names of tensors, by their first.

    What lies beside a layer is added to its sketch and not to its weights, so a fault in merging cannot hide here.
    """
    beside = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    found: dict[str, Sketch] = {}
    names: dict[int, str] = {}
    twins: dict[str, str] = {}
    for name, weight in _weights(model):
        if id(weight) in names:
            twins[name] = names[id(weight)]
            continue
        names[id(weight)] = name
        found[name] = _with_change(weight, beside[name]) if name in beside else sketch(weight)
    return found, twins


def as_arrays(sketches: Mapping[str, Sketch]) -> dict[str, npt.NDArray[np.float32]]:
    """Name the numbers of sketches for a file."""
    found = {}
    for name, own in sketches.items():
        found[_ROWS + name] = own.rows.astype(np.float32)
        if len(own.shape) > 1:
            found[_LENGTHS + name] = own.lengths.astype(np.float32)
        if own.change is not None and own.direction is not None:
            found[_CHANGE + name] = own.change.astype(np.float32)
            found[_DIRECTION + name] = own.direction.astype(np.float32)
    return found


def from_arrays(arrays: Mapping[str, npt.NDArray[np.float32]], shapes: Mapping[str, list[int]]) -> dict[str, Sketch]:
    """Take sketches out of the arrays of a file; raises KeyError where one is missing."""
    found = {}
    for name, shape in shapes.items():
        rows = arrays[_ROWS + name].astype(np.float64)
        lengths = arrays[_LENGTHS + name].astype(np.float64) if len(shape) > 1 else np.abs(rows[:, 0])
        direction, change = (
            arrays[part + name].astype(np.float64) if part + name in arrays else None for part in (_DIRECTION, _CHANGE)
        )
        found[name] = Sketch(tuple(shape), rows, lengths, direction, change)
    return found


def changed(own: Sketch, change: Callable[[Rows], Rows]) -> Sketch:
    """Put the rows of a sketch in another order, or change numbers that are kept whole."""
    rows = change(own.rows)
    lengths = np.abs(rows[:, 0]) if len(own.shape) < 2 else change(own.lengths[:, None])[:, 0]
    return Sketch(own.shape, rows, lengths, own.direction, None if own.change is None else change(own.change))


def _with_change(weight: Tensor, module: LoraLinear) -> Sketch:
    """Sketch W + BA: its products are those of W and of BA, its lengths those of the rows themselves."""
    a, b = module.lora_A.double().cpu(), module.lora_B.double().cpu() * module.scale
    direction = _most_changed(a, b)
    base = sketch(weight, direction)
    vectors = _signs(base.shape[-1]) if direction is None else np.c_[_signs(base.shape[-1]), direction]
    change = (b @ (a @ torch.from_numpy(vectors))).numpy()
    step = max(1, _NUMBERS_AT_ONCE // base.shape[-1])
    lengths = [
        (weight[start : start + step].cpu().double() + b[start : start + step] @ a).norm(dim=1)
        for start in range(0, len(weight), step)
    ]
    rows, lasts = base.rows + change, None if direction is None else change[:, -1:]
    return Sketch(base.shape, rows, torch.cat(lengths).numpy(), direction, lasts)


def _most_changed(a: Tensor, b: Tensor) -> Rows | None:
    """Give the direction in which B A is largest, as long as a vector of signs; None where it is nothing.

    Rounded as a file keeps it, so that the products are the same when they are made again.
    """
    across, rest = torch.linalg.qr(a.T)
    _, sizes, turns = torch.linalg.svd(b @ rest.T, full_matrices=False)
    if not sizes.numel() or not float(sizes[0]):
        return None
    return (across @ turns[0] * a.shape[1] ** 0.5).float().double().numpy()


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Name every weight as it will be called once nothing lies beside it; tied ones come under each of their names."""
    for name, weight in model.named_parameters(remove_duplicate=False):
        if name.endswith((".lora_A", ".lora_B")):
            continue
        yield name.replace(".base_layer.", "."), weight


@cache
def _signs(width: int) -> Rows:
    """Draw vectors of signs, the same for ever: the bits of PCG64, whose stream is part of its name."""
    words = np.random.PCG64([_SEED, width]).random_raw(-(-width * NUM_SIGNS // 64))
    bits = np.unpackbits(np.asarray(words, "<u8").view(np.uint8))[: width * NUM_SIGNS]
    return (bits.reshape(width, NUM_SIGNS) * 2.0 - 1.0).astype(np.float64)
