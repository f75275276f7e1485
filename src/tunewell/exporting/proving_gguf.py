"""Prove a GGUF file: what it says, tensor by tensor what it holds, and what llama.cpp computes with it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tunewell.data.tokenizer import load_tokenizer
from tunewell.exporting.checks import check_answers, check_ids, check_logits, check_stop, check_template
from tunewell.exporting.drift import Logits
from tunewell.exporting.gguf_checks import check_gguf_fields, check_gguf_tensors, unseen_window
from tunewell.exporting.gguf_settings import read_settings
from tunewell.exporting.llama_cpp import find_llama
from tunewell.exporting.llama_cpp_model import LlamaModel
from tunewell.exporting.reference import ANSWER_TOKENS, Reference
from tunewell.records.parity import LOSSLESS, Artefact, Check, Probe, Proof

_ROOM = 64
_SMALL_BYTES = 64 * 2**20


def prove_gguf(
    path: Path, artefact: Artefact, proof: Proof, reference: Reference, progress: Callable[[int, int], None]
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


def _logits(
    model: LlamaModel, probes: Sequence[Probe], number: int, progress: Callable[[int, int], None]
) -> list[Logits]:
    """Compute the logits of the last positions of each text; of a long one no more are kept at a time."""
    found = []
    for place, probe in enumerate(probes):
        progress(place, len(probes))
        kept = np.empty((0, model.vocab_size), np.float32)
        for block in model.logit_blocks(probe.ids):
            kept = np.concatenate([kept, block[-number:]])[-number:]
        found.append(kept)
    return found
