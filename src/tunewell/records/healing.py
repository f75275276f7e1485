"""`healing.jsonl`: the problems of a run and their remedies, one object per line.

{"step": 17, "name": "nan-gradients", "severity": "fault", "action": "skip", "documents": [4, 9], "place": "...", ...}

A resume truncates the log of steps to the checkpoint, but it never truncates this file, so no problem is forgotten.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tunewell.records.events import read_events, with_numbers

HEALING = "healing.jsonl"

Severity = Literal["note", "warning", "fault"]
"""`note`: information; `warning`: a problem that does not stop the run; `fault`: the run needs a remedy to continue."""
ActionName = Literal["none", "skip", "split", "recompute", "rewind", "restart", "stop"]


@dataclass(frozen=True)
class HealingEntry:
    """One problem and its remedy."""

    step: int
    """The optimizer step of the problem, counted from 1; 0 before the first step."""
    name: str
    severity: Severity
    action: ActionName
    words: str
    """The problem and the remedy in one line."""
    numbers: dict[str, Any] = field(default_factory=dict[str, Any])
    documents: list[int] = field(default_factory=list[int])
    """Documents of the corpus that are left out because of the problem."""
    since: int | None = None
    """Number of finished steps after which `documents` are left out. Earlier steps, if repeated, still use them."""
    is_explained: bool = False
    """Whether `documents` alone are the cause, so that no other remedy is needed."""
    place: str | None = None
    """The layer and the tensor in which NaN or infinity first appeared."""
    rewound_to: int | None = None
    """Number of finished steps of the checkpoint that the run went back to."""
    rate_share: float | None = None
    """The new learning rate as a share of the planned one. This and the next four fields are set only if changed."""
    precision: str | None = None
    device: str | None = None
    micro_batch_tokens: int | None = None
    is_recomputing: bool = False
    seconds_lost: float = 0.0
    """Time spent on steps that were repeated or discarded."""

    def as_json(self) -> dict[str, Any]:
        """Return the entry as a JSON object without empty values."""
        flags = {name: getattr(self, name) or None for name in ("is_explained", "is_recomputing", "seconds_lost")}
        payload = asdict(self) | flags
        return {key: value for key, value in payload.items() if value is not None and value not in ([], {})}


_NEEDED: dict[str, Any] = {"step": 0, "name": "unknown", "severity": "note", "action": "none", "words": ""}


def read_healing(folder: Path) -> list[HealingEntry]:
    """Return the entries of a run, or an empty list if there is no file; raise UserError if the file is damaged."""
    path, known = folder / HEALING, HealingEntry.__dataclass_fields__
    lines = read_events(path) if path.is_file() else []
    found = ({key: with_numbers(line[key]) for key in line if key in known} for line in lines)
    return [HealingEntry(**{**_NEEDED, **values}) for values in found]
