"""The page in an exported folder: what it is, what it was made from, what was proven, how to use it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunewell import __version__
from tunewell.config.methods import METHODS
from tunewell.core.errors import UserError
from tunewell.core.model_files import locate
from tunewell.core.redact import redact
from tunewell.core.units import count
from tunewell.inference.chat_model import ChatModel
from tunewell.inference.model_ref import ModelRef
from tunewell.records.manifest import read_manifest
from tunewell.records.plan import Chosen, Plan
from tunewell.records.report import Report

_USE = {
    "adapter": """from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base!r}), "adapter")
model.generation_config = GenerationConfig.from_pretrained("adapter")  # where replies end
tokenizer = AutoTokenizer.from_pretrained("adapter")""",
    "merged": """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("merged", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("merged")""",
}


@dataclass(frozen=True)
class CardFacts:
    """What is known of a model that is exported."""

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


def model_card(facts: CardFacts, *, kind: str) -> str:
    """Write the README of an exported folder, with the header that model hubs read."""
    lines = [_front_matter(facts, kind), f"# {facts.name}", ""]
    made_from = f"`{facts.base}`" if facts.base else "nothing"
    lines += [f"Made from {made_from} by {facts.method or 'training'} with {facts.made_by}.", ""]
    if facts.documents is not None and facts.corpus_sha256:
        lines += [f"Trained on {count(facts.documents, 'document')}; corpus SHA-256 `{facts.corpus_sha256}`.", ""]
    if facts.report is not None:
        lines += [f"**{facts.report.verdict}**: {facts.report.summary}", ""]
    lines += [
        "That these files are the model that was trained is proven in `parity.json`: token ids, logits, answers.",
        "",
    ]
    if kind in _USE:
        lines += ["```python", _USE[kind].format(base=facts.base or "the base model"), "```", ""]
    if facts.plan is not None:
        chosen = [(name, getattr(facts.plan, name)) for name in type(facts.plan).model_fields]
        rows = [
            f"| {name.replace('_', ' ')} | {v.value} | {v.because} |" for name, v in chosen if isinstance(v, Chosen)
        ]
        lines += ["| | value | because |", "|---|---|---|", *rows, ""]
    lines += [f"- {note}" for note in facts.notes]
    return redact("\n".join(lines).rstrip() + "\n")


def _front_matter(facts: CardFacts, kind: str) -> str:
    """Write the header as JSON values, which are YAML: no name can break out of it."""
    header: dict[str, Any] = {
        "base_model": facts.base,
        "license": facts.license,
        "library_name": {"adapter": "peft", "merged": "transformers"}.get(kind),
        "tags": ["tunewell", *([facts.method] if facts.method and METHODS.entry(facts.method).is_adapter else [])],
    }
    body = "\n".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in header.items() if value)
    return f"---\n{body}\n---\n"


# Gather what is known of a model for the card of its export.

_REPORT = "report.json"


def card_facts(found: ModelRef, voice: ChatModel) -> CardFacts:
    """Gather base, licence, data, plan and verdict, as far as they are known."""
    manifest = read_manifest(found.corpus) if found.corpus is not None else None
    name = found.path.resolve().name if found.path is not None else found.name
    return CardFacts(
        name=name,
        base=found.base,
        license=_license(found.base),
        method=found.method,
        corpus_sha256=manifest.corpus_sha256 if manifest else None,
        documents=manifest.documents if manifest else None,
        plan=found.plan,
        report=_report(found.path) if found.kind == "run" and found.path else None,
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
