"""Compare several runs or models as columns: each has a name and answers to the same questions.

A column of a run also has settings, data, a curve, speed and memory. `compare_columns` needs only the answers, so that
other kinds of columns can be added.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from typing import Any

from tunewell.evaluation.intervals import LEVEL, Difference, compare_pair, holm, share_interval
from tunewell.evaluation.measurements import cluster_numbers
from tunewell.records.events import plain
from tunewell.records.report import Report
from tunewell.runs.loss_curve import Line

MAX_CHANGES = 100
_NOT_COMPARED = ("run", "corpus", "track", "track_python")  # older runs have the last one


@dataclass(frozen=True)
class ColumnAnswer:
    """The answer of one column to one question."""

    text: str
    right: bool | None
    f1: float = 0.0
    refused: bool = False
    """Whether the answer is a refusal, or the search refused the question."""
    has_passage: bool | None = None
    """Whether a passage with the answer was in the prompt; None without an index, or if it is unknown."""


@dataclass(frozen=True)
class Column:
    """One run or model in a comparison, with or without an index."""

    name: str
    answers: Mapping[Hashable, ColumnAnswer] = field(default_factory=dict)
    """Key of a question -> answer. Questions with the same key in two columns are the same question."""
    questions: Mapping[Hashable, tuple[str, str]] = field(default_factory=dict)
    """Key of a question -> its text and reference."""
    clusters: Mapping[Hashable, int] = field(default_factory=dict)
    """Key of a question -> number of its cluster; without one, each question is its own."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    verdict: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    line: Line | None = None
    resources: Mapping[str, float | None] = field(default_factory=dict)
    """Speed, time and memory, by name with its unit."""
    invented: tuple[int, int] | None = None
    """Number of invented answers, and number of questions whose passages were removed from the index."""
    needs: frozenset[str] = frozenset()
    """What the column needs besides the base model: `training`, `index`."""


def column_of(report: Report, name: str, *, settings: Mapping[str, Any], **more: Any) -> Column:
    """Return the column of an evaluated run; `settings` is the config tree of the run."""
    keys = [(one.question, one.reference) for one in report.exchanges]
    return Column(
        name=name,
        answers={
            key: ColumnAnswer(one.tuned.text, one.tuned.right, one.tuned.f1, one.tuned.is_refusal)
            for key, one in zip(keys, report.exchanges, strict=True)
        },
        questions={key: key for key in keys},
        clusters=dict(zip(keys, cluster_numbers(report.exchanges), strict=True)),
        metrics=_metrics(report),
        verdict=report.verdict,
        settings=flat_settings({key: value for key, value in settings.items() if key not in _NOT_COMPARED}),
        data=_data_facts(report),
        **more,
    )


def _metrics(report: Report) -> dict[str, float | None]:
    found = {
        "held-out loss": report.held_out and report.held_out.tuned,
        "everyday loss": report.everyday and report.everyday.tuned,
    }
    if (counts := report.tuned_tally) is not None:
        num_faulty = sum(bool(question.tuned.faults) for question in report.exchanges)
        found["right"] = counts.right / counts.judged if counts.judged else None
        found |= {"F1": counts.f1, "faulty answers": num_faulty / counts.asked if counts.asked else None}
    return found


def _data_facts(report: Report) -> dict[str, Any]:
    """Return hashes and row counts of the data of a report."""
    data: dict[str, Any] = {name: digest for name, digest in report.hashes.items() if "safetensors" not in name}
    if (counts := report.ledger) is not None:
        data |= {"rows": counts.rows, "documents": counts.documents, "held out": counts.held_out}
        data |= {f"dropped: {name}": number for name, number in counts.dropped.items()}
        data |= {f"source {source['name']}": source["rows"] for source in counts.sources}
    return data


