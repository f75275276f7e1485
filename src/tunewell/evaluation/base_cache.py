"""Keep the losses and answers of base models, so that each base answers the same questions only once per machine.

The key covers everything that the outputs depend on: weight files, `config.json`, precision, device, versions and code,
the documents, prompts and stop tokens as token ids (so the tokenizer and the chat template too), and the decoding
settings. Only token ids and numbers are stored.
"""

import hashlib
import io
import json
from collections.abc import Sequence
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


_LOSSES, _ANSWERS = ("held_out", "everyday"), ("answers", "hinted", "ordinary")
"""The fields of `ModelOutputs` with losses, and those with answers."""


class BaseCache:
    """The stored outputs of one base model for one set of questions."""

    def __init__(self, path: Path | None, shipped: Path | None = None) -> None:
        self._path, self._shipped = path, shipped

    @classmethod
    def of(cls, model: ChatModel, questions: BaseQuestions) -> "BaseCache":
        """Return the cache entry of the base model of `model`; one that stores nothing if the base is not known."""
        if (weights := _weights(model)) is None:
            return cls(None)
        plan = model.ref.plan
        asked: dict[str, Any] = {
            "weights": weights,
            "quantized": plan.quantized.model_dump(exclude={"because"}) if plan and plan.quantized else None,
            "added_tokens": [*model.ref.added_tokens, *model.tokenizer.added_by_us],
            "questions": _digest(questions),
        }
        settings = asked | {
            "precision": model.precision,
            "device": model.device.label,
            "computed_by": model.computed_by,
            "versions": {"tunewell": __version__, **installed_versions(_PACKAGES)},
            "code": _code_stamp(),
        }
        return cls(_CACHE.path(settings), _CACHE.path({"shipped": asked}))

    def read(self) -> tuple[ModelOutputs, str] | None:
        """Return the stored outputs and the time of their measurement, or None. A damaged entry is ignored.

        The outputs that `tunewell demo` ships were measured on another machine; those of this one come first.
        """
        path = next((path for path in (self._path, self._shipped) if path is not None and path.is_file()), None)
        if path is None:
            return None
        try:
            with open_file(path) as stored, np.load(stored, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            outputs = ModelOutputs(logits=arrays.get("logits"))
            for name in _LOSSES:
                setattr(outputs, name, _losses(arrays, name))
            for name in _ANSWERS:
                setattr(outputs, name, [Generated(*one) for one in json.loads(str(arrays[name]))])
            when = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
            made_at = str(arrays.get("made_at", when))
        except (OSError, ValueError, KeyError, EOFError, TypeError, BadZipFile):
            return None
        return outputs, made_at

    def write(self, outputs: ModelOutputs) -> None:
        """Store outputs. A full disk is no error: they are measured again next time."""
        if self._path is None or outputs.everyday is None:
            return
        arrays: dict[str, Any] = {} if outputs.logits is None else {"logits": outputs.logits}
        arrays["shipped"] = "" if self._shipped is None else self._shipped.stem
        for name in _LOSSES:
            losses: DocumentLosses | None = getattr(outputs, name)
            arrays |= {f"{name}.{part}": array for part, array in vars(losses).items()} if losses else {}
        for name in _ANSWERS:
            answers = [(answer.ids, answer.ended) for answer in getattr(outputs, name)]
            arrays[name] = json.dumps(answers, default=int)
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        _CACHE.write(self._path.stem, buffer.getvalue())


def _losses(arrays: dict[str, Any], name: str) -> DocumentLosses | None:
    parts = {key.partition(".")[2]: array for key, array in arrays.items() if key.startswith(f"{name}.")}
    return DocumentLosses(**parts) if parts else None


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
        if split is not None:
            for index in spread_evenly(len(split), most).tolist():
                ids, labels = split.arrays(index)
                digest.update(len(ids).to_bytes(8, "little") + ids.tobytes() + labels.tobytes())
        digest.update(b"end of a split")
    others = {name: value for name, value in vars(questions).items() if name not in ("split", "everyday")}
    digest.update(json.dumps(others, default=int).encode())
    return digest.hexdigest()


def _code_stamp() -> str:
    """Return a hash of the sizes and times of the code that measures a model, which changes with every upgrade."""
    root = Path(__file__).parents[1]
    files = [file for package in _CODE for file in sorted((root / package).rglob("*.py"))]
    stamps = [(str(file.relative_to(root)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(stamps).encode()).hexdigest()
