"""ctypes bindings to a llama.cpp library. Struct layouts are checked before the first call.

docs/decisions/0031-llama-cpp-abi.md explains the reasons and the assumptions about the ABI.
"""

import atexit
import ctypes
import os
import struct
import sys
from collections import deque
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tunewell.core.files import parse_json

CPU_ONLY = (c_void_p * 1)()
"""An empty, null-terminated list of GPU devices. It must outlive every model opened with it."""


class Parameters(ctypes.Structure):
    """A parameter struct of any version: 1,024 bytes, larger than every known version, without a declared layout."""

    _fields_ = [("int64s", c_int64 * 128)]

    @property
    def int32s(self) -> "ctypes.Array[c_int32]":
        """The same memory as 32-bit integers."""
        return (c_int32 * 256).from_buffer(self)


class LlamaBatch(ctypes.Structure):
    """`llama_batch`: the tokens of one `llama_decode` call. Null pointers mean the default: one sequence, number 0."""

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
_TYPES: dict[str, Any] = {
    "void": None,
    "bool": c_bool,
    "int32": c_int32,
    "int32*": POINTER(c_int32),
    "uint32": c_uint32,
    "int64": c_int64,
    "size_t": c_size_t,
    "float*": POINTER(c_float),
    "text": c_char_p,
    "parameters": Parameters,
    "batch": LlamaBatch,
    "log_function": _LOG_FUNCTION,
}
"""The types in `functions.json`; every other name is a pointer to an opaque struct."""
_LEVEL_ERROR, _LEVEL_CONTINUED = 4, 5
_MAX_LOG_LINES = 500


class UnusableLibrary(Exception):
    """A library cannot be used. The message continues a sentence that starts with the library's name."""


class LibraryLog:
    """The log of a library, stored in memory and never printed."""

    def __init__(self) -> None:
        self.lines: deque[tuple[int, str]] = deque(maxlen=_MAX_LOG_LINES)
        self.num_lines = 0

    def add(self, level: int, text: bytes | None, _data: object) -> None:
        """Add a message. llama.cpp calls this from any of its threads."""
        message = (text or b"").decode("utf-8", "replace")
        if level == _LEVEL_CONTINUED and self.lines:
            first_level, start = self.lines.pop()
            self.lines.append((first_level, start + message))
            return
        self.lines.append((level, message))
        self.num_lines += 1

    def last(self, *, since: int, most: int = 4) -> list[str]:
        """Return the last lines after line `since`: only errors if there are any, otherwise all levels."""
        new = list(self.lines)[-(self.num_lines - since) :] if self.num_lines > since else []
        errors = [line for line in new if line[0] == _LEVEL_ERROR]
        return [text.strip() for _, text in (errors or new) if text.strip(" .\n")][-most:]


