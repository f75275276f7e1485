"""What is in force in a run because of what happened in it: documents left out, smaller micro-batches."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tunewell.records.events import EventLog
from tunewell.records.healing import HealingEntry
from tunewell.training.memory import Fitting


@dataclass
class Remedies:
    """What a run has been through: in force now, and written down."""

    path: Path
    """`healing.jsonl`, which is there once there is something in it."""
    on_trouble: Callable[[str], None] | None = None
    entries: list[HealingEntry] = field(default_factory=list)
    quarantine: dict[int, int] = field(default_factory=dict)
    """Documents that are left out, and the number of finished steps from which on they are."""
    fitting: Fitting = field(default_factory=Fitting)
    _log: EventLog | None = None

    def left_out(self, step: int) -> list[int]:
        """List the documents that are left out of a step; `step` counts the finished ones."""
        return [document for document, since in self.quarantine.items() if step >= since]

    def leave_out(self, documents: Iterable[int], *, since: int) -> None:
        """Leave documents out from a step on, or from an earlier one where that was said before."""
        for document in list(documents):
            self.quarantine[document] = min(since, self.quarantine.get(document, since))

    def take_over(self, entries: Iterable[HealingEntry]) -> None:
        """Go on with what an earlier sitting of the run has learned."""
        self.entries = list(entries)
        for entry in entries:
            self._enforce(entry)

    def write(self, entry: HealingEntry) -> None:
        """Write something down so that it outlives this process, and put it in force."""
        self.entries.append(entry)
        self._enforce(entry)
        if self._log is None:
            self._log = EventLog(self.path, on_trouble=self.on_trouble)
        self._log.append(entry.as_json())
        if entry.action != "none":
            self._log.sync()

    def close(self) -> None:
        """Close the file, where there is one."""
        if self._log is not None:
            self._log.close()

    def _enforce(self, entry: HealingEntry) -> None:
        if entry.precision or entry.device:
            self.quarantine.clear()  # numbers that overflowed elsewhere were not the documents' fault
        if entry.rewound_to is not None:
            self.leave_out(self.quarantine, since=entry.rewound_to)
        self.leave_out(entry.documents, since=entry.since if entry.since is not None else entry.step)
        if entry.micro_batch_tokens is not None:
            self.fitting.limit = entry.micro_batch_tokens
        if entry.is_recomputing:
            self.fitting.is_recomputing = True
