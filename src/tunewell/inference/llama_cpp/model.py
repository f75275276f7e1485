"""A GGUF file that llama.cpp has opened: what it says about itself, and its vocabulary."""

import os
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from ctypes import POINTER, c_int8, c_int32, create_string_buffer
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from tunewell.core.errors import UserError
from tunewell.core.gguf import read_metadata, tensor_count
from tunewell.hardware.facts import physical_cores, usable_cores
from tunewell.inference.llama_cpp.calls import Batch, Calls
from tunewell.inference.stream import Ended, Stream

# Look at a GGUF file before llama.cpp does: some mistakes in one make it end the whole process.

# What llama.cpp asserts rather than reports, as of its version 0.6; found by damaging every field of a file in turn.
_MOST_LAYERS = 512
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def refuse_deadly(path: Path) -> None:
    """Raise UserError for a file that is damaged, or that llama.cpp would not survive."""
    meta = read_metadata(path)
    for problem in _problems(meta, num_tensors=tensor_count(path)):
        raise UserError(f"`{path.name}` {problem}", where=str(path), fix="convert the model again")


def _problems(meta: dict[str, Any], *, num_tensors: int) -> Iterator[str]:
    """Say what is wrong, each as the end of a sentence that starts with the name of the file."""
    if num_tensors == 0:
        yield "holds no tensors: it is a vocabulary alone"
    family = meta.get("general.architecture")
    layers = meta.get(f"{family}.block_count")
    if isinstance(layers, int) and not 1 <= layers <= _MOST_LAYERS:
        yield f"says that it has {layers:,} layers"
    for key in ("layer_norm_rms_epsilon", "layer_norm_epsilon"):
        epsilon = meta.get(f"{family}.attention.{key}", 0.0)
        if isinstance(epsilon, float) and not epsilon >= 0:
            yield f"has {epsilon} as `{key}`"
    experts, used = (meta.get(f"{family}.expert{part}_count", 0) for part in ("", "_used"))
    if isinstance(experts, int) and isinstance(used, int) and not min(experts, 1) <= used <= experts:
        yield f"uses {used:,} of {experts:,} experts"
    yield from _vocabulary_problems(meta)


def _vocabulary_problems(meta: dict[str, Any]) -> Iterator[str]:
    tokens = meta.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return
    # As C reads them: up to the first NUL; those of which nothing is left are given names of their own.
    known = Counter(text for token in tokens if (text := str(token).split("\0", 1)[0]))
    twice, num = known.most_common(1)[0] if known else ("", 0)
    if num > 1:
        yield f"lists the token `{twice[:40]}` {num:,} times"
    if meta.get("tokenizer.ggml.model") == "llama" and (missing := _BYTE_TOKENS - known.keys()):
        yield f"has no token for {len(missing):,} of the 256 bytes (`{min(missing)}`): some texts have no tokens"


