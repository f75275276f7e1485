"""`tunewell export`: write a trained model for other programs, and verify that each file matches the model."""

import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from tunewell.config.extensions import EXPORT_TARGETS
from tunewell.config.load import LoadedConfig
from tunewell.core.errors import UserError
from tunewell.core.files import stable_json
from tunewell.core.html import render
from tunewell.core.launcher import is_first
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.export.card import PROMPT_FORM, collect_card_facts, model_card
from tunewell.export.merge_base import open_for_export
from tunewell.export.options import ExportOptions
from tunewell.export.preflight import preflight_facts, require_adapter, require_tools
from tunewell.export.proof.reference import ANSWER_TOKENS, check_merge, complete_proof, find_stop_ids, make_reference
from tunewell.export.proof_process import ProofProcess
from tunewell.export.staging import (
    ExistingExport,
    estimate_disk_space,
    find_existing,
    open_staging,
    publish,
    remove_failed_parity,
    write_failed_parity,
)
from tunewell.export.targets.base import ExportContext, ExportTarget, NextStep, load_target, load_targets
from tunewell.inference.model_ref import ModelRef
from tunewell.machine.device import torch_threads
from tunewell.records.parity import PROOF, REFERENCE, Artefact, Parity, Proof, write_record
from tunewell.records.report import Report
from tunewell.runs.result import TrainResult
from tunewell.workflows.verify import EXIT_NOT_PROVEN

Announce = Callable[[str], None]


@dataclass(frozen=True)
class ExportResult:
    """The artefacts of an export and their verification."""

    folder: Path
    parity: Parity
    artefacts: list[Artefact]
    notes: list[str]
    next_command: str
    exit_code: int = 0
    created: str | None = None
    """The name of the model in Ollama, if it was created there."""

    @property
    def is_proven(self) -> bool:
        """Whether every artefact was verified to match the trained model."""
        return self.parity.is_ok

    def __repr__(self) -> str:
        names = [artefact.path for artefact in self.artefacts]
        return f"ExportResult(folder={str(self.folder)!r}, is_proven={self.is_proven}, artefacts={names})"

    def _repr_html_(self) -> str:
        return render("tunewell.workflows", "exported.html", result=self)

    def as_json(self) -> dict[str, Any]:
        """Return the object that `export --json` prints."""
        return {
            "folder": str(self.folder),
            "is_proven": self.is_proven,
            "artefacts": [artefact.model_dump() for artefact in self.artefacts],
            "links": [link.model_dump() | {"is_ok": link.is_ok} for link in self.parity.links],
            "notes": self.notes,
            "ollama": self.created,
            "next": self.next_command,
        }


def export(
    place: str | PathLike[str] | ModelRef | None = None,
    *,
    order: ExportOptions | None = None,
    progress: ProgressListener = silent,
    announce: Announce | None = None,
    prove: Callable[..., Parity] | None = None,
    answer_tokens: int = ANSWER_TOKENS,
    **fields: Any,
) -> ExportResult:
    """Export a run, an adapter or a model, and verify it before it gets its final name.

    `fields` are fields of ExportOptions: `export("run", to="gguf", gguf="q8_0,q4_k_m")`. An existing export in the
    folder is extended; only artefacts that are exported again are replaced. `announce` is called with the expected
    sizes before anything is written. `prove` verifies the files, by default in a new process. Raises UserError if the
    model cannot be exported or the verification cannot run.
    An export that does not match the trained model is removed; the result then has exit code 4 and names the artefact.
    """
    options = replace(order or ExportOptions(), **fields).checked()
    ref = options.find_model(place)
    options = options.resolved(ref)
    out = Path(str(options.out))
    targets = load_targets(options.to or ())
    require_adapter(targets, ref)
    existing = find_existing(out, targets, options)
    require_tools([*targets, *(load_target(artefact.kind) for artefact in (existing.kept if existing else []))])
    with open_staging(out) as staging, ExitStack() as stack:
        prove = prove or stack.enter_context(ProofProcess()).prove
        job = _Job(ref, options, targets, existing, progress, announce or (lambda message: progress(Progress(message))))
        # The model is released before the verification, which needs the memory.
        proof, notes = job.write(staging.folder, answer_tokens)
        progress(Progress("verifying in a new process"))
        parity = prove(staging.folder, allow_pickle=options.allow_pickle, progress=progress)
        if not parity.is_ok:
            removed = f"removed: the files do not match the trained model; see `{write_failed_parity(out, parity)}`"
            return ExportResult(out, parity, proof.artefacts, [*notes, *proof.notes, removed], "", EXIT_NOT_PROVEN)
        publish(staging, out, existing)
    remove_failed_parity(out)
    shown = out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out
    step = _next_step(shown, proof.artefacts, options)
    notes = [*notes, *proof.notes, *step.notes]
    return ExportResult(shown, parity, proof.artefacts, notes, step.command, created=step.installed_as)


