"""`tunewell train`: prepare the corpus, plan, train, write the result and validate the model."""

import gc
import shlex
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial

import torch

from tunewell.config.load import LoadedConfig
from tunewell.core.errors import UserError
from tunewell.core.features import require_hook
from tunewell.core.progress import DOWNLOADING, only_stage, silent
from tunewell.core.redact import redact
from tunewell.core.units import size_bytes
from tunewell.data.batches import DataOrder
from tunewell.data.corpus.reader import Corpus, open_corpus
from tunewell.data.corpus.spec import with_labels
from tunewell.evaluation.metrics import load_metrics
from tunewell.evaluation.session import ValidateOptions
from tunewell.export.preflight import require_exportable
from tunewell.machine.allocator import keep_freed_memory
from tunewell.machine.device import measure_threads, probe_device, torch_threads
from tunewell.planning.advice import look_up_hint
from tunewell.planning.fit import Planner
from tunewell.planning.forecast import shape_of
from tunewell.planning.memory import CONTEXT_BYTES
from tunewell.planning.plan import plan_run
from tunewell.planning.recommendation import with_recommended
from tunewell.records.manifest import MANIFEST
from tunewell.records.plan import Plan, Start, read_plan
from tunewell.records.report import EXIT_NOT_VALIDATED
from tunewell.runs.checklist import checklist, settings_without_effect, warnings
from tunewell.runs.config import RunOptions, as_first_started, missing_rows, require_training_data, with_start
from tunewell.runs.engines import EngineRun, adapt_plan, find_engine
from tunewell.runs.folder import RunFolder, keep_measured_settings, open_run_folder, require_known_changes, restore_run
from tunewell.runs.heartbeat import Pulse
from tunewell.runs.outcome import update_outcome, write_run_files
from tunewell.runs.probe import cached_probe, probe_run, sweep_sizes, with_probe
from tunewell.runs.result import MetricsRecorder, TrainResult, make_result
from tunewell.scoring.tasks import make_scorer
from tunewell.training.build import (
    RunInputs,
    build_run,
    check_packing,
    describe_start,
    require_same_settings,
    run_state,
)
from tunewell.training.device_check import check_device
from tunewell.training.distributed import World
from tunewell.training.engine import train as take_steps
from tunewell.training.events import Listener, RunStarted
from tunewell.training.faults import parse_faults
from tunewell.training.memory import peak_memory
from tunewell.training.replay import add_replay
from tunewell.training.run import Ending, Run
from tunewell.training.step import StepHooks
from tunewell.workflows.prepare import prepare
from tunewell.workflows.validate import validate

_LONG_RUN = 2400.0
"""Seconds from which `train` measures micro-batch sizes: 5% of them are the two minutes that this may take."""


def run_training(loaded: LoadedConfig, options: RunOptions, listener: Listener = silent) -> TrainResult:
    """Prepare the corpus, train the model and validate it. Raise UserError for problems before the first step."""
    loaded, start = require_trainable(loaded, options)
    training = Training(loaded, options, listener, start)
    result = training.run()
    if training.world.is_first and result.status == "finished" and loaded.config.verdict.after_training:
        return _validated(result, training)
    return result


def require_trainable(loaded: LoadedConfig, options: RunOptions) -> tuple[LoadedConfig, Start | None]:
    """Check the config before anything is loaded. Return it with its base model, and the run from which it goes on."""
    require_known_changes(options.allowed_changes, is_resuming=options.is_resuming)
    if options.is_resuming:
        loaded = as_first_started(loaded)
        if (missing := missing_rows(loaded)) and not (loaded.path(loaded.config.corpus) / MANIFEST).is_file():
            fix = f"copy the corpus `{loaded.config.corpus}` here too, or name the rows with `--data`"
            raise UserError(missing.what, where="`data.sources` in the config of the run", fix=fix)
    loaded, start = with_start(loaded)
    require_training_data(loaded, is_resuming=options.is_resuming)
    loaded = with_labels(loaded)  # the run's config says how its test rows are read
    if loaded.config.track:
        require_hook("track", "require", needed_by="`track`")(loaded.config.track)
    if loaded.config.export.to:
        require_exportable(loaded)
    if loaded.config.verdict.metrics:
        load_metrics(loaded.config.verdict.metrics, base=loaded.base)  # an error in them is raised now, not at the end
    if ":" in loaded.config.verdict.task:
        make_scorer(loaded.config.verdict.task, [], [], base=loaded.base)
    return loaded, start


