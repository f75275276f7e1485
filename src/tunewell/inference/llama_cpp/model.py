"""A GGUF file opened in llama.cpp on the CPU: metadata, tokenizer, logits and answers, computed in fp32."""

import os
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from ctypes import POINTER, c_int8, c_int32, create_string_buffer
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from tunewell.core.errors import UserError
from tunewell.inference.decoder import GREEDY, Decoding
from tunewell.inference.generate import shared_prefix_length
from tunewell.inference.llama_cpp.bindings import Bindings, LlamaBatch
from tunewell.inference.stream import Tokens, TokenStream, sample_tokens
from tunewell.machine.facts import physical_cores, usable_cores
from tunewell.model_files.gguf import read_metadata, tensor_count

_BATCH = 512
"""Tokens per `llama_decode`. The logits of 512 positions take up to 300 MB, depending on the vocabulary."""
_TO_THE_END = -1
# llama.cpp 0.6 aborts the process on values outside these bounds. They were found by damaging each field in turn.
_MAX_LAYERS = 512
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


class LlamaModel:
    """An open model with one context for one text at a time. It is not thread-safe.

    Close it, or use it in a `with` block.
    """

    def __init__(self, bindings: Bindings, path: Path, *, context: int, threads: int | None = None) -> None:
        """Open a file with a context of `context` tokens. Raise UserError if llama.cpp rejects it."""
        if context < 1 or (threads is not None and threads < 1):
            raise ValueError("context and threads must be at least 1")
        require_safe_file(path)
        self.path = path
        self.context = context
        self._bindings = bindings
        self._api = bindings.api
        self._cached: list[int] = []
        self._text_number = 0
        bindings.capture_log()
        self._log_start = bindings.log.num_lines
        self._model = self._api.llama_model_load_from_file(os.fsencode(path), bindings.model_parameters())
        if not self._model:
            raise self._rejected("cannot be loaded")
        self._handles: list[tuple[Callable[[Any], None], Any]] = [(self._api.llama_model_free, self._model)]
        self._free = weakref.finalize(self, _free_all, self._handles)
        self._vocabulary = self._api.llama_model_get_vocab(self._model)
        self.vocab_size: int = self._api.llama_vocab_n_tokens(self._vocabulary)
        # One thread per physical core, as in llama.cpp, because its threads spin while they wait for each other.
        self._num_threads = threads or min(physical_cores() or usable_cores(), usable_cores())
        self._start_context()

    def _start_context(self) -> None:
        self._cached.clear()
        self._text_number += 1
        api = self._api
        try:
            if api.llama_model_has_encoder(self._model) or not api.llama_model_has_decoder(self._model):
                raise self._rejected("is not a decoder-only model")
            parameters = self._bindings.context_parameters(context=self.context, batch=min(_BATCH, self.context))
            self._context = api.llama_init_from_model(self._model, parameters)
            if not self._context:
                raise self._rejected(f"could not get a context of {self.context:,} tokens")
            self._handles.append((api.llama_free, self._context))
            if api.llama_n_ctx(self._context) < self.context:
                raise self._rejected(f"has a context of fewer than {self.context:,} tokens")
        except BaseException:
            self.close()
            raise
        self._memory = api.llama_get_memory(self._context)
        api.llama_set_n_threads(self._context, self._num_threads, self._num_threads)

    def close(self) -> None:
        """Free the memory. Closing twice is allowed."""
        self._free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Metadata and tokenizer.

    @property
    def trained_context(self) -> int:
        """The context length in tokens with which the model was trained. `context` may be longer."""
        return self._api.llama_model_n_ctx_train(self._open_model())

    @property
    def bos(self) -> int | None:
        """The BOS token. llama.cpp assumes one if the file has none. `tokenize` adds it only if `adds_bos` is True."""
        found = self._api.llama_vocab_bos(self._open_vocabulary())
        return None if found < 0 else found

    @property
    def adds_bos(self) -> bool:
        """Whether `tokenize` adds the BOS token, which duplicates a BOS token from the chat template."""
        return self._api.llama_vocab_get_add_bos(self._open_vocabulary())

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The tokens at which llama.cpp's own programs stop generation."""
        is_end, vocabulary = self._api.llama_vocab_is_eog, self._open_vocabulary()
        return frozenset(number for number in range(self.vocab_size) if is_end(vocabulary, number))

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the tokens of a text, as tokenized by llama.cpp.

        `add_special` adds BOS and EOS if the file requires them. `parse_special` parses `<|im_end|>` as one token.
        """
        data, size = text.encode(), len(text.encode()) + 8
        while True:
            ids = (c_int32 * size)()
            num = self._api.llama_tokenize(
                self._open_vocabulary(), data, len(data), ids, size, add_special, parse_special
            )
            if num >= 0:
                return ids[:num]
            size = -num

    def piece(self, token: int) -> bytes:
        """Return the bytes of one token, which may be a special token. A character may span several tokens."""
        self._require_tokens([token])
        size = 64
        while True:
            text = create_string_buffer(size)
            num = self._api.llama_token_to_piece(self._open_vocabulary(), token, text, size, 0, True)
            if num >= 0:
                return text.raw[:num]
            size = -num

    # Logits and answers.

    def logit_blocks(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the logits after every token of a text as fp32 blocks [512, V], starting with an empty KV cache."""
        self._require_text(ids)
        self._begin_text(num_kept=0)
        for block in self._blocks(ids, len(ids)):
            yield block.copy()

    def last_logits(self, ids: Sequence[int], number: int) -> np.ndarray:
        """Return the logits of the last `number` positions of a text. The head computes no other positions.

        As in `generate`, a prefix shared with the previous text stays in the KV cache.
        """
        self._require_text(ids)
        self._begin_text(num_kept=max(0, min(shared_prefix_length(self._cached, ids), len(ids) - number)))
        rows = [np.empty((0, self.vocab_size), np.float32)]
        rows += [block.copy() for block in self._blocks(ids[len(self._cached) :], number)]
        return np.concatenate(rows)[-number:]

    def set_context(self, context: int) -> None:
        """Replace the context by one of `context` tokens. The weights stay loaded."""
        self._open_model()
        if context != self.context:
            _free_all(self._handles[1:])
            del self._handles[1:]
            self.context = context
            self._start_context()

    def generate(
        self, ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int], decoding: Decoding = GREEDY
    ) -> TokenStream:
        """Stream a continuation of a text. Each token is computed on demand.

        A prefix shared with the previous text stays in the KV cache, so a conversation is processed only once.
        """
        if not ids:
            raise ValueError("a prompt has no tokens")
        self._require_text(ids)
        return TokenStream(self._tokens(list(ids), max_new_tokens, stop_ids, decoding))

    def _tokens(self, ids: list[int], max_new_tokens: int, stops: Collection[int], decoding: Decoding) -> Tokens:
        num_free = self.context - len(ids)
        # The last token is always computed again, because its logits choose the first new token.
        text_number = self._begin_text(num_kept=min(shared_prefix_length(self._cached, ids), len(ids) - 1))

        def next_logits(pending: Sequence[int]) -> torch.Tensor:
            self._require_current(text_number)
            *_, logits = self._blocks(pending, 1)
            return torch.from_numpy(logits)

        pending = ids[len(self._cached) :]
        tokens = sample_tokens(next_logits, pending, decoding, stops, max_new=max_new_tokens, num_free=num_free)
        return (yield from tokens)

    def _blocks(self, ids: Sequence[int], number: int) -> Iterator[np.ndarray]:
        """Append tokens to the KV cache in blocks, and yield the logits of the last `number` positions.

        A block before these yields its last position.
        """
        text_number = self._text_number
        for start in range(0, len(ids), _BATCH):
            self._require_current(text_number)
            block = ids[start : start + _BATCH]
            num_after = len(ids) - start - len(block)
            yield self._forward(block, num_logits=max(1, min(len(block), number - num_after)))

    def _begin_text(self, *, num_kept: int) -> int:
        """Remove all but the first `num_kept` tokens from the KV cache. Streams of earlier texts become invalid."""
        self._open_model()
        self._text_number += 1
        if not num_kept or not self._api.llama_memory_seq_rm(self._memory, 0, num_kept, _TO_THE_END):
            self._api.llama_memory_clear(self._memory, False)
            num_kept = 0
        del self._cached[num_kept:]
        return self._text_number

    def _forward(self, ids: Sequence[int], *, num_logits: int = 1) -> np.ndarray:
        """Append tokens to the KV cache. Return the logits of the last `num_logits`, in llama.cpp's memory."""
        num, start = len(ids), len(self._cached)
        has_logits = np.zeros(num, np.int8)
        has_logits[-num_logits:] = 1
        tokens, positions = np.asarray(ids, np.int32), np.arange(start, start + num, dtype=np.int32)
        batch = LlamaBatch(n_tokens=num)
        batch.token, batch.pos = (array.ctypes.data_as(POINTER(c_int32)) for array in (tokens, positions))
        batch.logits = has_logits.ctypes.data_as(POINTER(c_int8))
        log_start = self._bindings.log.num_lines
        code = self._api.llama_decode(self._context, batch)
        found = self._api.llama_get_logits(self._context) if code == 0 else None
        if not found:
            self._begin_text(num_kept=0)
            log = "; ".join(self._bindings.log.last(since=log_start))
            raise RuntimeError(f"llama_decode failed on {num:,} tokens (code {code}): {log}")
        self._cached.extend(ids)
        return np.ctypeslib.as_array(found, (num_logits, self.vocab_size))

    # Checks before calls into C.

    def _open_model(self) -> Any:
        if not self._free.alive:
            raise ValueError(f"`{self.path.name}` was closed")
        return self._model

    def _open_vocabulary(self) -> Any:
        self._open_model()
        return self._vocabulary

    def _require_tokens(self, ids: Sequence[int]) -> None:
        if unknown := [token for token in ids if not 0 <= token < self.vocab_size]:
            raise ValueError(f"token {unknown[0]} is not one of the {self.vocab_size:,} in `{self.path.name}`")

    def _require_text(self, ids: Sequence[int]) -> None:
        self._require_tokens(ids)
        if len(ids) > self.context:
            raise UserError(
                f"a text has {len(ids):,} tokens but the context holds {self.context:,}",
                where=str(self.path),
                fix=f"open the model with a context of at least {len(ids):,}, or shorten the text",
            )

    def _require_current(self, text_number: int) -> None:
        if text_number != self._text_number:
            raise RuntimeError("the model has started another text: one context holds one text at a time")
        self._open_model()

    def _rejected(self, what: str) -> UserError:
        log = "; ".join(self._bindings.log.last(since=self._log_start))
        return UserError(
            f"`{self.path.name}` {what} in llama.cpp" + (f": {log}" if log else ""),
            where=str(self.path),
            fix="convert or download the model again; a newer architecture needs a newer llama.cpp",
        )


