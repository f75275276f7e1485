"""A GGUF file that llama.cpp has opened: what it says about itself, and its vocabulary."""

import os
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_int32, create_string_buffer
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

from tunewell.core.errors import UserError
from tunewell.exporting.llama_cpp_calls import Calls
from tunewell.exporting.llama_cpp_file import refuse_deadly


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