class Training:
    """One training run in this process, from the run folder to the result. Another engine may take its steps."""

    def __init__(self, loaded: LoadedConfig, options: RunOptions, listener: Listener, start: Start | None) -> None:
        self.loaded, self.options, self.start = loaded, options, start
        self.engine = find_engine(loaded, options)
        self.pulse = Pulse(options.supervisor_fds)
        self.recorder = MetricsRecorder(self.pulse, listener)
        self.hooks = parse_faults(options.faults, is_allowed=options.allow_faults) if options.faults else StepHooks()
        World.select_gpu(loaded.config.device)
        self.device = probe_device(loaded.config.device)
        self.world = World.initialise(torch.device(self.device.name))

    def run(self) -> TrainResult:
        """Train in the run folder. An error on one rank is raised on all of them (`failing_together`)."""
        world, options, recorder = self.world, self.options, self.recorder
        with open_run_folder(self.loaded, world, is_resuming=options.is_resuming) as folder:
            self.pulse.open(folder.working_path)
            with world.failing_together():
                self.prepare()
            with world.failing_together():
                corpus, plan, order = self.plan(folder)
            for caution in [] if options.is_resuming else corpus.manifest.cautions():
                self.recorder.note(caution)
            if not options.is_resuming and world.is_first and (hint := look_up_hint(corpus)):
                self.recorder.note(hint)
            with self.process_settings(plan):
                begin = self.begin_native if self.engine is None else self.begin_engine
                run, take = begin(folder, corpus, plan, order)
                tokens = run.progress.tokens
                ending = self.take_steps(folder, take)
            is_native = isinstance(run, Run)
            result = make_result(
                self.loaded,
                run,
                ending,
                recorder=recorder,
                first_tokens=tokens,
                peak_bytes=peak_memory(run.learner.device) if is_native else run.peak_bytes,
                options=options,
            )
            if world.is_first:
                num_rows = run.learner.model.config.get_text_config().vocab_size if is_native else None
                write_run_files(result, run.plan, corpus, num_rows=num_rows, allow_pickle=options.allow_pickle)
            run.close()
            world.shut_down()
            return result

    def begin_native(
        self, folder: RunFolder, corpus: Corpus, plan: Plan, order: DataOrder
    ) -> tuple[Run, Callable[[], Ending]]:
        """Build the run. Return it with the function that takes its steps."""
        with self.world.failing_together():
            inputs, run = self.build(folder, corpus, plan, order)
        require_same_settings(inputs, run)
        add_replay(inputs, run)
        # Each trainable parameter and AdamW's two states in its dtype; other optimizers have smaller ones.
        size = sum(3 * parameter.nbytes for parameter in run.learner.parameters.values())
        self.begin(describe_start(inputs, run), folder, corpus, size, is_selecting=run.is_selecting)
        return run, partial(take_steps, run, handle_signals=self.options.owns_process)

    def begin_engine(
        self, folder: RunFolder, corpus: Corpus, plan: Plan, order: DataOrder
    ) -> tuple[EngineRun, Callable[[], Ending]]:
        """Open a run of another engine. Return it with the function that takes its steps. The order is the engine's."""
        assert self.engine is not None
        engine, options, recorder = self.engine[0], self.options, self.recorder
        folder.write_base(model := self.loaded.seen(plan.model))
        run = EngineRun(
            **run_state(plan, self.loaded.config, model, recorder.note, folder=folder.path, home=folder.path),
            loaded=self.loaded,
            corpus=corpus,
            folder=folder.path,
            options=options,
            recorder=recorder,
            beat=self.pulse.beat,
            # The weights in fp32 and AdamW's two states.
            on_start=lambda event: self.begin(event, folder, corpus, 12 * event.num_trainable),
        )
        if not options.is_resuming:
            for message in engine.limits(self.loaded):
                recorder.note(message)
        elif run.restore(engine.can_resume):
            folder.write_plan(self.loaded, plan, corpus, argv=options.argv)
        else:
            folder.write_config(self.loaded, argv=options.argv)
        return run, partial(engine.train, run)

    def prepare(self) -> None:
        """Prepare the corpus on rank 0. Without sources, or on a machine without them, the existing corpus is used."""
        with self.recorder.stage("prepare", stage := "preparing the corpus"):
            missing = missing_rows(self.loaded) if self.options.is_resuming else None
            if missing and (self.loaded.path(self.loaded.config.corpus) / MANIFEST).is_file():
                self.recorder.note(f"{missing.what}: the run continues with its corpus, which has these rows")
            elif self.loaded.config.data.sources and self.world.is_first:
                prepare(self.loaded, progress=only_stage(self.recorder, DOWNLOADING, stage))

    def plan(self, folder: RunFolder) -> tuple[Corpus, Plan, DataOrder]:
        """Open the corpus and plan the run. A resumed run keeps the measured settings of its first plan."""
        with self.recorder.stage("prepare"):
            config = self.loaded.config
            corpus = open_corpus(self.loaded.path(config.corpus), verify=True, in_memory=config.train.in_memory)
        with self.recorder.stage("plan"):
            before = read_plan(folder.path) if self.options.is_resuming else None
            self.loaded = with_recommended(self.loaded, corpus.manifest, before)
            plan, order = self.predicted_plan(corpus)
            plan = plan.model_copy(update={"start": self.start})
            if self.engine is not None:
                plan = adapt_plan(plan, corpus, *self.engine)
            if self.start is not None:
                self.recorder.note(f"training goes on from `{self.start.path}`")
            if self.options.is_resuming:
                plan = keep_measured_settings(folder.path, plan, self.options.allowed_changes, self.recorder)
            else:
                folder.write_plan(self.loaded, plan, corpus, argv=self.options.argv)
        return corpus, plan, order

    def predicted_plan(self, corpus: Corpus) -> tuple[Plan, DataOrder]:
        """Plan the run and predict it. Raise UserError if it cannot fit, unless `plan.memory: warn` is set.

        Earlier measurements of the same run on this machine are used. On the command line, a new long run in one
        process measures the size of its micro-batches in a child process first.
        """
        loaded, device, options, recorder = self.loaded, self.device, self.options, self.recorder
        may_measure = options.owns_process and not options.is_resuming and self.world.size == 1
        measure_once = cache(options.measure_threads or measure_threads)
        if device.kind == "cuda" and device.free_bytes is not None and device.memory_bytes is not None:
            # torch reports what is free beside the context of this process, which is part of the prediction.
            device = replace(device, free_bytes=min(device.memory_bytes, device.free_bytes + CONTEXT_BYTES))
        try:
            shape = shape_of(loaded, corpus)
            planner = Planner(loaded, corpus, device, shape, lambda shapes: measure_once(tuple(shapes)))
        except UserError:  # a model whose size is not known before it is loaded
            return plan_run(loaded, corpus, device, measure_threads=measure_threads)
        plan, order, outlook = planner.first
        if self.engine is not None:  # the prediction is for tunewell's own engine
            return plan, order
        found, is_long = cached_probe(loaded, plan, outlook), outlook.prediction.seconds.expected > _LONG_RUN
        if found is None and may_measure and is_long and sweep_sizes(outlook):
            found, reason = probe_run(loaded, plan, outlook, recorder)
            if found is None:
                recorder.note(f"micro-batch sizes were not measured: {reason}")
        if found is not None:
            planner = with_probe(planner, found)
            plan, order, outlook = planner.first
        if not outlook.prediction.fits:
            if loaded.config.plan.memory == "refuse":
                planner.require_fit()
            memory = outlook.prediction.memory
            recorder.note(
                f"the run may be out of memory: it needs about {size_bytes(memory.needed_bytes)}, and "
                f"{size_bytes(memory.free_bytes or 0)} are free; `tunewell plan` lists what helps"
            )
        return plan, order

    def build(self, folder: RunFolder, corpus: Corpus, plan: Plan, order: DataOrder) -> tuple[RunInputs, Run]:
        """Load the model, restore the checkpoint of a resumed run, and check that packed documents stay separate."""
        options, recorder = self.options, self.recorder
        with recorder.stage("load", "loading the model"):
            inputs = RunInputs(
                loaded=self.loaded,
                plan=plan,
                corpus=corpus,
                order=order,
                folder=folder.path,
                rank_folder=folder.working_path,
                world=self.world,
                listener=recorder,
                allow_pickle=options.allow_pickle,
                hooks=self.hooks,
                heartbeat=self.pulse.beat,
            )
            run = build_run(inputs)
        if options.is_resuming:
            if restore_run(run, folder.path, options.allowed_changes, recorder=recorder, inputs=inputs):
                folder.write_plan(self.loaded, run.plan, corpus, argv=options.argv)
            else:
                folder.write_config(self.loaded, argv=options.argv)
        folder.write_base(inputs.model)
        with recorder.stage("check", "checking that rows stay separate"):
            self.device = check_device(inputs, run, self.device)
            check_packing(inputs, run)
        return inputs, run

    def take_steps(self, folder: RunFolder, take: Callable[[], Ending]) -> Ending:
        """Train until the run ends, and send its metrics to its trackers."""
        world, names = self.world, self.loaded.config.track
        start = require_hook("track", "start", needed_by="`track`") if names and world.is_first else None
        end_trackers = start(folder.path, names, self.recorder.listeners, self.recorder.note) if start else None
        status = "failed"
        try:
            with world.explaining_lost_ranks("resume from the newest checkpoint with `--resume` in all processes"):
                ending = take()
            status = ending.status
            return ending
        finally:
            if end_trackers:
                end_trackers(status)

    def process_settings(self, plan: Plan) -> AbstractContextManager[None]:
        """Set the number of threads, permanently on the command line and temporarily in a library call."""
        if not self.options.owns_process:
            return torch_threads(plan.threads.value)
        torch.set_num_threads(plan.threads.value)
        if self.device.kind == "cpu":
            keep_freed_memory(self.device.free_bytes)
        return nullcontext()

    def begin(
        self, event: RunStarted, folder: RunFolder, corpus: Corpus, size: int, *, is_selecting: bool = True
    ) -> None:
        """Send the event and the check list before the first step, with notes on what needs attention.

        `size` is the number of bytes of a checkpoint. The folder is kept from here on.
        """
        plan, where, keep = event.plan, folder.working_path, self.loaded.config.checkpoints.keep
        items = checklist(plan, corpus.manifest, self.device, folder=where, checkpoint_bytes=size, keep=keep)
        notes = settings_without_effect(self.loaded, corpus.manifest, is_selecting=is_selecting)
        for message in [*notes, *warnings(items)]:
            self.recorder.note(message)
        self.recorder(replace(event, checklist=items))
        folder.keep()


