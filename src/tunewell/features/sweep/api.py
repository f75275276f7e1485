"""`tunewell.sweep`: train with every combination of some settings, from a script or a notebook."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tunewell.config.load import ConfigLike
from tunewell.features.sweep.sweep import SweepResult
from tunewell.library.functions import Data, ModelPath, Settings, StrPath, all_sets, data_paths, text_of
from tunewell.library.keywords import naming_the_way_out
from tunewell.library.progress import Show, shown


@naming_the_way_out
def sweep(
    config: ConfigLike = None,
    *,
    over: Mapping[str, Sequence[Any]] | None = None,
    budget: str | None = None,
    model: ModelPath = None,
    data: Data = None,
    out: StrPath = "sweep",
    seeds: int = 1,
    resume: bool = False,
    settings: Settings | None = None,
    sets: Sequence[str] = (),
    allow_pickle: bool = False,
    progress: Show = True,
) -> SweepResult:
    """Train with every combination of the values in `over`, like `{"train.learning_rate": [1e-4, 3e-4]}`.

    With `budget`, like `10m`, settings near the recommended ones are tried, as many as the time allows. The two best
    settings are trained with `seeds` seeds. `resume` goes on with the sweep in `out`. Raises UserError before the first
    run for invalid values.
    """
    from tunewell.features.sweep.workflow import SweepOptions
    from tunewell.features.sweep.workflow import sweep as run_sweep

    alternatives = [
        f"{key}={','.join(json.dumps(value, default=str) for value in values)}" for key, values in (over or {}).items()
    ]

    def shown_run(title: str) -> AbstractContextManager[Any]:
        return shown(progress, is_training=True)

    options = SweepOptions(out=Path(out), seeds=seeds, budget=budget, is_resuming=resume, allow_pickle=allow_pickle)
    return run_sweep(
        config,
        sets=[*all_sets(sets, settings), *alternatives],
        model=text_of(model),
        data=data_paths(data),
        options=options,
        shown=shown_run,
    )
