"""The public functions `train`, `prepare`, `validate` and `export`: one convention for all of them.

A config is a path or a mapping; keywords win over it. `data` is a path, a list of paths, a list of dicts, a
`datasets.Dataset` or a pandas DataFrame. `progress=False` is silent; a function receives every event. Workflows that
need torch are imported when they are called: `prepare` works without it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunewell.library.progress import Show, shown
from tunewell.library.results import PrepareResult, TrainResult, Validation, as_result
from tunewell.library.rows import data_paths
from tunewell.runs.config import load_for_run
from tunewell.runs.options import RunOptions
from tunewell.training.events import Evaluated, Event, StepTaken
from tunewell.workflows.prepare import prepare as run_prepare

if TYPE_CHECKING:
    from tunewell.library.export_result import ExportResult

Config = Mapping[str, Any] | str | Path | None


def train(
    config: Config = None,
    *,
    model: str | Path | None = None,
    data: Any = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Show = True,
    on_step: Callable[[StepTaken], None] | None = None,
    on_evaluate: Callable[[Evaluated], None] | None = None,
    sets: Sequence[str] = (),
    allow_changes: Sequence[str] = (),
    allow_pickle: bool = False,
) -> TrainResult:
    """Train a model and validate it; prepare the corpus first if needed.

    `out` is the run folder. `sets` are `KEY=VALUE` texts, as `--set` takes them. `allow_changes` names settings that
    may differ from the run's first start, with `resume`. Raises UserError for what the caller can fix, before the
    first step; after that, checkpoints stay on disk.
    """
    from tunewell.workflows.train import run_training

    settings = [*_setting("run", out), *_as_list(sets)]
    loaded = load_for_run(config, settings, is_resuming=resume, model=_text(model), data=data_paths(data))
    options = RunOptions(is_resuming=resume, allowed_changes=_as_list(allow_changes), allow_pickle=allow_pickle)
    with shown(progress, is_training=True) as show:

        def listen(event: Event) -> None:
            show(event)
            if on_step is not None and isinstance(event, StepTaken):
                on_step(event)
            if on_evaluate is not None and isinstance(event, Evaluated):
                on_evaluate(event)

        return as_result(TrainResult, run_training(loaded, options, listen))


def prepare(
    config: Config = None,
    *,
    model: str | Path | None = None,
    data: Any = None,
    out: str | Path | None = None,
    progress: Show = True,
    sets: Sequence[str] = (),
) -> PrepareResult:
    """Turn rows into a corpus; `out` is its folder. A corpus that is up to date is kept."""
    with shown(progress) as show:
        made = run_prepare(
            config, sets=_as_list(sets), model=_text(model), data=data_paths(data), out=out, progress=show
        )
    return as_result(PrepareResult, made)


def validate(
    model: str | Path | TrainResult | None = None, *, data: Any = None, progress: Show = True, **options: Any
) -> Validation:
    """Validate a run (by default the one of the config in the current folder), an adapter or a model.

    `options` are those of the command: `base=`, `checkpoint=`, `questions=`, `out=`, `device=`, `metrics=`, ...
    """
    from tunewell.workflows.validate import validate as run_validate

    paths = data_paths(data)
    if paths is not None:
        options["data"] = paths[0] if len(paths) == 1 else paths
    with shown(progress) as show:
        return as_result(Validation, run_validate(_path(model), progress=show, **options))


def export(model: str | Path | TrainResult | None = None, *, progress: Show = True, **options: Any) -> "ExportResult":
    """Export a run, an adapter or a model, and prove every artefact.

    `options` are those of the command: `to="gguf,ollama"`, `gguf="q8_0"`, `precision=`, `out=`, `checkpoint=`, ...
    """
    from tunewell.library.export_result import ExportResult
    from tunewell.workflows.export import export as run_export

    with shown(progress) as show:
        return as_result(ExportResult, run_export(_path(model), progress=show, **options))


def _path(model: str | Path | TrainResult | None) -> str | Path | None:
    return model.run if isinstance(model, TrainResult) else model


def _text(value: str | Path | None) -> str | None:
    return None if value is None else str(value)


def _as_list(values: Sequence[str]) -> list[str]:
    return [values] if isinstance(values, str) else list(values)


def _setting(key: str, value: str | Path | None) -> list[str]:
    return [] if value is None else [f"{key}={json.dumps(str(value), ensure_ascii=False)}"]
