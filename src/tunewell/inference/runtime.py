"""The `Runtime` interface of a loaded model (answers, losses, logits), and its implementation in torch."""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from tunewell.core.errors import UserError
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.data.batches import TokenizedDocuments, make_batch, micro_batches, spread_evenly
from tunewell.inference.decoder import GREEDY, Decoding, Generated, context_limit
from tunewell.inference.generate import generate
from tunewell.inference.stream import Tokens, TokenStream, stream_tokens
from tunewell.machine.device import measure_threads, torch_threads
from tunewell.machine.out_of_memory import free_memory, is_out_of_memory
from tunewell.models.attention import fastest_attention
from tunewell.models.load import count_nonfinite
from tunewell.models.loss import HeadShape
from tunewell.models.packed_forward import PackedModel
from tunewell.models.support import head_shape, stock_mode

_THREADS_SECONDS, _MAX_MEASURED_WEIGHTS = 0.3, 64_000_000
BATCH_TOKENS_MEASURED = 256
"""Number of tokens to measure the threads of a batch with. Batches of answers have fewer tokens, of losses more."""
_MAX_STRETCH, _MAX_GROUP_TOKENS = 1.25, 512
"""Texts whose logits are computed together: the longest has at most 1.25 times the tokens of the shortest."""
_BATCH_TOKENS, _GPU_BATCH_TOKENS = 1024, 16_384
"""Tokens of one forward pass on a CPU and on a GPU."""


@dataclass(frozen=True)
class DocumentLosses:
    """The loss of each document, summed over its supervised tokens."""

    documents: npt.NDArray[np.int64]
    sums: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.int64]
    """Number of supervised tokens in each document."""

    def mean(self, chosen: npt.NDArray[np.bool_] | None = None) -> float:
        """Return the mean loss per supervised token of all documents, or of the chosen ones."""
        sums, tokens = (self.sums, self.tokens) if chosen is None else (self.sums[chosen], self.tokens[chosen])
        return float(sums.sum() / tokens.sum()) if tokens.sum() else math.nan


