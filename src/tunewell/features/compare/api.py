"""`tunewell.compare`: compare training with answering from documents, and runs with each other."""

from collections.abc import Sequence
from os import PathLike, fspath

from tunewell.features.compare.workflow import RunComparison
from tunewell.library.functions import Data, StrPath, data_paths, text_of
from tunewell.library.keywords import naming_the_way_out
from tunewell.library.progress import Show, shown


@naming_the_way_out
def compare(
    *models: StrPath,
    index: StrPath | Sequence[StrPath] = (),
    data: Data = None,
    num_questions: int = 100,
    num_passages: int | None = None,
    judge: str | None = None,
    labels: StrPath | None = None,
    is_fresh: bool = False,
    device: str = "auto",
    out: StrPath = "comparison",
    progress: Show = True,
) -> RunComparison:
    """Compare runs and models on the same held-out questions, with and without indexes, and recommend one.

    Without models, the run of the current folder is compared with its base model and the index `index`. `data` are
    other questions with answers. The other parameters are the options of `tunewell compare`.
    """
    from tunewell.features.compare.options import CompareOptions
    from tunewell.features.compare.workflow import compare as run_compare

    options = CompareOptions(
        indexes=[fspath(one) for one in ([index] if isinstance(index, str | PathLike) else index)],
        data=data_paths(data),
        num_questions=num_questions,
        num_passages=num_passages,
        judge=judge,
        labels=text_of(labels),
        is_fresh=is_fresh,
        device=device,
        out=fspath(out),
    )
    with shown(progress) as show:
        return run_compare([fspath(model) for model in models], options=options, progress=show)
