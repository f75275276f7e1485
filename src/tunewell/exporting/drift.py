"""How far apart two models are on the same tokens: logits, the likeliest token, and the whole distribution."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Drift:
    """The differences of one model to another over some positions."""

    positions: int
    largest: float
    """Of any two logits, each row shifted so that its mean is 0: a constant added to a row changes nothing."""
    mean: float
    same_top: float
    """Share of positions with the same likeliest token."""
    near_ties: int
    """Positions with another likeliest token, which the reference has almost as high as its own."""
    kl: float
    """Mean Kullback-Leibler divergence from the reference, in nats."""

    @property
    def wrong_tops(self) -> int:
        """Positions where a token lost that was clearly the likeliest."""
        return round(self.positions * (1 - self.same_top)) - self.near_ties


def drift(reference: Sequence[Logits], found: Sequence[Logits], *, tie: float) -> Drift:
    """Compare the logits of several texts, each [positions, vocabulary]; rows that pad a vocabulary are cut off.

    Two tokens are as good as equal where the reference has them closer than `tie` deviations of its logits there. What
    was found is not asked: the worse it is, the more it would call equal.
    """
    width = min(own.shape[1] for own in (*reference, *found))
    wanted, got = (np.concatenate([part[:, :width] for part in own]).astype(np.float64) for own in (reference, found))
    if not np.isfinite(got).all():
        return Drift(len(wanted), float("inf"), float("inf"), 0.0, 0, float("inf"))
    wanted -= wanted.mean(axis=1, keepdims=True)
    got -= got.mean(axis=1, keepdims=True)
    apart = np.abs(wanted - got)
    every, own, other = np.arange(len(wanted)), wanted.argmax(axis=1), got.argmax(axis=1)
    is_tie = wanted[every, own] - wanted[every, other] < tie * wanted.std(axis=1)
    same = own == other
    log_wanted, log_got = (own - _log_sum(own) for own in (wanted, got))
    kl = (np.exp(log_wanted) * (log_wanted - log_got)).sum(axis=1)
    return Drift(
        positions=len(wanted),
        largest=float(apart.max()),
        mean=float(apart.mean()),
        same_top=float(same.mean()),
        near_ties=int((is_tie & ~same).sum()),
        kl=float(kl.mean()),
    )


def _log_sum(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    top = logits.max(axis=1, keepdims=True)
    return top + np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
