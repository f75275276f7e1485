"""References for the tokenizer tests: llama.cpp itself, a GGUF writer, and texts that reach every rule."""

import ctypes
import importlib.util
import random
import struct
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

POOLS = [
    "abcdefghij XYZ  ",
    "0123456789 ,.",
    "'s't're'll'D'Sdon't camelCase ",
    "\n\r\t  \u00a0\u3000\u0085\u2028",
    "éßñÉÜǅʰªλΣжЖ",
    "漢字仮名かなカナ한글ㄱㄅ",
    "١٢३४Ⅷ½²",
    "\u0336\u0301\u0903\u0e32\u0e34",
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    "…。，、“”‘’—：；€£∑→😀👍🏽",
    "\u200b\u200d\ufeff\u00ad",
    "กขคำक्षि",
    "the boy has 12  apples and\n\n eats 1234567 of them. ",
]


def random_texts(count: int, seed: int, pools: list[str] = POOLS) -> list[str]:
    """Make texts that mix scripts, digits, runs of spaces and newlines, the same ones for the same seed."""
    draw = random.Random(seed)

    def text() -> str:
        parts = []
        for _ in range(draw.randint(1, 8)):
            pool = draw.choice(pools)
            whole = draw.random() < 0.3
            parts.append(pool if whole else "".join(draw.choice(pool) for _ in range(draw.randint(1, 6))))
            parts.append(" " * draw.choice([0, 0, 0, 1, 1, 2]))
        return "".join(parts)

    return [text() for _ in range(count)]


def train_byte_level(num_tokens: int = 3000) -> tuple[list[str], list[str]]:
    """Train merges that reach across digits, spaces and punctuation, so that only the cuts keep them apart."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    digits = [str(number) for number in range(0, 2000, 3)]
    backend.train_from_iterator([*random_texts(3000, seed=99), *digits], trainer)
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    return tokens, [" ".join(merge) for merge in _merges(backend)]


def _merges(backend: Tokenizer) -> list[list[str]]:
    import json

    merges = json.loads(backend.to_str())["model"]["merges"]
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]


def byte_level_metadata(tokens: list[str], merges: list[str], pre: str, **more: Any) -> dict[str, Any]:
    """Describe a byte-level vocabulary as llama.cpp's converter would, with `<|end|>`-like markers at its end."""
    markers = ["<|im_start|>", "<|im_end|>", "<|user_defined|>"]
    return {
        **_MODEL,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *markers],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 3, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
        **more,
    }


def sentencepiece_metadata(pieces: list[str], scores: list[float], types: list[int], **more: Any) -> dict[str, Any]:
    return {
        **_MODEL,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        **more,
    }


# The sizes llama.cpp insists on, also for a file that carries a vocabulary only.
_MODEL = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "llama.embedding_length": 64,
    "llama.block_count": 1,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def write_gguf(path: Path, metadata: dict[str, Any]) -> Path:
    """Write a GGUF file without tensors."""
    pairs = b"".join(_text(key) + _value(value) for key, value in metadata.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(metadata)) + pairs)
    return path


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    if isinstance(value[0], float):
        return struct.pack(f"<IIQ{len(value)}f", 9, 6, len(value), *value)
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


class _ModelParams(ctypes.Structure):
    """llama.cpp's `llama_model_params`, 80 bytes passed by value; only one flag in it is touched."""

    _fields_ = [("data", ctypes.c_ubyte * 80)]


# Where `vocab_only` lies in the build that constraints.txt pins (xllamacpp 2026.10): five pointers, four numbers with
# their padding, three pointers, then the flags.
_VOCAB_ONLY_AT = 72
_QUIET = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)


class LlamaCpp:
    """The vocabulary of a GGUF file as llama.cpp reads it, through the symbols that xllamacpp's library exports."""

    def __init__(self, path: Path) -> None:
        spec = importlib.util.find_spec("xllamacpp.xllamacpp")
        assert spec is not None and spec.origin is not None
        library = ctypes.CDLL(spec.origin)
        library.llama_log_set.argtypes = [type(_QUIET), ctypes.c_void_p]
        library.llama_log_set(_QUIET, None)
        library.llama_model_default_params.restype = _ModelParams
        library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _ModelParams]
        library.llama_model_load_from_file.restype = ctypes.c_void_p
        library.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
        library.llama_model_get_vocab.restype = ctypes.c_void_p
        integers = ctypes.POINTER(ctypes.c_int32)
        library.llama_tokenize.argtypes = [
            *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, integers, ctypes.c_int32),
            *(ctypes.c_bool, ctypes.c_bool),
        ]
        library.llama_model_free.argtypes = [ctypes.c_void_p]
        library.llama_backend_init()
        params = library.llama_model_default_params()
        params.data[_VOCAB_ONLY_AT] = 1
        self.library = library
        self.model = library.llama_model_load_from_file(str(path).encode(), params)
        assert self.model, "llama.cpp does not open the file"
        self.vocabulary = library.llama_model_get_vocab(self.model)

    def __enter__(self) -> "LlamaCpp":
        return self

    def __exit__(self, *_: object) -> None:
        self.library.llama_model_free(self.model)

    def encode(self, text: str, *, with_markers: bool = False, with_bos: bool = False) -> list[int]:
        data = text.encode()
        room = len(data) * 2 + 16
        ids = (ctypes.c_int32 * room)()
        count = self.library.llama_tokenize(self.vocabulary, data, len(data), ids, room, with_bos, with_markers)
        assert count >= 0
        return list(ids[:count])
