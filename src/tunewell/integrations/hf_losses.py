"""Which loss a step had: the model's own, unless the trainer's log shows that it trains on another."""

import math

_SHARE, _NATS = 0.05, 1e-3
"""What the two may differ by: a mean over micro-batches is not one over tokens, and logs are rounded."""
_ROUNDING = 1e-4


class TrainedLoss:
    """Holds the losses that a model gives against those that its trainer logs."""

    def __init__(self, *, finished_steps: int) -> None:
        self.is_own = True
        """Whether the model's own loss is the one that is trained on, as far as is known."""
        self.is_sure = False
        """Whether that is known: gradients came back through it, or a log line agreed with it."""
        self._last_logged = finished_steps
        self._since: list[float] = []

    def settle(self, step: int, raw: float | None, logged: float | None) -> float | None:
        """Give the loss of a step: `raw` is the model's own, `logged` the mean of the steps since the last log."""
        if raw is not None:
            self._since.append(raw)
        if logged is None:
            return raw if self.is_own else None
        span, self._last_logged = step - self._last_logged, step
        since, self._since = self._since, []
        if raw is None or not self.is_own:
            return logged
        if not all(map(math.isfinite, since)) or not math.isfinite(logged) or len(since) != span:
            return raw
        mean = sum(since) / span
        difference = abs(mean - logged)
        if difference > _NATS + _SHARE * abs(mean):
            self.is_own = self.is_sure = False
            return logged
        self.is_sure = True
        return logged if span == 1 and difference > _ROUNDING * max(1.0, abs(mean)) else raw
