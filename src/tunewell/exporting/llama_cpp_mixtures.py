"""Choose how each tensor of a quantised file is stored, as llama.cpp chooses it: more bits where fewer hurt most."""

import json
import math
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from tunewell.core.errors import UserError
from tunewell.core.gguf import TensorEntry, read_metadata, read_tensor_table
from tunewell.core.need import need

QuantizedKind = Literal["f16", "q8_0", "q4_k_m", "q5_k_m", "q6_k"]

_IN_LAYER = re.compile(r"blk\.(\d+)\.")
# The families whose 80-layer model is the one of 70 billion parameters.
_FAMILIES_OF_70B = frozenset({"llama", "qwen2", "olmo", "deci"})


@dataclass(frozen=True)
class Mixture:
    """How every tensor of a file will be stored."""

    types: dict[str, str]
    """By tensor, in the order of the source."""
    num_bytes: int
    """Of the tensors, without the header."""
    num_odd: int
    """Tensors whose rows fill no block of the type meant for them, and have another one."""


def file_type(kind: str) -> int:
    """Give llama.cpp's number of a kind; raise UserError for one that is not known here."""
    if kind not in get_args(QuantizedKind):
        known = ", ".join(f"`{name}`" for name in get_args(QuantizedKind))
        raise UserError(f"`{kind}` is no kind of file that llama.cpp makes for tunewell", fix=f"use one of {known}")
    return _facts()["kinds"][kind]["file_type"]


def plan_mixture(source: Path, kind: str) -> Mixture:
    """Plan how each tensor of a GGUF file is stored as `kind`, and count the bytes; nothing is written."""
    gguf = need("gguf", extra="export", purpose="quantising a GGUF file")
    file_type(kind)
    table, meta = read_tensor_table(source), read_metadata(source)
    wanted = _wanted(table, meta, _facts()["kinds"][kind])
    blocks = {member.name: gguf.GGML_QUANT_SIZES[member] for member in gguf.GGML_QUANT_SIZES}
    types, num_bytes, num_odd = {}, 0, 0
    for entry in table:
        if (meant := wanted.get(entry.name)) is None:
            types[entry.name] = gguf.GGMLQuantizationType(entry.type_number).name
        else:
            types[entry.name] = _fitting(entry.shape[-1], meant, blocks)
            num_odd += types[entry.name] != meant.type
        block, size = blocks[types[entry.name]]
        num_bytes += math.prod(entry.shape) // block * size
    return Mixture(types, num_bytes, num_odd)


def num_experts(source: Path) -> int:
    """Count the experts of a model; 0 for most."""
    meta = read_metadata(source)
    return int(meta.get(f"{meta.get('general.architecture')}.expert_count", 0))


@cache
def _facts() -> dict[str, Any]:
    return json.loads(files("tunewell.exporting").joinpath("llama_cpp_mixtures.json").read_text(encoding="utf-8"))


class _Meant(NamedTuple):
    """The type meant for a tensor, and the ones that stand in where its rows do not divide into blocks."""

    type: str
    stand_in: str
    measure: str
    """The type whose blocks the rows have to fill, or the stand-in is taken."""


def _wanted(table: list[TensorEntry], meta: dict[str, Any], kind: dict[str, Any]) -> dict[str, _Meant]:
    """Give what is meant for each tensor that is quantised; the others stay as they are."""
    facts = _facts()
    quantised = [entry.name for entry in sorted(table, key=_place) if _is_quantised(entry)]
    values = [name for name in quantised if _is_value(name)]
    downs = [name for name in quantised if "ffn_down" in name]
    num_layers = int(meta.get(f"{meta.get('general.architecture')}.block_count", 0))
    more = {name for at, name in enumerate(values) if _suffers(at, len(values))}
    more |= {name for at, name in enumerate(downs) if _suffers(at, num_layers)}
    richer = facts["values_of_70b"] if _is_70b(meta, num_layers) else {}
    heads = {"output.weight"} if any(entry.name == "output.weight" for entry in table) else set(facts["embeddings"])
    found = {}
    for name in quantised:
        if name in heads:
            found[name] = _Meant(kind["output"], facts["output_of_odd_width"], measure=kind["type"])
            continue
        chosen = kind["more"] if name in more else kind["type"]
        chosen = richer.get(chosen, chosen) if _is_value(name) else chosen
        found[name] = _Meant(chosen, facts["odd_width"].get(chosen, facts["odder_width"]), measure=chosen)
    return found


def _is_quantised(entry: TensorEntry) -> bool:
    """Tell whether a tensor is a matrix that may lose precision."""
    # A dimension of 1 at the end does not count, as ggml has it.
    is_matrix = len(entry.shape) >= 2 and math.prod(entry.shape[:-1]) > 1
    return is_matrix and entry.name.endswith("weight") and not any(part in entry.name for part in _facts()["kept"])


def _is_value(name: str) -> bool:
    return any(part in name for part in _facts()["value_tensors"])


def _suffers(layer: int, num_layers: int) -> bool:
    """Tell whether a layer is in the first or last eighth, or every third between."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _is_70b(meta: dict[str, Any], num_layers: int) -> bool:
    family = meta.get("general.architecture")
    heads = [meta.get(f"{family}.attention.head_count{part}") for part in ("", "_kv")]
    is_grouped = family != "llama" or heads[0] != heads[1]
    return num_layers == _facts()["layers_of_70b"] and family in _FAMILIES_OF_70B and is_grouped


def _place(entry: TensorEntry) -> tuple[int, str]:
    """Order tensors by layer, then by name; what belongs to no layer comes first."""
    found = _IN_LAYER.match(entry.name)
    return (int(found[1]) if found else -1, entry.name)


def _fitting(width: int, meant: _Meant, blocks: dict[str, tuple[int, int]]) -> str:
    if width % blocks[meant.measure][0] == 0:
        return meant.type
    return meant.stand_in if width % blocks[meant.stand_in][0] == 0 else _facts()["odder_width"]
