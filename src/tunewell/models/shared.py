"""Load the frozen base model of several runs once: each run gets its own modules around the same weights.

    with sharing({"path/to/model"}):
        load_model(options)     loads the files
        load_model(options)     new modules, the same tensors

A method that trains weights of the base model must get its own: `own_trainable` copies those.
"""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from tunewell.core.files import sha256_file
from tunewell.models.attention import unpack

if TYPE_CHECKING:
    from tunewell.models.load import LoadedModel, LoadOptions

_MAX_MODELS = 2
"""Training and evaluation may load a model in two precisions."""
_SHARED_BUFFER = 1 << 16
"""Buffers with fewer values are copied, because some modules change theirs. Larger ones are quantised weights."""


_names: set[str] = set()
_models: "dict[str, LoadedModel]" = {}


@contextmanager
def sharing(names: frozenset[str]) -> Iterator[None]:
    """Load the named models only once inside the `with` block. They stay in memory until its end."""
    _names.update(map(_real_name, names))
    try:
        yield
    finally:
        _names.clear()
        _models.clear()


def has(name: str) -> bool:
    """Return whether a model is shared now."""
    return bool(_names) and _real_name(name) in _names


def _real_name(name: str) -> str:
    """Return the real path of a local model, which a run folder spells in another way; other names unchanged."""
    return os.path.realpath(name) if Path(name).exists() else name


def load(options: "LoadOptions", load_files: "Callable[[LoadOptions], LoadedModel]") -> "LoadedModel":
    """Return a model around the shared weights. Its files are loaded the first time."""
    key = _key(options)
    if key not in _models:
        while len(_models) >= _MAX_MODELS:
            del _models[next(iter(_models))]
        _models[key] = load_files(options)
    found = _models[key]
    model = _around_same_weights(found.model)
    if options.fit(model.config)[0].attention is None:  # the documents of another run may be longer
        unpack(model)
    return replace(found, model=model, notes=list(found.notes))


def _key(options: "LoadOptions") -> str:
    tokenizer = options.tokenizer_folder / "tokenizer.json"
    values: dict[str, Any] = {name: getattr(options, name) for name in type(options).__dataclass_fields__}
    values |= {"model": _real_name(options.model), "longest_document": 0}
    values |= {"tokenizer_folder": sha256_file(tokenizer) if tokenizer.is_file() else ""}
    return repr(values)


def _around_same_weights(model: Any) -> Any:
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter:
            memo[id(parameter)] = nn.Parameter(parameter.data, requires_grad=False)
    for buffer in model.buffers():
        if type(buffer) is Tensor and buffer.numel() >= _SHARED_BUFFER:
            memo[id(buffer)] = buffer
    return copy.deepcopy(model, memo)


def own_trainable(model: nn.Module) -> None:
    """Copy the trainable parameters that share their memory with a stored model. Without one, nothing happens."""
    stored = {parameter.data_ptr() for found in _models.values() for parameter in found.model.parameters()}
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.data_ptr() in stored:
            parameter.data = parameter.data.clone()
