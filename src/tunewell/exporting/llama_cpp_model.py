"""A GGUF model at work in llama.cpp: its logits and its answers, computed on the processor in fp32."""

from collections.abc import Collection, Iterator, Sequence
from ctypes import POINTER, c_int8, c_int32
from pathlib import Path
from typing import Any

import numpy as np

from tunewell.core.errors import UserError
from tunewell.exporting.llama_cpp_calls import Batch, Calls
from tunewell.exporting.llama_cpp_drawing import Chooser, Drawing
from tunewell.exporting.llama_cpp_opened import OpenedFile
from tunewell.hardware.facts import physical_cores, usable_cores
from tunewell.models.token_stream import Ended, Stream

# Tokens read at once: logits of 512 positions take 300 MB in the largest vocabularies.
_BATCH = 512
_TO_THE_END = -1


class LlamaModel(OpenedFile):
    """One model with one context, which holds one text at a time; it is not for several threads at once."""

    def __init__(self, calls: Calls, path: Path, *, context: int, threads: int | None = None) -> None:
        """Open a file for texts of up to `context` tokens; raise UserError for one that llama.cpp does not take."""
        if context < 1 or (threads is not None and threads < 1):
            raise ValueError("a context and a number of threads are at least 1")
        super().__init__(calls, path)
        self.context = context
        self._cached: list[int] = []
        self._turn = 0
        try:
            self._context = self._open_context()
        except BaseException:
            self.close()
            raise
        self._memory = self._do.llama_get_memory(self._context)
        # One a physical core, as llama.cpp has it: its threads wait for each other without sleeping.
        num_threads = threads or min(physical_cores() or usable_cores(), usable_cores())
        self._do.llama_set_n_threads(self._context, num_threads, num_threads)

    def _open_context(self) -> Any:
        if self._do.llama_model_has_encoder(self._model) or not self._do.llama_model_has_decoder(self._model):
            raise self._refused("is not a model that continues a text")
        wanted = self._calls.context_parameters(context=self.context, batch=min(_BATCH, self.context))
        opened = self._do.llama_init_from_model(self._model, wanted)
        if not opened:
            raise self._refused(f"cannot be given a context of {self.context:,} tokens")
        self._handles.append((self._do.llama_free, opened))
        if self._do.llama_n_ctx(opened) < self.context:
            raise self._refused(f"takes fewer than {self.context:,} tokens")
        return opened

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Compute the logits behind every token of a text, from an empty cache: [T, V] in fp32."""
        blocks = list(self.logit_blocks(ids))
        return np.concatenate(blocks) if blocks else np.empty((0, self.vocab_size), np.float32)

    def logit_blocks(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        """Compute `logits` some hundred rows at a time, for vocabularies whose logits of a whole text are too large."""
        self._check(ids)
        self._refuse_overflow(ids)
        turn = self._begin(kept=0)
        for start in range(0, len(ids), _BATCH):
            self._refuse_other_turn(turn)
            yield self._read(ids[start : start + _BATCH], is_each_wanted=True).copy()

    def generate(
        self,
        ids: Sequence[int],
        *,
        max_new_tokens: int,
        stop_ids: Collection[int],
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Stream:
        """Continue a text; each token is computed when it is asked for.

        Temperature 0 takes the likeliest token. What the cache holds of an earlier text that began alike is not read
        again, so a conversation is read once.
        """
        if not ids:
            raise ValueError("a prompt has no tokens")
        self._check(ids)
        self._refuse_overflow(ids)
        choose = Chooser(Drawing(temperature, top_p, seed))
        return Stream(self._tokens(list(ids), max_new_tokens, frozenset(stop_ids), choose))

    def _tokens(
        self, ids: list[int], max_new_tokens: int, stops: frozenset[int], choose: Chooser
    ) -> Iterator[int | Ended]:
        room = self.context - len(ids)
        # The last token is read again: its logits are those of the first new one.
        turn = self._begin(kept=min(_num_alike(self._cached, ids), len(ids) - 1))
        unread = ids[len(self._cached) :]
        for _ in range(min(max_new_tokens, room)):
            self._refuse_other_turn(turn)
            token = choose(self._read_all(unread))
            if token in stops:
                yield "end"
                return
            yield token
            unread = [token]
        yield "context" if room < max_new_tokens else "length"

    def _read_all(self, ids: list[int]) -> np.ndarray:
        """Read any number of tokens; give the logits of the last."""
        whole = (len(ids) - 1) // _BATCH * _BATCH
        for start in range(0, whole, _BATCH):
            self._read(ids[start : start + _BATCH])
        return self._read(ids[whole:])[0]

    def _begin(self, *, kept: int) -> int:
        """Forget all but the first `kept` tokens of the cache; what was being generated cannot go on."""
        self._living()
        self._turn += 1
        if not kept or not self._do.llama_memory_seq_rm(self._memory, 0, kept, _TO_THE_END):
            self._do.llama_memory_clear(self._memory, False)
            kept = 0
        del self._cached[kept:]
        return self._turn

    def _refuse_other_turn(self, turn: int) -> None:
        if turn != self._turn:
            raise RuntimeError("the model has begun another text: one context holds one text at a time")
        self._living()

    def _read(self, ids: Sequence[int], *, is_each_wanted: bool = False) -> np.ndarray:
        """Read tokens behind those in the cache; give the logits of each, or of the last, in llama.cpp's own memory."""
        num, start = len(ids), len(self._cached)
        wanted = np.full(num, is_each_wanted, np.int8)
        wanted[-1] = 1
        tokens, positions = np.asarray(ids, np.int32), np.arange(start, start + num, dtype=np.int32)
        batch = Batch(n_tokens=num)
        batch.token, batch.pos = (array.ctypes.data_as(POINTER(c_int32)) for array in (tokens, positions))
        batch.logits = wanted.ctypes.data_as(POINTER(c_int8))
        since = self._calls.log.num_lines
        code = self._do.llama_decode(self._context, batch)
        found = self._do.llama_get_logits(self._context) if code == 0 else None
        if not found:
            self._begin(kept=0)
            said = "; ".join(self._calls.log.last(since=since))
            raise RuntimeError(f"llama.cpp could not read {num:,} tokens (code {code}): {said}")
        self._cached.extend(ids)
        return np.ctypeslib.as_array(found, (num if is_each_wanted else 1, self.vocab_size))

    def _refuse_overflow(self, ids: Sequence[int]) -> None:
        if len(ids) > self.context:
            raise UserError(
                f"a text has {len(ids):,} tokens but the context holds {self.context:,}",
                where=str(self.path),
                fix=f"open the model with a context of at least {len(ids):,}, or shorten the text",
            )


def _num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
