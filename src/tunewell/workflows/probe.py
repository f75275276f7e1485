"""The child process of `tunewell plan`: build the run in a temporary folder, take a few real steps, and report them.

`runs/probe.py` calls it. The engine, the model and the documents are those of the run.
"""

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tunewell.config.load import from_request
from tunewell.config.schema import Config
from tunewell.core.child import answer
from tunewell.core.progress import ProgressListener
from tunewell.data.batches import DataOrder
from tunewell.data.corpus.reader import Corpus, open_corpus
from tunewell.machine.device import measure_threads
from tunewell.machine.out_of_memory import OutOfMemory
from tunewell.planning.plan import plan_run
from tunewell.records.plan import Plan
from tunewell.runs.config import RunOptions
from tunewell.training.trial import take_probe_steps, with_values
from tunewell.workflows.train import Training
from tunewell.workflows.trial import trial_run

_ANSWERS, _ANSWER_TOKENS = 8, 16


def _probe(request: dict[str, Any], _: ProgressListener) -> dict[str, Any]:
    start_seconds = max(0.0, time.time() - request["started_at"])
    loaded = from_request(request)
    loaded = replace(loaded, config=_with_verdict_answers(loaded.config))
    options = RunOptions(owns_process=True)
    try:
        with trial_run(loaded, options, Path(request["folder"]), make_plan=_plan) as (training, corpus, run):
            report = take_probe_steps(run, corpus, request, time.perf_counter() + request["seconds"])
    except (OutOfMemory, torch.OutOfMemoryError, MemoryError) as error:
        return {"problem": f"out of memory: {str(error).splitlines()[0] if str(error) else 'no memory is left'}"}
    stages, threads = training.recorder.seconds, run.plan.threads
    return report | {
        "start": start_seconds + stages.get("plan", 0.0),
        "load": stages.get("load", 0.0),
        "check": stages.get("check", 0.0),
        "threads": asdict(threads),
    }


def _plan(training: Training) -> tuple[Corpus, Plan, DataOrder]:
    """Plan the run on the corpus that is there, with a learning rate of zero: every size then sees the same model."""
    corpus = open_corpus(training.loaded.path(training.loaded.config.corpus))
    plan, order = plan_run(training.loaded, corpus, training.device, measure_threads=measure_threads)
    return corpus, with_values(plan, "a probe", {"learning_rate": 0.0}), order


def _with_verdict_answers(config: Config) -> Config:
    """Return the config with more and shorter sample answers, which show how fast the verdict's answers are."""
    if not config.verdict.after_training:
        return config
    samples = max(config.evaluate.samples, min(config.verdict.questions, _ANSWERS))
    changes = {"samples": samples, "sample_tokens": min(config.evaluate.sample_tokens, _ANSWER_TOKENS)}
    return config.model_copy(update={"evaluate": config.evaluate.model_copy(update=changes)})


if __name__ == "__main__":
    answer(_probe)
