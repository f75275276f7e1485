"""Short names for the types of numpy arrays."""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
SmallInts = npt.NDArray[np.int32]
"""Half the memory of `Ints`, for an entry per document or token."""
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
TokenIds = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]
Hashes = npt.NDArray[np.uint64]
