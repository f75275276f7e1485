"""Compare models for some rows on a machine: what a first run of each needs, and which one is recommended."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tunewell.config.load import LoadedConfig, with_changes
from tunewell.config.schema import Config
from tunewell.core.arrays import Ints
from tunewell.core.errors import UserError
from tunewell.core.units import count, size_bytes
from tunewell.data.corpus.held_out import num_auto
from tunewell.data.row_statistics import LANGUAGES, RowStatistics
from tunewell.machine.machine import Machine
from tunewell.model_files.catalogue import CatalogueModel, catalogue, find_entry_of
from tunewell.model_files.shape import ModelShape, shape_of_config
from tunewell.planning.compute import PlanInputs
from tunewell.planning.fit import smaller_micro_batch
from tunewell.planning.forecast import Outlook, predict
from tunewell.planning.plan import plan_documents
from tunewell.planning.recommendation import recommend_settings
from tunewell.planning.workload import Workload, sampled_steps
from tunewell.records.manifest import LengthRecord, Manifest, RowsRecord, SplitRecord, TokenizerRecord
from tunewell.records.plan import Chosen
from tunewell.records.prediction import MemoryPrediction

_PATIENCE_SECONDS = (1800.0, 4 * 3600.0)
"""The recommended model trains in half an hour, because a first run shows mistakes in the rows, which the next run
corrects. With more than 1,800 rows, the limit is one second per row, at most four hours."""
_IN_JSON = ("license", "kind", "languages", "num_languages", "context", "good_for", "unverified", "source", "read")
"""Fields of a model of the catalogue."""


@dataclass(frozen=True)
class ModelNeeds:
    """What a first run of one model needs on a machine."""

    name: str
    num_parameters: int
    download_bytes: int
    """Zero if the model is on this disk."""
    outlook: Outlook | None
    """None if no run can be planned."""
    model: CatalogueModel | None = None
    """Its entry in the catalogue; None for another model on this disk."""
    where: str = ""
    """Where it is on this disk; empty if it is not."""
    file_name: str = ""
    """The name of its file or folder, which says which model it is where `name` does not."""
    problem: str = ""
    """Why it does not suit; empty if it does."""
    level: str = ""
    """How its documents are computed in training; empty if it is not known."""
    method: str = "lora"
    """`qlora` if it fits only with a base model in 4 bits."""
    safe_bytes: int = 0
    """The upper end of the memory's range. On a GPU with the smallest micro-batch, to which a run goes back by itself
    if it is out of memory; on a CPU, the system would end the process."""

    @property
    def fits(self) -> bool:
        return self.outlook is not None and self.outlook.prediction.fits

    @property
    def peak_bytes(self) -> int | None:
        return self.outlook.prediction.memory.uncached_bytes if self.outlook else None

    @property
    def seconds(self) -> float | None:
        return self.outlook.prediction.seconds.expected if self.outlook else None

    def as_json(self) -> dict[str, Any]:
        """Return the object in `models --json`."""
        prediction = self.outlook.prediction if self.outlook else None
        return {
            "name": self.name,
            "parameters": self.num_parameters,
            "fits": self.fits,
            "method": self.method,
            "level": self.level or None,
            "problem": self.problem or None,
            "peak_bytes": self.peak_bytes,
            "seconds": prediction.seconds.model_dump(include={"low", "expected", "high"}) if prediction else None,
            "download_bytes": self.download_bytes,
            "on_disk": self.where or None,
            "gated": self.model.is_gated if self.model else None,
            **{name: getattr(self.model, name, None) for name in _IN_JSON},
        }


def forecast_model(
    name: str,
    shape: ModelShape,
    rows: RowStatistics,
    machine: Machine,
    *,
    quantize: str,
    values: Mapping[str, Any] | None = None,
) -> Outlook:
    """Predict the run that `init` would configure for these rows and a model of this shape, with some keys set.

    The micro-batch is the largest that fits. Raises UserError if the run cannot be planned on this machine.
    """
    lengths = np.array(rows.lengths or (1,), dtype=np.int64)
    tokens = float(lengths.mean())
    facts = RowsRecord(
        num_rows=rows.num_rows,
        mean_tokens=tokens,
        mean_supervised=tokens * rows.supervised_share,
        task="documents" if rows.is_plain_text else "text",
        because="",
    )
    config = with_changes(Config.model_validate({"model": name, "method": {"quantize": quantize}}), values or {})
    chosen = recommend_settings(facts, shape.num_weights, config)
    config = with_changes(config, {key: own.value for key, own in chosen.items()})
    lengths = np.resize(lengths, max(1, rows.num_rows))
    held_out, lengths = np.split(lengths, [num_auto(len(lengths))])
    device = machine.device("auto")
    inputs = PlanInputs(
        LoadedConfig(config, Path(), None, {}),
        _manifest(lengths, len(held_out), shape, rows.supervised_share),
        device,
        shape.num_weights,
        threads=Chosen(machine.cores, because="the cores of this machine"),
    )
    plan, order = plan_documents(inputs, lengths)
    work = Workload(
        shape=shape,
        config=config,
        plan=plan,
        device=device,
        lengths=lengths,
        step_lengths=sampled_steps(order),
        supervised_share=rows.supervised_share,
        held_out_lengths=held_out,
        micro_tokens=plan.micro_batch_tokens.value,
    )
    forecast = partial(predict, flops=machine.flops)
    outlook = forecast(work)
    return outlook if outlook.prediction.fits else smaller_micro_batch(outlook, forecast) or outlook


def _manifest(lengths: Ints, num_held_out: int, shape: ModelShape, supervised_share: float) -> Manifest:
    """Return the manifest that the corpus of these rows would have, as far as a plan reads it."""
    total = int(lengths.sum())
    train = SplitRecord.model_construct(
        documents=len(lengths), tokens=total, supervised=int(total * supervised_share), shards=[]
    )
    held_out = SplitRecord.model_construct(documents=num_held_out, tokens=0, supervised=0, shards=[])
    return Manifest.model_construct(
        corpus_sha256="",
        tokenizer=TokenizerRecord.model_construct(sha256="", vocab_size=shape.vocab_size),
        templates=[],
        lengths=LengthRecord.model_construct(max=int(lengths.max())),
        splits={"train": train, "held_out": held_out},
    )


def shape_of_entry(model: CatalogueModel) -> ModelShape:
    """Return the shape of a model of the catalogue, with as many weights as its card states."""
    shape = shape_of_config(model.config)
    others = shape.num_other_weights + model.num_parameters - shape.num_weights
    return replace(shape, num_other_weights=max(0, others)) if model.millions else shape


def compare_model(
    name: str,
    shape: ModelShape,
    rows: RowStatistics,
    machine: Machine,
    *,
    model: CatalogueModel | None = None,
    where: str = "",
    free_disk: int | None = None,
    values: Mapping[str, Any] | None = None,
) -> ModelNeeds:
    """Return what a first run of a model needs. On an NVIDIA GPU, 4 bits are tried if 16 bits do not fit."""
    download = 0 if where else 2 * shape.num_weights
    needs = ModelNeeds(name, shape.num_weights, download, None, model, where)
    try:
        outlook = forecast_model(name, shape, rows, machine, quantize="none", values=values)
        method = "lora"
        if not outlook.prediction.fits and outlook.work.device.kind == "cuda":
            small = forecast_model(name, shape, rows, machine, quantize="nf4", values=values)
            outlook, method = (small, "qlora") if small.prediction.fits else (outlook, method)
    except UserError as error:
        return replace(needs, problem=error.what)
    safe = outlook
    if outlook.work.is_gpu:
        safe = predict(outlook.work.with_micro_tokens(max(64, rows.longest)), flops=machine.flops)
    needs = replace(needs, outlook=outlook, method=method, safe_bytes=safe.prediction.memory.high_bytes)
    return replace(needs, problem=_problem(needs, rows, free_disk))


def _problem(needs: ModelNeeds, rows: RowStatistics, free_disk: int | None) -> str:
    memory, entry = _memory(needs), needs.model
    if not needs.fits:
        free = size_bytes(memory.free_bytes or 0)
        return f"does not fit: it needs {size_bytes(memory.needed_bytes)}, and {free} are free"
    if free_disk is not None and needs.download_bytes > 0.9 * free_disk:
        return f"not enough disk space: {size_bytes(needs.download_bytes)} to download, {size_bytes(free_disk)} free"
    if entry is None:
        return ""
    if rows.longest > entry.context:
        return f"rows have up to {count(rows.longest)} tokens, and its context is {count(entry.context)}"
    if rows.language and rows.language not in entry.languages:
        return f"not trained on {LANGUAGES[rows.language]}"
    return ""


def recommend(needs: list[ModelNeeds], rows: RowStatistics, *, is_online: bool) -> tuple[ModelNeeds, str] | None:
    """Return the recommended model and the reason; None if no model suits. `needs` are in the catalogue's order.

    It is the strongest known model on this disk that suits the rows, fits with a margin, and trains in half an hour,
    or longer with many rows. Without one, it is the strongest such model of the catalogue that can be fetched without
    a login and has no unverified facts; without one, the largest other model on this disk that is not known to lack
    the language of the rows.
    """
    suiting = [own for own in needs if not own.problem and own.method == "lora"]
    order = {entry.name: number for number, entry in enumerate(catalogue())}
    here = [(entry, own) for own in suiting if own.where and (entry := _suitable_entry(own, rows))]
    known = [own for _, own in sorted(here, key=lambda pair: (bool(pair[0].unverified), order[pair[0].name]))]
    fetched = [own for own in suiting if not own.where and is_online and _can_be_fetched(own, rows)]
    groups = [(known, "strongest on this disk"), (fetched, "strongest of the list")]
    if not known and not fetched:
        others = sorted((own for own in suiting if own.model is None), key=lambda own: -own.num_parameters)
        groups = [
            ([own for own in others if not _lacks_language(own, rows)], "largest on this disk"),
            (others, "largest on this disk"),
        ]
    patience = min(max(_PATIENCE_SECONDS[0], float(rows.num_rows)), _PATIENCE_SECONDS[1])
    goal = f"{patience / 60:.0f} minutes here" if patience < 7200 else f"{patience / 3600:.1f} hours here"
    for candidates, which in groups:
        if quick := [own for own in _certain(candidates) if (own.seconds or 0.0) <= patience]:
            first = f"the {which} that fits and trains in {goal}"
            return quick[0], _reason(quick[0], rows, first, is_online=is_online)
    candidates = _certain([own for candidates, _ in groups for own in candidates])
    if not candidates:
        return None
    best = min(candidates, key=lambda own: own.seconds or 0.0)
    return best, _reason(best, rows, f"the fastest that fits, as none trains in {goal}", is_online=is_online)


def _certain(candidates: list[ModelNeeds]) -> list[ModelNeeds]:
    """Return the models that fit with a margin, or all if none does."""
    return [own for own in candidates if own.safe_bytes <= (_memory(own).free_bytes or math.inf)] or candidates


def _suitable_entry(own: ModelNeeds, rows: RowStatistics) -> CatalogueModel | None:
    """Return the entry of a model that is known, by its id or its file name, to suit such rows; otherwise None."""
    entry = own.model or find_entry_of(f"{own.name} {own.file_name}")
    kind = "base" if rows.is_plain_text else "chat"
    if entry is None or (entry.kind, entry.purpose) != (kind, "general") or rows.longest > entry.context:
        return None
    return entry if rows.language is None or rows.language in entry.languages else None


def _can_be_fetched(own: ModelNeeds, rows: RowStatistics) -> bool:
    entry = own.model
    return entry is not None and not (entry.is_gated or entry.unverified) and _suitable_entry(own, rows) is not None


def smallest_to_fetch(needs: list[ModelNeeds], rows: RowStatistics) -> ModelNeeds | None:
    """Return the smallest model of the catalogue that suits the rows and can be fetched, or None."""
    suiting = [own for own in needs if not own.problem and own.download_bytes and _can_be_fetched(own, rows)]
    return min(suiting, key=lambda own: own.download_bytes, default=None)


def _memory(needs: ModelNeeds) -> MemoryPrediction:
    assert needs.outlook is not None
    return needs.outlook.prediction.memory


def _lacks_language(own: ModelNeeds, rows: RowStatistics) -> bool:
    """Return True if a model on this disk has the name of a model that was not trained on the language of the rows."""
    entry = own.model or find_entry_of(f"{own.name} {own.file_name}")
    return bool(rows.language and entry is not None and rows.language not in entry.languages)


def _reason(needs: ModelNeeds, rows: RowStatistics, first: str, *, is_online: bool) -> str:
    memory = _memory(needs)
    free = f" of {size_bytes(memory.free_bytes)}" if memory.free_bytes is not None else ""
    parts = [first, f"it needs {size_bytes(memory.uncached_bytes)}{free} of memory"]
    if rows.language not in (None, "en") and needs.model is not None:
        parts.append(f"it knows {LANGUAGES[rows.language]}")
    if rows.language and _lacks_language(needs, rows):
        parts.append(f"it was not trained on {LANGUAGES[rows.language]}: a model of the list that was is better")
    if needs.download_bytes:
        parts.append(f"{size_bytes(needs.download_bytes)} to download")
    if not is_online:
        parts.append("the hub cannot be reached")
    return "; ".join(parts)