class OpenedFile:
    """The weights and the vocabulary of one file, on the processor. Close it, or use it in a `with` block."""

    def __init__(self, calls: Calls, path: Path) -> None:
        """Open a file; raise UserError for one that llama.cpp does not take."""
        # A damaged file is told in our words, and never reaches code that may end the process over it.
        refuse_deadly(path)
        self.path = path
        self._calls = calls
        self._do = calls.do
        calls.listen()
        self._since = calls.log.num_lines
        self._model = self._do.llama_model_load_from_file(os.fsencode(path), calls.model_parameters())
        if not self._model:
            raise self._refused("cannot be loaded")
        self._handles: list[tuple[Callable[[Any], None], Any]] = [(self._do.llama_model_free, self._model)]
        self._free = weakref.finalize(self, _free_all, self._handles)
        self._vocabulary = self._do.llama_model_get_vocab(self._model)
        self.vocab_size: int = self._do.llama_vocab_n_tokens(self._vocabulary)

    def close(self) -> None:
        """Free the memory; closing twice does no harm."""
        self._free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def meta(self) -> dict[str, str]:
        """What the file says about itself, every value as llama.cpp writes it; arrays are left out."""
        values = (self._do.llama_model_meta_key_by_index, self._do.llama_model_meta_val_str_by_index)
        num = self._do.llama_model_meta_count(self._living())
        key, value = (partial(_text, function, self._model) for function in values)
        return {key(number): value(number) for number in range(num)}

    @property
    def chat_template(self) -> str | None:
        """The Jinja template in the file."""
        found = self._do.llama_model_chat_template(self._living(), None)
        return None if found is None else found.decode("utf-8", "replace")

    @property
    def num_parameters(self) -> int:
        return self._do.llama_model_n_params(self._living())

    @property
    def trained_context(self) -> int:
        """Tokens the model was trained to read; `context` may be more, and then nothing is promised."""
        return self._do.llama_model_n_ctx_train(self._living())

    @property
    def bos(self) -> int | None:
        """The first token of a text; llama.cpp assumes one where the file names none, and only `adds_bos` uses it."""
        return _token(self._do.llama_vocab_bos(self._words()))

    @property
    def eos(self) -> int | None:
        return _token(self._do.llama_vocab_eos(self._words()))

    @property
    def eot(self) -> int | None:
        return _token(self._do.llama_vocab_eot(self._words()))

    @property
    def adds_bos(self) -> bool:
        """Whether `tokenize` puts the first token in front by itself, which doubles one that a template wrote."""
        return self._do.llama_vocab_get_add_bos(self._words())

    @property
    def adds_eos(self) -> bool:
        return self._do.llama_vocab_get_add_eos(self._words())

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Every token at which llama.cpp's own programs stop."""
        is_end, vocabulary = self._do.llama_vocab_is_eog, self._words()
        return frozenset(number for number in range(self.vocab_size) if is_end(vocabulary, number))

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Split a text as llama.cpp does.

        `add_special` adds what the file says belongs around a text; `parse_special` reads `<|im_end|>` as one token.
        """
        data = text.encode()
        wanted, room = (add_special, parse_special), len(data) + 8
        while True:
            ids = (c_int32 * room)()
            num = self._do.llama_tokenize(self._words(), data, len(data), ids, room, *wanted)
            if num >= 0:
                return ids[:num]
            room = -num

    def piece(self, token: int) -> bytes:
        """Spell one token, special ones too; a character may be spread over several."""
        self._check([token])
        room = 64
        while True:
            text = create_string_buffer(room)
            num = self._do.llama_token_to_piece(self._words(), token, text, room, 0, True)
            if num >= 0:
                return text.raw[:num]
            room = -num

    def detokenize(self, ids: Sequence[int], *, is_special_shown: bool = False) -> str:
        """Spell tokens together; bytes that make no character come out as U+FFFD."""
        self._check(ids)
        tokens, room = (c_int32 * len(ids))(*ids), 16 * len(ids) + 16
        while True:
            text = create_string_buffer(room)
            num = self._do.llama_detokenize(self._words(), tokens, len(ids), text, room, False, is_special_shown)
            if num >= 0:
                return text.raw[:num].decode("utf-8", "replace")
            room = -num

    def _living(self) -> Any:
        if not self._free.alive:
            raise ValueError(f"`{self.path.name}` was closed")
        return self._model

    def _words(self) -> Any:
        self._living()
        return self._vocabulary

    def _check(self, ids: Sequence[int]) -> None:
        if strange := [token for token in ids if not 0 <= token < self.vocab_size]:
            raise ValueError(f"token {strange[0]} is not one of the {self.vocab_size:,} in `{self.path.name}`")

    def _refused(self, what: str) -> UserError:
        said = "; ".join(self._calls.log.last(since=self._since))
        return UserError(
            f"`{self.path.name}` {what} in llama.cpp" + (f": {said}" if said else ""),
            where=str(self.path),
            fix="convert or download the model again; a newer architecture needs a newer llama.cpp",
        )


def _free_all(handles: list[tuple[Callable[[Any], None], Any]]) -> None:
    """Free what was made last first: a context uses its model to the end."""
    while handles:
        free, handle = handles.pop()
        free(handle)


def _text(function: Any, model: Any, number: int) -> str:
    """Call a function that fills a buffer and says how long the whole text is."""
    room = 256
    while True:
        text = create_string_buffer(room)
        length = function(model, number, text, room)
        if length < room:
            return text.raw[: max(length, 0)].decode("utf-8", "replace")
        room = length + 1


def _token(number: int) -> int | None:
    return None if number < 0 else number


# How each token of an answer is chosen in llama.cpp.


@dataclass(frozen=True)
class Drawing:
    """How a token is chosen: temperature 0 takes the likeliest."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class Chooser:
    """Takes the likeliest token, or draws one from dice of its own."""

    def __init__(self, drawing: Drawing) -> None:
        self._drawing = drawing
        self._dice = np.random.default_rng(drawing.seed)

    def __call__(self, logits_V: np.ndarray) -> int:
        """Draw among the fewest tokens that together have `top_p` of the chances."""
        temperature, top_p = self._drawing.temperature, self._drawing.top_p
        if temperature <= 0:
            return int(logits_V.argmax())
        scaled_V = np.exp((logits_V.astype(np.float64) - logits_V.max()) / temperature)
        chances_V = scaled_V / scaled_V.sum()
        order_V = np.argsort(-chances_V, kind="stable")
        kept = order_V[: int(np.searchsorted(np.cumsum(chances_V[order_V]), top_p)) + 1]
        return int(self._dice.choice(kept, p=chances_V[kept] / chances_V[kept].sum()))


# A GGUF model at work in llama.cpp: its logits and its answers, computed on the processor in fp32.

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
