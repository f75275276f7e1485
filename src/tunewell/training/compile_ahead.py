"""Fill torch's compile cache in a second process, while the run trains uncompiled.

The description comes from `compile.py`, on stdin. The process builds a model with the first layers of the run's model
and random weights, compiles it for the same shape and takes a few steps. The run then finds the code in the cache.
"""

import os
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tunewell.config.extensions import METHODS
from tunewell.config.schema import Config
from tunewell.core.child import answer
from tunewell.data.batches import FixedShape, MicroBatch
from tunewell.models import attention
from tunewell.models.support import head_shape
from tunewell.records.plan import Plan
from tunewell.training.compile import CompileTimes, compile_model, save_measured
from tunewell.training.step import TrainableModel

_NUM_STEPS = 3
"""CUDA graphs are recorded in the second step and replayed in the third."""
_NICENESS = 5


def compile_ahead(description: dict[str, Any]) -> None:
    """Build the described model, compile it and take a few steps."""
    attention.register()
    plan, settings = Plan.model_validate(description["plan"]), Config.model_validate(description["config"])
    config = CONFIG_MAPPING[description["model"]["model_type"]].from_dict(description["model"])
    with torch.device(plan.device.value):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, description["dtype"]), attn_implementation=attention.FLASH
        )
    if plan.quantized is not None:
        from tunewell.models.quantized import quantize_model

        quantize_model(model, plan.quantized, model.device)
    METHODS.load(plan.method.value).apply(model, settings.method, seed=0)
    learner = TrainableModel(
        model,
        plan.precision.value,
        description["longest"],
        settings=settings.train,
        head=head_shape(model),
        may_use_graphs=description["may_use_graphs"],
    )
    if description["is_recomputing"]:
        learner.recompute("on" if settings.train.recompute == "off" else settings.train.recompute)
    compile_model(learner, FixedShape(**description["shape"]))
    ids = np.arange(8) % config.vocab_size
    batch = MicroBatch(
        input_ids=ids,
        position_ids=ids,
        lengths=(len(ids),),
        rows=ids[:-1],
        targets=ids[1:],
        documents=(0,),
        num_tokens=len(ids),
    )
    for number in range(_NUM_STEPS):
        learner.take_step([batch], number=number, rate=0.0).read()
    # The run may have ended before; a later one finds the entry, and replaces it with what it measures.
    save_measured(description["signature"], CompileTimes())


if __name__ == "__main__":
    os.nice(_NICENESS)
    answer(lambda description, _: compile_ahead(description))
