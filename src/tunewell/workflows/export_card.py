"""Gather what is known of a model for the card of its export."""

import json
from pathlib import Path
from typing import Any

from tunewell import __version__
from tunewell.core.errors import UserError
from tunewell.core.model_files import locate
from tunewell.exporting.card import CardFacts
from tunewell.records.manifest import read_manifest
from tunewell.records.report import Report
from tunewell.workflows.model_ref import FoundSubject
from tunewell.workflows.voice import Voice

_REPORT = "report.json"


def card_facts(found: FoundSubject, voice: Voice) -> CardFacts:
    """Gather base, licence, data, plan and verdict, as far as they are known."""
    manifest = read_manifest(found.corpus) if found.corpus is not None else None
    name = found.place.resolve().name if found.place is not None else found.name
    return CardFacts(
        name=name,
        base=found.base,
        license=_license(found.base),
        method=found.plan.method.value if found.plan else "lora" if found.adapter else "",
        corpus_sha256=manifest.corpus_sha256 if manifest else None,
        documents=manifest.documents if manifest else None,
        plan=found.plan,
        report=_report(found.place) if found.kind == "run" and found.place else None,
        made_by=f"tunewell {__version__}",
        notes=list(voice.notes),
    )


def _report(run: Path) -> Report | None:
    try:
        return Report.model_validate(json.loads((run / _REPORT).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None  # not judged yet, or judged by a later version


def _license(base: str | None) -> str | None:
    """Read the licence of a base from its card or its GGUF, where it says so."""
    if base is None:
        return None
    try:
        files: Any = locate(base)
    except UserError:
        return None
    path = Path(str(getattr(files, "path", files)))
    if path.suffix == ".gguf":
        from gguf import GGUFReader

        field = GGUFReader(path).get_field("general.license")
        return str(field.contents()) if field is not None else None
    card = path / "README.md"
    if not card.is_file():
        return None
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines()[:60]
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("license:")), None)
