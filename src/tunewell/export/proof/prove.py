"""Prove an artefact from its files alone: load it as its users will, and hold it against the trained model."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.progress import ProgressListener
from tunewell.export.ollama.chat_template import clock_at
from tunewell.export.proof.checks import check_answers, check_files, check_ids, check_logits, check_settings, check_stop
from tunewell.export.proof.gguf import prove_gguf
from tunewell.export.proof.reference import Reference, answer, last_logits
from tunewell.export.proof.tensors import Sketch, check_tensors, compare_weights
from tunewell.models.placement import not_finite_names
from tunewell.models.quiet import quiet
from tunewell.models.support import text_weights
from tunewell.records.parity import LOSSLESS, Artefact, Check, Link, ModelFacts, Probe, Proof

LoadBase = Callable[[], Any]
"""Gives the base model of an adapter, in fp32 on the CPU."""
_KINDS = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}


def prove(
    folder: Path,
    artefact: Artefact,
    proof: Proof,
    *,
    reference: Reference,
    load_base: LoadBase,
    progress: ProgressListener,
) -> Link:
    """Check one artefact; whatever goes wrong while it is loaded is a check that failed, with its words."""
    checks = [check_files(folder, artefact)]
    if checks[0].is_ok:
        try:
            if artefact.kind == "gguf":
                checks += prove_gguf(folder / artefact.path, artefact, proof, reference, progress)
            else:
                checks += _transformers(folder / artefact.path, artefact, proof, reference, load_base, progress)
        except Exception as error:  # noqa: BLE001  the proof of one artefact must not end the proof of the others
            what = (
                error.what if isinstance(error, UserError) else f"{type(error).__name__}: {str(error).splitlines()[0]}"
            )
            checks.append(Check(name="files", is_ok=False, words=f"it cannot be loaded: {what}"))
    return Link(artefact=artefact.name, path=artefact.path, checks=checks)


def _transformers(
    path: Path, artefact: Artefact, proof: Proof, reference: Reference, load_base: LoadBase, progress: ProgressListener
) -> list[Check]:
    """Load a folder with transformers, or with PEFT on its base, as anyone would."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    peft: Any = None
    with quiet():
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
        if artefact.kind == "adapter":
            from peft import PeftModel

            peft = PeftModel.from_pretrained(load_base(), path)
            model = peft.get_base_model()
        else:
            model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
            model = model.float()
    model.eval()
    if broken := not_finite_names(model):
        words = f"`{broken[0]}` holds a NaN or an infinity; {len(broken)} tensors in all"
        return [Check(name="finite", is_ok=False, words=words)]

    def tokenize(probe: Probe) -> list[int]:
        with clock_at(proof.date):
            found = tokenizer.apply_chat_template(
                probe.messages, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        return list(found["input_ids"])

    prompts = [probe.ids for probe in proof.probes]
    found = last_logits(model, prompts, number=proof.num_positions, progress=progress)
    logits = check_logits(artefact.name, reference.logits, found)
    settings = GenerationConfig.from_pretrained(path)
    own = settings.eos_token_id
    stops = list(own) if isinstance(own, list) else [own] if own is not None else [tokenizer.eos_token_id]
    answers = answer(model, [q.ids for q in proof.questions], stop_ids=stops, spell=lambda ids: "")
    ended = list(zip(proof.questions, (one.ended for one in answers), strict=True))
    checks = [
        Check(name="finite", is_ok=True, words="every weight is a number"),
        check_ids(proof, tokenize, who="transformers"),
        logits,
        check_answers(proof, [one.answer for one in answers], is_exact=artefact.name in LOSSLESS),
        check_stop(proof, stops, ended),
    ]
    if proof.model is not None:
        config = model.config if artefact.kind == "merged" else None
        checks.append(check_settings(path, tokenizer, proof.model, config=config, generation=settings))
        # PEFT's own merging, last: it leaves nothing of the adapter.
        weights = model if peft is None else peft.merge_and_unload()
        checks.append(_tensors(weights, proof.model, reference.sketches, _KINDS[artefact.precision]))
    return checks


def _tensors(model: Any, facts: ModelFacts, sketches: Mapping[str, Sketch], kind: str) -> Check:
    """Compare the weights of a loaded model, under every name they have, with what was trained."""
    weights = text_weights(model)
    wanted = {**sketches, **{twin: sketches[name] for twin, name in facts.twins.items()}}
    return check_tensors(
        compare_weights(weights, wanted, kind),
        missing=[name for name in wanted if name not in weights],
        unknown=[name for name in weights if name not in wanted],
    )
