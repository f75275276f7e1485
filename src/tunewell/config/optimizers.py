"""The optimizers that `train.optimizer` can name: their names, descriptions and import paths.

To add an optimizer, write `training/optimizers/NAME.py` (see `training/optimizers/base.py`) and add one line here.
"""

from typing import Annotated

from tunewell.config.fields import OneOf
from tunewell.core.registry import Entry, Registry

OPTIMIZERS: Registry[Entry] = Registry(
    "optimizer",
    [Entry("adamw", "AdamW, with two fp32 moments for each parameter", "tunewell.training.optimizers.adamw:AdamW")],
)
OptimizerName = Annotated[str, OneOf(OPTIMIZERS)]
