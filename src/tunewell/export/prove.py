"""Verify an export from its files alone: load each artefact as users do, and compare it with the trained model.

The verification runs in a new process, which cannot use anything in the memory of the process that wrote the files:

parent  prove_in_new_process(folder)            reads parity.json, or raises the error in proof-error.json
child   python -m tunewell.export.prove FOLDER [--allow-pickle]
"""

import argparse
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from tunewell import __version__
from tunewell.core.errors import UserError
from tunewell.core.progress import Progress, ProgressListener, silent, with_stage
from tunewell.export.preflight import require_tools
from tunewell.export.proof.checks import check_files, damaged_files
from tunewell.export.proof.reference import ProofContext, ProofUnavailable, Reference
from tunewell.export.targets.base import load_target
from tunewell.hardware.facts import installed_versions
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
def prove_export(
    folder: Path, *, base: str | None = None, allow_pickle: bool = False, progress: ProgressListener = silent
) -> Parity:
    """Compare every artefact of an export with the trained model; no files are written.

    `base` is the new location of an adapter's base model, if it has moved. Raises UserError if the verification cannot
    run, e.g. because a package or the base model is missing.
    """
    proof = read_proof(folder)
    reference = Reference.load(folder / REFERENCE, proof.model)
    require_tools([load_target(kind) for kind in dict.fromkeys(artefact.kind for artefact in proof.artefacts)])
    context = ProofContext(folder, proof, reference, progress, base, allow_pickle)
    links = _check_export(folder, proof, reference)
    for artefact in proof.artefacts:
        stage = f"verifying {artefact.name}"
        progress(Progress(stage))
        links.append(_prove_artefact(artefact, replace(context, progress=with_stage(progress, stage))))
    return Parity(
        made_by=f"tunewell {__version__}",
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


# The new process.

_ERROR = "proof-error.json"
_EXIT_ERROR = 2


def prove_in_new_process(folder: Path, *, allow_pickle: bool = False) -> Parity:
    """Verify an export and write its `parity.json`; raise UserError if the verification cannot run."""
    flags = ["--allow-pickle"] if allow_pickle else []
    command = [sys.executable, "-m", __name__, str(folder), *flags]
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if (folder / PARITY).is_file():
        return Parity.model_validate_json((folder / PARITY).read_text(encoding="utf-8"))
    error = json.loads((folder / _ERROR).read_text(encoding="utf-8")) if (folder / _ERROR).is_file() else {}
    raise UserError(
        ": ".join(["the export could not be verified", *([error["what"]] if error else [])]),
        where=error.get("where") or f"`{shlex.join(command[1:])}` exited with code {ended.returncode}",
        fix=error.get("fix"),
    )


def main() -> int:
    """Verify the export named on the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name if __spec__ else __name__}")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--allow-pickle", action="store_true")
    options = parser.parse_args()
    try:
        write_record(options.folder / PARITY, prove_export(options.folder, allow_pickle=options.allow_pickle))
    except UserError as error:
        message = {"what": error.what, "where": error.where, "fix": error.fix}
        (options.folder / _ERROR).write_text(json.dumps(message), encoding="utf-8")
        return _EXIT_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
