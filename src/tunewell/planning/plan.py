"""The plan of a run: every value it needs, with the reason it is this one. No torch, no measuring.

batch = choose_batch(order)                    what one step learns from
... the data order counts its steps ...        exactly: it depends on the permutation of each epoch
plan  = plan_training(order, batch=batch, num_steps=95, epochs=5.0)
"""

import math
from dataclasses import dataclass
from typing import Literal

from tunewell import __version__
from tunewell.config.methods import MethodName
from tunewell.core.errors import UserError
from tunewell.core.units import count
from tunewell.planning.compute import (
    PlanInputs,
    choose_attention,
    choose_compile,
    choose_device,
    choose_precision,
    choose_threads,
)
from tunewell.records.plan import Chosen, Plan

_STEPS_AN_EPOCH = 40
"""The 40 reworded questions of the example, 5 epochs, 3 seeds, SmolLM2-135M on an H200 (2026-11-15): steps of 512
tokens, 19 an epoch, gave 34 to 35 right; steps of 256, 38 an epoch, gave 38 to 39, with less forgotten."""
_BATCH_UNIT = 128
_BATCH_RANGE = (256, 16_384)
_LOOKS = 10
_LEAST_SAVE = 10
_SHORT_RUN = 10
"""Steps below which a warm-up of some percent would be a whole step or nothing; it is rounded, not rounded up."""
_LARGE_MODEL = 3_000_000_000

Schedule = Literal["cosine", "linear", "constant"]
_Bound = Chosen[int | None]


@dataclass(frozen=True)
class Batch:
    """What bounds an optimizer step: tokens or documents, the other being None."""

    tokens: _Bound
    documents: _Bound


def choose_batch(order: PlanInputs) -> Batch:
    """Choose how much one optimizer step learns from; raise UserError where two settings contradict each other."""
    train, longest, epoch_tokens = order.config.train, order.manifest.lengths.max, order.split.tokens
    if train.batch_documents is not None:
        if train.batch_tokens != "auto":
            raise UserError(
                "`train.batch_tokens` and `train.batch_documents` are both set; one of them bounds a step",
                where=f"{order.where('train.batch_tokens')}, {order.where('train.batch_documents')}",
                fix="take one of them out",
            )
        return Batch(
            tokens=_Bound(value=None, because="`train.batch_documents` bounds a step"),
            documents=_Bound(value=train.batch_documents, because=order.why("train.batch_documents")),
        )
    unbounded = _Bound(value=None, because="`train.batch_tokens` bounds a step")
    if train.batch_tokens == "auto":
        return Batch(_automatic_batch(epoch_tokens, longest), unbounded)
    because = order.why("train.batch_tokens")
    if longest > train.batch_tokens:
        because += f"; longer documents, of up to {count(longest)} tokens, are each a step of their own"
    return Batch(_Bound(value=train.batch_tokens, because=because), unbounded)


def _automatic_batch(epoch_tokens: int, longest: int) -> _Bound:
    least, most = _BATCH_RANGE
    share = epoch_tokens // _STEPS_AN_EPOCH // _BATCH_UNIT * _BATCH_UNIT
    value = max(min(max(share, least), most), longest)
    if value == longest and longest > min(max(share, least), most):
        because = f"the longest document has {count(longest)} tokens, and a step holds whole documents"
    elif share < least:
        because = (
            f"the least a step takes, since fewer give unsteady gradients; an epoch has {count(epoch_tokens)} tokens"
        )
    elif share > most:
        because = f"the most a step takes by itself; an epoch of {count(epoch_tokens)} tokens has many steps even so"
    else:
        because = f"an epoch of {count(epoch_tokens)} tokens then has at least {_STEPS_AN_EPOCH} steps"
    return _Bound(value=value, because=because)


def plan_training(order: PlanInputs, *, batch: Batch, num_steps: int, epochs: float) -> Plan:
    """Decide everything else: `num_steps` is what the data order counted for this batch, `epochs` what that comes to.

    Raises UserError where a setting cannot work on this device or with these documents.
    """
    config = order.config
    if config.model is None:
        raise UserError("no model is named", fix="set `model` in the config, or use `--model`")
    precision = choose_precision(order)
    attention = choose_attention(order, precision.value)
    evaluate_every = _evaluate_every(order, num_steps)
    return Plan(
        made_by=f"tunewell {__version__}",
        model=config.model,
        corpus=str(order.loaded.path(config.corpus)),
        corpus_sha256=order.manifest.corpus_sha256,
        tokenizer_sha256=order.manifest.tokenizer.sha256,
        template_sha256s=[template.sha256 for template in order.manifest.templates],
        seed=config.seed,
        config=config.model_dump(mode="json"),
        device=choose_device(order),
        precision=precision,
        attention=attention,
        threads=choose_threads(order),
        method=Chosen[MethodName](value=config.method.kind, because=order.why("method.kind")),
        learning_rate=Chosen[float](value=config.train.learning_rate, because=order.why("train.learning_rate")),
        schedule=Chosen[Schedule](value=config.train.schedule, because=order.why("train.schedule")),
        warmup_steps=_warmup_steps(order, num_steps),
        num_steps=_num_steps(order, batch, num_steps),
        epochs=_epochs(order, num_steps, epochs),
        batch_tokens=batch.tokens,
        batch_documents=batch.documents,
        micro_batch_tokens=_micro_batch(order, batch),
        compile=choose_compile(order, attention.value),
        evaluate_every=evaluate_every,
        save_every=_save_every(order, num_steps, evaluate_every.value),
    )


