"""Write down what an export will be held against, from the trained model itself and before anything is made of it."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from tunewell import __version__
from tunewell.core.errors import UserError
from tunewell.core.files import sha256_file
from tunewell.core.progress import Progress, ProgressListener, with_stage
from tunewell.data.corpus.reader import open_corpus
from tunewell.data.templates.chat_template import TemplateFailed
from tunewell.export.gguf.architecture import read_settings
from tunewell.export.proof.checks import check_logits, digest_of, plain_settings
from tunewell.export.proof.gguf import round_as
from tunewell.export.proof.reference import Reference, answer, last_logits, long_length, num_positions, probe_messages
from tunewell.export.proof.tensors import check_tensors, compare_weights, sketches_of
from tunewell.inference.chat_model import ChatModel
from tunewell.inference.prompt import prompt_ids
from tunewell.records.parity import PROOF_FILES, Artefact, ModelFacts, Probe, Proof
from tunewell.training.held_out import questions_of

_QUESTIONS = 8


def make_reference(voice: ChatModel, tell: ProgressListener) -> tuple[Proof, Reference]:
    """Write down how the trained model reads, computes and answers, and what each of its tensors is."""
    probes, notes = _probes(voice)
    number = num_positions(len(probes), voice.model.config.get_text_config().vocab_size)
    logits = last_logits(
        voice.model,
        [probe.ids for probe in probes],
        number=number,
        progress=with_stage(tell, "computing with the trained model"),
    )
    tell(Progress("answering with the trained model"))
    prompts = _questions(voice) or [probe.ids for probe in probes[:4]]
    stops = _stops(voice)
    questions = answer(voice.model, prompts, stop_ids=stops, spell=voice.decode)
    tell(Progress("measuring the tensors of the trained model"))
    sketches, twins = sketches_of(voice.model)
    shapes = {name: list(own.shape) for name, own in sketches.items()}
    proof = Proof(
        made_by=f"tunewell {__version__}",
        subject=voice.ref.name,
        base=voice.ref.base,
        is_lora=voice.adapter is not None,
        stop_ids=stops,
        added_tokens=list(voice.ref.added_tokens or voice.tokenizer.added_by_us),
        date=voice.masker.template.date if voice.masker and voice.masker.template.uses_clock else None,
        probes=probes,
        num_positions=number,
        questions=questions,
        model=_facts(voice, stops, shapes, twins),
        artefacts=[],
        notes=notes,
    )
    return proof, Reference(logits, sketches)


def check_merge(voice: ChatModel, proof: Proof, reference: Reference) -> None:
    """Hold the merged weights against what was trained before they are rounded: later it would be lost in that."""
    prompts = [probe.ids for probe in proof.probes]
    found = last_logits(voice.model, prompts, number=proof.num_positions)
    weights = dict(voice.model.named_parameters())
    checks = [
        check_logits("merged fp32", reference.logits, found),
        check_tensors(compare_weights(weights, reference.sketches, "F32"), missing=(), unknown=()),
    ]
    for check in checks:
        if not check.is_ok:
            raise UserError(
                f"the merged weights are not the model that was trained: {check.words}",
                where=f"allowed: {check.bound}",
                fix="this is a fault of tunewell; the adapter itself can be exported",
            )


def with_rounded(reference: Reference, voice: ChatModel, folder: Path, artefacts: Sequence[Artefact]) -> Reference:
    """Add what rounding makes of the merged weights in each type that the GGUF files of a folder have."""
    files = [folder / artefact.path for artefact in artefacts if artefact.kind == "gguf"]
    settings = read_settings(voice.model.config.to_dict())
    return replace(reference, rounded=round_as(files, voice.model, settings, reference.sketches))


def with_artefacts(
    proof: Proof, folder: Path, artefacts: Sequence[Artefact], *, notes: Sequence[str], license: str | None
) -> Proof:
    """Complete a proof by what was made in a folder."""
    assert proof.model is not None
    return proof.model_copy(
        update={
            "artefacts": list(artefacts),
            "notes": [*proof.notes, *notes],
            "model": proof.model.model_copy(update={"license": license}),
            "sha256s": {name: sha256_file(folder / name) for name in PROOF_FILES},
        }
    )


def _facts(voice: ChatModel, stops: list[int], shapes: dict[str, list[int]], twins: dict[str, str]) -> ModelFacts:
    generation = deepcopy(voice.model.generation_config)
    assert generation is not None
    # A reply ends where training ends it, whatever the makers of the base had in mind; nothing is padded.
    generation.eos_token_id, generation.pad_token_id = stops or None, None
    special = voice.tokenizer.special_tokens
    numbers = {name: voice.tokenizer.backend.token_to_id(text) for name, text in special.items() if text}
    return ModelFacts(
        config=plain_settings(voice.model.config.to_dict()),
        generation=plain_settings(generation.to_dict()),
        special_tokens=dict(special),
        special_ids={name.removesuffix("_token"): own for name, own in numbers.items() if own is not None},
        max_length=voice.tokenizer.max_length,
        vocabulary=digest_of(voice.tokenizer),
        shapes=shapes,
        twins=twins,
    )


def _probes(voice: ChatModel) -> tuple[list[Probe], list[str]]:
    """Render the probes as training does; what a template refuses, a system prompt say, is no probe of it."""
    if voice.masker is None:
        raise UserError(
            "this model has no chat template, so what it is asked cannot be proven",
            fix="name one with `--set template.name=chatml`",
        )
    found = [probe for messages in probe_messages() if (probe := _probe(voice, messages)) is not None]
    if not found:
        raise UserError("the chat template refuses every conversation it was tried on")
    length, note = long_length(voice.model.config)
    if (long := _long_probe(voice, found, length)) is not None:
        return [*found, long], [note] if note else []
    longest = max(len(probe.ids) for probe in found)
    return found, [f"texts of more than {longest} tokens were not tried: the model has little more room"]


def _probe(voice: ChatModel, messages: list[dict[str, str]]) -> Probe | None:
    assert voice.masker is not None
    try:
        text = voice.masker.template.render(messages, None, add_generation_prompt=True)
        return Probe(messages=messages, text=text, ids=prompt_ids(voice.masker, voice.encoder, messages))
    except (TemplateFailed, UserError):
        return None


def _long_probe(voice: ChatModel, probes: Sequence[Probe], length: int) -> Probe | None:
    """Ask the questions of all probes at once, again and again, until there are so many tokens; None for too few."""
    texts = [message["content"] for probe in probes for message in probe.messages if message["role"] == "user"]
    found = None
    for number in range(1, length):
        lines = [f"{place}. {texts[place % len(texts)].strip()}" for place in range(number)]
        probe = _probe(voice, [{"role": "user", "content": "\n".join(lines)}])
        if probe is None or len(probe.ids) > length:
            break
        found = probe
    if found is None or len(found.ids) <= max(len(probe.ids) for probe in probes):
        return None
    return found.model_copy(update={"is_long": True})


def _questions(voice: ChatModel) -> list[list[int]]:
    """Take held-out questions of the run, where they still are."""
    if voice.ref.corpus is None:
        return []
    held_out = open_corpus(voice.ref.corpus).held_out
    return [question.ids for question in questions_of(held_out, number=_QUESTIONS, spell=voice.decode)]


def _stops(voice: ChatModel) -> list[int]:
    """List the ids at which a reply ends, the template's own end of a turn first."""
    assert voice.masker is not None
    own = voice.tokenizer.backend.token_to_id(voice.masker.end_marker) if voice.masker.end_marker else None
    return list(dict.fromkeys([*([own] if own is not None else []), *voice.stop_ids]))
