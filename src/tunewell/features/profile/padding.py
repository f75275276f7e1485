"""Count the padding of a training script that pads every row to a fixed length; no torch."""

import numpy as np
import numpy.typing as npt

from tunewell.core.errors import UserError
from tunewell.core.units import percent
from tunewell.features.profile.records import Padding

_BATCH_ROWS = 8
"""Rows per batch for the comparison with padding to the longest row of a batch: the default of transformers."""
_LITTLE = 0.1


def count_padding(lengths: npt.NDArray[np.int64], padded_to: int) -> Padding:
    """Return the padding of rows of these lengths. Batches are drawn at random, with a fixed seed."""
    if not len(lengths):
        raise UserError("there are no rows to count", fix="look at the file with `tunewell inspect FILE`")
    kept = np.minimum(lengths, padded_to)
    shuffled = np.random.default_rng(0).permutation(kept)
    batches = [shuffled[at : at + _BATCH_ROWS] for at in range(0, len(shuffled), _BATCH_ROWS)]
    return Padding(
        padded_to=padded_to,
        rows=len(lengths),
        truncated_rows=int((lengths > padded_to).sum()),
        tokens=int(kept.sum()),
        mean=float(lengths.mean()),
        median=float(np.median(lengths)),
        percentile_95=float(np.percentile(lengths, 95)),
        longest=int(lengths.max()),
        batch_rows=_BATCH_ROWS,
        longest_in_batch_tokens=int(sum(len(batch) * int(batch.max()) for batch in batches)),
    )


def padding_verdict(padding: Padding, rows: str) -> str:
    """Return the verdict in one sentence: the share of padding, what to change, and the work that it saves."""
    share = percent(padding.share, 0)
    if padding.share < _LITTLE:
        return f"{share} of the tokens are padding: packing saves little."
    batch = padding.padded_tokens / padding.longest_in_batch_tokens
    return (
        f"{share} of the computed tokens are padding: {padding.work:.1f} times too much work. Pack the rows "
        f"(`tunewell train --data {rows}`), or pad to the longest row of a batch "
        f'(`padding="longest"`, {batch:.1f} times less work).'
    )