def _num_steps(order: PlanInputs, batch: Batch, num_steps: int) -> Chosen[int]:
    train = order.config.train
    if train.max_steps is not None:
        instead = ", in place of `train.epochs`" if order.is_set("train.epochs") else ""
        return Chosen[int](value=num_steps, because=f"`train.max_steps`, {order.why('train.max_steps')}{instead}")
    bound = (
        count(batch.documents.value, "document")
        if batch.documents.value
        else f"{count(batch.tokens.value or 0)} tokens"
    )
    passes = f"{train.epochs:g} {'epoch' if train.epochs == 1 else 'epochs'}"
    documents = count(order.split.documents, "document")
    return Chosen[int](value=num_steps, because=f"{passes} of {documents}, at most {bound} in a step")


def _epochs(order: PlanInputs, num_steps: int, epochs: float) -> Chosen[float]:
    if order.config.train.max_steps is not None:
        return Chosen[float](value=epochs, because=f"what {count(num_steps, 'step')} come to")
    return Chosen[float](value=epochs, because=order.why("train.epochs"))


def _warmup_steps(order: PlanInputs, num_steps: int) -> Chosen[int]:
    warmup, because = order.config.train.warmup, order.why("train.warmup")
    if warmup >= 1:
        steps = math.ceil(warmup)
        if steps >= num_steps > 1:
            because += f"; the run has {count(num_steps, 'step')}, so the rate only rises"
        return Chosen[int](value=steps, because=because)
    # Rounded first, since 0.07 * 100 is a little over 7.
    exact = round(warmup * num_steps, 9)
    steps = math.ceil(exact) if num_steps >= _SHORT_RUN else round(exact)
    return Chosen[int](value=steps, because=f"{warmup * 100:g}% of {count(num_steps, 'step')}, {because}")


def _micro_batch(order: PlanInputs, batch: Batch) -> Chosen[int]:
    wanted, longest = order.config.train.micro_batch_tokens, order.manifest.lengths.max
    if wanted != "auto":
        because = order.why("train.micro_batch_tokens")
        if longest > wanted:
            because += f"; longer documents, of up to {count(longest)} tokens, are each computed alone"
        return Chosen[int](value=wanted, because=because)
    usual, because = _usual_micro_batch(order)
    step_tokens = batch.tokens.value or min((batch.documents.value or 1) * longest, order.split.tokens)
    if step_tokens <= usual:
        usual, because = step_tokens, f"a whole step, which has {count(step_tokens)} tokens at most"
    if longest > usual:
        usual, because = longest, f"the longest document has {count(longest)} tokens, and none is cut"
    return Chosen[int](value=usual, because=because)


def _usual_micro_batch(order: PlanInputs) -> tuple[int, str]:
    if order.device.kind != "cuda":
        return 2_048, f"more at once needs more memory and is hardly faster on {order.device.label}"
    size = order.num_parameters
    if size is None:
        return 8_192, "enough to fill a GPU; careful with memory, since the size of the model is not known"
    if size >= _LARGE_MODEL:
        return 8_192, f"enough to fill a GPU with {size / 1e9:,.1f} B parameters"
    return 16_384, "a model under 3 B parameters needs that many to fill a GPU"


def _evaluate_every(order: PlanInputs, num_steps: int) -> Chosen[int]:
    wanted = order.config.evaluate.every_steps
    if wanted != "auto":
        return Chosen[int](value=wanted, because=order.why("evaluate.every_steps"))
    held_out = order.manifest.splits.get("held_out")
    looked_at = "" if held_out and held_out.documents else "; no rows are held out, so there is nothing to look at"
    every = max(1, math.ceil(num_steps / _LOOKS))
    looks = math.ceil(num_steps / every)
    return Chosen[int](value=every, because=f"{count(looks, 'look')} in {count(num_steps, 'step')}{looked_at}")


def _save_every(order: PlanInputs, num_steps: int, evaluate_every: int) -> Chosen[int]:
    wanted = order.config.checkpoints.every_steps
    if wanted != "auto":
        return Chosen[int](value=wanted, because=order.why("checkpoints.every_steps"))
    # A multiple, so that every checkpoint has a held-out loss to be judged by.
    every = evaluate_every * math.ceil(_LEAST_SAVE / evaluate_every)
    if every >= num_steps:
        return Chosen[int](
            value=num_steps, because=f"{count(num_steps, 'step')} are few enough to be saved once, at the end"
        )
    if every == evaluate_every:
        return Chosen[int](value=every, because="where the held-out rows are looked at, too")
    looks = count(every // evaluate_every)
    return Chosen[int](
        value=every, because=f"at every {looks} looks at the held-out rows: saving more often costs time"
    )
