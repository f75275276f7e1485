"""What came of judging a model: `report.json`, read and written; no logic."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tunewell.core.errors import UserError
from tunewell.core.files import stable_json, write_atomic
from tunewell.records.events import plain
from tunewell.records.plan import Chosen

FORMAT = "tunewell-report"
FORMAT_VERSION = 1
REPORT = "report.json"

Level = Literal["PASS", "WEAK", "FAIL"]
Fault = Literal["empty", "ends_at_once", "loops", "echo", "no_stop", "other_language", "control_tokens"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class Reason(_Record):
    """One thing that speaks against a model, with its numbers, an example, and what to do about it."""

    code: str
    """A word of the glossary: `answers_nothing`, `over_fitted`, ..."""
    level: Literal["WEAK", "FAIL"]
    what: str
    """One sentence with the numbers in it."""
    example: str | None = None
    next: str
    """The next thing to do: a command or a key of the config."""


class EvaluatedModel(_Record):
    """What was judged."""

    name: str
    kind: Literal["run", "adapter", "model"]
    path: str | None = None
    base: str | None = None
    """The model it was made from; None where there is nothing to compare with."""
    step: int | None = None
    """Of a run, the checkpoint that was judged."""
    because: str = ""
    """Why this checkpoint."""
    method: str = ""


class LossPair(_Record):
    """The mean loss over some supervised tokens, before and after. Not finite: the strings `nan`, `inf`."""

    name: str
    documents: int
    tokens: int
    base: float | None = None
    tuned: float


class Answer(_Record):
    """What a model answered to one question."""

    text: str
    num_tokens: int
    ended: bool
    """Whether it ended by itself, before the limit."""
    exact: bool = False
    contains: bool = False
    f1: float = 0.0
    right: bool | None = False
    """None where the reference is too long for an answer to be simply right or wrong."""
    faults: list[Fault] = Field(default_factory=list)


class AnsweredQuestion(_Record):
    """One held-out question with what should be said and what was."""

    document: int
    source: str
    row: int
    question: str
    reference: str
    base: Answer | None = None
    tuned: Answer


class AnswerCounts(_Record):
    """The answers of one model counted."""

    asked: int
    judged: int
    """Questions whose reference is short enough for an answer to be right or wrong."""
    exact: int
    contains: int
    right: int
    f1: float
    """The mean over all questions."""
    faults: dict[str, int]


class LogitChange(_Record):
    """How far the tuned model is from its base, on some held-out prompts."""

    largest: float
    """Largest difference of a logit."""
    prompts: int
    same_first_token: int
    """Prompts to which both would answer with the same first token."""


class Curve(_Record):
    """The course of training, as it was logged: (step, loss)."""

    train: list[tuple[int, float]] = Field(default_factory=list)
    held_out: list[tuple[int, float]] = Field(default_factory=list)
    best_step: int | None = None


class RowCounts(_Record):
    """Where the rows went."""

    rows: int
    documents: int
    held_out: int
    dropped: dict[str, int]
    tokens: int
    supervised: int
    sources: list[dict[str, Any]]


class Report(_Record):
    """Everything a judgement rests on; the pages made of it read nothing else."""

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    made_by: str
    made_at: str
    verdict: Level
    summary: str
    """One sentence that says why."""
    reasons: list[Reason] = Field(default_factory=list)
    """The worst first; none where the verdict is PASS."""
    subject: EvaluatedModel
    data: str
    """What was asked about: the held-out rows of a corpus, or a file."""
    held_out: LossPair | None = None
    by_source: list[LossPair] = Field(default_factory=list)
    everyday: LossPair | None = None
    """Loss on everyday text that has nothing to do with the rows."""
    base_tally: AnswerCounts | None = None
    tuned_tally: AnswerCounts | None = None
    exchanges: list[AnsweredQuestion] = Field(default_factory=list)
    change: LogitChange | None = None
    bad_weights: dict[str, int] = Field(default_factory=dict)
    """Tensors with values that are not finite, and how many."""
    thresholds: dict[str, Chosen[Any]] = Field(default_factory=dict)
    answer_tokens: Chosen[int] | None = None
    """The longest answer that was allowed."""
    curve: Curve = Curve()
    ledger: RowCounts | None = None
    plan: dict[str, Chosen[Any]] = Field(default_factory=dict)
    """How it was trained, value by value with reasons."""
    machine: dict[str, str] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    hashes: dict[str, str] = Field(default_factory=dict)
    repeat: list[str] = Field(default_factory=list)
    """Commands that repeat the training and the judgement."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """By stage."""
    lm_eval: dict[str, Any] = Field(default_factory=dict)
    healing: list[str] = Field(default_factory=list)
    """What went wrong while it was trained, what was done about it and what that cost, line by line."""
    advice: list[str] = Field(default_factory=list)
    """What to change so that the next run need not be healed."""
    notes: list[str] = Field(default_factory=list)
    next: str = ""


def write_report(folder: Path, report: Report) -> None:
    """Write the report in one move, without secrets."""
    text = stable_json(plain(report.model_dump(mode="python")))
    # Half a character, which rows and file names may hold, cannot be written as UTF-8.
    write_atomic(folder / REPORT, text.encode("utf-8", "replace").decode())


def read_report(folder: Path) -> Report:
    """Read a report; raise UserError when there is none or it cannot be read."""
    path = folder / REPORT
    if not path.is_file():
        raise UserError(
            f"there is no report in `{folder}`", where=f"looked for `{path}`", fix=f"run `tunewell validate {folder}`"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw.get("format_version", 0) > FORMAT_VERSION:
            raise UserError(f"`{path}` was made by a newer tunewell", fix="pip install --upgrade tunewell")
        return Report.model_validate(raw)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"`{path}` is damaged", where=str(error).splitlines()[0]) from error


PAGE, MARKDOWN = "report.html", "report.md"
EXIT_CODES = {"PASS": 0, "WEAK": 3, "FAIL": 4}


@dataclass(frozen=True)
class Validation:
    """A report, and where it lies."""

    report: Report
    folder: Path

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.report.verdict]

    @property
    def page(self) -> Path:
        return self.folder / PAGE
