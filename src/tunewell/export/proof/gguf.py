"""Prove a GGUF file: what it says, tensor by tensor what it holds, and what llama.cpp computes with it."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tunewell.core.gguf import read_metadata, read_tensor_table
from tunewell.core.optional import import_optional
from tunewell.core.progress import Progress, ProgressListener
from tunewell.data.tokenizers.load import load_tokenizer
from tunewell.export.gguf.architecture import Settings, fields_of, read_settings, rope_tables
from tunewell.export.gguf.weights import NamedTensor, WeightFiles, name_tensors
from tunewell.export.proof.checks import (
    Logits,
    check_answers,
    check_ids,
    check_logits,
    check_stop,
    check_template,
    digest_of_gguf,
)
from tunewell.export.proof.reference import ANSWER_TOKENS, Reference
from tunewell.export.proof.tensors import Compared, Rounding, Rows, Sketch, changed, check_tensors, sketch
from tunewell.inference.llama_cpp.library import find_llama
from tunewell.inference.llama_cpp.model import LlamaModel
from tunewell.records.parity import LOSSLESS, Artefact, Check, ModelFacts, Probe, Proof

# Hold what a GGUF file says and holds against the model that was trained, from the file and the proof alone.

_HEAD = "lm_head.weight"
_SHOWN = 3
_ID_FIELDS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",
    "pad": "padding_token_id",
    "mask": "mask_token_id",
}
"""The tokens that have a name, and what GGUF bindings them, its own spelling kept."""


class _Known(WeightFiles):
    """Tensors that are known by their sketches alone: names and shapes, no numbers."""

    def __init__(self, sketches: Mapping[str, Sketch], settings: Settings) -> None:
        self.sketches: dict[str, Sketch] = {}
        for name, own in sketches.items():
            for pattern, replacement in settings.part.get("names", {}).items():
                name = re.sub(pattern, replacement, name)
            if not re.search(settings.part.get("left_out", r"(?!)"), name):
                self.sketches[name] = own

    def names(self) -> set[str]:
        return set(self.sketches)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.sketches[name].shape


def check_gguf_tensors(
    path: Path, settings: Settings, sketches: Mapping[str, Sketch], rounded: Mapping[str, Rows]
) -> Check:
    """Dequantise a file tensor by tensor, with the `gguf` package's arithmetic, and compare each with the trained."""
    wanted = _wanted(settings, sketches, rounded)
    names = [entry.name for entry in read_tensor_table(path)]
    return check_tensors(
        _pairs(path, wanted),
        missing=[name for name in wanted if name not in names],
        unknown=[name for name in names if name not in wanted],
    )


def check_gguf_fields(path: Path, settings: Settings, facts: ModelFacts, stop_ids: Sequence[int]) -> Check:
    """Compare a file's settings and special tokens with the model's, one by one; what it says besides must be known."""
    found = read_metadata(path)
    wanted: dict[str, Any] = {"general.architecture": settings.gguf_name, **fields_of(settings)}
    for name, field in _ID_FIELDS.items():
        number = facts.special_ids.get(name, settings.values.get(f"{name}_token_id"))
        if isinstance(number, int):
            wanted[f"tokenizer.ggml.{field}"] = number
    wrong = [
        f"`{key}` is {_short(found.get(key))} and not {_short(value)}"
        for key, value in wanted.items()
        if not _is_same(found.get(key), value)
    ]
    own = f"{settings.gguf_name}."
    # A vocabulary's size stands in some files and is the number of rows of a tensor that is compared anyway.
    wrong += [f"`{key}` is none of the model's" for key in found if key.startswith(own) and key not in wanted]
    end = found.get("tokenizer.ggml.eot_token_id")
    if end is not None and end not in stop_ids:
        wrong.append(f"`tokenizer.ggml.eot_token_id` is {end}, at which training ends no reply")
    for what, digest in digest_of_gguf(found).items():
        if facts.vocabulary.get(what) not in (None, digest):
            wrong.append(f"its {what} are not those of the tokenizer")
    words = "; ".join(wrong[:_SHOWN]) or f"{len(wanted)} fields and the vocabulary as the model has them"
    return Check(name="settings", is_ok=not wrong, words=words, figures={"fields": len(wanted), "wrong": len(wrong)})


def unseen_window(settings: Settings) -> int | None:
    """Give how many tokens back the model sees where llama.cpp lets it see everything; None where both do the same."""
    window, kinds = settings.values.get("sliding_window"), settings.values.get("layer_types")
    is_used = window and (kinds is None or "sliding_attention" in kinds)
    return window if is_used and not settings.spec.get("windows") else None


