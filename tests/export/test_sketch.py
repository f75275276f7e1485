"""Sketches measure how far two tensors are apart, row by row, and how much of what was trained is there."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from tunewell.export.proof import tensors
from tunewell.export.proof.checks import compare_logits
from tunewell.export.proof.tensors import (
    Compared,
    Sketch,
    as_arrays,
    check_tensors,
    compare_weights,
    from_arrays,
    sketch,
)
from tunewell.records.parity import Check

draw = torch.Generator().manual_seed(0)


def _stored(whole: torch.Tensor, kind: str) -> torch.Tensor:
    """Round a tensor as a file does."""
    if kind in ("F32", "BF16", "F16"):
        return whole.to({"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[kind]).float()
    own = GGMLQuantizationType[kind]
    return torch.from_numpy(dequantize(quantize(whole.numpy(), own), own))


def _check(whole: torch.Tensor, found: torch.Tensor, kind: str) -> tuple[bool, str]:
    """Compare a tensor that was stored with what was to be stored, as the proof of a GGUF does."""
    rounded = None if kind in ("F32", "F16", "BF16") else sketch(whole, rounding=lambda rows: _stored(rows, kind)).rows
    pair = Compared("model.layers.3.x.weight", kind, sketch(whole), sketch(found), rounded)
    check = check_tensors([pair], missing=(), unknown=())
    return check.is_ok, check.words


SIGNS = [[1, -1, 1, 1], [1, 1, 1, -1], [-1, 1, -1, 1], [1, -1, 1, 1]]
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q5_0", "Q5_1")
SHAPES: dict[str, Callable[[], torch.Tensor]] = {
    "bell-shaped": lambda: torch.randn(96, 256, generator=draw) * 0.02,
    "one number in each block stands out": lambda: (
        torch.randn(64, 256, generator=draw) + 1e3 * (torch.arange(256) % 32 == 5)
    ),
    "rows of all sizes": lambda: torch.randn(64, 256, generator=draw) * torch.logspace(-7, 1, 64)[:, None],
    "half of it nothing": lambda: torch.randn(64, 256, generator=draw) * (torch.arange(64)[:, None] % 2),
    "nothing at all": lambda: torch.zeros(32, 64),
    "one row": lambda: torch.randn(1, 32, generator=draw),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_only_rounded_passes(kind: str, shape: str) -> None:
    for _ in range(5):
        whole = SHAPES[shape]()
        is_ok, words = _check(whole, _stored(whole, kind), kind)
        assert is_ok, words


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_more_than_rounded_does_not(kind: str) -> None:
    whole = torch.randn(512, 256, generator=draw)
    swapped = whole.clone()
    swapped[[7, 8]] = swapped[[8, 7]]
    wrong = [
        whole * 1.03,
        whole.flip(0),
        whole.flip(1),
        whole * 0,
        whole + 0.3,
        swapped,
        whole.mul(torch.tensor([-1.0])),
    ]
    for other in wrong:
        assert not _check(whole, _stored(other, kind), kind)[0]
    assert not _check(whole, torch.full_like(whole, torch.nan), kind)[0]
    assert not _check(whole, whole[:-1], kind)[0]


@pytest.mark.parametrize("strength", [0.0, 0.5, 0.8, 0.9, 1.2])
@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "Q5_0"])
def test_a_weaker_adapter_is_seen_through_rounding_that_is_larger_than_all_of_it(kind: str, strength: float) -> None:
    """SmolLM2's q8_0 at 0.8 and its q4_k_m at half strength were once within the bounds of logits."""
    assert _changed(kind, 1.0).is_ok
    check = _changed(kind, strength)
    told = check.figures["strength"]  # None where single tensors are too far off to be asked
    assert not check.is_ok and (told is None or abs(told - strength) < 0.05), check.words


