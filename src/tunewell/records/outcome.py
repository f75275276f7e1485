"""`outcome.json`: how a run ended."""

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tunewell.core.errors import UserError
from tunewell.core.files import stable_json, write_atomic
from tunewell.records.events import plain

FORMAT = "tunewell-outcome"
FORMAT_VERSION = 1
OUTCOME = "outcome.json"

Status = Literal["finished", "interrupted", "stopped", "failed"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)


class HeldOutLosses(_Record):
    """The held-out losses, if there was an evaluation."""

    first: float | None = None
    last: float | None = None
    best: float | None = None


class Outcome(_Record):
    """The outcome of a run. Losses that are not finite are written as the strings `nan`, `inf` and `-inf`."""

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    made_by: str
    status: Status
    """`finished`: all steps or early stopping; `interrupted`: by a signal; `stopped`: by health; `failed`: an error."""
    reason: str
    """One sentence."""
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
    """The signal that interrupted it."""
    artefacts: dict[str, str] = Field(default_factory=dict)
    """Written files, relative to the run folder."""
    allowed_changes: list[str] = Field(default_factory=list)
    """Changes since the checkpoint that `--allow-change` allowed."""
    healing: list[str] = Field(default_factory=list)
    """Problems, remedies and their cost, one line each; `healing.jsonl` has the numbers."""
    advice: list[str] = Field(default_factory=list)
    """What to change next time."""
    notes: list[str] = Field(default_factory=list)
    """Warnings: checkpoints that could not be saved, damage that was ignored."""


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Write the outcome atomically, without secrets."""
    write_atomic(folder / OUTCOME, stable_json(plain(outcome.model_dump())))


def read_outcome(folder: Path) -> Outcome | None:
    """Read the outcome of a run; None if there is none; raise UserError if it cannot be read."""
    path = folder / OUTCOME
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw.get("format_version", 0) > FORMAT_VERSION:
            raise UserError(f"`{path}` was made by a newer tunewell", fix="pip install --upgrade tunewell")
        return Outcome.model_validate(raw)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"`{path}` is damaged", where=str(error).splitlines()[0]) from error
