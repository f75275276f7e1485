"""What the screens show, read from the records of runs. Nothing here changes anything."""

import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tunewell.core.files import read_bytes
from tunewell.core.version import made_by
from tunewell.evaluation.report import view as shown
from tunewell.features.watch import actions
from tunewell.features.watch.errors import WatchError
from tunewell.features.watch.folder import MAX_UPLOAD_BYTES, MAX_UPLOAD_FILES
from tunewell.features.watch.jobs import text_of
from tunewell.features.watch.watched import Watched
from tunewell.machine.machine import read_machine
from tunewell.records.events import parse_object, plain
from tunewell.records.healing import HEALING
from tunewell.records.plan import PLAN
from tunewell.records.report import HEADLINES, PAGE, REPORT, Report, read_report
from tunewell.records.rundir import CRASH, OUTCOME, RUN_CONFIG
from tunewell.runs.follow import LogPosition, end_of
from tunewell.runs.state import EVENTS, StoredRun, require_column, sorted_runs, value_in
from tunewell.runs.status import RunStatus

SAMPLES = "samples.jsonl"
LOGS = (EVENTS, HEALING, SAMPLES)
"""The logs of a run in the order of their positions in the id of an event; the log of its job follows."""
_CURVE = ("step", "loss", "grad_norm", "learning_rate", "memory_bytes", "seconds", "tokens", "epoch", "was_skipped")
_SEARCHED = ("run", "model", "data", "status", "verdict", "method")
_MAX_POINTS = 20_000
_COMMAND = re.compile(r"`(tunewell (?P<action>[a-z-]+)[^`]*)`")
Query = Mapping[str, str]


def number(query: Query, name: str, default: int, most: int = 1 << 53) -> int:
    """Return a whole number of a request."""
    try:
        return max(0, min(int(query.get(name, default)), most))
    except ValueError:
        raise WatchError("refused", f"`{name}` is not a whole number") from None


def session(watched: Watched, query: Query) -> dict[str, Any]:
    """Return what the page must know before it shows anything."""
    from tunewell.planning.first_config import RECIPES

    return {
        "version": made_by(),
        "folder": str(watched.root),
        "name": watched.root.name,
        "is_read_only": watched.is_read_only,
        "features": watched.features,
        "limits": {"upload_bytes": MAX_UPLOAD_BYTES, "upload_files": MAX_UPLOAD_FILES},
        "methods": [{"name": name, "about": recipe.about} for name, recipe in RECIPES.items()],
        "machine": {"device": read_machine().device("auto").label},
    }


def row_of(watched: Watched, run: StoredRun) -> dict[str, Any]:
    """Return a run as the list shows it."""
    row, name = run.as_json(), watched.folder.name_of(run.folder)
    row |= {"id": name, "run": name, "access_words": actions.obstacle(run)}
    if run.status == "unreadable" and not run.folder.is_dir() and (job := watched.jobs.newest_of(name)):
        row["status"] = "starting" if job["status"] == "running" else "failed"
        row["note"] = (job["error"] or {}).get("what") or job["words"]
    return row


def runs(watched: Watched, query: Query) -> dict[str, Any]:
    """Return the runs of the folder, sorted and searched. Only those that are shown are read as a whole."""
    found = watched.stored_runs()
    sort, wanted = query.get("sort", "when"), query.get("search", "").casefold()
    require_column(sort, "sort")
    kept = [
        run
        for run in found.values()
        if (not wanted or any(wanted in str(getattr(run, name) or "").casefold() for name in _SEARCHED))
        and query.get("status", "") in ("", run.status)
    ]
    shown = sorted_runs(kept, sort, is_reversed=False)[: number(query, "limit", 200, 1000)]
    return {
        "command": f"tunewell runs --sort {sort}",
        "total": len(found),
        "found": len(kept),
        "counts": Counter(run.status for run in found.values()),
        "runs": [row_of(watched, run) for run in shown],
    }


def run(watched: Watched, query: Query) -> dict[str, Any]:
    """Return everything about one run but its curve."""
    folder = watched.asked(query)
    found = RunStatus(folder, is_quick=True)
    plan = [
        {"key": key, **value}
        for key, value in found.plan.items()
        if isinstance(value, dict) and value.keys() == {"value", "because"}
    ]
    return run_state(watched, found) | {"plan": plan, "config": text_of(folder / RUN_CONFIG)}


def run_state(watched: Watched, found: RunStatus) -> dict[str, Any]:
    """Return what changes while a run works."""
    name, folder, ended = watched.folder.name_of(found.folder), found.folder, found.ended
    records = {PLAN: found.plan, OUTCOME: found.outcome}
    return row_of(watched, found) | {
        "command": shlex.join(["tunewell", "runs", name]),
        "seconds_left": found.seconds_left,
        "elapsed": found.seconds,
        "crash": text_of(folder / CRASH),
        "healing_lines": ended.get("healing", []),
        "advice": ended.get("advice", []),
        "job": watched.jobs.newest_of(name),
        "has_report": found.has_report,
        "problems": [f"`{file}` is damaged" for file, own in records.items() if not own and (folder / file).is_file()],
        "actions": actions.possible(watched, found),
    }


def with_speed(event: dict[str, Any]) -> dict[str, Any]:
    """Return a step with its speed."""
    tokens, seconds = value_in(event, "tokens"), value_in(event, "seconds")
    return event | {"tokens_per_second": tokens / seconds if tokens is not None and seconds else None}