class Bindings:
    """A loaded and checked library. `api` contains its functions."""

    def __init__(self, path: Path) -> None:
        """Load a library. Raise UnusableLibrary if it is not llama.cpp or its structs have an unknown layout."""
        self.path = path
        handles = _load(path)
        # Some packages do not export the optional functions; the code that uses them has a fallback.
        needed, optional = parse_json(Path(__file__).with_name("functions.json").read_bytes()).values()
        found = {name: _bind(handles, name, signature) for name, signature in (needed | optional).items()}
        if missing := [name for name in needed if found[name] is None]:
            raise UnusableLibrary(f"has no `{missing[0]}`" + (f" and {len(missing) - 1} more" if missing[1:] else ""))
        self.api: Any = SimpleNamespace(**found)
        self.log = LibraryLog()
        # Keep a reference, because C calls it until the process ends; libraries are never unloaded.
        self._callback = _LOG_FUNCTION(self.log.add)
        self.capture_log()
        atexit.register(self.api.llama_log_set, _LOG_FUNCTION(), None)
        self.model_parameters()
        self.context_parameters(context=512, batch=512)
        self.api.llama_backend_init()
        # Some builds have the code for each CPU type in separate files next to the library.
        if self.has_all("ggml_backend_dev_count", "ggml_backend_load_all_from_path"):
            if self.api.ggml_backend_dev_count() == 0:
                self.api.ggml_backend_load_all_from_path(os.fsencode(path.parent))
            if self.api.ggml_backend_dev_count() == 0:
                raise UnusableLibrary("has no backend for this CPU in its folder")

    @property
    def version(self) -> str:
        """The version of llama.cpp; empty for older builds, which do not report it."""
        return self.api.llama_version().decode() if self.has_all("llama_version") else ""

    def has_all(self, *names: str) -> bool:
        """Return whether the library exports all of these functions."""
        return all(getattr(self.api, name) is not None for name in names)

    def model_parameters(self) -> Parameters:
        """Return the parameters for a model on the CPU.

        pointer to devices  pointer to overrides  n_gpu_layers         split_mode
        0 0                 0 0                   -1, 0, 99 or 999     1
        """
        parameters = self.api.llama_model_default_params()
        int32s = parameters.int32s
        if list(int32s[:4]) != [0, 0, 0, 0] or int32s[4] not in (-1, 0, 99, 999) or int32s[5] != 1:
            raise UnusableLibrary(_unknown_layout("model", int32s[:6]))
        parameters.int64s[0] = ctypes.addressof(CPU_ONLY)
        int32s[4] = 0
        return parameters

    def context_parameters(self, *, context: int, batch: int) -> Parameters:
        """Return the parameters for a context of `context` tokens that computes in fp32.

        The default KV cache is fp16 and flash attention accumulates in it; the rounding error would hide differences
        that an export verification must find. The field positions differ between versions, so they are found by their
        default values:

            n_ctx n_batch n_ubatch n_seq_max ... rope pooling attention flash  8 numbers  2 pointers  type_k type_v
            512   2048    512      1             -1   -1      -1        -1     ...        0 0         1      1
        """
        parameters = self.api.llama_context_default_params()
        int32s = parameters.int32s
        rope = next((start for start in range(4, 24) if list(int32s[start : start + 4]) == [-1] * 4), 0)
        pointers = rope + 12 + rope % 2  # C aligns pointers to 8 bytes
        is_known = rope and list(int32s[pointers : pointers + 6]) == [0, 0, 0, 0, 1, 1]
        if list(int32s[:4]) != [512, 2048, 512, 1] or not is_known:
            raise UnusableLibrary(_unknown_layout("context", int32s[:32]))
        int32s[0], int32s[1], int32s[2] = context, batch, batch
        int32s[rope + 3] = 0  # flash attention off
        int32s[pointers + 4] = int32s[pointers + 5] = 0  # KV cache in fp32
        return parameters

    def capture_log(self) -> None:
        """Redirect the log to this object, in case another user of the library in this process has redirected it."""
        self.api.llama_log_set(self._callback, None)


def _load(path: Path) -> list[ctypes.CDLL]:
    """Load a library. On Windows, also load the ggml libraries in its folder, because symbols are found per file."""
    if struct.calcsize("P") != 8 or sys.byteorder != "little":
        raise UnusableLibrary("needs a 64-bit little-endian machine")
    beside = sorted(path.parent.glob("ggml*.dll")) if os.name == "nt" else []
    try:
        if os.name == "nt":
            os.add_dll_directory(str(path.parent))
        return [ctypes.CDLL(str(file)) for file in (path, *beside)]
    except OSError as error:
        raise UnusableLibrary(f"cannot be loaded: {error}") from None


def _bind(handles: list[ctypes.CDLL], name: str, signature: str) -> Any:
    """Return a function with the signature `RESULT ARGUMENT ARGUMENT ...`, or None if no library exports it."""
    for handle in handles:
        function = getattr(handle, name, None)
        if function is not None:
            function.restype, *function.argtypes = (_TYPES.get(name, c_void_p) for name in signature.split())
            return function
    return None


def _unknown_layout(what: str, int32s: list[int]) -> str:
    return f"has an unknown layout of its {what} parameters: {list(int32s)}"
