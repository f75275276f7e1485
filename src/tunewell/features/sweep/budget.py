"""Search the best settings for some rows within a time, around the recommended ones.

Runs are judged by right answers on a slice of the training rows; the held-out rows stay unseen until the verdict.
"""

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from tunewell.config.load import LoadedConfig, as_sets, with_changes
from tunewell.core.errors import UserError
from tunewell.core.progress import ProgressListener
from tunewell.core.units import count, duration
from tunewell.data.corpus.reader import open_corpus
from tunewell.evaluation.intervals import LEVEL, compare_pair
from tunewell.features.sweep.sweep import Settings, SweepResult, SweepSpec, Trial, TrialResult, name_trials
from tunewell.planning.recommendation import RECOMMENDED, is_open, with_recommended
from tunewell.records.manifest import read_manifest, write_manifest
from tunewell.records.report import read_report
from tunewell.workflows.plan import PlanOptions, plan
from tunewell.workflows.prepare import prepare

_CHANGES = (("rate", 2.0), ("batch", 0.5), ("rate", 0.5), ("epochs", 2.0), ("rank", 2.0), ("batch", 2.0))
"""In the order in which they are tried: the rate decides most."""
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
    """Return the runs that a sweep with a budget tries: the recommended settings first, then others near them.

    Raises UserError if the budget is too short for two runs.
    """
    assert spec.budget is not None
    prepare(loaded, progress=progress)
    corpus = loaded.path(loaded.config.corpus)
    base = with_recommended(loaded, read_manifest(corpus))
    tried = [own for own in candidates(base) if own]
    seconds = [
        plan(with_settings(base, own), PlanOptions(is_measuring=False)).prediction.seconds.expected for own in tried
    ]
    if sum(seconds[:2]) > spec.budget:
        needed = f"one run takes about {duration(seconds[0])}, and two are the least"
        raise UserError(
            f"the budget of {duration(spec.budget)} is too short: {needed}", fix="give more time, or fewer rows"
        )
    trials = [replace(trial, seconds=own) for trial, own in zip(name_trials(tried), seconds, strict=True)]
    alternatives = {key: list(dict.fromkeys(own[key] for own in tried)) for key in tried[0]}
    return replace(spec, alternatives=alternatives, fixed=[*spec.fixed, *selection_sets(corpus, out)]), trials


def candidates(loaded: LoadedConfig) -> list[Settings]:
    """Return the settings of a config, then those that differ from them in one value."""
    first = {key: attrgetter(key)(loaded.config) for key in RECOMMENDED if not is_open(loaded.config, key)}
    first = {key: value for key, value in first.items() if key not in ("train.schedule", "train.warmup")}
    found = [first]
    for part, factor in _CHANGES:
        key = next((own for own in first if part in own), "")
        if key in loaded.reasons:  # not one that the user set
            value = first[key] * factor
            changed = {key: value if isinstance(first[key], float) else max(1, round(value))}
            found.append(first | changed | ({"method.alpha": 2 * changed[key]} if part == "rank" else {}))
    return [{key: f"{value}" for key, value in own.items()} for own in found]


def with_settings(loaded: LoadedConfig, settings: Settings) -> LoadedConfig:
    """Return a config with the settings of a run."""
    values = {key: type(attrgetter(key)(loaded.config))(value) for key, value in settings.items()}
    return replace(loaded, config=with_changes(loaded.config, values))


def selection_sets(corpus: Path, out: Path) -> list[str]:
    """Return the settings with which a run trains on the training rows of a corpus but a slice, which judges it.

    The rows that the corpus holds out are left out of the copy, so that no run and no choice has seen them.
    """
    rows = out / "rows"
    shutil.copytree(corpus, rows, ignore=lambda folder, names: {"held_out"} if folder == str(corpus) else set())
    manifest = read_manifest(corpus)
    files = {name: own for name, own in manifest.files.items() if not name.startswith("held_out/")}
    splits = {"train": manifest.splits["train"]}
    write_manifest(rows, manifest.model_copy(update={"files": files, "splits": splits, "held_out": 0}))
    share = min(max(_JUDGED / len(open_corpus(rows)), 0.1), 0.25)
    fixed = {"verdict.after_training": "true", "verdict.questions": f"{2 * _JUDGED}", "data.index": "null"}
    sets = [f"{key}={value}" for key, value in (fixed | {"data.held_out": f"{share:.3f}"}).items()]
    return [f'data.sources=["{rows.resolve()}"]', *sets, *as_sets(corpus=out / "corpus")]


def right_answers(run: str) -> dict[tuple[str, int], bool]:
    """Return which questions of the slice a run answered right; nothing if answers cannot be judged."""
    found = read_report(Path(run)).exchanges
    return {(own.source, own.row): own.tuned.right for own in found if own.tuned.right is not None}


def conclude_budget(result: SweepResult, trials: Sequence[Trial]) -> SweepResult:
    """Name the best settings by right answers, and whether they beat the recommended ones. Without answers: by loss."""
    runs = {one.name: one for one in result.runs if one.is_complete}
    answers = {name: right for name, one in runs.items() if (right := right_answers(one.run))}
    default = trials[0].name
    if default not in answers or len(answers) < 2:
        return result
    scored = {name: replace(runs[name], right=sum(own.values()), judged=len(own)) for name, own in answers.items()}

    def order(one: TrialResult) -> tuple[float, float]:
        return -(one.right or 0), one.held_out or 0.0

    best = min((one for name, one in scored.items() if name != default), key=order)
    asked = sorted(answers[default].keys() & answers[best.name].keys())
    pairs = [[answers[name][key] for key in asked] for name in (best.name, default)]
    found = compare_pair(pairs[0], pairs[1], range(len(asked)))
    # The best of several is compared, so each has its part of the level (Bonferroni).
    is_better = found.difference > 0 and found.p * (len(answers) - 1) <= LEVEL
    own, others = scored[default], count(len(answers) - 1, "other")
    interval = f"difference {100 * found.low:+.0f} to {100 * found.high:+.0f} points"
    told = f"{best.right} of {best.judged} right against {own.right} of the recommended settings ({interval})"
    conclusion = f"better than the recommended settings: {told}"
    if not is_better:
        conclusion = f"the recommended settings are not beaten: the best of {others} has {told}"
    rest = [one for one in result.runs if one.name not in scored]
    chosen = best if is_better else own
    words = [f"--set {key}={value}" for key, value in chosen.settings.items() if value != own.settings[key]]
    return replace(
        result,
        runs=[*sorted(scored.values(), key=order), *rest],
        best=chosen,
        margin=None,
        interval=None,
        conclusion=conclusion,
        next_command=" ".join(["tunewell train", *words]),
    )
