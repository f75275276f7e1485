"""The options of `compare`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CompareOptions:
    """The options of a comparison."""

    indexes: Sequence[str] = ()
    """Indexes from which each model also answers."""
    data: str | Path | Sequence[str | Path] | None = None
    """File of questions with answers; by default the held-out rows of the first run."""
    out: str | Path = "comparison"
    is_fresh: bool = False
    """Validate every run again. Only for a comparison of runs."""
    num_questions: int = 100
    num_passages: int | None = None
    device: str = "auto"
    judge: str | None = None
    """A model that judges the answers instead of their keys, as `URL#MODEL`. It needs `labels`."""
    labels: str | Path | None = None
    """File of answers that a person has judged, on which the judge is measured."""
