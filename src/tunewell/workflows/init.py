"""`tunewell init`: write a commented `tunewell.yaml` for your rows and a model."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tunewell.config.load import FILE_NAME, LoadedConfig
from tunewell.config.schema import Config
from tunewell.core.errors import UserError
from tunewell.core.files import write_atomic
from tunewell.core.progress import ProgressListener, silent
from tunewell.core.units import count
from tunewell.data.sources.arrow import count_parquet_rows
from tunewell.data.sources.base import SourceFile, find_files, split_limit
from tunewell.data.sources.blocks import ReadOptions, read_blocks
from tunewell.data.sources.local import LocalFile
from tunewell.data.templates.chat_template import builtin_template, required_markers
from tunewell.data.tokenizers.load import LoadedTokenizer, load_tokenizer
from tunewell.models.facts import ModelFacts, read_facts
from tunewell.planning.plan import StartingPoint, starting_point
from tunewell.records.manifest import Manifest
from tunewell.workflows.prepare import temporary_corpus

_SAMPLE_ROWS = 1000
_HELD_OUT_NAMES = ("held_out", "heldout", "held-out", "validation", "valid", "val", "eval", "dev")
_BY_FIT = ("chatml", "llama3", "gemma", "alpaca")
"""Built-in templates, in the order in which they are tried for a model without a chat template."""


@dataclass(frozen=True)
class InitResult:
    """The result of `init`: the config it wrote, and the facts behind it."""

    path: Path
    text: str
    sample: Manifest
    facts: ModelFacts
    num_rows: int
    held_out: str | None
    template: str
    start: StartingPoint

    def as_json(self) -> dict[str, Any]:
        """Return the object that `init --json` prints."""
        return {
            "config": str(self.path),
            "rows": self.num_rows,
            "formats": sorted({name for source in self.sample.sources for name in source.formats}),
            "template": self.template,
            "held_out": self.held_out,
            "lengths": self.sample.lengths.model_dump(exclude={"histogram"}),
            "dropped_in_sample": self.sample.dropped,
            "epochs": self.start.epochs.value,
            "learning_rate": self.start.learning_rate.value,
            "rank": self.start.rank.value,
        }


def init(
    data: str,
    *,
    model: str,
    out: Path | None = None,
    is_overwriting: bool = False,
    progress: ProgressListener = silent,
) -> InitResult:
    """Write `tunewell.yaml` for this data and model. Raise UserError if the file exists or no row can be used."""
    path = out or Path(FILE_NAME)
    if path.exists() and not is_overwriting:
        raise UserError(f"`{path}` already exists", fix="use `--force` to replace it, or `--out` for another name")
    plain, limit = split_limit(data)
    files = find_files(plain, base=Path())
    template = _fitting_template(load_tokenizer(model))
    sample = _sample(data, model, template, progress)
    num_rows = min(_count_rows(files), limit or 1 << 62)
    facts = read_facts(model)
    held_out = _held_out_beside(files)
    result = InitResult(
        path, "", sample, facts, num_rows, held_out, template, starting_point(num_rows, facts.num_parameters)
    )
    text = _config_text(result, data, model)
    write_atomic(path, text)
    return replace(result, text=text)


def _fitting_template(tokenizer: LoadedTokenizer) -> str:
    """Return `auto` for a model with a chat template, otherwise a built-in template that fits the tokenizer."""
    if tokenizer.chat_template:
        return "auto"
    for name in _BY_FIT:
        needed = required_markers(builtin_template(name), tokenizer.special_tokens)
        if all(marker in tokenizer.added for marker in needed) and "eos_token" in tokenizer.special_tokens:
            return name
    return "auto"


def _sample(data: str, model: str, template: str, progress: ProgressListener) -> Manifest:
    """Prepare the first rows in a temporary folder, and return the manifest."""
    plain, limit = split_limit(data)
    source = {"path": plain, "limit": min(limit or _SAMPLE_ROWS, _SAMPLE_ROWS)}
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
            total += sum(len(block) for block in read_blocks(file, ReadOptions(1 << 22, 64)))
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


def _config_text(result: InitResult, data: str, model: str) -> str:
    """Return the text of the config, with the reasons as comments."""
    sample, start, facts = result.sample, result.start, result.facts
    formats = ", ".join(sorted({name for source in sample.sources for name in source.formats})) or "none"
    dropped = sum(sample.dropped.values())
    fate = f"{count(dropped)} would be dropped ({', '.join(sample.dropped)})" if dropped else "none would be dropped"
    size = f", {count(facts.num_parameters)} parameters" if facts.num_parameters else ""
    held_out = result.held_out or 0.05
    why_held_out = (
        "found beside the data; kept for testing, never trained on"
        if result.held_out
        else "5% of the rows are kept for testing, always the same ones; they are never trained on"
    )
    why_template = (
        "the template of the model"
        if result.template == "auto"
        else f"the model has no template; its tokens fit `{result.template}`"
    )
    lengths, rate = sample.lengths, f"{start.learning_rate.value:.0e}".replace("e-0", "e-")
    return f"""\
# Written by `tunewell init`. Every key: `tunewell explain`; one: `tunewell explain packing.context_length`.

model: {_scalar(model)}   # {facts.architecture or "unknown architecture"}{size}

data:
  sources: {_scalar(data)}   # {count(result.num_rows)} rows, read as: {formats}
  held_out: {_scalar(held_out)}   # {why_held_out}
  # Of the first {count(sample.rows_in)} rows, {fate}. Duplicates are dropped too.

template:
  name: {result.template}   # {why_template}
  learn_from: responses   # only replies and their end marker are supervised, not questions

packing:
  context_length: auto   # longest of the first rows: {count(lengths.max)} tokens, mean {lengths.mean:.0f}
  long_documents: error   # or: split, drop

method:
  kind: lora   # small added matrices; or full: every weight, at about a tenth of the learning rate
  rank: {start.rank.value}   # {start.rank.because}
  alpha: {start.alpha.value}   # {start.alpha.because}

train:
  epochs: {start.epochs.value:g}   # {start.epochs.because}
  learning_rate: {rate}   # {start.learning_rate.because}
  schedule: cosine   # the learning rate falls to zero; or: linear, constant
  batch_tokens: auto   # tokens per step; `train` prints its choice and the reason

seed: 0
"""


def _scalar(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**9).splitlines()[0]
