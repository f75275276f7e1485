"""The run folder: open it on every rank, write plan, config and document hashes, and restore a run on resume."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tunewell.config.load import LoadedConfig
from tunewell.core.errors import UserError, close_names, did_you_mean
from tunewell.core.files import read_text, stable_json, write_atomic
from tunewell.core.units import count
from tunewell.data.corpus.reader import Corpus
from tunewell.models.base_content import content_changes, read_content
from tunewell.records.base import FileRecord
from tunewell.records.base_model import BASE, BaseContent, read_base
from tunewell.records.events import begins_as, read_events, read_losses
from tunewell.records.plan import Plan, read_plan, write_plan
from tunewell.records.rundir import DOCUMENTS, RUN_CONFIG, RunDir
from tunewell.runs.config import dump_config
from tunewell.runs.result import MetricsRecorder
from tunewell.training.build import CHANGE_NAMES, RunInputs
from tunewell.training.checkpoints import compare_identity
from tunewell.training.distributed import World
from tunewell.training.find_checkpoints import OPTIMIZER, find_newest
from tunewell.training.run import Run, has_same_optimizer, resume

_NUM_NAMED = 3


@dataclass(frozen=True)
class RunFolder:
    """The run folder, as used by one rank."""

    path: Path
    working_path: Path
    """The folder that this rank writes to: the run folder on rank 0, a temporary folder on other ranks."""
    run_dir: RunDir | None
    """Holds the lock on the run folder; None on ranks other than 0."""

    def write_plan(self, loaded: LoadedConfig, plan: Plan, corpus: Corpus, *, argv: Sequence[str] | None) -> None:
        """Write the plan, the config and the hash of every document."""
        if self.run_dir is not None:
            write_plan(self.path, plan)
            self.write_config(loaded, argv=argv)
            lines = (f"{key}\t{digest}\n" for key, digest in _document_hashes(corpus).items())
            write_atomic(self.path / DOCUMENTS, "".join(lines))

    def write_base(self, model: str) -> None:
        """Write the content of the base model, which later commands compare with the model's files."""
        if self.run_dir is not None:
            write_atomic(self.path / BASE, stable_json(read_content(model).model_dump()))

    def write_config(self, loaded: LoadedConfig, *, argv: Sequence[str] | None) -> None:
        """Write the config of the last start."""
        if self.run_dir is not None:
            self.run_dir.write(RUN_CONFIG, dump_config(loaded, argv))

    def keep(self) -> None:
        """Keep the folder even if the run fails from now on. Called before the first step."""
        if self.run_dir is not None:
            self.run_dir.keep()


@contextmanager
def open_run_folder(loaded: LoadedConfig, world: World, *, is_resuming: bool) -> Iterator[RunFolder]:
    """Create or reopen the run folder on rank 0, and yield it on every rank.

    Raises UserError on all ranks if the folder cannot be used, or if a rank exits inside the `with` block. A new folder
    is removed if the run fails with a UserError before its first step.
    """
    path, fix = loaded.path(loaded.config.run), "restart all processes"
    with world.explaining_lost_ranks(fix), ExitStack() as stack:
        with world.failing_together():
            if world.is_first:
                corpus = loaded.path(loaded.config.corpus)
                run_dir = RunDir.reopen(path) if is_resuming else RunDir.begin(path, corpus=corpus)
                folder = RunFolder(path, path, stack.enter_context(run_dir))
            else:
                working_path = Path(stack.enter_context(TemporaryDirectory(prefix="tunewell-process-")))
                folder = RunFolder(path, working_path, None)
        # Entered after the RunDir, which removes a new folder on UserError, so that a lost rank is a UserError there.
        stack.enter_context(world.explaining_lost_ranks(fix))
        yield folder


_OTHER_ROWS = "restore the rows, start a new run with `--out`, or resume with `--allow-change data`"
_NEW_MASKS = (
    "if the rows are the same, this version of tunewell supervises them in another way: resume with "
    "`--allow-change data`, or start a new run with `--out`. If not, restore the rows"
)


def require_same_documents(folder: Path, corpus: Corpus) -> None:
    """Raise a UserError that lists the documents added, removed or changed since the start of the run."""
    before, now = _read_document_hashes(folder), _document_hashes(corpus)
    differences = {
        "added": [key for key in now if key not in before],
        "removed": [key for key in before if key not in now],
        "changed": [key for key, digest in now.items() if before.get(key, digest) != digest],
    }
    what = "the documents differ from those at the start of the run"
    if before:
        what += ": " + ", ".join(f"{count(len(keys))} {kind}" for kind, keys in differences.items())
    places = [(kind, *key.rsplit("\t", 2)) for kind, keys in differences.items() for key in keys]
    named = [f"{kind}: {source} row {row}" for kind, source, row, _ in places[:_NUM_NAMED]]
    raise UserError(
        what,
        where="; ".join(named) or "the order of the documents or the settings of `prepare`",
        fix=_NEW_MASKS if places and not differences["added"] + differences["removed"] else _OTHER_ROWS,
    )


def _document_hashes(corpus: Corpus) -> dict[str, str]:
    """Return a hash of each document by source, row, and index within the row, separated by tabs."""
    index, sources = corpus.index, [source.name for source in corpus.manifest.sources]
    hashes: dict[str, str] = {}
    num_documents: Counter[str] = Counter()
    for document in range(len(corpus)):
        ids, labels = corpus.arrays(document)
        row = f"{sources[int(index['source'][document])]}\t{index['row'][document]}"
        digest = hashlib.blake2b(ids.tobytes() + labels.tobytes(), digest_size=8)
        hashes[f"{row}\t{num_documents[row]}"] = digest.hexdigest()
        num_documents[row] += 1
    return hashes


