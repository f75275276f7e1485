"""The public functions `plan`, `train`, `prepare`, `validate` and `export`, with one calling convention.

A config is a path, a mapping, or an `SFTConfig` or `TrainingArguments`; keyword arguments override it. `settings` are
values by key, like `{"train.epochs": 1}`; `sets` are the same as text, `KEY=VALUE`. `model` and `tokenizer` are names,
folders or objects of transformers. `data` is a path, a list of paths, a list of dicts, a `datasets.Dataset`, a
`datasets.DatasetDict` (its test split is held out) or a pandas DataFrame. `formatting_func` makes a text of each row,
or of a batch of rows. `progress` is True, False (no output) or a function that receives every event.
Workflows that need torch are imported when they are called, so that `prepare` works without torch.
"""

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from tunewell.config.load import ConfigLike, LoadedConfig, as_sets
from tunewell.core.errors import UserError
from tunewell.core.files import make_private, write_atomic
from tunewell.core.units import count
from tunewell.library.keywords import naming_the_way_out
from tunewell.library.objects import config_of, formatted, model_name, splits_of, tokenizer_name
from tunewell.library.progress import Show, shown
from tunewell.planning.result import PlanResult
from tunewell.records.report import Validation
from tunewell.runs.config import RunOptions, index_sets, load_for_run
from tunewell.runs.result import TrainResult
from tunewell.training.events import Evaluated, Event, StepTaken
from tunewell.workflows.prepare import PrepareResult
from tunewell.workflows.prepare import prepare as run_prepare

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

    from tunewell.evaluation.metrics import Metric
    from tunewell.runs.rehearsal import Rehearsal
    from tunewell.workflows.export import ExportResult

StrPath = str | os.PathLike[str]
Formatter = Callable[[Any], Any]
AnyConfig: TypeAlias = "ConfigLike | TrainingArguments"
AnyModel: TypeAlias = "StrPath | PreTrainedModel | None"
AnyTokenizer: TypeAlias = "StrPath | PreTrainedTokenizerBase | None"
ModelPath = StrPath | None
"""A run, an adapter or a model: a path, a name or the result of `train`. None is the run of the current folder."""
Data = StrPath | Iterable[Any] | None
"""Rows: a path, a list of paths, a list of dicts, a `datasets.Dataset` or `DatasetDict`, or a pandas DataFrame."""
Settings = Mapping[str, Any]
"""Values of config keys by dotted name: `{"train.epochs": 1}`. They override the config and `sets`."""

# Rows from memory (a list of dicts, a `datasets.Dataset` or a pandas DataFrame) are saved as a JSON lines file.

ROWS_FOLDER = Path(".tunewell") / "rows"
"""The folder for rows from memory, in the current folder, so that a resumed run finds them again."""
_FIX = "give a path, a list of paths, a list of dicts, a `datasets.Dataset` or a pandas DataFrame"


def data_paths(data: Data, formatting_func: Formatter | None = None) -> list[str] | None:
    """Return the paths in `data`. Rows from memory are saved to a file named by their hash."""
    if data is None:
        return None
    entries = [data] if isinstance(data, str | os.PathLike) else data
    if isinstance(entries, Sequence) and entries and all(isinstance(entry, str | os.PathLike) for entry in entries):
        if formatting_func is not None:
            what = "`formatting_func` needs rows in memory, and `data` is a path"
            raise UserError(what, fix="pass the rows, or set `map: FILE.py:FUNCTION` on the source of a config")
        return [_path_text(entry, "`data`", "write the rows to a file, or pass a list of dicts") for entry in entries]
    rows = _rows_of(data)
    return [str(_save(formatted(list(rows), formatting_func) if formatting_func is not None else rows))]


def _rows_of(data: Any) -> Iterable[Any]:
    kind = f"{type(data).__module__.partition('.')[0]}.{type(data).__name__}"
    if kind == "pandas.DataFrame":
        return data.to_dict(orient="records")
    if isinstance(data, Mapping):
        names = ", ".join(f"`{name}`" for name in data)
        raise UserError(f"`data` is a dataset with several splits: {names}", fix='choose one, e.g. `data["test"]`')
    if kind in ("datasets.Dataset", "datasets.IterableDataset") or isinstance(data, list | tuple):
        return data
    raise UserError(f"`data` cannot be a {type(data).__name__}", fix=_FIX)


