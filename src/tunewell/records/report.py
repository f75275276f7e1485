"""Read and write `report.json`: the result of an evaluation with its verdict."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tunewell.core.files import stable_json, write_atomic
from tunewell.records.base import Record, read_record
from tunewell.records.events import plain
from tunewell.records.plan import Chosen

REPORT = "report.json"

Level = Literal["PASS", "UNPROVEN", "WEAK", "FAIL"]
"""UNPROVEN: no difference to the base model, or to a constant answer, is shown."""
Fault = Literal["empty", "ends_at_once", "loops", "echo", "no_stop", "other_language", "control_tokens"]


class Reason(Record):
    """One problem of a model, with its numbers, an example and the next step."""

    code: str
    """A term of the glossary: `answers_nothing`, `few_right`, ..."""
    level: Literal["UNPROVEN", "WEAK", "FAIL"]
    what: str
    """One sentence that describes the problem, with its numbers."""
    example: str | None = None
    next: str
    """The next step for the user: a command or a config key."""


class EvaluatedModel(Record):
    """The model that was evaluated."""

    name: str
    kind: Literal["run", "adapter", "model"]
    path: str | None = None
    base: str | None = None
    """The model that it is compared with, or None if there is none."""
    base_role: str = "the base model"
    """`the base model` or, if the run went on from an earlier run or adapter, `where this run started`."""
    step: int | None = None
    """The step of the evaluated checkpoint, if the model is a run."""
    because: str = ""
    """The reason for choosing this checkpoint."""
    method: str = ""


class LossPair(Record):
    """The mean loss per supervised token before and after training; stored as `nan` or `inf` if it is not finite."""

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
    """Whether the answer is right, or None if this cannot be decided, as for a long reference."""
    is_refusal: bool = False
    """Whether the answer says that it is not known."""
    said: str = ""
    """The label or option in the answer, if the task has labels or options."""
    because: str = ""
    """The reason for `right`."""
    fields: dict[str, str] = {}
    """Name of a field -> `right`, `wrong`, `missing` or `extra`, for JSON and tool calls."""
    faults: list[Fault] = []


class AnsweredQuestion(Record):
    """One held-out question with its reference and the answers of both models."""

    document: int
    source: str
    row: int
    question: str
    reference: str
    key: str = ""
    """The expected answer, label or key; empty if answers cannot be judged."""
    key_origin: str = ""
    """For facts: `answers` or `value` (columns of the row), `derived` (from the references) or `whole reference`."""
    is_near: bool = False
    """Whether a training row has nearly the same question."""
    is_ambiguous: bool = False
    """Whether another row has the same question with another reference."""
    cluster: int | None = None
    """Number of the fact that the question is about; questions on one fact are one observation."""
    base: Answer | None = None
    tuned: Answer


class AnswerCounts(Record):
    """Counts over the answers of one model."""

    asked: int
    judged: int
    """Number of questions whose reference is short enough to decide whether an answer is right."""
    exact: int
    contains: int
    right: int
    f1: float
    """Mean F1 over all questions."""
    faults: dict[str, int]
    refused: int = 0
    """Number of answers that say that the answer is not known."""
    right_interval: tuple[float, float] | None = None
    """95% interval of the share of right answers, which treats questions on one fact as one observation."""


class KeyExample(Record):
    """The answer key of one question, for people."""

    question: str
    key: str
    because: str


class DifferenceRecord(Record):
    """The difference between two shares of right answers on the same questions."""

    difference: float
    """Share of the tuned model minus share of the base model, 0 to 1."""
    low: float
    """Lower end of the 95% interval."""
    high: float
    p: float
    """P-value of the cluster sign-flip test."""
    more_questions: int | None = None
    """Estimated number of additional questions that would show a difference of this size."""
    result: str
    """The result in one sentence."""


class ConstantAnswer(Record):
    """The score of always giving the most frequent reply of the training rows: the majority class."""

    text: str
    right: int
    judged: int
    difference: DifferenceRecord
    """Tuned model minus the constant answer."""


class MeasurePair(Record):
    """A further figure of the task for both models, usually from 0 to 1."""

    base: float | None = None
    tuned: float
    expected: float | None = None
    """The figure of the references, if the answers should be like them, as in the style of a chat."""
    is_share: bool = False


class Confusion(Record):
    """How often one label was answered instead of another."""

    expected: str
    said: str
    number: int


class OrdinaryAnswer(Record):
    """The answers to one everyday question or instruction, unrelated to the rows."""

    question: str
    kind: Literal["instruction", "greeting"]
    base: str = ""
    tuned: str = ""
    base_right: bool | None = None
    tuned_right: bool = False
    base_replies: bool | None = None
    """Whether the base model replies: its answer is neither empty nor a refusal."""
    tuned_replies: bool = False


class Forgotten(Record):
    """One measure of forgetting: the values of the base model and of the tuned model, and the limit."""

    name: str
    """`everyday text`, `everyday instructions` or `replies`."""
    base: float
    tuned: float
    limit: float
    is_damaged: bool
    result: str
    """The result in one clause, with its numbers."""


class JudgeRecord(Record):
    """The judge of a report: how it decided whether an answer is right."""

    name: str
    """The judge and its version."""
    origins: dict[str, int] = {}
    """For facts: number of questions by the origin of their key."""
    clusters: int
    """Number of clusters: facts, or questions that differ in more than their numbers."""
    examples: list[KeyExample] = []
    difference: DifferenceRecord | None = None
    """Tuned model compared with the base model; None if there is no base model."""

    def describe(self) -> str:
        """Return the origins of the keys: `38 keys derived from the references, 2 whole references`."""
        kinds = {
            "answers": "from the column `answers`",
            "value": "from the column `value`",
            "derived": "derived from the references",
        }
        parts = [
            f"{number:,} whole reference{'s' if number != 1 else ''}"
            if origin == "whole reference"
            else f"{number:,} {'key' if number == 1 else 'keys'} {kinds.get(origin, origin)}"
            for origin, number in self.origins.items()
        ]
        return ", ".join(parts)


class LogitChange(Record):
    """The difference between the logits of the tuned model and its base model, on some held-out prompts."""

    largest: float
    """Largest absolute difference of a single logit."""
    prompts: int
    same_first_token: int
    """Number of prompts for which both models have the same most likely first token."""


class Curve(Record):
    """The logged losses of a training run as pairs (step, loss)."""

    train: list[tuple[int, float]] = []
    held_out: list[tuple[int, float]] = []
    best_step: int | None = None


class RowCounts(Record):
    """The number of rows trained on, selected for choosing checkpoints, held out, and dropped by reason."""

    rows: int
    documents: int
    selected: int = 0
    held_out: int
    dropped: dict[str, int]
    tokens: int
    supervised: int
    sources: list[dict[str, Any]]

    @property
    def total(self) -> int:
        """The sum of the counts, which must be the number of rows."""
        return self.documents + self.selected + self.held_out + sum(self.dropped.values())


class MetricResult(Record):
    """The result of a user-defined metric function, averaged over the held-out questions."""

    base: float | None = None
    tuned: float | None = None
    """None if no answer could be scored."""
    questions: int
    failed: int = 0
    """Number of answers for which the function failed. They are excluded from the mean."""
    error: str | None = None
    """The first failure: `FILE row N: ERROR`."""


class Report(Record):
    """All results of an evaluation. The HTML page and the Markdown are generated from this record alone."""

    format: str = "tunewell-report"
    format_version: int = 1
    made_by: str
    made_at: str
    verdict: Level
    summary: str
    """One sentence with the main reason and numbers."""
    reasons: list[Reason] = []
    """The reasons, most severe first; empty if the verdict is PASS."""
    subject: EvaluatedModel
    data: str
    """The evaluated rows: the held-out rows of a corpus, or a file."""
    held_out: LossPair | None = None
    by_source: list[LossPair] = []
    everyday: LossPair | None = None
    """Loss on everyday text, unrelated to the rows."""
    base_tally: AnswerCounts | None = None
    tuned_tally: AnswerCounts | None = None
    exchanges: list[AnsweredQuestion] = []
    judge: JudgeRecord | None = None
    """None in reports of version 0.1.0: an answer was right if it contained the whole reference."""
    task: Chosen[str] | None = None
    """The task of the rows, whose scorer decides what is right."""
    measures: dict[str, MeasurePair] = {}
    """Further figures of the task, such as the macro-F1 of labels or the style of a chat, by name."""
    constant: ConstantAnswer | None = None
    asked_tally: AnswerCounts | None = None
    """The base model with the prompts of the rows, if it was also prompted with a list of labels, fields or tools."""
    hinted_tally: AnswerCounts | None = None
    """The base model, prompted with that list. The better of the two is `base_tally`."""
    is_base_hinted: bool = False
    confusions: list[Confusion] = []
    """The labels that the tuned model confuses, most frequent first."""
    fields: dict[str, dict[str, int]] = {}
    """For JSON and tool calls: how often each field was right, wrong, missing or extra."""
    loss_difference: DifferenceRecord | None = None
    """Held-out loss of the base model minus that of the tuned model, with its interval over the rows."""
    ordinary: list[OrdinaryAnswer] = []
    """Answers to everyday questions and instructions; those that changed most come first."""
    forgotten: list[Forgotten] = []
    trained_on: int = 0
    """Number of rows of a test file that are training rows. They are left out."""
    without_near: AnswerCounts | None = None
    """Counts of the tuned model without the questions that are nearly the same as a training row's."""
    changed_rules: list[str] = []
    """Rules of the verdict that the config changes, such as `min_right 0 (usually auto)`."""
    metrics: dict[str, MetricResult] = {}
    """Results of user-defined metric functions, by name."""
    change: LogitChange | None = None
    bad_weights: dict[str, int] = {}
    """Names of tensors with values that are not finite, and the number of such values."""
    thresholds: dict[str, Chosen[Any]] = {}
    answer_tokens: Chosen[int] | None = None
    """Length limit of an answer."""
    curve: Curve = Curve()
    ledger: RowCounts | None = None
    plan: dict[str, Chosen[Any]] = {}
    """The settings of the training run, each with its reason."""
    machine: dict[str, str] = {}
    versions: dict[str, str] = {}
    hashes: dict[str, str] = {}
    repeat: list[str] = []
    """Commands that repeat the training and the evaluation."""
    seconds: dict[str, float] = {}
    """Duration of each stage."""
    base_measured_at: str | None = None
    """When the base model was measured, if its outputs are those of an earlier evaluation; else None."""
    lm_eval: dict[str, Any] = {}
    healing: list[str] = []
    """Problems during training, their remedies and the time lost, one per line."""
    advice: list[str] = []
    """Changes to the config that would avoid these problems in the next run."""
    notes: list[str] = []
    next: str = ""


