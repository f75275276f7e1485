"""Keep the losses and answers of base models, so that each base answers the same questions only once per machine.

The key covers everything that the outputs depend on: weight files, `config.json`, precision, device, versions and code,
the documents, prompts and stop tokens as token ids (so the tokenizer and the chat template too), and the decoding
settings. Only token ids and numbers are stored.
"""

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from tunewell import __version__
from tunewell.core.cache import DiskCache
from tunewell.core.files import open_file, sha256_file
from tunewell.data.batches import TokenizedDocuments, spread_evenly
from tunewell.evaluation.scores import ModelOutputs
from tunewell.inference.chat_model import ChatModel
from tunewell.inference.decoder import Generated
from tunewell.inference.runtime import DocumentLosses
from tunewell.machine.facts import installed_versions
from tunewell.model_files.presets import is_preset
from tunewell.models.base_content import read_content
from tunewell.records.adapter import ADAPTER_WEIGHTS

_PACKAGES = ("torch", "transformers", "tokenizers", "llama-cpp-python", "bitsandbytes")
_CODE = ("data", "evaluation", "inference", "methods", "models")
"""Packages whose code can change an output."""
_CACHE = DiskCache("base", ".npz", max_entries=64)
"""An entry has some megabytes: the logits of eight prompts."""


@dataclass(frozen=True)
class BaseQuestions:
    """The measured outputs of a base model."""

    split: TokenizedDocuments | None
    max_documents: int | None
    everyday: TokenizedDocuments
    prompts: Sequence[Sequence[int]]
    hinted: Sequence[Sequence[int]]
    ordinary: Sequence[Sequence[int]]
    num_compared: int
    stop_ids: Sequence[int]
    answer_tokens: int
    batch_size: int | None


class BaseCache:
    """The stored outputs of one base model for one set of questions."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @classmethod
    def of(cls, model: ChatModel, questions: BaseQuestions) -> "BaseCache":
        """Return the cache entry of the base model of `model`; one that stores nothing if the base is not known."""
        if (weights := _weights(model)) is None:
            return cls(None)
        plan = model.ref.plan
        settings: dict[str, Any] = {
            "weights": weights,
            "quantized": plan.quantized.model_dump(exclude={"because"}) if plan and plan.quantized else None,
            "added_tokens": [*model.ref.added_tokens, *model.tokenizer.added_by_us],
            "precision": model.precision,
            "device": model.device.label,
            "computed_by": model.computed_by,
            "versions": {"tunewell": __version__, **installed_versions(_PACKAGES)},
            "code": _code_stamp(),
            "questions": _digest(questions),
            "stop_ids": list(questions.stop_ids),
            "answer_tokens": questions.answer_tokens,
            "batch_size": questions.batch_size,
        }
        return cls(_CACHE.path(settings))

    def read(self) -> tuple[ModelOutputs, str] | None:
        """Return the stored outputs and the time of their measurement, or None. A damaged entry is ignored."""
        if self._path is None or not self._path.is_file():
            return None
        try:
            with open_file(self._path) as stored, np.load(stored, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            outputs = ModelOutputs(
                held_out=_losses(arrays, "held_out"),
                everyday=_losses(arrays, "everyday"),
                answers=_answers(arrays, "answers"),
                hinted=_answers(arrays, "hinted"),
                ordinary=_answers(arrays, "ordinary"),
                logits=arrays.get("logits"),
            )
            made_at = datetime.fromtimestamp(self._path.stat().st_mtime, UTC).isoformat(timespec="seconds")
        except (OSError, ValueError, KeyError, EOFError, IndexError, BadZipFile):
            return None
        return outputs, made_at

    def write(self, outputs: ModelOutputs) -> None:
        """Store outputs. A full disk is no error: they are measured again next time."""
        if self._path is None or outputs.everyday is None:
            return
        arrays: dict[str, Any] = {}
        for name, losses in (("held_out", outputs.held_out), ("everyday", outputs.everyday)):
            if losses is not None:
                parts = (("documents", losses.documents), ("sums", losses.sums), ("tokens", losses.tokens))
                arrays |= {f"{name}.{part}": value for part, value in parts}
        if outputs.logits is not None:
            arrays["logits"] = outputs.logits
        for name in ("answers", "hinted", "ordinary"):
            answers: list[Generated] = getattr(outputs, name)
            ids = [token for answer in answers for token in answer.ids]
            arrays[f"{name}.ids"] = np.asarray(ids, dtype=np.int64)
            arrays[f"{name}.lengths"] = np.asarray([len(answer.ids) for answer in answers], dtype=np.int64)
            arrays[f"{name}.ended"] = np.asarray([answer.ended for answer in answers], dtype=bool)
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        _CACHE.write(self._path.stem, buffer.getvalue())


def _losses(arrays: dict[str, Any], name: str) -> DocumentLosses | None:
    if f"{name}.sums" not in arrays:
        return None
    return DocumentLosses(arrays[f"{name}.documents"], arrays[f"{name}.sums"], arrays[f"{name}.tokens"])


def _answers(arrays: dict[str, Any], name: str) -> list[Generated]:
    ends = np.cumsum(arrays[f"{name}.lengths"]).tolist()
    starts = [0, *ends[:-1]]
    ids = arrays[f"{name}.ids"].tolist()
    ended = arrays[f"{name}.ended"].tolist()
    return [Generated(ids[start:end], has_ended) for start, end, has_ended in zip(starts, ends, ended, strict=False)]


def _weights(model: ChatModel) -> list[Any] | None:
    """Return what identifies the weights of the base model, or None if they are not known."""
    ref = model.ref
    if ref.base is None:
        return None
    if is_preset(ref.base):
        return [ref.base, ref.loaded.config.seed]
    found: list[Any] = [read_content(ref.base).model_dump()]
    if ref.start is not None:
        found.append(sha256_file(ref.start / ADAPTER_WEIGHTS))
    return found


def _digest(questions: BaseQuestions) -> str:
    digest = hashlib.sha256()
    for split, most in ((questions.split, questions.max_documents), (questions.everyday, None)):
        for ids, labels in _documents(split, most):
            digest.update(len(ids).to_bytes(8, "little") + ids.tobytes() + labels.tobytes())
        digest.update(b"end of a split")
    for prompts in (questions.prompts, questions.hinted, questions.ordinary):
        digest.update(json.dumps([[int(token) for token in prompt] for prompt in prompts]).encode())
    digest.update(str(questions.num_compared).encode())
    return digest.hexdigest()


def _documents(split: TokenizedDocuments | None, most: int | None) -> Iterator[tuple[Any, Any]]:
    if split is not None:
        for index in spread_evenly(len(split), most):
            yield split.arrays(int(index))


def _code_stamp() -> str:
    """Return a hash of the sizes and times of the code that measures a model, which changes with every upgrade."""
    root = Path(__file__).parents[1]
    files = [file for package in _CODE for file in sorted((root / package).rglob("*.py"))]
    stamps = [(str(file.relative_to(root)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(stamps).encode()).hexdigest()
