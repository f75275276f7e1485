"""Measure rows that are padded to a fixed length, as other scripts compute them, against packed rows.

Both ways use the same model, method and rows, in turn. Padded rows go through transformers' own forward pass and loss,
with an attention mask. The prediction divides the FLOP of both ways.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from tunewell.data.batches import Numbers, make_batch, micro_batches, spread_evenly
from tunewell.features.profile.ceilings import synchronize
from tunewell.features.profile.trial import linear_flop, useful_flop
from tunewell.models.attention import stock_attention
from tunewell.training.run import Run

_PADDED_ROWS = 2
"""Rows of a padded batch, as in the script that this was written for."""
_PACKED_ROWS = 64
_ROUNDS = 5


class PaddedTimes(NamedTuple):
    """Seconds per row, and the predicted ratio of the two."""

    padded_seconds: float
    packed_seconds: float
    predicted_ratio: float


def measure_padding(run: Run, padded_to: int) -> PaddedTimes:
    """Compute forward and backward passes both ways in turn, and return the time of a row."""
    learner = run.learner
    lengths = run.order.lengths
    # The middle one of each part of the sorted rows, so that the mean length is that of all rows.
    by_length = np.argsort(lengths, kind="stable")
    packed_rows = by_length[spread_evenly(len(lengths), _PACKED_ROWS)]
    padded_rows = by_length[spread_evenly(len(lengths), _PADDED_ROWS + 2)[1:-1]]
    batches = [
        make_batch(run.documents, group)
        for group in micro_batches(packed_rows, lengths, run.plan.micro_batch_tokens.value)
    ]
    inputs = _padded_inputs(run, padded_rows, padded_to)

    def packed() -> None:
        learner.accumulate_gradients(batches, number=0, num_supervised=1)

    def padded() -> None:
        with stock_attention(learner.model), learner.autocast():
            learner.model(**inputs, use_cache=False).loss.backward()

    learner.model.train()
    times: dict[str, list[float]] = {"padded": [], "packed": []}
    before = learner.num_computed
    packed()
    computed = learner.num_computed - before
    padded()
    for _ in range(_ROUNDS):
        times["padded"].append(_seconds(padded, run))
        times["packed"].append(_seconds(packed, run))
    num_tokens = sum(batch.num_tokens for batch in batches)
    saved = linear_flop(learner.model).per_token * (num_tokens - computed)  # a shared prefix is computed once
    packed_flop = sum(useful_flop(learner.model, batch) for batch in batches) - saved
    return PaddedTimes(
        statistics.median(times["padded"]) / len(padded_rows),
        statistics.median(times["packed"]) / len(packed_rows),
        padded_flop(run, padded_to) / (packed_flop / len(packed_rows)),
    )


def padded_flop(run: Run, padded_to: int) -> float:
    """Return the FLOP of one padded row: all positions pass the head, and attention computes masked pairs too."""
    flop = linear_flop(run.learner.model)
    return flop.per_token * padded_to + flop.per_row * padded_to + flop.per_pair * padded_to**2


def _padded_inputs(run: Run, documents: Numbers, padded_to: int) -> dict[str, Any]:
    shape = (len(documents), padded_to)
    ids, labels, mask = np.zeros(shape, np.int64), np.full(shape, -100, np.int64), np.zeros(shape, np.int64)
    for row, document in enumerate(documents):
        own_ids, own_labels = (values[:padded_to] for values in run.documents.arrays(int(document)))
        ids[row, : len(own_ids)], labels[row, : len(own_ids)], mask[row, : len(own_ids)] = own_ids, own_labels, 1
    tensors = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    return {name: torch.from_numpy(values).to(run.learner.device) for name, values in tensors.items()}


def _seconds(act: Callable[[], None], run: Run) -> float:
    synchronize(run.learner.device)
    started = time.perf_counter()
    act()
    synchronize(run.learner.device)
    seconds = time.perf_counter() - started
    run.learner.drop_gradients()
    return seconds