def curve(watched: Watched, query: Query) -> dict[str, Any]:
    """Return the steps that draw the curve of a run, its evaluations and what health did."""
    folder = watched.asked(query)
    index, guard = watched.index(folder)
    with guard:
        index.update()
        chosen = index.chosen(number(query, "points", 1500, _MAX_POINTS))
        steps = [with_speed(event) for event in index.events(chosen)]
        positions = [index.position, *(end_of(folder / name) for name in LOGS[1:])]
        facts = {"num_steps": len(index.steps), "num_damaged": index.num_damaged, "held_out": list(index.held_out)}
    return facts | {
        "cursor": cursor_of(positions),
        "is_reduced": len(chosen) < facts["num_steps"],
        "columns": {name: [own.get(name) for own in steps] for name in (*_CURVE, "tokens_per_second")},
        "healing": lines_of(folder / HEALING),
    }


def cursor_of(positions: list[LogPosition]) -> str:
    """Return the id of an event: the positions in all logs."""
    return "_".join(map(str, positions))


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a short log. Damaged lines are left out."""
    try:
        lines = read_bytes(path).split(b"\n")
    except OSError:
        return []
    return [event for line in lines if (event := parse_object(line)) is not None]


def samples(watched: Watched, query: Query) -> dict[str, Any]:
    """Return the sample answers; those of step 0 are from before training."""
    return {"rows": lines_of(watched.asked(query) / SAMPLES)}


def log_path(watched: Watched, run: Path) -> Path | None:
    """Return the file with what the newest job of a run told people."""
    job = watched.jobs.newest_of(watched.folder.name_of(run), ("train", "resume", "validate"))
    return watched.jobs.path(job["id"]) / "err" if job else None


def log(watched: Watched, query: Query) -> dict[str, Any]:
    """Return the end of a log."""
    path = log_path(watched, watched.asked(query))
    if path is None:
        return {"text": "", "where": "this run was started in a terminal, which has its log"}
    return {"text": text_of(path) or "", "cursor": str(end_of(path)), "where": path.parent.name}


# The verdict.

_KINDS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "wrong": lambda own: own["tuned"]["right"] is False,
    "right": lambda own: own["tuned"]["right"] is True,
    "unjudged": lambda own: own["tuned"]["right"] is None,
    "faulty": lambda own: bool(own["tuned"]["faults"]),
    "changed": lambda own: own["base"] is not None and own["base"]["text"] != own["tuned"]["text"],
    "lost": lambda own: own["base"] is not None and own["base"]["right"] is True and own["tuned"]["right"] is False,
}
_ORDER = {False: 0, None: 1, True: 2}


def _report(watched: Watched, folder: Path) -> Report:
    if not (folder / REPORT).is_file():
        name = watched.folder.name_of(folder)
        fix = f"`tunewell validate {shlex.quote(name)}` tests the model"
        raise WatchError("not_found", f"the run `{name}` has no verdict yet", fix=fix)
    return read_report(folder)


def _as_shown(report: Report) -> dict[str, Any]:
    """Return the figures of a report as its page shows them, so that both say the same."""
    return {
        "title": shown.title(report),
        "key_metrics": list(map(asdict, shown.key_metrics(report))),
        "metrics": list(map(asdict, shown.all_metrics(report))),
        "source_metrics": [asdict(row) for _, row in shown.source_metrics(report)],
        "judge_sentences": shown.judge_sentences(report),
        "fields": shown.field_rows(report),
        "fault_words": shown.FAULT_WORDS,
    }


def report(watched: Watched, query: Query) -> dict[str, Any]:
    """Return the report without its answers, and what to do next."""
    folder = watched.asked(query)
    record = _report(watched, folder)
    found = plain(record.model_dump(exclude={"curve"}))
    answers = found.pop("exchanges")
    counts = {kind: sum(map(is_one, answers)) for kind, is_one in _KINDS.items()} | {"all": len(answers)}
    words = [*(reason["next"] for reason in found["reasons"]), found["next"]]
    trained = StoredRun(folder).outcome
    return found | {
        "view": _as_shown(record),
        "exchanges_counts": counts,
        "headline": HEADLINES[found["verdict"]],
        "has_page": (folder / PAGE).is_file(),
        "command": shlex.join(["tunewell", "validate", watched.folder.name_of(folder)]),
        "next_steps": [_next_step(watched, folder, text) for text in dict.fromkeys(words) if text],
        "is_stale": bool(trained)
        and value_in(trained, "steps", kind=int) != value_in(found, "subject", "step", kind=int)
        and (folder / OUTCOME).stat().st_mtime > (folder / REPORT).stat().st_mtime,
    }


def _next_step(watched: Watched, folder: Path, words: str) -> dict[str, Any]:
    """Return a next step with its command, which is that of the button if there is one."""
    if not (command := _COMMAND.search(words)):
        return {"words": words, "command": None}
    action = "resume" if "--resume" in command[1] else command["action"]
    known = {own["id"]: own["command"] for own in actions.possible(watched, StoredRun(folder))}
    return {"words": words, "command": known.get(action, command[1])}


def answers(watched: Watched, query: Query) -> dict[str, Any]:
    """Return some answers of the report, wrong ones first."""
    found = plain(_report(watched, watched.asked(query)).model_dump(include={"exchanges"}))
    kind, wanted = query.get("kind", "all"), query.get("search", "").casefold()
    is_one = _KINDS.get(kind, lambda own: True)
    rows = [
        own
        for own in found["exchanges"]
        if is_one(own) and wanted in f"{own['question']}\n{own['reference']}\n{own['tuned']['text']}".casefold()
    ]
    rows.sort(key=lambda own: _ORDER[own["tuned"]["right"]])
    return {"total": len(rows), "answers": rows[: number(query, "limit", 50, 500)]}
