"""Read packed documents with a model: its hidden states, and the loss of the tokens that are learned."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tunewell.data.batches import FixedShape, MicroBatch, cumulative_lengths, pad_to_shape, share_prefix
from tunewell.models.attention import FLASH, runs_of
from tunewell.models.cpu_attention import LONGEST
from tunewell.models.loss import COMPILED_ROWS, HeadShape, chunk_rows, supervised_loss

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class PackedModel:
    """A model that reads packed documents, in the precision that was chosen."""

    model: PreTrainedModel
    precision: str
    longest: int
    """Tokens of the longest document it will meet."""
    head: HeadShape = field(default_factory=HeadShape)
    shape: FixedShape | None = None
    """Set once the layers are compiled."""
    in_graphs: bool = False
    """Whether the compiled layers replay CUDA graphs: what they give is overwritten when they begin anew."""
    may_compile: bool = True
    may_record: bool = True
    alive: Callable[[], None] = lambda: None
    """Called whenever something is about to be computed."""
    slope: Callable[..., tuple[Tensor, Tensor]] | None = None
    """A compiled `loss_and_slope_fused`, then too."""

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        self.body: nn.Module = self.model.base_model
        self.head_module: Any = self.model.get_output_embeddings()
        self.is_flash = self.model.config._attn_implementation == FLASH
        self.is_drawing = _is_drawing(self.model)
        is_all_fp32 = all(parameter.dtype == torch.float32 for parameter in self.model.parameters())
        self._is_uncompiled = False
        # A frozen model is loaded in its precision; one that is trained as a whole is kept in fp32 and cast as it goes.
        self._casts_to = _AUTOCAST.get(self.precision) if is_all_fp32 else None

    def loss_sum(self, batch: MicroBatch) -> Tensor:
        """Sum the loss over a micro-batch's supervised tokens."""
        hidden_TH = self.hidden(batch)
        rows, targets = batch.rows, batch.targets
        if self.slope is not None:
            spare = -len(rows) % COMPILED_ROWS
            rows, targets = np.pad(rows, (0, spare)), np.pad(targets, (0, spare), constant_values=-100)
        # Not by brackets: the gradient of those sorts its rows first.
        hidden_RH = torch.index_select(hidden_TH, 0, self._tensor(rows)).to(self._casts_to or hidden_TH.dtype)
        return supervised_loss(
            hidden_RH,
            self._tensor(targets),
            weight_VH=self.head_module.weight,
            bias_V=getattr(self.head_module, "bias", None),
            head=self.head,
            slope=self.slope,
        )

    def hidden(self, batch: MicroBatch) -> Tensor:
        """Give the last hidden states of documents laid end to end; filling, where there is any, comes last."""
        self.alive()
        room, stance = None, self.stance(batch)
        if self.shape is not None and self._is_compiled_for(batch):
            batch, room = pad_to_shape(batch, self.shape), self.shape.documents
            if self.in_graphs:
                torch.compiler.cudagraph_mark_step_begin()
        shared = share_prefix(batch, longest=LONGEST) if self._is_sharing else None
        layout: dict[str, Any] = {"packed_runs": runs_of(batch.lengths)}
        if self.is_flash:
            bounds = cumulative_lengths(batch, room)
            layout = {"packed_bounds": self._tensor(bounds), "packed_longest": self.longest}
        elif shared is not None:
            # The opening is a run of its own, whatever the length of what follows it.
            runs = ((1, shared.size), *runs_of(shared.lengths[1:]))
            layout = {"packed_runs": runs, "packed_opening": shared.size}
        ids, positions = batch.input_ids, batch.position_ids
        if shared is not None:
            ids, positions = ids[shared.kept], positions[shared.kept]
        with self.casting(), stance:
            out = self.body(
                input_ids=self._tensor(ids)[None],
                position_ids=self._tensor(positions)[None],
                use_cache=False,
                **layout,
            )
        hidden_TH = out.last_hidden_state[0]
        return hidden_TH if shared is None else torch.index_select(hidden_TH, 0, self._tensor(shared.places))

    def stance(self, batch: MicroBatch) -> Any:
        """Let the layers run as they were compiled, or uncompiled, for a batch of another shape.

        Compiling again for a shape that may come once would cost more than it saves. To be kept on the way back too,
        where layers may be computed again.
        """
        is_compiled = self.shape is None or self._is_compiled_for(batch)
        return nullcontext() if is_compiled else torch.compiler.set_stance("force_eager")

    def _is_compiled_for(self, batch: MicroBatch) -> bool:
        return self.shape is not None and self.shape.fits(batch) and not self._is_uncompiled

    @property
    def _is_sharing(self) -> bool:
        """Whether an opening that documents share is computed once: not where each would be drawn at random."""
        return self.device.type == "cpu" and not self.is_flash and not (self.is_drawing and self.model.training)

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Run the layers one by one and at the size a batch has: compiled ones skip hooks and fill batches up."""
        before, self._is_uncompiled = self._is_uncompiled, True
        slope, self.slope = self.slope, None
        try:
            yield
        finally:
            self._is_uncompiled, self.slope = before, slope

    def uncompile(self) -> None:
        """Let go of what was compiled; it may be compiled again."""
        for module in self.model.modules():
            module._compiled_call_impl = None
        self.shape = self.slope = None
        if self.in_graphs:
            self.in_graphs = False
            torch.compiler.reset()  # gives back the memory that graphs keep

    def forgo_graphs(self) -> None:
        """Give back what graphs keep, where memory is short, and record none any more."""
        if self.in_graphs:
            self.uncompile()
            self.may_record = False

    def casting(self) -> Any:
        """Compute in the precision that was chosen, where the model itself is kept in fp32."""
        if self._casts_to is None:
            return nullcontext()
        return torch.autocast(self.device.type, self._casts_to)

    @torch.no_grad()
    def row_losses(self, batch: MicroBatch) -> npt.NDArray[np.float64]:
        """Give the loss of every supervised token of a micro-batch, in the order of `batch.targets`."""
        hidden_TH = self.hidden(batch)
        hidden_RH = torch.index_select(hidden_TH, 0, self._tensor(batch.rows)).to(self._casts_to or hidden_TH.dtype)
        targets_R, losses = self._tensor(batch.targets), []
        weight, bias = self.head_module.weight.to(hidden_RH.dtype), getattr(self.head_module, "bias", None)
        bias = None if bias is None else bias.to(hidden_RH.dtype)
        rows = chunk_rows(weight.shape[0], self.device)
        for hidden, targets in zip(hidden_RH.split(rows), targets_R.split(rows), strict=True):
            logits = torch.nn.functional.linear(hidden, weight, bias).float() * self.head.scale
            if self.head.softcap is not None:
                logits = torch.tanh(logits / self.head.softcap) * self.head.softcap
            losses.append(logits.logsumexp(-1) - logits.gather(-1, targets[:, None])[:, 0])
        return torch.cat(losses).double().cpu().numpy() if losses else np.zeros(0)

    def _tensor(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)


def _is_drawing(model: PreTrainedModel) -> bool:
    """Whether anything in the model is drawn at random while it learns."""
    settings = model.config.get_text_config().to_dict()
    rates = [value for name, value in settings.items() if "dropout" in name or name.endswith("pdrop")]
    for module in model.modules():
        # Layers of an adapter keep their rate as a number.
        rates.append(module.p if isinstance(module, nn.Dropout) else getattr(module, "dropout", 0.0))
    return any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)
