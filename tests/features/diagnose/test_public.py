"""Failures from public issues, labelled by a reader who had not seen the signatures.

The first answers on all of them are in `benchmarks/RESULTS.md`. Signatures were corrected afterwards, so this is no
longer a measurement: it keeps what is named from being lost. Each row has a few lines that programs printed, with the
address of its source; those that are told only in a person's words are left out. `unknown` rows have no class: a
confident name for one of them is wrong.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tunewell.features.diagnose.diagnose import diagnose_text
from tunewell.features.diagnose.findings import LIKELY, UNKNOWN

FILE = Path(__file__).with_name("data") / "public.jsonl"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])
def test_a_public_failure_is_named(row: dict[str, Any]) -> None:
    findings = diagnose_text(row["evidence"]).findings
    assert findings and findings[0].id == row["class"]
    assert row["source"].startswith("https://") and len(row["evidence"]) < 4096


def test_most_of_them_are_named_with_confidence() -> None:
    """An answer that is right but never likely helps nobody."""
    named = [row for row in ROWS if row["class"] != UNKNOWN]
    sure = [row["id"] for row in named if diagnose_text(row["evidence"]).findings[0].confidence >= LIKELY]
    assert len(sure) >= 0.9 * len(named)
