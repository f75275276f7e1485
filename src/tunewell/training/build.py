"""Build a run: load the model, apply the method, and set up the optimizer, logs, checkpoints and sample answers."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tunewell.config.extensions import METHODS, OPTIMIZERS
from tunewell.config.load import LoadedConfig
from tunewell.config.schema import Config, MethodSettings, Train
from tunewell.core.errors import UserError
from tunewell.core.units import count
from tunewell.data.batches import DataOrder, spread_evenly
from tunewell.data.corpus.reader import Corpus
from tunewell.data.read_ahead import ReadAhead
from tunewell.inference.decoder import Decoding
from tunewell.inference.degeneration import find_degeneration
from tunewell.inference.generate import generate
from tunewell.methods.base import AdapterMethod, Method
from tunewell.model_files.families import DOCUMENTS
from tunewell.model_files.presets import is_preset
from tunewell.model_files.weights import fingerprint_weights
from tunewell.models import attention
from tunewell.models.load import (
    DTYPES,
    LoadedModel,
    LoadOptions,
    count_parameters,
    load_model,
    verify_placement,
)
from tunewell.models.support import head_shape
from tunewell.records.events import EventLog
from tunewell.records.healing import HEALING, read_healing
from tunewell.records.plan import Chosen, Plan, write_plan
from tunewell.scoring.questions import corpus_reader, find_measure, questions_of
from tunewell.training.checkpoints import Checkpoints
from tunewell.training.distributed import World
from tunewell.training.evaluate import mark_loops
from tunewell.training.events import Listener, RunStarted, Sample, send_notes
from tunewell.training.health import RunContext
from tunewell.training.leak_probe import PackingCheck, PackingFault, probe_leaks
from tunewell.training.recovery import HealingState
from tunewell.training.run import Run
from tunewell.training.step import StepHooks, TrainableModel

_IDENTITY = (
    "precision",
    "attention",
    "method",
    "learning_rate",
    "schedule",
    "warmup_steps",
    "num_steps",
    "batch_tokens",
    "batch_documents",
    "micro_batch_tokens",
)
"""Values of the plan that must not change on resume."""
_OPTIMIZER = (
    "optimizer",
    "masters",
    "min_rate_share",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
)


def _own_settings(optimizer: str) -> list[str]:
    """Return the train settings that only one optimizer uses: their names start with its name."""
    return [name for name in Train.model_fields if name.startswith(f"{optimizer}_")]


CHANGE_NAMES = {
    *("model", "weights", "data", "tokenizer", "template", "seed", *_IDENTITY, *_OPTIMIZER),
    *(setting for optimizer in OPTIMIZERS.names() for setting in _own_settings(optimizer)),
    *MethodSettings.model_fields,
} - {"kind"}
"""Every name that `--allow-change` accepts."""


@dataclass(kw_only=True)
class RunInputs:
    """The inputs from which a run is built."""

    loaded: LoadedConfig
    plan: Plan
    corpus: Corpus
    order: DataOrder
    folder: Path
    rank_folder: Path
    """The folder that this rank writes to. Only rank 0 writes to the run folder."""
    world: World
    listener: Listener
    allow_pickle: bool
    hooks: StepHooks = field(default_factory=StepHooks)
    heartbeat: Callable[[], None] = lambda: None

    @property
    def config(self) -> Config:
        return self.loaded.config

    @property
    def model(self) -> str:
        """The model's path or name, relative to the current folder."""
        return self.loaded.seen(self.plan.model)


def build_run(parts: RunInputs) -> Run:
    """Load the model, apply the training method, check devices and dtypes, and return the run."""
    note = send_notes(parts.listener)
    options, found, method = load_run_model(parts)
    config, plan, model, corpus = parts.config, parts.plan, found.model, parts.corpus
    for message in (*parts.loaded.notes, *found.notes, *method.notes):
        note(message)
    verify_placement(model, device=options.device, dtype=options.dtype, trainable=DTYPES[config.train.masters])
    folder, longest = parts.rank_folder, options.longest_document
    samples = EventLog(folder / "samples.jsonl", on_trouble=note)
    learner = TrainableModel(
        model,
        plan.precision.value,
        longest,
        settings=config.train,
        seed=plan.seed,
        head=head_shape(model),
        world=parts.world,
        hooks=parts.hooks,
        heartbeat=parts.heartbeat,
    )
    if config.train.recompute != "off":
        learner.recompute(config.train.recompute)
    documents = parts.hooks.documents(corpus)
    return Run(
        **run_state(plan, config, parts.model, note, folder=folder, home=parts.folder),
        config=config,
        learner=learner,
        order=parts.order,
        documents=ReadAhead(documents) if config.train.read_ahead else documents,
        held_out=corpus.evaluated,
        is_selecting=len(corpus.selection) > 0 and (plan.answers is None or plan.answers.value > 0),
        samples=samples,
        listener=parts.listener,
        method=method,
        load_weights=partial(_load_weights, options),
        name_of=partial(_row_name, parts.corpus),
        about=_context(parts, model),
        home=parts.folder / "checkpoints",
        ask=_make_sampler(parts, learner, samples),
        num_answers=_num_answers(parts),
    )


