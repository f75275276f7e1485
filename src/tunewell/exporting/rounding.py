"""Round tensors as GGUF files do, apart from those who write them, to know what a healthy file looks like.

A tensor that lay on a grid already, as those of a quantised base do, is not rounded at random: a small change may be
rounded back to where it came from. That is no fault, and only rounding the trained tensor itself tells it from one.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tunewell.core.gguf import read_tensor_table
from tunewell.core.need import need
from tunewell.exporting.gguf_checks import sources_of
from tunewell.exporting.gguf_settings import Settings
from tunewell.exporting.llama_cpp import find_llama
from tunewell.exporting.sketch import Rounding, Rows, Sketch, sketch

_PLAIN = frozenset({"F32", "F16", "BF16"})
# Those that the `gguf` package can make by itself.
_BY_PYTHON = frozenset({"Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"})


def round_as(
    files: Iterable[Path], model: PreTrainedModel, settings: Settings, sketches: Mapping[str, Sketch]
) -> dict[str, Rows]:
    """Give the rows of the sketches that the tensors of these files should have, by `type/tensor`.

    The model is the merged one. Types for which neither the `gguf` package nor llama.cpp's library lends its arithmetic
    are left out.
    """
    gguf = need("gguf", extra="export", purpose="proving a GGUF file")
    known = sources_of(settings, sketches)
    weights = dict(model.named_parameters())
    found: dict[str, Rows] = {}
    for path in files:
        for entry in read_tensor_table(path):
            kind, source = gguf.GGMLQuantizationType(entry.type_number).name, known.get(entry.name)
            key = f"{kind}/{source}"
            if source is None or source not in weights or kind in _PLAIN or key in found:
                continue
            if (rounding := _rounding(kind)) is not None:
                found[key] = sketch(weights[source], sketches[source].direction, rounding=rounding).rows
    return found


def _rounding(kind: str) -> Rounding | None:
    import gguf
    from gguf.quants import dequantize, quantize

    own = gguf.GGMLQuantizationType[kind]
    if kind in _BY_PYTHON:
        return lambda rows: torch.from_numpy(dequantize(quantize(_numbers(rows), own), own))
    calls = find_llama().calls
    if not calls.has_all("ggml_quantize_chunk"):
        return None

    def by_library(rows: Tensor) -> Tensor:
        numbers = _numbers(rows)
        block, size = gguf.GGML_QUANT_SIZES[own]
        made = np.empty((len(numbers), math.prod(numbers.shape[1:]) // block * size), np.uint8)
        order: tuple[Any, ...] = (numbers.ctypes.data, made.ctypes.data, 0, *numbers.shape, None)
        num = calls.do.ggml_quantize_chunk(int(own), *order)
        assert num == made.nbytes, f"llama.cpp wrote {num} bytes and not {made.nbytes}"
        return torch.from_numpy(np.asarray(dequantize(made, own), np.float32))

    return by_library


def _numbers(rows: Tensor) -> np.ndarray:
    return np.ascontiguousarray(rows.float().numpy())
