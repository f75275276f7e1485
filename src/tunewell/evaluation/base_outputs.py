"""Keep the base model's outputs in the run's folder, so that a later `validate` measures only the tuned model.

The verdict of `train` measures the base model. A second evaluation of the same base model on the same rows with the
same settings gives the same numbers, so they are read from `base-outputs.npz` instead. Anything that could change them
is part of the key; if it differs, the base model is measured again.
"""

import hashlib
import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tunewell import __version__
from tunewell.core.errors import UserError
from tunewell.core.files import stable_json, write_atomic
from tunewell.data.batches import TokenizedDocuments
from tunewell.evaluation.scores import ModelOutputs
from tunewell.inference.chat_model import ChatModel
from tunewell.inference.decoder import Generated
from tunewell.inference.runtime import DocumentLosses
from tunewell.models.facts import fingerprint_weights

FILE = "base-outputs.npz"
_FIELDS = ("documents", "sums", "tokens")


def outputs_key(
    model: ChatModel, documents: Sequence[TokenizedDocuments | None], prompts: Sequence[Sequence[int]], **settings: Any
) -> str | None:
    """Return a hash of everything that the base model's outputs depend on, or None if they must be measured.

    None for a base model without weight files, and for a run that started from an adapter.
    """
    ref = model.ref
    try:
        weights = fingerprint_weights(ref.base) if ref.base is not None and ref.start is None else None
    except (UserError, OSError):
        return None
    if weights is None:
        return None
    quantized = ref.plan.quantized if ref.plan else None
    facts = {
        "versions": [__version__, torch.__version__],
        "weights": weights,
        "quantized": quantized.model_dump(mode="json") if quantized else None,
        "added_tokens": [list(ref.added_tokens or model.tokenizer.added_by_us), ref.loaded.config.seed],
        "computed": [model.device.kind, model.device.label, model.precision, model.computed_by],
        "stop_ids": list(model.stop_ids),
        **settings,
    }
    digest = hashlib.sha256(stable_json(facts).encode())
    for split in documents:
        for index in range(0 if split is None else len(split)):
            for array in split.arrays(index) if split is not None else ():
                digest.update(len(array).to_bytes(8, "little") + np.asarray(array, "<i4").tobytes())
        digest.update(b"|")
    for prompt in prompts:
        digest.update(len(prompt).to_bytes(8, "little") + np.asarray(prompt, "<i4").tobytes())
    return digest.hexdigest()


def read_base_outputs(folder: Path, key: str) -> ModelOutputs | None:
    """Return the stored outputs, or None if there are none with this key."""
    try:
        with np.load(folder / FILE, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        if str(arrays["key"]) != key:
            return None
        ids = np.split(arrays["answer_ids"], np.cumsum(arrays["answer_lengths"])[:-1])
        ended = arrays["answer_ended"].tolist()
        return ModelOutputs(
            held_out=_losses(arrays, "held_out"),
            everyday=_losses(arrays, "everyday"),
            answers=[Generated(own.tolist(), end) for own, end in zip(ids, ended, strict=True)] if ended else [],
            logits=arrays.get("logits"),
        )
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        return None  # missing or damaged: the base model is measured again


def write_base_outputs(folder: Path, key: str, outputs: ModelOutputs) -> None:
    """Store the outputs of a base model in one file."""
    lengths = [len(answer.ids) for answer in outputs.answers]
    arrays: dict[str, Any] = {
        "key": np.array(key),
        "answer_ids": np.array([token for answer in outputs.answers for token in answer.ids], np.int64),
        "answer_lengths": np.array(lengths, np.int64),
        "answer_ended": np.array([answer.ended for answer in outputs.answers], np.bool_),
    }
    for name, losses in (("held_out", outputs.held_out), ("everyday", outputs.everyday)):
        if losses is not None:
            arrays |= {f"{name}_{part}": getattr(losses, part) for part in _FIELDS}
    if outputs.logits is not None:
        arrays["logits"] = outputs.logits
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_atomic(folder / FILE, buffer.getvalue())


def _losses(arrays: dict[str, Any], name: str) -> DocumentLosses | None:
    if f"{name}_documents" not in arrays:
        return None
    return DocumentLosses(*(arrays[f"{name}_{part}"] for part in _FIELDS))
