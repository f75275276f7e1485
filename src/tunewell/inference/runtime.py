"""What computes a model that is spoken to or judged: torch, or whatever else gives the same few numbers."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from tunewell.core.errors import UserError
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.data.batches import Documents, make_batch, micro_batches, spread
from tunewell.inference.generate import GREEDY, Decoding, Generated, context_limit, generate
from tunewell.inference.stream import Stream, stream
from tunewell.models.attention import stock_attention
from tunewell.models.loss import HeadShape
from tunewell.models.packed_forward import PackedModel
from tunewell.models.quiet import quiet
from tunewell.models.support import head_facts

# Measure a model on documents and questions: losses, answers, logits, weights that are no numbers.

_BATCH_TOKENS = 4096
"""Read at once: enough to fill a GPU, little enough for a laptop's memory."""


@dataclass(frozen=True)
class Measured:
    """The loss of each document, summed over its supervised tokens."""

    documents: npt.NDArray[np.int64]
    sums: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.int64]

    def mean(self, chosen: npt.NDArray[np.bool_] | None = None) -> float:
        """Give the mean over the supervised tokens of all documents, or of some."""
        sums, tokens = (self.sums, self.tokens) if chosen is None else (self.sums[chosen], self.tokens[chosen])
        return float(sums.sum() / tokens.sum()) if tokens.sum() else math.nan


def measure_losses(
    reader: PackedModel,
    split: Documents,
    *,
    most: int | None,
    progress: ProgressListener = silent,
) -> Measured:
    """Give the loss of some documents of a split, spread evenly, each as if it were read alone."""
    chosen = spread(len(split), most)
    number = len(chosen)
    lengths = np.asarray(split.index["length"], dtype=np.int64)
    sums, tokens = np.zeros(number), np.zeros(number, dtype=np.int64)
    reader.model.eval()
    num_read = 0
    for group in micro_batches(chosen, lengths, _BATCH_TOKENS):
        batch = make_batch(split, group)
        losses = reader.row_losses(batch)
        # Which of the batch's documents each supervised token belongs to.
        owners = np.searchsorted(np.cumsum(batch.lengths), batch.rows, side="right")
        places = np.searchsorted(chosen, group)
        sums[places] = np.bincount(owners, weights=losses, minlength=len(group))
        tokens[places] = np.bincount(owners, minlength=len(group))
        num_read += len(group)
        progress(Progress("loss", num_read, number, "documents"))
    return Measured(chosen, sums, tokens)


class Texts:
    """Plain texts as documents: everything after the first token counts."""

    def __init__(self, rows: Sequence[Sequence[int]], *, longest: int) -> None:
        # A model without positions for a whole text is asked for its beginning.
        self._rows = [np.asarray(row[:longest], dtype=np.int32) for row in rows if len(row) > 1]

    def __len__(self) -> int:
        return len(self._rows)

    def arrays(self, index: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Give a text's ids and labels."""
        labels = self._rows[index].copy()
        labels[0] = -100
        return self._rows[index], labels

    @cached_property
    def index(self) -> dict[str, Any]:
        """Give the lengths."""
        lengths = np.array([len(row) for row in self._rows], dtype=np.int64)
        return {"length": lengths, "supervised": lengths - 1}


def bad_weights(model: PreTrainedModel) -> dict[str, int]:
    """Name the tensors that hold values which are not finite, and count those."""
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        num_bad = parameter.numel() - int(torch.isfinite(parameter).sum())
        if num_bad:
            found[name] = num_bad
    return found


def bad_weights_in(folder: Path) -> dict[str, int]:
    """Do the same for the files of a model that cannot be loaded; a folder without such files gives nothing."""
    found: dict[str, int] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - the file is no mapping
                    tensor = opened.get_tensor(name)
                    num_bad = tensor.numel() - int(torch.isfinite(tensor).sum()) if tensor.is_floating_point() else 0
                    if num_bad:
                        found[name] = num_bad
        except (SafetensorError, OSError):
            return {}  # damaged, which whoever loads it says better
    return found


@torch.no_grad()
def next_logits(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
    """Give the logits of what would come after each prompt, read alone."""
    rows = []
    with quiet(), stock_attention(model):
        for prompt in prompts:
            ids = torch.tensor([list(prompt)], device=model.device)
            out: Any = model(input_ids=ids, use_cache=False, logits_to_keep=1)
            rows.append(out.logits[0, -1].float().cpu().numpy())
    return np.stack(rows)


def answer_all(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    pad_id: int,
    batch_size: int | None = None,
) -> list[Generated]:
    """Answer prompts greedily, in batches: the same tokens that each prompt alone would get."""
    longest = max((len(prompt) for prompt in prompts), default=0) + max_new_tokens
    decoding = Decoding() if batch_size is None else Decoding(batch_tokens=batch_size * longest)
    return generate(model, prompts, max_new_tokens=max_new_tokens, stop_ids=stop_ids, pad_id=pad_id, decoding=decoding)


Losses = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.int64]]
"""Documents, the loss of each summed over its supervised tokens, and how many those are."""


