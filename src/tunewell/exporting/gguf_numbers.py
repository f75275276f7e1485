"""Choose how a tensor's numbers are stored in a GGUF file, and store them a few rows at a time."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, Literal

import numpy as np
import torch
from torch import Tensor

from tunewell.core.errors import UserError
from tunewell.core.need import need

GgufKind = Literal["f32", "f16", "bf16", "q8_0"]

# The largest number of half precision, and how many steps Q8_0 has from 0 to the largest of a block.
_LARGEST_HALF, _STEPS = 65504.0, 127
# Numbers brought into another form at once: 4 MiB in fp32.
_NUMBERS_AT_ONCE = 1 << 20


def storage_type(name: str, shape: tuple[int, ...], kind: GgufKind) -> Any:
    """Choose a tensor's type: norms and everything of one dimension stay fp32, rows that fill no block become f16."""
    gguf = need("gguf", extra="export", purpose="writing a GGUF file")
    types = gguf.GGMLQuantizationType
    if len(shape) < 2 or name.endswith("_norm.weight") or not name.endswith(".weight"):
        return types.F32
    wanted = types[kind.upper()]
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    return wanted if shape[-1] % block == 0 else types.F16


def num_bytes(shape: tuple[int, ...], kind: Any) -> int:
    """Count the bytes of a tensor in a file."""
    gguf = need("gguf", extra="export", purpose="writing a GGUF file")
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return math.prod(shape) // block * size


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is made when it is written: the part of an array that a GGUFWriter asks for."""

    source: str
    """Its name in the model's files."""
    shape: tuple[int, ...]
    kind: Any
    nbytes: int
    load: Callable[[], Tensor]

    def tofile(self, file: IO[bytes]) -> None:
        """Write the tensor, some rows at a time; raise UserError where a number is not finite or does not fit."""
        from gguf.quants import quantize

        whole = self.load()
        rows = whole.reshape(-1, whole.shape[-1])
        step = max(1, _NUMBERS_AT_ONCE // max(1, rows.shape[1]))
        written = 0
        for start in range(0, len(rows), step):
            part = rows[start : start + step].to(torch.float32).numpy()
            self._check(part)
            # Blocks stand for themselves and rows are whole blocks, so one long row saves going through 16 at a time.
            written += file.write(quantize(part.reshape(1, -1), self.kind).tobytes())
        assert written == self.nbytes, f"{self.source}: {written} bytes, not {self.nbytes}"

    def _check(self, part: np.ndarray) -> None:
        largest = float(np.abs(part).max(initial=0.0))
        if not math.isfinite(largest):
            raise UserError(
                f"the tensor `{self.source}` holds a number that is not finite",
                fix="the model is broken: export an earlier checkpoint",
            )
        limit = {"F16": _LARGEST_HALF, "Q8_0": _LARGEST_HALF * _STEPS}.get(self.kind.name, math.inf)
        if largest > limit:
            raise UserError(
                f"the tensor `{self.source}` holds {largest:,.0f}, and {self.kind.name} ends at {limit:,.0f}",
                fix="export it as bf16 or f32",
            )
