"""Hand numbers between numpy and Arrow as they lie.

Arrow's own conversions import pandas where it is installed, which takes a second that nobody asked for.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def to_arrow(values: npt.NDArray[np.integer]) -> pa.Array:
    """View a numpy array of whole numbers as an Arrow array, without copying."""
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def to_numpy(values: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
    """View an Arrow array of numbers without gaps as a numpy array; copied only where it lies in several chunks."""
    if isinstance(values, pa.ChunkedArray):
        chunks = [to_numpy(chunk) for chunk in values.chunks]
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
    buffer = values.buffers()[1]
    numbers = np.frombuffer(buffer, dtype=values.type.to_pandas_dtype()) if buffer else np.zeros(0, dtype=np.int32)
    return numbers[values.offset : values.offset + len(values)]
