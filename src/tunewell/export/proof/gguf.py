"""Verify a GGUF file: its metadata, each tensor, and the output of llama.cpp."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.data.tokenizers.load import load_tokenizer
from tunewell.export.gguf.architecture import (
    Settings,
    llama_cpp_facts,
    metadata_fields,
    read_settings,
    rope_tables,
)
from tunewell.export.gguf.quantize import can_quantize, quantize_rows
from tunewell.export.gguf.weights import NamedTensor, name_tensors
from tunewell.export.proof.checks import (
    Logits,
    check_answers,
    check_ids,
    check_logits,
    check_problems,
    check_stop,
    check_template,
    gguf_vocabulary_digest,
    short_repr,
)
from tunewell.export.proof.reference import ProofContext
from tunewell.export.proof.tensors import (
    UNBLOCKED_TYPES,
    Compared,
    Rounding,
    Rows,
    Sketch,
    check_tensors,
    map_tensors,
    sketch,
)
from tunewell.inference.decoder import Generated
from tunewell.inference.generate import shared_prefix_length
from tunewell.inference.llama_cpp.library import find_llama
from tunewell.inference.llama_cpp.model import LlamaModel
from tunewell.model_files.gguf import read_metadata, read_tensor_table
from tunewell.models.gguf import read_entry
from tunewell.records.parity import Artefact, Check, ProofProbe, ProofQuestion, TrainedFacts

_SPARE_TOKENS = 64
_SMALL_FILE_BYTES = 64 * 2**20
_PYTHON_TYPES = frozenset({"Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"})
"""Types that the `gguf` package can quantise without llama.cpp."""


def prove_gguf(artefact: Artefact, context: ProofContext) -> list[Check]:
    """Compare a file with the trained model: its metadata, every tensor, and what llama.cpp computes with it."""
    path, proof, reference = context.folder / artefact.path, context.proof, context.reference
    settings, tokenizer = read_settings(proof.model.config), load_tokenizer(path)
    window = settings.ignored_window
    file_checks = [
        check_gguf_fields(path, settings, proof.model, proof.stop_ids),
        check_gguf_tensors(path, settings, reference.sketches, reference.rounded, progress=context.progress),
        check_template(proof, tokenizer.chat_template, tokenizer.special_tokens),
    ]
    # If llama.cpp ignores the sliding window, it computes longer texts differently. The export has a note on this.
    pairs = [
        (probe, logits)
        for probe, logits in zip(proof.probes, reference.logits, strict=True)
        if window is None or len(probe.ids) <= window
    ]
    short = [probe for probe, _ in pairs if not probe.is_long]
    longest = max([len(probe.ids) for probe in short] + [len(q.ids) for q in proof.questions], default=1)
    with _open_model(path, longest + context.answer_tokens) as model:
        found = _last_logits(model, short, proof.num_positions, context.progress)
        stops, answers = model.end_ids, []
        for index, question in enumerate(proof.questions):
            context.progress(Progress("answers", index, len(proof.questions), "answers"))
            answers.append(_answer(model, question, context.answer_tokens, stops))
        ids_check = check_ids(proof, lambda probe: _tokenize(model, probe), library="llama.cpp")
        # Each long probe has its own context, because a longer context makes some models compute short texts
        # differently. The weights are loaded once.
        for probe in (probe for probe, _ in pairs if probe.is_long):
            model.set_context(len(probe.ids) + _SPARE_TOKENS)
            found += _last_logits(model, [probe], proof.num_positions, context.progress)
    is_finite = all(bool(np.isfinite(rows).all()) for rows in found)
    message = "all logits are finite" if is_finite else "some logits are NaN or infinite"
    return [
        Check(name="finite", is_ok=is_finite, words=message),
        ids_check,
        check_logits(artefact.name, [logits for _, logits in pairs], found),
        check_answers(proof, [answer.ids for answer in answers], is_exact=artefact.precision == "f32"),
        check_stop(proof, sorted(stops), [answer.ended for answer in answers], is_list=False),
        *file_checks,
    ]


def check_gguf_fields(path: Path, settings: Settings, facts: TrainedFacts, stop_ids: Sequence[int]) -> Check:
    """Compare the metadata, special tokens and vocabulary of a file with the model's."""
    found = read_metadata(path)
    expected: dict[str, Any] = {"general.architecture": settings.gguf_name, **metadata_fields(settings)}
    for name, field in llama_cpp_facts()["special_ids"].items():
        number = facts.special_ids.get(name, settings.values.get(f"{name}_token_id"))
        if isinstance(number, int):
            expected[f"tokenizer.ggml.{field}"] = number
    if facts.license:
        expected["general.license"] = facts.license
    problems = [
        f"`{key}` is {short_repr(found.get(key))}; expected {short_repr(value)}"
        for key, value in expected.items()
        if not _is_same(found.get(key), value)
    ]
    prefix = f"{settings.gguf_name}."
    problems += [
        f"`{key}` is not a setting of the model" for key in found if key.startswith(prefix) and key not in expected
    ]
    end_of_turn = found.get("tokenizer.ggml.eot_token_id")
    if end_of_turn is not None and end_of_turn not in stop_ids:
        problems.append(f"`tokenizer.ggml.eot_token_id` is {end_of_turn}, which does not end a reply in training")
    for part, digest in gguf_vocabulary_digest(found).items():
        if facts.vocabulary.get(part) not in (None, digest):
            problems.append(f"the {part} of the vocabulary differ from the tokenizer's")
    message = f"{len(expected)} fields and the vocabulary match the model's"
    return check_problems("settings", problems, otherwise=message, fields=len(expected), wrong=len(problems))


