"""Name the failure in the traceback of a command that crashed."""

from typing import Any

from tunewell.features.diagnose.diagnose import diagnose_text
from tunewell.features.diagnose.findings import LIKELY


def known_failure(trace: str) -> dict[str, Any] | None:
    """Return the likely failure in a traceback as JSON, or None."""
    found = [finding for finding in diagnose_text(trace).findings if finding.severity == "failure"]
    return found[0].as_json() if found and found[0].confidence >= LIKELY else None
