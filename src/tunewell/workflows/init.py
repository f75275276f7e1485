"""`tunewell init`: write a commented `tunewell.yaml` for your rows and a model."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from tunewell.config.load import FILE_NAME, LoadedConfig
from tunewell.config.schema import Config
from tunewell.core.errors import UserError
from tunewell.core.files import write_atomic
from tunewell.core.progress import ProgressListener, silent
from tunewell.data.rows.classification import find_labels
from tunewell.data.rows.column_names import suggest_columns
from tunewell.data.rows.conversation import is_object
from tunewell.data.sources.arrow import count_parquet_rows
from tunewell.data.sources.base import SourceFile, find_files, split_limit
from tunewell.data.sources.blocks import ReadOptions, parsed_rows, read_blocks
from tunewell.data.sources.local import LocalFile
from tunewell.data.templates.chat_template import builtin_template, required_markers
from tunewell.data.tokenizers.load import LoadedTokenizer, load_tokenizer
from tunewell.models.facts import read_facts
from tunewell.planning.first_config import InitResult, config_text, find_recipe
from tunewell.planning.plan import starting_point
from tunewell.records.manifest import Manifest
from tunewell.records.plan import Chosen
from tunewell.runs.config import with_start
from tunewell.workflows.prepare import temporary_corpus

_SAMPLE_ROWS = 1000
_READ = ReadOptions(1 << 22, 64)
_HELD_OUT_NAMES = ("held_out", "heldout", "held-out", "validation", "valid", "val", "eval", "dev")
_BY_FIT = ("chatml", "llama3", "gemma", "alpaca")
"""Built-in templates, in the order in which they are tried for a model without a chat template."""


def init(
    data: str,
    *,
    model: str,
    method: str = "lora",
    out: Path | None = None,
    is_overwriting: bool = False,
    progress: ProgressListener = silent,
) -> InitResult:
    """Write `tunewell.yaml` for this data and model. Raise UserError if the file exists or no row can be used.

    `method` is a name in `planning.first_config.RECIPES` or `METHODS`.
    """
    recipe = find_recipe(method)
    path = out or Path(FILE_NAME)
    if path.exists() and not is_overwriting:
        raise UserError(f"`{path}` already exists", fix="use `--force` to replace it, or `--out` for another name")
    plain, limit = split_limit(data)
    files = find_files(plain, base=Path())
    given = with_start(LoadedConfig(Config(model=model), Path(), None, {}))[0].config
    base = given.model or model
    template = _fitting_template(load_tokenizer(given.tokenizer or base))
    with _naming_a_config(path, model, plain):
        first = list(islice(parsed_rows(files, _READ), min(limit or _SAMPLE_ROWS, _SAMPLE_ROWS)))
        labels = find_labels(first, islice(parsed_rows(files, _READ), limit))
        columns = suggest_columns(first[0]) if first and is_object(first[0]) and not labels else {}
        source = {"format": "classification" if labels else "auto", "columns": columns}
        sample = _sample(data, model, template, source, progress)
    num_rows = min(_count_rows(files), limit or 1 << 62)
    facts = read_facts(base)
    held_out = _held_out_beside(files)
    start = starting_point(num_rows, facts.num_parameters, method=recipe.kind, optimizer=recipe.optimizer)
    if given.method.adapter is not None:
        because = f"that of the adapter, which goes on being trained on `{facts.name}`"
        rank = Chosen[int](value=given.method.rank, because=because)
        start = replace(start, rank=rank, alpha=Chosen[int](value=given.method.alpha, because=because))
    result = InitResult(path, "", sample, facts, num_rows, held_out, template, start, labels, columns, method)
    text = config_text(result, data, model)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)
    return replace(result, text=text)


@contextmanager
def _naming_a_config(path: Path, model: str, data: str) -> Generator[None, None, None]:
    """Add a config to errors whose fix is a key of the source, because `init` has not written one yet."""
    try:
        yield
    except UserError as error:
        if "the source" not in (error.fix or ""):
            raise
        found = re.search(r"`(\w+: [^`]+)` on the source", error.fix or "")
        setting = found[1] if found else "KEY: VALUE"
        config = f"`model: {model}` and `data: {{sources: [{{path: {data}, {setting}}}]}}`"
        raise UserError(error.what, where=error.where, fix=f"{error.fix}; write {config} to `{path}`") from error


def _fitting_template(tokenizer: LoadedTokenizer) -> str:
    """Return `auto` for a model with a chat template, otherwise a built-in template that fits the tokenizer."""
    if tokenizer.chat_template:
        return "auto"
    for name in _BY_FIT:
        needed = required_markers(builtin_template(name), tokenizer.special_tokens)
        if all(marker in tokenizer.added for marker in needed) and "eos_token" in tokenizer.special_tokens:
            return name
    return "auto"


def _sample(data: str, model: str, template: str, source: dict[str, Any], progress: ProgressListener) -> Manifest:
    """Prepare the first rows in a temporary folder, and return the manifest."""
    plain, limit = split_limit(data)
    source = source | {"path": plain, "limit": min(limit or _SAMPLE_ROWS, _SAMPLE_ROWS)}
    values = {
        "model": model,
        "data": {"sources": [source], "held_out": 0.0},
        "template": {"name": template},
        "packing": {"long_documents": "split"},
    }
    with temporary_corpus(LoadedConfig(Config(), Path(), None, {}), values, progress) as corpus:
        return corpus.manifest


def _count_rows(files: list[SourceFile]) -> int:
    total = 0
    for file in files:
        if file.format == "parquet":
            total += count_parquet_rows(file)
        else:
            total += sum(len(block) for block in read_blocks(file, _READ))
    return total


def _held_out_beside(files: list[SourceFile]) -> str | None:
    """Return a file in the folder of the data with a name such as `validation` or `held_out`, or None."""
    if len(files) != 1 or not isinstance(files[0].source, LocalFile):
        return None
    path = files[0].source.path
    endings = "".join(path.suffixes[-2:]) if files[0].compression else path.suffix
    for name in _HELD_OUT_NAMES:
        found = path.with_name(name + endings)
        if found.is_file() and found != path:
            return found.as_posix()
    return None