def check_gguf_tensors(
    path: Path,
    settings: Settings,
    sketches: Mapping[str, Sketch],
    rounded: Mapping[str, Rows],
    *,
    progress: ProgressListener = silent,
) -> Check:
    """Dequantise every tensor of a file with the `gguf` package, and compare it with the trained tensor."""
    import gguf

    tables = {name: sketch(table) for name, table in rope_tables(settings).items()}
    sources = {**sketches, **tables}
    expected = {tensor.name: tensor for tensor in name_tensors(sketches, settings)}
    table = {entry.name: entry for entry in read_tensor_table(path)}

    def compare(name: str) -> Compared:
        values, kind = read_entry(path, table[name]), gguf.GGMLQuantizationType(table[name].type_number).name
        tensor = expected[name]
        own = _stored_sketch([sources[source] for source in tensor.sources], tensor, settings)
        rows = rounded.get(f"{kind}/{tensor.sources[0]}")
        if rows is not None and tensor.is_interleaved:
            rows = _interleave(rows, settings)
        found = values.reshape(own.shape) if values.numel() == math.prod(own.shape) else values
        return Compared(name, kind, own, sketch(found, own.direction), rows)

    return check_tensors(
        map_tensors(compare, [name for name in table if name in expected], progress=progress),
        missing=[name for name in expected if name not in table],
        unknown=[name for name in table if name not in expected],
    )


def quantized_sketches(
    files: Iterable[Path],
    model: PreTrainedModel,
    settings: Settings,
    sketches: Mapping[str, Sketch],
    *,
    progress: ProgressListener = silent,
) -> dict[str, Rows]:
    """Quantise the merged weights to the types of these files, and return the sketch rows by `type/tensor`.

    This does not use the GGUF writer, so it can detect bugs in it. Types that neither the `gguf` package nor llama.cpp
    can quantise are left out.
    """
    import gguf

    sources = {tensor.name: tensor.sources[0] for tensor in name_tensors(sketches, settings) if not tensor.is_stacked}
    weights = dict(model.named_parameters())
    jobs: dict[str, tuple[str, Rounding]] = {}
    for path in files:
        for entry in read_tensor_table(path):
            kind, source = gguf.GGMLQuantizationType(entry.type_number).name, sources.get(entry.name)
            if source is None or source not in weights or kind in UNBLOCKED_TYPES:
                continue
            if (rounding := _find_rounding(kind)) is not None:
                jobs[f"{kind}/{source}"] = (source, rounding)

    def round_rows(job: tuple[str, Rounding]) -> Rows:
        source, rounding = job
        return sketch(weights[source], sketches[source].direction, rounding=rounding).rows

    rows = map_tensors(round_rows, jobs.values(), stage="rounding", progress=progress)
    return dict(zip(jobs, rows, strict=True))


