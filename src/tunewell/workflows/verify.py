"""`tunewell verify`: prove an export again, from what lies in its folder."""

import json
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tunewell import __version__
from tunewell.core.errors import UserError
from tunewell.core.progress import Progress, ProgressListener, silent, with_stage
from tunewell.export.preflight import require_proof_tools
from tunewell.export.proof.checks import check_files, spoiled_files
from tunewell.export.proof.modelfile import check_modelfile
from tunewell.export.proof.prove import prove
from tunewell.export.proof.reference import Reference
from tunewell.models.load import LoadOptions, load_model
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

EXIT_NOT_PROVEN = 4


@torch.no_grad()
def verify(
    folder: str | Path,
    *,
    base: str | None = None,
    allow_pickle: bool = False,
    progress: ProgressListener = silent,
    notes: list[str] | None = None,
) -> Parity:
    """Hold every artefact of an export against what was trained, and write `parity.json`.

    `base` is where an adapter's base model lies now, if not where it lay then. Where the folder cannot be written, the
    proof is given all the same, and a word of it added to `notes`. Raises UserError for what cannot be tried: a
    package or a base that is not there says nothing about the export.
    """
    folder = Path(folder).expanduser()
    tell = progress
    proof = read_proof(folder)
    reference = Reference.load(folder / REFERENCE, proof.model)
    require_proof_tools({artefact.kind for artefact in proof.artefacts})
    links = _whole(folder, proof, reference)
    for artefact in proof.artefacts:
        tell(Progress(f"proving {artefact.name}"))
        if artefact.kind == "ollama":
            links.append(_ollama(folder, artefact, proof))
            continue
        # Loaded out here: inside, a base that is gone would count against the export.
        is_on_base = artefact.kind == "adapter" and check_files(folder, artefact).is_ok
        loaded = _base(folder / artefact.path, proof, base, allow_pickle=allow_pickle) if is_on_base else None
        links.append(
            prove(
                folder,
                artefact,
                proof,
                reference=reference,
                load_base=lambda loaded=loaded: loaded,
                progress=with_stage(tell, f"proving {artefact.name}"),
            )
        )
    parity = Parity(
        made_by=f"tunewell {__version__}",
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        subject=proof.subject,
        links=links,
        versions=_versions(),
        is_ok=all(link.is_ok for link in links),
    )
    try:
        write_record(folder / PARITY, parity)
    except OSError as error:
        if notes is not None:
            notes.append(f"`{folder / PARITY}` could not be written: {error.strerror or error}")
    return parity


def _whole(folder: Path, proof: Proof, reference: Reference) -> list[Link]:
    """Say what is wrong with the export as a whole, if anything: nothing to prove is nothing proven."""
    wrong = spoiled_files(folder, proof.sha256s)
    for name in ("artefacts", "probes", "questions"):
        if not getattr(proof, name):
            wrong.append(f"`{PROOF}` names no {name}")
    if len(reference.logits) != len(proof.probes):
        wrong.append(f"`{REFERENCE}` has the logits of {len(reference.logits)} probes and not {len(proof.probes)}")
    if not wrong:
        return []
    return [Link(artefact="export", path=".", checks=[Check(name="files", is_ok=False, words="; ".join(wrong))])]


def _ollama(folder: Path, artefact: Artefact, proof: Proof) -> Link:
    checks = [check_files(folder, artefact)]
    if checks[0].is_ok:
        try:
            checks.append(check_modelfile(folder, artefact, proof))
        except (UserError, UnicodeDecodeError) as error:
            words = f"it cannot be read as a Modelfile with its GGUF: {getattr(error, 'what', error)}"
            checks.append(Check(name="template", is_ok=False, words=words))
    return Link(artefact="ollama", path=artefact.path, checks=checks)


def _base(place: Path, proof: Proof, base: str | None, *, allow_pickle: bool) -> Any:
    """Load the base of an adapter in fp32 as anyone would give it to PEFT; a GGUF is rebuilt."""
    written = json.loads((place / "adapter_config.json").read_text(encoding="utf-8"))
    name = base or written.get("base_model_name_or_path") or proof.base
    if name is None:
        raise UserError("the adapter does not say what it was made from", fix="add `--base MODEL`")
    cpu = torch.device("cpu")
    try:
        order = LoadOptions(
            name,
            place,
            cpu,
            torch.float32,
            attention="sdpa",
            added_tokens=tuple(proof.added_tokens),
            is_packed=False,
            is_whole=True,
            allow_pickle=allow_pickle,
        )
        return load_model(order).model
    except (UserError, OSError, ValueError, ImportError) as error:
        # Of transformers' own words the first line may be empty.
        what, *rest = str(getattr(error, "what", error)).strip().splitlines() or [""]
        raise UserError(
            f"the adapter's base cannot be loaded: {what}",
            where=getattr(error, "where", None) or " ".join(rest) or str(name),
            fix="; or ".join(
                [
                    *([error.fix] if isinstance(error, UserError) and error.fix else []),
                    "say where it lies now with `--base MODEL`",
                ]
            ),
        ) from error


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "peft", "gguf", "xllamacpp"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
