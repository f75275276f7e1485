"""Build a run in a folder that is thrown away, as `train` builds its own: for `plan`, `profile` and `rehearse`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tunewell.config.extensions import NATIVE
from tunewell.config.load import LoadedConfig
from tunewell.core.errors import UserError
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.data.batches import DataOrder
from tunewell.data.corpus.reader import Corpus
from tunewell.records.plan import Plan, Start
from tunewell.runs.config import RunOptions
from tunewell.runs.folder import open_run_folder
from tunewell.training.events import Event
from tunewell.training.run import Run
from tunewell.workflows.train import Training

MakePlan = Callable[[Training], tuple[Corpus, Plan, DataOrder]]


@contextmanager
def trial_run(
    loaded: LoadedConfig,
    options: RunOptions,
    folder: Path,
    *,
    start: Start | None = None,
    make_plan: MakePlan | None = None,
    listener: ProgressListener = silent,
) -> Iterator[tuple[Training, Corpus, Run]]:
    """Prepare, plan and build a run in a folder, and yield it. `make_plan` replaces the first two."""
    if loaded.config.engine != NATIVE:
        raise UserError(
            f"steps on trial are taken by tunewell's own engine, and the config has `engine: {loaded.config.engine}`",
            where=loaded.origin("engine"),
            fix="for its numbers, add `--set engine=native`",
        )

    def listen(event: Event) -> None:
        if isinstance(event, Progress) and event.stage != "saving a checkpoint":  # nothing of it is kept
            listener(event)

    train = loaded.config.train.model_copy(update={"replay": 0.0})  # its answers would take longer than the trial
    config = loaded.config.model_copy(update={"run": str((folder / "run").absolute()), "train": train})
    training = Training(replace(loaded, config=config), options, listen, start)
    if training.world.size > 1:
        raise UserError("steps on trial are taken in one process", fix="start it without `torchrun`")
    with open_run_folder(training.loaded, training.world, is_resuming=False) as opened:
        if make_plan:
            corpus, plan, order = make_plan(training)
        else:
            training.prepare()
            corpus, plan, order = training.plan(opened)
        plan = plan.model_copy(update={"answers": None})
        with training.process_settings(plan):
            _, run = training.build(opened, corpus, plan, order)
            yield training, corpus, run
        run.close()