def load_run_model(parts: RunInputs) -> tuple[LoadOptions, LoadedModel, Method]:
    """Load the model of a run, quantised if the plan says so, and apply its method, as before the first step."""
    attention.register()
    config, plan, corpus = parts.config, parts.plan, parts.corpus
    method_class: type[Method] = METHODS.load(plan.method.value)
    masters = DTYPES[config.train.masters]
    is_narrow = masters != torch.float32  # the plan allows this only for full fine-tuning
    splits = (corpus, corpus.selection, corpus.held_out)
    longest = max(int(parts.order.lengths.max()), *(int(own.index["length"].max()) for own in splits if len(own)))
    options = LoadOptions(
        parts.model,
        corpus.path / "tokenizer",
        torch.device(plan.device.value),
        masters if is_narrow else method_class.load_dtype(DTYPES[plan.precision.value]),
        attention=attention.FLASH if plan.attention.value == "flash" else attention.SDPA,
        added_tokens=tuple(corpus.manifest.tokenizer.added_by_us),
        longest_document=longest,
        seed=plan.seed,
        allow_pickle=parts.allow_pickle,
    )
    found = _load_model(options, parts)
    return replace(options, quantized=parts.plan.quantized), found, _apply_method(method_class, parts, found)


def _apply_method(method_class: type[Method], parts: RunInputs, found: LoadedModel) -> Method:
    """Apply the training method to the model, or load the adapter that goes on being trained."""
    settings, prefix = parts.config.method, found.text_prefix
    if settings.adapter is not None:
        assert issubclass(method_class, AdapterMethod)  # checked by `runs/start.py`
        folder = parts.loaded.path(settings.adapter)
        return method_class.load(found.model, folder, text_prefix=prefix, settings=settings)
    has_new_tokens = bool(found.new_token_ids)
    return method_class.apply(
        found.model, settings, seed=parts.plan.seed, text_prefix=prefix, has_new_tokens=has_new_tokens
    )


def _load_model(options: LoadOptions, parts: RunInputs) -> LoadedModel:
    """Load the model, and quantise it if the plan says so. The plan gets the measured cost."""
    base = parts.plan.quantized
    if base is None or base.is_saved or base.loss is not None:
        return load_model(replace(options, quantized=base))
    from tunewell.training.quantization import load_quantized

    found, base = load_quantized(options, base, parts)
    parts.plan = parts.plan.model_copy(update={"quantized": base})
    if parts.world.is_first:
        write_plan(parts.folder, parts.plan)
    return found


def run_state(
    plan: Plan, config: Config, model: str, note: Callable[[str], None], *, folder: Path, home: Path
) -> dict[str, Any]:
    """Return the fields of `RunState` for a run that writes to a folder. Earlier problems are read from its home."""
    healing = HealingState(folder / HEALING, on_trouble=note)
    healing.restore(read_healing(home))
    return {
        "plan": plan,
        "checkpoints": Checkpoints(folder / "checkpoints", keep=config.checkpoints.keep, on_trouble=note),
        "events": EventLog(folder / "events.jsonl", on_trouble=note),
        "healing": healing,
        "identity": identity_of(plan, config, fingerprint_weights(model)),
    }


def describe_start(parts: RunInputs, run: Run) -> RunStarted:
    """Return the first event of a run."""
    num_trainable = sum(parameter.numel() for parameter in run.learner.parameters.values())
    num_parameters = count_parameters(run.learner.model)
    return RunStarted(parts.plan, num_trainable, num_parameters, run.progress.step)


def check_packing(parts: RunInputs, run: Run) -> None:
    """Check that packed documents do not influence each other, and send the result as a note.

    If they do, or cannot be packed, documents are computed one by one from now on, and the plan says so.
    """
    note = send_notes(parts.listener)
    try:
        note(_result_of(probe_leaks(run.learner, run.documents), run.learner))
    except PackingFault as fault:
        if not attention.is_packed(run.learner.model):
            raise
        run.learner.unpack()
        found = probe_leaks(run.learner, run.documents)
        because = str(fault.what)
        run.plan = parts.plan = parts.plan.model_copy(update={"packing": Chosen(DOCUMENTS, because=because)})
        if parts.world.is_first:
            write_plan(parts.folder, parts.plan)
        note(f"documents in training from here on: {DOCUMENTS} ({because})")
        note(_result_of(found, run.learner))


def _result_of(check: PackingCheck, learner: TrainableModel) -> str:
    number = count(check.num_documents, "document")
    if not attention.is_packed(learner.model):
        return f"check passed: {number}, one by one, as transformers computes them"
    return (
        "check passed: rows packed together do not influence each other (no gradient crosses between "
        f"{number}; logits differ by {max(check.packed_from_alone, check.alone_from_stock):.0e} from transformers')"
    )


