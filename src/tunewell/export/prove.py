"""Verify an export from its files alone: load each artefact as users do, and compare it with the trained model.

The verification runs in a new process, which cannot use anything in the memory of the process that wrote the files
(`proof_process.py`).
"""

import gc
import importlib
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tunewell.config.extensions import EXPORT_TARGETS
from tunewell.core.child import answer
from tunewell.core.errors import UserError
from tunewell.core.progress import Progress, ProgressListener, silent, with_stage
from tunewell.core.version import made_by
from tunewell.export.preflight import require_tools
from tunewell.export.proof.checks import check_files, damaged_files
from tunewell.export.proof.reference import ProofContext, ProofUnavailable, Reference
from tunewell.export.targets.base import load_target
from tunewell.inference.llama_cpp.library import find_llama
from tunewell.machine.facts import installed_versions
from tunewell.records.parity import (
    PARITY,
    PROOF,
    REFERENCE,
    Artefact,
    Check,
    Link,
    Parity,
    Proof,
    read_proof,
    write_record,
)

_PACKAGES = ("torch", "transformers", "peft", "gguf", "xllamacpp")


@torch.no_grad()
def prove_export(folder: Path, *, progress: ProgressListener = silent, **fields: Any) -> Parity:
    """Compare every artefact of an export with the trained model; no files are written.

    `fields` are fields of ProofContext: `base` and `allow_pickle`. Raises UserError if the verification cannot
    run, e.g. because a package or the base model is missing.
    """
    proof = read_proof(folder)
    reference = Reference.load(folder / REFERENCE, proof.model)
    require_tools([load_target(kind) for kind in dict.fromkeys(artefact.kind for artefact in proof.artefacts)])
    context = ProofContext(folder, proof, reference, progress, **fields)
    links = _check_export(folder, proof, reference)
    for artefact in proof.artefacts:
        stage = f"verifying {artefact.name}"
        progress(Progress(stage))
        links.append(_prove_artefact(artefact, replace(context, progress=with_stage(progress, stage))))
    return Parity(
        made_by=made_by(),
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        subject=proof.subject,
        links=links,
        other_ids_share=proof.other_ids_share,
        versions=installed_versions(_PACKAGES),
        is_ok=all(link.is_ok for link in links),
    )


def _prove_artefact(artefact: Artefact, context: ProofContext) -> Link:
    """Verify one artefact; an error while loading it is a failed check."""
    checks = [check_files(context.folder, artefact)]
    if checks[0].is_ok:
        try:
            checks += load_target(artefact.kind).prove(artefact, context)
        except ProofUnavailable:
            raise
        except Exception as error:  # noqa: BLE001  a failure of one artefact must not stop the verification of the others
            first_line = (str(error).splitlines() or [""])[0]
            what = error.what if isinstance(error, UserError) else f"{type(error).__name__}: {first_line}"
            checks.append(Check(name="files", is_ok=False, words=f"the artefact cannot be loaded: {what}"))
    return Link(artefact=artefact.name, path=artefact.path, checks=checks)


def _check_export(folder: Path, proof: Proof, reference: Reference) -> list[Link]:
    """Check the export as a whole: an export with nothing to compare is not verified."""
    problems = damaged_files(folder, proof.sha256s)
    problems += [
        f"`{PROOF}` lists no {name}" for name in ("artefacts", "probes", "questions") if not getattr(proof, name)
    ]
    if len(reference.logits) != len(proof.probes):
        problems.append(f"`{REFERENCE}` has logits of {len(reference.logits)} probes; expected {len(proof.probes)}")
    if not problems:
        return []
    return [Link(artefact="export", path=".", checks=[Check(name="files", is_ok=False, words="; ".join(problems))])]


# The new process: `proof_process.py` starts it.


def main() -> None:
    """Import everything that a verification needs, wait for the request of the parent, and verify that export."""
    _import_ahead()
    gc.enable()
    gc.freeze()
    answer(_prove_request)


def _prove_request(request: dict[str, Any], progress: ProgressListener) -> None:
    folder = Path(request.pop("folder"))
    parity = prove_export(folder, progress=progress, **request)
    write_record(folder / PARITY, parity)


def _import_ahead() -> None:
    """Import the slowest libraries while the export is still being written. Problems are reported by the checks."""
    with suppress(ImportError, UserError):
        for kind in EXPORT_TARGETS.names():
            load_target(kind)
        importlib.import_module("gguf.quants")
        find_llama()
