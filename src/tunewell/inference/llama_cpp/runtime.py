"""Run a GGUF file in llama.cpp for chat and evaluation: answers, losses and logits."""

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.data.batches import TokenizedDocuments, spread_evenly
from tunewell.inference.decoder import GREEDY, Decoding, Generated
from tunewell.inference.llama_cpp.library import LlamaLibrary
from tunewell.inference.llama_cpp.model import LlamaModel
from tunewell.inference.runtime import DocumentLosses, fastest_threads
from tunewell.inference.stream import Tokens, TokenStream
from tunewell.model_files.gguf import read_tensor_table
from tunewell.models.gguf import read_entry, stored_type
from tunewell.models.load import count_nonfinite
from tunewell.models.loss import cross_entropy

_FIRST_CONTEXT = 1024
"""The context grows on demand, because a KV cache for the full context may need more memory than the weights."""
_NUM_PROBED = 256


class LlamaRuntime:
    """A GGUF file in llama.cpp on the CPU. It implements `Runtime` and is not thread-safe."""

    def __init__(self, library: LlamaLibrary, path: Path) -> None:
        """Open a file. Raise UserError if llama.cpp rejects it."""
        self.path = path
        self.computed_by = " ".join(filter(None, ("llama.cpp", library.bindings.version, f"({library.origin})")))
        # llama.cpp's threads spin while they wait for each other.
        self.num_threads = fastest_threads(entry.shape for entry in read_tensor_table(path))
        self._library = library
        self._model = self._open(_FIRST_CONTEXT)
        self.context_length = self._model.trained_context
        """The maximum number of tokens of a prompt and its answer together."""
        self.vocab_size = self._model.vocab_size

    @property
    def stored_as(self) -> str:
        """The data type of most weights."""
        name = stored_type(self.path)
        return {"f32": "fp32", "f16": "fp16"}.get(name, name)

    def stream(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int], decoding: Decoding = GREEDY
    ) -> TokenStream:
        """Stream the answer to a prompt. A prefix shared with the previous prompt stays in the KV cache."""
        if not prompt_ids:
            raise ValueError("a prompt has no tokens")
        return TokenStream(self._tokens(prompt_ids, max_new_tokens, stop_ids, decoding))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        batch_size: int | None = None,
        progress: ProgressListener = silent,
    ) -> list[Generated]:
        """Return greedy answers, one prompt after the other. `batch_size` has no effect."""
        found = []
        for prompt in prompts:
            progress(Progress("answers", len(found), len(prompts), "answers"))
            answer = self.stream(prompt, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
            ids = list(answer)
            found.append(Generated(ids, answer.ended == "end"))
        return found

    def next_logits(self, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """Return the logits after the last token of each prompt."""
        return np.concatenate([self._with_context(len(prompt)).last_logits(prompt, 1) for prompt in prompts])

    def losses(
        self, split: TokenizedDocuments, *, most: int | None, progress: ProgressListener = silent
    ) -> DocumentLosses:
        """Return the losses of at most `most` documents, spread evenly over the split."""
        chosen = spread_evenly(len(split), most)
        sums, tokens = np.zeros(len(chosen)), np.zeros(len(chosen), dtype=np.int64)
        for index, document in enumerate(chosen.tolist()):
            losses = self._document_losses(*split.arrays(document))
            sums[index], tokens[index] = losses.sum(), len(losses)
            progress(Progress("loss", index + 1, len(chosen), "documents"))
        return DocumentLosses(chosen, sums, tokens)

    def nonfinite_weights(self) -> dict[str, int]:
        """Return the number of NaN and infinite values by tensor.

        The tensors are read only if a logit is NaN or plus infinity, because every weight of the layers and the head
        affects the logits. A logit of minus infinity is allowed; it means that a token is never chosen.
        """
        number = min(_NUM_PROBED, self.context_length, self.vocab_size)
        probe = np.unique(np.linspace(0, self.vocab_size - 1, number).astype(int)).tolist()
        blocks = self._with_context(len(probe)).logit_blocks(probe)
        if not (num_bad := sum(int((np.isnan(block) | np.isposinf(block)).sum()) for block in blocks)):
            return {}
        tensors = ((entry.name, read_entry(self.path, entry)) for entry in read_tensor_table(self.path))
        return count_nonfinite(tensors) or {"logits": num_bad}

    def close(self) -> None:
        """Free the memory. Closing twice is allowed."""
        self._model.close()

    def _open(self, context: int) -> LlamaModel:
        return self._library.open(self.path, context=context, threads=self.num_threads)

    def _with_context(self, num_tokens: int) -> LlamaModel:
        """Return the model with a context of at least `num_tokens`, reopening it with a larger one if needed."""
        if num_tokens > self._model.context:
            size = 1 << (num_tokens - 1).bit_length()
            # Open before closing, so that the smaller one stays if memory runs out. The weights are mapped only once.
            larger = self._open(max(num_tokens, min(size, self.context_length)))
            self._model.close()
            self._model = larger
        return self._model

    def _tokens(self, prompt: Sequence[int], max_new_tokens: int, stops: Collection[int], decoding: Decoding) -> Tokens:
        num_free = self.context_length - len(prompt)
        num_new = min(max_new_tokens, num_free)
        if num_new > 0:
            model = self._with_context(len(prompt) + num_new)
            answer = model.generate(prompt, max_new_tokens=num_new, stop_ids=stops, decoding=decoding)
            yield from answer
            if answer.ended == "end":
                return "end"
        return "context" if num_free < max_new_tokens else "length"

    def _document_losses(self, ids: npt.NDArray[np.int32], labels: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        """Return the loss of every supervised token. Tokens after the last supervised one are not computed.

        ids     a  b  c  d  e
        labels  -  -  c  d  -        <- the loss of c is computed from the logits after b
        """
        targets_T = labels[1:]
        supervised = np.flatnonzero(targets_T != -100)
        if not len(supervised):
            return np.zeros(0)
        text = ids[: supervised[-1] + 1].tolist()
        found, start = [], 0
        for block_RV in self._with_context(len(text)).logit_blocks(text):
            rows = supervised[(supervised >= start) & (supervised < start + len(block_RV))]
            logits_RV, targets_R = torch.from_numpy(block_RV[rows - start]), torch.from_numpy(targets_T[rows])
            found.append(cross_entropy(logits_RV, targets_R.long()).double().numpy())
            start += len(block_RV)
        return np.concatenate(found)
