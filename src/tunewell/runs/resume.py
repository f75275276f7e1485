"""Go on with a run: as it was planned, from its newest whole checkpoint, and only where it is the same run."""

import hashlib
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tunewell.config.load import LoadedConfig
from tunewell.core.errors import UserError
from tunewell.core.files import write_atomic
from tunewell.core.units import count
from tunewell.data.corpus.reader import Corpus
from tunewell.records.events import as_number, read_events
from tunewell.records.plan import Plan, read_plan
from tunewell.records.rundir import DOCUMENTS
from tunewell.runs.result import MetricsRecorder
from tunewell.training.build import CHANGE_NAMES
from tunewell.training.engine import OPTIMIZER, Run, resume
from tunewell.training.saved_checkpoints import compare_identity, find_newest, load_state

# Tell which rows of a corpus differ from those that a run began with.

_SHOWN = 3
_Key = tuple[str, int, int]


def write_document_hashes(folder: Path, corpus: Corpus) -> None:
    """Write down a short hash of every document: source, row, piece, hash."""
    lines = ("\t".join(map(str, (*key, digest))) for key, digest in _digests(corpus))
    write_atomic(folder / DOCUMENTS, "\n".join(lines) + "\n")


def refuse_change(folder: Path, corpus: Corpus) -> None:
    """Raise UserError that says how many rows were added, are gone and were changed, and names some."""
    before, now = _read(folder), dict(_digests(corpus))
    added = [key for key in now if key not in before]
    gone = [key for key in before if key not in now]
    changed = [key for key, digest in now.items() if key in before and before[key] != digest]
    what = "the documents are not those the run began with"
    if before:
        what += f": {count(len(added))} added, {count(len(gone))} gone, {count(len(changed))} changed"
    named = [
        f"{kind} {_name(key)}"
        for kind, keys in (("new:", added), ("gone:", gone), ("changed:", changed))
        for key in keys
    ]
    raise UserError(
        what,
        where="; ".join(named[:_SHOWN]) or "their order or the settings they were made with",
        fix="put the rows back, begin a new run with `--out`, or go on with `--allow-change data`",
    )


def _digests(corpus: Corpus) -> Iterator[tuple[_Key, str]]:
    index, sources = corpus.index, [source.name for source in corpus.manifest.sources]
    seen: dict[tuple[str, int], int] = {}
    for document in range(len(corpus)):
        ids, labels = corpus.arrays(document)
        place = (sources[int(index["source"][document])], int(index["row"][document]))
        seen[place] = seen.get(place, -1) + 1
        yield (*place, seen[place]), hashlib.blake2b(ids.tobytes() + labels.tobytes(), digest_size=8).hexdigest()


def _read(folder: Path) -> dict[_Key, str]:
    try:
        lines = (folder / DOCUMENTS).read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    fields = [line.rsplit("\t", 3) for line in lines]
    return {(name, int(row), int(piece)): digest for name, row, piece, digest in fields}


def _name(key: _Key) -> str:
    source, row, _ = key
    return f"{source} row {row}"


_MEASURED = ("threads", "micro_batch_tokens", "compile")
"""What a run chooses by its machine, and keeps."""


def require_resume_for_changes(allowed: Sequence[str], *, is_resuming: bool) -> None:
    """Raise UserError for a change that cannot be allowed: nothing has that name, or no run goes on."""
    names = sorted(CHANGE_NAMES | set(_MEASURED))
    for name in allowed:
        if name not in names:
            close = get_close_matches(name, names, n=1)
            guess = f"did you mean `{close[0]}`? " if close else ""
            raise UserError(
                f"there is no `{name}` whose change could be allowed",
                where=f"--allow-change {name}",
                fix=f"{guess}there are: {', '.join(names)}",
            )
    if allowed and not is_resuming:
        raise UserError(
            "changes are allowed to a run that goes on, and this one begins",
            where=f"--allow-change {allowed[0]}",
            fix="add `--resume` to go on with the run in that folder, or leave out `--allow-change`",
        )


def plan_to_resume(folder: Path, plan: Plan, allowed: Sequence[str], recorder: MetricsRecorder) -> Plan:
    """Go on as the run began: what was measured then is not measured again, or the numbers would differ."""
    before, wishes = read_plan(folder), plan.config["train"]
    measured = [name for name in _MEASURED if wishes[name] == "auto"]
    same = {name: getattr(before, name) for name in measured if name not in allowed}
    if before.device.value != plan.device.value:
        recorder.note(f"the run began on {before.device.value} and goes on on {plan.device.value}")
        same.pop("threads", None)
    return plan.model_copy(update=same)


def restore_run(
    loaded: LoadedConfig, run: Run, allowed: Sequence[str], *, recorder: MetricsRecorder, corpus: Corpus
) -> bool:
    """Put a run back to its newest whole checkpoint; raise UserError where it would not be the same run.

    Says whether it now does something else than was written down when it began.
    """
    plan = run.plan
    folder = loaded.path(loaded.config.run) / "checkpoints"
    saved = find_newest(folder, on_trouble=recorder.note)
    if saved is None:
        recorder.note("there is no whole checkpoint yet: the run begins anew")
        for log in (run.events, run.samples):
            log.truncate_to(-1)
        return True
    state = load_state(saved, needs=[OPTIMIZER, *run.method.files(run.plan.model).tensors])
    if state.identity.get("data") != plan.corpus_sha256 and "data" not in allowed:
        refuse_change(folder.parent, corpus)
    changed = compare_identity(*_comparable(state.identity, run.identity, set(allowed)))
    for line in changed:
        recorder.note(f"changed on resume: {line}")
        recorder.changes.append(line)
        run.events.append({"kind": "change", "step": state.step, "change": line})
    resume(run, state)
    for event in read_events(run.events.path):
        if event["kind"] == "step" and event["supervised_tokens"]:
            recorder.losses.append((event["step"], as_number(event["loss"])))
        elif event["kind"] == "held_out":
            recorder.held_out.append((event["step"], as_number(event["loss"])))
    recorder.note(f"going on after step {state.step}")
    return bool(changed)


def _comparable(
    before: dict[str, Any], now: dict[str, Any], allowed: set[str]
) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
    """Make two identities comparable: the same weights may be elsewhere now, another model has other weights."""
    before = {"optimizer": "adamw"} | before  # the only one there was in 0.1.0, which did not write it down
    if "weights" not in before:  # written before there was a fingerprint
        return before, {name: value for name, value in now.items() if name != "weights"}, allowed
    if before["weights"] is not None and before["weights"] == now["weights"]:
        return before, now, allowed | {"model"}
    return before, now, allowed | {"weights"} if "model" in allowed else allowed
