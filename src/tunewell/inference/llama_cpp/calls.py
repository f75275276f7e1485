"""The C functions of a llama.cpp library that tunewell calls, found by name and checked before the first call."""

import atexit
import ctypes
import os
import struct
import sys
from collections import deque
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CPU_ONLY = (c_void_p * 1)()
"""A list of no devices, which has to outlive every model that is opened with it."""


class Parameters(ctypes.Structure):
    """Room for any version's parameter struct: longer than all of them, so that none has to be declared."""

    _fields_ = [("room", c_int64 * 128)]

    @property
    def words(self) -> "ctypes.Array[c_int32]":
        return (c_int32 * 256).from_buffer(self)


class Batch(ctypes.Structure):
    """Tokens to read. What is left empty is the default: one sequence, number 0."""

    _fields_ = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    ]


_LOG_FUNCTION = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
_MODEL = _CONTEXT = _VOCABULARY = _MEMORY = c_void_p
# name: what it gives, what it takes
_NEEDED: dict[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [_LOG_FUNCTION, c_void_p]),
    "llama_model_default_params": (Parameters, []),
    "llama_context_default_params": (Parameters, []),
    "llama_model_load_from_file": (_MODEL, [c_char_p, Parameters]),
    "llama_model_free": (None, [_MODEL]),
    "llama_init_from_model": (_CONTEXT, [_MODEL, Parameters]),
    "llama_free": (None, [_CONTEXT]),
    "llama_n_ctx": (c_uint32, [_CONTEXT]),
    "llama_set_n_threads": (None, [_CONTEXT, c_int32, c_int32]),
    "llama_get_memory": (_MEMORY, [_CONTEXT]),
    "llama_memory_clear": (None, [_MEMORY, c_bool]),
    "llama_memory_seq_rm": (c_bool, [_MEMORY, c_int32, c_int32, c_int32]),
    "llama_decode": (c_int32, [_CONTEXT, Batch]),
    "llama_get_logits": (POINTER(c_float), [_CONTEXT]),
    "llama_model_has_encoder": (c_bool, [_MODEL]),
    "llama_model_has_decoder": (c_bool, [_MODEL]),
    "llama_model_n_params": (c_uint64, [_MODEL]),
    "llama_model_n_ctx_train": (c_int32, [_MODEL]),
    "llama_model_chat_template": (c_char_p, [_MODEL, c_char_p]),
    "llama_model_meta_count": (c_int32, [_MODEL]),
    "llama_model_meta_key_by_index": (c_int32, [_MODEL, c_int32, c_char_p, c_size_t]),
    "llama_model_meta_val_str_by_index": (c_int32, [_MODEL, c_int32, c_char_p, c_size_t]),
    "llama_model_get_vocab": (_VOCABULARY, [_MODEL]),
    "llama_vocab_n_tokens": (c_int32, [_VOCABULARY]),
    "llama_vocab_bos": (c_int32, [_VOCABULARY]),
    "llama_vocab_eos": (c_int32, [_VOCABULARY]),
    "llama_vocab_eot": (c_int32, [_VOCABULARY]),
    "llama_vocab_is_eog": (c_bool, [_VOCABULARY, c_int32]),
    "llama_vocab_get_add_bos": (c_bool, [_VOCABULARY]),
    "llama_vocab_get_add_eos": (c_bool, [_VOCABULARY]),
    "llama_tokenize": (c_int32, [_VOCABULARY, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool]),
    "llama_detokenize": (c_int32, [_VOCABULARY, POINTER(c_int32), c_int32, c_char_p, c_int32, c_bool, c_bool]),
    "llama_token_to_piece": (c_int32, [_VOCABULARY, c_int32, c_char_p, c_int32, c_int32, c_bool]),
}
# Not in every library: some packages leave these out, and what needs them has another way.
_OPTIONAL: dict[str, tuple[Any, list[Any]]] = {
    "llama_version": (c_char_p, []),
    "llama_model_quantize_default_params": (Parameters, []),
    "llama_model_quantize": (c_uint32, [c_char_p, c_char_p, POINTER(Parameters)]),
    "ggml_backend_dev_count": (c_size_t, []),
    "ggml_backend_load_all_from_path": (None, [c_char_p]),
    "ggml_quantize_chunk": (c_size_t, [c_int32, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "ggml_validate_row_data": (c_bool, [c_int32, c_void_p, c_size_t]),
}
_ERROR, _CONTINUED = 4, 5
_KEPT_LINES = 500


class Unusable(Exception):
    """Why a library cannot be used, as the end of a sentence that starts with its name."""


class Log:
    """What a library said: kept, never printed."""

    def __init__(self) -> None:
        self.lines: deque[tuple[int, str]] = deque(maxlen=_KEPT_LINES)
        self.num_lines = 0

    def add(self, level: int, text: bytes | None, _data: object) -> None:
        """Take what llama.cpp says, from whichever of its threads."""
        said = (text or b"").decode("utf-8", "replace")
        if level == _CONTINUED and self.lines:
            before, start = self.lines.pop()
            self.lines.append((before, start + said))
            return
        self.lines.append((level, said))
        self.num_lines += 1

    def last(self, *, since: int, most: int = 4) -> list[str]:
        """Give the last lines that came after the first `since`: errors if there are any, else whatever was said."""
        new = list(self.lines)[-(self.num_lines - since) :] if self.num_lines > since else []
        errors = [line for line in new if line[0] == _ERROR]
        return [text.strip() for _, text in (errors or new) if text.strip(" .\n")][-most:]


class Calls:
    """A library that was loaded, checked and told where to log; `do` holds its functions."""

    def __init__(self, path: Path) -> None:
        """Load it; raise Unusable when it is no llama.cpp, or one whose structs are laid out in an unknown way."""
        self.path = path
        handles = _load(path)
        found = {name: _bound(handles, name, kind) for name, kind in (_NEEDED | _OPTIONAL).items()}
        if missing := [name for name in _NEEDED if found[name] is None]:
            raise Unusable(f"has no `{missing[0]}`" + (f" and {len(missing) - 1} more" if missing[1:] else ""))
        self.do: Any = SimpleNamespace(**found)
        self.log = Log()
        # Kept on the object, and libraries are never unloaded: C holds on to it until the process ends.
        self._callback = _LOG_FUNCTION(self.log.add)
        self.listen()
        atexit.register(self.do.llama_log_set, _LOG_FUNCTION(), None)
        self.model_parameters()
        self.context_parameters(context=512, batch=512)
        if self.has_all("llama_model_quantize", "llama_model_quantize_default_params"):
            self.quantize_parameters(file_type=7, threads=1)
        self.do.llama_backend_init()
        # Some libraries keep the code for each processor in files of their own.
        if self.has_all("ggml_backend_dev_count", "ggml_backend_load_all_from_path"):
            if self.do.ggml_backend_dev_count() == 0:
                self.do.ggml_backend_load_all_from_path(os.fsencode(path.parent))
            if self.do.ggml_backend_dev_count() == 0:
                raise Unusable("finds no code for this processor beside it")

    @property
    def version(self) -> str:
        """Say which llama.cpp it is; older ones do not tell."""
        return self.do.llama_version().decode() if self.has_all("llama_version") else "unknown"

    def has_all(self, *names: str) -> bool:
        """Tell whether the library exports all of these."""
        return all(getattr(self.do, name) is not None for name in names)

    def model_parameters(self) -> Parameters:
        """Make the parameters of a model that stays on the processor: devices, overrides, layers on the GPU, split."""
        made = self.do.llama_model_default_params()
        words = made.words
        if list(words[:4]) != [0, 0, 0, 0] or words[4] not in (-1, 0, 99, 999) or words[5] != 1:
            raise Unusable(_strange("model", words[:6]))
        made.room[0] = ctypes.addressof(CPU_ONLY)
        words[4] = 0
        return made

    def context_parameters(self, *, context: int, batch: int) -> Parameters:
        """Make the parameters of a context that computes in fp32 and holds `context` tokens of one sequence.

        The default cache is fp16, and the default attention sums in it: differences of the size a proof looks for.

            n_ctx n_batch n_ubatch n_seq_max ... rope pooling attention flash  8 numbers  2 pointers  type_k type_v
            512   2048    512      1             -1   -1      -1        -1     ...        0 0         1      1
        """
        made = self.do.llama_context_default_params()
        words = made.words
        at = next((start for start in range(4, 24) if list(words[start : start + 4]) == [-1] * 4), 0)
        pointers = at + 12 + at % 2  # C puts them at whole multiples of 8 bytes
        is_known = at and list(words[pointers : pointers + 6]) == [0, 0, 0, 0, 1, 1]
        if list(words[:4]) != [512, 2048, 512, 1] or not is_known:
            raise Unusable(_strange("context", words[:32]))
        words[0], words[1], words[2] = context, batch, batch
        words[at + 3] = 0  # no flash attention
        words[pointers + 4] = words[pointers + 5] = 0  # a cache in fp32
        return made

    def quantize_parameters(self, *, file_type: int, threads: int) -> Parameters:
        """Make the parameters of a quantisation: threads and kind of file come first."""
        made = self.do.llama_model_quantize_default_params()
        words = made.words
        # The default is q8_0 (or q5_1, once); the two types behind it are "not given": one past the last there is.
        if words[0] != 0 or words[1] not in (7, 9) or words[2] != words[3] or not 30 <= words[2] <= 200:
            raise Unusable(_strange("quantisation", words[:4]))
        words[0], words[1] = threads, file_type
        return made

    def listen(self) -> None:
        """Have the log again, if another user of the library in this process has taken it."""
        self.do.llama_log_set(self._callback, None)


def _load(path: Path) -> list[ctypes.CDLL]:
    """Load a library; on Windows its neighbours too, since a name is looked up there in one file only."""
    if struct.calcsize("P") != 8 or sys.byteorder != "little":
        raise Unusable("needs a 64-bit little-endian machine")
    beside = sorted(path.parent.glob("ggml*.dll")) if os.name == "nt" else []
    try:
        if os.name == "nt":
            os.add_dll_directory(str(path.parent))
        return [ctypes.CDLL(str(file)) for file in (path, *beside)]
    except OSError as error:
        raise Unusable(f"cannot be loaded: {error}") from None


def _bound(handles: list[ctypes.CDLL], name: str, kind: tuple[Any, list[Any]]) -> Any:
    for handle in handles:
        function = getattr(handle, name, None)
        if function is not None:
            function.restype, function.argtypes = kind
            return function
    return None


def _strange(what: str, words: list[int]) -> str:
    return f"has {what} parameters that are laid out in an unknown way: {list(words)}"
