"""`tunewell verify`: prove an export again, from what lies in its folder."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tunewell import __version__
from tunewell.core.errors import UserError
from tunewell.export.checks import check_files
from tunewell.export.proving import load_reference, prove
from tunewell.models.load import LoadOrder, load_model
from tunewell.records.parity import PARITY, REFERENCE, Artefact, Link, Parity, Proof, read_proof, write_record
from tunewell.workflows.export_template import check_template

Progress = Callable[[str, int, int], None]
EXIT_NOT_PROVEN = 4


@torch.no_grad()
def verify(folder: str | Path, *, base: str | None = None, progress: Progress | None = None) -> Parity:
    """Hold every artefact of an export against what was trained, and write `parity.json`.

    `base` is where an adapter's base model lies now, if not where it lay then.
    """
    folder = Path(folder).expanduser()
    tell = progress or (lambda stage, done, of: None)
    proof = read_proof(folder)
    if not (folder / REFERENCE).is_file():
        raise UserError(f"`{folder / REFERENCE}` is missing: there is nothing to compare with")
    reference = load_reference(folder / REFERENCE)
    links = []
    for artefact in proof.artefacts:
        tell(f"proving {artefact.name}", 0, 0)
        if artefact.kind == "ollama":
            links.append(_ollama(folder, artefact, proof))
            continue
        links.append(
            prove(
                folder,
                artefact,
                proof,
                reference=reference,
                load_base=lambda: _base(folder, proof, base),
                progress=lambda done, of, name=artefact.name: tell(f"proving {name}", done, of),
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
    write_record(folder / PARITY, parity)
    return parity


def _ollama(folder: Path, artefact: Artefact, proof: Proof) -> Link:
    checks = [check_files(folder, artefact)]
    if checks[0].is_ok:
        checks.append(check_template(folder / artefact.path, proof))
    return Link(artefact="ollama", path=artefact.path, checks=checks)


def _base(folder: Path, proof: Proof, base: str | None) -> Any:
    """Load the base of an adapter in fp32, rebuilt where it is a GGUF, as PEFT is to find it."""
    written = json.loads((folder / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    name = base or written.get("base_model_name_or_path") or proof.base
    if name is None:
        raise UserError("the adapter does not say what it was made from", fix="add `--base MODEL`")
    place, cpu = folder / "adapter", torch.device("cpu")
    return load_model(LoadOrder(name, place, cpu, torch.float32, attention="sdpa", is_packed=False)).model


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "peft", "gguf", "xllamacpp"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
