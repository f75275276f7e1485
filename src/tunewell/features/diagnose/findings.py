"""The result of a diagnosis: findings with evidence, best first."""

from dataclasses import asdict, dataclass, field
from typing import Any

UNKNOWN = "unknown"
HEALTHY = "healthy"
SURE, LIKELY = 0.9, 0.7
"""Confidence from which a finding is called certain or likely. Measured on labelled logs: `benchmarks/diagnose.py`."""


@dataclass(frozen=True)
class Evidence:
    """A line that shows a failure. `line` is 0 if the evidence is not a line of a text."""

    line: int
    text: str
    file: str | None = None
    note: str = ""
    """What a rule computed from this line and others."""


@dataclass(frozen=True)
class DiagnosedFailure:
    """A failure, with its evidence, its cause and its fix."""

    id: str
    title: str
    family: str
    confidence: float
    cause: str
    fix: str
    evidence: tuple[Evidence, ...] = ()
    severity: str = "failure"
    """`failure` or `warning`."""
    next: str = ""
    """What to look at to be surer, or if the fix does not help."""
    caught_by: tuple[str, ...] = ()
    """Commands of tunewell that find this failure before or during a run."""
    because_of: str | None = None
    """Id of another finding that explains this one."""

    @property
    def certainty(self) -> str:
        """The confidence in words."""
        if self.id == UNKNOWN:
            return "not decided"
        return "certain" if self.confidence >= SURE else "likely" if self.confidence >= LIKELY else "possible"

    def as_json(self) -> dict[str, Any]:
        """Return the finding for `--json`."""
        return {**asdict(self), "certainty": self.certainty}


@dataclass(frozen=True)
class Diagnosis:
    """The findings about a text, a file or a run."""

    findings: tuple[DiagnosedFailure, ...]
    tool: str | None = None
    """The program that wrote the log, if it is known."""
    notes: tuple[str, ...] = ()
    """Facts about what was read: harmless warnings, skipped files."""
    num_lines: int = 0
    num_steps: int = 0
    num_judged: int = 0
    """Number of logged steps that the rules on series judged: in a log over 200 kB, a sample of them."""
    sources: tuple[str, ...] = field(default_factory=tuple)

    @property
    def status(self) -> str:
        """`healthy`, `unknown`, `warning` or `failure`."""
        if not self.findings:
            return HEALTHY
        if self.findings[0].id == UNKNOWN:
            return UNKNOWN
        return "failure" if any(finding.severity == "failure" for finding in self.findings) else "warning"

    @property
    def exit_code(self) -> int:
        """0 healthy, 3 unknown or warnings, 4 a failure is named."""
        return {HEALTHY: 0, "failure": 4}.get(self.status, 3)

    def as_json(self) -> dict[str, Any]:
        """Return the diagnosis for `--json`."""
        found = {**asdict(self), "findings": [finding.as_json() for finding in self.findings]}
        return {"status": self.status, **found, "exit_code": self.exit_code}
