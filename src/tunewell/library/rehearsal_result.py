"""The result of `tunewell.rehearse`."""

from tunewell.core.units import duration, size_bytes
from tunewell.library.results import html_table
from tunewell.runs.rehearsal import Rehearsal as RehearsalRecord


class Rehearsal(RehearsalRecord):
    """The result of `tunewell.rehearse`: losses and answers before and after a few steps, memory and speed."""

    def __repr__(self) -> str:
        return (
            f"Rehearsal(passed={not self.problems}, loss={self.loss_before:.4f} -> {self.loss_after:.4f}, "
            f"rows={self.num_rows}, steps={len(self.steps)})"
        )

    def _repr_html_(self) -> str:
        memory = [("memory", size_bytes(self.peak_memory_bytes))] if self.peak_memory_bytes else []
        return html_table(
            [
                ("rehearsal", "FAIL" if self.problems else "PASS"),
                *self.problems,
                ("loss", f"{self.loss_before:.4f} -> {self.loss_after:.4f}"),
                *memory,
                ("whole run", f"about {duration(self.full_seconds)}"),
            ]
        )
