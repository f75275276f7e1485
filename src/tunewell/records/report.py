"""Read and write `report.json`: the result of an evaluation with its verdict."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from tunewell.core.errors import UserError
from tunewell.core.files import stable_json, write_atomic
from tunewell.records.base import Record, read_record
from tunewell.records.events import plain
from tunewell.records.plan import Chosen

REPORT = "report.json"

Level = Literal["PASS", "WEAK", "FAIL"]
Fault = Literal["empty", "ends_at_once", "loops", "echo", "no_stop", "other_language", "control_tokens"]


class Reason(Record):
    """One problem of a model: its numbers, an example, and what to do about it."""

    code: str
    """A term of the glossary: `answers_nothing`, `over_fitted`, ..."""
    level: Literal["WEAK", "FAIL"]
    what: str
    """One sentence with the numbers in it."""
    example: str | None = None
    next: str
    """What to do next: a command or a key of the config."""


class EvaluatedModel(Record):
    """The model that was evaluated."""

    name: str
    kind: Literal["run", "adapter", "model"]
    path: str | None = None
    base: str | None = None
    """The base model; None if there is none to compare with."""
    step: int | None = None
    """The evaluated checkpoint of a run."""
    because: str = ""
    """Why this checkpoint."""
    method: str = ""


class LossPair(Record):
    """The mean loss per supervised token before and after training. Not finite: the strings `nan`, `inf`."""

    name: str
    documents: int
    tokens: int
    base: float | None = None
    tuned: float


class Answer(Record):
    """The answer of one model to one question, with its scores."""

    text: str
    num_tokens: int
    ended: bool
    """Whether the model stopped before the length limit."""
    exact: bool = False
    contains: bool = False
    f1: float = 0.0
    right: bool | None = False
    """None if the reference is too long for an answer to be simply right or wrong."""
    faults: list[Fault] = Field(default_factory=list[Fault])


class AnsweredQuestion(Record):
    """One held-out question with its reference and the answers of both models."""

    document: int
    source: str
    row: int
    question: str
    reference: str
    base: Answer | None = None
    tuned: Answer


class AnswerCounts(Record):
    """Counts over the answers of one model."""

    asked: int
    judged: int
    """Questions with a reference short enough for an answer to be right or wrong."""
    exact: int
    contains: int
    right: int
    f1: float
    """The mean over all questions."""
    faults: dict[str, int]


class LogitChange(Record):
    """How far the logits of the tuned model are from its base's, on some held-out prompts."""

    largest: float
    """Largest difference of a logit."""
    prompts: int
    same_first_token: int
    """Prompts on which both have the same most likely first token."""


class Curve(Record):
    """The losses of a training, as logged: (step, loss)."""

    train: list[tuple[int, float]] = Field(default_factory=list[tuple[int, float]])
    held_out: list[tuple[int, float]] = Field(default_factory=list[tuple[int, float]])
    best_step: int | None = None


class RowCounts(Record):
    """What became of the rows: trained on, held out, or dropped by reason."""

    rows: int
    documents: int
    held_out: int
    dropped: dict[str, int]
    tokens: int
    supervised: int
    sources: list[dict[str, Any]]


class MetricResult(Record):
    """A metric function of the user, averaged over the held-out questions."""

    base: float | None = None
    tuned: float | None = None
    """None if no answer could be scored."""
    questions: int
    failed: int = 0
    """Answers on which the function failed; the mean leaves them out."""
    error: str | None = None
    """The first failure: `FILE row N: ERROR`."""


class Report(Record):
    """Everything about an evaluation; the HTML page and the Markdown are made of it alone."""

    format: str = "tunewell-report"
    format_version: int = 1
    made_by: str
    made_at: str
    verdict: Level
    summary: str
    """One sentence with the main reason and numbers."""
    reasons: list[Reason] = Field(default_factory=list[Reason])
    """The worst first; empty if the verdict is PASS."""
    subject: EvaluatedModel
    data: str
    """The evaluated rows: the held-out rows of a corpus, or a file."""
    held_out: LossPair | None = None
    by_source: list[LossPair] = Field(default_factory=list[LossPair])
    everyday: LossPair | None = None
    """Loss on everyday text, unrelated to the rows."""
    base_tally: AnswerCounts | None = None
    tuned_tally: AnswerCounts | None = None
    exchanges: list[AnsweredQuestion] = Field(default_factory=list[AnsweredQuestion])
    metrics: dict[str, MetricResult] = Field(default_factory=dict)
    """Metric functions of the user, by name."""
    change: LogitChange | None = None
    bad_weights: dict[str, int] = Field(default_factory=dict)
    """Tensors with values that are not finite, and their number."""
    thresholds: dict[str, Chosen[Any]] = Field(default_factory=dict)
    answer_tokens: Chosen[int] | None = None
    """Length limit of an answer."""
    curve: Curve = Curve()
    ledger: RowCounts | None = None
    plan: dict[str, Chosen[Any]] = Field(default_factory=dict)
    """The settings of the training, each with its reason."""
    machine: dict[str, str] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    hashes: dict[str, str] = Field(default_factory=dict)
    repeat: list[str] = Field(default_factory=list)
    """Commands that repeat the training and the evaluation."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """By stage."""
    lm_eval: dict[str, Any] = Field(default_factory=dict)
    healing: list[str] = Field(default_factory=list)
    """Problems during training, what was done about them and the cost, one per line."""
    advice: list[str] = Field(default_factory=list)
    """What to change so that the next run avoids them."""
    notes: list[str] = Field(default_factory=list)
    next: str = ""


def write_report(folder: Path, report: Report) -> None:
    """Write the report atomically, without secrets."""
    text = stable_json(plain(report.model_dump(mode="python")))
    # Rows and file names may hold lone surrogates, which UTF-8 cannot encode.
    write_atomic(folder / REPORT, text.encode("utf-8", "replace").decode())


def read_report(folder: Path) -> Report:
    """Read a report; raise UserError if it is missing or unreadable."""
    path = folder / REPORT
    if not path.is_file():
        raise UserError(
            f"there is no report in `{folder}`", where=f"expected `{path}`", fix=f"run `tunewell validate {folder}`"
        )
    return read_record(path, Report)


PAGE, MARKDOWN = "report.html", "report.md"
EXIT_CODES = {"PASS": 0, "WEAK": 3, "FAIL": 4}


@dataclass(frozen=True)
class Validation:
    """A report and its folder."""

    report: Report
    folder: Path

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.report.verdict]

    @property
    def page(self) -> Path:
        return self.folder / PAGE
