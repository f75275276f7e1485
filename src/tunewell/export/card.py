"""The model card of an export (README.md), and the licence of the base model."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tunewell.config.extensions import METHODS
from tunewell.core.errors import UserError
from tunewell.core.files import read_text
from tunewell.core.redact import redact
from tunewell.core.units import count
from tunewell.core.version import made_by
from tunewell.data.reading_prompt import prompt_form
from tunewell.inference.chat_model import ChatModel
from tunewell.inference.model_ref import ModelRef
from tunewell.model_files.files import ModelFiles, hub_is_out_of_reach, locate
from tunewell.model_files.gguf import read_metadata
from tunewell.records.manifest import Manifest, read_manifest
from tunewell.records.plan import Chosen, Plan
from tunewell.records.report import Report, read_report

PROMPT_FORM = "reading_prompt.json"
"""The file of an export with the form of the message with passages."""


@dataclass(frozen=True)
class CardFacts:
    """The contents of a model card."""

    name: str
    base: str | None
    license: str | None
    method: str
    corpus_sha256: str | None
    documents: int | None
    plan: Plan | None
    report: Report | None
    made_by: str
    ledger: str = ""
    """How the rows of the corpus were used, in one sentence."""
    notes: list[str] = field(default_factory=list)
    prompt_form: dict[str, Any] | None = None
    """The form of the message with passages, for a model that was trained to answer from them."""


def collect_card_facts(ref: ModelRef, model: ChatModel) -> CardFacts:
    """Collect the base model, licence, data, plan and verdict; unknown facts are None."""
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
        made_by=made_by(),
        ledger=_ledger(manifest) if manifest else "",
        notes=list(model.notes),
        prompt_form=prompt_form() if ref.is_open_book else None,
    )


def model_card(facts: CardFacts, *, library: str | None = None, example: str | None = None) -> str:
    """Return the README of an export folder, with the YAML front matter that model hubs read.

    `library` is the hub's `library_name` for the folder. `example` is Python code that loads it.
    """
    lines = [_front_matter(facts, library), f"# {facts.name}", ""]
    base = f"`{facts.base}`" if facts.base else "random weights"
    start = facts.plan.start if facts.plan else None
    earlier = f", going on from an earlier run (weights SHA-256 `{start.sha256}`)," if start else ""
    lines += [f"Trained from {base}{earlier} by {facts.method or 'training'} with {facts.made_by}.", ""]
    if facts.documents is not None and facts.corpus_sha256:
        lines += [f"Trained on {count(facts.documents, 'document')}; corpus SHA-256 `{facts.corpus_sha256}`.", ""]
    if facts.ledger:
        lines += [facts.ledger, ""]
    if facts.license:
        lines += [f"Licence of the base model: {facts.license}.", ""]
    if facts.report is not None:
        lines += [f"**{facts.report.verdict}**: {facts.report.summary}", ""]
    lines += ["`parity.json` contains the comparison with the trained model: token ids, logits, answers, tensors.", ""]
    if facts.prompt_form is not None:
        form = json.dumps(facts.prompt_form, ensure_ascii=False, indent=2)
        lines += [f"The model was trained to answer from passages. Its messages have the form in `{PROMPT_FORM}`:", ""]
        lines += ["```json", form, "```", ""]
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


def _ledger(manifest: Manifest) -> str:
    """Return how the rows were used: trained on, held out and dropped, with the reasons."""
    reasons = ", ".join(f"{count(number)} {reason}" for reason, number in manifest.dropped.items())
    dropped = f"{count(sum(manifest.dropped.values()))} dropped ({reasons})" if reasons else "none dropped"
    sources = count(len(manifest.sources), "source file")
    return (
        f"Of {count(manifest.rows_in, 'row')} in {sources}, {count(manifest.documents)} are trained on, "
        f"{count(manifest.held_out)} held out and {dropped}."
    )


def _front_matter(facts: CardFacts, library: str | None) -> str:
    """Return the YAML front matter; values are written as JSON, so that no name can break the YAML syntax."""
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
        return read_report(run)
    except (OSError, UserError):
        return None  # not evaluated yet, or evaluated by a newer version of tunewell


# The licence of a base model, from its GGUF metadata, model card, config or LICENSE file.

_LICENSE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE")
_HEAD_CHARS = 2_000
_SPDX_IDS = (
    (r"apache license\s+version 2\.0", "apache-2.0"),
    (r"mit license|permission is hereby granted, free of charge", "mit"),
    (r"gnu affero general public license\s+version 3", "agpl-3.0"),
    (r"gnu lesser general public license\s+version 3", "lgpl-3.0"),
    (r"gnu general public license\s+version 3", "gpl-3.0"),
    (r"bsd 3-clause|neither the name of", "bsd-3-clause"),
    (r"bsd 2-clause", "bsd-2-clause"),
    (r"llama 3\.3 community license", "llama3.3"),
    (r"llama 3\.2 community license", "llama3.2"),
    (r"llama 3\.1 community license", "llama3.1"),
    (r"llama 3 community license", "llama3"),
    (r"llama 2 community license", "llama2"),
    (r"gemma terms of use", "gemma"),
)
"""Patterns that identify a licence text, with the licence name that model hubs use."""


def read_license(model: str) -> str | None:
    """Return the short name of a model's licence, e.g. `apache-2.0`, or None if no licence is stated.

    Return `other` for a LICENSE file that is not recognised.
    """
    try:
        files = locate(model)
        if files.gguf is not None and (found := _as_name(read_metadata(files.gguf).get("general.license"))):
            return found
    except (UserError, OSError):
        return None
    return _from_card(_find_file(files, "README.md")) or _from_config(files) or _from_license_file(files)


def _find_file(files: ModelFiles, name: str) -> Path | None:
    """Return the path of a file in the model's folder; for a hub model, download the file if it is not cached."""
    beside = next((path.parent for path in (*files.small.values(), files.sentencepiece, files.gguf) if path), None)
    if beside is not None and (beside / name).is_file():
        return beside / name
    return _from_hub(files.source, name) if files.origin == "hub" else None


def _from_hub(repository: str, name: str) -> Path | None:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    cached = try_to_load_from_cache(repository, name)
    if isinstance(cached, str):
        return Path(cached)
    if cached is not None or hub_is_out_of_reach():
        return None
    try:
        return Path(hf_hub_download(repository, name))
    except (HfHubHTTPError, OSError):
        return None


def _from_card(path: Path | None) -> str | None:
    """Read the licence from a model card's front matter; for `license: other`, return `license_name` if it is set."""
    from huggingface_hub import metadata_load

    try:
        card: Any = metadata_load(path) if path else None
    except (OSError, ValueError, yaml.YAMLError):
        return None
    name = _as_name(card.get("license")) if card else None
    return _as_name(card.get("license_name")) or name if name == "other" else name


def _from_config(files: ModelFiles) -> str | None:
    try:
        return _as_name(files.read_object("config.json").get("license"))
    except UserError:
        return None


def _from_license_file(files: ModelFiles) -> str | None:
    path = next((path for name in _LICENSE_FILES if (path := _find_file(files, name))), None)
    if path is None:
        return None
    head = " ".join(read_text(path, errors="replace")[:_HEAD_CHARS].lower().split())
    return next((spdx for pattern, spdx in _SPDX_IDS if re.search(pattern, head)), "other")


def _as_name(value: Any) -> str | None:
    value = value[0] if isinstance(value, list) and value else value
    return value.strip() if isinstance(value, str) and value.strip() else None