class Runtime(Protocol):
    """A model at work. One text at a time: a stream ends, or is closed, before anything else is asked."""

    @property
    def context_length(self) -> int:
        """Tokens of a prompt and its answer together."""
        ...

    def stream(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int], decoding: Decoding = GREEDY
    ) -> Stream:
        """Answer a prompt; each token is computed when it is asked for."""
        ...

    def answer_all(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        pad_id: int,
        batch_size: int | None = None,
    ) -> list[Generated]:
        """Answer prompts greedily, each as if it were asked alone."""
        ...

    def next_logits(self, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """Give the logits of what would come after each prompt."""
        ...

    def losses(self, split: Documents, *, most: int | None, progress: ProgressListener = ...) -> Losses:
        """Give the loss of some documents of a split, spread evenly, each as if it were read alone."""
        ...

    def bad_weights(self) -> dict[str, int]:
        """Name the tensors with values that are not finite, and count those."""
        ...

    def close(self) -> None:
        """Let go of what Python does not free by itself; closing twice does no harm."""
        ...


class TorchRuntime:
    """A model of transformers, computed by torch on its device."""

    def __init__(self, model: PreTrainedModel, precision: str) -> None:
        self.model = model
        self._precision = precision
        self._head: HeadShape | None = None

    @property
    def context_length(self) -> int:
        """Tokens of a prompt and its answer together; a number beyond all use where the model sets none."""
        return context_limit(self.model)

    def stream(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int], decoding: Decoding = GREEDY
    ) -> Stream:
        """Answer a prompt; each token is the one that `transformers.generate` would give."""
        return stream(self.model, prompt_ids, max_new_tokens=max_new_tokens, stop_ids=stop_ids, decoding=decoding)

    def answer_all(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        pad_id: int,
        batch_size: int | None = None,
    ) -> list[Generated]:
        """Answer prompts greedily, in batches."""
        return answer_all(
            self.model,
            prompts,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            pad_id=pad_id,
            batch_size=batch_size,
        )

    def next_logits(self, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """Give the logits of what would come after each prompt, read alone."""
        return next_logits(self.model, prompts)

    def losses(self, split: Documents, *, most: int | None, progress: ProgressListener = silent) -> Losses:
        """Give the loss of some documents of a split, several laid end to end and read at once."""
        head = self._head or self._head_for(split.arrays(0)[0].tolist())
        self._head = head
        reader = PackedModel(self.model, self._precision, int(split.index["length"].max()), head=head)
        found = measure_losses(reader, split, most=most, progress=progress)
        return found.documents, found.sums, found.tokens

    def bad_weights(self) -> dict[str, int]:
        """Look at every weight."""
        return bad_weights(self.model)

    def close(self) -> None:
        """Do nothing: torch frees the weights when nobody has the model any more."""

    def _head_for(self, text: list[int]) -> HeadShape:
        try:
            facts = head_facts(self.model)
        except UserError:
            # A head that overflows looks like one that is not known; its losses will say so.
            if np.isfinite(next_logits(self.model, [text])).all():
                raise
            return HeadShape()
        return HeadShape(facts.softcap, facts.scale)
