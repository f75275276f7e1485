"""`tunewell train`: from a config to a trained adapter or model, in a run folder that can vouch for it."""

import gc
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tunewell.config.load import ConfigLike, LoadedConfig
from tunewell.core.errors import UserError
from tunewell.core.progress import Progress, silent
from tunewell.core.redact import redact
from tunewell.data.batches import DataOrder
from tunewell.data.corpus.reader import Corpus, open_corpus
from tunewell.evaluation.metrics import load_metrics
from tunewell.evaluation.session import ValidateOptions
from tunewell.export.preflight import require_exportable
from tunewell.hardware.allocator import keep_freed_memory
from tunewell.hardware.probe import probe_device
from tunewell.hardware.threads import measure_threads
from tunewell.methods.peft_format import ADAPTER_CONFIG
from tunewell.models.facts import ModelFacts, read_facts
from tunewell.planning.compute import PlanInputs
from tunewell.planning.plan import choose_batch, plan_training
from tunewell.records.manifest import MANIFEST
from tunewell.records.plan import PLAN, Plan, write_plan
from tunewell.records.rundir import RUN_CONFIG, RunDir
from tunewell.runs.config import REPEAT_FIRST_COMMAND, dump_config, load_for_run
from tunewell.runs.heartbeat import Heartbeat
from tunewell.runs.options import RunOptions
from tunewell.runs.outcome import Since, make_result, write_run_files
from tunewell.runs.result import MetricsRecorder, TrainResult
from tunewell.runs.resume import plan_to_resume, require_resume_for_changes, restore_run, write_document_hashes
from tunewell.training.build import RunInputs, build_run, check_packing, describe_start, require_same_settings
from tunewell.training.checkpoints import disk_space_warning
from tunewell.training.distributed import World
from tunewell.training.engine import Run
from tunewell.training.engine import train as take_steps
from tunewell.training.events import Listener
from tunewell.training.faults import NoFaults, parse_faults
from tunewell.workflows.prepare import prepare
from tunewell.workflows.validate import validate

_NOT_JUDGED = 3
"""Exit code of a run whose model could not be judged: as for WEAK, since nothing proves it good."""


def train(
    config: ConfigLike = None,
    *,
    sets: Sequence[str] = (),
    is_resuming: bool = False,
    allowed_changes: Sequence[str] = (),
    allow_pickle: bool = False,
    listener: Listener = silent,
) -> TrainResult:
    """Train the model that a config describes and validate it; prepare the corpus first if needed.

    The config is a path, or a mapping with the same keys; relative paths in a mapping start from the current folder.
    Raises UserError for every problem found before the first step. After that, checkpoints stay on disk.
    """
    changes = [allowed_changes] if isinstance(allowed_changes, str) else allowed_changes
    options = RunOptions(is_resuming=is_resuming, allowed_changes=changes, allow_pickle=allow_pickle)
    return run_training(load_for_run(config, sets, is_resuming=is_resuming), options, listener)


def run_training(loaded: LoadedConfig, options: RunOptions, listener: Listener = silent) -> TrainResult:
    """Train and validate: what both `train` and the command line call."""
    require_resume_for_changes(options.allowed_changes, is_resuming=options.is_resuming)
    _refuse_nothing(loaded, is_resuming=options.is_resuming)
    require_exportable(loaded)
    load_metrics(loaded.config.verdict.metrics, base=loaded.base)  # fails now, not after hours of training
    heartbeat = Heartbeat(options.supervisor_fds) if options.supervisor_fds else None
    recorder = MetricsRecorder(heartbeat or silent, listener)
    wish = _Wish(
        loaded,
        options,
        faults=parse_faults(options.faults, is_allowed=options.allow_faults),
        alive=heartbeat.beat if heartbeat else lambda: None,
    )
    result, is_first = _train(wish, recorder)
    if not (is_first and result.status == "finished" and loaded.config.verdict.after_training):
        return result
    return _judged(result, wish, recorder)


@dataclass(frozen=True)
class _Wish:
    """What was asked for this time."""

    loaded: LoadedConfig
    options: RunOptions
    faults: NoFaults
    alive: Callable[[], None]


