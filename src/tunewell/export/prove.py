"""Prove an export from its files alone: load each artefact as its users will, compare it with the trained model."""

from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from tunewell import __version__
from tunewell.core.errors import UserError
from tunewell.core.progress import Progress, ProgressListener, silent, with_stage
from tunewell.export.preflight import require_tools
from tunewell.export.proof.checks import check_files, damaged_files
from tunewell.export.proof.context import ProofContext, ProofUnavailable
from tunewell.export.proof.reference import Reference
from tunewell.export.targets.base import load_target
from tunewell.records.parity import PROOF, REFERENCE, Artefact, Check, Link, Parity, Proof, read_proof

_PACKAGES = ("torch", "transformers", "peft", "gguf", "xllamacpp")


@torch.no_grad()
def prove_export(
    folder: Path, *, base: str | None = None, allow_pickle: bool = False, progress: ProgressListener = silent
) -> Parity:
    """Compare every artefact of an export with the trained model; nothing is written.

    `base` is the base model of an adapter, if it has moved. Raises UserError if the proof cannot be made: a missing
    package or base model does not count against the export.
    """
    proof = read_proof(folder)
    reference = Reference.load(folder / REFERENCE, proof.model)
    require_tools([load_target(kind) for kind in dict.fromkeys(artefact.kind for artefact in proof.artefacts)])
    context = ProofContext(folder, proof, reference, progress, base, allow_pickle)
    links = _check_export(folder, proof, reference)
    for artefact in proof.artefacts:
        stage = f"proving {artefact.name}"
        progress(Progress(stage))
        links.append(_prove_artefact(artefact, replace(context, progress=with_stage(progress, stage))))
    return Parity(
        made_by=f"tunewell {__version__}",
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        subject=proof.subject,
        links=links,
        versions=_installed_versions(),
        is_ok=all(link.is_ok for link in links),
    )


def _prove_artefact(artefact: Artefact, context: ProofContext) -> Link:
    """Prove one artefact. An error while it is loaded is a failed check."""
    checks = [check_files(context.folder, artefact)]
    if checks[0].is_ok:
        try:
            checks += load_target(artefact.kind).prove(artefact, context)
        except ProofUnavailable:
            raise
        except Exception as error:  # noqa: BLE001  the proof of one artefact must not end the proof of the others
            first_line = (str(error).splitlines() or [""])[0]
            what = error.what if isinstance(error, UserError) else f"{type(error).__name__}: {first_line}"
            checks.append(Check(name="files", is_ok=False, words=f"it cannot be loaded: {what}"))
    return Link(artefact=artefact.name, path=artefact.path, checks=checks)


def _check_export(folder: Path, proof: Proof, reference: Reference) -> list[Link]:
    """Check the export as a whole: an export with nothing to compare is not proven."""
    problems = damaged_files(folder, proof.sha256s)
    problems += [
        f"`{PROOF}` lists no {name}" for name in ("artefacts", "probes", "questions") if not getattr(proof, name)
    ]
    if len(reference.logits) != len(proof.probes):
        problems.append(f"`{REFERENCE}` has logits of {len(reference.logits)} probes instead of {len(proof.probes)}")
    if not problems:
        return []
    return [Link(artefact="export", path=".", checks=[Check(name="files", is_ok=False, words="; ".join(problems))])]


def _installed_versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
