"""Report the progress of a slow first step at growing intervals, so that it does not look like a hang.

    step 1 is still computing after 40 s: it has computed 5,120 of 81,920 tokens, 128 tokens/s, about 10 m 00 s left

Layers are counted in the first step only. Other steps have no hooks and no thread.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from tunewell.core.units import count, duration
from tunewell.training.compile import decoder_layers
from tunewell.training.events import Note
from tunewell.training.run import Run

_FIRST_SECONDS, _MAX_WAIT_SECONDS = 10.0, 600.0
_PASSES = 3
"""A backward pass takes about as long as two forward passes."""


class SlowStep:
    """Sends notes about the current step after 10, 20, 40, ... seconds, and then every ten minutes."""

    def __init__(self, run: Run, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._is_over = threading.Event()
        self._hooks: list[Any] = []
        self._began, self._activity = 0.0, ""
        self._first, self._done = 0, 0.0
        """Number of tokens before the step, and those of it that are computed."""

    def start(self, activity: str = "computing") -> None:
        """Watch the step that begins now. Layers that are compiled in it have no hooks."""
        self._began, self._activity = self._clock(), activity
        self._first, self._done = self._run.learner.num_done, 0.0
        layers = decoder_layers(self._run.learner.model) if activity == "computing" else []
        for number, layer in enumerate(layers, start=1):
            self._hooks.append(layer.register_forward_hook(partial(self._on_forward, number / len(layers))))
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, args=[self._is_over], daemon=True).start()

    def stop(self) -> None:
        """End the notes, and remove the hooks."""
        self._is_over.set()
        while self._hooks:
            self._hooks.pop().remove()

    def announce(self) -> None:
        """Send a note with the tokens computed so far, the speed and the time left."""
        run, elapsed = self._run, self._clock() - self._began
        step = run.order.step(run.progress.step)
        total = int(run.order.lengths[step.documents].sum())
        self._advance(0)
        done = min(total, round(self._done * run.learner.world.size))
        words = (
            f"step {step.number + 1} is still {self._activity} after {duration(elapsed)}: "
            f"it has computed {count(done)} of {count(total)} tokens"
        )
        if done:
            left = duration(elapsed * (total / done - 1))
            words += f", {count(round(done / elapsed))} tokens/s, about {left} left"
        run.listener(Note(words, is_passing=True))

    def _watch(self, is_over: threading.Event) -> None:
        seconds = _FIRST_SECONDS
        while not is_over.wait(seconds):
            self.announce()
            seconds = min(max(seconds, self._clock() - self._began), _MAX_WAIT_SECONDS)

    def _on_forward(self, share: float, layer: Any, inputs: Any, output: Any) -> None:
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        tokens = hidden.shape[-2]
        self._advance(tokens * share / _PASSES)
        if hidden.requires_grad:  # its gradient arrives when the layers after it are done
            hidden.register_hook(lambda _: self._advance(tokens * (1 - share * (_PASSES - 1) / _PASSES)))

    def _advance(self, tokens: float) -> None:
        """Count tokens of the current micro-batch."""
        self._done = max(self._done, self._run.learner.num_done - self._first + tokens)
