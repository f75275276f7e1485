"""The work of a run in numbers: the model's shape, what is trained, and the tokens of a step."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from tunewell.config.extensions import METHODS, OPTIMIZERS, MethodEntry
from tunewell.config.prices import Shape, num_numbers
from tunewell.config.schema import Config
from tunewell.core.arrays import Ints as Lengths
from tunewell.data.batches import DataOrder, micro_batches
from tunewell.machine.facts import DeviceFacts
from tunewell.model_files.shape import Linear, ModelShape
from tunewell.records.plan import Plan
from tunewell.scoring.questions import Measure

_SAMPLED_STEPS = 64
EVERYDAY_TOKENS = 3_300
"""Tokens of the everyday text that the verdict evaluates with both models; 11,800 with one token per byte."""


@dataclass(frozen=True)
class Workload:
    """A planned run in the numbers on which its memory and time depend."""

    shape: ModelShape
    config: Config
    plan: Plan
    device: DeviceFacts
    lengths: Lengths
    """Tokens of each training document."""
    step_lengths: tuple[Lengths, ...]
    """Lengths of the documents of some steps."""
    supervised_share: float
    held_out_lengths: Lengths
    """Tokens of each held-out document, which the verdict reads."""
    micro_tokens: int
    """Limit of a micro-batch in tokens."""
    everyday_tokens: int = EVERYDAY_TOKENS
    selection_lengths: Lengths = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Tokens of each document of the selection slice."""
    measure: Measure | None = None
    """The questions of the slice, if their answers can be right or wrong."""

    @property
    def method(self) -> MethodEntry:
        return METHODS.entry(self.config.method.kind)

    @property
    def is_adapter(self) -> bool:
        return self.method.is_adapter

    @property
    def is_gpu(self) -> bool:
        return self.device.kind != "cpu"

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass computes activations again (gradient checkpointing)."""
        return self.config.train.recompute != "off"

    @property
    def num_held_out(self) -> int:
        return len(self.held_out_lengths)

    @property
    def evaluated_lengths(self) -> Lengths:
        """Tokens of each document that is evaluated during training."""
        return self.selection_lengths if len(self.selection_lengths) else self.held_out_lengths

    @property
    def precision(self) -> str:
        return self.plan.precision.value

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in the forward pass."""
        return 4 if self.precision == "fp32" else 2

    @property
    def has_casts(self) -> bool:
        """Whether fp32 weights are cast to 16 bits for each forward pass (autocast)."""
        return not self.is_adapter and self.precision != "fp32" and self.config.train.masters == "fp32"

    @property
    def quantization(self) -> str:
        """`none`, `int8` or `nf4`."""
        return self.plan.quantized.kind if self.plan.quantized else "none"

    @cached_property
    def adapted(self) -> list[Linear]:
        """The linear layers that get an adapter."""
        method = self.config.method
        chosen = [linear for linear in self.shape.linears if method.layers == "all" or linear.layer in method.layers]
        if method.targets == "all-linear":
            return chosen
        return [linear for linear in chosen if any(target.endswith(linear.name) for target in method.targets)]

    @property
    def unknown_layers(self) -> list[str]:
        """Names in `method.targets` and `method.keep` that no linear layer in the weight files has."""
        method, known = self.config.method, {linear.name for linear in self.shape.linears}
        named = [names for names in (method.targets, method.keep) if not isinstance(names, str)]
        # A path or a part of one (`layers.0`) is left to the loaded model.
        names = dict.fromkeys(name for own in named for name in own if name.isidentifier())
        return [name for name in names if self.shape.is_exact and name not in known]

    @cached_property
    def added(self) -> list[Shape]:
        """The shapes of the weights that the method adds."""
        settings = self.config.method
        return [shape for own in self.adapted for shape in self.method.adds(own.inputs, own.outputs, settings)]

    @cached_property
    def trained(self) -> list[Shape]:
        """The shapes of the base model's own weights that are trained."""
        return [*self.method.trains(self.shape, self.config.method)]

    @cached_property
    def num_adapter_weights(self) -> int:
        """Weights of the added matrices."""
        return num_numbers(self.added)

    @cached_property
    def num_trained_base_weights(self) -> int:
        """Weights of the model itself that are trained."""
        return num_numbers(self.trained)

    @property
    def num_trainable(self) -> int:
        return self.num_adapter_weights + self.num_trained_base_weights

    @property
    def master_bytes(self) -> int:
        """Bytes of a trained number."""
        return 2 if not self.is_adapter and self.config.train.masters == "bf16" else 4

    @cached_property
    def state_bytes(self) -> int:
        """The size of the optimizer's state."""
        optimizer = OPTIMIZERS.entry(self.config.train.optimizer)
        return int(optimizer.state_bytes([*self.added, *self.trained], self.master_bytes, self.config.train))

    @cached_property
    def groups(self) -> list[list[int]]:
        """The tokens of each micro-batch of some steps, by step."""
        found: list[list[int]] = []
        for lengths in self.step_lengths:
            groups = micro_batches(np.arange(len(lengths)), lengths, self.micro_tokens)
            found.append([int(lengths[group].sum()) for group in groups])
        return found

    @cached_property
    def largest_micro_batch(self) -> int:
        """Tokens of the largest micro-batch."""
        sizes = [size for groups in self.groups for size in groups]
        return max([int(self.lengths.max(initial=1)), *sizes])

    @property
    def mean_micro_batches(self) -> float:
        """Micro-batches per step."""
        return float(np.mean([len(groups) for groups in self.groups])) if self.groups else 1.0

    @property
    def mean_step_tokens(self) -> float:
        return float(np.mean([lengths.sum() for lengths in self.step_lengths])) if self.step_lengths else 1.0

    @property
    def num_steps(self) -> int:
        return self.plan.num_steps.value

    @cached_property
    def mean_context(self) -> float:
        """Length of the document in which the mean token is."""
        lengths = self.lengths.astype(np.float64)
        return float((lengths**2).sum() / max(1.0, lengths.sum()))

    def with_micro_tokens(self, tokens: int) -> "Workload":
        """Return the workload with another limit of a micro-batch."""
        return replace(self, micro_tokens=tokens)

    def halved(self) -> "Workload":
        """Return the workload with half the micro-batch, as long as the run has not decided whether to compile."""
        longest = int(self.lengths.max(initial=1))
        return self.with_micro_tokens(max(self.micro_tokens // 2, min(longest, self.micro_tokens)))


def sampled_steps(order: DataOrder) -> tuple[Lengths, ...]:
    """Return the lengths of the documents of some steps of the first epoch."""
    steps = order.steps_of_epoch(0)
    chosen = steps if len(steps) <= _SAMPLED_STEPS else steps[:: -(-len(steps) // _SAMPLED_STEPS)]
    return tuple(order.lengths[step] for step in chosen)
