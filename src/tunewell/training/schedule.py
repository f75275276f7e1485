"""The learning rate at each optimizer step: a pure function of the step's number."""

import math
from typing import Literal

Schedule = Literal["cosine", "linear", "constant"]


def rate_at(
    step: int, *, num_steps: int, warmup_steps: int, peak: float, schedule: Schedule, min_share: float = 0.0
) -> float:
    """Give the learning rate of the update number `step`, counted from 0.

        warmup_steps = 3, num_steps = 8, linear to 0
        step    0    1    2    3    4    5    6    7   (8)
        share  1/3  2/3   1    1   4/5  3/5  2/5  1/5  (0)

    The warm-up begins at 1/warmup_steps and not at zero, so that no update is for nothing; from its end on the rate is
    that of transformers' schedule of the same name. The last update is one stride above the floor `min_share * peak`,
    which a step after the last would have: `peak / (num_steps - warmup_steps)` above it on a line.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    # Not beyond the end: a cosine would rise again.
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress
    return peak * (min_share + (1.0 - min_share) * left)