def test_a_change_that_rounding_takes_back_is_told_and_is_no_fault() -> None:
    """A quantised base lies on a grid already, and what training added falls back to it in a file of as few bits."""
    healthy = _changed("Q5_0", 1.0, is_on_grid=True)
    assert healthy.is_ok and healthy.figures["strength"] < 0.5, healthy
    assert not _changed("Q5_0", 0.8, is_on_grid=True).is_ok


def _changed(kind: str, strength: float, *, is_on_grid: bool = False) -> Check:
    """Compare layers whose change has another strength than was trained."""
    pairs = []
    for layer in range(6):
        base = torch.randn(192, 256, generator=draw)
        base = _stored(base, kind) if is_on_grid else base
        change = torch.randn(192, 4, generator=draw) @ torch.randn(4, 256, generator=draw) * 0.01
        direction = np.linalg.svd(change.numpy().astype(np.float64), full_matrices=False)[2][0] * 16
        plain = sketch(base + change, direction)
        wanted = Sketch(plain.shape, plain.rows, plain.lengths, direction, sketch(change, direction).rows[:, -1:])
        found, rounded = (sketch(_stored(base + own * change, kind), direction) for own in (strength, 1.0))
        pairs.append(Compared(f"model.layers.{layer}.x.weight", kind, wanted, found, rounded.rows))
    return check_tensors(pairs, missing=(), unknown=())


def test_tensors_must_be_there_and_known() -> None:
    pair = Compared("a", "F32", sketch(torch.ones(2, 3)), sketch(torch.ones(2, 3)))
    assert check_tensors([pair], missing=(), unknown=()).is_ok
    assert "`b` is missing" in check_tensors([pair], missing=["b"], unknown=()).words
    assert not check_tensors([pair], missing=(), unknown=["b"]).is_ok
    assert not check_tensors([], missing=(), unknown=()).is_ok


def test_a_sketch_comes_back_from_a_file_and_follows_its_rows() -> None:
    whole = torch.randn(8, 64, generator=draw)
    own = sketch(whole)
    again = from_arrays(as_arrays({"w": own, "b": sketch(whole[0])}), {"w": [8, 64], "b": [64]})
    np.testing.assert_allclose(again["w"].rows, own.rows, rtol=1e-6)
    np.testing.assert_allclose(again["b"].rows[:, 0], whole[0].numpy(), rtol=1e-6)
    turned = own.map_rows(lambda rows: rows[::-1])
    np.testing.assert_allclose(turned.rows, sketch(whole.flip(0)).rows)
    # The same signs for ever: files made today are proven in years.
    np.testing.assert_array_equal(sketch(torch.eye(4)).rows, SIGNS)


def test_a_near_tie_is_one_in_the_reference_and_not_in_what_was_found() -> None:
    """The wider a broken model strays, the more positions were once called ties: one with no token right passed."""
    wanted = np.zeros((4, 100), np.float32)
    wanted[:, 0], wanted[:, 1], wanted[:, 2] = 5, 4.999, 1
    close, far = wanted.copy(), wanted.copy()
    close[:, 1] += 0.01
    far[:, 2] += 50
    found = compare_logits([wanted], [close], tie=0.05)
    assert (found.same_top, found.near_ties, found.wrong_tops) == (0.0, 4, 0)
    assert compare_logits([wanted], [far], tie=0.05).wrong_tops == 4


def test_tensors_keep_their_names_on_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests allow one thread, so an order that depends on which thread ends first would show only on other machines."""
    weights = {f"{index}.weight": torch.randn(8 * (9 - index), 64, generator=draw) for index in range(8)}
    trained = {name: sketch(weight) for name, weight in weights.items()}
    before = torch.get_num_threads()
    monkeypatch.setattr(tensors, "useful_threads", lambda: [1, 4])
    pairs = list(compare_weights(weights, trained, "F32"))
    assert [pair.name for pair in pairs] == list(weights) and torch.get_num_threads() == before
    assert all(np.array_equal(pair.found.rows, trained[pair.name].rows) for pair in pairs)
