"""`tunewell.compare`: compare training with answering from documents, and runs with each other."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunewell.features.compare.workflow import RunComparison
from tunewell.library.functions import data_paths
from tunewell.library.progress import Show, shown
from tunewell.runs.result import TrainResult


def compare(
    *models: str | Path | TrainResult,
    index: str | Path | Sequence[str | Path] = (),
    data: Any = None,
    out: str | Path = "comparison",
    progress: Show = True,
    **options: Any,
) -> RunComparison:
    """Compare runs and models on the same held-out questions, with and without indexes, and recommend one.

    Without models, the run of the current folder is compared with its base model and the index `index`. `data` are
    other questions with answers. `options` are `num_questions`, `num_passages`, `device` and `is_fresh`.
    """
    from tunewell.features.compare.workflow import compare as run_compare

    names = [model.run if isinstance(model, TrainResult) else model for model in models]
    indexes = [str(index)] if isinstance(index, str | Path) else [str(one) for one in index]
    with shown(progress) as show:
        return run_compare(names, indexes=indexes, data=data_paths(data), out=out, progress=show, **options)
