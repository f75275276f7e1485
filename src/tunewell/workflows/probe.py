"""The child process of `tunewell plan`: build the run in a temporary folder, take a few real steps, and report them.

`runs/probe.py` starts it with a JSON object on stdin, and reads one line of JSON from stdout. The engine, the model and
the documents are those of the run.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tunewell.config.load import LoadedConfig
from tunewell.config.schema import Config
from tunewell.core.errors import UserError
from tunewell.data.corpus.reader import open_corpus
from tunewell.machine.device import measure_threads
from tunewell.machine.out_of_memory import OutOfMemory
from tunewell.planning.plan import plan_run
from tunewell.records.plan import Chosen
from tunewell.runs.config import RunOptions
from tunewell.runs.folder import open_run_folder
from tunewell.training.probe import take_probe_steps
from tunewell.workflows.train import Training

RESULT = "RESULT "
_ANSWERS, _ANSWER_TOKENS = 8, 16


def main() -> None:
    """Read the request, take steps, and print the report."""
    request = json.loads(sys.stdin.read())
    try:
        report = _probe(request)
    except UserError as error:
        report = {"error": error.what, "where": error.where, "fix": error.fix, "is_refused": True}
    except (OutOfMemory, torch.OutOfMemoryError, MemoryError) as error:
        report = {"error": f"out of memory: {str(error).splitlines()[0] if str(error) else 'no memory is left'}"}
    sys.stdout.write(RESULT + json.dumps(report) + "\n")
    sys.stdout.flush()


def _probe(request: dict[str, Any]) -> dict[str, Any]:
    start_seconds = max(0.0, time.time() - request["started_at"])
    tree = request["config"] | {"run": str(Path(request["folder"]) / "run")}
    loaded = LoadedConfig(_with_verdict_answers(Config.model_validate(tree)), Path(request["base"]), None, {})
    options = RunOptions(owns_process=True, allow_pickle=request.get("allow_pickle", False))
    training = Training(loaded, options, lambda event: None, None)
    with open_run_folder(loaded, training.world, is_resuming=False) as folder:
        corpus = open_corpus(loaded.path(loaded.config.corpus))
        plan, order = plan_run(loaded, corpus, training.device, measure_threads=measure_threads)
        rate = Chosen[float](value=0.0, because="a probe")
        plan = plan.model_copy(update={"learning_rate": rate})
        with training.process_settings(plan):
            _, run = training.build(folder, corpus, plan, order)
            deadline = time.perf_counter() + request["seconds"]
            report = take_probe_steps(run, corpus, request, deadline)
        run.close()
    stages = training.recorder.seconds
    return report | {
        "start": start_seconds + stages.get("plan", 0.0),
        "load": stages.get("load", 0.0),
        "check": stages.get("check", 0.0),
        "threads": {"value": plan.threads.value, "because": plan.threads.because},
    }


def _with_verdict_answers(config: Config) -> Config:
    """Return the config with more and shorter sample answers, which show how fast the verdict's answers are."""
    if not config.verdict.after_training:
        return config
    samples = max(config.evaluate.samples, min(config.verdict.questions, _ANSWERS))
    changes = {"samples": samples, "sample_tokens": min(config.evaluate.sample_tokens, _ANSWER_TOKENS)}
    return config.model_copy(update={"evaluate": config.evaluate.model_copy(update=changes)})
