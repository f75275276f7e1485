"""Objects of other libraries as arguments: models, tokenizers, data sets with splits, trainer settings.

Each becomes what the command line takes: a folder, a file of rows, a config. Models and tokenizers are saved in
`.tunewell/models`, so that a resumed run finds them again.
"""

import json
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import make_private, publish_folder, sha256_file, sha256_text
from tunewell.core.text import shorten_line
from tunewell.data.rows.functions import RowFunction

MODELS_FOLDER = Path(".tunewell") / "models"
_TRAIN, _TEST = ("train", "training"), ("test", "validation", "valid", "eval", "dev")
_BATCH = 1000
_ALWAYS = (
    *("learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("lr_scheduler_type", "warmup_steps", "warmup_ratio", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("max_grad_norm", "optim", "seed"),
)
"""Settings of a trainer that are taken even if they have its default, because the run depends on them."""


def model_name(model: Any) -> str:
    """Return the folder of a transformers model; raise UserError for an adapter or a quantised model."""
    if hasattr(model, "peft_config"):
        raise UserError(
            "`model` is a PEFT adapter",
            fix='save it with `save_pretrained(FOLDER)`, and pass its base model and `settings={"method.adapter": '
            "FOLDER}`; or pass `model.merge_and_unload()`",
        )
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        raise UserError(
            "`model` is quantised, so it cannot be saved as it is",
            fix='pass its name, and `settings={"method.quantize": "nf4"}`',
        )
    return _saved(model)


def tokenizer_name(tokenizer: Any, model: Any) -> str | None:
    """Return the folder or the name of a tokenizer; of a model that is an object, the one with which it was loaded."""
    if tokenizer is None and hasattr(model, "save_pretrained"):
        tokenizer = getattr(model, "name_or_path", None) or None
        if tokenizer is None:
            raise UserError("the model is an object without a tokenizer", fix="pass `tokenizer=` too")
    return _saved(tokenizer) if hasattr(tokenizer, "save_pretrained") else tokenizer and str(tokenizer)


def _saved(thing: Any) -> str:
    """Save a model or a tokenizer in a folder named by the hash of its files, and return the folder."""
    make_private(MODELS_FOLDER)
    with tempfile.TemporaryDirectory(dir=MODELS_FOLDER) as place:
        staged = Path(place) / "saved"
        try:
            thing.save_pretrained(staged)
        except Exception as error:
            what = f"the {type(thing).__name__} cannot be saved: {shorten_line(str(error), 300)}"
            raise UserError(what, fix="correct it; or pass the name or the folder that it was loaded from") from error
        hashes = [f"{file.name} {sha256_file(file)}" for file in sorted(staged.rglob("*")) if file.is_file()]
        folder = MODELS_FOLDER / sha256_text(*hashes)[:16]
        if not folder.exists():
            publish_folder(staged, folder)
    return str(folder)


def splits_of(data: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the training split and the test split (or None) of a data set with splits; name the others."""
    names = {str(name).lower(): name for name in data}
    train = next((names[name] for name in _TRAIN if name in names), None)
    if train is None and len(data) == 1:
        [train] = data
    if train is None:
        listed = ", ".join(f"`{name}`" for name in data)
        fix = 'pass `{"train": ROWS, "test": ROWS}`, one of the splits, or a list of dicts'
        raise UserError(f"`data` has no split `train`: {listed or 'it is empty'}", fix=fix)
    test = next((names[name] for name in _TEST if name in names), None)
    if left := [f"`{name}`" for name in data if name not in (train, test)]:
        warnings.warn(f"splits of `data` that are not used: {', '.join(left)}", stacklevel=4)
    return data[train], None if test is None else data[test]


def formatted(rows: Sequence[Any], function: Callable[[Any], Any]) -> list[Any]:
    """Return rows as a `formatting_func` gives them: of one row, or of a batch of columns as in older TRL."""
    convert = RowFunction(function, getattr(function, "__name__", "formatting_func"), None, "")
    try:
        convert.apply(deepcopy(list(rows[:1])), [1], "data")
    except UserError:  # a function for batches fails on one row, or makes several texts of it
        convert = replace(convert, batch=_BATCH)
    made = convert.apply(list(rows), range(1, len(rows) + 1), "data")
    return [row for row in made if row is not None]


def config_of(config: Any) -> Any:
    """Return an `SFTConfig` or `TrainingArguments` as a config in its own names; other configs unchanged."""
    if isinstance(config, type) or not hasattr(config, "per_device_train_batch_size"):
        return config
    given = config.to_dict()
    plain = type(config)(**{name: given[name] for name in ("output_dir", "bf16", "fp16", "use_cpu")}).to_dict()
    changed = {name: value for name, value in given.items() if value != plain[name] or name in _ALWAYS}
    # `SFTConfig` sets `bf16` by itself, so only a precision that its class does not choose is the caller's.
    is_chosen = type(config).bf16 is not None or not config.bf16
    precision = {name: given[name] for name in ("bf16", "fp16") if is_chosen}
    return json.loads(json.dumps(changed | precision, default=str))
