"""Whole runs in this process on a tiny model: what tests of the engine share."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from lessons import RandomDocuments, quantize, tiny_llama
from transformers import PreTrainedModel

from tunewell.config.extensions import METHODS
from tunewell.config.schema import Config
from tunewell.data.batches import DataOrder, make_batch
from tunewell.records.events import EventLog
from tunewell.records.healing import HEALING, HealingEntry, read_healing
from tunewell.records.plan import Chosen, Plan
from tunewell.training.checkpoints import Checkpoints
from tunewell.training.events import Evaluated, Event, Healed, Note, Rewound, StepTaken, send_notes
from tunewell.training.faults import parse_faults
from tunewell.training.health import RunContext
from tunewell.training.recovery import HealingState
from tunewell.training.run import Run
from tunewell.training.step import TrainableModel


class Remembering:
    """A listener that keeps everything."""

    def __init__(self) -> None:
        self.steps: list[StepTaken] = []
        self.looks: list[Evaluated] = []
        self.notes: list[str] = []
        self.healing: list[HealingEntry] = []

    def __call__(self, event: Event) -> None:
        match event:
            case StepTaken():
                self.steps.append(event)
            case Evaluated():
                self.looks.append(event)
            case Healed(entry):
                self.healing.append(entry)
            case Rewound(step):
                self.steps = [taken for taken in self.steps if taken.step <= step]
            case Note(message):
                self.notes.append(message)


def make_plan(**values: Any) -> Plan:
    """A plan of twelve steps, with any value replaced."""
    chosen = {
        "device": "cpu",
        "precision": "fp32",
        "attention": "sdpa",
        "threads": 1,
        "method": "lora",
        "learning_rate": 1e-2,
        "schedule": "cosine",
        "warmup_steps": 2,
        "num_steps": 12,
        "epochs": 1.0,
        "batch_tokens": None,
        "batch_documents": 5,
        "micro_batch_tokens": 64,
        "compile": "off",
        "evaluate_every": 4,
        "save_every": 4,
    } | values
    return Plan(
        made_by="test",
        model="tiny",
        corpus="corpus",
        corpus_sha256="c",
        tokenizer_sha256="t",
        template_sha256s=[],
        seed=0,
        config={},
        **{name: Chosen(value=value, because="") for name, value in chosen.items()},
    )


def learned_llama(seed: int) -> PreTrainedModel:
    """A tiny model that knows the documents of these runs, as a base model knows its language."""
    return copy.deepcopy(_learned_llama(seed))


@cache
def _learned_llama(seed: int) -> PreTrainedModel:
    model, documents = tiny_llama(seed=seed), RandomDocuments(23)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    learner = TrainableModel(model, "fp32", 40)
    batch = make_batch(documents, range(len(documents)))
    for _ in range(60):
        (learner.loss_sum(batch) / len(batch.rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.requires_grad_(False)


def make_run(
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    plan: dict[str, Any] | None = None,
    faults: str | None = None,
    seed: int = 0,
    is_learned: bool = False,
) -> Run:
    """Put a run together in a folder, new or to be resumed; on a model that has learned its documents, if asked."""
    settings = Config.model_validate({"method": {"rank": 4, "dropout": 0.2}, **(config or {})})
    decided = make_plan(**(plan or {}))
    model = learned_llama(seed) if is_learned else tiny_llama(seed=seed)
    model = model.bfloat16() if settings.train.masters == "bf16" else model
    quantize(model, settings.method)
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    method = METHODS.load(decided.method.value).apply(model, settings.method, seed=seed)
    documents = RandomDocuments(23)
    listener = Remembering()
    folder.mkdir(exist_ok=True)
    remedies = HealingState(folder / HEALING)
    remedies.restore(read_healing(folder))
    return Run(
        plan=decided,
        config=settings,
        learner=TrainableModel(
            model, settings.train.masters, 40, settings=settings.train, hooks=parse_faults(faults, is_allowed=True)
        ),
        order=DataOrder(documents.index["length"], seed, "c", batch_documents=decided.batch_documents.value),
        documents=documents,
        held_out=RandomDocuments(5, seed=9),
        checkpoints=Checkpoints(
            folder / "checkpoints", keep=settings.checkpoints.keep, on_trouble=send_notes(listener)
        ),
        events=EventLog(folder / "events.jsonl"),
        samples=EventLog(folder / "samples.jsonl"),
        healing=remedies,
        listener=listener,
        method=method,
        load_weights=lambda: base,
        about=RunContext(vocab_size=131, precision="fp32", device="cpu", max_grad_norm=settings.train.max_grad_norm),
        identity={"seed": 0},
    )
