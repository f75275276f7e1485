"""Write the result files of a run: `outcome.json`, the loss curve `loss.svg` and the page `README.md`."""

from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import torch

from tunewell.config.extensions import METHODS
from tunewell.config.load import load_config
from tunewell.core.errors import UserError
from tunewell.core.files import write_atomic
from tunewell.core.html import render
from tunewell.core.plugins import used_plugins
from tunewell.core.redact import redact
from tunewell.data.corpus.reader import Corpus
from tunewell.model_files.files import WEIGHT_SUFFIXES
from tunewell.model_files.presets import is_preset
from tunewell.planning.memory import CONTEXT_BYTES
from tunewell.records.manifest import Manifest
from tunewell.records.plan import Chosen, Plan
from tunewell.records.prediction import Measurement
from tunewell.records.rundir import OUTCOME, RUN_CONFIG, Outcome, read_outcome, write_outcome
from tunewell.runs.loss_curve import write_loss_svg
from tunewell.runs.result import TrainResult, healing_summary
from tunewell.training.memory import peak_memory

PHASES = {
    "prepare": "prepare",
    "plan": "prepare",
    "load": "load",
    "check": "check",
    "train": "steps",
    "look": "evaluation",
    "save": "checkpoints",
    "judge": "verdict",
}
"""Stage of a run -> phase of a prediction."""


def write_run_files(
    result: TrainResult, plan: Plan, corpus: Corpus, *, num_rows: int | None, allow_pickle: bool
) -> None:
    """Write `loss.svg`, `outcome.json` and `README.md`. Add a note for a file that cannot be written.

    `num_rows` is the number of rows of the embedding, which changes if tokens were added.
    """
    if result.losses:
        path = result.run / "loss.svg"
        try:
            write_loss_svg(path, result.curve, title=redact(Path(plan.model).name))
            result.artefacts.append((str(path), "the loss curve"))
        except (UserError, OSError) as error:
            # The checkpoints are saved, so a missing picture does not fail the run.
            result.notes.append(f"could not write the loss curve: {error}")
    try:
        write_outcome(result.run, _outcome(result, plan))
        page = _readme(result, plan, corpus.manifest, num_rows=num_rows, allow_pickle=allow_pickle)
        write_atomic(result.run / "README.md", redact(page))
    except (UserError, OSError) as error:
        reason = error.what if isinstance(error, UserError) else error.strerror or error
        result.notes.append(f"could not write `{OUTCOME}` or the run's `README.md`: {reason}")


def _outcome(result: TrainResult, plan: Plan) -> Outcome:
    return Outcome(
        **result.outcome_fields(),
        made_by=plan.made_by,
        planned_steps=result.num_steps,
        best_step=result.best_step,
        seconds=result.seconds,
        artefacts={what: path for path, what in _artefacts(result)},
        plugins=used_plugins(),
        healing=healing_summary(result.healing),
        signal=result.signal,
        allowed_changes=result.changes,
        predicted=plan.prediction,
        measured=make_measurement(result, plan.device.value),
    )


def make_measurement(result: TrainResult, device: str) -> Measurement:
    """Return what a run needed since its last start: the peak of its process, and seconds by phase."""
    phases: defaultdict[str, float] = defaultdict(float)
    if result.start_seconds is not None:
        phases["start"] = result.start_seconds
    for stage, spent in result.stages.items():
        phases[PHASES.get(stage, stage)] += spent
    peak = result.peak_memory_bytes
    if peak is not None:  # that of another engine's process, or of this one with the verdict
        peak = max(peak, peak_memory(torch.device(device)) or 0)
    if device.startswith("cuda") and peak is not None:
        peak += CONTEXT_BYTES
    seconds = result.seconds + (result.start_seconds or 0.0)
    rounded = {name: round(spent, 3) for name, spent in phases.items()}
    return Measurement(peak_bytes=peak, seconds=round(seconds, 3), phases=rounded)


def update_outcome(result: TrainResult, device: str) -> TrainResult:
    """Write the verdict to `outcome.json`, and what the run needed with it. Return the result."""
    with suppress(OSError, UserError):  # the run is complete without it
        outcome = read_outcome(result.run)
        update = {
            "measured": make_measurement(result, device),
            "verdict": result.validation and result.validation.report.verdict,
        }
        write_outcome(result.run, outcome.model_copy(update=update))
    return result


def _artefacts(result: TrainResult) -> list[tuple[str, str]]:
    """Return the written files with paths relative to the run folder."""
    paths = [(Path(path), what) for path, what in result.artefacts]
    run = result.run
    return [((path.relative_to(run) if path.is_relative_to(run) else path).as_posix(), what) for path, what in paths]


def _readme(result: TrainResult, plan: Plan, manifest: Manifest, *, num_rows: int | None, allow_pickle: bool) -> str:
    """Return the README of a run. Every command on the page works in the run folder.

    If transformers can load the model, it shows the code for that, otherwise commands of tunewell.
    """
    artefacts = _artefacts(result)
    config = load_config(result.run / RUN_CONFIG).config
    model, is_adapter = config.model or "", METHODS.entry(plan.method.value).is_adapter
    page = render(
        "tunewell.runs",
        "README.md",
        result=result,
        plan=plan,
        manifest=manifest,
        artefacts=artefacts,
        checkpoint=next((repr(path) for path, _ in artefacts if "checkpoints" in path), None),
        is_adapter=is_adapter,
        unloadable=_why_unloadable(model) if is_adapter else None,
        base=_model_argument(model),
        quantized=plan.quantized.loading_argument if plan.quantized else "",
        num_added=len(manifest.tokenizer.added_by_us),
        num_rows=num_rows,
        tokenizer=repr((Path(config.corpus) / "tokenizer").as_posix()),
        flag=" --allow-pickle" if allow_pickle else "",
        settings=[(name, value) for name, value in plan if isinstance(value, Chosen)],
        healing=healing_summary(result.healing),
    )
    return page.rstrip() + "\n"


def _why_unloadable(model: str) -> str | None:
    """Return why only tunewell can load a model, or None if transformers can load it."""
    if is_preset(model):
        return f"`{model}` is created from random weights and has no files"
    if model.startswith(("package:", "ollama:")) or Path(model).suffix in WEIGHT_SUFFIXES:
        return f"`{model}` is not a folder that transformers can load"
    return None


def _model_argument(model: str) -> str:
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return f"{path.parent.as_posix()!r}, gguf_file={path.name!r}"
    return repr(path.as_posix() if model.startswith("~") else model)
