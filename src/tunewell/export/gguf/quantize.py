"""Choose the storage type of each tensor as llama.cpp does, and quantise rows with llama.cpp's own function."""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tunewell.core.errors import UserError
from tunewell.core.optional import install_command
from tunewell.export.gguf.architecture import llama_cpp_facts
from tunewell.inference.llama_cpp.library import find_llama

_LAYER = re.compile(r"blk\.(\d+)\.")
# Families in which a model with 80 layers has 70 billion parameters.
_FAMILIES_OF_70B = frozenset({"llama", "qwen2", "olmo", "deci"})

Shape = tuple[int, ...]


def choose_types(shapes: Mapping[str, Shape], meta: Mapping[str, Any], kind: str) -> tuple[dict[str, str], int]:
    """Return the type of each tensor in a file of this `kind`, and the number of a mixture's that use a larger type.

    In a mixture, e.g. `q4_k_m`, tensors that lose the most precision get more bits. A larger type is needed if the row
    width is not a multiple of the block size.
    """
    mixtures = _facts()["kinds"]
    names = sorted((name for name, shape in shapes.items() if _is_quantized(name, shape)), key=_layer_order)
    preferred = {name: str(mixtures.get(kind, kind.upper())) for name in names}
    if kind in mixtures:
        _prefer_more_bits(preferred, meta)
    types = {name: _fitting_type(shapes[name][-1], wanted) for name, wanted in preferred.items()}
    num_fallbacks = sum(types[name] != wanted for name, wanted in preferred.items()) if kind in mixtures else 0
    return dict.fromkeys(shapes, "F32") | types, num_fallbacks


def can_quantize() -> bool:
    """Return True if a build of llama.cpp is installed that quantises weights."""
    try:
        return find_llama().bindings.has_all("ggml_quantize_chunk")
    except UserError:
        return False


def quantize_rows(numbers: np.ndarray, ggml_type: Any) -> np.ndarray:
    """Quantise rows [R, C] in fp32 with llama.cpp; ctypes releases the GIL."""
    from gguf import quant_shape_to_byte_shape

    bindings = find_llama().bindings
    if not bindings.has_all("ggml_quantize_chunk"):
        raise UserError(
            "this build of llama.cpp cannot quantise weights",
            where=str(bindings.path),
            fix=f"run `{install_command('export')}`, or export `q8_0` or `f16`",
        )
    stored = np.empty(quant_shape_to_byte_shape(numbers.shape, ggml_type), np.uint8)
    arguments = (numbers.ctypes.data, stored.ctypes.data, 0, *numbers.shape, None)
    written = bindings.api.ggml_quantize_chunk(int(ggml_type), *arguments)
    assert written == stored.nbytes, f"llama.cpp wrote {written} bytes instead of {stored.nbytes}"
    return stored


def _facts() -> dict[str, Any]:
    return llama_cpp_facts()["quantization"]


def _prefer_more_bits(preferred: dict[str, str], meta: Mapping[str, Any]) -> None:
    """Change the preferred types of the output, and of the values and down projections in some layers."""
    facts = _facts()
    values = [name for name in preferred if any(part in name for part in facts["value_tensors"])]
    downs = [name for name in preferred if "ffn_down" in name]
    num_layers = int(meta.get(f"{meta.get('general.architecture')}.block_count", 0))
    if _is_70b(meta, num_layers):
        preferred.update((name, facts["values_of_70b"].get(preferred[name], preferred[name])) for name in values)
    larger = ["output.weight"] if "output.weight" in preferred else [*facts["embeddings"]]
    larger += [name for index, name in enumerate(values) if _is_sensitive(index, len(values))]
    larger += [name for index, name in enumerate(downs) if _is_sensitive(index, num_layers)]
    preferred.update((name, facts["larger"]) for name in larger if name in preferred)


def _layer_order(name: str) -> tuple[int, str]:
    """Return a sort key that orders tensors by layer, then by name; tensors outside of layers come first."""
    found = _LAYER.match(name)
    return (int(found[1]) if found else -1, name)


def _is_quantized(name: str, shape: Shape) -> bool:
    """Return True if a tensor is a matrix that llama.cpp quantises."""
    # As in ggml, a trailing dimension of 1 does not count.
    is_matrix = len(shape) >= 2 and math.prod(shape[:-1]) > 1
    is_excluded = any(part in name for part in _facts()["not_quantized"])
    return is_matrix and name.endswith("weight") and not is_excluded


def _is_sensitive(layer: int, num_layers: int) -> bool:
    """Return True for the first and the last eighth of the layers, and for every third layer between them."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _is_70b(meta: Mapping[str, Any], num_layers: int) -> bool:
    family = meta.get("general.architecture")
    heads = [meta.get(f"{family}.attention.head_count{suffix}") for suffix in ("", "_kv")]
    has_grouped_heads = family != "llama" or heads[0] != heads[1]
    return num_layers == _facts()["layers_of_70b"] and family in _FAMILIES_OF_70B and has_grouped_heads


def _fitting_type(width: int, wanted: str) -> str:
    """Return the first of a type and its fallbacks whose block size divides the row width."""
    import gguf

    fallbacks = (wanted, _facts()["fallbacks"].get(wanted, wanted))
    sizes = (gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][0] for name in fallbacks)
    return next((name for name, size in zip(fallbacks, sizes, strict=True) if width % size == 0), "F16")