def _free_all(handles: list[tuple[Callable[[Any], None], Any]]) -> None:
    """Free in reverse order, because a context uses its model until it is freed."""
    while handles:
        free, handle = handles.pop()
        free(handle)


def require_safe_file(path: Path) -> None:
    """Raise UserError if a file is damaged or would make llama.cpp abort the process."""
    meta = read_metadata(path)
    for problem in _problems(meta, num_tensors=tensor_count(path)):
        raise UserError(f"`{path.name}` {problem}", where=str(path), fix="convert the model again")


def _problems(meta: dict[str, Any], *, num_tensors: int) -> Iterator[str]:
    """Yield each problem as the end of a sentence that starts with the file's name."""
    if num_tensors == 0:
        yield "has no tensors, only a vocabulary"
    family = meta.get("general.architecture")
    layers = meta.get(f"{family}.block_count")
    if isinstance(layers, int) and not 1 <= layers <= _MAX_LAYERS:
        yield f"has {layers:,} layers in its metadata"
    for key in ("layer_norm_rms_epsilon", "layer_norm_epsilon"):
        epsilon = meta.get(f"{family}.attention.{key}", 0.0)
        if isinstance(epsilon, float) and not epsilon >= 0:
            yield f"has {epsilon} as `{key}`"
    experts, used = (meta.get(f"{family}.expert{part}_count", 0) for part in ("", "_used"))
    if isinstance(experts, int) and isinstance(used, int) and not min(experts, 1) <= used <= experts:
        yield f"uses {used:,} of {experts:,} experts"
    tokens = meta.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return
    # C strings end at the first NUL, and llama.cpp renames empty tokens.
    counts = Counter(text for token in tokens if (text := str(token).split("\0", 1)[0]))
    repeated, num = counts.most_common(1)[0] if counts else ("", 0)
    if num > 1:
        yield f"lists the token `{repeated[:40]}` {num:,} times"
    if meta.get("tokenizer.ggml.model") == "llama" and (missing := _BYTE_TOKENS - counts.keys()):
        yield f"has no token for {len(missing):,} of the 256 bytes (`{min(missing)}`); some texts cannot be tokenized"
