"""The registry entries of the toy method and the toy optimizers: what they are called, and what they cost. No torch."""

from tunewell.config.extensions import MethodEntry, OptimizerEntry
from tunewell.config.prices import Activations, num_numbers

NORMS = MethodEntry(
    "norms",
    "only the norms",
    "toy_method:NormsOnly",
    "norms only",
    is_adapter=False,
    trains=lambda shape, settings: [(shape.num_other_weights,)],
    activations=Activations(8, 2, 2, 4),
)
DESCENT = OptimizerEntry(
    "descent",
    "plain gradient descent",
    "toy_optimizer:GradientDescent",
    state_bytes=lambda shapes, weight_bytes, settings: 4,
    update_bytes=12.0,
)
MOMENTUM = OptimizerEntry(
    "momentum",
    "gradient descent with the mean of the gradients",
    "toy_optimizer:Momentum",
    state_bytes=lambda shapes, weight_bytes, settings: weight_bytes * num_numbers(shapes),
    update_bytes=20.0,
)