def sources_of(settings: Settings, sketches: Mapping[str, Sketch]) -> dict[str, str]:
    """Give the trained tensor that each tensor of a file is made of, where it is a single one."""
    tensors = name_tensors(_Known(sketches, settings), settings)
    return {tensor.name: tensor.sources[0] for tensor in tensors if not tensor.is_stacked}


def _wanted(
    settings: Settings, sketches: Mapping[str, Sketch], rounded: Mapping[str, Rows]
) -> dict[str, tuple[Sketch, dict[str, Rows]]]:
    """Bring sketches into llama.cpp's names and its order of rows, tensor for tensor as the writer does.

    With each come the rows that it has in the types in which it was rounded.
    """
    known = _Known(sketches, settings)
    found: dict[str, tuple[Sketch, dict[str, Rows]]] = {
        name: (sketch(torch.from_numpy(np.asarray(table))), {}) for name, table in rope_tables(settings).items()
    }
    kinds = {key.partition("/")[0] for key in rounded}
    for tensor in name_tensors(known, settings):
        own = _as_stored([known.sketches[name] for name in tensor.sources], tensor, settings)
        turn = _turn(settings) if tensor.is_turned else _as_it_is
        rows = {
            kind: turn(rounded[f"{kind}/{tensor.sources[0]}"])
            for kind in kinds
            if f"{kind}/{tensor.sources[0]}" in rounded
        }
        found[tensor.name] = (own, rows)
    return found


def _as_stored(sources: list[Sketch], tensor: NamedTensor, settings: Settings) -> Sketch:
    own = sources[0]
    if tensor.is_stacked:
        # Norms of single heads: every number is kept, so theirs stand one behind the other.
        rows = np.concatenate([source.rows for source in sources])
        own = Sketch((len(rows),), rows, np.abs(rows[:, 0]))
    own = changed(own, _turn(settings)) if tensor.is_turned else own
    return changed(own, lambda rows: rows + 1) if tensor.is_shifted else own


def _turn(settings: Settings) -> Callable[[Rows], Rows]:
    """Make rotary pairs neighbours."""
    half = settings.values["head_dim"] // 2
    return lambda rows: rows.reshape(-1, 2, half, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _as_it_is(rows: Rows) -> Rows:
    return rows


def _pairs(path: Path, wanted: Mapping[str, tuple[Sketch, dict[str, Rows]]]) -> Iterator[Compared]:
    gguf = import_optional("gguf", extra="export", purpose="proving a GGUF file")
    from gguf.quants import dequantize

    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name in wanted:
            numbers = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
            own, rounded = wanted[tensor.name]
            whole = torch.from_numpy(numbers.reshape(own.shape) if numbers.size == np.prod(own.shape) else numbers)
            kind = tensor.tensor_type.name
            yield Compared(tensor.name, kind, own, sketch(whole, own.direction), rounded.get(kind))


def _is_same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, float) and isinstance(found, int | float):
        return bool(np.float32(found) == np.float32(wanted))
    return type(found) is type(wanted) and found == wanted


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


_ROOM = 64
_SMALL_BYTES = 64 * 2**20


def prove_gguf(
    path: Path, artefact: Artefact, proof: Proof, reference: Reference, progress: ProgressListener
) -> list[Check]:
    """Read a file with the `gguf` package, then open it in llama.cpp."""
    checks = []
    window = None
    if proof.model is not None:
        settings = read_settings(proof.model.config)
        window = unseen_window(settings)
        checks += [
            check_gguf_fields(path, settings, proof.model, proof.stop_ids),
            check_gguf_tensors(path, settings, reference.sketches, reference.rounded),
        ]
    own = load_tokenizer(path)
    checks.append(check_template(proof, own.chat_template, own.special_tokens))
    # Where llama.cpp knows of no window, a text beyond it is another one to it, and the export says so.
    pairs = [
        (probe, logits)
        for probe, logits in zip(proof.probes, reference.logits, strict=True)
        if window is None or len(probe.ids) <= window
    ]
    short = [pair for pair in pairs if not pair[0].is_long]
    room = max([len(probe.ids) for probe, _ in short] + [len(q.ids) for q in proof.questions], default=1)
    with _opened(path, room + ANSWER_TOKENS) as model:
        found = _logits(model, [probe for probe, _ in short], proof.num_positions, progress)
        stops = model.end_ids
        said = [
            model.generate(question.ids, max_new_tokens=ANSWER_TOKENS, stop_ids=stops) for question in proof.questions
        ]
        answers = [list(one) for one in said]
        ended = [(question, one.ended == "end") for question, one in zip(proof.questions, said, strict=True)]
        ids = check_ids(proof, lambda probe: _tokenize(model, probe), who="llama.cpp")
    # A context that holds a long text makes some models compute the short ones otherwise, so it is one of its own.
    for probe, _ in pairs[len(short) :]:
        with _opened(path, len(probe.ids)) as model:
            found += _logits(model, [probe], proof.num_positions, progress)
    is_finite = all(bool(np.isfinite(rows).all()) for rows in found)
    words = "every logit is a number" if is_finite else "logits are no numbers"
    return [
        Check(name="finite", is_ok=is_finite, words=words),
        ids,
        check_logits(artefact.name, [logits for _, logits in pairs], found),
        check_answers(proof, answers, is_exact=artefact.name in LOSSLESS),
        check_stop(proof, sorted(stops), ended, is_list=False),
        *checks,
    ]


