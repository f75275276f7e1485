"""The forward pass on packed documents: hidden states, and the loss of the supervised tokens."""

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
from tunewell.models.attention import FLASH, can_use_triton, forward_inputs, is_packed, runs_of, unpack
from tunewell.models.cpu_attention import MAX_LENGTH
from tunewell.models.loss import COMPILED_ROWS, HeadShape, LossAndGrad, chunk_rows, cross_entropy, supervised_loss
from tunewell.models.states import has_states
from tunewell.models.support import body_of

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class PackedModel:
    """A model with a forward pass and a loss for packed documents, in a given precision."""

    model: PreTrainedModel
    precision: str
    longest: int
    head: HeadShape = field(default_factory=HeadShape)
    shape: FixedShape | None = None
    """The shape for which the layers were compiled; None if they are not compiled."""
    uses_graphs: bool = False
    """Whether the compiled layers replay CUDA graphs. Each replay overwrites the outputs of the previous one."""
    may_compile: bool = True
    may_use_graphs: bool = True
    """False after an out-of-memory error, because CUDA graphs hold memory between steps."""
    heartbeat: Callable[[], None] = lambda: None
    """Called before every forward pass, so that a supervisor can see that the run is alive."""
    fused_loss: LossAndGrad | None = None
    """A compiled `loss_and_grad_fused`, if the layers are compiled."""
    num_computed: int = 0
    """Number of tokens computed in training so far: with padding, but a shared prefix only once."""
    loss_rows: int | None = None
    """Rows of logits that are computed at once, in a run that saves memory; None: as many as is fastest."""

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        self.body = body_of(self.model)
        self.head_module: Any = self.model.get_output_embeddings()
        self.is_flash = self.model.config._attn_implementation == FLASH
        self.uses_triton = self.is_flash and can_use_triton(self.model, self.longest)
        self.has_dropout = _uses_dropout(self.model)
        self.has_states = has_states(self.model)
        is_all_fp32 = all(parameter.dtype == torch.float32 for parameter in self.model.parameters())
        self._is_uncompiled = False
        # A frozen model is loaded in the run's precision; a fully fine-tuned one stays in fp32 and uses autocast.
        self._autocast_dtype = _AUTOCAST.get(self.precision) if is_all_fp32 else None

    def loss_sum(self, batch: MicroBatch) -> Tensor:
        """Return the loss summed over the supervised tokens of a micro-batch."""
        hidden_TH = self.hidden(batch)
        rows, targets = batch.rows, batch.targets
        if self.fused_loss is not None:
            spare = -len(rows) % (self.loss_rows or COMPILED_ROWS)
            rows, targets = np.pad(rows, (0, spare)), np.pad(targets, (0, spare), constant_values=-100)
        hidden_RH = self._select(hidden_TH, rows)
        return supervised_loss(
            hidden_RH,
            self._tensor(targets),
            weight_VH=self.head_module.weight,
            bias_V=getattr(self.head_module, "bias", None),
            head=self.head,
            fused_loss=self.fused_loss,
            rows=self.loss_rows,
        )

    def hidden(self, batch: MicroBatch) -> Tensor:
        """Return the last hidden states as [T, H]. Any padding is at the end."""
        self.heartbeat()
        if not is_packed(self.model):
            return self._hidden_by_document(batch)
        num_documents, stance = None, self.stance(batch)
        if self.shape is not None and self._is_compiled_for(batch):
            batch, num_documents = pad_to_shape(batch, self.shape), self.shape.documents
            if self.uses_graphs:
                torch.compiler.cudagraph_mark_step_begin()
        # With dropout, each document needs a mask of its own for the shared prefix.
        is_sharing = self.device.type == "cpu" and not self.is_flash and not (self.has_dropout and self.model.training)
        is_sharing = is_sharing and not self.has_states  # each document carries its state on from its own prefix
        shared = share_prefix(batch, longest=MAX_LENGTH) if is_sharing else None
        ids, positions, layout = forward_inputs(batch, shared)
        if self.is_flash:
            bounds = cumulative_lengths(batch, num_documents)
            layout = {"packed_bounds": self._tensor(bounds), "packed_longest": self.longest}
            if self.has_states:
                layout["packed_runs"] = runs_of(batch.lengths)
            if self.uses_triton:
                lengths = np.diff(bounds)
                layout["packed_spans"] = tuple(
                    self._tensor(np.repeat(ends, lengths)) for ends in (bounds[:-1], bounds[1:])
                )
        if self.model.training:
            self.num_computed += len(ids)
        with self.autocast(), stance:
            out = self.body(
                input_ids=self._tensor(ids)[None],
                position_ids=self._tensor(positions)[None],
                use_cache=False,
                **layout,
            )
        hidden_TH = out.last_hidden_state[0]
        return hidden_TH if shared is None else torch.index_select(hidden_TH, 0, self._tensor(shared.token_index))

    def _hidden_by_document(self, batch: MicroBatch) -> Tensor:
        """Return the last hidden states of documents that cannot be packed: one pass per run of equal lengths."""
        runs = runs_of(batch.lengths)
        pieces = self._tensor(batch.input_ids).split([number * length for number, length in runs])
        if self.model.training:
            self.num_computed += len(batch.input_ids)
        hidden = []
        for (number, length), piece in zip(runs, pieces, strict=True):
            with self.autocast():
                out = self.body(input_ids=piece.view(number, length), use_cache=False)
            hidden.append(out.last_hidden_state.flatten(0, 1))
            self.heartbeat()
        return torch.cat(hidden)

    def stance(self, batch: MicroBatch) -> Any:
        """Return a context that runs the layers uncompiled if the batch does not fit the compiled shape.

        Recompiling for a shape that may occur only once would cost more than it saves. The context must also cover the
        backward pass, in which gradient checkpointing runs layers again.
        """
        is_compiled = self.shape is None or self._is_compiled_for(batch)
        return nullcontext() if is_compiled else torch.compiler.set_stance("force_eager")

    def _is_compiled_for(self, batch: MicroBatch) -> bool:
        return self.shape is not None and self.shape.fits(batch) and not self._is_uncompiled

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Run the layers uncompiled inside a `with` block, because compiled layers skip hooks and pad batches."""
        before, self._is_uncompiled = self._is_uncompiled, True
        fused_loss, self.fused_loss = self.fused_loss, None
        try:
            yield
        finally:
            self._is_uncompiled, self.fused_loss = before, fused_loss

    def uncompile(self) -> None:
        """Discard the compiled code of the layers. They can be compiled again."""
        for module in self.model.modules():
            module._compiled_call_impl = None
        self.shape = self.fused_loss = None
        if self.uses_graphs:
            self.uses_graphs = False
            torch.compiler.reset()  # frees the memory of the graphs

    def unpack(self) -> None:
        """Compute documents one by one from now on, with transformers' own attention."""
        self.uncompile()
        unpack(self.model)
        self.is_flash = self.uses_triton = self.may_compile = False

    def drop_graphs(self) -> None:
        """Free the memory of CUDA graphs, and do not use them again."""
        if self.uses_graphs:
            self.uncompile()
            self.may_use_graphs = False

    def autocast(self) -> Any:
        """Return an autocast context if the weights are in fp32 and the run is in 16 bits."""
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self._autocast_dtype)

    @torch.no_grad()
    def token_losses(self, batch: MicroBatch) -> npt.NDArray[np.float64]:
        """Return the loss of every supervised token of a micro-batch, in the order of `batch.targets`."""
        hidden_TH = self.hidden(batch)
        hidden_RH = self._select(hidden_TH, batch.rows)
        targets_R, losses = self._tensor(batch.targets), []
        weight, bias = self.head_module.weight.to(hidden_RH.dtype), getattr(self.head_module, "bias", None)
        bias = None if bias is None else bias.to(hidden_RH.dtype)
        rows = self.loss_rows or chunk_rows(weight.shape[0], self.device)
        for hidden, targets in zip(hidden_RH.split(rows), targets_R.split(rows), strict=True):
            logits = self.head.apply(torch.nn.functional.linear(hidden, weight, bias).float())
            losses.append(cross_entropy(logits, targets))
        return torch.cat(losses).cpu().double().numpy() if losses else np.zeros(0)

    def _select(self, hidden_TH: Tensor, rows: npt.NDArray[np.int64]) -> Tensor:
        """Return the selected rows in the precision of the head."""
        # `index_select` instead of indexing, because the gradient of indexing sorts the rows first.
        return torch.index_select(hidden_TH, 0, self._tensor(rows)).to(self._autocast_dtype or hidden_TH.dtype)

    def _tensor(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)


def _uses_dropout(model: PreTrainedModel) -> bool:
    """Return whether the model has dropout in any layer."""
    settings = model.config.get_text_config().to_dict()
    rates = [value for name, value in settings.items() if "dropout" in name or name.endswith("pdrop")]
    for module in model.modules():
        # Adapter layers store their dropout rate as a number.
        rates.append(module.p if isinstance(module, nn.Dropout) else getattr(module, "dropout", 0.0))
    return any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)