def flat_settings(tree: Mapping[str, Any], front: str = "") -> dict[str, Any]:
    """Return a config tree by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{front}{key}"
        found |= flat_settings(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return found


@dataclass(frozen=True)
class Row:
    """One line of a comparison: a value for each column; None if a column does not have it."""

    name: str
    values: list[Any]


@dataclass(frozen=True)
class ColumnCounts:
    """The answers of one column to the common questions that can be judged: right + wrong + refused = judged."""

    judged: int = 0
    right: int = 0
    wrong: int = 0
    refused: int = 0
    low: float = 0.0
    high: float = 1.0
    """95% interval of the share of right answers. Questions on one fact count as one observation."""
    search_misses: int | None = None
    """Number of answers that are not right, without the answer in a passage of the prompt; None without an index."""
    reading_misses: int | None = None
    """Number of answers that are not right, although a passage in the prompt contained the answer."""
    invented: int | None = None
    num_removed: int | None = None
    """Number of questions that were asked again with their passages removed from the index."""

    @property
    def share(self) -> float:
        """The share of right answers."""
        return self.right / self.judged if self.judged else 0.0


@dataclass(frozen=True)
class ChangedAnswer:
    """A question that the columns do not answer alike."""

    question: str
    reference: str
    answers: list[str]
    right: list[bool | None]
    refused: list[bool]

    @property
    def marks(self) -> list[str]:
        """`right`, `wrong`, `refused` or, if it is not judged, an empty text for each answer."""
        return [
            "" if is_right is None else "right" if is_right else "refused" if is_refused else "wrong"
            for is_right, is_refused in zip(self.right, self.refused, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class ColumnDifference(Difference):
    """How much more often the second column is right than the first, on the questions that both were asked."""

    became_right: int
    became_wrong: int


@dataclass(frozen=True)
class Recommendation:
    """Which column to use, and why."""

    column: str | None
    """None if no column can be recommended."""
    because: str


@dataclass(frozen=True)
class UsedKey:
    """The answer key of one question, and how it was derived."""

    question: str
    key: str
    because: str


@dataclass(frozen=True)
class ColumnComparison:
    """The comparison of several columns. Only settings and data that differ are listed."""

    names: list[str]
    verdicts: list[str]
    metrics: list[Row]
    settings: list[Row]
    data: list[Row]
    resources: list[Row]
    num_common: int
    """Number of questions that all columns were asked."""
    differences: list[ColumnDifference]
    """Each later column against the first, or all pairs."""
    changed: list[ChangedAnswer]
    """At most 100; those that not all columns answer right, or wrong, come first."""
    num_changed: int
    lines: list[Line] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counts: list[ColumnCounts] = field(default_factory=list)
    needs: list[list[str]] = field(default_factory=list)
    """What each column needs besides the base model: `training`, `index`."""
    recommendation: Recommendation | None = None
    keys: list[UsedKey] = field(default_factory=list)
    """The answer keys of some questions."""
    rows: str = ""
    """The rows from which the questions are: `held-out rows of support.jsonl`."""
    made_at: str = ""

    @property
    def best(self) -> int:
        """The recommended column, or the one with the most right answers."""
        column = self.recommendation and self.recommendation.column
        return max(range(len(self.names)), key=lambda index: (self.names[index] == column, self.counts[index].right))

    @property
    def wrong_first(self) -> list[ChangedAnswer]:
        """The changed answers, first those that the best column does not answer right."""
        return sorted(self.changed, key=lambda change: change.right[self.best] is not False)

    def as_json(self) -> dict[str, Any]:
        """Return the object that `compare --json` prints."""
        return plain(asdict(self))


def compare_columns(
    columns: Sequence[Column], notes: Sequence[str] = (), *, has_all_pairs: bool = False
) -> ColumnComparison:
    """Compare columns by the questions that all of them were asked, and by what they have in common.

    Each later column is compared with the first; with `has_all_pairs`, all pairs are compared.
    """
    rows = {
        key: [column.answers[key] for column in columns]
        for key in columns[0].answers
        if all(key in column.answers for column in columns)
    }
    common = list(rows)
    changed = [key for key in common if len({one.text for one in rows[key]}) > 1]
    changed.sort(key=lambda key: len({one.right for one in rows[key]}) == 1)
    pairs = list(combinations(columns, 2)) if has_all_pairs else [(columns[0], column) for column in columns[1:]]
    return ColumnComparison(
        names=[column.name for column in columns],
        verdicts=[column.verdict for column in columns],
        metrics=_rows([column.metrics for column in columns]),
        settings=_differing([column.settings for column in columns]),
        data=_differing([column.data for column in columns]),
        resources=_rows([column.resources for column in columns]),
        num_common=len(common),
        differences=_adjusted([_difference(*pair, common) for pair in pairs]) if common else [],
        changed=[
            ChangedAnswer(
                *columns[0].questions[key],
                answers=[one.text for one in rows[key]],
                right=[one.right for one in rows[key]],
                refused=[one.refused for one in rows[key]],
            )
            for key in changed[:MAX_CHANGES]
        ],
        num_changed=len(changed),
        lines=[column.line for column in columns if column.line is not None],
        notes=list(notes),
        counts=[_counts(column, common) for column in columns],
        needs=[sorted(column.needs) for column in columns],
    )


def _counts(column: Column, common: Sequence[Hashable]) -> ColumnCounts:
    judged = [key for key in common if column.answers[key].right is not None]
    answers = [column.answers[key] for key in judged]
    right = [bool(answer.right) for answer in answers]
    refused = sum(answer.refused and not answer.right for answer in answers)
    # Without an index, no answer has a passage.
    misses = [answer.has_passage for answer in answers if answer.has_passage is not None and not answer.right]
    is_located = any(answer.has_passage is not None for answer in answers)
    low, high = share_interval(right, [column.clusters.get(key, index) for index, key in enumerate(judged)])
    return ColumnCounts(
        judged=len(judged),
        right=sum(right),
        wrong=len(judged) - sum(right) - refused,
        refused=refused,
        low=low,
        high=high,
        search_misses=misses.count(False) if is_located else None,
        reading_misses=misses.count(True) if is_located else None,
        invented=column.invented and column.invented[0],
        num_removed=column.invented and column.invented[1],
    )


def _rows(tables: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return a row for each name that has a value in some table."""
    names = dict.fromkeys(name for table in tables for name, value in table.items() if value is not None)
    return [Row(name, [table.get(name) for table in tables]) for name in names]


def _differing(tables: Sequence[Mapping[str, Any]]) -> list[Row]:
    rows = sorted(_rows(tables), key=lambda row: row.name)
    return [row for row in rows if any(value != row.values[0] for value in row.values)]


def _difference(first: Column, second: Column, common: Sequence[Hashable]) -> ColumnDifference:
    """Return the share of right answers of the second column minus that of the first."""
    judged = [key for key in common if None not in (first.answers[key].right, second.answers[key].right)]
    before, now = ([bool(column.answers[key].right) for key in judged] for column in (first, second))
    clusters = [second.clusters.get(key, index) for index, key in enumerate(judged)]
    pairs = list(zip(before, now, strict=True))
    found: dict[str, Any] = {**vars(compare_pair(now, before, clusters)), "first": first.name, "second": second.name}
    return ColumnDifference(**found, became_right=pairs.count((False, True)), became_wrong=pairs.count((True, False)))


def _adjusted(differences: list[ColumnDifference]) -> list[ColumnDifference]:
    """Return the differences with p-values adjusted for their number (Holm)."""
    adjusted = zip(differences, holm([one.p for one in differences]), strict=True)
    return [replace(one, p=p, more_questions=one.more_questions if p > LEVEL else None) for one, p in adjusted]