class Runtime(Protocol):
    """A loaded model. It handles one request at a time, so a stream must be closed before the next call."""

    @property
    def context_length(self) -> int:
        """The maximum number of tokens of a prompt and its answer together."""
        ...

    def stream(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int], decoding: Decoding = GREEDY
    ) -> TokenStream:
        """Stream the answer to a prompt. Each token is computed on demand."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        batch_size: int | None = None,
        progress: ProgressListener = silent,
    ) -> list[Generated]:
        """Return greedy answers. Batching does not change an answer."""
        ...

    def next_logits(self, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """Return the logits after the last token of each prompt as [prompts, vocabulary]."""
        ...

    def losses(
        self, split: TokenizedDocuments, *, most: int | None, progress: ProgressListener = ...
    ) -> DocumentLosses:
        """Return the losses of at most `most` documents, spread evenly over the split."""
        ...

    def nonfinite_weights(self) -> dict[str, int]:
        """Return the number of NaN and infinite values by tensor. Finite tensors are left out."""
        ...

    def close(self) -> None:
        """Free memory that Python does not free automatically. Closing twice is allowed."""
        ...


@dataclass
class TorchRuntime:
    """A transformers model that runs in torch."""

    model: PreTrainedModel
    precision: str
    num_threads: int | None = None
    """Number of threads to compute one token at a time."""
    batch_threads: int | None = None
    """Number of threads in other calls."""
    _head: HeadShape | None = None

    @property
    def context_length(self) -> int:
        """The maximum number of tokens of a prompt and its answer together; a huge number if the model sets none."""
        return context_limit(self.model)

    def stream(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int], decoding: Decoding = GREEDY
    ) -> TokenStream:
        """Stream the answer to a prompt. The tokens are the same as those from `generate`."""
        stream = stream_tokens(
            self.model, prompt_ids, max_new_tokens=max_new_tokens, stop_ids=stop_ids, decoding=decoding
        )
        return TokenStream(self._with_threads(stream))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        batch_size: int | None = None,
        progress: ProgressListener = silent,
    ) -> list[Generated]:
        """Return greedy answers, in batches of about `batch_size` prompts or of a size chosen by free memory."""
        longest = max((len(prompt) for prompt in prompts), default=0) + max_new_tokens
        decoding = GREEDY if batch_size is None else Decoding(batch_tokens=batch_size * longest)
        with torch_threads(self.batch_threads):
            return generate(
                self.model,
                prompts,
                max_new_tokens=max_new_tokens,
                stop_ids=stop_ids,
                decoding=decoding,
                progress=progress,
            )

    def next_logits(self, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """Return the logits after the last token of each prompt."""
        with torch_threads(self.batch_threads):
            return np.concatenate(last_logits(self.model, prompts))

    def losses(
        self, split: TokenizedDocuments, *, most: int | None, progress: ProgressListener = silent
    ) -> DocumentLosses:
        """Return the losses of some documents, several of them packed into one forward pass."""
        with torch_threads(self.batch_threads), fastest_attention(self.model):
            self._head = self._head or self._head_shape(split.arrays(0)[0].tolist())
            longest = int(split.index["length"].max())
            packed = PackedModel(self.model, self.precision, longest, head=self._head)
            return measure_losses(packed, split, most=most, progress=progress)

    def nonfinite_weights(self) -> dict[str, int]:
        """Return the number of NaN and infinite values by parameter."""
        return count_nonfinite(self.model.named_parameters())

    def close(self) -> None:
        """Do nothing, because torch frees the weights with the last reference to the model."""

    def _with_threads(self, stream: TokenStream) -> Tokens:
        """Yield the tokens of a stream, with the number of threads set only while a token is computed."""
        with closing(stream):
            while True:
                with torch_threads(self.num_threads):
                    token = next(stream, None)
                if token is None:
                    return stream.ended
                yield token

    def _head_shape(self, prompt: list[int]) -> HeadShape:
        try:
            return head_shape(self.model)
        except UserError:
            # A head that overflows cannot be checked; its non-finite losses will reveal the problem.
            if np.isfinite(last_logits(self.model, [prompt])).all():
                raise
            return HeadShape()


def measure_losses(
    packed: PackedModel,
    split: TokenizedDocuments,
    *,
    most: int | None,
    batch_tokens: int | None = None,
    progress: ProgressListener = silent,
) -> DocumentLosses:
    """Return the losses of at most `most` documents, spread evenly over the split. Packing does not change a loss.

    A batch has `batch_tokens`. After an out-of-memory error, the rest is computed in smaller batches.
    """
    chosen = spread_evenly(len(split), most)
    lengths = np.asarray(split.index["length"], dtype=np.int64)
    sums, tokens = np.zeros(len(chosen)), np.zeros(len(chosen), dtype=np.int64)
    packed.model.eval()
    num_done = 0
    batch_tokens = batch_tokens or (_GPU_BATCH_TOKENS if packed.device.type == "cuda" else _BATCH_TOKENS)
    groups = micro_batches(chosen, lengths, batch_tokens)
    while groups:
        group, *rest = groups
        batch = make_batch(split, group)
        try:
            losses = packed.token_losses(batch)
        except (RuntimeError, MemoryError) as error:
            if len(group) == 1 or not is_out_of_memory(error):
                raise
            free_memory(error)
            batch_tokens = int(lengths[group].sum()) // 2
            groups = micro_batches(np.concatenate(groups), lengths, batch_tokens)
            continue
        groups = rest
        # The index of the document in the batch for each supervised token.
        owners = np.searchsorted(np.cumsum(batch.lengths), batch.rows, side="right")
        indices = np.searchsorted(chosen, group)
        sums[indices] = np.bincount(owners, weights=losses, minlength=len(group))
        tokens[indices] = np.bincount(owners, minlength=len(group))
        num_done += len(group)
        progress(Progress("loss", num_done, len(chosen), "documents"))
    return DocumentLosses(chosen, sums, tokens)


@torch.no_grad()
def last_logits(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, number: int = 1, progress: ProgressListener = silent
) -> list[npt.NDArray[np.float32]]:
    """Return the logits of the last `number` positions of each prompt in fp32.

    Prompts of similar length share a forward pass, padded on the right. A causal model computes every position from
    earlier ones only, so padding on the right does not change them.
    """
    logits: dict[int, npt.NDArray[np.float32]] = {}
    with stock_mode(model):
        for group in _similar_lengths([len(prompt) for prompt in prompts]):
            progress(Progress("logits", len(logits), len(prompts), "texts"))
            lengths = [len(prompts[index]) for index in group]
            longest, num_kept = max(lengths), min(max(lengths), max(lengths) - min(lengths) + number)
            ids = pad_sequence([torch.tensor(list(prompts[index])) for index in group], batch_first=True)
            out: Any = model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=num_kept)
            kept = out.logits[:, -num_kept:].float().cpu().numpy()
            for row, index in enumerate(group):
                end = lengths[row] - (longest - num_kept)
                logits[index] = kept[row, max(0, end - number) : end]
    return [logits[index] for index in range(len(prompts))]


def _similar_lengths(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield groups of indices, short texts first: little padding, and not too many tokens in a group."""
    group: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        is_similar = not group or lengths[index] <= _MAX_STRETCH * lengths[group[0]]
        if group and not (is_similar and (len(group) + 1) * lengths[index] <= _MAX_GROUP_TOKENS):
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def nonfinite_weights_in(folder: Path) -> dict[str, int]:
    """Count NaN and infinite values in the safetensors files of a model that cannot be loaded."""
    counts: dict[str, int] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                counts |= count_nonfinite((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118
        except (SafetensorError, OSError):
            return {}  # a damaged file; loading it gives a better error
    return counts


def fastest_threads(shapes: Iterable[tuple[int, ...]], *, num_tokens: int = 1) -> int:
    """Return the fastest number of CPU threads, measured on `num_tokens` at a time with weights of these shapes.

    On a busy machine (two cores, load 5), two threads waiting for each other were ten times slower than one. On a
    quiet one, a second thread gains nothing for one token, and a third to two thirds for 256.
    """
    matrices = {shape for shape in shapes if len(shape) == 2 and math.prod(shape) < _MAX_MEASURED_WEIGHTS}
    products = [(num_tokens, inner, columns) for columns, inner in sorted(matrices)]
    return measure_threads(products, seconds=_THREADS_SECONDS).value


class TextDocuments:
    """Plain texts as documents: every token but the first is supervised."""

    def __init__(self, rows: Sequence[Sequence[int]], *, longest: int) -> None:
        """Wrap tokenized texts, each truncated to `longest` tokens, the model's context."""
        self._rows = [np.asarray(row[:longest], dtype=np.int32) for row in rows if len(row) > 1]

    def __len__(self) -> int:
        return len(self._rows)

    def arrays(self, index: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return the ids and labels of a text."""
        labels = self._rows[index].copy()
        labels[0] = -100
        return self._rows[index], labels

    @cached_property
    def index(self) -> dict[str, Any]:
        """The lengths in tokens, in the format of a corpus index."""
        lengths = np.array([len(row) for row in self._rows], dtype=np.int64)
        return {"length": lengths, "supervised": lengths - 1}