def _train(wish: "_Wish", recorder: MetricsRecorder) -> tuple[TrainResult, bool]:
    """Train; also say whether this process speaks for the run."""
    started = time.perf_counter()
    loaded, options = wish.loaded, wish.options
    is_resuming, allowed_changes, allow_pickle = options.is_resuming, options.allowed_changes, options.allow_pickle
    stages: dict[str, float] = {}
    World.take_place(loaded.config.device)
    facts = probe_device(loaded.config.device)
    world = World.join(torch.device(facts.name))
    folder = loaded.path(loaded.config.run)
    with ExitStack() as held:
        again = "start all of them again"
        held.enter_context(world.explaining_loss(again))
        # Before anything that takes long: a folder that cannot be used is better known now.
        run_dir, own_folder = None, folder
        with world.as_one():
            if world.is_first:
                home = loaded.path(loaded.config.corpus)
                run_dir = held.enter_context(
                    RunDir.reopen(folder) if is_resuming else RunDir.begin(folder, corpus=home)
                )
            else:
                own_folder = Path(held.enter_context(TemporaryDirectory(prefix="tunewell-process-")))
        held.enter_context(world.explaining_loss(again))  # inside, so that a run without a step is taken back
        with _timed(stages, "prepare"), world.as_one():
            recorder(Progress("preparing the corpus"))
            if loaded.config.data.sources and world.is_first:
                prepare(loaded)
        with world.as_one():
            with _timed(stages, "prepare"):
                # Where no data is named, the corpus that is there is trained on.
                corpus = open_corpus(loaded.path(loaded.config.corpus), verify=True)
            with _timed(stages, "plan"):
                plan, order = _plan(loaded, corpus, facts)
                if is_resuming:
                    plan = plan_to_resume(folder, plan, allowed_changes, recorder)
            torch.set_num_threads(plan.threads.value)
            if facts.kind == "cpu":
                keep_freed_memory(facts.free_bytes)
            if run_dir is not None and not is_resuming:
                _write_down(run_dir, loaded, plan, corpus, options)
            with _timed(stages, "load"):
                recorder(Progress("loading the model"))
                parts = RunInputs(
                    loaded,
                    plan,
                    corpus,
                    order,
                    folder,
                    own_folder,
                    world,
                    recorder,
                    allow_pickle,
                    wish.faults,
                    wish.alive,
                )
                run = build_run(parts)
            if is_resuming:
                is_changed = restore_run(loaded, run, allowed_changes, recorder=recorder, corpus=corpus)
                if run_dir is not None and is_changed:
                    _write_down(run_dir, loaded, plan, corpus, options)
                elif run_dir is not None:
                    _write_settings(run_dir, loaded, options)
            with _timed(stages, "check"):
                recorder(Progress("checking that rows stay separate"))
                check_packing(parts, run)
        require_same_settings(parts, run)
        _warn(loaded, corpus, run, recorder)
        since = Since(started, run.progress.tokens, options)
        recorder(describe_start(parts, run))
        if run_dir is not None:
            run_dir.keep()
        with world.explaining_loss("`tunewell train --resume` in all of them goes on from the newest checkpoint"):
            ending = take_steps(run)
        result = make_result(loaded, run, ending, recorder=recorder, stages=stages, since=since)
        if world.is_first:
            write_run_files(run, result, plan, corpus, allow_pickle=allow_pickle)
        run.events.close()
        run.remedies.close()
        world.leave()
        return result, world.is_first


