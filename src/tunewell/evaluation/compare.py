"""Compare two reports: changed metrics and answers, and differences in settings and data."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tunewell.core.text import shorten
from tunewell.evaluation.intervals import compare_pair, difference_record
from tunewell.evaluation.measurements import cluster_numbers
from tunewell.records.events import plain
from tunewell.records.report import AnsweredQuestion, DifferenceRecord, Report

_MAX_CHANGES = 100
_HIGHER_IS_BETTER = ("right", "F1")


@dataclass(frozen=True)
class MetricPair:
    """The values of one metric in both runs; None if a run does not have the metric."""

    name: str
    other: float | None
    this: float | None
    is_lower_better: bool


@dataclass(frozen=True)
class AnswerChange:
    """A question that the two runs answer differently."""

    question: str
    reference: str
    other: str
    this: str
    other_right: bool | None
    this_right: bool | None


@dataclass(frozen=True)
class Difference:
    """A setting or a hash that differs."""

    name: str
    other: str
    this: str


@dataclass(frozen=True)
class Comparison:
    """The comparison of two runs."""

    this: str
    other: str
    verdicts: tuple[str, str]
    """Verdict of the other run, then of this run."""
    figures: list[MetricPair]
    num_both: int
    """Number of questions asked in both runs."""
    became_right: int
    became_wrong: int
    difference: DifferenceRecord | None = None
    """Share of right answers of this run minus that of the other run, on the questions asked in both."""
    changed: list[AnswerChange] = field(default_factory=list)
    """At most 100 answers; those that became right or wrong come first."""
    config: list[Difference] = field(default_factory=list)
    data: list[Difference] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the object that `validate --against --json` adds to its output."""
        found = asdict(self)
        return plain(found | {"difference": self.difference and self.difference.model_dump(mode="json")})


def compare(this: Report, other: Report, *, configs: tuple[Mapping[str, Any], Mapping[str, Any]]) -> Comparison:
    """Compare two reports; `configs` are the configs of this run and of the other run."""
    pairs = _pairs(this, other)
    became_right = [pair for pair in pairs if pair[1].tuned.right and not pair[0].tuned.right]
    became_wrong = [pair for pair in pairs if pair[0].tuned.right and not pair[1].tuned.right]
    unchanged = [pair for pair in pairs if pair[0].tuned.right == pair[1].tuned.right]
    reworded = [pair for pair in unchanged if pair[0].tuned.text != pair[1].tuned.text]
    return Comparison(
        this=this.subject.name,
        other=other.subject.name,
        verdicts=(other.verdict, this.verdict),
        figures=_figures(this, other),
        num_both=len(pairs),
        became_right=len(became_right),
        became_wrong=len(became_wrong),
        difference=_difference(pairs, (this.subject.name, other.subject.name)),
        changed=[_change(*pair) for pair in [*became_wrong, *became_right, *reworded][:_MAX_CHANGES]],
        config=differences(flat_settings(configs[0]), flat_settings(configs[1])),
        data=differences(data_facts(this), data_facts(other)),
    )


def _pairs(this: Report, other: Report) -> list[tuple[AnsweredQuestion, AnsweredQuestion]]:
    """Return the questions of both reports."""
    before = {question.question: question for question in other.exchanges}
    return [(before[own.question], own) for own in this.exchanges if own.question in before]


def _difference(
    pairs: list[tuple[AnsweredQuestion, AnsweredQuestion]], names: tuple[str, str]
) -> DifferenceRecord | None:
    judged = [(before, now) for before, now in pairs if None not in (before.tuned.right, now.tuned.right)]
    if not judged:
        return None
    this, other = ([bool(pair[side].tuned.right) for pair in judged] for side in (1, 0))
    clusters = cluster_numbers([now for _, now in judged])
    return difference_record(compare_pair(this, other, clusters, names=names))


def differences(this: Mapping[str, Any], other: Mapping[str, Any]) -> list[Difference]:
    """Return the entries that differ; a missing entry is shown as `nothing`."""
    names = [name for name in sorted(this.keys() | other.keys()) if this.get(name) != other.get(name)]
    return [Difference(name, _shown(other.get(name)), _shown(this.get(name))) for name in names]


def _figures(this: Report, other: Report) -> list[MetricPair]:
    now, before = report_metrics(this), report_metrics(other)
    pairs = [MetricPair(name, before[name], now[name], name not in _HIGHER_IS_BETTER) for name in now]
    return [pair for pair in pairs if pair.other is not None or pair.this is not None]


def report_metrics(report: Report) -> dict[str, float | None]:
    """Return the metrics of a report that are compared."""
    counts = report.tuned_tally
    num_faulty = sum(bool(question.tuned.faults) for question in report.exchanges)
    return {
        "held-out loss": report.held_out and report.held_out.tuned,
        "everyday loss": report.everyday and report.everyday.tuned,
        "right": counts.right / counts.judged if counts and counts.judged else None,
        "F1": counts and counts.f1,
        "faulty answers": num_faulty / counts.asked if counts and counts.asked else None,
    }


def _change(before: AnsweredQuestion, now: AnsweredQuestion) -> AnswerChange:
    return AnswerChange(
        now.question, now.reference, before.tuned.text, now.tuned.text, before.tuned.right, now.tuned.right
    )


def data_facts(report: Report) -> dict[str, Any]:
    """Return hashes and row counts of the data of a report."""
    data: dict[str, Any] = {name: digest for name, digest in report.hashes.items() if "safetensors" not in name}
    counts = report.ledger
    if counts is not None:
        data |= {"rows": counts.rows, "documents": counts.documents, "held out": counts.held_out}
        data |= {f"dropped: {name}": number for name, number in counts.dropped.items()}
        data |= {f"source {source['name']}": source["rows"] for source in counts.sources}
    return data


def flat_settings(tree: Mapping[str, Any], front: str = "") -> dict[str, Any]:
    """Return a config tree by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= flat_settings(value, f"{front}{key}.")
        else:
            found[f"{front}{key}"] = value
    return found


def _shown(value: Any) -> str:
    return "nothing" if value is None else shorten(str(value), 60)
