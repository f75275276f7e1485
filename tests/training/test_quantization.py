"""Which layers `method.keep: auto` leaves in 16 bits."""

import pytest
import torch
from lessons import tiny_llama

from tunewell.models.quantized import QuantizedLinear
from tunewell.records.plan import QuantizedBase
from tunewell.training.distributed import World
from tunewell.training.quantization import BaseQuantizer

BASE = QuantizedBase(kind="nf4", keep=[], because="set")


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ({"down_proj": 7.0, "v_proj": 1.0, "up_proj": 3.0}, ["down_proj"]),
        # v_proj is a quarter of the size of o_proj: per byte it costs more, but it is not half of the cost.
        ({"v_proj": 3.0, "o_proj": 4.0}, ["v_proj", "o_proj"]),
        ({"down_proj": 0.004}, []),
        ({}, []),
    ],
)
def test_the_layers_with_the_highest_cost_per_byte_are_kept(costs: dict[str, float], expected: list[str]) -> None:
    """Planted costs by kind: the loss is 1 plus the cost of each kind that is quantised."""
    model = tiny_llama()

    def measure() -> float:
        named = [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]
        return 1 + sum(costs.get(kind, 0.0) for kind in {name.rpartition(".")[2] for name in named})

    quantizer = BaseQuantizer(model, "nf4", torch.device("cpu"), measure)
    found = quantizer.quantize(BASE, is_automatic=True, world=World())
    assert found.keep == expected
    assert found.loss == 1 and found.quantized_loss == pytest.approx(measure())
    kept = {name.rpartition(".")[2] for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    assert kept == {"lm_head", *expected}
