"""What went wrong in a run and what was done about it: `healing.jsonl`, one object a line, never cut back.

{"step": 17, "name": "nan-gradients", "severity": "fault", "action": "skip", "documents": [4, 9], "place": "...", ...}

A resume cuts the log of the steps back to its checkpoint, but not this one: what was learned about the run stays known.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tunewell.records.events import read_events, with_numbers

HEALING = "healing.jsonl"

Severity = Literal["note", "warning", "fault"]
"""`note`: worth knowing; `warning`: something is wrong and the run goes on; `fault`: it cannot go on like this."""
ActionName = Literal["none", "skip", "split", "recompute", "rewind", "restart", "stop"]


@dataclass(frozen=True)
class HealingEntry:
    """One thing that was seen, and the answer to it."""

    step: int
    """The optimizer step it was seen at, counted from 1; 0 before the first."""
    name: str
    severity: Severity
    action: ActionName
    words: str
    """What happened and what was done, in one plain line."""
    numbers: dict[str, Any] = field(default_factory=dict)
    documents: list[int] = field(default_factory=list)
    """Documents of the corpus that are left out because of it."""
    since: int | None = None
    """Finished steps after which they are left out; earlier steps, taken again on a resume, have them."""
    is_explained: bool = False
    """Whether these documents alone did it, and others of the step were well: nothing else needs a remedy."""
    place: str | None = None
    """The layer and tensor that went bad first."""
    rewound_to: int | None = None
    """Finished steps of the checkpoint the run went back to."""
    rate_share: float | None = None
    """Share of the planned learning rate from there on, where it was changed."""
    precision: str | None = None
    """Numbers that are computed in from there on, where they were changed."""
    device: str | None = None
    """Where the run goes on, where that was changed."""
    micro_batch_tokens: int | None = None
    """Tokens computed at once from there on, where they were changed."""
    is_recomputing: bool = False
    """Whether layers are computed again on the way back from there on."""
    seconds_lost: float = 0.0
    """Time spent on what had to be done again or was left."""

    def as_json(self) -> dict[str, Any]:
        """Give the line of the log; what is empty is left out."""
        unsaid = {name: getattr(self, name) or None for name in ("is_explained", "is_recomputing", "seconds_lost")}
        told = asdict(self) | unsaid
        return {key: value for key, value in told.items() if value is not None and value not in ([], {})}


def read_healing(folder: Path) -> list[HealingEntry]:
    """Read what was seen and done in a run; nothing where nothing was. Raises UserError where the file is damaged."""
    path = folder / HEALING
    return list(_entries(read_events(path))) if path.is_file() else []


def _entries(lines: Iterable[dict[str, Any]]) -> Iterator[HealingEntry]:
    known = HealingEntry.__dataclass_fields__
    for line in lines:
        needed = {"step": 0, "name": "unknown", "severity": "note", "action": "none", "words": ""}
        yield HealingEntry(**{**needed, **{key: with_numbers(line[key]) for key in line if key in known}})
