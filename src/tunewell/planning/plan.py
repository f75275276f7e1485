"""Plan a run: choose batch size, steps, warm-up, evaluation and checkpoint intervals, each with its reason.

batch = choose_batch(inputs)                   tokens or documents per optimizer step, as in the config
... the data order counts the steps ...        their number depends on the permutation of each epoch
plan  = plan_training(inputs, batch=batch, num_steps=95, epochs=5.0)
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tunewell.config.extensions import METHODS
from tunewell.config.load import LoadedConfig
from tunewell.core.arrays import Ints
from tunewell.core.errors import UserError
from tunewell.core.plugins import used_plugins
from tunewell.core.units import count
from tunewell.core.version import made_by
from tunewell.data.batches import DataOrder
from tunewell.data.corpus.reader import Corpus
from tunewell.data.replay import with_replayed
from tunewell.machine.facts import DeviceFacts
from tunewell.model_files.facts import read_facts
from tunewell.model_files.families import read_packing
from tunewell.model_files.presets import is_preset
from tunewell.planning.compute import (
    PlanInputs,
    choose_attention,
    choose_compile,
    choose_device,
    choose_packing,
    choose_precision,
    choose_quantization,
    choose_replay,
    choose_threads,
    require_masters,
    require_optimizer,
)
from tunewell.planning.recommendation import recommend_rate
from tunewell.records.plan import Chosen, Plan

_EVALUATIONS = 10
_MIN_SAVE_STEPS = 10
_SHORT_RUN = 10
"""In shorter runs, a warm-up of a few percent is less than one step. It is rounded to the nearest step, not up."""
_LARGE_MODEL = 3_000_000_000


@dataclass(frozen=True)
class StepSize:
    """The size of an optimizer step, as a limit on tokens or on documents; the other limit is None."""

    tokens: Chosen[int | None]
    documents: Chosen[int | None]


ThreadMeasurement = Callable[[Sequence[tuple[int, int, int]]], Chosen[int]]
"""Times matrix products (rows, inner, columns) and returns the fastest number of threads."""


def plan_run(
    loaded: LoadedConfig,
    corpus: Corpus,
    device: DeviceFacts,
    *,
    measure_threads: ThreadMeasurement,
    order: DataOrder | None = None,
) -> tuple[Plan, DataOrder]:
    """Plan a run and the order of its documents. `order` is that of a plan with the same steps, to save time."""
    config = loaded.config
    assert config.model is not None
    facts = read_facts(loaded.seen(config.model))
    threads = None
    if device.kind == "cpu" and config.train.threads == "auto":
        width = facts.hidden_size or 512
        threads = measure_threads([(512, width, width), (512, width, 3 * width), (512, 3 * width, width)])
    launched, saved = launcher_precision(), facts.quantization
    lengths = corpus.index["length"].astype("int64")
    packing = read_packing(loaded.seen(config.model), longest=int(lengths.max(initial=0)))
    inputs = PlanInputs(loaded, corpus.manifest, device, facts.num_parameters, threads, launched, saved, packing)
    return plan_documents(inputs, lengths, order=order)


def plan_documents(inputs: PlanInputs, lengths: Ints, *, order: DataOrder | None = None) -> tuple[Plan, DataOrder]:
    """Plan a run on documents of these lengths, and their order."""
    train, batch, replay = inputs.config.train, choose_batch(inputs), choose_replay(inputs)
    order = order or make_order(
        lengths,
        replay.value,
        seed=inputs.config.seed,
        corpus_sha256=inputs.manifest.corpus_sha256,
        batch_tokens=batch.tokens.value,
        batch_documents=batch.documents.value,
    )
    lengths = order.lengths
    assert train.epochs != "auto"  # `with_recommended` has filled it in
    num_steps = train.max_steps or order.num_steps(train.epochs)
    epochs = round(order.epochs_after(num_steps), 4)
    plan = plan_training(inputs, batch=batch, num_steps=num_steps, epochs=epochs)
    packing = choose_packing(inputs, lengths, plan.micro_batch_tokens.value)
    return plan.model_copy(update={"replay": replay, "packing": packing}), order


def make_order(lengths: Ints, replay: float, **settings: Any) -> DataOrder:
    """Return the order of documents of these lengths, with replayed ones for their share of the tokens."""
    num_rows, num_drawn = len(lengths), 0
    if replay:
        lengths, num_drawn = with_replayed(lengths, replay)
    return DataOrder(lengths, num_replayed=len(lengths) - num_rows, num_drawn=num_drawn, **settings)


def launcher_precision() -> str | None:
    """Return the value of `accelerate launch --mixed_precision`, or None. `no` is also its default, so it is None."""
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").rpartition(".")[2].lower()
    return None if launched == "no" else launched


def choose_batch(inputs: PlanInputs) -> StepSize:
    """Return the size of an optimizer step; raise UserError if two settings contradict each other."""
    train, longest = inputs.config.train, inputs.manifest.lengths.max
    if train.batch_documents not in ("auto", None):
        if train.batch_tokens != "auto":
            raise UserError(
                "`train.batch_tokens` and `train.batch_documents` are both set; only one can be",
                where=f"{inputs.where('train.batch_tokens')}, {inputs.where('train.batch_documents')}",
                fix="remove one of them",
            )
        by_documents = Chosen(None, because="`train.batch_documents` is set instead")
        return StepSize(by_documents, inputs.choice("train.batch_documents"))
    unlimited = Chosen(None, because="`train.batch_tokens` sets the size of a step")
    assert train.batch_tokens != "auto"  # `with_recommended` has filled it in
    because = inputs.why("train.batch_tokens")
    if longest > train.batch_tokens:
        because += f"; a longer document (up to {count(longest)} tokens) is one step"
    return StepSize(Chosen(train.batch_tokens, because=because), unlimited)


def plan_training(inputs: PlanInputs, *, batch: StepSize, num_steps: int, epochs: float) -> Plan:
    """Return the plan; raise UserError if a setting cannot work on this device or with these documents."""
    config = inputs.config
    if config.model is None:
        raise UserError("no model is set", fix="set `model` in the config, or use `--model`")
    precision = choose_precision(inputs)
    require_masters(inputs, precision.value)
    require_optimizer(inputs)
    attention = choose_attention(inputs, precision.value)
    evaluate_every = _evaluate_every(inputs, num_steps)
    has_max_steps = config.train.max_steps is not None
    why_epochs = f"the length of {count(num_steps, 'step')}" if has_max_steps else inputs.why("train.epochs")
    return Plan(
        made_by=made_by(),
        model=config.model,
        corpus=str(inputs.loaded.path(config.corpus)),
        corpus_sha256=inputs.manifest.corpus_sha256,
        tokenizer_sha256=inputs.manifest.tokenizer.sha256,
        template_sha256s=[template.sha256 for template in inputs.manifest.templates],
        seed=config.seed,
        config=config.model_dump(mode="json"),
        device=choose_device(inputs),
        precision=precision,
        attention=attention,
        threads=choose_threads(inputs),
        method=inputs.choice("method.kind"),
        quantized=choose_quantization(inputs),
        learning_rate=choose_learning_rate(inputs),
        schedule=inputs.choice("train.schedule"),
        warmup_steps=_warmup_steps(inputs, num_steps),
        num_steps=_num_steps(inputs, batch, num_steps),
        epochs=Chosen(epochs, because=why_epochs),
        batch_tokens=batch.tokens,
        batch_documents=batch.documents,
        micro_batch_tokens=_micro_batch(inputs, batch),
        compile=choose_compile(inputs, attention.value),
        evaluate_every=evaluate_every,
        save_every=_save_every(inputs, num_steps, evaluate_every.value),
        plugins=used_plugins(),
    )


def choose_learning_rate(inputs: PlanInputs) -> Chosen[float]:
    """Return the configured learning rate, or the recommended one."""
    rate, method = inputs.config.train.learning_rate, METHODS.entry(inputs.config.method.kind)
    default = recommend_rate(inputs.num_parameters, inputs.config)
    if rate == "auto":  # in a change of the ladder
        return default
    is_high = not method.is_adapter and not is_preset(inputs.config.model or "") and rate > 5 * default.value
    remark = f"; high for {method.title}, for which `auto` is {default.value:g}" if is_high else ""
    return Chosen(rate, because=inputs.why("train.learning_rate") + remark)


def _num_steps(inputs: PlanInputs, batch: StepSize, num_steps: int) -> Chosen[int]:
    train = inputs.config.train
    if train.max_steps is not None:
        instead = "; `train.epochs` is ignored" if inputs.is_set("train.epochs") else ""
        return Chosen(num_steps, because=f"`train.max_steps`, {inputs.why('train.max_steps')}{instead}")
    bound = (
        count(batch.documents.value, "document")
        if batch.documents.value
        else f"{count(batch.tokens.value or 0)} tokens"
    )
    assert train.epochs != "auto"
    passes = f"{train.epochs:g} {'epoch' if train.epochs == 1 else 'epochs'}"
    documents = count(inputs.split.documents, "document")
    return Chosen(num_steps, because=f"{passes} of {documents}, at most {bound} per step")


def _warmup_steps(inputs: PlanInputs, num_steps: int) -> Chosen[int]:
    warmup, because = inputs.config.train.warmup, inputs.why("train.warmup")
    assert warmup != "auto"
    if warmup >= 1:
        steps = math.ceil(warmup)
        if steps >= num_steps > 1:
            because += f"; the run has only {count(num_steps, 'step')}, so the learning rate never reaches its peak"
        return Chosen(steps, because=because)
    # Round before taking the ceiling, because 0.07 * 100 is slightly more than 7.
    exact = round(warmup * num_steps, 9)
    steps = math.ceil(exact) if num_steps >= _SHORT_RUN else round(exact)
    return Chosen(steps, because=f"{warmup * 100:g}% of {count(num_steps, 'step')}, {because}")


def _micro_batch(inputs: PlanInputs, batch: StepSize) -> Chosen[int]:
    setting, longest = inputs.config.train.micro_batch_tokens, inputs.manifest.lengths.max
    if setting != "auto":
        because = inputs.why("train.micro_batch_tokens")
        if longest > setting:
            because += f"; a longer document (up to {count(longest)} tokens) is computed alone"
        return Chosen(setting, because=because)
    default, because = _default_micro_batch(inputs)
    step_tokens = batch.tokens.value or min((batch.documents.value or 1) * longest, inputs.split.tokens)
    if step_tokens <= default:
        default, because = step_tokens, f"a whole step fits: it has at most {count(step_tokens)} tokens"
    if longest > default:
        default, because = longest, f"the longest document has {count(longest)} tokens, and documents are not split"
    return Chosen(default, because=because)


def _default_micro_batch(inputs: PlanInputs) -> tuple[int, str]:
    if inputs.device.kind != "cuda":
        return 2_048, f"more needs more memory and is hardly faster on {inputs.device.label}"
    size = inputs.num_parameters
    if size is None:
        return 8_192, "enough to keep a GPU busy; no more, since the size of the model is unknown"
    if size >= _LARGE_MODEL:
        return 8_192, f"enough to keep a GPU busy with {size / 1e9:,.1f} B parameters"
    return 16_384, "a model under 3 B parameters needs that many to keep a GPU busy"


def _evaluate_every(inputs: PlanInputs, num_steps: int) -> Chosen[int]:
    setting = inputs.config.evaluate.every_steps
    if setting != "auto":
        return inputs.choice("evaluate.every_steps")
    evaluated = inputs.manifest.evaluated
    without = "" if evaluated and evaluated.documents else "; no rows are held out, so there is nothing to evaluate"
    every = max(1, math.ceil(num_steps / _EVALUATIONS))
    evaluations = math.ceil(num_steps / every)
    return Chosen(every, because=f"{count(evaluations, 'evaluation')} in {count(num_steps, 'step')}{without}")


def _save_every(inputs: PlanInputs, num_steps: int, evaluate_every: int) -> Chosen[int]:
    setting = inputs.config.checkpoints.every_steps
    if setting != "auto":
        return inputs.choice("checkpoints.every_steps")
    # A multiple of the evaluation interval, so that every checkpoint has a held-out loss.
    every = evaluate_every * math.ceil(_MIN_SAVE_STEPS / evaluate_every)
    if every >= num_steps:
        return Chosen(num_steps, because=f"a run of {count(num_steps, 'step')} is saved once, at the end")
    if every == evaluate_every:
        return Chosen(every, because="at every evaluation")
    evaluations = count(every // evaluate_every)
    return Chosen(every, because=f"every {evaluations} evaluations: saving more often costs time")
