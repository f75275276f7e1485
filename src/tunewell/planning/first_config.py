"""The first config for some rows and a model: the facts behind it, and its text with the reasons as comments."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tunewell.config.extensions import METHODS, OPTIMIZERS
from tunewell.core.errors import UserError
from tunewell.core.files import read_data
from tunewell.core.units import count
from tunewell.data.corpus.held_out import MIN_AUTO, num_auto
from tunewell.data.sources.base import is_url, split_limit
from tunewell.data.sources.recognise import Recognised
from tunewell.model_files.facts import ModelFacts
from tunewell.model_files.families import ATTENTION, PackingLevel
from tunewell.planning.recommendation import num_updates
from tunewell.records.manifest import Manifest, RowsRecord, too_few_to_judge
from tunewell.records.plan import Chosen

_SHOWN_LABELS = 5
_TEXTS = read_data(__file__, "recipes.toml")


@dataclass(frozen=True)
class Recipe:
    """A training method as `init --method` names it: the settings that select it, each with a comment."""

    kind: str
    about: str
    quantize: str = "none"
    optimizer: str = "adamw"


RECIPES = {name: Recipe(**settings) for name, settings in _TEXTS["methods"].items()}


def find_recipe(name: str) -> Recipe:
    """Return the settings of a method, also of one that was added to `METHODS`; raise UserError if it is unknown."""
    if name in RECIPES:
        return RECIPES[name]
    if name in METHODS.names():
        return Recipe(name, METHODS.entry(name).doc)
    raise UserError(f"unknown method `{name}`", where="`--method`", fix=f"use one of: {', '.join(RECIPES)}")


@dataclass(frozen=True)
class InitResult:
    """The result of `init`: the config it wrote, and the facts behind it."""

    path: Path
    text: str
    sample: Manifest
    facts: ModelFacts
    num_rows: int
    held_out: str | None
    """A file of test rows beside the data, or None."""
    template: str
    rows: RowsRecord
    settings: dict[str, Chosen[Any]]
    """Recommended settings by their keys."""
    source: Recognised = field(default_factory=Recognised)
    """How the rows are read, and what nobody has decided yet."""
    long_documents: str = "error"
    method: str = "lora"
    """A name that `find_recipe` knows."""
    num_rows_in_file: int = 0
    """Rows of the file of test rows."""
    task: Chosen[str] | None = None
    """The task of the rows, which decides how answers are scored."""
    packing: PackingLevel = PackingLevel(ATTENTION)  # noqa: RUF009  it is immutable
    """How documents are computed in training."""

    @property
    def num_held_out(self) -> int:
        """Rows that will be held out."""
        return self.num_rows_in_file if self.held_out else num_auto(self.num_questions)

    @property
    def kept_for_testing(self) -> str:
        """How many rows are held out, in words."""
        if self.held_out:
            return f"{count(self.num_held_out, 'row')} of `{self.held_out}`, found beside the data"
        if not self.num_held_out:
            return f"none of {count(self.num_rows, 'row')}: they are too few"
        about = "about " if self.num_held_out > MIN_AUTO else ""  # 5% of the hashes are not exactly 5% of the rows
        return f"{about}{count(self.num_held_out)} of {count(self.num_rows, 'row')}, always the same ones"

    @property
    def num_updates(self) -> int:
        """About how many updates the run has."""
        return num_updates(self.rows, self.settings)

    @property
    def too_few_to_judge(self) -> str | None:
        """A sentence, if so few rows are held out that every verdict will be UNPROVEN, or None."""
        return too_few_to_judge(self.num_held_out, self.num_rows, self.num_questions)

    @property
    def num_questions(self) -> int:
        """Distinct questions; of a large file, estimated from its first rows."""
        sample = self.sample
        known = sample.documents if sample.questions is None else sample.questions
        return round(known * max(1.0, self.num_rows / max(1, sample.rows_in)))

    def as_json(self) -> dict[str, Any]:
        """Return the object that `init --json` prints."""
        return {
            "config": str(self.path),
            "rows": self.num_rows,
            "formats": sorted({name for source in self.sample.sources for name in source.formats}),
            "template": self.template,
            "held_out": self.held_out,
            "rows_for_testing": self.num_held_out,
            "lengths": self.sample.lengths.model_dump(exclude={"histogram"}),
            "dropped_in_sample": self.sample.dropped,
            "method": self.method,
            "task": self.task and self.task.value,
            **{key.partition(".")[2]: own.value for key, own in self.settings.items()},
            "updates": self.num_updates,
            "source": self.source.written(),
            "open": self.source.open_points,
        }


def config_text(result: InitResult, data: str, model: str) -> str:
    """Return the text of the config, with the reasons as comments."""
    model = _from(result.path.parent, model) if Path(model).exists() else model
    sample, facts, base = result.sample, result.facts, result.path.parent
    formats = ", ".join(sorted({name for source in sample.sources for name in source.formats})) or "none"
    dropped = sum(sample.dropped.values())
    fate = f"{count(dropped)} would be dropped ({', '.join(sample.dropped)})" if dropped else "none would be dropped"
    size = f", {count(facts.num_parameters)} parameters" if facts.num_parameters else ""
    held_out = _from(base, result.held_out) if result.held_out else "auto"
    why_template = (
        "the template of the model"
        if result.template == "auto"
        else f"the model has no template; its tokens fit `{result.template}`"
    )
    lengths = sample.lengths
    # The template does not apply to plain text, which is supervised as a whole.
    template = f"""
