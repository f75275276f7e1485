"""Prove an artefact from its files alone: load it as its users will, and hold it against the trained model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tunewell.core.errors import UserError
from tunewell.export.checks import check_answers, check_files, check_ids, check_logits, check_stop
from tunewell.export.drift import Logits
from tunewell.export.llama_cpp import find_llama
from tunewell.export.reference import ANSWER_TOKENS, answer, last_logits
from tunewell.models.placement import not_finite_names
from tunewell.models.quiet import quiet
from tunewell.records.parity import Artefact, Check, Link, Probe, Proof

Progress = Callable[[int, int], None]
LoadBase = Callable[[], Any]
"""Gives the base model of an adapter, in fp32 on the CPU."""
_LOSSLESS = frozenset({"adapter", "merged fp32", "gguf f32"})
_ROOM = 64
_SMALL_BYTES = 64 * 2**20


def prove(
    folder: Path,
    artefact: Artefact,
    proof: Proof,
    *,
    reference: Sequence[Logits],
    load_base: LoadBase,
    progress: Progress,
) -> Link:
    """Check one artefact; whatever goes wrong while it is loaded is a check that failed, with its words."""
    checks = [check_files(folder, artefact)]
    if checks[0].is_ok:
        try:
            if artefact.kind == "gguf":
                checks += _gguf(folder / artefact.path, artefact, proof, reference, progress)
            else:
                checks += _transformers(folder / artefact.path, artefact, proof, reference, load_base, progress)
        except Exception as error:  # noqa: BLE001  the proof of one artefact must not end the proof of the others
            what = (
                error.what if isinstance(error, UserError) else f"{type(error).__name__}: {str(error).splitlines()[0]}"
            )
            checks.append(Check(name="files", is_ok=False, words=f"it cannot be loaded: {what}"))
    return Link(artefact=artefact.name, path=artefact.path, checks=checks)


def _transformers(
    path: Path, artefact: Artefact, proof: Proof, reference: Sequence[Logits], load_base: LoadBase, progress: Progress
) -> list[Check]:
    """Load a folder with transformers, or with PEFT on its base, as anyone would."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    with quiet():
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
        if artefact.kind == "adapter":
            from peft import PeftModel

            peft: Any = PeftModel.from_pretrained(load_base(), path)
            model = peft.get_base_model()
        else:
            model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
            model = model.float()
    model.eval()
    if broken := not_finite_names(model):
        words = f"`{broken[0]}` holds a NaN or an infinity; {len(broken)} tensors in all"
        return [Check(name="finite", is_ok=False, words=words)]

    def tokenize(probe: Probe) -> list[int]:
        found = tokenizer.apply_chat_template(
            probe.messages, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return list(found["input_ids"])

    prompts = [probe.ids for probe in proof.probes]
    found = last_logits(model, prompts, number=proof.num_positions, progress=progress)
    logits = check_logits(artefact.name if artefact.kind == "merged" else "adapter", reference, found)
    settings = GenerationConfig.from_pretrained(path)
    own = settings.eos_token_id
    stops = list(own) if isinstance(own, list) else [own] if own is not None else [tokenizer.eos_token_id]
    answers = answer(model, [q.ids for q in proof.questions], stop_ids=stops, spell=lambda ids: "")
    ended = list(zip(proof.questions, (one.ended for one in answers), strict=True))
    return [
        Check(name="finite", is_ok=True, words="every weight is a number"),
        check_ids(proof, tokenize, who="transformers"),
        logits,
        check_answers(proof, [one.answer for one in answers], is_exact=artefact.name in _LOSSLESS),
        check_stop(proof, stops, ended),
    ]


def _gguf(path: Path, artefact: Artefact, proof: Proof, reference: Sequence[Logits], progress: Progress) -> list[Check]:
    """Open a GGUF in llama.cpp."""
    longest = max([len(p.ids) for p in proof.probes] + [len(q.ids) for q in proof.questions], default=1)
    # Threads that wait for each other cost more than a small model does.
    threads = 1 if path.stat().st_size < _SMALL_BYTES else None
    with find_llama().open(path, context=longest + ANSWER_TOKENS + _ROOM, threads=threads) as model:

        def tokenize(probe: Probe) -> list[int]:
            text = probe.text
            if model.adds_bos and model.bos is not None:
                # llama.cpp puts it in front itself; its programs take one that a template wrote away first.
                text = text.removeprefix(model.piece(model.bos).decode("utf-8", "replace"))
            return model.tokenize(text, add_special=True, parse_special=True)

        found = []
        for place, probe in enumerate(proof.probes):
            progress(place, len(proof.probes))
            found.append(np.asarray(model.logits(probe.ids)[-proof.num_positions :]))
        logits = check_logits(artefact.name, reference, found)
        stops = model.end_ids
        answers, ended = [], []
        for question in proof.questions:
            said = model.generate(question.ids, max_new_tokens=ANSWER_TOKENS, stop_ids=stops)
            answers.append(list(said))
            ended.append((question, said.ended == "end"))
        is_finite = all(bool(np.isfinite(rows).all()) for rows in found)
        return [
            Check(
                name="finite",
                is_ok=is_finite,
                words="every logit is a number" if is_finite else "logits are no numbers",
            ),
            check_ids(proof, tokenize, who="llama.cpp"),
            logits,
            check_answers(proof, answers, is_exact=artefact.name in _LOSSLESS),
            check_stop(proof, sorted(stops), ended),
        ]


def load_reference(path: Path) -> list[Logits]:
    """Read the logits of the trained model."""
    from safetensors.numpy import load_file

    tensors = load_file(path)
    return [tensors[name] for name in sorted(tensors)]