def _save(rows: Iterable[Any]) -> Path:
    try:
        make_private(ROWS_FOLDER)
        digest = hashlib.sha256()
        with tempfile.NamedTemporaryFile(dir=ROWS_FOLDER, suffix=".tmp") as file:
            for number, row in enumerate(rows, start=1):
                line = _line(row, number)
                digest.update(line)
                file.write(line)
            if not file.tell():
                raise UserError("`data` contains no rows", fix=_FIX)
            file.flush()
            path = ROWS_FOLDER / f"{digest.hexdigest()[:16]}.jsonl"
            if not path.is_file():
                write_atomic(path, Path(file.name).read_bytes())
        return path
    except OSError as error:
        raise UserError(
            f"rows from memory cannot be saved: {error.strerror or error}",
            where=str(ROWS_FOLDER.absolute()),
            fix="change to a folder that you can write to, or write the rows to a file and give its path",
        ) from error


def _line(row: Any, number: int) -> bytes:
    if not isinstance(row, Mapping):
        raise UserError(f"row {number} of `data` is a {type(row).__name__}, not a dict", fix=_FIX)
    column = ""
    try:
        cells = []
        for column, value in row.items():
            json = orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS)
            cells.append(orjson.dumps(str(column)) + b":" + json)
        return b"{" + b",".join(cells) + b"}\n"
    except orjson.JSONEncodeError as error:
        raise UserError(
            f"row {number} of `data` cannot be written as JSON: {error}",
            where=f"column `{column}`",
            fix="convert the values of this column to text, numbers or lists, or remove the column",
        ) from error


def _plain(value: Any) -> Any:
    """Convert what JSON does not have: arrays to lists, times to text, and the empty cells of pandas to None."""
    if type(value).__name__ in ("NaTType", "NAType"):
        return None
    if isinstance(value, Mapping):
        return dict(value)
    convert: Any = getattr(value, "isoformat", None) or getattr(value, "tolist", None)
    if convert is None:
        raise TypeError
    return convert()


def all_sets(sets: Sequence[str], settings: Settings | None) -> list[str]:
    """Return `KEY=VALUE` texts, and after them the settings as such texts. Values are written as JSON."""
    if settings is not None and not (isinstance(settings, Mapping) and all(isinstance(key, str) for key in settings)):
        raise UserError("`settings` is not a mapping of keys", fix='write `settings={"train.epochs": 1}`')
    added = (settings or {}).items()
    values = [f"{key}={json.dumps(value, ensure_ascii=False, default=str)}" for key, value in added]
    return [*([sets] if isinstance(sets, str) else sets), *values]


def text_of(path: AnyModel) -> str | None:
    """Return a path as text, and None as it is. Raise UserError for an object that is no path."""
    if path is not None and not isinstance(path, str | os.PathLike):
        raise UserError(f"a {type(path).__name__} is not a path or a name", fix="pass a folder, a name or a result")
    return None if path is None else _path_text(path, "a path", "pass a name, a folder or a file")


def _path_text(path: StrPath, what: str, fix: str) -> str:
    """Return a path as text; raise UserError if no disk accepts it."""
    text = os.fspath(path)
    try:
        os.lstat(text)
    except (OSError, ValueError) as error:
        if isinstance(error, ValueError) or error.errno == errno.ENAMETOOLONG:
            size = count(len(text), "character")
            raise UserError(f"{what} cannot be a text of {size}: no disk accepts it as a name", fix=fix) from None
    return text