template:
  name: {result.template}   # {why_template}
  learn_from: responses   # only replies and their end marker are supervised, not questions
"""
    return f"""\
# yaml-language-server: $schema=tunewell.schema.json
# Written by `tunewell init`. Every key: `tunewell explain`; one: `tunewell explain packing.context_length`.
# The first line makes an editor check the keys, after `tunewell schema > tunewell.schema.json`.

model: {_scalar(model)}   # {facts.architecture or "unknown architecture"}{size}

data:
{_sources_text(result, data, f"{count(result.num_rows)} rows, read as: {formats}")}
  held_out: {_scalar(held_out)}   # kept for testing, never trained on: {result.kept_for_testing}
  # Of the first {count(sample.rows_in)} rows, {fate}. Duplicates are dropped too.
{"" if formats == "text" else template}
packing:
  context_length: auto   # longest of the first rows: {count(lengths.max)} tokens, mean {lengths.mean:.0f}
  long_documents: {result.long_documents}   # {_TEXTS["long_documents"][result.long_documents]}

method:
{_method_text(result)}
train:
{_optimizer_text(result)}{_recommended_text(result, "train")}  # About {count(result.num_updates, "update")} in all.
{_verdict_text(result)}
seed: 0
"""


def _verdict_text(result: InitResult) -> str:
    if result.task is None:
        return ""
    return f"""
verdict:
  task: auto   # found: {result.task.value} ({result.task.because}); it decides how answers are scored
"""


def _method_text(result: InitResult) -> str:
    recipe = find_recipe(result.method)
    lines = [f"kind: {recipe.kind}   # {recipe.about}"]
    if recipe.quantize != "none":
        lines.append(f"quantize: {recipe.quantize}   # {_TEXTS['quantize'][recipe.quantize]}")
    return "".join(f"  {line}\n" for line in lines) + _recommended_text(result, "method")


def _recommended_text(result: InitResult, section: str) -> str:
    """Return the lines of the recommended settings in a section. YAML 1.1 reads the rate `1e-3` as a text."""
    found = [(key.partition(".")[2], own) for key, own in result.settings.items() if key.startswith(section)]
    rates = {name: f"{own.value:.1e}".replace("e-0", "e-") for name, own in found if name == "learning_rate"}
    return "".join(
        f"  {name}: {rates.get(name) or _scalar(own.value).removesuffix('.0')}   # {own.because}\n"
        for name, own in found
    )


def _optimizer_text(result: InitResult) -> str:
    optimizer = find_recipe(result.method).optimizer
    return "" if optimizer == "adamw" else f"  optimizer: {optimizer}   # {OPTIMIZERS.entry(optimizer).doc}\n"


def _sources_text(result: InitResult, data: str, about: str) -> str:
    path = _from(result.path.parent, data)
    plain, limit = split_limit(path)
    settings, reasons = result.source.written(), result.source.reasons
    if not settings:
        return f"  sources: {_scalar(path)}   # {about}"
    lines = [f"path: {_scalar(plain)}   # {about}"]
    for key, value in settings.items():
        is_open = key in result.source.open_points
        reason = f"OPEN: {reasons[key]}; likeliest: {_scalar(result.source.settings[key])}" if is_open else reasons[key]
        own = _from(result.path.parent, value) if key == "map" else value
        lines.append(f"{key}: {_scalar(own)}   # {' '.join(reason.split())}")
    if result.source.labels:
        labels = ", ".join(result.source.labels[:_SHOWN_LABELS])
        more = ", ..." if len(result.source.labels) > _SHOWN_LABELS else ""
        lines.append(f"# Labels: {' '.join(labels.split())}{more}. `format: text` would train on the texts alone.")
    if limit:
        lines.append(f"limit: {limit}")
    return "\n".join(["  sources:", f"    - {lines[0]}", *(f"      {line}" for line in lines[1:])])


def _from(base: Path, path: str) -> str:
    """Return a path relative to the folder of the config, which reads it from there."""
    is_fixed = is_url(path) or Path(path).expanduser().is_absolute() or base.resolve() == Path.cwd()
    return path if is_fixed else Path(os.path.relpath(path, base)).as_posix()


def _scalar(value: Any) -> str:
    dumped = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**9, sort_keys=False)
    return dumped.splitlines()[0]