def _opened(path: Path, num_tokens: int) -> LlamaModel:
    # Threads that wait for each other cost more than a small model does.
    threads = 1 if path.stat().st_size < _SMALL_BYTES else None
    return find_llama().open(path, context=num_tokens + _ROOM, threads=threads)


def _tokenize(model: LlamaModel, probe: Probe) -> list[int]:
    text = probe.text
    if model.adds_bos and model.bos is not None:
        # llama.cpp puts it in front itself; its programs take one that a template wrote away first.
        text = text.removeprefix(model.piece(model.bos).decode("utf-8", "replace"))
    return model.tokenize(text, add_special=True, parse_special=True)


def _logits(model: LlamaModel, probes: Sequence[Probe], number: int, progress: ProgressListener) -> list[Logits]:
    """Compute the logits of the last positions of each text; of a long one no more are kept at a time."""
    found = []
    for place, probe in enumerate(probes):
        progress(Progress("logits", place, len(probes), "texts"))
        kept = np.empty((0, model.vocab_size), np.float32)
        for block in model.logit_blocks(probe.ids):
            kept = np.concatenate([kept, block[-number:]])[-number:]
        found.append(kept)
    return found


# Round tensors as GGUF files do, apart from those who write them, to know what a healthy file looks like.

_PLAIN = frozenset({"F32", "F16", "BF16"})
# Those that the `gguf` package can make by itself.
_BY_PYTHON = frozenset({"Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"})


def round_as(
    files: Iterable[Path], model: PreTrainedModel, settings: Settings, sketches: Mapping[str, Sketch]
) -> dict[str, Rows]:
    """Give the rows of the sketches that the tensors of these files should have, by `type/tensor`.

    The model is the merged one. Types for which neither the `gguf` package nor llama.cpp's library lends its arithmetic
    are left out.
    """
    gguf = import_optional("gguf", extra="export", purpose="proving a GGUF file")
    known = sources_of(settings, sketches)
    weights = dict(model.named_parameters())
    found: dict[str, Rows] = {}
    for path in files:
        for entry in read_tensor_table(path):
            kind, source = gguf.GGMLQuantizationType(entry.type_number).name, known.get(entry.name)
            key = f"{kind}/{source}"
            if source is None or source not in weights or kind in _PLAIN or key in found:
                continue
            if (rounding := _rounding(kind)) is not None:
                found[key] = sketch(weights[source], sketches[source].direction, rounding=rounding).rows
    return found


def _rounding(kind: str) -> Rounding | None:
    import gguf
    from gguf.quants import dequantize, quantize

    own = gguf.GGMLQuantizationType[kind]
    if kind in _BY_PYTHON:
        return lambda rows: torch.from_numpy(dequantize(quantize(_numbers(rows), own), own))
    bindings = find_llama().bindings
    if not bindings.has_all("ggml_quantize_chunk"):
        return None

    def by_library(rows: Tensor) -> Tensor:
        numbers = _numbers(rows)
        block, size = gguf.GGML_QUANT_SIZES[own]
        made = np.empty((len(numbers), math.prod(numbers.shape[1:]) // block * size), np.uint8)
        order: tuple[Any, ...] = (numbers.ctypes.data, made.ctypes.data, 0, *numbers.shape, None)
        num = bindings.api.ggml_quantize_chunk(int(own), *order)
        assert num == made.nbytes, f"llama.cpp wrote {num} bytes and not {made.nbytes}"
        return torch.from_numpy(np.asarray(dequantize(made, own), np.float32))

    return by_library


def _numbers(rows: Tensor) -> np.ndarray:
    return np.ascontiguousarray(rows.float().numpy())