def load_inputs(
    config: AnyConfig,
    fixed: Sequence[str],
    *,
    model: AnyModel = None,
    tokenizer: AnyTokenizer = None,
    data: Data = None,
    formatting_func: Formatter | None = None,
    is_resuming: bool = False,
) -> LoadedConfig:
    """Return the config of a call. Models, tokenizers and rows from memory are saved to files first."""
    if isinstance(data, Mapping):
        data, test = splits_of(data)
        fixed = [*fixed, *as_sets(**{"data.held_out": next(iter(data_paths(test, formatting_func) or ()), None)})]
    name = model_name(model) if hasattr(model, "save_pretrained") else text_of(model)
    fixed = [*as_sets(tokenizer=tokenizer_name(tokenizer, model)), *fixed]
    paths = data_paths(data, formatting_func)
    return load_for_run(config_of(config), fixed, is_resuming=is_resuming, model=name, data=paths)


@naming_the_way_out
def train(
    config: AnyConfig = None,
    *,
    model: AnyModel = None,
    tokenizer: AnyTokenizer = None,
    data: Data = None,
    formatting_func: Formatter | None = None,
    index: StrPath | None = None,
    out: StrPath | None = None,
    resume: bool = False,
    settings: Settings | None = None,
    sets: Sequence[str] = (),
    allow_changes: Sequence[str] = (),
    allow_pickle: bool = False,
    on_step: Callable[[StepTaken], None] | None = None,
    on_evaluate: Callable[[Evaluated], None] | None = None,
    progress: Show = True,
) -> TrainResult:
    """Train a model and validate it. The corpus is prepared first if needed.

    `out` is the run folder. With `index`, made by `tunewell index`, the model learns to answer from passages.
    `allow_changes` lists the settings that may have changed since the first start, with `resume`. Raises UserError
    before the first step for problems that the caller can fix. After the first step, checkpoints stay on disk.
    """
    fixed = [*as_sets(run=text_of(out)), *index_sets(text_of(index)), *all_sets(sets, settings)]
    loaded = load_inputs(
        config,
        fixed,
        model=model,
        tokenizer=tokenizer,
        data=data,
        formatting_func=formatting_func,
        is_resuming=resume,
    )
    changes = [allow_changes] if isinstance(allow_changes, str) else allow_changes
    options = RunOptions(is_resuming=resume, allowed_changes=changes, allow_pickle=allow_pickle)
    with shown(progress, is_training=True) as show:
        from tunewell.workflows.train import run_training

        def listen(event: Event) -> None:
            show(event)
            if on_step is not None and isinstance(event, StepTaken):
                on_step(event)
            if on_evaluate is not None and isinstance(event, Evaluated):
                on_evaluate(event)

        result = run_training(loaded, options, listen)
        if not loaded.config.export.to:
            return result
        from tunewell.workflows.export import export_after_training

        step = export_after_training(loaded, result, allow_pickle=allow_pickle, progress=listen)
        notes = [*result.notes, *([step.note] if step.note else [])]
        following = step.exported.next_command if step.exported else result.next_command
        return replace(result, notes=notes, next_command=following)


@naming_the_way_out
def rehearse(
    config: AnyConfig = None,
    *,
    model: AnyModel = None,
    tokenizer: AnyTokenizer = None,
    data: Data = None,
    formatting_func: Formatter | None = None,
    settings: Settings | None = None,
    sets: Sequence[str] = (),
    allow_pickle: bool = False,
    progress: Show = True,
) -> "Rehearsal":
    """Train on a few rows for two minutes at most, before a long run. No run is written; the corpus is prepared.

    `problems` of the result lists what is wrong, each with its remedy: the loss of the rows must fall, and an answer
    must change.
    """
    from tunewell.workflows.rehearse import rehearse as run_rehearsal

    loaded = load_inputs(
        config,
        all_sets(sets, settings),
        model=model,
        tokenizer=tokenizer,
        data=data,
        formatting_func=formatting_func,
    )
    with shown(progress) as show:
        return run_rehearsal(loaded, RunOptions(allow_pickle=allow_pickle), show)


