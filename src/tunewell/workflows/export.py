"""`tunewell export`: from a run to folders and files that others load, each proven to be the model that was trained."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewell import __version__
from tunewell.core.errors import UserError
from tunewell.core.files import publish_folder, refuse_full_disk
from tunewell.data.corpus.reader import open_corpus
from tunewell.data.prompting import prompt_ids
from tunewell.data.templates import TemplateFailed
from tunewell.export.card import model_card
from tunewell.export.checks import check_logits
from tunewell.export.gguf_settings import can_write
from tunewell.export.llama_cpp import find_llama
from tunewell.export.merge import merge
from tunewell.export.reference import answer, as_tensors, last_logits, num_positions, probe_messages
from tunewell.records.parity import PARITY, PROOF, REFERENCE, Artefact, Parity, Probe, Proof, write_record
from tunewell.training.held_out import questions_of
from tunewell.workflows.export_card import card_facts
from tunewell.workflows.export_files import Maker
from tunewell.workflows.subject import find_subject
from tunewell.workflows.text_to_tokens import TextToTokens
from tunewell.workflows.voice import Voice, open_voice

Progress = Callable[[str, int, int], None]
EXIT_NOT_PROVEN = 4
_QUESTIONS = 8
_STAGED = ".staged"
_FOUR_BYTES = 4


@dataclass(frozen=True)
class ExportOrder:
    """What is to be made; everything has a default."""

    to: Sequence[str] = ()
    """`adapter`, `merged`, `gguf`, `ollama`; by default what the config says, else `adapter` or `merged`."""
    out: Path | None = None
    """By default `export` in the run's folder."""
    precision: str | None = None
    gguf: Sequence[str] = ()
    checkpoint: str = "best"
    base: str | None = None
    name: str | None = None
    """What Ollama is to call it."""
    sets: Sequence[str] = ()
    allow_pickle: bool = False
    creates: bool = True
    """Whether `ollama create` is called where the program is there."""


@dataclass(frozen=True)
class Exported:
    """What was made, and its proof."""

    folder: Path
    parity: Parity
    artefacts: list[Artefact]
    notes: list[str]
    next_command: str
    exit_code: int = 0
    created: str | None = None
    """The name under which Ollama has it."""

    def as_json(self) -> dict[str, Any]:
        """Give the object that `export --json` prints."""
        return {
            "folder": str(self.folder),
            "is_proven": self.parity.is_ok,
            "artefacts": [artefact.model_dump() for artefact in self.artefacts],
            "links": [link.model_dump() | {"is_ok": link.is_ok} for link in self.parity.links],
            "notes": self.notes,
            "ollama": self.created,
            "next": self.next_command,
        }


def export(
    place: str | Path | None = None, *, order: ExportOrder | None = None, progress: Progress | None = None
) -> Exported:
    """Make what was ordered, prove it in a process of its own, and only then give it the name of a finished export.

    Raises UserError for what cannot be made, before anything is written. What is made and not proven is removed again;
    the result then says which link of the chain broke, with exit code 4.
    """
    order = order or ExportOrder()
    tell = progress or (lambda stage, done, of: None)
    found = find_subject(place, checkpoint=order.checkpoint, base=order.base, sets=order.sets)
    settings = found.loaded.config.export
    wanted = list(dict.fromkeys(order.to or settings.to or (("adapter",) if found.adapter else ("merged",))))
    if "adapter" in wanted and found.adapter is None:
        raise UserError("there is no adapter: the whole model was trained", fix="export `merged` or `gguf`")
    out = order.out or ((found.place or Path.cwd()) / "export")
    _refuse_taken(out)
    tell("loading the trained model", 0, 0)
    voice = open_voice(found, device="cpu", allow_pickle=order.allow_pickle, precision="fp32", is_packed=False)
    kinds = list(order.gguf or settings.gguf)
    if {"gguf", "ollama"} & set(wanted):
        can_write(voice.model.config.to_dict())
        find_llama()  # before hours of work: without it nothing could be proven
    _check_room(out, voice, wanted, kinds)
    staged = out.with_name(out.name + _STAGED)
    with ExitStack() as held:
        shutil.rmtree(staged, ignore_errors=True)
        held.callback(shutil.rmtree, staged, ignore_errors=True)
        staged.mkdir(parents=True)
        proof, reference = _reference(voice, tell)
        facts = card_facts(found, voice)
        text = TextToTokens.load(found.loaded)
        maker = Maker(voice, text, staged, proof.stop_ids, facts, order.precision or settings.precision, tell)
        artefacts = []
        if "adapter" in wanted:
            artefacts.append(maker.adapter())
        if set(wanted) & {"merged", "gguf", "ollama"}:
            tell("merging", 0, 0)
            merge(voice.model)
            _check_merge(voice, proof, reference)
            if "merged" in wanted:
                artefacts.append(maker.merged())
            if {"gguf", "ollama"} & set(wanted):
                artefacts += maker.ggufs(kinds)
            if "ollama" in wanted:
                artefacts.append(maker.ollama())
        proof = proof.model_copy(update={"artefacts": artefacts, "notes": maker.notes})
        write_record(staged / PROOF, proof)
        _save(reference, staged / REFERENCE)
        (staged / "README.md").write_text(model_card(facts, kind="export"), encoding="utf-8")
        del voice, maker
        parity = _prove(staged, tell)
        if not parity.is_ok:
            failed = out.with_name(f"{out.name}-failed.json")
            write_record(failed, parity)
            notes = [
                *proof.notes,
                f"what was made is not what was trained, and was removed; `{failed}` has the figures",
            ]
            return Exported(out, parity, artefacts, notes, "", EXIT_NOT_PROVEN)
        publish_folder(staged, out)
    return _done(out, parity, proof, order, found.place or out)


