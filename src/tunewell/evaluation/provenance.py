"""Collect the training settings, data, machine and versions of an evaluated model for its report."""

import platform
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tunewell import __version__
from tunewell.core.units import count, size_bytes
from tunewell.core.version import made_by
from tunewell.inference.chat_model import ChatModel
from tunewell.inference.model_ref import ModelRef
from tunewell.machine.facts import installed_versions, num_cores
from tunewell.records.checkpoint import read_manifest as read_checkpoint
from tunewell.records.events import read_events, read_losses
from tunewell.records.healing import read_healing
from tunewell.records.manifest import read_manifest
from tunewell.records.plan import Chosen, Plan
from tunewell.records.report import Curve, EvaluatedModel, RowCounts
from tunewell.runs.result import advice, healing_summary

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow")
_WEIGHT_FILES = ("adapter_model.safetensors", "model.safetensors")


def collect_provenance(ref: ModelRef, model: ChatModel) -> dict[str, Any]:
    """Return the fields of a report that describe the training, its data and the machine."""
    run = ref.path if ref.kind == "run" else None
    healing = read_healing(run) if run else []
    return {
        "made_by": made_by(),
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "subject": EvaluatedModel(
            name=ref.name,
            kind=ref.kind,
            path=None if ref.path is None else str(ref.path),
            base=ref.started_from,
            base_role="where this run started" if ref.plan and ref.plan.start else "the base model",
            step=ref.step,
            because=ref.because,
            method=ref.method,
        ),
        "curve": _curve(run) if run else Curve(),
        "ledger": _row_counts(ref),
        "plan": _plan(ref.plan) if ref.plan else {},
        "machine": _machine(model),
        "versions": {"tunewell": __version__, "python": platform.python_version(), **installed_versions(_PACKAGES)},
        "hashes": _hashes(ref),
        "repeat": _repeat(ref),
        "healing": healing_summary(healing),
        "advice": advice(healing),
    }


def _curve(run: Path) -> Curve:
    train, held_out = read_losses(run / "events.jsonl")
    best = [event["step"] for event in read_events(run / "events.jsonl") if event.get("is_best")]
    return Curve(train=train, held_out=held_out, best_step=best[-1] if best else None)


def _row_counts(ref: ModelRef) -> RowCounts | None:
    """Return the row counts of the training corpus, or None if the corpus is missing or has changed."""
    manifest = None if ref.corpus is None else read_manifest(ref.corpus)
    if manifest is None or ref.plan is None or manifest.corpus_sha256 != ref.plan.corpus_sha256:
        return None
    return RowCounts(
        rows=manifest.rows_in,
        documents=manifest.documents,
        selected=manifest.selected,
        held_out=manifest.held_out,
        dropped=manifest.dropped,
        tokens=manifest.tokens.total - manifest.tokens.padding,
        supervised=manifest.tokens.supervised,
        sources=[
            source.model_dump(
                mode="json", include={"name", "formats", "rows", "documents", "selected", "held_out", "dropped"}
            )
            for source in manifest.sources
        ],
    )


def _plan(plan: Plan) -> dict[str, Chosen[Any]]:
    return {name: one for name, one in plan if isinstance(one, Chosen) and one.value is not None}


def _machine(model: ChatModel) -> dict[str, str]:
    device = model.device
    threads = f"{model.batch_threads or torch.get_num_threads()} of {count(num_cores(), 'core')}"
    machine = {
        "device": device.label,
        "precision": model.precision,
        "computed by": model.computed_by,
        "memory": size_bytes(device.memory_bytes) if device.memory_bytes else "",
        "threads": threads if device.kind == "cpu" else "",
        "system": f"{platform.system()} {platform.machine()}",
    }
    return {name: text for name, text in machine.items() if text}


def _hashes(ref: ModelRef) -> dict[str, str]:
    if (plan := ref.plan) is None:
        return {}
    hashes = {"corpus": plan.corpus_sha256, "tokenizer": plan.tokenizer_sha256}
    if plan.template_sha256s:
        hashes["template"] = plan.template_sha256s[0]
    if plan.start is not None:
        hashes["start"] = plan.start.sha256
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
