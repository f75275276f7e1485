"""Labelled failures from public reports: the right name first, and no healthy log flagged."""

import json
import os
from pathlib import Path

import pytest

from tunewell.features.diagnose.diagnose import diagnose_paths, diagnose_text

SHARED = Path(os.environ.get("TUNEWELL_SHARED", Path(__file__).parents[4] / "shared"))
pytestmark = pytest.mark.shared


def _names(text: str) -> list[str]:
    return [finding.id for finding in diagnose_text(text).findings] or ["healthy"]


@pytest.mark.slow
def test_the_labelled_rows_are_named() -> None:
    files = [SHARED / "atlas" / name for name in ("dev.jsonl", "dev2.jsonl")]
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    found = [(_names(row["evidence"]), row) for row in rows]
    assert sum(names[0] == row["class"] for names, row in found) >= 0.95 * len(rows)
    assert sum(row["class"] in names[:3] for names, row in found) >= 0.97 * len(rows)
    flagged = [
        row["id"] for names, row in found if row["class"] == "healthy" and names[0] not in ("healthy", "unknown")
    ]
    assert flagged == []
    for kind in {row["kind"] for row in rows}:
        own = [names[0] == row["class"] for names, row in found if row["kind"] == kind]
        assert sum(own) >= 0.8 * len(own), kind


@pytest.mark.parametrize(
    ("seed", "first", "named"),
    [
        (
            "000",
            None,
            {"formatting-func-conflict", "collator-ragged-or-nested", "num-proc-silent-empty", "config-not-applied"},
        ),
        (
            "001",
            None,
            {"renamed-argument", "bnb-no-cuda", "formatting-func-contract", "mps-unsupported-op", "oom-cuda"},
        ),
        (
            "002",
            "padding-waste",
            {"corrupted-venv", "credentials-missing", "config-missing-field", "config-not-applied"},
        ),
        ("003", "mps-nan-fp16", {"loss-zero-collapse", "initial-loss-implausible"}),
        (
            "004",
            "batch-too-large-slow",
            {
                "batch-too-large-slow",
                "runtime-preprocessing-stall",
                "device-cpu-placement",
                "dataloader-wsl",
                "precision-not-applied",
            },
        ),
    ],
)
def test_the_seeds_are_named_with_their_lines(seed: str, first: str | None, named: set[str]) -> None:
    [file] = (SHARED / "seeds").glob(f"{seed}_*.txt")
    findings = diagnose_paths([file]).findings
    names = [finding.id for finding in findings]
    assert named <= set(names)
    assert first is None or names[0] == first
    assert all(finding.evidence and finding.evidence[0].line > 0 for finding in findings)