def identity_of(plan: Plan, config: Config, weights: str | None) -> dict[str, Any]:
    """Return the settings that must not change on resume. `weights` is the fingerprint of the initial weights."""
    return {
        "model": plan.model,
        "weights": weights,
        "data": plan.corpus_sha256,
        "tokenizer": plan.tokenizer_sha256,
        "template": ",".join(plan.template_sha256s),
        "seed": plan.seed,
        **{name: getattr(plan, name).value for name in _IDENTITY},
        **METHODS.load(plan.method.value).identity(config.method),
        **({"adapter": plan.start.sha256} if plan.start and config.method.adapter else {}),
        **({"replay": plan.replay.value} if plan.replay and plan.replay.value else {}),
        **config.train.model_dump(mode="json", include={*_OPTIMIZER, *_own_settings(config.train.optimizer)}),
    }


def require_same_settings(parts: RunInputs, run: Run) -> None:
    """Raise UserError on all ranks if the training settings of any rank differ from those of rank 0."""
    config, plan = parts.config, parts.plan
    # Settings are compared first: derived values may differ too, but the user has to fix the setting.
    mine: dict[str, Any] = {"seed": plan.seed}
    for section in ("train", "evaluate", "checkpoints", "healing"):
        values = getattr(config, section).model_dump(exclude={"threads"})
        mine |= {f"{section}.{name}": value for name, value in values.items()}
    mine |= {name: value for name, value in run.identity.items() if name not in ("model", "attention")}
    mine |= {"compile": plan.compile.value, "evaluate_every": plan.evaluate_every.value}
    first = parts.world.broadcast(mine)
    with parts.world.failing_together():
        for name, value in mine.items():
            if value != first.get(name):
                raise UserError(
                    f"`{name}` is {value} on this rank and {first.get(name)} on rank 0",
                    fix="start all processes with the same config, options, data and model",
                )


def _load_weights(options: LoadOptions) -> dict[str, Tensor]:
    """Reload the initial weights of the model on the CPU."""
    options = replace(options, device=torch.device("cpu"), attention=attention.SDPA)
    model = load_model(options, may_share=False).model  # shared weights may be the damaged ones
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _row_name(corpus: Corpus, document: int) -> str:
    if document >= len(corpus):
        return f"everyday prompt {document - len(corpus) + 1}"
    row = corpus[document]
    return f"{row.source} row {row.row}"


def _context(parts: RunInputs, model: Any) -> RunContext:
    """Return the facts that the health rules need in addition to the metrics."""
    kind = parts.plan.device.value.partition(":")[0]
    return RunContext(
        vocab_size=model.config.get_text_config().vocab_size,
        precision=parts.plan.precision.value,
        device=kind,
        max_grad_norm=parts.config.train.max_grad_norm,
        device_bytes=torch.cuda.get_device_properties(parts.plan.device.value).total_memory if kind == "cuda" else None,
        spike_factor=parts.config.healing.spike_factor,
        is_from_scratch=is_preset(parts.plan.model),
    )


def _make_sampler(parts: RunInputs, learner: TrainableModel, log: EventLog) -> Callable[[int, int], list[Sample]]:
    """Return a function that generates answers to held-out questions and logs them."""
    evaluate, number = parts.config.evaluate, _num_answers(parts)
    measure = find_measure(parts.corpus, parts.config.verdict.task, parts.loaded.base) if number else None
    read = measure.reader if measure else corpus_reader(parts.corpus)
    spell, asked = read.decode, spread_evenly(len(measure.questions) if measure else 0, number).tolist()
    limit = measure.limit if measure else evaluate.sample_tokens

    def sample(step: int, batch_tokens: int) -> list[Sample]:
        split = parts.corpus.evaluated
        questions = questions_of(split, number=evaluate.samples, spell=spell, question_in=read.question_in)
        if measure:
            questions = [measure.questions[index] for index in asked]
        if not questions:
            return []
        prompts = [question.ids for question in questions]
        longest = max(map(len, prompts)) + limit
        learner.hooks.before_answers(min(len(prompts), max(1, batch_tokens // longest)))
        answers = generate(
            learner.model,
            prompts,
            max_new_tokens=limit,
            stop_ids=read.stop_ids,
            decoding=Decoding(batch_tokens=batch_tokens),
            before_token=lambda: learner.check_interrupt(),  # set when training begins
        )
        rights = measure.judge(asked, [done.ids for done in answers]) if measure else repeat(None)
        samples: list[Sample] = []
        for own, done, right in zip(questions, answers, rights, strict=False):
            text = spell(done.ids).strip()
            fault = find_degeneration(text, ids=done.ids, ended=done.ended, question=own.text, reference=own.reference)
            fields = (own.document, own.prompt, own.text, text, own.reference, done.ended, right, fault)
            samples.append(Sample(step, *fields))
        samples = mark_loops(samples)
        for index in spread_evenly(len(samples), evaluate.samples).tolist():
            log.append(samples[index].__dict__)
        return samples

    return sample


def _num_answers(parts: RunInputs) -> int:
    """Return how many answers of each evaluation are judged."""
    planned = parts.plan.answers
    return planned.value if planned is not None else 0
