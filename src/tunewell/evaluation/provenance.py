"""Collect how an evaluated model was trained, from which rows and on which machine; assemble the report."""

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
from tunewell.inference.chat_model import ChatModel, ModelRef
from tunewell.records.checkpoint import read_manifest as read_checkpoint
from tunewell.records.events import as_number, read_events
from tunewell.records.healing import HealingEntry, read_healing
from tunewell.records.manifest import read_manifest
from tunewell.records.plan import Chosen, Plan
from tunewell.records.report import Curve, EvaluatedModel, Report, RowCounts
from tunewell.runs.result import advice, healing_summary

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow")
_WEIGHT_FILES = ("adapter_model.safetensors", "model.safetensors")


@dataclass(frozen=True)
class Provenance:
    """Everything in a report that was not measured for it."""

    model: EvaluatedModel
    curve: Curve = field(default_factory=Curve)
    row_counts: RowCounts | None = None
    plan: dict[str, Chosen[Any]] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    repeat: list[str] = field(default_factory=list)
    healing: list[HealingEntry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def collect_provenance(ref: ModelRef, model: ChatModel) -> Provenance:
    """Read the run folder and describe the machine."""
    run = ref.path if ref.kind == "run" else None
    return Provenance(
        model=_evaluated_model(ref),
        curve=_curve(run) if run else Curve(),
        row_counts=_row_counts(ref),
        plan=_plan(ref.plan) if ref.plan else {},
        machine=_machine(model),
        hashes=_hashes(ref),
        repeat=_repeat(ref),
        healing=read_healing(run) if run else [],
        notes=list(model.notes),
    )


def make_report(
    provenance: Provenance,
    measured: Measurements,
    verdict: Verdict,
    *,
    rules: VerdictRules,
    data: str,
    **more: Any,
) -> Report:
    """Assemble the report; `more` are further fields of it."""
    notes = [*provenance.notes, *more.pop("notes")]
    chat = f"`tunewell chat {shlex.quote(provenance.model.path or provenance.model.name)}`"
    return Report(
        made_by=f"tunewell {__version__}",
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        verdict=verdict.level,
        summary=verdict.summary,
        reasons=verdict.reasons,
        subject=provenance.model,
        data=data,
        held_out=measured.held_out,
        by_source=list(measured.by_source),
        everyday=measured.everyday,
        base_tally=measured.base_counts,
        tuned_tally=measured.tuned_counts,
        exchanges=list(measured.questions),
        change=measured.change,
        bad_weights=dict(measured.bad_weights),
        thresholds=thresholds(rules),
        curve=provenance.curve,
        ledger=provenance.row_counts,
        plan=provenance.plan,
        machine=provenance.machine,
        versions=_versions(),
        hashes=provenance.hashes,
        repeat=provenance.repeat,
        healing=healing_summary(provenance.healing),
        advice=advice(provenance.healing),
        notes=notes,
        next=verdict.reasons[0].next if verdict.reasons else chat,
        **more,
    )


def _evaluated_model(ref: ModelRef) -> EvaluatedModel:
    return EvaluatedModel(
        name=ref.name,
        kind=ref.kind,
        path=None if ref.path is None else str(ref.path),
        base=ref.base,
        step=ref.step,
        because=ref.because,
        method=ref.method,
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


def _row_counts(ref: ModelRef) -> RowCounts | None:
    """Count the rows of the training, whatever the model is evaluated on; None if its corpus is missing or changed."""
    manifest = None if ref.corpus is None else read_manifest(ref.corpus)
    if manifest is None or ref.plan is None or manifest.corpus_sha256 != ref.plan.corpus_sha256:
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


def _machine(model: ChatModel) -> dict[str, str]:
    device = model.device
    machine = {"device": device.label, "precision": model.precision}
    if model.computed_by:
        machine["computed by"] = model.computed_by
    if device.memory_bytes:
        machine["memory"] = size_bytes(device.memory_bytes)
    if device.kind == "cpu":
        machine["threads"] = f"{model.num_threads or torch.get_num_threads()} of {count(num_cores(), 'core')}"
    return {**machine, "system": f"{platform.system()} {platform.machine()}"}


def _versions() -> dict[str, str]:
    versions = {"tunewell": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue  # not installed
    return versions


def _hashes(ref: ModelRef) -> dict[str, str]:
    if ref.plan is None:
        return {}
    hashes = {"corpus": ref.plan.corpus_sha256, "tokenizer": ref.plan.tokenizer_sha256}
    if ref.plan.template_sha256s:
        hashes["template"] = ref.plan.template_sha256s[0]
    if ref.path is not None and ref.step is not None:
        weights = read_checkpoint(ref.path / "checkpoints" / f"step-{ref.step:06d}").files
        hashes |= {name: record.sha256 for name, record in weights.items() if name in _WEIGHT_FILES}
    return hashes


def _repeat(ref: ModelRef) -> list[str]:
    if ref.path is None:
        return []
    path = shlex.quote(str(ref.path))
    if ref.kind != "run":
        return [f"tunewell validate {path} --data ROWS"]
    return [f"tunewell train --config {path}/config.yaml --out NEW_RUN", f"tunewell validate {path}"]