def write_report(folder: Path, report: Report) -> None:
    """Write the report atomically, without secrets."""
    text = stable_json(plain(report.model_dump(mode="python")))
    # Rows and file names may contain lone surrogates, which UTF-8 cannot encode.
    write_atomic(folder / REPORT, text.encode("utf-8", "replace").decode())


def read_report(folder: Path) -> Report:
    """Read a report; raise UserError if it is missing or unreadable."""
    missing, fix = f"there is no report in `{folder}`", f"run `tunewell validate {folder}`"
    return read_record(folder / REPORT, Report, missing=missing, fix=fix)


PAGE, MARKDOWN = "report.html", "report.md"
HEADLINES = {
    "PASS": "Better than its base model, and within all limits.",
    "WEAK": "Better than its base model, but not within all limits.",
    "FAIL": "Not usable.",
    "UNPROVEN": "Not shown to be better. The reasons name what is missing.",
}
"""What each verdict means, for the page of the report."""
EXIT_CODES = {"PASS": 0, "UNPROVEN": 3, "WEAK": 3, "FAIL": 4}
EXIT_NOT_VALIDATED = 3
"""The same as for WEAK, because nothing shows that the model is good."""


@dataclass(frozen=True)
class Validation:
    """A report and its folder."""

    report: Report
    folder: Path

    @property
    def verdict(self) -> Level:
        return self.report.verdict

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    @property
    def page(self) -> Path:
        return self.folder / PAGE

    def __repr__(self) -> str:
        return f"Validation(verdict={self.verdict!r}, page={str(self.page)!r})"

    def _repr_html_(self) -> str:
        from tunewell.core.html import render

        return render("tunewell.records", "validation.html", report=self.report, page=self.page)
