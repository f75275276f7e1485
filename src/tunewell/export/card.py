"""The model card of an export (README.md): base model, licence, data, verdict, plan and how to load it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunewell import __version__
from tunewell.config.extensions import METHODS
from tunewell.core.redact import redact
from tunewell.core.units import count
from tunewell.export.license import read_license
from tunewell.inference.chat_model import ChatModel, ModelRef
from tunewell.records.manifest import read_manifest
from tunewell.records.plan import Chosen, Plan
from tunewell.records.report import Report

_REPORT = "report.json"


@dataclass(frozen=True)
class CardFacts:
    """What the model card states."""

    name: str
    base: str | None
    license: str | None
    method: str
    corpus_sha256: str | None
    documents: int | None
    plan: Plan | None
    report: Report | None
    made_by: str
    notes: list[str] = field(default_factory=list)


def collect_card_facts(ref: ModelRef, model: ChatModel) -> CardFacts:
    """Collect base model, licence, data, plan and verdict, as far as they are known."""
    manifest = read_manifest(ref.corpus) if ref.corpus is not None else None
    return CardFacts(
        name=ref.path.resolve().name if ref.path is not None else ref.name,
        base=ref.base,
        license=read_license(ref.base or ref.model),
        method=ref.method,
        corpus_sha256=manifest.corpus_sha256 if manifest else None,
        documents=manifest.documents if manifest else None,
        plan=ref.plan,
        report=_read_report(ref.path) if ref.kind == "run" and ref.path else None,
        made_by=f"tunewell {__version__}",
        notes=list(model.notes),
    )


def model_card(facts: CardFacts, *, library: str | None = None, example: str | None = None) -> str:
    """Return the README of an exported folder, with the front matter that model hubs read.

    `library` is the hub's name of the library that loads the folder, `example` the Python code that does so.
    """
    lines = [_front_matter(facts, library), f"# {facts.name}", ""]
    base = f"`{facts.base}`" if facts.base else "random weights"
    lines += [f"Trained from {base} by {facts.method or 'training'} with {facts.made_by}.", ""]
    if facts.documents is not None and facts.corpus_sha256:
        lines += [f"Trained on {count(facts.documents, 'document')}; corpus SHA-256 `{facts.corpus_sha256}`.", ""]
    if facts.license:
        lines += [f"Licence of the base model: {facts.license}.", ""]
    if facts.report is not None:
        lines += [f"**{facts.report.verdict}**: {facts.report.summary}", ""]
    lines += ["`parity.json` proves that these files are the trained model: token ids, logits, answers, tensors.", ""]
    if example is not None:
        lines += ["```python", example, "```", ""]
    if facts.plan is not None:
        chosen = [(name, getattr(facts.plan, name)) for name in type(facts.plan).model_fields]
        rows = [
            f"| {name.replace('_', ' ')} | {choice.value} | {choice.because} |"
            for name, choice in chosen
            if isinstance(choice, Chosen)
        ]
        lines += ["| | value | because |", "|---|---|---|", *rows, ""]
    lines += [f"- {note}" for note in facts.notes]
    return redact("\n".join(lines).rstrip() + "\n")


def _front_matter(facts: CardFacts, library: str | None) -> str:
    """Write the header with JSON values, which are valid YAML: no name can break out of it."""
    header: dict[str, Any] = {
        "base_model": facts.base,
        "license": facts.license,
        "library_name": library,
        "tags": ["tunewell", *([facts.method] if facts.method and METHODS.entry(facts.method).is_adapter else [])],
    }
    body = "\n".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in header.items() if value)
    return f"---\n{body}\n---\n"


def _read_report(run: Path) -> Report | None:
    try:
        return Report.model_validate(json.loads((run / _REPORT).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None  # not evaluated yet, or by a later version
