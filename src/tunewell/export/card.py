"""The model card of an export (README.md), and the licence of the base model."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tunewell.config.extensions import METHODS
from tunewell.core.errors import UserError
from tunewell.core.files import read_data, read_text
from tunewell.core.html import render
from tunewell.core.redact import redact
from tunewell.core.version import made_by
from tunewell.data.reading_prompt import prompt_form
from tunewell.inference.chat_model import ChatModel
from tunewell.inference.model_ref import ModelRef
from tunewell.model_files.files import ModelFiles, hub_is_out_of_reach, locate
from tunewell.model_files.gguf import read_metadata
from tunewell.records.manifest import Manifest, read_manifest
from tunewell.records.plan import Chosen
from tunewell.records.report import Report, read_report

PROMPT_FORM = "reading_prompt.json"
"""The file of an export with the form of the message with passages."""


@dataclass(frozen=True)
class CardFacts:
    """The contents of a model card."""

    ref: ModelRef
    name: str
    license: str | None
    manifest: Manifest | None
    report: Report | None
    notes: list[str] = field(default_factory=list)
    prompt_form: dict[str, Any] | None = None
    """The form of the message with passages, for a model that was trained to answer from them."""


def collect_card_facts(ref: ModelRef, model: ChatModel) -> CardFacts:
    """Collect the base model, licence, data, plan and verdict; unknown facts are None."""
    return CardFacts(
        ref,
        name=ref.path.resolve().name if ref.path is not None else ref.name,
        license=read_license(ref.base or ref.model),
        manifest=read_manifest(ref.corpus) if ref.corpus is not None else None,
        report=_read_report(ref.path) if ref.kind == "run" and ref.path else None,
        notes=list(model.notes),
        prompt_form=prompt_form() if ref.is_open_book else None,
    )


def model_card(card: CardFacts, *, library: str | None = None, example: str | None = None) -> str:
    """Return the README of an export folder, with the YAML front matter that model hubs read.

    `library` is the hub's `library_name` for the folder. `example` is Python code that loads it. The values of the
    front matter are written as JSON, so that no name can break the YAML syntax.
    """
    ref, method = card.ref, card.ref.method
    text = render(
        "tunewell.export",
        "card.md",
        card=card,
        ref=ref,
        manifest=card.manifest,
        made_by=made_by(),
        example=example,
        prompt_form_file=PROMPT_FORM,
        choices={name.replace("_", " "): own for name, own in ref.plan or () if isinstance(own, Chosen)},
        header={
            "base_model": ref.base,
            "license": card.license,
            "library_name": library,
            "tags": ["tunewell", *([method] if method and METHODS.entry(method).is_adapter else [])],
        },
    )
    return redact(text.rstrip() + "\n")


def _read_report(run: Path) -> Report | None:
    try:
        return read_report(run)
    except (OSError, UserError):
        return None  # not evaluated yet, or evaluated by a newer version of tunewell


# The licence of a base model, from its GGUF metadata, model card, config or LICENSE file.

_LICENSE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE")
_HEAD_CHARS = 2_000


def read_license(model: str) -> str | None:
    """Return the short name of a model's licence, e.g. `apache-2.0`, or None if no licence is stated.

    Return `other` for a LICENSE file that is not recognised.
    """
    try:
        found = locate(model)
        in_gguf = read_metadata(found.gguf).get("general.license") if found.gguf else None
        in_config = found.read_object("config.json").get("license")
    except (UserError, OSError):
        return None
    return _as_name(in_gguf) or _from_card(found) or _as_name(in_config) or _from_license_file(found)


def _find_file(model: ModelFiles, name: str) -> Path | None:
    """Return the path of a file in the model's folder; for a hub model, download the file if it is not cached."""
    beside = next((path.parent for path in (*model.small.values(), model.sentencepiece, model.gguf) if path), None)
    if beside is not None and (beside / name).is_file():
        return beside / name
    if model.origin != "hub":
        return None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(hf_hub_download(model.source, name, local_files_only=hub_is_out_of_reach() is not None))
    except (HfHubHTTPError, OSError):
        return None


def _from_card(model: ModelFiles) -> str | None:
    """Read the licence from a model card's front matter; for `license: other`, return `license_name` if it is set."""
    from huggingface_hub import metadata_load

    path = _find_file(model, "README.md")
    try:
        card: Any = metadata_load(path) if path else None
    except (OSError, ValueError, yaml.YAMLError):
        return None
    name = _as_name(card.get("license")) if card else None
    return _as_name(card.get("license_name")) or name if name == "other" else name


def _from_license_file(model: ModelFiles) -> str | None:
    path = next((path for name in _LICENSE_FILES if (path := _find_file(model, name))), None)
    if path is None:
        return None
    head = " ".join(read_text(path, errors="replace")[:_HEAD_CHARS].lower().split())
    patterns: dict[str, str] = read_data(__file__, "licenses.toml")
    return next((name for name, pattern in patterns.items() if re.search(pattern, head)), "other")


def _as_name(value: Any) -> str | None:
    value = value[0] if isinstance(value, list) and value else value
    return value.strip() if isinstance(value, str) and value.strip() else None