@naming_the_way_out
def plan(
    config: AnyConfig = None,
    *,
    model: AnyModel = None,
    tokenizer: AnyTokenizer = None,
    data: Data = None,
    formatting_func: Formatter | None = None,
    measure: bool = True,
    gpus: Sequence[str] = (),
    settings: Settings | None = None,
    sets: Sequence[str] = (),
    progress: Show = True,
) -> PlanResult:
    """Predict whether a run fits, how long it takes and what it costs. The corpus is prepared if needed.

    With `measure`, a child process takes a few real steps. `gpus` are cards of `tunewell plan --gpu`, like `["t4"]`.
    """
    from tunewell.workflows.plan import PlanOptions
    from tunewell.workflows.plan import plan as run_plan

    loaded = load_inputs(
        config,
        all_sets(sets, settings),
        model=model,
        tokenizer=tokenizer,
        data=data,
        formatting_func=formatting_func,
    )
    with shown(progress) as show:
        return run_plan(loaded, PlanOptions(measure, [gpus] if isinstance(gpus, str) else gpus), progress=show)


@naming_the_way_out
def prepare(
    config: AnyConfig = None,
    *,
    model: AnyModel = None,
    tokenizer: AnyTokenizer = None,
    data: Data = None,
    formatting_func: Formatter | None = None,
    out: StrPath | None = None,
    settings: Settings | None = None,
    sets: Sequence[str] = (),
    progress: Show = True,
) -> PrepareResult:
    """Build a corpus from rows, in the folder `out`. An up-to-date corpus is reused."""
    loaded = load_inputs(
        config,
        [*as_sets(corpus=text_of(out)), *all_sets(sets, settings)],
        model=model,
        tokenizer=tokenizer,
        data=data,
        formatting_func=formatting_func,
    )
    with shown(progress) as show:
        return run_prepare(loaded, progress=show)


@naming_the_way_out
def validate(
    model: ModelPath = None,
    *,
    data: Data = None,
    checkpoint: str | int = "best",
    base: ModelPath = None,
    template: str | None = None,
    metrics: Mapping[str, "Metric"] | None = None,
    lm_eval: Sequence[str] = (),
    device: str = "auto",
    out: StrPath | None = None,
    settings: Settings | None = None,
    sets: Sequence[str] = (),
    allow_pickle: bool = False,
    progress: Show = True,
) -> Validation:
    """Validate a run (by default the one of the config in the current folder), an adapter or a model.

    `metrics` are functions by name, `fn(question, answer, reference) -> number`. The other parameters are the options
    of `tunewell validate`.
    """
    from tunewell.evaluation.session import ValidateOptions
    from tunewell.workflows.validate import validate as run_validate

    options = ValidateOptions(
        data=data_paths(data),
        checkpoint=str(checkpoint),
        base=text_of(base),
        template=template,
        metrics=metrics or {},
        lm_eval=[lm_eval] if isinstance(lm_eval, str) else lm_eval,
        device=device,
        out=text_of(out),
        sets=all_sets(sets, settings),
        allow_pickle=allow_pickle,
    )
    with shown(progress) as show:
        return run_validate(model, options=options, progress=show)


@naming_the_way_out
def export(
    model: ModelPath = None,
    *,
    to: str | Sequence[str] | None = None,
    gguf: str | Sequence[str] | None = None,
    precision: str | None = None,
    out: StrPath | None = None,
    checkpoint: str | int = "best",
    base: ModelPath = None,
    name: str | None = None,
    creates: bool = True,
    settings: Settings | None = None,
    sets: Sequence[str] = (),
    allow_pickle: bool = False,
    progress: Show = True,
) -> "ExportResult":
    """Export a run, an adapter or a model, and verify every artefact.

    `to` and `gguf` are lists, or texts with commas: `to="gguf,ollama"`, `gguf="q8_0"`. `name` is the name in Ollama;
    with `creates`, `ollama create` is called. The other parameters are the options of `tunewell export`.
    """
    from tunewell.export.options import ExportOptions
    from tunewell.workflows.export import export as run_export

    options = ExportOptions(
        to=to,
        gguf=gguf,
        precision=precision,
        out=text_of(out),
        checkpoint=checkpoint,
        base=text_of(base),
        name=name,
        creates=creates,
        sets=all_sets(sets, settings),
        allow_pickle=allow_pickle,
    )
    with shown(progress) as show:
        return run_export(model, order=options, progress=show)
