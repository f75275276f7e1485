"""Inputs of layers in main memory, with a stand-in for the CUDA stream whose copies run as late as they may."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tunewell.training import memory
from tunewell.training.offload import Offloader

COPY, TO = Tensor.copy_, Tensor.to


class LateStream:
    """Runs its copies only when the main stream waits for it."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.waiting: list[Callable[[], Any]] = []

    def wait_stream(self, other: "LateStream") -> None:
        while other.waiting:
            other.waiting.pop(0)()


@pytest.fixture
def offloader(monkeypatch: pytest.MonkeyPatch) -> Offloader:
    main, active = LateStream(), list[LateStream]()

    @contextmanager
    def on_stream(stream: LateStream) -> Iterator[None]:
        active.append(stream)
        yield
        active.pop()

    def copy(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not active:
            return COPY(self, source)
        active[-1].waiting.append(lambda: COPY(self, source))
        return self

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not active:
            return TO(self, *args, **kwargs)
        arriving = torch.full_like(self, float("nan"))
        active[-1].waiting.append(lambda: COPY(arriving, self))
        return arriving

    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: main)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(Tensor, "copy_", copy)
    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(memory, "_pinned", lambda size: torch.full((size,), 255, dtype=torch.uint8))
    monkeypatch.setattr(memory, "_BLOCK_BYTES", 1 << 12)
    own: Any = Offloader(torch.device("cpu"))
    own._stream = LateStream()
    gradients()
    return own


LAYERS = [nn.Linear(8, 8) for _ in range(5)]


def loss(x: Tensor, offloader: Offloader | None = None) -> Tensor:
    for layer in LAYERS:
        x = torch.tanh(layer(x)) if offloader is None else offloader.run(lambda h, own=layer: torch.tanh(own(h)), x)
    return x.pow(2).sum()


def gradients() -> list[Tensor]:
    found = [layer.weight.grad for layer in LAYERS]
    for layer in LAYERS:
        layer.zero_grad(set_to_none=True)
    return [grad for grad in found if grad is not None]


def test_memory_of_the_last_micro_batch_is_used_again_and_gradients_stay_the_same(offloader: Offloader) -> None:
    """Also after forward passes without a backward pass, some of which are freed only later."""
    draw = random.Random(0)

    def batch() -> Tensor:
        return torch.randn(draw.randint(1, 90), 8)

    abandoned = None
    for _ in range(100):
        x = batch()
        loss(x).backward()
        wanted = gradients()
        if draw.random() < 0.2:
            abandoned = loss(batch(), offloader)
        elif draw.random() < 0.5:
            abandoned = None
        loss(x, offloader).backward()
        torch.testing.assert_close(gradients(), wanted, rtol=0, atol=0)
    del abandoned
    num_blocks = len(offloader._pinned._blocks)
    for _ in range(20):
        loss(batch(), offloader).backward()
    assert len(offloader._pinned._blocks) == num_blocks


def test_a_second_graph_keeps_its_inputs_while_a_third_is_computed(offloader: Offloader) -> None:
    first, second, third = torch.randn(4, 8), torch.randn(4, 8), torch.randn(16, 8)
    loss(second).backward()
    wanted = gradients()
    a, b = loss(first, offloader), loss(second, offloader)
    a.backward()
    gradients()
    c = loss(third, offloader)
    b.backward()
    torch.testing.assert_close(gradients(), wanted, rtol=0, atol=0)
    del c