def _stored_sketch(sources: Sequence[Sketch], tensor: NamedTensor, settings: Settings) -> Sketch:
    own = sources[0]
    if tensor.is_stacked:
        # Norms of single heads: every value is a row, so the rows are concatenated.
        rows = np.concatenate([source.rows for source in sources])
        own = Sketch.of_values(rows)
    if tensor.is_interleaved:
        own = own.map_rows(lambda rows: _interleave(rows, settings))
    return own.map_rows(lambda rows: rows + 1) if tensor.is_norm_plus_one else own


def _interleave(rows: Rows, settings: Settings) -> Rows:
    """Reorder the rows of queries and keys as in llama.cpp, which stores rotary pairs in adjacent rows."""
    half = settings.values["head_dim"] // 2
    return rows.reshape(-1, 2, half, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _is_same(found: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(found, int | float):
        return bool(np.float32(found) == np.float32(expected))
    return type(found) is type(expected) and found == expected


def _open_model(path: Path, num_tokens: int) -> LlamaModel:
    # With a small model, threads spend more time waiting for each other than computing.
    threads = 1 if path.stat().st_size < _SMALL_FILE_BYTES else None
    return find_llama().open(path, context=num_tokens + _SPARE_TOKENS, threads=threads)


def _tokenize(model: LlamaModel, probe: ProofProbe) -> list[int]:
    text = probe.text
    if model.adds_bos and model.bos is not None:
        # llama.cpp adds the BOS token; its programs first remove the one that the template wrote.
        text = text.removeprefix(model.piece(model.bos).decode("utf-8", "replace"))
    return model.tokenize(text, add_special=True, parse_special=True)


def _last_logits(
    model: LlamaModel, probes: Sequence[ProofProbe], number: int, progress: ProgressListener
) -> list[Logits]:
    logits = []
    for index, probe in enumerate(probes):
        progress(Progress("logits", index, len(probes), "texts"))
        logits.append(model.last_logits(probe.ids, number))
    return logits


def _answer(model: LlamaModel, question: ProofQuestion, max_new_tokens: int, stops: Collection[int]) -> Generated:
    """Return llama.cpp's greedy answer by speculative decoding: the draft is the answer of the trained model.

    One forward pass tests every token of the draft. Only tokens after the first difference are generated one by one.
    llama.cpp rounds a batch differently than one token, so near ties may differ from an answer without a draft.
    """
    draft = list(takewhile(lambda token: token not in stops, question.answer))
    likeliest = model.last_logits([*question.ids, *draft], len(draft) + 1).argmax(axis=1).tolist()
    same = draft[: shared_prefix_length(likeliest, draft)]
    rest = model.generate([*question.ids, *same], max_new_tokens=max_new_tokens - len(same), stop_ids=stops)
    return Generated([*same, *rest], rest.ended == "end")


def _find_rounding(kind: str) -> Rounding | None:
    """Return a function that quantises and dequantises rows, or None if no library supports this type."""
    import gguf
    from gguf.quants import dequantize, quantize

    number = gguf.GGMLQuantizationType[kind]
    if kind not in _PYTHON_TYPES and not can_quantize():
        return None

    def round_rows(rows: Tensor) -> Tensor:
        values = np.ascontiguousarray(rows.float().numpy())
        encoded = quantize(values.reshape(1, -1), number) if kind in _PYTHON_TYPES else quantize_rows(values, number)
        return torch.from_numpy(dequantize(encoded.reshape(1, -1), number)).view(rows.shape)

    return round_rows