def _read_document_hashes(folder: Path) -> dict[str, str]:
    try:
        lines = read_text(folder / DOCUMENTS).splitlines()
    except OSError:
        return {}
    return {key: digest for key, _, digest in (line.rpartition("\t") for line in lines)}


# Resume a run from its newest valid checkpoint, after checking that no setting has changed.

_MEASURED = ("threads", "micro_batch_tokens", "compile")
"""Settings that a run chooses by measurement and keeps on resume."""
_DECIDED = {"max_steps": "num_steps", "epochs": "num_steps", "warmup": "warmup_steps"}
"""Keys of the config that decide a setting with another name."""


def require_known_changes(allowed: Sequence[str], *, is_resuming: bool) -> None:
    """Raise UserError if `--allow-change` has an unknown name or is used without `--resume`."""
    names = sorted(CHANGE_NAMES | set(_MEASURED))
    for name in allowed:
        if name not in names:
            key = name.rpartition(".")[2]
            own = _DECIDED.get(key, key)
            guess = did_you_mean(close_names(name, names), "")
            known = f"{guess} known names: {', '.join(names)}".strip()
            raise UserError(
                f"`{name}` cannot be changed when a run is resumed",
                where=f"--allow-change {name}",
                fix=f"write `--allow-change {own}`" if own in names else known,
            )
    if allowed and not is_resuming:
        raise UserError(
            "`--allow-change` works only together with `--resume`",
            where=f"--allow-change {allowed[0]}",
            fix="add `--resume` to resume the run in that folder, or leave out `--allow-change`",
        )


def keep_measured_settings(folder: Path, plan: Plan, allowed: Sequence[str], recorder: MetricsRecorder) -> Plan:
    """Return the plan with the measured settings of the first start, because new values would change the result."""
    before, settings = read_plan(folder), plan.config["train"]
    kept = {name: getattr(before, name) for name in _MEASURED if settings[name] == "auto" and name not in allowed}
    for name, section in (("evaluate_every", "evaluate"), ("save_every", "checkpoints")):
        if plan.config[section]["every_steps"] == "auto" and before.num_steps.value == plan.num_steps.value:
            kept[name] = getattr(before, name)
    if before.corpus_sha256 == plan.corpus_sha256:
        kept["answers"] = before.answers
    if plan.quantized is not None and before.quantized is not None and before.quantized.kind == plan.quantized.kind:
        kept["quantized"] = before.quantized
    if before.device.value != plan.device.value:
        recorder.note(f"the run was started on {before.device.value} and continues on {plan.device.value}")
        kept.pop("threads", None)
    return plan.model_copy(update=kept)


def restore_run(
    run: Run, folder: Path, allowed: Sequence[str], *, recorder: MetricsRecorder, inputs: RunInputs
) -> bool:
    """Restore a run from its newest valid checkpoint. Return True if the plan must be written again."""
    saved = find_newest(folder / "checkpoints", on_trouble=recorder.note)
    if saved is None:
        recorder.note("there is no valid checkpoint yet: the run starts from step 0")
        for log in (run.events, run.samples):
            log.truncate_to(-1)
        return True
    state = run.checkpoints.load(saved, needs=[OPTIMIZER, *run.method.files(run.plan.model).tensors])
    record = read_base(folder) or BaseContent()
    base, now = content_changes(inputs.model, record), run.identity
    if base and not {"model", "weights"} & {*allowed}:
        raise UserError(
            f"the base model `{inputs.model}` has changed since the run was started",
            where="; ".join(base),
            fix="restore the model, or allow the change: `--allow-change weights`",
        )
    if state.identity.get("data") != run.plan.corpus_sha256 and "data" not in allowed:
        require_same_documents(folder, inputs.corpus)
    if record.weights and not base:  # other files with the same tensors have another fingerprint
        now = now | {"weights": state.identity.get("weights")}
    changes = [*base, *compare_identity(state.identity, now, _may_change(state.identity, now, set(allowed)))]
    for line in changes:
        recorder.note(f"changed on resume: {line}")
        recorder.changes.append(line)
        run.events.append({"kind": "change", "step": state.step, "change": line})
    if not has_same_optimizer(run, state):
        recorder.note("the optimizer states start from zero: those of the checkpoint belong to another optimizer")
    resume(run, state)
    recorder.losses, recorder.held_out = read_losses(run.events.path)
    recorder.note(f"resumed after step {state.step}")
    num_logged = len({event["step"] for event in read_events(run.events.path) if event["kind"] == "step"})
    if num_logged < state.step:
        recorder.lacks_steps = True
        missing = state.step - num_logged
        recorder.note(f"`events.jsonl` lacks {missing:,} of {state.step:,} steps: the first loss of the run is unknown")
    elif (written := state.progress.get("events")) and not begins_as(run.events.path, FileRecord(**written)):
        recorder.note(
            f"`events.jsonl` was changed after step {state.step:,} was saved: its losses may not be those of the run; "
            "the weights are not affected"
        )
    return bool(changes)


def _may_change(before: dict[str, Any], now: dict[str, Any], allowed: set[str]) -> set[str]:
    """Return the allowed changes: a model with equal weights may have another name, an allowed one other weights."""
    if before["weights"] is not None and before["weights"] == now["weights"]:
        return allowed | {"model"}
    return allowed | {"weights"} if "model" in allowed else allowed