def _judged(result: TrainResult, wish: "_Wish", recorder: MetricsRecorder) -> TrainResult:
    """Judge what was trained, as it lies on disk; a judgement that fails does not undo the training."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    began = time.perf_counter()
    model = wish.loaded.config.model or ""
    # A secret in the model's name is not written into the run, so the run does not know where its model is.
    base = wish.loaded.seen(model) if redact(model) != model else None
    options = ValidateOptions(device=wish.loaded.config.device, base=base, allow_pickle=wish.options.allow_pickle)
    try:
        found = validate(result.run, options=options, progress=recorder)
    except Exception as error:  # noqa: BLE001  the training is done and saved, whatever happens to the judging of it
        recorder.note(f"the model is trained and saved, but could not be judged: {type(error).__name__}: {error}")
        again = f"tunewell validate {shlex.quote(str(result.run))}"
        return replace(result, exit_code=result.exit_code or _NOT_JUDGED, next_command=again)
    seconds = time.perf_counter() - began
    return replace(
        result,
        validation=found,
        exit_code=result.exit_code or found.exit_code,
        seconds=result.seconds + seconds,
        stages={**result.stages, "judge": seconds},
        artefacts=[*result.artefacts, (str(found.page), "the verdict with its evidence, to read or to send")],
        next_command=found.report.next,
    )


class _timed:
    """Add the seconds spent inside to a stage."""

    def __init__(self, stages: dict[str, float], name: str) -> None:
        self._stages, self._name = stages, name

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._stages[self._name] = self._stages.get(self._name, 0.0) + time.perf_counter() - self._began


def _refuse_nothing(loaded: LoadedConfig, *, is_resuming: bool) -> None:
    """Say what is missing before a folder is made or anything is loaded."""
    config = loaded.config
    fix = "begin with `tunewell init DATA --model MODEL`, or add `--data` and `--model` to the command"
    if is_resuming and config.model is None:
        RunDir.require_run(loaded.path(config.run))
        fix = REPEAT_FIRST_COMMAND
    if not config.data.sources and not (loaded.path(config.corpus) / MANIFEST).is_file():
        raise UserError(
            f"there is nothing to train on: no data is named and there is no corpus `{config.corpus}`", fix=fix
        )
    if config.model is None:
        raise UserError("no model is named", fix=fix)
    place = loaded.path(config.model)
    for name, what in ((ADAPTER_CONFIG, "an adapter"), (PLAN, "a run")):
        if (place / name).is_file():
            quoted = shlex.quote(str(place))
            raise UserError(
                f"`{config.model}` is {what}, and training begins with a model",
                where=loaded.origin("model"),
                fix=f"make one of it with `tunewell export {quoted} --to merged --out NEW`, and train `NEW/merged`",
            )


def _warn(loaded: LoadedConfig, corpus: Corpus, run: Run, recorder: MetricsRecorder) -> None:
    """Say before the first step what will not work as it may be meant."""
    config = loaded.config
    if config.evaluate.patience is not None and not len(corpus.held_out):
        recorder.note("`evaluate.patience` has no effect: there are no held-out rows to look at")
    # Weights as they are saved, and the optimizer's two numbers for each.
    size = sum(3 * 4 * parameter.numel() for parameter in run.learner.parameters.values())
    folder = run.checkpoints.folder
    if warning := disk_space_warning(folder.parent, checkpoint_bytes=size, keep=config.checkpoints.keep):
        recorder.note(warning)


def _plan(loaded: LoadedConfig, corpus: Corpus, device: Any) -> tuple[Plan, DataOrder]:
    config = loaded.config
    assert config.model is not None
    facts = read_facts(loaded.seen(config.model))
    threads = None
    if device.kind == "cpu" and config.train.threads == "auto":
        threads = measure_threads(_shapes(facts))
    planned = PlanInputs(loaded, corpus.manifest, device, facts.num_parameters, threads)
    batch = choose_batch(planned)
    order = DataOrder(
        lengths=corpus.index["length"].astype("int64"),
        seed=config.seed,
        corpus_sha256=corpus.manifest.corpus_sha256,
        batch_tokens=batch.tokens.value,
        batch_documents=batch.documents.value,
    )
    num_steps = config.train.max_steps or order.num_steps(config.train.epochs)
    epochs = round(order.epochs_after(num_steps), 4)
    return plan_training(planned, batch=batch, num_steps=num_steps, epochs=epochs), order


def _shapes(facts: ModelFacts) -> list[tuple[int, int, int]]:
    """Give matrix products like the model's own, to measure threads by."""
    width = facts.hidden_size or 512
    return [(512, width, width), (512, width, 3 * width), (512, 3 * width, width)]


def _write_down(run_dir: RunDir, loaded: LoadedConfig, plan: Plan, corpus: Corpus, options: RunOptions) -> None:
    """Write what the run does, what was asked for, and what it learns from."""
    write_plan(run_dir.path, plan)
    _write_settings(run_dir, loaded, options)
    write_document_hashes(run_dir.path, corpus)


def _write_settings(run_dir: RunDir, loaded: LoadedConfig, options: RunOptions) -> None:
    """Write the settings down where they are not there already."""
    text = dump_config(loaded, options.argv)
    if not run_dir.config.is_file() or run_dir.config.read_text(encoding="utf-8") != text:
        run_dir.write(RUN_CONFIG, text)
