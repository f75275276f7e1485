"""A GGUF file that is spoken to or judged, computed by llama.cpp: answers, losses and logits of the file itself."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tunewell.core.gguf import read_tensor_table
from tunewell.core.optional import import_optional
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.data.batches import Documents, spread
from tunewell.hardware.threads import measure_threads
from tunewell.inference.generate import GREEDY, Decoding, Generated
from tunewell.inference.llama_cpp.library import LlamaLibrary
from tunewell.inference.llama_cpp.model import LlamaModel
from tunewell.inference.stream import Ended, Stream
from tunewell.models.gguf import read_tensor

Losses = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.int64]]
# A cache for all that a model could read may take more memory than its weights, so it grows with what is read.
_FIRST_CONTEXT = 1024
_NUM_PROBED = 256
_PRECISIONS = {"f32": "fp32", "f16": "fp16"}
_MEASURING_SECONDS, _MOST_MEASURED = 0.3, 64_000_000


class LlamaRuntime:
    """One file in llama.cpp, on the processor; not for several threads at once."""

    def __init__(self, library: LlamaLibrary, path: Path) -> None:
        """Open a file; raise UserError for one that llama.cpp does not take."""
        self.path = path
        self.computed_by = _name(library)
        self.num_threads = _fastest_threads(path)
        self._library = library
        self._model = self._open(_FIRST_CONTEXT)
        self.context_length = self._model.trained_context
        """Tokens of a prompt and its answer together."""
        self.vocab_size = self._model.vocab_size

    @property
    def stored_as(self) -> str:
        """Name the type that most of the weights are stored in, which is what they are multiplied in."""
        gguf = import_optional("gguf", extra="export", purpose="reading a GGUF file")
        sizes: Counter[int] = Counter()
        for entry in read_tensor_table(self.path):
            sizes[entry.type_number] += prod(entry.shape)
        name: str = gguf.GGMLQuantizationType(sizes.most_common(1)[0][0]).name.lower()
        return _PRECISIONS.get(name, name)

    def stream(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int], decoding: Decoding = GREEDY
    ) -> Stream:
        """Answer a prompt; each token is computed when it is asked for, and a conversation is read once."""
        if not prompt_ids:
            raise ValueError("a prompt has no tokens")
        return Stream(self._tokens(prompt_ids, max_new_tokens, stop_ids, decoding))

    def answer_all(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        pad_id: int,
        batch_size: int | None = None,
    ) -> list[Generated]:
        """Answer prompts greedily, one after the other; a beginning that two of them share is read once.

        Nothing is padded and nothing goes in batches, so those two numbers change nothing.
        """
        found = []
        for prompt in prompts:
            answer = self.stream(prompt, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
            ids = list(answer)
            found.append(Generated(ids, answer.ended == "end"))
        return found

    def next_logits(self, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """Give the logits of what would come after each prompt, read alone."""
        return np.stack([self._last_logits(prompt) for prompt in prompts])

    def losses(self, split: Documents, *, most: int | None, progress: ProgressListener = silent) -> Losses:
        """Give the loss of some documents of a split, spread evenly, each read alone."""
        chosen = spread(len(split), most)
        sums, tokens = np.zeros(len(chosen)), np.zeros(len(chosen), dtype=np.int64)
        for place, index in enumerate(chosen.tolist()):
            losses = self._losses_of(*split.arrays(index))
            sums[place], tokens[place] = losses.sum(), len(losses)
            progress(Progress("loss", place + 1, len(chosen), "documents"))
        return chosen, sums, tokens

    def bad_weights(self) -> dict[str, int]:
        """Look at logits, which every weight of the layers and of the head goes into; only bad ones cost a search.

        The word that is never said (a logit of minus infinity) is not bad.
        """
        number = min(_NUM_PROBED, self.context_length, self.vocab_size)
        probe = np.unique(np.linspace(0, self.vocab_size - 1, number).astype(int)).tolist()
        num_bad = 0
        for block in self._room_for(len(probe)).logit_blocks(probe):
            num_bad += int((np.isnan(block) | np.isposinf(block)).sum())
        return (self._bad_tensors() or {"logits": num_bad}) if num_bad else {}

    def close(self) -> None:
        """Free the memory; closing twice does no harm."""
        self._model.close()

    def _open(self, context: int) -> LlamaModel:
        return self._library.open(self.path, context=context, threads=self.num_threads)

    def _room_for(self, num_tokens: int) -> LlamaModel:
        """Give the model with a context of so many tokens: the next power of two, and no more than it can read."""
        if num_tokens > self._model.context:
            size = 1 << (num_tokens - 1).bit_length()
            # Where there is no memory for it, the smaller one goes on; the weights lie in memory once.
            larger = self._open(max(num_tokens, min(size, self.context_length)))
            self._model.close()
            self._model = larger
        return self._model

    def _tokens(
        self, prompt: Sequence[int], max_new_tokens: int, stops: Collection[int], decoding: Decoding
    ) -> Iterator[int | Ended]:
        room = self.context_length - len(prompt)
        number = min(max_new_tokens, room)
        if number > 0:
            model = self._room_for(len(prompt) + number)
            draws = {"temperature": decoding.temperature, "top_p": decoding.top_p, "seed": decoding.seed}
            with closing(model.generate(prompt, max_new_tokens=number, stop_ids=stops, **draws)) as answer:
                yield from answer
                if answer.ended == "end":
                    yield "end"
                    return
        yield "context" if room < max_new_tokens else "length"

    def _last_logits(self, text: Sequence[int]) -> npt.NDArray[np.float32]:
        last_V = np.empty(0, np.float32)
        for block_RV in self._room_for(len(text)).logit_blocks(text):
            last_V = block_RV[-1]
        return last_V

    def _losses_of(self, ids: npt.NDArray[np.int32], labels: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        """Give the loss of every supervised token; what comes behind the last of them is not read.

        ids     a  b  c  d  e
        labels  -  -  c  d  -        <- the loss of c is in the logits behind b
        """
        targets_T = labels[1:]
        supervised = np.flatnonzero(targets_T != -100)
        if not len(supervised):
            return np.zeros(0)
        text = ids[: supervised[-1] + 1].tolist()
        found, start = [], 0
        for block_RV in self._room_for(len(text)).logit_blocks(text):
            rows = supervised[(supervised >= start) & (supervised < start + len(block_RV))]
            found.append(_losses(block_RV[rows - start], targets_T[rows]))
            start += len(block_RV)
        return np.concatenate(found)

    def _bad_tensors(self) -> dict[str, int]:
        found = {}
        for entry in read_tensor_table(self.path):
            tensor = read_tensor(self.path, entry.name)
            if num_bad := tensor.numel() - int(torch.isfinite(tensor).sum()):
                found[entry.name] = num_bad
        return found


def _losses(logits_RV: np.ndarray, targets_R: np.ndarray) -> npt.NDArray[np.float64]:
    logits = torch.from_numpy(logits_RV)
    losses = logits.logsumexp(-1) - logits.gather(-1, torch.from_numpy(targets_R).long()[:, None])[:, 0]
    return losses.double().numpy()


def _name(library: LlamaLibrary) -> str:
    version = "" if library.version == "unknown" else f" {library.version}"
    return f"llama.cpp{version} ({library.origin})"


def _fastest_threads(path: Path) -> int:
    """Use as many threads as are fastest here and now: llama.cpp's wait for each other without sleeping."""
    shapes = {entry.shape for entry in read_tensor_table(path) if len(entry.shape) == 2}
    products = [(1, inner, columns) for columns, inner in sorted(shapes) if columns * inner < _MOST_MEASURED]
    return measure_threads(products, seconds=_MEASURING_SECONDS).value
