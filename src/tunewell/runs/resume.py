"""Resume a run from its newest valid checkpoint, with its first plan, after checking that nothing relevant changed."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.data.corpus.reader import Corpus
from tunewell.records.events import as_number, read_events
from tunewell.records.plan import Plan, read_plan
from tunewell.runs.folder import require_same_documents
from tunewell.runs.result import MetricsRecorder
from tunewell.training.build import CHANGE_NAMES
from tunewell.training.run import OPTIMIZER, Run, resume
from tunewell.training.saved_checkpoints import compare_identity, find_newest, load_state

_MEASURED = ("threads", "micro_batch_tokens", "compile")
"""Settings that a run measures on its machine and keeps on resume."""


def require_known_changes(allowed: Sequence[str], *, is_resuming: bool) -> None:
    """Raise UserError if a name after `--allow-change` is unknown, or if the run is not being resumed."""
    names = sorted(CHANGE_NAMES | set(_MEASURED))
    for name in allowed:
        if name not in names:
            close = get_close_matches(name, names, n=1)
            guess = f"did you mean `{close[0]}`? " if close else ""
            raise UserError(
                f"`{name}` is not a setting whose change can be allowed",
                where=f"--allow-change {name}",
                fix=f"{guess}known names: {', '.join(names)}",
            )
    if allowed and not is_resuming:
        raise UserError(
            "`--allow-change` works only together with `--resume`",
            where=f"--allow-change {allowed[0]}",
            fix="add `--resume` to resume the run in that folder, or leave out `--allow-change`",
        )


def keep_measured_settings(folder: Path, plan: Plan, allowed: Sequence[str], recorder: MetricsRecorder) -> Plan:
    """Return the plan with the measured settings of the run's first plan: other values would change the numbers."""
    before, settings = read_plan(folder), plan.config["train"]
    measured = [name for name in _MEASURED if settings[name] == "auto"]
    kept = {name: getattr(before, name) for name in measured if name not in allowed}
    if before.device.value != plan.device.value:
        recorder.note(f"the run was started on {before.device.value} and continues on {plan.device.value}")
        kept.pop("threads", None)
    return plan.model_copy(update=kept)


def restore_run(run: Run, folder: Path, allowed: Sequence[str], *, recorder: MetricsRecorder, corpus: Corpus) -> bool:
    """Restore a run from its newest valid checkpoint; return True if its plan must be written again.

    Raises UserError if a setting, the model or the data differs from the checkpoint and the change is not allowed.
    """
    saved = find_newest(folder / "checkpoints", on_trouble=recorder.note)
    if saved is None:
        recorder.note("there is no valid checkpoint yet: the run starts from step 0")
        for log in (run.events, run.samples):
            log.truncate_to(-1)
        return True
    state = load_state(saved, needs=[OPTIMIZER, *run.method.files(run.plan.model).tensors])
    if state.identity.get("data") != run.plan.corpus_sha256 and "data" not in allowed:
        require_same_documents(folder, corpus)
    changes = compare_identity(*_comparable(state.identity, run.identity, set(allowed)))
    for line in changes:
        recorder.note(f"changed on resume: {line}")
        recorder.changes.append(line)
        run.events.append({"kind": "change", "step": state.step, "change": line})
    resume(run, state)
    for event in read_events(run.events.path):
        if event["kind"] == "step" and event["supervised_tokens"]:
            recorder.losses.append((event["step"], as_number(event["loss"])))
        elif event["kind"] == "held_out":
            recorder.held_out.append((event["step"], as_number(event["loss"])))
    recorder.note(f"resumed after step {state.step}")
    return bool(changes)


def _comparable(
    before: dict[str, Any], now: dict[str, Any], allowed: set[str]
) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
    """Return both identities and the allowed changes, adjusted so that equal weights count as the same model."""
    before = {"optimizer": "adamw"} | before  # the only optimizer of 0.1.0, which did not record it
    if "weights" not in before:  # a checkpoint without a fingerprint of the weights
        return before, {name: value for name, value in now.items() if name != "weights"}, allowed
    if before["weights"] is not None and before["weights"] == now["weights"]:
        return before, now, allowed | {"model"}
    return before, now, allowed | {"weights"} if "model" in allowed else allowed
