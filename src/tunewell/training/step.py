"""One optimizer step: forward and backward over its micro-batches, one update, and its numbers, read later."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tunewell.config.schema import Train
from tunewell.models.adapters import trainable
from tunewell.models.attention import FLASH, runs_of
from tunewell.models.lora import LoraLinear
from tunewell.training.batches import FixedShape, MicroBatch, bounds_of, fill
from tunewell.training.loss import COMPILED_ROWS, HeadShape, learned_rows_loss
from tunewell.training.optim import Scaler, make_optimizer, update
from tunewell.training.world import World

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Numbers:
    """The numbers of a step on their way from the device; reading them before they are there waits."""

    values: Tensor
    """Loss sum, gradient norm, whether the update was left out, the scaler's factor."""
    arrived: Any
    """An event to wait for, on CUDA; None elsewhere."""

    def read(self) -> tuple[float, float, bool, float]:
        """Wait for the numbers and give them."""
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, norm, skipped, scale = self.values.tolist()
        return loss, norm, bool(skipped), scale


@dataclass
class Learner:
    """A model that is being taught, with all it takes: device, optimizer, scaler, the others who train."""

    model: PreTrainedModel
    settings: Train
    precision: str
    longest: int
    """Tokens of the longest document it will meet."""
    seed: int = 0
    head: HeadShape = field(default_factory=HeadShape)
    world: World = field(default_factory=World)
    shape: FixedShape | None = None
    """Set once the layers are compiled."""
    slope: Callable[..., tuple[Tensor, Tensor]] | None = None
    """A compiled `loss_and_slope_fused`, then too."""

    def __post_init__(self) -> None:
        self.parameters: dict[str, nn.Parameter] = trainable(self.model)
        self.device = next(self.model.parameters()).device
        self.optimizer = make_optimizer(self.parameters, self.settings)
        self.scaler = Scaler.make(self.precision, self.device)
        self.body: nn.Module = self.model.base_model
        self.head_module: Any = self.model.get_output_embeddings()
        self.is_flash = self.model.config._attn_implementation == FLASH
        self.is_drawing = _is_drawing(self.model)
        is_all_fp32 = all(parameter.dtype == torch.float32 for parameter in self.model.parameters())
        # A frozen model is loaded in its precision; one that is trained as a whole is kept in fp32 and cast as it goes.
        self._casts_to = _AUTOCAST.get(self.precision) if is_all_fp32 else None

    def take_step(self, batches: Sequence[MicroBatch], *, number: int, rate: float) -> Numbers:
        """Learn from a step's documents: the loss is its sum over all supervised tokens, however they are cut."""
        num_supervised = sum(len(batch.rows) for batch in batches)
        if not self.model.training:
            self.model.train()
        total = torch.zeros((), device=self.device)
        for place, batch in self.world.share(list(enumerate(batches))):
            if self.is_drawing:
                torch.manual_seed(_mix(self.seed, number, place))
            loss = self.loss_sum(batch)
            (loss * (self.scaler.scale / max(1, num_supervised))).backward()
            total += loss.detach()
        self._gather(total)
        done = update(self.optimizer, rate=rate, max_norm=self.settings.max_grad_norm, loss=total, scaler=self.scaler)
        values = torch.stack([total / max(1, num_supervised), done.grad_norm, done.found_inf, self.scaler.scale])
        return self._send(values)

    def loss_sum(self, batch: MicroBatch) -> Tensor:
        """Sum the loss over a micro-batch's supervised tokens."""
        hidden_TH = self.hidden(batch)
        rows, targets = batch.rows, batch.targets
        if self.slope is not None:
            spare = -len(rows) % COMPILED_ROWS
            rows, targets = np.pad(rows, (0, spare)), np.pad(targets, (0, spare), constant_values=-100)
        # Not by brackets: the gradient of those sorts its rows first.
        hidden_RH = torch.index_select(hidden_TH, 0, self._tensor(rows)).to(self._casts_to or hidden_TH.dtype)
        return learned_rows_loss(
            hidden_RH,
            self._tensor(targets),
            weight_VH=self.head_module.weight,
            bias_V=getattr(self.head_module, "bias", None),
            head=self.head,
            slope=self.slope,
        )

    def hidden(self, batch: MicroBatch) -> Tensor:
        """Give the last hidden states of documents laid end to end; filling, where there is any, comes last."""
        room, stance = None, nullcontext()
        if self.shape is not None and self.shape.fits(batch):
            batch, room = fill(batch, self.shape), self.shape.documents
        elif self.shape is not None:
            # Compiling again for a shape that may come once would cost more than it saves.
            stance = torch.compiler.set_stance("force_eager")
        layout: dict[str, Any] = {"packed_runs": runs_of(batch.lengths)}
        if self.is_flash:
            bounds = bounds_of(batch, room)
            layout = {"packed_bounds": self._tensor(bounds), "packed_longest": self.longest}
        with self.casting(), stance:
            out = self.body(
                input_ids=self._tensor(batch.input_ids)[None],
                position_ids=self._tensor(batch.position_ids)[None],
                use_cache=False,
                **layout,
            )
        return out.last_hidden_state[0]

    def casting(self) -> Any:
        """Compute in the precision that was chosen, where the model itself is kept in fp32."""
        if self._casts_to is None:
            return nullcontext()
        return torch.autocast(self.device.type, self._casts_to)

    def _gather(self, total: Tensor) -> None:
        if self.world.size == 1:
            return
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.world.add_up([total, *(p.grad for p in self.parameters.values() if p.grad is not None)])

    def _tensor(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _send(self, values: Tensor) -> Numbers:
        if self.device.type != "cuda":
            return Numbers(values.cpu(), None)
        here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        here.copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return Numbers(here, arrived)


def _is_drawing(model: PreTrainedModel) -> bool:
    """Whether anything in the model is drawn at random while it learns."""
    rates = [getattr(model.config, "attention_dropout", 0.0) or 0.0]
    for module in model.modules():
        if isinstance(module, LoraLinear):
            rates.append(module.dropout)
        elif isinstance(module, nn.Dropout):
            rates.append(module.p)
    return any(rates)


def _mix(seed: int, step: int, place: int) -> int:
    """Make a seed of three numbers: what a step draws does not depend on what was drawn before it."""
    mixed = np.random.SeedSequence([seed, step, place]).generate_state(2)
    return int(mixed[0]) | (int(mixed[1]) & 0x7FFFFFFF) << 32
