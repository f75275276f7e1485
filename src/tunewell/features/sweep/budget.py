"""Search the best settings for some rows within a time, around the recommended ones.

Runs are judged by right answers on a slice of the training rows; the held-out rows stay unseen until the verdict.
"""

import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from tunewell.config.load import LoadedConfig, as_sets, with_changes
from tunewell.core.errors import UserError
from tunewell.core.progress import ProgressListener
from tunewell.core.units import count, duration
from tunewell.evaluation.intervals import LEVEL, compare_pair
from tunewell.features.sweep.sweep import SweepResult, SweepSpec, Trial, TrialResult, name_trials
from tunewell.planning.recommendation import RECOMMENDED, is_open, with_recommended
from tunewell.records.manifest import read_manifest, write_manifest
from tunewell.records.report import read_report
from tunewell.workflows.plan import PlanOptions, plan
from tunewell.workflows.prepare import prepare

_CHANGES = (("rate", 2.0), ("batch", 0.5), ("rate", 0.5), ("epochs", 2.0), ("rank", 2.0), ("batch", 2.0))
"""In the order in which they are tried: the rate decides most."""
_FIXED = ("train.schedule", "train.warmup")
_UNITS = {"s": 1, "m": 60, "h": 3600}
_JUDGED = 100
"""Rows of the slice, if they are between a tenth and a quarter of the training rows."""


def parse_budget(text: str) -> float:
    """Return the seconds of `90s`, `10m` or `1.5h`; raise UserError for anything else."""
    if not (found := re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)) or not float(found[1]):
        raise UserError(f"`--budget {text}` is not a time", fix="write it like `10m`, `90s` or `1.5h`")
    return float(found[1]) * _UNITS[found[2]]


def budgeted(
    spec: SweepSpec, loaded: LoadedConfig, out: Path, progress: ProgressListener
) -> tuple[SweepSpec, list[Trial]]:
    """Return the runs that a sweep with a budget tries: the settings of `train` first, then others near them.

    Raises UserError if the budget is too short for two runs.
    """
    manifest, corpus = prepare(loaded, progress=progress).manifest, loaded.path(loaded.config.corpus)
    base, trials = with_recommended(loaded, manifest), list[Trial]()
    tried = candidates(base)
    for trial in name_trials([{key: str(value) for key, value in own.items()} for own in tried]):
        own = replace(base, config=with_changes(base.config, tried[len(trials)]))
        seconds = plan(own, PlanOptions(is_measuring=False)).prediction.seconds.expected
        trials.append(replace(trial, seconds=seconds))
    if (needed := sum(trial.seconds for trial in trials[:2])) > (spec.budget or 0.0):
        fix = f"two runs take about {duration(needed)}: give more time, or fewer rows"
        raise UserError(f"the budget of {duration(spec.budget or 0.0)} is too short", fix=fix)
    alternatives = {key: list(dict.fromkeys(own.settings[key] for own in trials)) for key in trials[0].settings}
    return replace(spec, alternatives=alternatives, judged_with=selection_sets(corpus, out)), trials


def candidates(loaded: LoadedConfig) -> list[dict[str, Any]]:
    """Return the settings of a config, then those that differ in one value. Values of `--set` stay."""
    keys = [key for key in RECOMMENDED if not is_open(loaded.config, key) and key not in _FIXED]
    first = {key: attrgetter(key)(loaded.config) for key in keys}
    found = [first]
    for part, factor in _CHANGES:
        key = next(own for own in keys if part in own)
        if not loaded.origin(key).startswith("--"):
            value = first[key] * factor if isinstance(first[key], float) else max(1, round(first[key] * factor))
            found.append(first | {key: value} | ({"method.alpha": 2 * value} if part == "rank" else {}))
    return [own for index, own in enumerate(found) if own not in found[:index]]


def selection_sets(corpus: Path, out: Path) -> list[str]:
    """Return the settings with which a run trains on the training rows of a corpus but a slice, which judges it.

    The rows that the corpus holds out are left out of the copy, so that no run and no choice has seen them.
    """
    rows, manifest = out / "rows", read_manifest(corpus)
    shutil.copytree(corpus, rows, ignore=lambda folder, names: {"held_out", "selection"} & {*names})
    files = {name: own for name, own in manifest.files.items() if not name.startswith(("held_out/", "selection/"))}
    splits = {"train": manifest.splits["train"]}
    write_manifest(rows, manifest.model_copy(update={"files": files, "splits": splits, "held_out": 0, "selected": 0}))
    share = min(max(_JUDGED / splits["train"].documents, 0.1), 0.25)
    held_out = f"{share:.3f}" if splits["train"].documents >= _JUDGED else "auto"  # chance may choose two of a few
    sets = as_sets(corpus=out / "corpus", **{"data.sources": rows.resolve()})
    sets += [f"data.held_out={held_out}", "data.selection=0"]
    return [*sets, f"verdict={{after_training: true, questions: {2 * _JUDGED}}}"]


def right_answers(run: str) -> dict[tuple[str, int], bool]:
    """Return which questions of the slice a run answered right; nothing if answers cannot be judged."""
    found = read_report(Path(run)).exchanges
    return {(own.source, own.row): own.tuned.right for own in found if own.tuned.right is not None}


def conclude_budget(result: SweepResult, spec: SweepSpec, trials: Sequence[Trial]) -> SweepResult:
    """Name the best settings by right answers, and whether they beat those of `train`. Without answers: by the loss."""
    answers = {one.name: right_answers(one.run) for one in result.runs if one.is_complete}
    judged = [
        replace(one, right=sum(own.values()), judged=len(own)) for one in result.runs if (own := answers.get(one.name))
    ]
    default, others = None, list[TrialResult]()
    for one in sorted(judged, key=lambda one: -(one.right or 0)):
        default, others = (one, others) if one.name == trials[0].name else (default, [*others, one])
    if default is None or not others:
        return result
    best, known = others[0], answers[default.name]
    own = [answers[best.name].get(key, False) for key in known]
    found = compare_pair(own, list(known.values()), range(len(known)))
    # The best of several is compared, so each has its part of the level (Bonferroni).
    is_better = found.difference > 0 and found.p * len(others) <= LEVEL
    conclusion = "better than the settings of `train`" if is_better else "the settings of `train` are not beaten"
    told = (
        f"{best.right} of {best.judged} right with the best of {count(len(others), 'other')}, {default.right} with them"
    )
    conclusion += f": {told}; difference {100 * found.low:+.0f} to {100 * found.high:+.0f} points"
    if found.low > 0 and not is_better:
        conclusion += f", which the best of {count(len(others))} may reach by chance"
    chosen = best if is_better else default
    sets = [f"{key}={value}" for key, value in chosen.settings.items() if value != default.settings[key]]
    given = {"--config": [spec.config], "--model": [spec.model], "--data": spec.data, "--set": [*spec.fixed, *sets]}
    words = [part for name, values in given.items() for value in values if value for part in (name, value)]
    command = shlex.join(["tunewell", "train", *words])
    rest = [one for one in result.runs if one.name not in {own.name for own in judged}]
    runs = [*sorted(judged, key=lambda one: -(one.right or 0)), *rest]
    return replace(result, runs=runs, best=chosen, margin=None, conclusion=conclusion, next_command=command)
