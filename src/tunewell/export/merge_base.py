"""Open the model of an export. An adapter of a quantised base model can be merged onto two sets of base weights."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from tunewell.core.errors import UserError
from tunewell.core.options import WeightsOptions
from tunewell.core.progress import Progress, ProgressListener
from tunewell.data.batches import spread_evenly
from tunewell.data.corpus.reader import open_corpus
from tunewell.inference.chat_model import ChatModel, open_chat_model
from tunewell.inference.model_ref import ModelRef

_NUM_DOCUMENTS = 8


def open_for_export(ref: ModelRef, *, weights: WeightsOptions, progress: ProgressListener) -> ChatModel:
    """Open a model in fp32 on the CPU, with its base as `export.merge_onto` says and a note on the other choice."""
    chosen = ref.loaded.config.export.merge_onto
    quantized = ref.plan.quantized if ref.plan else None
    if quantized is None or ref.adapter is None:
        return _open(ref, weights)
    if chosen == "original" and quantized.is_saved:
        raise UserError(
            "the adapter cannot be merged onto the original base model: only the quantised one is known",
            where="`export.merge_onto`",
            fix="set `export.merge_onto: trained`",
        )
    refs = {"trained": ref}
    if not quantized.is_saved:
        assert ref.plan is not None
        refs["original"] = replace(ref, plan=ref.plan.model_copy(update={"quantized": None}))
    losses: dict[str, float | None] = {}
    for name in [name for name in refs if name != chosen]:
        progress(Progress(f"measuring the adapter on the {name} base model"))
        other = _open(refs[name], weights)
        losses[name] = _held_out_loss(other)
        other.unload()
    model = _open(refs[chosen], weights)
    losses[chosen] = _held_out_loss(model)
    if None not in losses.values():
        shown = ", ".join(f"{loss:.4f} on the {name} one" for name, loss in losses.items())
        model.notes.append(
            f"the base model was quantised to {quantized.kind} in training; held-out loss with the adapter: {shown}. "
            f"This export uses the {chosen} one (`export.merge_onto`)"
        )
    return model


def _open(ref: ModelRef, weights: WeightsOptions) -> ChatModel:
    return open_chat_model(ref, device="cpu", weights=weights, precision="fp32", backend="plain")


@torch.no_grad()
def _held_out_loss(model: ChatModel) -> float | None:
    """Return the mean loss on a few held-out documents, or None if there are none."""
    if model.ref.corpus is None:
        return None
    held_out, total, number = open_corpus(model.ref.corpus).held_out, 0.0, 0
    for document in spread_evenly(len(held_out), _NUM_DOCUMENTS).tolist():
        ids, labels = (torch.tensor(row)[None].long() for row in held_out.arrays(document))
        logits = model.model(input_ids=ids, use_cache=False).logits
        total += float(F.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum"))
        number += int((labels[:, 1:] != -100).sum())
    return total / number if number else None
