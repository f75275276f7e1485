"""The input of an artefact's proof: the export's folder, its records and its reference."""

from dataclasses import dataclass
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.core.progress import ProgressListener
from tunewell.export.proof.reference import Reference
from tunewell.records.parity import Proof


class ProofUnavailable(UserError):
    """The proof cannot be made because something outside of the export is missing. It does not count against it."""


@dataclass(frozen=True)
class ProofContext:
    """One export, as it is on disk."""

    folder: Path
    proof: Proof
    reference: Reference
    progress: ProgressListener
    base: str | None = None
    """The base model of an adapter, if it has moved since the export."""
    allow_pickle: bool = False

    @property
    def answer_tokens(self) -> int:
        """Return how many tokens the trained model could generate for each question.

        An answer that did not end has exactly that many. If all ended, one token more than the longest shows the same.
        """
        return max((len(question.answer) + question.ended for question in self.proof.questions), default=1)