@dataclass(frozen=True)
class _Job:
    """One export: the model, the options and the targets to write."""

    ref: ModelRef
    options: ExportOptions
    targets: list[ExportTarget]
    existing: ExistingExport | None
    progress: ProgressListener
    announce: Announce

    def write(self, folder: Path, answer_tokens: int) -> tuple[Proof, list[str]]:
        """Load the model, and write all targets and the reference for verification. Return the record and notes."""
        self.progress(Progress("loading the trained model"))
        model = open_for_export(self.ref, weights=self.options, progress=self.progress)
        arguments = self.ref.loaded.config.template.arguments
        facts = preflight_facts(model.tokenizer, model.masker, arguments, model.model.config.to_dict)
        for target in self.targets:
            target.preflight(facts)
        card = collect_card_facts(self.ref, model)
        context = ExportContext(model, facts.template, folder, self.options, card, find_stop_ids(model), self.progress)
        context.notes += [*model.notes, *facts.template.notes]
        with torch_threads(model.batch_threads):
            return self._write(context, answer_tokens)

    def _write(self, context: ExportContext, answer_tokens: int) -> tuple[Proof, list[str]]:
        model, folder, card = context.model, context.staging_dir, context.card
        space = estimate_disk_space(self.targets, context)
        space.require_enough(Path(str(self.options.out)))
        self.announce(str(space))
        proof, context.reference = make_reference(model, answer_tokens=answer_tokens, progress=self.progress)
        if self.existing is not None:
            self.existing.require_same_model(proof, context.reference)
            self.existing.copy_kept(folder)
            context.artefacts += self.existing.kept
        self._write_targets(context, proof)
        context.reference.save(folder / REFERENCE)
        (folder / "README.md").write_text(model_card(card), encoding="utf-8")
        if card.prompt_form is not None:
            (folder / PROMPT_FORM).write_text(stable_json(card.prompt_form), encoding="utf-8")
        old_notes = self.existing.proof.notes if self.existing and self.existing.kept else []
        notes = list(dict.fromkeys([*context.notes, *old_notes]))
        artefacts = sorted(context.artefacts, key=lambda artefact: EXPORT_TARGETS.names().index(artefact.kind))
        proof = complete_proof(
            proof, folder, artefacts, notes=notes, license=card.license, template=context.template.source
        )
        write_record(folder / PROOF, proof)
        return proof, [*_verdict_notes(card.report), *(self.existing.notes if self.existing else [])]

    def _write_targets(self, context: ExportContext, proof: Proof) -> None:
        """Write the targets that need the separate adapter, merge the adapter, and write the other targets."""
        is_merged = False
        for target in sorted(self.targets, key=lambda target: target.requires.merged_weights):
            if target.requires.merged_weights and not is_merged:
                if context.model.adapter is not None:
                    self.progress(Progress("merging"))
                    context.model.adapter.merge()
                check_merge(context.model, proof, context.reference, progress=self.progress)
                is_merged = True
            context.artefacts += target.write(context)


def _verdict_notes(report: Report | None) -> list[str]:
    """Return a warning, if the verdict is bad, that a verified export says nothing about the model's quality."""
    if report is None or report.verdict not in ("FAIL", "WEAK", "UNPROVEN"):
        return []
    return [
        "the export matches the trained model, but this does not mean that the model is good (verdict: "
        f"{report.verdict}: {report.summary})"
    ]


def _next_step(folder: Path, artefacts: list[Artefact], options: ExportOptions) -> NextStep:
    """Return the next step suggested by the last target that has one."""
    for kind in reversed(dict.fromkeys(artefact.kind for artefact in artefacts)):
        step = load_target(kind).next_step(folder, [own for own in artefacts if own.kind == kind], options)
        if step is not None:
            return step
    return NextStep(shlex.join(["tunewell", "verify", str(folder)]))


# The end of `tunewell train`: carry out `export.to` with the model that was trained.

_EXIT_NOT_EXPORTED = 2


@dataclass(frozen=True)
class ExportStep:
    """The export after a run: its result, or why there is none."""

    exported: ExportResult | None = None
    note: str = ""
    exit_code: int = 0


def export_after_training(
    loaded: LoadedConfig,
    result: TrainResult,
    *,
    allow_pickle: bool,
    progress: ProgressListener = silent,
    announce: Announce | None = None,
) -> ExportStep:
    """Export a finished run to the targets of `export.to`. A model whose verdict is FAIL is not exported.

    The model is trained and saved, so a UserError becomes a note with the command that repeats the export.
    """
    targets = loaded.config.export.to
    if not targets or result.status != "finished" or not is_first():
        return ExportStep()
    command = shlex.join(["tunewell", "export", str(result.run), "--to", ",".join(targets)])
    if result.validation is not None and result.validation.report.verdict == "FAIL":
        return ExportStep(note=f"not exported, because the verdict is FAIL; `{command}` exports it anyway")
    try:
        exported = export(result.run, to=targets, allow_pickle=allow_pickle, progress=progress, announce=announce)
    except UserError as error:
        fix = f" ({error.fix})" if error.fix else ""
        note = f"the model is trained and saved, but it was not exported: {error.what}{fix}; then run `{command}`"
        return ExportStep(note=note, exit_code=_EXIT_NOT_EXPORTED)
    return ExportStep(exported, exit_code=exported.exit_code)