def _validated(result: TrainResult, training: Training) -> TrainResult:
    """Validate the saved model and add the report to the result. A validation error becomes a note."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a GPU
    loaded, recorder, model = training.loaded, training.recorder, training.loaded.config.model or ""
    # A secret in the model's name is removed from the run's files, so the run does not know its base model.
    base = loaded.seen(model) if redact(model) != model else None
    options = ValidateOptions(device=training.device.name, base=base, allow_pickle=training.options.allow_pickle)
    started = time.perf_counter()
    try:
        validation = validate(result.run, options=options, progress=recorder)
    except Exception as error:  # noqa: BLE001  the model is trained and saved, however its validation fails
        recorder.note(f"the model is trained and saved, but its validation failed: {type(error).__name__}: {error}")
        command = f"tunewell validate {shlex.quote(str(result.run))}"
        return replace(result, exit_code=result.exit_code or EXIT_NOT_VALIDATED, next_command=command)
    seconds = time.perf_counter() - started
    validated = replace(
        result,
        validation=validation,
        exit_code=result.exit_code or validation.exit_code,
        seconds=result.seconds + seconds,
        stages={**result.stages, "judge": seconds},
        artefacts=[*result.artefacts, (str(validation.page), "the verdict and its evidence")],
        next_command=validation.report.next,
    )
    return update_outcome(validated, training.device.name)
