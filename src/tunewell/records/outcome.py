"""`outcome.json`: how a run ended."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from tunewell.core.files import stable_json, write_atomic
from tunewell.records.base import Record
from tunewell.records.events import plain

OUTCOME = "outcome.json"

Status = Literal["finished", "interrupted", "stopped", "failed"]


class HeldOutLosses(Record):
    """The held-out losses, if there was an evaluation."""

    first: float | None = None
    last: float | None = None
    best: float | None = None


class Outcome(Record):
    """The outcome of a run. Losses that are not finite are written as the strings `nan`, `inf` and `-inf`."""

    format: str = "tunewell-outcome"
    format_version: int = 1
    made_by: str
    status: Status
    """`finished`: all steps or early stopping; `interrupted`: signal; `stopped`: health rule; `failed`: error."""
    reason: str
    """The reason in one sentence."""
    steps: int
    """Finished optimizer steps, including those before a resume."""
    planned_steps: int
    first_loss: float | None = None
    last_loss: float | None = None
    held_out: HeldOutLosses = HeldOutLosses()
    best_step: int | None = None
    """The step with the best held-out loss."""
    seconds: float
    """Duration since the last start or resume."""
    tokens: int
    """Tokens trained on, including those before a resume."""
    supervised_tokens: int = 0
    signal: str | None = None
    artefacts: dict[str, str] = Field(default_factory=dict)
    """Written files, relative to the run folder."""
    allowed_changes: list[str] = Field(default_factory=list)
    """Changes since the checkpoint that `--allow-change` allowed."""
    healing: list[str] = Field(default_factory=list)
    """Problems, remedies and their cost, one line each; `healing.jsonl` has the numbers."""
    advice: list[str] = Field(default_factory=list)
    """Changes to the config that are recommended for the next run."""
    notes: list[str] = Field(default_factory=list)
    """Warnings, such as checkpoints that could not be saved or damage that was ignored."""


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Write the outcome atomically, without secrets."""
    write_atomic(folder / OUTCOME, stable_json(plain(outcome.model_dump())))
