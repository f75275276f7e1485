"""Tiny models and documents that tests of training share."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tunewell.config.extensions import METHODS
from tunewell.config.schema import MethodSettings, Train
from tunewell.data.batches import MicroBatch, make_batch, micro_batches
from tunewell.methods.base import trainable_parameters
from tunewell.models import attention
from tunewell.models.quantized import quantize_model
from tunewell.records.plan import QuantizedBase
from tunewell.training.step import TrainableModel

VOCABULARY = 131
# Models this small gain nothing from a second thread, and wait for it on a busy machine.
torch.set_num_threads(1)


class RandomDocuments:
    """Documents of random ids; the first third of each is given, the rest is learned."""

    def __init__(self, number: int = 24, *, longest: int = 40, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        self.rows = []
        for _ in range(number):
            ids = draw.integers(0, VOCABULARY, int(draw.integers(3, longest + 1))).astype(np.int32)
            labels = ids.copy()
            labels[: max(1, len(ids) // 3)] = -100
            self.rows.append((ids, labels))
        self.index: dict[str, Any] = {
            "length": np.array([len(ids) for ids, _ in self.rows]),
            "supervised": np.array([int((labels != -100).sum()) for _, labels in self.rows]),
        }

    def __len__(self) -> int:
        return len(self.rows)

    def arrays(self, index: int) -> tuple[Any, Any]:
        return self.rows[index]

    def batches(self, chosen: Sequence[int], budget: int) -> list[MicroBatch]:
        lengths = self.index["length"].astype(np.int64)
        return [make_batch(self, group) for group in micro_batches(np.asarray(chosen), lengths, budget)]


def tiny_llama(*, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A Llama of some 40,000 parameters with our attention."""
    attention.register()
    torch.manual_seed(seed)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**shape, **changes}))
    model.set_attn_implementation(attention.SDPA)
    return model.eval()


def lora_learner(
    model: PreTrainedModel | None = None,
    *,
    train: Train | None = None,
    method: MethodSettings | None = None,
    **more: Any,
) -> TrainableModel:
    """A tiny model with an adapter whose B is not zero, so that every gradient is there to be seen."""
    model, method = model or tiny_llama(), method or MethodSettings(rank=4, alpha=8)
    quantize(model, method)
    METHODS.load(method.kind).apply(model, method, seed=1)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in trainable_parameters(model).items():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.1)
    return TrainableModel(model, "fp32", 40, settings=train or Train(), **more)


def quantize(model: PreTrainedModel, method: MethodSettings) -> None:
    """Quantise a model as `method.quantize` says."""
    if method.quantize != "none":
        quantize_model(model, QuantizedBase(kind=method.quantize), torch.device("cpu"))


def gradients(learner: TrainableModel) -> dict[str, torch.Tensor]:
    """Take the gradients away and give them."""
    found = {name: p.grad.clone() for name, p in learner.parameters.items() if p.grad is not None}
    learner.model.zero_grad(set_to_none=True)
    return found


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The relative Frobenius distance."""
    return float((a - b).norm() / b.norm().clamp_min(1e-12))
