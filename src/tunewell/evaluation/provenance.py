"""What a report says beside its measurements: how the model was made, from which rows, on which machine."""

import platform
import shlex
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tunewell import __version__
from tunewell.config.rules import VerdictRules
from tunewell.core.units import count, size_bytes
from tunewell.evaluation.measurements import Measurements
from tunewell.evaluation.verdict import Verdict, thresholds
from tunewell.hardware.facts import num_cores
from tunewell.inference.chat_model import ChatModel
from tunewell.inference.model_ref import ModelRef
from tunewell.records.checkpoint import read_manifest as read_checkpoint
from tunewell.records.events import as_number, read_events
from tunewell.records.healing import HealingEntry, read_healing
from tunewell.records.manifest import read_manifest
from tunewell.records.plan import Chosen, Plan
from tunewell.records.report import Curve, EvaluatedModel, Report, RowCounts
from tunewell.runs.outcome import advice, healing_summary

_VERSIONED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow")


@dataclass(frozen=True)
class Provenance:
    """Everything a report tells that was not measured for it."""

    subject: EvaluatedModel
    curve: Curve = field(default_factory=Curve)
    ledger: RowCounts | None = None
    plan: dict[str, Chosen[Any]] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    repeat: list[str] = field(default_factory=list)
    healing: list[HealingEntry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, found: ModelRef, voice: ChatModel) -> "Provenance":
        """Gather what lies in the run's folder and what is known of the machine."""
        is_run = found.kind == "run" and found.path is not None
        return cls(
            subject=_subject(found),
            curve=_curve(found.path) if is_run and found.path else Curve(),
            ledger=_ledger(found),
            plan=_plan(found.plan) if found.plan else {},
            machine=_machine(voice),
            hashes=_hashes(found),
            repeat=_repeat(found),
            healing=read_healing(found.path) if is_run and found.path else [],
            notes=list(voice.notes),
        )


def make_report(
    background: Provenance,
    facts: Measurements,
    verdict: Verdict,
    *,
    rules: VerdictRules,
    data: str,
    **more: Any,
) -> Report:
    """Put a report together."""
    notes = [*background.notes, *more.pop("notes")]
    chat = f"`tunewell chat {shlex.quote(background.subject.path or background.subject.name)}`"
    return Report(
        made_by=f"tunewell {__version__}",
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        verdict=verdict.level,
        summary=verdict.summary,
        reasons=verdict.reasons,
        subject=background.subject,
        data=data,
        held_out=facts.held_out,
        by_source=list(facts.by_source),
        everyday=facts.everyday,
        base_tally=facts.base_tally,
        tuned_tally=facts.tuned_tally,
        exchanges=list(facts.exchanges),
        change=facts.change,
        bad_weights=dict(facts.bad_weights),
        thresholds=thresholds(rules),
        curve=background.curve,
        ledger=background.ledger,
        plan=background.plan,
        machine=background.machine,
        versions=_versions(),
        hashes=background.hashes,
        repeat=background.repeat,
        healing=healing_summary(background.healing),
        advice=advice(background.healing),
        notes=notes,
        next=verdict.reasons[0].next if verdict.reasons else chat,
        **more,
    )


def _subject(found: ModelRef) -> EvaluatedModel:
    return EvaluatedModel(
        name=found.name,
        kind=found.kind,
        path=None if found.path is None else str(found.path),
        base=found.base,
        step=found.step,
        because=found.because,
        method=found.method,
    )


def _curve(run: Path) -> Curve:
    train, held_out = [], []
    for event in read_events(run / "events.jsonl"):
        if event["kind"] == "step" and event.get("supervised_tokens") != 0:
            train.append((event["step"], as_number(event["loss"])))
        elif event["kind"] == "held_out":
            held_out.append((event["step"], as_number(event["loss"])))
    finite = [(loss, step) for step, loss in held_out if loss == loss]
    return Curve(train=train, held_out=held_out, best_step=min(finite)[1] if finite else None)


def _ledger(found: ModelRef) -> RowCounts | None:
    """Tell of the rows that were trained on, whatever it is judged on; None where they are gone or others."""
    manifest = None if found.corpus is None else read_manifest(found.corpus)
    if manifest is None or found.plan is None or manifest.corpus_sha256 != found.plan.corpus_sha256:
        return None
    return RowCounts(
        rows=manifest.rows_in,
        documents=manifest.documents,
        held_out=manifest.held_out,
        dropped=manifest.dropped,
        tokens=manifest.tokens.total - manifest.tokens.padding,
        supervised=manifest.tokens.supervised,
        sources=[
            source.model_dump(mode="json", include={"name", "rows", "documents", "held_out", "dropped"})
            for source in manifest.sources
        ],
    )


def _plan(plan: Plan) -> dict[str, Chosen[Any]]:
    fields = ((name, getattr(plan, name)) for name in type(plan).model_fields)
    return {name: value for name, value in fields if isinstance(value, Chosen) and value.value is not None}


def _machine(voice: ChatModel) -> dict[str, str]:
    facts = voice.device
    told = {"device": facts.label, "precision": voice.precision}
    if voice.computed_by:
        told["computed by"] = voice.computed_by
    if facts.memory_bytes:
        told["memory"] = size_bytes(facts.memory_bytes)
    if facts.kind == "cpu":
        told["threads"] = f"{voice.num_threads or torch.get_num_threads()} of {count(num_cores(), 'core')}"
    return {**told, "system": f"{platform.system()} {platform.machine()}"}


def _versions() -> dict[str, str]:
    found = {"tunewell": __version__, "python": platform.python_version()}
    for name in _VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # what is not installed has no version to tell
    return found


def _hashes(found: ModelRef) -> dict[str, str]:
    if found.plan is None:
        return {}
    told = {"corpus": found.plan.corpus_sha256, "tokenizer": found.plan.tokenizer_sha256}
    if found.plan.template_sha256s:
        told["template"] = found.plan.template_sha256s[0]
    if found.path is not None and found.step is not None:
        weights = read_checkpoint(found.path / "checkpoints" / f"step-{found.step:06d}").files
        told |= {name: record.sha256 for name, record in weights.items() if name in _WEIGHTS}
    return told


_WEIGHTS = ("adapter_model.safetensors", "model.safetensors")


def _repeat(found: ModelRef) -> list[str]:
    if found.path is None:
        return []
    place = shlex.quote(str(found.path))
    if found.kind != "run":
        return [f"tunewell validate {place} --data ROWS"]
    return [f"tunewell train --config {place}/config.yaml --out ANOTHER_FOLDER", f"tunewell validate {place}"]