def _done(out: Path, parity: Parity, proof: Proof, order: ExportOrder, run: Path) -> Exported:
    kinds = {artefact.kind for artefact in proof.artefacts}
    created = None
    next_command = f"tunewell verify {out}"
    if "ollama" in kinds:
        name = order.name or run.resolve().name
        line = ["ollama", "create", name, "-f", "Modelfile"]
        next_command = f"cd {out / 'ollama'} && {' '.join(line)} && ollama run {name}"
        if order.creates and shutil.which("ollama"):
            done = subprocess.run(line, cwd=out / "ollama", capture_output=True, text=True, check=False)
            if done.returncode == 0:
                created, next_command = name, f"ollama run {name}"
            else:
                proof.notes.append(f"`ollama create` failed: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
    elif "gguf" in kinds:
        file = next(artefact.path for artefact in proof.artefacts if artefact.kind == "gguf")
        next_command = f"tunewell chat {out / file}"
    return Exported(out, parity, proof.artefacts, list(proof.notes), next_command, created=created)


def _refuse_taken(out: Path) -> None:
    """Refuse a folder that holds something else than an export of ours, which is replaced as a whole."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / PROOF).is_file())):
        raise UserError(f"`{out}` is not empty and is no export", fix="name another folder with `--out`")


def _check_room(out: Path, voice: Voice, wanted: Sequence[str], kinds: Sequence[str]) -> None:
    """Say what will be needed before it is: fp32 on the way, and every file that stays."""
    weights = sum(parameter.numel() for parameter in voice.model.parameters())
    needed = weights * 2 if "merged" in wanted else 0
    if {"gguf", "ollama"} & set(wanted):
        needed += weights * (_FOUR_BYTES + 2 * len(kinds))
    parent = next(folder for folder in (out, *out.parents) if folder.exists())
    refuse_full_disk(parent, needed)


def _reference(voice: Voice, tell: Progress) -> tuple[Proof, dict[str, Any]]:
    """Write down how the trained model reads, computes and answers."""
    probes = _probes(voice)
    number = num_positions(len(probes), voice.model.config.get_text_config().vocab_size)
    logits = last_logits(
        voice.model,
        [probe.ids for probe in probes],
        number=number,
        progress=lambda done, of: tell("computing with the trained model", done, of),
    )
    tell("answering with the trained model", 0, 0)
    prompts = _questions(voice) or [probe.ids for probe in probes[:4]]
    stops = _stops(voice)
    proof = Proof(
        made_by=f"tunewell {__version__}",
        subject=voice.subject.name,
        base=voice.subject.base,
        is_lora=voice.adapter is not None,
        stop_ids=stops,
        probes=probes,
        num_positions=number,
        questions=answer(voice.model, prompts, stop_ids=stops, spell=voice.spell),
        artefacts=[],
    )
    return proof, as_tensors(logits)


def _probes(voice: Voice) -> list[Probe]:
    """Render the probes as training does; what a template refuses, a system prompt say, is no probe of it."""
    if voice.masker is None:
        raise UserError(
            "this model has no chat template, so what it is asked cannot be proven",
            fix="name one with `--set template.name=chatml`",
        )
    found = []
    for messages in probe_messages():
        try:
            text = voice.masker.template.render(messages, None, add_generation_prompt=True)
            ids = prompt_ids(voice.masker, voice.encoder, messages)
        except (TemplateFailed, UserError):
            continue
        found.append(Probe(messages=messages, text=text, ids=ids))
    if not found:
        raise UserError("the chat template refuses every conversation it was tried on")
    return found


def _questions(voice: Voice) -> list[list[int]]:
    """Take held-out questions of the run, where they still are."""
    if voice.subject.corpus is None:
        return []
    held_out = open_corpus(voice.subject.corpus).held_out
    return [question.ids for question in questions_of(held_out, number=_QUESTIONS, spell=voice.spell)]


def _stops(voice: Voice) -> list[int]:
    """List the ids at which a reply ends, the template's own end of a turn first."""
    assert voice.masker is not None
    own = voice.tokenizer.backend.token_to_id(voice.masker.end_marker) if voice.masker.end_marker else None
    return list(dict.fromkeys([*([own] if own is not None else []), *voice.stop_ids]))


def _check_merge(voice: Voice, proof: Proof, reference: dict[str, Any]) -> None:
    """Hold the merged weights against what was trained before they are rounded: later it would be lost in that."""
    prompts = [probe.ids for probe in proof.probes]
    found = last_logits(voice.model, prompts, number=proof.num_positions, progress=lambda done, of: None)
    check = check_logits("merged fp32", [reference[name] for name in sorted(reference)], found)
    if not check.is_ok:
        raise UserError(
            f"the merged weights are not the model that was trained: {check.words}",
            where=f"allowed: {check.bound}",
            fix="this is a fault of tunewell; the adapter itself can be exported",
        )


def _save(tensors: dict[str, Any], path: Path) -> None:
    from safetensors.numpy import save_file

    save_file(tensors, path)


def _prove(staged: Path, tell: Progress) -> Parity:
    """Let a new process prove what lies on disk: nothing that is in this one's memory can help it."""
    tell("proving, in a process of its own", 0, 0)
    line = [sys.executable, "-m", "tunewell", "verify", str(staged), "--json"]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | {"CI": "1"})
    if not (staged / PARITY).is_file():
        raise UserError("the proof could not be made", where=f"`{' '.join(line[1:])}` ended with {done.returncode}")
    return Parity.model_validate(json.loads((staged / PARITY).read_text(encoding="utf-8")))
