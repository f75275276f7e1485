"""The result of `tunewell.export`. It is separate from the other results because it imports torch."""

from tunewell.library.results import html_table
from tunewell.workflows.export import Exported


class ExportResult(Exported):
    """The result of `tunewell.export`: the artefacts and their verification."""

    @property
    def is_proven(self) -> bool:
        """Whether every artefact was verified to match the trained model."""
        return self.parity.is_ok

    def __repr__(self) -> str:
        names = [artefact.path for artefact in self.artefacts]
        return f"ExportResult(folder={str(self.folder)!r}, is_proven={self.is_proven}, artefacts={names})"

    def _repr_html_(self) -> str:
        state = "PROVEN" if self.is_proven else "NOT PROVEN"
        rows = [(artefact.kind, self.folder / artefact.path) for artefact in self.artefacts]
        return f"<p><b>{state}</b></p>" + html_table([*rows, ("next", self.next_command)])
